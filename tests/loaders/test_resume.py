"""Exact resume: at every step, for every kind of dataset, on any number of ranks.

For numbers of ranks, one reference run on one rank records the samples of every step's global batch and the
state after it. Runs on other numbers of ranks must give the same sets and, byte for byte, the same states;
runs begun from a recorded state, on any number of ranks, must give the sets and states that follow. So any
stop, on any number of ranks, goes on exactly on any other: all pairs are covered though none is run.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import signal
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import pytest
from torch.utils.data import DataLoader

from shardkit.datasets.dataset import Dataset, open_dataset
from shardkit.errors import ShardError, StateError
from shardkit.loaders import Stream, StreamingLoader
from shardkit.loaders.config import BUSY_SECONDS, grouped
from shardkit.loaders.pytorch import StreamingDataLoader, StreamingDataset, unchanged
from shardkit.order.run_settings import Tail
from shardkit.tools.audit.logs import audit_logs
from support.default_cases import cases
from support.loader_data import KINDS, make_dataset
from support.resume import (
    Batch,
    RankMaker,
    State,
    assert_equal,
    assert_exact_resume,
    assert_exact_resume_in_new_process,
    assert_same,
    batches,
    run,
    run_ranks,
    saved,
)

TAILS = get_args(Tail)
SAMPLES = 53


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dataset]:
    folder = tmp_path_factory.mktemp("small")
    return {kind: open_dataset(make_dataset(folder / kind, kind)) for kind in KINDS}


def make(data: Dataset | list[Stream], **arguments: Any) -> StreamingLoader:
    return StreamingLoader(
        data, **grouped({"rank": 0, "world_size": 1, "return_ids": True, "window": 9} | arguments)
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumed_at_any_step_goes_on_exactly(small: dict[str, Dataset], kind: str, tail: str) -> None:
    for world_size, batch_size in ((1, 4), (2, 3)):
        arguments = {"batch_size": batch_size, "rank": world_size - 1, "world_size": world_size, "tail": tail}
        epoch = -(-SAMPLES // (world_size * batch_size))
        assert_exact_resume(partial(make, small[kind], **arguments), steps=epoch + 5, tail_steps=8)


EXTRAS = {"labels": True, "position_ids": True, "document_ids": True, "cu_seqlens": True, "eos_id": 0}


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": "global"},
        {"shuffle": "none"},
        {"tail": "pad", **EXTRAS},
        {"endless": True},
        {"prefetch_batches": 0},
    ],
    ids=lambda options: "-".join(options),
)
def test_any_options_resume_exactly(small: dict[str, Dataset], options: dict[str, Any]) -> None:
    assert_exact_resume(partial(make, small["mds"], batch_size=5, **options), steps=14, tail_steps=5)


class Training(StreamingLoader):
    """A loader whose loop has work of its own, so that a thread makes the batches."""

    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            yield batch
            time.sleep(1.5 * BUSY_SECONDS)


@pytest.mark.parametrize("kind", ["mds", "columns"])
def test_a_run_whose_batches_a_thread_makes_resumes_exactly(small: dict[str, Dataset], kind: str) -> None:
    place: dict[str, Any] = {"rank": 0, "world_size": 1}
    make_one = partial(
        Training, small[kind], batch_size=4, return_ids=True, **grouped({"prefetch_bytes": 1, **place})
    )
    assert_exact_resume(make_one, steps=16)


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["mds", "columns"])
def test_a_new_process_goes_on_exactly(small: dict[str, Dataset], kind: str, tmp_path: Path) -> None:
    options = {"batch_size": 4, "rank": 0, "world_size": 1, "return_ids": True, "window": 9}
    arguments = {"dataset": small[kind].location, **options}
    assert_exact_resume_in_new_process(arguments, tmp_path, steps=20, at=[0, 13])


# Positions without a state: consumed samples, epochs, and every `for` at the first sample.


def variants(small: dict[str, Dataset]) -> dict[str, dict[str, Any]]:
    """Data and options of loaders that are sent to other positions."""
    mixed = [
        Stream(small["mds"], 2, name="a", exclude=[(3, 9), 20]),
        Stream(small["mds_zstd"], 1, name="b"),
    ]
    schedule = [(0, {"a": 2, "b": 1}), (33, {"a": 1, "b": 1})]
    return {
        "carry": {"data": small["mds"]},
        "drop": {"data": small["tar"], "tail": "drop"},
        "pad": {"data": small["mds"], "tail": "pad", "shuffle": "global"},
        "none": {"data": small["columns"], "shuffle": "none"},
        "mixture": {"data": mixed, "schedule": schedule, "epoch_samples": 41},
        "excluded": {"data": [Stream(small["mds"], exclude=[0, (5, 8)])]},
    }


VARIANTS = ["carry", "drop", "pad", "none", "mixture", "excluded"]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_seek_to_any_position_continues_as_the_run_that_came_there(
    small: dict[str, Dataset], name: str
) -> None:
    arguments = variants(small)[name]
    with make(**arguments, batch_size=3) as loader:
        begin = saved(loader)
        reference = run(loader, 40)
    states = [begin, *(state for _, state in reference)]
    with make(**arguments, batch_size=3) as loader:
        for number in random.Random(5).sample(range(39), 39):  # forwards and backwards
            loader.seek(np.int64(states[number]["position"]))
            assert saved(loader) == states[number]
            (batch, state), *_ = run(loader, 1)
            assert_equal(batch, reference[number][0], f"batch {number}")
            assert state == states[number + 1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_seek_between_batches_continues_with_the_sample_at_the_position(
    small: dict[str, Dataset], name: str
) -> None:
    arguments = variants(small)[name] | {"lanes": 3}  # else they follow from the batch size
    with make(**arguments, batch_size=1) as loader:
        single = {state["position"]: places(batch) for batch, state in run(loader, 120)}
    with make(**arguments, batch_size=3) as loader, make(**arguments, batch_size=3) as other:
        for position in range(115):
            loader.seek(position)
            assert loader.position == position
            (batch, after), *_ = run(loader, 1)
            other.load_state_dict(saved(other) | {"position": position, "epoch_batches": 0})
            assert_equal(batch, next(iter(other)), f"position {position}")
            if name not in ("drop", "pad"):
                delivered = [single[place] for place in range(position + 1, after["position"] + 1)]
                assert sorted(places(batch)) == sorted(place for (place,) in delivered)


@pytest.mark.parametrize("name", VARIANTS)
def test_set_epoch_goes_to_the_first_batch_of_another_epoch_and_leaves_its_own_alone(
    small: dict[str, Dataset], name: str
) -> None:
    arguments = variants(small)[name]
    firsts: dict[int, State] = {}
    with make(**arguments, batch_size=4) as loader:
        for epoch in range(5):
            assert loader.epoch == epoch
            firsts[epoch] = saved(loader)
            for _ in loader:
                pass
    with make(**arguments, batch_size=4) as loader:
        for epoch in (3, 1, 4, 0, 2):
            loader.set_epoch(epoch)
            assert saved(loader) == firsts[epoch]
            iterator = iter(loader)
            next(iterator)
            loader.set_epoch(epoch)
            next(iterator)
            assert loader.epoch == epoch
    with make(**arguments, batch_size=4, endless=True) as loader:
        loader.seek(20)
        loader.set_epoch(3)
        assert loader.position == 20


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("stop", [None, 0, 1, 5])
def test_restart_begins_every_for_at_the_first_sample(
    small: dict[str, Dataset], name: str, stop: int | None
) -> None:
    arguments = variants(small)[name]
    with make(**arguments, batch_size=4) as loader:
        reference = run(loader, len(loader))
    with make(**arguments, batch_size=4, restart=True) as loader:
        for _ in range(3):
            assert len(loader) == len(reference)
            assert_same(islice(loader, stop), reference[:stop], f"stopped at {stop}")
        loader.set_epoch(2)
        loader.load_state_dict(reference[2][1])
        assert_same(loader, reference, "after a state was loaded")
        with pytest.raises(ValueError, match="restart"):
            loader.seek(8)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.extended)])
def test_restart_begins_every_for_of_a_dataloader_at_the_first_sample(
    small: dict[str, Dataset], workers: int
) -> None:
    options: dict[str, Any] = {"batch_size": 4, "rank": 0, "world_size": 1, "window": 9, "return_ids": True}
    with make(small["mds"], batch_size=4) as loader:
        reference = run(loader, len(loader))
    for persistent in {False, workers > 0}:
        dataset = StreamingDataset(small["mds"], restart=True, **grouped(options))
        loaders: list[Any] = [
            StreamingDataLoader(dataset, num_workers=workers, persistent_workers=persistent),
            DataLoader(
                dataset,
                batch_size=None,
                num_workers=workers,
                persistent_workers=persistent,
                collate_fn=cast(Any, unchanged),
            ),
        ]
        for one in loaders:
            for stop in (None, 3, None, 1, None):
                assert len(one) == len(reference)
                assert_same(islice(one, stop), reference[:stop], f"{type(one).__name__} stopped at {stop}")
        dataset.close()


@pytest.mark.parametrize("position", [-1, 1 << 62])
def test_a_seek_beyond_all_positions_is_refused(small: dict[str, Dataset], position: int) -> None:
    with make(small["mds"], batch_size=4) as loader, pytest.raises(ValueError, match="consumed_samples"):
        loader.seek(position)


def test_epochs_of_fewer_or_more_samples_than_the_dataset_has_only_cut_the_same_order(
    small: dict[str, Dataset],
) -> None:
    with make(small["mds"], batch_size=4, endless=True) as loader:
        plain_run = run(loader, 60)
    for samples in (11, 20, 130):
        make_one = partial(make, small["mds"], batch_size=4, epoch_samples=samples)
        with make_one() as loader:
            assert [len(loader), sum(1 for _ in loader)] == [-(-samples // 4)] * 2
        with make_one() as loader:
            assert_same([batch for batch, _ in run(loader, 60)], plain_run, f"epochs of {samples}")
        assert_exact_resume(make_one, steps=12, tail_steps=4)
        with make(small["mds"], batch_size=4) as loader:  # takes the length of epochs from the state
            with make_one() as other:
                loader.load_state_dict(run(other, 9)[-1][1])
            assert_equal(next(iter(loader)), plain_run[9][0], "resumed without epoch_samples")
            assert loader.state_dict()["epoch_samples"] == samples


# Optimizer steps of several batches, of sizes that change.

RAMP = [(0, 12), (30, 24), (100, 48)]  # the changes are at 36 and at 108, where steps begin
STEP_EDGES = [0, 12, 24, 36, 60, 84, 108, 156, 204, 252]


def step_loader(data: Dataset | list[Stream], rank: int, world_size: int, size: int, **more: Any) -> Any:
    return make(
        data,
        rank=rank,
        world_size=world_size,
        batch_size=size,
        **({"global_batch": RAMP, "endless": True, "lanes": 3} | more),
    )


def run_steps(
    data: Dataset | list[Stream], world_size: int, size: int, steps: int, state: State | None = None
) -> list[tuple[list[tuple[int, int]], State]]:
    """(sorted samples of the step over all ranks, state after it) of the next steps."""
    of_ranks = []
    for rank in range(world_size):
        with step_loader(data, rank, world_size, size) as loader:
            if state is not None:
                loader.load_state_dict(state)
            of_ranks.append(
                [
                    ([len(step), *(p for batch in step for p in places(batch))], saved(loader))
                    for step in islice(loader.steps(), steps)
                ]
            )
    found = []
    for step in zip(*of_ranks, strict=True):
        assert all((own[0], after) == (step[0][0][0], step[0][1]) for own, after in step)
        found.append((sorted(place for own, _ in step for place in own[1:]), step[0][1]))
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["carry", "mixture"])
def test_steps_have_the_same_samples_and_states_for_any_ranks_and_batches_killed_anywhere(
    small: dict[str, Dataset], name: str
) -> None:
    data: Any = small["mds"] if name == "carry" else variants(small)["mixture"]["data"]
    expected = run_steps(data, 1, 12, 9)
    assert [len(samples) for samples, _ in expected] == [b - a for a, b in pairwise(STEP_EDGES)]
    assert [state["position"] for _, state in expected] == STEP_EDGES[1:]
    assert expected[0][1]["global_batch"] == [[0, 12], [36, 24], [108, 48]]
    for world_size, size in ((1, 3), (2, 2), (3, 4), (4, 1)):
        others = run_steps(data, world_size, size, 9)
        assert [(a, b["position"]) for a, b in others] == [(a, b["position"]) for a, b in expected]
        for done in (1, 3, 5):
            rest = run_steps(data, world_size, size, 9 - done, expected[done - 1][1])
            assert [(a, b["position"]) for a, b in rest] == [(a, b["position"]) for a, b in expected[done:]]


def test_behind_a_state_from_inside_of_a_step_the_rest_of_it_comes_first(small: dict[str, Dataset]) -> None:
    data = small["mds"]
    with step_loader(data, 0, 1, 2) as loader:
        single = [(places(batch), state) for batch, state in run(loader, 60)]
    whole = run_steps(data, 1, 12, 6)
    for done in range(1, 30):  # batches of 2: after most of them, a step is not over
        position, state = 2 * done, single[done - 1][1]
        end = next(edge for edge in STEP_EDGES if edge > position)
        (first, _), (second, _) = run_steps(data, 2, 1, 2, state)
        if position in STEP_EDGES:
            assert first == whole[STEP_EDGES.index(position)][0]
        assert first == sorted(p for samples, _ in single[done : end // 2] for p in samples)
        assert second == whole[STEP_EDGES.index(end)][0]


def test_a_step_that_fails_in_its_middle_comes_whole_again(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path, "mds_zstd")
    shard = sorted(folder.glob("*.zstd"))[1]
    away = shard.rename(tmp_path / "away")
    with step_loader(open_dataset(folder), 0, 1, 3, shuffle="none", lanes=None, window=None) as loader:
        state = saved(loader)
        with pytest.raises(ShardError, match="00001"):
            next(loader.steps())  # its first batch is in the whole shard
        assert saved(loader) == state
        away.rename(shard)
        assert [place for batch in next(loader.steps()) for place in places(batch)] == [
            (0, row) for row in range(12)
        ]


def test_the_global_batch_may_be_changed_while_training_and_the_state_keeps_it(
    small: dict[str, Dataset],
) -> None:
    options: dict[str, Any] = {"global_batch": np.int64(8)}
    with step_loader(small["mds"], 0, 1, 4, **options) as loader:
        steps = loader.steps()
        assert [len(next(steps)) for _ in range(2)] == [2, 2]
        loader.set_global_batch(20, at_position=np.int64(17))  # holds from 24 on, the first step behind
        for size in (0, 18):
            with pytest.raises(ValueError, match=r"at least 1|is not a multiple"):
                loader.set_global_batch(size, at_position=24)
        with pytest.raises(ValueError, match="has been delivered"):
            loader.set_global_batch(4, at_position=15)
        assert len(next(steps)) == 2
        state = saved(loader)
        assert state["global_batch"] == [[0, 8], [24, 20]]
        after = [[places(batch) for batch in next(steps)] for _ in range(2)]
    with step_loader(small["mds"], 0, 1, 4, global_batch=None) as loader:
        with pytest.raises(ValueError, match="global_batch=…"):
            loader.steps()
        loader.load_state_dict(state)
        steps = loader.steps()
        assert [[places(batch) for batch in next(steps)] for _ in range(2)] == after


def train_in_steps(
    rank: int, world_size: int, size: int, location: str, folder: Path, steps: int | None, meet: Any
) -> None:
    """Train up to a position, or until killed; rank 0 saves a checkpoint after every third step of all."""
    checkpoint = folder / "state.json"
    data = open_dataset(location)
    with step_loader(data, rank, world_size, size, usage_log=folder / "logs") as loader:
        if checkpoint.exists():
            loader.load_state_dict(json.loads(checkpoint.read_text()))
        for number, step in enumerate(loader.steps(), 1):
            time.sleep(0.001 * len(step))
            meet.wait(60)
            if rank == 0 and number % 3 == 0:
                checkpoint.with_suffix(".new").write_text(json.dumps(loader.state_dict()))
                checkpoint.with_suffix(".new").rename(checkpoint)
            if steps is not None and loader.position >= steps:
                return


@pytest.mark.extended
def test_processes_killed_in_any_step_of_a_ramp_continue_on_other_ranks_and_the_audit_is_clean(
    tmp_path: Path,
) -> None:
    location = str(make_dataset(tmp_path / "data", "mds"))
    context, chance, started = multiprocessing.get_context("fork"), random.Random(7), 0
    for world_size, size in ((2, 3), (4, 1), (1, 12), (3, 2), (1, 4), (2, 2)):
        last = (world_size, size) == (2, 2)
        meet = context.Barrier(world_size)
        common = (world_size, size, location, tmp_path, 3000 if last else None, meet)
        ranks = [context.Process(target=train_in_steps, args=(rank, *common)) for rank in range(world_size)]
        for process in ranks:
            process.start()
        if not last:
            started += world_size
            while len(list(tmp_path.glob("logs/*"))) < started:  # the audit misses ranks that never began
                time.sleep(0.01)
            time.sleep(chance.random() / 4)
            for process in ranks:
                process.kill()
        for process in ranks:
            process.join(60)
            assert process.exitcode == (0 if last else -signal.SIGKILL)
    report = audit_logs(tmp_path / "logs", [open_dataset(location)], [None], progress=False)
    assert report.ok, [str(finding) for finding in report.findings.kept]
    assert len(report.runs) == 6
    assert report.walks[0].epochs_proved >= 3000 // SAMPLES - 1


def test_steps_that_cannot_be_are_refused(small: dict[str, Dataset]) -> None:
    data = small["mds"]
    with pytest.raises(ValueError, match="tail='carry'"):
        step_loader(data, 0, 1, 4, tail="pad")
    with step_loader(data, 0, 1, 4, endless=False) as loader, pytest.raises(ValueError, match="endless=True"):
        loader.steps()
    with step_loader(data, 0, 1, 8) as loader:
        with pytest.raises(ValueError, match=r"a step of 12 sequences is not a multiple of .* = 8"):
            loader.steps()
        loader.seek(36)  # from here on steps have 24 and 48
        assert len(next(loader.steps())) == 3
        loader.seek(60)
        stale = loader.steps()
        loader.seek(0)
        with pytest.raises(RuntimeError, match="stale iterator"):
            next(stale)


# Batch size and number of ranks change.


@pytest.mark.sampled(4)
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
    small: dict[str, Dataset], kind: str, runs: list[tuple[int, int]]
) -> None:
    """Stop, change world size and batch size, go on, over and over, through three epochs."""
    state: State | None = None
    delivered: list[int] = []
    number = 0
    while len(delivered) < 3 * SAMPLES:
        world_size, batch_size = runs[number % len(runs)]
        found = run_ranks(sized(small[kind], batch_size), world_size, 2 + number % 3, state)
        delivered += [i for ids, _ in found for i in ids]
        state, number = found[-1][1], number + 1
        assert state["position"] == len(delivered)
    # Batches differ in size, so that their order inside does; the epoch's edges lie inside of batches.
    assert state is not None
    alone = run_ranks(sized(small[kind], 1), 1, len(delivered), state | {"position": 0})
    assert sorted(delivered) == sorted(i for (i,), _ in alone)
    assert min(delivered.count(i) for i in range(SAMPLES)) >= 3


def test_a_dropped_tail_stays_dropped_when_the_next_run_has_smaller_batches(
    small: dict[str, Dataset],
) -> None:
    *_, (_, state) = run_ranks(sized(small["mds"], 10, tail="drop"), 1, 5)
    assert state["position"] == SAMPLES
    rest = run_ranks(sized(small["mds"], 1, tail="drop"), 1, SAMPLES, state)
    assert sorted(i for (i,), _ in rest) == list(range(SAMPLES))


def sized(data: Dataset, batch_size: int, **options: Any) -> RankMaker:
    return lambda rank, world_size: make(
        data, batch_size=batch_size, rank=rank, world_size=world_size, window=None, **options
    )


GLOBAL_BATCH = 120
SIZES = {"mds": 400, "mds_zstd": 250, "tar": 310, "foreign_tar": 130}
UNEVEN = (1, 60, 0, 14, 222, 4, 99)  # samples of the shards of "mds": one is empty, one has two batches
CHANGE = 5 * GLOBAL_BATCH + 50  # inside of a batch
WORLDS_BEFORE = cases([1, 2, 3, 4, 6, 8], [3, 8])
WORLDS_AFTER = cases([1, 2, 3, 5, 8], [1, 5])
STEPS = 16

Run = list[tuple[list[tuple[int, int]], State]]


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dataset]:
    folder = tmp_path_factory.mktemp("datasets")
    return {
        kind: open_dataset(
            make_dataset(folder / kind, kind, samples=samples, sizes=UNEVEN if kind == "mds" else None)
        )
        for kind, samples in SIZES.items()
    }


def arguments_of(datasets: dict[str, Dataset], kind: str, **options: Any) -> dict[str, Any]:
    """A loader's, but for batch size and rank; "mixture" has all kinds, changing weights, rows left out."""
    data: Dataset | list[Stream] = datasets["mds" if kind == "mixture" else kind]
    if kind == "mixture":
        weights = {"mds": 5, "mds_zstd": 3, "tar": 1, "foreign_tar": 0.5}
        data = [
            Stream(datasets[name], weight, name=name, exclude=[(10, 25), 60] if name == "mds" else None)
            for name, weight in weights.items()
        ]
        options["schedule"] = [(0, weights), (CHANGE, {"mds": 1, "foreign_tar": 4})]
        options["epoch_samples"] = 700
    return {"dataset": data, "return_ids": True, "window": 20, "prefetch_batches": 0, **options}


def run_of(arguments: dict[str, Any], world_size: int, state: State | None, steps: int) -> Run:
    """(sorted samples of the global batch, state after it) of the next steps, over all ranks."""

    def make(rank: int, world_size: int) -> StreamingLoader:
        size = GLOBAL_BATCH // world_size
        return StreamingLoader(batch_size=size, rank=rank, world_size=world_size, **grouped(arguments))

    found = run_ranks(make, world_size, steps, state, samples=places)
    return [(sorted(samples), after) for samples, after in found]


def places(batch: Batch) -> list[tuple[int, int]]:
    """(stream, row in its dataset) of a batch's samples; -1 for padding."""
    rows = batch["sample_id"].tolist()
    streams = batch["stream_id"].tolist() if "stream_id" in batch else [0] * len(rows)
    # A row says itself which it is: what was read must be what was planned.
    tokens = [int(row[0]) for row in batch["tokens"]]
    assert all(first == number + 1 or number == -1 for first, number in zip(tokens, rows, strict=True))
    return list(zip(streams, rows, strict=True))


@pytest.fixture(scope="module", params=[*SIZES, "mixture"])
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def reference(datasets: dict[str, Dataset], kind: str) -> Run:
    return run_of(arguments_of(datasets, kind), 1, None, STEPS)


def test_the_reference_run_crosses_epochs_and_a_change_of_weights(reference: Run, kind: str) -> None:
    if kind != "mixture":
        delivered = [row for ids, _ in reference for _, row in ids]
        size = SIZES[kind]
        assert len(delivered) > 2 * size
        assert max(delivered.count(row) for row in range(size)) <= -(-len(delivered) // size) + 1
        return
    before = [stream for ids, _ in reference[:5] for stream, _ in ids]
    for stream, weight in enumerate((10, 6, 2, 1)):
        assert abs(before.count(stream) - len(before) * weight / 19) < 4  # exact for every 19 positions
    after = [stream for ids, _ in reference[6:] for stream, _ in ids]
    assert {stream: after.count(stream) for stream in set(after)} == {0: 240, 3: 960}
    rows = {row for ids, _ in reference for stream, row in ids if stream == 0}
    assert rows == set(range(400)) - {*range(10, 25), 60}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("world_size", WORLDS_BEFORE)
def test_any_number_of_ranks_has_the_same_batches_and_states(
    datasets: dict[str, Dataset], reference: Run, kind: str, world_size: int
) -> None:
    assert run_of(arguments_of(datasets, kind), world_size, None, STEPS) == reference


@pytest.mark.sampled(4)
@pytest.mark.parametrize("world_size", WORLDS_AFTER)
@pytest.mark.parametrize("stop", cases(["some", "every"], ["some"]))
def test_a_run_goes_on_exactly_on_any_number_of_ranks(
    datasets: dict[str, Dataset], reference: Run, kind: str, world_size: int, stop: str
) -> None:
    """From the first step, from inside of an epoch, from its edge, from behind a change of weights."""
    epoch = -(-SIZES.get(kind, 700) // GLOBAL_BATCH)
    some = sorted({1, 2, epoch, CHANGE // GLOBAL_BATCH + 1})
    for done in some if stop == "some" else range(1, STEPS):
        rest = run_of(arguments_of(datasets, kind), world_size, reference[done - 1][1], min(4, STEPS - done))
        assert rest == reference[done : done + 4], f"after step {done}"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tail", ["drop", "pad"])
@pytest.mark.parametrize("world_size", cases([2, 5], [5]))
def test_dropped_and_padded_tails_are_the_same_too(
    datasets: dict[str, Dataset], kind: str, tail: str, world_size: int
) -> None:
    arguments = arguments_of(datasets, kind, tail=tail)
    expected = run_of(arguments, 1, None, 8)
    for done in (0, 1, 3, 5):
        state = expected[done - 1][1] if done else None
        assert run_of(arguments, world_size, state, 8 - done) == expected[done:]


@pytest.mark.extended
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_workers_of_a_dataloader_make_the_same_batches_and_states_from_anywhere(
    datasets: dict[str, Dataset], reference: Run, kind: str, workers: int
) -> None:
    arguments = arguments_of(datasets, kind)
    for done in (0, 1, 2, CHANGE // GLOBAL_BATCH + 1, STEPS - 2):
        dataset = StreamingDataset(batch_size=GLOBAL_BATCH, rank=0, world_size=1, **grouped(arguments))
        loader = StreamingDataLoader(dataset, num_workers=workers)
        if done:
            loader.load_state_dict(reference[done - 1][1])
        rest = [
            (sorted(places(batch)), loader.state_dict()) for batch in islice(batches(loader), STEPS - done)
        ]
        dataset.close()
        assert rest == reference[done:]


def test_what_differs_is_refused_with_a_list_and_a_fork_goes_on_from_the_position(
    datasets: dict[str, Dataset],
) -> None:
    state = run_of(arguments_of(datasets, "mixture"), 2, None, 3)[-1][1]
    streams = [Stream(datasets["tar"]), *(Stream(datasets[name]) for name in list(SIZES)[1:])]
    other = StreamingLoader(streams, batch_size=4, seed=5, rank=0, world_size=1)
    with pytest.raises(StateError) as caught:
        other.load_state_dict(state)
    for words in ("seed: saved 17, loader has 5", "stream 0", "without the rows of exclusion list"):
        assert words in str(caught.value)
    other.load_state_dict(state, on_mismatch="fork")
    assert other.position == 3 * GLOBAL_BATCH
    next(iter(other))
