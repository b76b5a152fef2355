"""The streams of a loader: opened, mixed in proportions that may change, limited, and what is refused."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardkit.cache.memory import CacheMemory
from shardkit.datasets.dataset import Dataset, open_dataset
from shardkit.errors import ShardError, StateError, StreamExhaustedError
from shardkit.formats import mds
from shardkit.loaders import Stream, StreamingLoader
from shardkit.loaders.config import LoaderConfig, Run, grouped
from shardkit.loaders.streams import Opened, open_streams
from shardkit.order.exclusions import Exclusions
from shardkit.storage.memory import MemoryStore
from support.loader_data import make_dataset, token_rows
from support.remote_harness import fresh_url, put_folder
from support.resume import assert_equal, assert_exact_resume, batches, run

SIZES = {"web": 53, "code": 31, "books": 40}
WEIGHTS = {"web": 3, "code": 1, "books": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("streams")
    kinds = {"web": "mds", "code": "tar", "books": "mds_zstd"}
    return {
        name: make_dataset(folder / name, kinds[name], samples=samples) for name, samples in SIZES.items()
    }


@pytest.fixture(scope="module")
def data(folders: dict[str, Path]) -> dict[str, Dataset]:
    return {name: open_dataset(folder) for name, folder in folders.items()}


def streams(data: dict[str, Dataset], **options: dict[str, Any]) -> list[Stream]:
    return [Stream(data[name], WEIGHTS[name], name=name, **options.get(name, {})) for name in SIZES]


def make(given: Any, **arguments: Any) -> StreamingLoader:
    defaults = {"batch_size": 4, "rank": 0, "world_size": 1, "return_ids": True, "window": 9}
    return StreamingLoader(given, **grouped(defaults | arguments))


def drawn(loader: StreamingLoader, steps: int) -> list[tuple[int, int]]:
    """(stream, row) of the next samples; what was read is checked to be what its id says."""
    return [sample for batch in islice(batches(loader), steps) for sample in ids_of(batch)]


def ids_of(batch: dict[str, Any]) -> Iterator[tuple[int, int]]:
    for stream, row, tokens in zip(batch["stream_id"], batch["sample_id"], batch["tokens"], strict=True):
        if row >= 0:
            name = list(SIZES)[int(stream)]
            np.testing.assert_array_equal(tokens.numpy(), token_rows(SIZES[name])[int(row)])
        yield int(stream), int(row)


def places(batch: dict[str, Any]) -> tuple[list[int], list[int]]:
    return batch["stream_id"].tolist(), batch["sample_id"].tolist()


# What is opened.


@pytest.fixture(scope="module")
def url(folders: dict[str, Path]) -> str:
    url = fresh_url()
    put_folder(folders["web"], MemoryStore(url))
    return url


def the_one(opened: Opened) -> Dataset:
    (dataset,) = opened.streams.datasets
    return dataset


def test_a_path_a_stream_and_a_dataset_are_the_same(
    folders: dict[str, Path], url: str, tmp_path: Path
) -> None:
    config, folder = LoaderConfig(), folders["web"]
    opened = the_one(open_streams(folder, config, 1))
    assert the_one(open_streams(opened, config, 1)) is opened
    assert the_one(open_streams([Stream(opened)], config, 1)) is opened
    for where in (str(folder), [Stream(folder)], url, [Stream(url)]):
        assert the_one(open_streams(where, config, 1)).fingerprint == opened.fingerprint
    config = LoaderConfig(cache_dir=tmp_path, cache_bytes="3MB")
    shards = the_one(open_streams(url, config, 1)).shards
    assert shards is not None
    assert (shards.cache.capacity, shards.cache.is_shared) == (3_000_000, True)


def test_the_processes_of_a_machine_divide_its_memory(url: str) -> None:
    one, four = (the_one(open_streams(url, LoaderConfig(), processes)).shards for processes in (1, 4))
    assert one is not None
    assert four is not None
    assert isinstance(four.cache, CacheMemory)
    assert 3 < one.cache.capacity / four.cache.capacity < 5  # what is free changes meanwhile


@pytest.mark.parametrize("wrong", [[], ["a/path"], [Stream("a"), "b"]])
def test_what_is_no_stream_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="dataset must be a path, a Dataset or a list of Stream"):
        open_streams(wrong, LoaderConfig(), 1)


# What is delivered.


def test_sizes_may_be_numpys(folders: dict[str, Path]) -> None:
    def state(number: Callable[[int], Any]) -> dict[str, object]:
        streams = [Stream(folders[name], weight=number(WEIGHTS[name]), choose=number(40)) for name in SIZES]
        options = {name: number(4) for name in ("lanes", "window", "epoch_samples", "prefetch_batches")}
        with StreamingLoader(streams, batch_size=4, **grouped(options)) as loader:
            return loader.state_dict()

    assert json.loads(json.dumps(state(np.int64))) == json.loads(json.dumps(state(int)))


def test_local_shards_are_verified_on_request(tmp_path: Path) -> None:
    rows = token_rows(32)
    for name, hashes in (("proven", ["xxh64"]), ("bare", [])):
        with mds.MdsWriter(
            tmp_path / name, columns={"tokens": "ndarray:uint16:8"}, hashes=hashes, shard_bytes=400
        ) as writer:
            writer.write_rows(rows)
    with StreamingLoader(tmp_path / "proven", batch_size=8, run=Run(verify=True)) as loader:
        assert len(list(loader)) == 4
    damaged = sorted((tmp_path / "proven").glob("*.mds"))[1]
    with damaged.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"?")
    loader = StreamingLoader(tmp_path / "proven", batch_size=8, run=Run(verify=True))
    with loader, pytest.raises(ShardError, match=rf"{damaged.name}: xxh64"):
        list(loader)
    for dataset, problem in (
        (str(tmp_path / "bare"), r"bare has no hashes: write it with hashes=\['xxh64'\]"),
        (open_dataset(tmp_path / "proven"), "was opened without it: open it with verify=True"),
    ):
        with pytest.raises(ValueError, match=problem):
            StreamingLoader(dataset, batch_size=8, run=Run(verify=True))


@pytest.mark.parametrize("samples", [53, 106])  # the same again, without hashes to prove it; other shards
def test_rows_of_a_dataset_that_takes_another_ones_place_are_never_delivered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: int
) -> None:
    monkeypatch.setattr("shardkit.datasets.opened.MAX_OPEN_SHARDS", 2)
    make_dataset(tmp_path / "data", "mds")
    make_dataset(tmp_path / "other", "mds", samples=samples)
    with StreamingLoader(tmp_path / "data", batch_size=8) as loader:
        assert len(list(loader)) == len(loader)
        (tmp_path / "data").rename(tmp_path / "old")
        (tmp_path / "other").rename(tmp_path / "data")
        with pytest.raises(ShardError, match="was replaced after"):
            list(loader)


def test_each_block_of_the_weights_sum_has_exact_proportions(data: dict[str, Dataset]) -> None:
    with make(streams(data), batch_size=6) as loader:
        for batch in islice(batches(loader), 40):
            assert Counter(batch["stream_id"].tolist()) == {0: 3, 1: 1, 2: 2}
        assert loader.stream_samples() == {"web": 120, "code": 40, "books": 80}


def test_every_stream_has_its_own_epochs_shuffled_anew(data: dict[str, Dataset]) -> None:
    with make(streams(data)) as loader:
        samples = drawn(loader, 200)
    for number, size in enumerate(SIZES.values()):
        rows = [row for stream, row in samples if stream == number]
        epochs = [rows[i : i + size] for i in range(0, len(rows) - size, size)]
        assert len(epochs) >= 3
        edges = 8  # a batch is sorted by lane, so that an epoch's edge is where its batch is
        for epoch in epochs:
            assert len(set(epoch)) >= size - edges
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs)
        assert max(Counter(rows).values()) - min(Counter(rows).values()) <= 1


def test_the_same_dataset_twice_is_shuffled_in_two_ways(data: dict[str, Dataset]) -> None:
    with make([Stream(data["web"], name="a"), Stream(data["web"], name="b")], batch_size=53) as loader:
        samples = [
            (int(s), int(r)) for b in loader for s, r in zip(b["stream_id"], b["sample_id"], strict=True)
        ]
    one, two = ([row for stream, row in samples if stream == number] for number in (0, 1))
    assert sorted(one) == sorted(two) == list(range(53))
    assert one != two


def test_readers_of_different_kinds_are_put_together_as_one_reader_does(
    folders: dict[str, Path], data: dict[str, Dataset], tmp_path: Path
) -> None:
    """Foreign tars without constant stride are decoded, MDS is gathered: the batches are the same."""
    foreign = open_dataset(make_dataset(tmp_path / "foreign", "foreign_tar", samples=SIZES["code"]))
    mixed = [Stream(data["web"], 3), Stream(foreign, 1), Stream(data["books"], 2)]
    with make(mixed, columns=["tokens"]) as ours, make(streams(data)) as expected:
        pairs = zip(islice(batches(ours), 60), islice(batches(expected), 60), strict=True)
        for number, (got, batch) in enumerate(pairs):
            assert_equal({k: got[k] for k in batch}, batch, f"batch {number}")


def test_extras_and_padding_work_in_a_mixture(data: dict[str, Dataset]) -> None:
    extras = {"labels": True, "document_ids": True, "cu_seqlens": True, "eos_id": 0, "tail": "pad"}
    with make(streams(data), epoch_samples=50, batch_size=12, **extras) as loader:
        assert len(loader) == 5
        last = list(loader)[-1]
    assert last["is_padding"].tolist() == [False] * 2 + [True] * 10
    assert last["sample_id"][2:].eq(-1).all()
    assert last["stream_id"][2:].eq(-1).all()
    assert last["labels"][2:].eq(-100).all()


def test_an_epoch_is_as_many_samples_as_all_streams_have_unless_said(data: dict[str, Dataset]) -> None:
    assert len(make(streams(data))) == sum(SIZES.values()) // 4
    with make(streams(data), epoch_samples=20) as loader:
        assert len(loader) == 5
        assert sum(1 for _ in loader) == 5
        assert loader.epoch == 1


# Weights that change.


def test_weights_set_while_training_are_those_of_a_schedule_given_before(data: dict[str, Dataset]) -> None:
    change, weights = 50, {"code": 1, "books": 4}
    schedule = [(0, WEIGHTS), (change, weights)]
    with make(streams(data), schedule=schedule, endless=True) as loader:
        expected = run(loader, 40)
    for step in (0, 3, 11):  # batches behind it have been made already
        with make(streams(data), endless=True) as loader:
            got = []
            for number, batch in zip(range(40), loader, strict=False):
                got.append(batch)
                if number == step:
                    loader.set_weights(weights, at_position=change)
                state = json.loads(json.dumps(loader.state_dict()))
                if number >= step:
                    assert state == expected[number][1]
        for number, batch in enumerate(got):
            assert_equal(batch, expected[number][0], f"set at step {step}, batch {number}")


@pytest.mark.parametrize("tail", ["carry", "drop", "pad"])
@pytest.mark.parametrize("prefetch_batches", [0, 64])
def test_weights_set_at_the_last_batch_of_an_epoch_leave_the_loop_its_end(
    data: dict[str, Dataset], tail: str, prefetch_batches: int
) -> None:
    options = {"tail": tail, "prefetch_batches": prefetch_batches, "epoch_samples": 18}
    with make(streams(data), **options) as loader:
        counts = []
        for epoch in range(3):
            batches_of_epoch = len(loader)
            for number, _ in enumerate(loader):
                if number == batches_of_epoch - 1:
                    loader.set_weights([1, 1 + epoch, 1], at_position=loader.position)
            counts.append(number + 1 - batches_of_epoch)
        assert counts == [0, 0, 0]
        assert loader.epoch == 3


def test_weights_cannot_change_where_samples_were_delivered(data: dict[str, Dataset]) -> None:
    with make(streams(data)) as loader:
        drawn(loader, 3)
        with pytest.raises(ValueError, match="at_position 11 has been delivered: weights can change from 12"):
            loader.set_weights([1, 1, 1], at_position=11)
        with pytest.raises(ValueError, match="no stream is called 'prose'; the streams are web, code, books"):
            loader.set_weights({"prose": 1}, at_position=12)
        with pytest.raises(ValueError, match="2 weights for 3 streams"):
            loader.set_weights([1, 1], at_position=12)
        loader.set_weights([0, 1, 0], at_position=12)
        assert {stream for stream, _ in drawn(loader, 5)} == {1}
    with make(data["web"]) as loader, pytest.raises(ValueError, match="only one stream"):
        loader.set_weights([1], at_position=0)


def test_refused_weights_leave_the_running_iterator_and_the_mixture_as_they_were(
    data: dict[str, Dataset],
) -> None:
    given = [Stream(data["web"], 3), Stream(data["code"], 1), Stream(data["books"], 0, exclude=[(0, 40)])]
    with make(given) as expected:
        untouched = [places(batch) for batch in islice(batches(expected), 8)]
    with make(given) as loader:
        running = batches(loader)
        before = [places(batch) for batch in islice(running, 3)]
        state = loader.state_dict()
        with pytest.raises(ValueError, match="no samples"):
            loader.set_weights([1, 1, 1], at_position=loader.position)
        assert loader.state_dict() == state
        after = [places(batch) for batch in islice(running, 5)]
    assert before + after == untouched


def test_a_resumed_run_goes_on_with_the_saved_schedule_at_every_step(data: dict[str, Dataset]) -> None:
    schedule = [(0, WEIGHTS), (30, {"code": 1}), (62, [1, 1, 1])]
    assert_exact_resume(partial(make, streams(data), schedule=schedule), steps=24)
    with make(streams(data), schedule=schedule) as loader:
        states = [state for _, state in run(loader, 24)]
    with make(streams(data)) as loader:  # the streams' own weights are those that the schedule begins with
        loader.load_state_dict(states[10])
        assert loader.state_dict() == states[10]


def test_a_stream_may_be_added_while_training(data: dict[str, Dataset]) -> None:
    two, three = streams(data)[:2], [*streams(data)[:2], Stream(data["books"], 0, name="books")]
    with make(two) as loader:
        before = run(loader, 6)
    with make(three) as loader:
        loader.load_state_dict(before[3][1] | {})
        rest = [batch for batch, _ in run(loader, 2)]
        for got, (expected, _) in zip(rest, before[4:], strict=True):
            assert_equal(got, expected, "before the new stream has weight")
        loader.set_weights([1, 1, 2], at_position=24)
        assert Counter(stream for stream, _ in drawn(loader, 10)) == {0: 10, 1: 10, 2: 20}
    with make(streams(data)) as loader, pytest.raises(StateError, match="weights before position 16"):
        loader.load_state_dict(before[3][1])


# Limits and exclusions.


@pytest.mark.parametrize(
    ("limit", "allowed"), [({"repeat": 1}, 31), ({"choose": 40}, 40), ({"repeat": 1.5}, 46)]
)
def test_a_stream_that_may_not_deliver_more_is_announced_and_ends_the_run(
    data: dict[str, Dataset], limit: dict[str, Any], allowed: int
) -> None:
    about = 6 * allowed  # a sixth of the samples are its own
    with make(streams(data, code=limit), endless=True) as loader:
        end = loader.exhausted_at()
        assert end is not None
        assert about - 6 <= end < about + 6
        step = end // 4
        message = rf"stream 'code' is exhausted at step {step} \(position {end}\).* allows {allowed} samples"
        with pytest.warns(RuntimeWarning, match=message) as caught:
            iterator = iter(loader)
        assert caught[0].filename == __file__
        assert len([next(iterator) for _ in range(step)]) == step
        with pytest.raises(StreamExhaustedError, match=message):
            next(iterator)
        assert loader.stream_samples()["code"] <= allowed


def test_a_limit_that_is_not_reached_is_not_mentioned(data: dict[str, Dataset]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with make(streams(data, code={"repeat": 1}), epoch_samples=120) as loader:
            assert sum(1 for _ in loader) == 30
            schedule = [(0, WEIGHTS), (60, {"web": 1})]
        with make(streams(data, code={"repeat": 1}), schedule=schedule, endless=True) as loader:
            assert loader.exhausted_at() is None
            assert len(drawn(loader, 60)) == 240


def test_an_epoch_that_ends_with_its_streams_is_delivered_to_the_last_sample(
    data: dict[str, Dataset],
) -> None:
    """Weights like the sizes, each stream once: the padded last batch needs no more than there is."""
    once = [Stream(data[name], size, repeat=1) for name, size in SIZES.items()]
    with make(once, tail="pad", batch_size=10) as loader:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            samples = [
                (int(s), int(r)) for b in loader for s, r in zip(b["stream_id"], b["sample_id"], strict=True)
            ]
        assert sorted(sample for sample in samples if sample[1] >= 0) == [
            (number, row) for number, size in enumerate(SIZES.values()) for row in range(size)
        ]
        with pytest.warns(RuntimeWarning), pytest.raises(StreamExhaustedError):
            next(iter(loader))


def test_excluded_rows_are_never_delivered_and_part_of_the_state(
    data: dict[str, Dataset], tmp_path: Path
) -> None:
    listed = tmp_path / "removed.txt"
    listed.write_text("# asked for by their author\n3\n10:20\n")
    gone = {3, *range(10, 20)}
    rows_and_ranges: list[int | tuple[int, int]] = [3, (10, 20)]
    for exclude in (str(listed), rows_and_ranges, Exclusions.of(rows_and_ranges)):
        with make([Stream(data["web"], exclude=exclude)], batch_size=6) as loader:
            assert len(loader) == 7
            rows = Counter(row for batch in loader for row in batch["sample_id"].tolist())
            assert rows == Counter(set(range(53)) - gone)
            state = loader.state_dict()
        assert_exact_resume(partial(make, [Stream(data["web"], exclude=exclude)]), steps=14)
    with make(data["web"]) as loader, pytest.raises(StateError, match="without the rows of exclusion list"):
        loader.load_state_dict(state)
    with pytest.raises((ValueError, IndexError), match="53"):
        make([Stream(data["web"], exclude=[53])])
    with pytest.raises(ValueError, match="no samples"):
        make([Stream(data["web"], exclude=[(0, 53)]), Stream(data["code"])])


# What cannot be mixed.


def long_dataset(
    folder: Path, length: int, dtype: str = "uint16", eos_id: int = 0, digest: str = "aa"
) -> Path:
    folder.mkdir()
    rows = token_rows(40, length, dtype)
    mds.write_index(folder, [mds.write_rows_shard(folder, "shard.00000.mds", rows)])
    card = {"tokenizer": {"eos_id": eos_id, "digest": digest}}
    (folder / "dataset.json").write_text(json.dumps(card))
    return folder


def test_different_lengths_are_for_schedules_that_change_between_them(tmp_path: Path) -> None:
    short, long = (Stream(long_dataset(tmp_path / str(n), n), name=str(n)) for n in (8, 16))
    with pytest.raises(
        ValueError, match=r"different shapes in column 'tokens', \[8\] and \[16\].*mixed_lengths"
    ):
        make([short, long])
    schedule = [(0, {"8": 1}), (20, {"16": 1})]
    make_one = partial(make, [short, long], schedule=schedule, mixed_lengths=True)
    with make_one() as loader:
        lengths = [batch["tokens"].shape for batch in islice(batches(loader), 12)]
    assert lengths == [torch.Size([4, 8])] * 5 + [torch.Size([4, 16])] * 7
    assert_exact_resume(make_one, steps=12)
    with make([short, long], schedule=[(0, {"8": 1}), (18, {"16": 1})], mixed_lengths=True) as loader:
        iterator = iter(loader)
        assert [next(iterator)["tokens"].shape[1] for _ in range(4)] == [8] * 4
        message = r"up to position 20.*shapes, \(8,\) and \(16,\): .*multiple of the global batch"
        with pytest.raises(ValueError, match=message):
            next(iterator)


def test_streams_that_mean_different_things_are_refused(tmp_path: Path, data: dict[str, Dataset]) -> None:
    one = Stream(long_dataset(tmp_path / "one", 8))
    wide = Stream(long_dataset(tmp_path / "wide", 8, "uint32"))
    ends = Stream(long_dataset(tmp_path / "ends", 8, eos_id=1))
    words = Stream(long_dataset(tmp_path / "words", 8, digest="bb"))
    columns = Stream(make_dataset(tmp_path / "columns", "columns"))
    with pytest.raises(ValueError, match="store tokens in different types"):
        make([one, wide], dtype=None)
    with make([one, wide]) as loader:
        assert next(iter(loader))["tokens"].dtype == torch.int64
    with pytest.raises(ValueError, match=r"end documents with different ids, \[0, 1\]"):
        make([one, ends], labels=True)
    with pytest.raises(ValueError, match="'one' and 'words' were made by different tokenizers"):
        make([one, words])
    with pytest.raises(ValueError, match=r"different columns.*columns=\[...\]"):
        make([one, columns])
    with pytest.raises(ValueError, match="two streams are called 'a'"):
        make([Stream(data["web"], name="a"), Stream(data["code"], name="a")])
    with pytest.raises(ValueError, match="begin at position 0"):
        make(streams(data), schedule=[(5, WEIGHTS)])
    with pytest.raises(ValueError, match="weight"):
        make([Stream(data["web"], weight=0), Stream(data["code"], weight=0)])


def test_streams_without_names_are_called_after_their_folders(folders: dict[str, Path]) -> None:
    twice = [Stream(folders["web"]), Stream(str(folders["web"])), Stream(folders["code"])]
    with make(twice) as loader:
        assert list(loader.stream_samples()) == ["web#0", "web#1", "code"]


@pytest.mark.parametrize("tail", ["carry", "pad"])
def test_a_schedule_gives_one_stream_after_another_in_each_for(data: dict[str, Dataset], tail: Any) -> None:
    samples = [len(data["web"]), len(data["code"])]
    schedule = [(0, [1, 0]), (samples[0], [0, 1])]
    evaluated = [Stream(data["web"], 0), Stream(data["code"], 0)]
    with make(evaluated, schedule=schedule, shuffle="none", tail=tail, restart=True, lanes=None) as loader:
        expected = [(number, row) for number, count in enumerate(samples) for row in range(count)]
        for _ in range(2):
            found = [
                place
                for batch in loader
                for place in zip(batch["stream_id"].tolist(), batch["sample_id"].tolist(), strict=True)
                if place[1] >= 0
            ]
            assert found[: len(expected)] == expected
