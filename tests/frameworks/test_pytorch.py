"""DataLoaders with workers: the batches and states of a StreamingLoader, exactly."""

from __future__ import annotations

import gc
import json
import os
import pickle
import time
import traceback
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from shardkit.errors import StateError
from shardkit.loaders import Stream, StreamingLoader
from shardkit.loaders.config import grouped
from shardkit.loaders.pytorch import StreamingDataLoader, StreamingDataset, unchanged
from shardkit.storage.memory import MemoryStore
from support.default_cases import cases
from support.loader_data import make_dataset
from support.remote_harness import fresh_url, make_remote_kind, put_folder
from support.resume import Batch, State, assert_equal, assert_same, batches, run

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

SAMPLES = 53
SIZE = 4  # 13.25 batches: epochs of 13 and 14 batches with tail="carry"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("data")
    made = {kind: make_dataset(folder / kind, kind, samples=SAMPLES) for kind in ("mds", "columns")}
    return made | {"other": make_dataset(folder / "other", "mds", samples=19, shards=2)}


def arguments(**more: Any) -> dict[str, Any]:
    return {"batch_size": SIZE, "rank": 0, "world_size": 1, "return_ids": True, "window": 9} | more


def plain_loader(dataset: StreamingDataset, workers: int, **more: Any) -> DataLoader[Batch]:
    if workers and "multiprocessing_context" not in more:
        more["multiprocessing_context"] = "fork"
    more = {"batch_size": None, "num_workers": workers, "collate_fn": unchanged} | more
    return DataLoader(dataset, **more)


def exact_loader(dataset: StreamingDataset, workers: int, **more: Any) -> StreamingDataLoader:
    context = "fork" if workers else None
    return StreamingDataLoader(dataset, num_workers=workers, multiprocessing_context=context, **more)


def reference(path: Any, steps: int, **more: Any) -> list[tuple[Batch, State]]:
    """What a StreamingLoader gives, epoch after epoch, with the state after each batch."""
    with StreamingLoader(path, **grouped(arguments(**more))) as loader:
        return run(loader, steps)


def epoch_lengths(path: Any, epochs: int, **more: Any) -> list[int]:
    with StreamingLoader(path, **grouped(arguments(**more))) as loader:
        return [sum(1 for _ in loader) for _ in range(epochs)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("workers", "tail"), [(0, "carry"), (1, "carry"), (3, "drop"), (2, "pad")])
def test_a_dataloader_gives_each_epoch_exactly(data: dict[str, Path], workers: int, tail: str) -> None:
    lengths = epoch_lengths(data["mds"], 2, tail=tail)
    dataset = StreamingDataset(data["mds"], **grouped(arguments(tail=tail)))
    loader = plain_loader(dataset, workers)
    got = []
    for length in lengths:
        assert len(loader) == length
        got.append(list(iter(loader)))
    assert [len(epoch) for epoch in got] == lengths
    assert_same(list(chain(*got)), reference(data["mds"], sum(lengths), tail=tail), f"{workers} workers")


@pytest.mark.parametrize("prefetch_factor", cases([1, 5], [5]))
def test_workers_that_persist_go_on_with_the_next_epoch(data: dict[str, Path], prefetch_factor: int) -> None:
    lengths = epoch_lengths(data["mds"], 4)
    dataset = StreamingDataset(data["mds"], **grouped(arguments()))
    loader = plain_loader(dataset, 3, persistent_workers=True, prefetch_factor=prefetch_factor)
    got = [list(iter(loader)) for _ in lengths]
    assert [len(epoch) for epoch in got] == lengths
    assert_same(list(chain(*got)), reference(data["mds"], sum(lengths)), "persistent workers")


@pytest.mark.extended
def test_a_spawned_worker_gives_the_same_and_shares_where_it_is(data: dict[str, Path]) -> None:
    """One worker, for each takes seconds to import torch."""
    length, following = epoch_lengths(data["columns"], 2)
    expected = reference(data["columns"], length)
    dataset = StreamingDataset(data["columns"], **grouped(arguments()))
    loader = plain_loader(dataset, 1, multiprocessing_context="spawn")
    assert_same(list(iter(loader)), expected, "a spawned worker")
    assert len(dataset) == following
    assert dataset.state_dict(length) == expected[-1][1]


def test_an_endless_dataset_crosses_epochs(data: dict[str, Path]) -> None:
    dataset = StreamingDataset(data["mds"], **grouped(arguments(endless=True)))
    got = list(islice(plain_loader(dataset, 3), 31))
    assert_same(got, reference(data["mds"], 31), "endless")


def test_epochs_of_fewer_batches_than_workers(data: dict[str, Path]) -> None:
    loader = plain_loader(StreamingDataset(data["mds"], **grouped(arguments(batch_size=40))), 3)
    got = [len(list(iter(loader))) for _ in range(3)]
    assert got == epoch_lengths(data["mds"], 3, batch_size=40) == [2, 1, 1]


def test_ranks_and_mixtures_are_divided_among_workers_too(data: dict[str, Path]) -> None:
    streams = [Stream(data["mds"], weight=2), Stream(data["other"])]
    place = {"rank": 1, "world_size": 2}
    got = list(plain_loader(StreamingDataset(streams, **grouped(arguments(**place))), 2))
    assert_same(got, reference(streams, len(got), **place), "rank 1 of a mixture")


def test_workers_read_a_remote_dataset_through_one_cache(tmp_path: Path) -> None:
    """While the process that started them has threads at work on it, too."""
    url, folder = fresh_url(), make_remote_kind(tmp_path / "made", "mds_zstd")
    put_folder(folder, MemoryStore(url))
    expected = reference(folder, 18)
    dataset = StreamingDataset(url, **grouped(arguments(cache_dir=tmp_path / "cache", connections=2)))
    loader = exact_loader(dataset, 2)
    with StreamingLoader(dataset.loader.dataset, **grouped(arguments())) as other:
        next(iter(other))
        assert_same(list(islice(batches(loader), 18)), expected, "remote")
    loader.close()


def test_a_lock_that_is_held_while_workers_are_forked_does_not_stop_them(data: dict[str, Path]) -> None:
    dataset = StreamingDataset(data["mds"], **grouped(arguments()))
    with dataset.loader.dataset._lock:
        got = list(plain_loader(dataset, 1, timeout=60))
    assert_same(got, reference(data["mds"], len(got)), "forked under a lock")


class SlowStart:
    """Lets workers come late, each by its number of milliseconds."""

    def __init__(self, *milliseconds: int) -> None:
        self.milliseconds = milliseconds

    def __call__(self, worker: int) -> None:
        time.sleep(self.milliseconds[worker] / 1000)


def test_a_forked_worker_collects_none_of_the_loops_garbage(data: dict[str, Path], tmp_path: Path) -> None:
    """Of which CUDA events would abort it."""

    class Event:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            (tmp_path / str(os.getpid())).touch()

    def collect(number: int) -> None:
        gc.collect()

    dataset = StreamingDataset(data["mds"], **grouped(arguments()))
    loader = exact_loader(dataset, 2, worker_init_fn=collect)
    frozen = gc.get_freeze_count()
    gc.disable()
    try:
        Event()
        iterator = iter(loader)
        next(iterator)
        assert not list(tmp_path.iterdir())
        assert gc.get_freeze_count() == frozen
        gc.collect()
        assert [path.name for path in tmp_path.iterdir()] == [str(os.getpid())]
    finally:
        gc.enable()
        loader.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("delays", [(150, 0, 0), (0, 40, 150)])
def test_however_slowly_workers_start_they_begin_at_the_same_place(
    data: dict[str, Path], delays: tuple[int, ...]
) -> None:
    """One epoch is so short that the others have made all their batches when the last worker comes."""
    lengths = epoch_lengths(data["mds"], 2, batch_size=11)
    dataset = StreamingDataset(data["mds"], **grouped(arguments(batch_size=11)))
    loader = plain_loader(dataset, 3, worker_init_fn=SlowStart(*delays), prefetch_factor=8)
    got = [list(iter(loader)) for _ in lengths]
    assert_same(list(chain(*got)), reference(data["mds"], sum(lengths), batch_size=11), f"delays {delays}")


def test_a_seed_that_repeats_does_not_repeat_an_epoch(data: dict[str, Path]) -> None:
    lengths = epoch_lengths(data["mds"], 2)
    loader = plain_loader(StreamingDataset(data["mds"], **grouped(arguments())), 2)
    got = []
    for _ in lengths:
        torch.manual_seed(7)
        got += list(iter(loader))
    assert_same(got, reference(data["mds"], sum(lengths)), "the same seed")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("persistent", [False, True])
def test_a_plain_dataloader_left_early_starts_the_epoch_again(
    data: dict[str, Path], persistent: bool
) -> None:
    expected = reference(data["mds"], 4)
    dataset = StreamingDataset(data["mds"], **grouped(arguments()))
    loader = plain_loader(dataset, 2, persistent_workers=persistent)
    for _ in range(2):
        assert_same(list(islice(loader, 4)), expected, "left early")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_goes_on_from_a_number_of_batches(data: dict[str, Path], workers: int) -> None:
    """At every step of two epochs, through a state that passes through JSON."""
    lengths = epoch_lengths(data["mds"], 2)
    expected = reference(data["mds"], sum(lengths) + 3)
    dataset = StreamingDataset(data["mds"], **grouped(arguments()))
    loader = plain_loader(dataset, workers)
    for epoch, length in enumerate(lengths):
        for received, _ in enumerate(loader, 1):
            step = epoch * lengths[0] + received
            assert dataset.state_dict(received) == expected[step - 1][1]
        assert dataset.state_dict(0) == dataset.state_dict(length) == expected[step - 1][1]
        with pytest.raises(ValueError, match=f"has {length} batches"):
            dataset.state_dict(length + 1)
    for step in (5, lengths[0], lengths[0] + 2):
        dataset.load_state_dict(json.loads(json.dumps(expected[step - 1][1])))
        assert dataset.state_dict(0) == expected[step - 1][1]
        assert_same(list(islice(batches(loader), 3)), expected[step : step + 3], f"from step {step}")


def test_with_workers_a_dataset_asks_how_many_batches_the_loop_has(data: dict[str, Path]) -> None:
    dataset = StreamingDataset(data["mds"], **grouped(arguments()))
    list(plain_loader(dataset, 1))
    with pytest.raises(ValueError, match="number of batches"):
        dataset.state_dict()


def test_a_dataset_without_workers_is_a_streaming_loader(data: dict[str, Path]) -> None:
    expected = reference(data["mds"], 20)
    dataset = StreamingDataset(data["mds"], **grouped(arguments()))
    assert_same(list(islice(dataset, 3)), expected[:3], "left early")
    assert dataset.state_dict() == expected[2][1]
    copied = pickle.loads(pickle.dumps(dataset))
    assert_same(list(islice(plain_loader(dataset, 1), 2)), expected[3:5], "gone on by a worker")
    dataset.load_state_dict(expected[2][1])
    assert_same(list(islice(batches(dataset), 17)), expected[3:], "gone on")
    assert_same(list(islice(batches(copied), 17)), expected[3:], "a copy is on its own")


@pytest.mark.parametrize("workers", [0, 1, pytest.param(3, marks=pytest.mark.extended)])
def test_a_streaming_dataloader_resumes_exactly_at_every_step(data: dict[str, Path], workers: int) -> None:
    """Left in the middle again and again, its state right with each batch, across epochs."""
    expected = reference(data["mds"], 29)
    loader = exact_loader(StreamingDataset(data["mds"], **grouped(arguments())), workers)
    got: list[Batch] = []
    while len(got) < len(expected):
        for batch in islice(loader, 3 + len(got) % 7):
            got.append(batch)
            if len(got) <= len(expected):
                assert loader.state_dict() == expected[len(got) - 1][1], f"state {len(got) - 1}"
    assert_same(got[: len(expected)], expected, f"{workers} workers")
    loader.close()


def test_states_go_from_any_loader_to_any_other(data: dict[str, Path]) -> None:
    """Other numbers of workers; a StreamingLoader; and another world size, in sets of samples."""
    expected = reference(data["mds"], 25)
    state = json.loads(json.dumps(expected[7][1]))
    for workers in (0, 2):
        loader = exact_loader(StreamingDataset(data["mds"], **grouped(arguments())), workers)
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        assert_same(list(islice(batches(loader), 8)), expected[8:16], f"{workers} workers")
        state = json.loads(json.dumps(loader.state_dict()))
        with StreamingLoader(data["mds"], **grouped(arguments())) as plain:
            plain.load_state_dict(state)
            assert_same(list(islice(batches(plain), 3)), expected[16:19], "a StreamingLoader")
        state = json.loads(json.dumps(expected[7][1]))
    parts = [StreamingDataset(data["mds"], **grouped(arguments(rank=r, world_size=3))) for r in range(3)]
    after = []
    for part in parts:
        loader = exact_loader(part, 1)
        loader.load_state_dict(state)
        after.append([batch["sample_id"] for batch in islice(batches(loader), 2)])
    ids = [int(i) for step in zip(*after, strict=True) for piece in step for i in piece]
    assert sorted(ids) == sorted(int(i) for batch, _ in expected[8:14] for i in batch["sample_id"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_workers_that_persist_follow_a_state_and_an_early_end(data: dict[str, Path], tail: str) -> None:
    expected = reference(data["mds"], 30, tail=tail)
    dataset = StreamingDataset(data["mds"], **grouped(arguments(tail=tail)))
    loader = exact_loader(dataset, 2, persistent_workers=True)
    assert_same(list(islice(loader, 5)), expected[:5], "at first")
    assert_same(list(islice(batches(loader), 15)), expected[5:20], "after an early end")
    loader.load_state_dict(expected[2][1])
    assert_same(list(islice(loader, 5)), expected[3:8], "after a state")
    dataset.load_state_dict(expected[20][1])
    assert_same(list(islice(loader, 3)), expected[21:24], "after a state loaded into the dataset")
    loader.close()


def test_the_length_is_that_of_the_epoch_and_may_change(data: dict[str, Path]) -> None:
    lengths = epoch_lengths(data["mds"], 4)
    assert len(set(lengths)) > 1
    loader = exact_loader(StreamingDataset(data["mds"], **grouped(arguments())), 1, persistent_workers=True)
    for length in lengths:
        assert len(loader) == length
        assert len(list(islice(loader, 5))) == 5
        assert len(loader) == length
        assert len(list(iter(loader))) == length - 5
    loader.close()


def test_a_former_iterator_has_ended(data: dict[str, Path]) -> None:
    loader = exact_loader(StreamingDataset(data["mds"], **grouped(arguments())), 1)
    first = iter(loader)
    next(first)
    second = iter(loader)
    with pytest.raises(RuntimeError, match="stale iterator"):
        next(first)
    assert_same([next(second)], reference(data["mds"], 2)[1:], "the second iterator")


class Failing:
    """Fails on a batch in the worker that makes it."""

    def __call__(self, batch: Batch) -> Batch:
        if get_worker_info() is not None and 5 in batch["sample_id"]:
            raise ValueError("nothing doing")
        return batch


def test_a_workers_error_comes_where_its_batch_was_due(data: dict[str, Path]) -> None:
    expected = reference(data["mds"], 14)
    at = next(n for n, (batch, _) in enumerate(expected) if 5 in batch["sample_id"])
    loader = exact_loader(StreamingDataset(data["mds"], **grouped(arguments())), 2, convert_fn=Failing())
    iterator = iter(loader)
    got = list(islice(iterator, at))
    with pytest.raises(ValueError, match="nothing doing"):
        next(iterator)
    with pytest.raises(RuntimeError, match="stale iterator"):
        next(iterator)
    assert_same(got, expected[:at], "before the error")
    assert loader.state_dict() == expected[at - 1][1]


def test_another_order_reaches_workers_only_with_new_ones(data: dict[str, Path]) -> None:
    with StreamingLoader(data["mds"], **grouped(arguments(window=None, batch_size=12, lanes=3))) as saver:
        next(iter(saver))
        state = saver.state_dict()
    with StreamingLoader(data["mds"], **grouped(arguments(window=None))) as loader:
        assert state["lanes"] != loader.state_dict()["lanes"]
        loader.load_state_dict(state)
        expected = next(iter(loader))
    dataset = StreamingDataset(data["mds"], **grouped(arguments(window=None)))
    exact = exact_loader(dataset, 2, persistent_workers=True)
    plain = plain_loader(dataset, 2, persistent_workers=True)
    for each in (exact, plain):
        next(iter(each))
    exact.load_state_dict(state)
    assert_equal(next(iter(exact)), expected, "new workers")
    iterator: Any = iter(plain)
    with pytest.raises(StateError, match="create a new DataLoader"):
        next(iterator)
    iterator._shutdown_workers()  # the traceback would keep it, and its workers
    exact.close()


def test_one_workers_state_is_not_the_datasets(data: dict[str, Path]) -> None:
    dataset = StreamingDataset(data["mds"], **grouped(arguments()))
    with pytest.raises(StateError, match="state_of"):
        dataset.load_state_dict(dataset.state_dict() | {"worker": {}})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("size", [1, 3])
def test_a_dataloader_that_would_make_batches_of_batches_is_refused(
    data: dict[str, Path], workers: int, size: int
) -> None:
    class Own(StreamingDataset):
        def __iter__(self) -> Any:
            return super().__iter__()

    for dataset in (
        StreamingDataset(data["mds"], **grouped(arguments())),
        Own(data["mds"], **grouped(arguments())),
    ):
        with pytest.raises(TypeError, match="use StreamingDataLoader") as raised:
            next(iter(plain_loader(dataset, workers, batch_size=size)))
        traceback.clear_frames(raised.tb)  # which would keep an iterator, and its workers
        del raised


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.extended)])
def test_a_streaming_dataloader_seeks_as_the_loader_does(data: dict[str, Path], workers: int) -> None:
    expected = reference(data["mds"], 30)
    loader = exact_loader(StreamingDataset(data["mds"], **grouped(arguments())), workers)
    next(iter(loader))
    for step in (20, 3, 13, 14, 0):
        loader.seek(step * SIZE)
        assert loader.state_dict()["position"] == step * SIZE
        assert_same(list(islice(batches(loader), 4)), expected[step : step + 4], f"from batch {step}")
    loader.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_set_epoch_goes_to_an_epoch_or_stays_in_it(data: dict[str, Path], workers: int) -> None:
    for tail, length in (("drop", 13), ("pad", 14)):
        expected = reference(data["mds"], 3 * length, tail=tail)
        loader = exact_loader(StreamingDataset(data["mds"], **grouped(arguments(tail=tail))), workers)
        loader.set_epoch(1)
        assert_same(list(islice(loader, 5)), expected[length : length + 5], "moved")
        loader.set_epoch(1)
        assert_same(list(iter(loader)), expected[length + 5 : 2 * length], "stayed")
        loader.set_epoch(2)
        assert_same(list(islice(loader, 2)), expected[2 * length : 2 * length + 2], "the next")
        loader.close()


def test_an_epoch_that_may_not_be_the_datas_is_refused(data: dict[str, Path]) -> None:
    """Which a trainer computes from steps."""
    state = reference(data["mds"], 30)[-1][1]
    carry = exact_loader(StreamingDataset(data["mds"], **grouped(arguments())), 0)
    with pytest.raises(ValueError, match="epochs of 53 samples differ"):
        carry.set_epoch(1)
    list(iter(carry))
    carry.set_epoch(1)  # where it is
    placed = exact_loader(StreamingDataset(data["mds"], **grouped(arguments(tail="drop"))), 0)
    for by_state in (False, True):
        if by_state:
            placed.load_state_dict(state | {"tail": "drop"})
        else:
            placed.seek(26 * SIZE + 2)
        with pytest.raises(ValueError, match="is in epoch 2"):
            placed.set_epoch(0)
        placed.set_epoch(2)
    next(iter(placed))
    placed.set_epoch(0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_streaming_dataloader_follows_another_dataloader_over_its_dataset(
    data: dict[str, Path], workers: int
) -> None:
    """As Accelerate's skip_first_batches makes one, for the rest of an epoch."""
    expected = reference(data["mds"], 30)
    dataset = StreamingDataset(data["mds"], **grouped(arguments()))
    loader = exact_loader(dataset, workers)
    for begun in (0, 3):
        loader.seek(0)
        assert_same(list(islice(loader, begun)), expected[:begun], "its own")
        if workers == 0:
            assert_same(list(plain_loader(dataset, 0)), expected[begun:14], "the other")
        else:
            loader.seek(begun * SIZE)
            assert_same(list(plain_loader(dataset, workers)), expected[begun:14], "the other")
        assert loader.state_dict() == expected[13][1]
        assert_same(list(islice(loader, 5)), expected[14:19], "its own again")
    loader.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_answers_composer(data: dict[str, Path], workers: int) -> None:
    """`state_dict(samples of the epoch over all ranks, True)` at each batch, with either DataLoader."""
    world = {"rank": 1, "world_size": 2}
    expected = reference(data["mds"], 16, **world)
    for make in (exact_loader, plain_loader):
        dataset = StreamingDataset(data["mds"], **grouped(arguments(**world)))
        loader: Any = make(dataset, workers)
        step = 0
        for _ in range(2):
            for number, _ in enumerate(loader, 1):
                state = dataset.state_dict(number * SIZE * 2, True)
                assert state == expected[step][1], f"{make.__name__}, step {step}"
                assert dataset.state_dict(number * SIZE * 2, False) == state
                step += 1
            assert dataset.state_dict(0, True) == expected[step - 1][1]
        # Composer counts from the beginning of the epoch after a restart too.
        dataset.load_state_dict(expected[9][1])
        next(iter(loader))
        assert dataset.state_dict(4 * SIZE * 2, True) == expected[10][1]
        assert dataset.state_dict(SIZE * 2, False) == expected[10][1]
    with pytest.raises(ValueError, match="cannot be what this iteration has delivered"):
        dataset.state_dict(9, True)
    with pytest.raises(ValueError, match="began with batch 3 of its epoch"):
        dataset.state_dict(SIZE * 2, True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_starts_anew_in_each_for(data: dict[str, Path], workers: int) -> None:
    """Left early or not, under either DataLoader, with persistent workers too."""
    expected = reference(data["mds"], 14, tail="pad")
    for make in (plain_loader, exact_loader):
        for persistent in {False, workers > 0}:
            dataset = StreamingDataset(data["mds"], **grouped(arguments(tail="pad", restart=True)))
            loader: Any = make(dataset, workers, persistent_workers=persistent)
            for left_after in (3, 14, 14, 1, 14):
                assert len(loader) == 14
                assert_same(list(islice(loader, left_after)), expected[:left_after], make.__name__)
