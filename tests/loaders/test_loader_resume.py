"""Exact resume: at every step, for every kind of dataset, on any number of ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest

from shardkit.loaders import StreamingLoader
from shardkit.loaders.config import BUSY_SECONDS
from shardkit.order.run_settings import Tail
from support.loader_data import KINDS, make_dataset
from support.resume import Batch, assert_exact_resume, assert_exact_resume_in_new_process

SAMPLES = 53
TAILS = get_args(Tail)


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("datasets")
    return {kind: make_dataset(folder / kind, kind) for kind in KINDS}


def make(path: Path, **arguments: Any) -> StreamingLoader:
    return StreamingLoader(
        path, **({"rank": 0, "world_size": 1, "return_ids": True, "window": 9} | arguments)
    )


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumed_at_any_step_goes_on_exactly(datasets: dict[str, Path], kind: str, tail: str) -> None:
    for world_size, batch_size in ((1, 4), (2, 3)):
        arguments = {"batch_size": batch_size, "rank": world_size - 1, "world_size": world_size, "tail": tail}
        epoch = -(-SAMPLES // (world_size * batch_size))
        assert_exact_resume(partial(make, datasets[kind], **arguments), steps=epoch + 5, tail_steps=8)


@pytest.mark.parametrize("shuffle", ["global", "none"])
def test_other_shuffles_resume_exactly(datasets: dict[str, Path], shuffle: str) -> None:
    assert_exact_resume(partial(make, datasets["mds"], batch_size=5, shuffle=shuffle), steps=14)


def test_extras_resume_exactly(datasets: dict[str, Path]) -> None:
    extras = {"labels": True, "position_ids": True, "document_ids": True, "cu_seqlens": True, "eos_id": 0}
    assert_exact_resume(partial(make, datasets["mds"], batch_size=5, tail="pad", **extras), steps=14)


class Training(StreamingLoader):
    """A loader whose loop has work of its own, so that a thread makes the batches."""

    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            yield batch
            time.sleep(1.5 * BUSY_SECONDS)


@pytest.mark.parametrize("kind", ["mds", "columns"])
def test_a_run_whose_batches_a_thread_makes_resumes_exactly(datasets: dict[str, Path], kind: str) -> None:
    place: dict[str, Any] = {"rank": 0, "world_size": 1}
    make_one = partial(Training, datasets[kind], batch_size=4, return_ids=True, prefetch_bytes=1, **place)
    assert_exact_resume(make_one, steps=16)


def test_without_prefetching_and_endless_the_run_is_the_same(datasets: dict[str, Path]) -> None:
    assert_exact_resume(partial(make, datasets["mds"], batch_size=4, endless=True), steps=20, tail_steps=5)
    assert_exact_resume(partial(make, datasets["mds"], batch_size=4, prefetch_batches=0), steps=16)


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["mds", pytest.param("columns", marks=pytest.mark.extended)])
def test_a_new_process_goes_on_exactly(datasets: dict[str, Path], kind: str, tmp_path: Path) -> None:
    arguments = {
        "dataset": str(datasets[kind]),
        "batch_size": 4,
        "rank": 0,
        "world_size": 1,
        "return_ids": True,
        "window": 9,
    }
    assert_exact_resume_in_new_process(arguments, tmp_path, steps=20, at=[0, 13])


def global_batches(
    path: Path, state: dict[str, object] | None, world_size: int, batch_size: int, tail: str, steps: int
) -> tuple[list[list[int]], dict[str, object]]:
    """The sample ids of the next global batches over all ranks, and the state after them."""
    loaders = [
        make(path, batch_size=batch_size, rank=rank, world_size=world_size, tail=tail, window=None)
        for rank in range(world_size)
    ]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    steps_of_rank = []
    for loader in loaders:
        ids: list[list[int]] = []
        while len(ids) < steps:
            for batch in loader:
                ids.append(batch["sample_id"].tolist())
                if len(ids) == steps:
                    break
        steps_of_rank.append(ids)
    states = [loader.state_dict() for loader in loaders]
    assert all(other == states[0] for other in states), "all ranks must keep the same state"
    for loader in loaders:
        loader.close()
    whole = [[i for ids in step for i in ids] for step in zip(*steps_of_rank, strict=True)]
    return whole, json.loads(json.dumps(states[0]))


@pytest.mark.parametrize("after", [1, 2, 3, 5])
@pytest.mark.parametrize("before", [1, 2, 3, 4])
def test_another_world_size_goes_on_with_the_same_batches(
    datasets: dict[str, Path], before: int, after: int
) -> None:
    """The global batch stays 60 / 5 = 12 or so: the sets of samples must be the same, batch by batch."""
    path = datasets["mds"]
    size = 60
    expected, _ = global_batches(path, None, 1, size, "pad", 6)
    begun, state = global_batches(path, None, before, size // before, "pad", 2)
    for where in (after, 1):
        rest, _ = global_batches(path, state, where, size // where, "pad", 4)
        assert [sorted(ids) for ids in begun + rest] == [sorted(ids) for ids in expected]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "runs",
    [
        [(1, 4), (2, 3), (3, 1), (5, 2)],
        [(4, 1), (1, 7), (3, 2), (1, 1)],
        [(3, 5), (5, 1), (2, 2), (1, 13)],
    ],
)
def test_each_epoch_is_delivered_exactly_once_whatever_changes_between_runs(
    datasets: dict[str, Path], kind: str, runs: list[tuple[int, int]]
) -> None:
    """Stop, change world size and batch size, go on, over and over, through three epochs."""
    state: dict[str, object] | None = None
    delivered: list[int] = []
    number = 0
    while len(delivered) < 3 * SAMPLES:
        world_size, batch_size = runs[number % len(runs)]
        batches, state = global_batches(
            datasets[kind], state, world_size, batch_size, "carry", 2 + number % 3
        )
        delivered += [i for ids in batches for i in ids]
        number += 1
        assert state["position"] == len(delivered)
    # Batches differ in size, so that their order inside does; the epoch's edges lie inside of batches.
    assert state is not None
    alone, _ = global_batches(datasets[kind], state | {"position": 0}, 1, 1, "carry", len(delivered))
    assert sorted(delivered) == sorted(ids[0] for ids in alone)
    counts = [delivered.count(i) for i in range(SAMPLES)]
    assert min(counts) >= 3


def test_a_dropped_tail_stays_dropped_when_the_next_run_has_smaller_batches(
    datasets: dict[str, Path],
) -> None:
    _, state = global_batches(datasets["mds"], None, 1, 10, "drop", 5)
    assert state["position"] == SAMPLES
    ids, _ = global_batches(datasets["mds"], state, 1, 1, "drop", SAMPLES)
    assert sorted(i for (i,) in ids) == list(range(SAMPLES))
