"""Classes come as often as they should, each in an order of its own, and one dataset serves them all."""

from __future__ import annotations

import io
import tarfile
from collections import Counter
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.cache.belady import _merged
from shardkit.cache.memory import CacheMemory
from shardkit.datasets.dataset import open_dataset
from shardkit.errors import ShardError, StateError
from shardkit.formats import mds
from shardkit.loaders import Stream, StreamingLoader, balanced_streams, weighted_streams
from shardkit.loaders.config import grouped
from shardkit.order.exclusions import Exclusions
from shardkit.order.mixture import MAX_WEIGHT, Mixture, Schedule
from shardkit.order.order import Order, OrderSpec
from shardkit.order.residency import MixedUses
from shardkit.order.streams import MixedOrder, StreamOrder
from shardkit.storage.memory import MemoryStore
from support.loader_data import make_columns_dataset
from support.remote_harness import Remote, fresh_url, put_folder
from support.resume import assert_exact_resume, batches

SIZES = {3: 61, 7: 20, 9: 4, 12: 1}  # samples of each class
SAMPLES = sum(SIZES.values())
ALONE: dict[str, Any] = {"rank": 0, "world_size": 1, "return_ids": True, "window": 5}


def labels_of(samples: int = SAMPLES) -> npt.NDArray[np.int64]:
    """The class of each sample, shuffled."""
    labels = np.repeat(list(SIZES), list(SIZES.values()))
    return np.random.default_rng(3).permutation(np.resize(labels, samples))


def write(folder: Path, columns: dict[str, str], samples: list[dict[str, Any]], shard_bytes: int) -> Path:
    with mds.MdsWriter(folder, columns=columns, shard_bytes=shard_bytes) as writer:
        for sample in samples:
            writer.write(sample)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Columns of constant size in about eight shards: `number` says which sample it is."""
    labels = labels_of().tolist()
    samples = [{"label": label, "number": number} for number, label in enumerate(labels)]
    folder = tmp_path_factory.mktemp("balanced") / "data"
    return write(folder, {"label": "int", "number": "int"}, samples, 400)


def delivered(loader: StreamingLoader, steps: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """(stream, sample) of all that comes in so many batches."""
    found = list(islice(batches(loader), steps))
    return tuple(torch.cat([batch[key] for batch in found]).numpy() for key in ("stream_id", "sample_id"))  # type: ignore[return-value]


def test_classes_come_equally_often_in_every_block_and_epoch(folder: Path) -> None:
    streams = balanced_streams(folder, "label")
    assert [stream.name for stream in streams] == ["3", "7", "9", "12"]
    with StreamingLoader(streams, batch_size=4, **grouped({"epoch_samples": 88, **ALONE})) as loader:
        for _ in range(2):
            count = 0
            for batch in loader:
                assert sorted(batch["stream_id"].tolist()) == [0, 1, 2, 3]
                assert torch.equal(batch["label"], torch.tensor([3, 7, 9, 12])[batch["stream_id"]])
                assert torch.equal(batch["number"], batch["sample_id"])
                count += 1
            assert count == len(loader) == 22
        assert set(loader.stream_samples().values()) == {44}


def test_weights_are_shares_of_classes_and_those_not_named_get_none(folder: Path) -> None:
    streams = balanced_streams(folder, "label", weights={7: 0.5, 12: 0.1, 3: 0.2})
    with StreamingLoader(streams, batch_size=8, **grouped(ALONE)) as loader:
        stream, _ = delivered(loader, 20)
    assert {tuple(np.bincount(block, minlength=4)) for block in stream.reshape(-1, 8)} == {(2, 5, 0, 1)}


def test_a_class_comes_whole_before_one_of_its_samples_comes_again(folder: Path) -> None:
    labels = labels_of()
    with StreamingLoader(
        balanced_streams(folder, "label"), batch_size=6, **grouped({"lanes": 1, **ALONE})
    ) as loader:
        stream, sample = delivered(loader, 100)
    for number, (label, size) in enumerate(SIZES.items()):
        own = np.sort(np.flatnonzero(labels == label))
        came = sample[stream == number]
        passes = came[: len(came) // size * size].reshape(-1, size)
        assert len(passes) >= 2
        assert (np.sort(passes, axis=1) == own).all()
        assert len(own) < 3 or not (passes[0] == passes[1]).all()  # each pass has an order of its own


def test_resuming_is_exact_at_every_step_across_epochs(folder: Path) -> None:
    streams = balanced_streams(folder, "label", weights={3: 2, 7: 1, 9: 1, 12: 1})
    make = partial(StreamingLoader, streams, batch_size=13, **grouped({"prefetch_batches": 0, **ALONE}))
    assert_exact_resume(make, steps=9, tail_steps=3)


def test_a_global_batch_has_the_same_samples_on_any_number_of_ranks(folder: Path) -> None:
    streams = balanced_streams(folder, "label", weights={3: 3, 7: 1, 9: 2, 12: 1})
    found: dict[int, list[list[int]]] = {}
    for ranks in (1, 2, 4):
        of_rank = []
        for rank in range(ranks):
            place = ALONE | {"rank": rank, "world_size": ranks, "lanes": 2}
            with StreamingLoader(streams, batch_size=12 // ranks, **grouped(place)) as loader:
                of_rank.append(delivered(loader, 10)[1].reshape(10, -1))
        found[ranks] = np.sort(np.concatenate(of_rank, axis=1), axis=1).tolist()
    assert found[1] == found[2] == found[4]


def test_weighted_samples_come_as_often_as_the_sampler_of_torch_is_expected_to_draw_them(
    folder: Path,
) -> None:
    weights = np.random.default_rng(1).choice([0.0, 0.25, 1.0, 3.0], SAMPLES)
    draws = 6 * SAMPLES
    with StreamingLoader(weighted_streams(folder, weights), batch_size=SAMPLES, **grouped(ALONE)) as loader:
        _, sample = delivered(loader, 6)
    came = np.bincount(sample, minlength=SAMPLES)
    expected = draws * weights / weights.sum()
    # Within a stream, no sample comes twice more often than another one.
    assert np.abs(came - expected).max() < 2
    assert (came[weights == 0] == 0).all()
    torch.manual_seed(0)
    drawn = np.bincount(
        list(torch.utils.data.WeightedRandomSampler(weights.tolist(), draws)), minlength=SAMPLES
    )
    for value in np.unique(weights):  # its draws scatter, by about the root of their number
        own = weights == value
        assert abs(int(drawn[own].sum()) - int(came[own].sum())) <= 4 * np.sqrt(came[own].sum())


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(0.01, 100) | st.sampled_from([0.0, 1.0, 1 / 3]), min_size=SAMPLES, max_size=SAMPLES),
    st.integers(1, 60),
)
def test_rounding_to_levels_changes_no_weight_by_more_than_stated(
    folder: Path, weights: list[float], levels: int
) -> None:
    each = np.array(weights)
    if not each.any():
        return
    streams = weighted_streams(folder, each, levels=levels)
    assert len(streams) <= levels or len(streams) == 1
    got = np.zeros(SAMPLES)
    for stream in streams:
        kept = kept_rows(stream, SAMPLES)
        assert not got[kept].any()
        got[kept] = stream.weight / len(kept)
    assert sum(stream.weight for stream in streams) <= MAX_WEIGHT
    assert ((got > 0) == (each > 0)).all()
    positive = each[each > 0]
    stated = (positive.max() / positive.min()) ** (1 / levels) if len(set(positive)) > levels else 1.0
    error = (got / got.sum())[each > 0] / (positive / positive.sum())
    assert error.max() < stated * 1.001
    assert error.min() > 0.999 / stated


def kept_rows(stream: Stream, samples: int) -> npt.NDArray[np.int64]:
    if stream.exclude is None:
        return np.arange(samples)
    assert isinstance(stream.exclude, Exclusions)
    return stream.exclude.select(np.arange(samples - stream.exclude.count))


def test_strings_bytes_and_columns_beside_others_of_any_size_are_classes(tmp_path: Path) -> None:
    make_columns_dataset(tmp_path / "columns", 23)
    assert [s.name for s in balanced_streams(tmp_path / "columns", "label")] == list("0123456")
    animals = ["yak", "", "ape"]
    samples: list[dict[str, Any]] = [
        {"animal": animals[n % 3], "raw": [b"\xff", b"'"][n % 2], "size": n, "json": [None, n][n % 2]}
        for n in range(12)
    ]
    kinds = {"animal": "str", "raw": "bytes", "size": "float32", "json": "json"}
    dataset = open_dataset(write(tmp_path / "animals", kinds, samples, 200))
    streams = balanced_streams(dataset, "animal")
    assert [stream.name for stream in streams] == ["''", "ape", "yak"]
    assert [kept_rows(stream, 12).tolist() for stream in streams] == [[*range(k, 12, 3)] for k in (1, 2, 0)]
    with StreamingLoader(streams, batch_size=3, **grouped(ALONE)) as loader:
        for batch in islice(loader, 3):
            assert [["", "ape", "yak"][number] for number in batch["stream_id"]] == batch["animal"]
    raw = balanced_streams(dataset, "raw", weights={b"\xff": 1})
    assert [(stream.name, stream.weight) for stream in raw] == [("'", 0), ("\\xff", 1)]
    with pytest.raises(ValueError, match=r"'size' are float.*whole numbers, strings or bytes"):
        balanced_streams(dataset, "size")
    with pytest.raises(ShardError, match="sample 0 has no 'json'"):
        balanced_streams(dataset, "json")
    with pytest.raises(ValueError, match="has no 'gnu' in column 'animal'; its classes are '', 'ape', 'yak'"):
        balanced_streams(dataset, "animal", weights={"gnu": 2})
    with pytest.raises(ValueError, match="has no column 'breed'; it has animal, json, raw, size"):
        balanced_streams(dataset, "breed")


@pytest.mark.parametrize("column", ["cls", "label"])
def test_members_of_foreign_tars_are_classes(tmp_path: Path, column: str) -> None:
    for part in range(2):
        with tarfile.open(tmp_path / f"part-{part}.tar", "w") as tar:
            for number in range(part * 6, part * 6 + 6):
                array = io.BytesIO()
                np.save(array, np.int64(number % 3))
                members = {"cls": str(number % 3).encode(), "label.npy": array.getvalue(), "txt": b"t"}
                for extension, payload in members.items():
                    member = tarfile.TarInfo(f"{number:04d}.{extension}")
                    member.size = len(payload)
                    tar.addfile(member, io.BytesIO(payload))
    streams = balanced_streams(tmp_path, column)
    with StreamingLoader(streams, batch_size=3, columns=["cls"], **grouped(ALONE)) as loader:
        for batch in islice(batches(loader), 6):
            assert sorted(batch["stream_id"].tolist()) == [0, 1, 2]
            assert torch.as_tensor(batch["cls"]).tolist() == batch["stream_id"].tolist()


def test_more_values_than_streams_may_be_and_wrong_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    many = write(tmp_path / "many", {"number": "int"}, [{"number": n} for n in range(5000)], 1 << 20)
    with pytest.raises(ValueError, match="more than 4,096 different values"):
        balanced_streams(many, "number")
    for weights, problem in [
        (np.ones(3), "has 86 samples, but weights has shape \\[3\\]: give one number per sample"),
        (np.zeros(SAMPLES), "at least one must be above 0"),
        (np.full(SAMPLES, np.nan), "numbers of at least 0"),
        (np.full(SAMPLES, -1), "numbers of at least 0"),
    ]:
        with pytest.raises(ValueError, match=problem):
            weighted_streams(folder, weights)
    with pytest.raises(ValueError, match="levels must be from 1 to 4,096, not 0"):
        weighted_streams(folder, np.ones(SAMPLES), levels=0)
    with pytest.raises(ValueError, match="weights must be numbers of at least 0, not -1"):
        balanced_streams(folder, "label", weights={3: -1})
    with pytest.raises(ValueError, match="at least one weight must be above 0"):
        balanced_streams(folder, "label", weights={3: 0})


def test_the_state_names_each_class_and_refuses_other_classes(folder: Path) -> None:
    with StreamingLoader(balanced_streams(folder, "label"), batch_size=4, **grouped(ALONE)) as loader:
        next(iter(loader))
        state = loader.state_dict()
        assert loader.stream_samples() == dict.fromkeys(["3", "7", "9", "12"], 1)
    other = weighted_streams(folder, np.where(labels_of() == 3, 1.0, 2.0))
    with (
        StreamingLoader(other, batch_size=4, **grouped(ALONE)) as loader,
        pytest.raises(StateError, match="dataset of stream 1"),
    ):
        loader.load_state_dict(state)


# One dataset for all


def test_a_bucket_serves_all_classes_by_one_plan_that_fetches_each_shard_once(folder: Path) -> None:
    store = MemoryStore(fresh_url())
    put_folder(folder, store)
    remote = Remote.open(store)
    streams = balanced_streams(remote.dataset, "label")
    shards = len(remote.dataset.manifest.shards)
    assert shards > 5
    with StreamingLoader(streams, batch_size=4, **grouped(ALONE)) as loader:
        came = delivered(loader, 60)
    assert remote.shards.counters()["fetched_shards"] == shards
    with StreamingLoader(balanced_streams(folder, "label"), batch_size=4, **grouped(ALONE)) as local:
        assert np.array_equal(came, delivered(local, 60))


@pytest.mark.filterwarnings("ignore:cache_bytes of:RuntimeWarning")
@pytest.mark.parametrize("kind", ["fixed", "decoded"])
def test_a_cache_smaller_than_the_dataset_gives_the_same_batches(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    if kind == "decoded":
        make_columns_dataset(tmp_path / "columns", 40)
    source = folder if kind == "fixed" else tmp_path / "columns"
    store = MemoryStore(fresh_url())
    put_folder(source, store)
    remote = Remote.open(store, CacheMemory(2200))
    # A stream that is not of the shared dataset has a plan of its own beside it.
    more = [Stream(source, weight=2, name="whole")] if kind == "fixed" else []
    streams = balanced_streams(remote.dataset, "label") + more
    with StreamingLoader(streams, batch_size=5, **grouped(ALONE)) as loader:
        came = delivered(loader, 40)
    streams = balanced_streams(source, "label") + more
    with StreamingLoader(streams, batch_size=5, **grouped(ALONE)) as loader:
        assert np.array_equal(came, delivered(loader, 40))


def test_a_path_that_is_given_twice_is_opened_once(folder: Path) -> None:
    streams = [Stream(folder, name="a", exclude=[(0, 50)]), Stream(str(folder), name="b", exclude=[(50, 86)])]
    with StreamingLoader(streams, batch_size=4, **grouped(ALONE)) as loader:
        assert loader.datasets[0] is loader.datasets[1]
        stream, sample = delivered(loader, 30)
    assert ((sample < 50) == (stream == 1)).all()
    assert Counter(stream.tolist()) == {0: 60, 1: 60}


@pytest.mark.parametrize("lanes", [None, range(1, 3)])
def test_each_sample_lies_in_a_use_of_its_shard_that_is_short_where_it_can_be(lanes: range | None) -> None:
    rng = np.random.default_rng(2)
    epoch_samples = 40_000
    spec = OrderSpec(5, 4, 50, "window")
    sizes = np.full(200, 150)
    of_each = [sizes, rng.integers(0, 60, 200), np.where(np.arange(200) == 9, 300, 0)]
    orders = {number: Order(kept, spec) for number, kept in enumerate(of_each)}
    schedule = Schedule(((0, (5, 1, 1)), (50_000, (1, 0, 0)), (70_000, (2, 1, 1))))
    mixture = Mixture(11, schedule)
    parts = [StreamOrder(order, None, kept) for order, kept in zip(orders.values(), of_each, strict=True)]
    mixed = MixedOrder(parts, mixture, epoch_samples)
    uses = MixedUses(orders, mixture, epoch_samples)
    assert uses.shards == 200
    for epoch in range(3):
        found = uses.uses(epoch, lanes)
        begin = epoch * epoch_samples
        assert (np.diff(found.begin) >= 0).all()
        assert (begin <= found.begin).all()
        assert (found.end <= begin + epoch_samples).all()
        located = mixed.locate((begin, epoch_samples))
        own = np.isin(located.lane, lanes) if lanes is not None else np.ones(epoch_samples, dtype=bool)
        merged, by_shard = _merged(found)
        merged = merged.take(by_shard)
        shard, position = located.shard[own] % 200, located.position[own]
        keys = merged.shard.astype(np.int64) << 32 | merged.begin
        last_begun = np.searchsorted(keys, shard.astype(np.int64) << 32 | position, side="right") - 1
        assert (merged.shard[last_begun] == shard).all()
        assert (position < merged.end[last_begun]).all()
        # They would be of no use if all shards were in use all the time.
        assert (merged.end - merged.begin).sum() < 0.5 * 200 * epoch_samples


def test_where_there_are_too_many_intervals_every_shard_is_in_use_throughout() -> None:
    sizes = np.ones(70_000, dtype=np.int64)
    order = Order(sizes, OrderSpec(5, 1, 50, "window"))
    mixture = Mixture(1, Schedule.of([1] * 60))
    uses = MixedUses(dict.fromkeys(range(60), order), mixture, 60 * 70_000).uses(1)
    assert np.array_equal(uses.shard, np.arange(70_000))
    assert set(uses.begin.tolist()) == {60 * 70_000}
    assert set(uses.end.tolist()) == {2 * 60 * 70_000}
