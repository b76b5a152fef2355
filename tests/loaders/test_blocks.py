"""Blocks of batches from DataLoader workers: exact, wherever a loop is left, and never overwritten in use."""

from __future__ import annotations

import gc
import json
import os
import pickle
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardkit.errors import StreamExhaustedError
from shardkit.loaders import Stream, StreamingLoader
from shardkit.loaders.batch import Fields
from shardkit.loaders.config import grouped
from shardkit.loaders.gather import OutputMemory
from shardkit.loaders.producer import Group
from shardkit.loaders.pytorch import StreamingDataLoader, StreamingDataset, unchanged
from shardkit.loaders.worker_blocks import BlockMemory, Outbox, deal
from support.loader_data import make_dataset, make_rows
from support.resume import Batch, State, assert_equal, batches, run

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*repeat.*:RuntimeWarning"),
]

LENGTH = 4096  # int64: a batch of two rows is as large as the smallest array in shared memory
SAMPLES = 61
GLOBAL_BATCH = 4
BATCH_BYTES = GLOBAL_BATCH * LENGTH * 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blocks")
    make_rows(folder / "rows", SAMPLES, LENGTH)
    make_rows(folder / "other", 23, LENGTH)
    make_dataset(folder / "columns", "columns")
    return folder


def arguments(folder: Path, name: str) -> dict[str, Any]:
    """Of a loader: every tail, a mixture, derived fields, columns of any size, arrays of NumPy."""
    mixture = [Stream(folder / "rows", weight=3), Stream(folder / "other")]
    kinds: dict[str, dict[str, Any]] = {
        "carry": {"dataset": folder / "rows"},
        "drop": {"dataset": folder / "rows", "tail": "drop", "dtype": "stored"},
        "pad": {"dataset": folder / "rows", "tail": "pad", "labels": True, "cu_seqlens": True},
        "mixture": {"dataset": mixture, "endless": True, "labels": "shifted"},
        "columns": {"dataset": folder / "columns", "seq_lengths": True, "eos_id": 0},
        "numpy": {"dataset": folder / "rows", "tensors": "numpy", "doc_lens": True, "position_ids": True},
    }
    return {"return_ids": True, "window": 9} | kinds[name]


def dataloader(
    kinds: dict[str, Any], workers: int, *, rank: int = 0, world_size: int = 1, **more: Any
) -> StreamingDataLoader:
    dataset = StreamingDataset(
        batch_size=GLOBAL_BATCH // world_size, rank=rank, world_size=world_size, **grouped(kinds)
    )
    context = "fork" if workers else None
    return StreamingDataLoader(dataset, num_workers=workers, multiprocessing_context=context, **more)


@cache
def reference(folder: Path, name: str, steps: int = 70) -> list[tuple[Batch, State]]:
    """What a StreamingLoader gives."""
    with StreamingLoader(
        batch_size=GLOBAL_BATCH, rank=0, world_size=1, **grouped(arguments(folder, name))
    ) as loader:
        return run(loader, steps)


class Leg(NamedTuple):
    """A part of a run that ends at a checkpoint; in its middle, a loop is left and another one begun."""

    workers: int
    block_batches: int
    world_size: int
    persistent: bool
    prefetch_factor: int | None
    steps: tuple[int, int]


legs = st.builds(
    Leg,
    st.integers(0, 3),
    st.sampled_from([0, 1, 3, 64]),
    st.sampled_from([1, 1, 2]),
    st.booleans(),
    st.sampled_from([None, 1, 7]),
    st.tuples(st.integers(0, 9), st.integers(1, 14)),
)
names = st.sampled_from(["carry", "drop", "pad", "mixture", "columns", "numpy"])


def run_leg(folder: Path, name: str, leg: Leg, rank: int, state: State | None) -> list[tuple[Batch, State]]:
    more: dict[str, Any] = {"block_bytes": leg.block_batches * BATCH_BYTES // leg.world_size}
    if leg.workers:
        more |= {"persistent_workers": leg.persistent, "prefetch_factor": leg.prefetch_factor}
    kinds = arguments(folder, name)
    loader = dataloader(kinds, leg.workers, rank=rank, world_size=leg.world_size, **more)
    if state is not None:
        loader.load_state_dict(state)
    found = [pair for steps in leg.steps for pair in run(loader, steps)]
    loader.close()
    return found


def assert_exact(folder: Path, name: str, plan: list[Leg]) -> None:
    """Each batch and state is a StreamingLoader's; of several ranks, their samples together are."""
    expected, state = iter(reference(folder, name)), None
    for leg in plan:
        ranks = [run_leg(folder, name, leg, rank, state) for rank in range(leg.world_size)]
        for number, parts in enumerate(zip(*ranks, strict=True)):
            batch, state = next(expected)
            assert all(part[1] == state for part in parts), f"{leg}: state {number}"
            if leg.world_size == 1:
                assert_equal(parts[0][0], batch, f"{leg}, batch {number}")
            ids = [int(i) for part in parts for i in part[0]["sample_id"]]
            assert sorted(ids) == sorted(int(i) for i in batch["sample_id"]), f"{leg}, samples of {number}"


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(names, st.lists(legs, min_size=1, max_size=3))
def test_batches_and_states_are_those_of_a_loader_however_often_it_is_left(
    folder: Path, name: str, plan: list[Leg]
) -> None:
    """Other numbers of workers, sizes of blocks and world sizes at each restart."""
    assert_exact(folder, name, plan)


@pytest.mark.extended
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(names, st.lists(legs, min_size=2, max_size=3))
def test_many_more_of_these(folder: Path, name: str, plan: list[Leg]) -> None:
    assert_exact(folder, name, plan)


@pytest.mark.extended
def test_spawned_workers_share_the_memory_too(folder: Path) -> None:
    """One worker, for each takes seconds to import torch."""
    dataset = StreamingDataset(
        batch_size=GLOBAL_BATCH, rank=0, world_size=1, **grouped(arguments(folder, "carry"))
    )
    loader = StreamingDataLoader(dataset, num_workers=1, multiprocessing_context="spawn")
    for number, batch in enumerate(islice(batches(loader), 40)):
        assert_equal(batch, reference(folder, "carry")[number][0], f"batch {number}")
    assert memory_taken(loader) > BATCH_BYTES
    loader.close()


SHOWN: list[Callable[[Batch], Any]] = [
    lambda batch: batch["tokens"],
    lambda batch: batch["tokens"][1:, 3:],
    lambda batch: batch["tokens"].numpy()[:, ::5],
    lambda batch: memoryview(batch["tokens"].numpy()),
    lambda batch: batch["tokens"].view(torch.int32),
]


def seen(shown: Any) -> Any:
    return np.array(shown).tolist() if isinstance(shown, (memoryview, np.ndarray)) else shown.tolist()


def test_a_batch_that_somebody_holds_never_changes(folder: Path) -> None:
    loader = dataloader(arguments(folder, "carry"), 2)
    rng = random.Random(3)
    held: list[tuple[Any, Any]] = []
    iterator: Iterator[Batch] = iter(())
    for number, (batch, _) in enumerate(reference(folder, "carry")):
        if number % 20 == 0:  # a loop that is left, and its workers, leave their batches
            iterator = iter(batches(loader))
        got = next(iterator)
        if rng.random() < 0.4:
            show = rng.choice(SHOWN)
            held.append((show(got), seen(show(batch))))
        if len(held) > 9:
            del held[rng.randrange(len(held))]
        del got
        gc.collect(0)
        assert all(seen(shown) == expected for shown, expected in held[-3:])
    assert all(seen(shown) == expected for shown, expected in held)
    loader.close()


def memory_taken(loader: StreamingDataLoader) -> int:
    assert loader._memory is not None
    descriptor = loader._memory._descriptor
    assert descriptor is not None
    return os.fstat(descriptor).st_blocks * 512


def test_the_memory_of_batches_that_nobody_holds_is_used_again(folder: Path) -> None:
    kinds = arguments(folder, "carry") | {"endless": True}
    loader = dataloader(kinds, 2)
    for _ in islice(loader, 2000):
        pass
    assert BATCH_BYTES < memory_taken(loader) < 2000 * BATCH_BYTES / 4
    loader.close()


def test_a_forked_process_keeps_the_batches_that_it_saw(folder: Path) -> None:
    """It cannot tell the workers when it has done with them."""
    loader = dataloader(arguments(folder, "carry") | {"endless": True}, 1)
    iterator = iter(loader)
    for _ in islice(iterator, 20):
        pass
    batch, copied = next(iterator), None
    copied = batch["tokens"].clone()
    (go, start), (answer, tell) = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        os.read(go, 1)
        os.write(tell, b"same" if torch.equal(batch["tokens"], copied) else b"changed")
        os._exit(0)
    del batch
    for _ in islice(iterator, 300):
        pass
    os.write(start, b".")
    assert os.read(answer, 10) == b"same"
    os.waitpid(child, 0)
    loader.close()


def test_workers_of_other_loaders_leave_the_memory_to_be_used_again(folder: Path) -> None:
    """Of an evaluation, again and again, which see nothing of the batches that training holds."""
    loader = dataloader(arguments(folder, "carry") | {"endless": True}, 1, block_bytes=4 * BATCH_BYTES)
    iterator = iter(loader)
    for _ in range(8):
        batch = list(islice(iterator, 30))[-1]
        evaluation = dataloader(arguments(folder, "drop"), 1)
        assert len(list(islice(evaluation, 2))) == 2
        evaluation.close()
        del batch
    assert loader._memory is not None
    assert np.count_nonzero(loader._memory._bytes[:8192]) <= 4, "blocks on their way, or in use"
    loader.close()


@pytest.mark.parametrize("workers", [1, 3])
def test_what_ends_a_stream_comes_where_its_batch_was_due(folder: Path, workers: int) -> None:
    """In the middle of blocks: all batches before it are delivered, and the state counts them."""
    streams = [Stream(folder / "rows", weight=2, repeat=1), Stream(folder / "other", repeat=3)]
    kinds: dict[str, Any] = {"dataset": streams, "endless": True, "return_ids": True}
    expected: list[Batch] = []
    with StreamingLoader(batch_size=GLOBAL_BATCH, rank=0, world_size=1, **grouped(kinds)) as plain:
        with pytest.raises(StreamExhaustedError):
            expected.extend(plain)
        state = plain.state_dict()
    loader = dataloader(kinds, workers)
    got: list[Batch] = []
    with pytest.raises(StreamExhaustedError, match="Caught StreamExhaustedError in DataLoader worker"):
        got.extend(loader)
    assert [batch["sample_id"].tolist() for batch in got] == [b["sample_id"].tolist() for b in expected]
    assert loader.state_dict() == state
    loader.close()


def test_a_worker_that_is_killed_loses_nothing(folder: Path) -> None:
    expected = reference(folder, "carry")
    loader = dataloader(arguments(folder, "carry"), 2, persistent_workers=True)
    done = 0
    for number in (7, 4, 9):
        with suppress(RuntimeError):
            for batch in batches(loader):
                assert_equal(batch, expected[done][0], f"batch {done}")
                assert loader.state_dict() == expected[done][1]
                done += 1
                if number and not (number := number - 1):
                    iterator: Any = loader._iterator
                    os.kill(iterator._workers[done % 2].pid, signal.SIGKILL)
                if done == len(expected):
                    break
        state = json.loads(json.dumps(loader.state_dict()))
        loader.close()
        loader = dataloader(arguments(folder, "carry"), 2, persistent_workers=True)
        loader.load_state_dict(state)
        assert 0 < done < len(expected), "the worker's end was noticed"
    loader.close()


def test_pinned_batches_are_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the accelerator: torch's thread opens the blocks, and pins each batch by itself."""
    pinned: list[int] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.nbytes)
        return tensor.clone()

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    loader = dataloader(arguments(folder, "carry"), 2, pin_memory=True)
    for number, batch in enumerate(islice(batches(loader), 30)):
        assert_equal(batch, reference(folder, "carry")[number][0], f"batch {number}")
    loader.close()
    assert set(pinned) == {BATCH_BYTES, GLOBAL_BATCH * 8}


def collated(batch: Batch) -> Any:
    return batch["sample_id"].tolist()


def late_start(worker: int) -> None:
    time.sleep(0.15 * worker)


@pytest.mark.parametrize("convert_fn", [unchanged, Batch])
def test_a_loop_may_be_left_before_all_workers_have_come(folder: Path, convert_fn: Any) -> None:
    """Those of an iteration that is over neither begin it nor the next one."""
    loader = dataloader(
        arguments(folder, "carry"),
        2,
        persistent_workers=True,
        worker_init_fn=late_start,
        convert_fn=convert_fn,
    )
    done = 0
    for steps in (1, 0, 1, 12, 9):
        for batch in islice(batches(loader), steps):
            assert_equal(batch, reference(folder, "carry")[done][0], f"batch {done}")
            assert loader.state_dict() == reference(folder, "carry")[done][1], f"state {done}"
            done += 1
    assert done > 20
    loader.close()


def test_with_a_convert_function_batches_travel_alone(folder: Path) -> None:
    loader = dataloader(arguments(folder, "carry"), 2, convert_fn=collated)
    got = list(islice(batches(loader), 20))
    assert got == [batch["sample_id"].tolist() for batch, _ in reference(folder, "carry")[:20]]
    assert loader._memory is None
    loader.close()


@pytest.mark.parametrize(
    ("given_factor", "block_batches", "blocks"), [(None, 8, 2), (1, 8, 1), (2, 8, 2), (64, 8, 8), (64, 0, 64)]
)
def test_prefetch_factor_counts_batches(
    folder: Path, given_factor: int | None, block_batches: int, blocks: int
) -> None:
    """Of which a worker makes whole blocks, and two unless it is 1."""
    kinds, size = arguments(folder, "drop"), block_batches * GLOBAL_BATCH * LENGTH * 2
    loader = dataloader(kinds, 1, prefetch_factor=given_factor, block_bytes=size)
    assert loader.prefetch_factor == blocks


# The protocol alone, in one process.


def made_groups(counts: list[int], *, fails: bool) -> Iterator[Group]:
    """Groups of these numbers of batches; `fails` behind the last."""
    number = 0
    for count in counts:
        tokens = np.empty((count, 2, 8192), np.int32)
        tokens[:] = np.arange(number, number + count)[:, None, None]
        fields: Fields = {
            "tokens": tokens,
            "words": [f"batch {i}" for i in range(number, number + count)],
            "lengths": [np.full(i % 3, i) for i in range(number, number + count)],
            "number": tokens[:, 0, :1],
        }
        yield Group(fields, [], [(0, 0)] * count, np.empty((count, 2), np.int64), tokens.nbytes)
        number += count
    if fails:
        raise OSError("nothing to read")


def outbox(memory: BlockMemory, worker: int) -> Outbox:
    """As if in a worker of its own."""
    memory._outbox = None
    return memory.outbox(worker, OutputMemory())


def is_batch(number: int, batch: Batch) -> bool:
    return (
        bool((batch["tokens"] == number).all())
        and batch["words"] == f"batch {number}"
        and batch["lengths"].tolist() == [number] * (number % 3)
        and int(batch["number"]) == number
    )


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(1, 40), max_size=6),
    most=st.sampled_from([1, 2, 5, 16, 64]),
    arena=st.sampled_from([0, 256 << 10, 4 << 20, 64 << 20]),
    fails=st.booleans(),
    seed=st.integers(0, 9),
)
def test_blocks_hold_every_batch_once_and_memory_in_use_stays(
    counts: list[int], most: int, arena: int, fails: bool, seed: int
) -> None:
    """However groups are cut, whatever is kept, with too little memory, and before an error."""
    memory = BlockMemory(1, torch.from_numpy, arena_bytes=arena)
    rng = random.Random(seed)
    kept: list[tuple[int, Batch]] = []
    number, expected_size = 0, 1
    raised = False
    blocks = outbox(memory, 0).blocks(made_groups(counts, fails=fails), most)
    while True:
        try:
            block = next(blocks, None)
        except OSError:
            raised = True
            break
        if block is None:
            break
        assert block.count == expected_size or number + block.count == sum(counts)
        worker, got = pickle.loads(ForkingPickler.dumps(block))
        assert (worker, len(got)) == (0, block.count)
        kept += enumerate(got, number)
        number += len(got)
        expected_size = min(2 * expected_size, most)
        del got, block
        rng.shuffle(kept)
        del kept[rng.choice([5, 30, 200]) :]
        assert all(is_batch(i, batch) for i, batch in kept)
    assert number == sum(counts)
    assert raised == fails


@given(st.lists(st.integers(0, 12), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_batches_are_dealt_in_order_whatever_the_sizes_of_blocks(
    sizes: list[int], rng: random.Random
) -> None:
    """Each worker's blocks come in their order; between workers they may come in any."""
    total = sum(sizes)
    workers = len(sizes)
    queues = [
        [list(chunk) for chunk in chunks(list(range(worker, total, workers)), rng)]
        for worker in range(workers)
    ]
    source = []
    while any(queues):
        worker = rng.choice([w for w in range(workers) if queues[w]])
        source.append((worker, [{"number": i} for i in queues[worker].pop(0)]))
    assert [batch["number"] for batch in deal(iter(source), workers)] == list(range(total))


def chunks(values: list[int], rng: random.Random) -> Iterator[list[int]]:
    while values:
        size = rng.randint(1, 5)
        yield values[:size]
        values = values[size:]


def test_a_block_of_a_loader_that_is_gone_is_empty() -> None:
    memory = BlockMemory(2, torch.from_numpy)
    sent = ForkingPickler.dumps(next(outbox(memory, 1).blocks(made_groups([3], fails=False), 4)))
    del memory
    gc.collect()
    assert pickle.loads(sent) == (1, [])
