"""A run may stop anywhere and go on with any number of ranks: the samples of every step stay the same.

One reference run on one rank records, for every step, the samples of the global batch and the state after
it. Runs on other numbers of ranks must give the same sets and, byte for byte, the same states; runs begun
from a recorded state, on any number of ranks, must give the sets and states that follow. So any stop, on any
number of ranks, goes on exactly on any other: all pairs are covered though none is run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from shardkit.datasets.dataset import Dataset, open_dataset
from shardkit.loaders import Stream, StreamingLoader
from shardkit.loaders.pytorch import StreamingDataLoader, StreamingDataset
from support.default_cases import cases
from support.loader_data import make_dataset
from support.resume import State, batches

GLOBAL_BATCH = 120
SAMPLES = {"mds": 400, "mds_zstd": 250, "tar": 310, "foreign_tar": 130}
CHANGE = 5 * GLOBAL_BATCH + 50  # inside of a batch
KINDS = [*SAMPLES, "mixture"]
WORLDS_BEFORE = [2, 8, *(pytest.param(size, marks=pytest.mark.extended) for size in (1, 3, 4))]
WORLDS_AFTER = [1, 5, *(pytest.param(size, marks=pytest.mark.extended) for size in (2, 3, 8))]
STEPS = 16

Ids = list[tuple[int, int]]
Maker = Callable[[int, int], StreamingLoader]


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dataset]:
    folder = tmp_path_factory.mktemp("datasets")
    return {
        kind: open_dataset(make_dataset(folder / kind, kind, samples=samples))
        for kind, samples in SAMPLES.items()
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


def maker(datasets: dict[str, Dataset], kind: str, **options: Any) -> Maker:
    """Makes the loader of a rank."""
    arguments = arguments_of(datasets, kind, **options)

    def make(rank: int, world_size: int) -> StreamingLoader:
        size = GLOBAL_BATCH // world_size
        return StreamingLoader(batch_size=size, rank=rank, world_size=world_size, **arguments)

    return make


def run_of(make: Maker, world_size: int, state: State | None, steps: int) -> list[tuple[Ids, State]]:
    """(samples of the global batch, state after it) of the next steps, over all ranks."""
    of_ranks = []
    for rank in range(world_size):
        loader = make(rank, world_size)
        if state is not None:
            loader.load_state_dict(state)
        of_ranks.append(
            [(ids_of(batch), plain(loader.state_dict())) for batch in islice(batches(loader), steps)]
        )
    found = []
    for step in zip(*of_ranks, strict=True):
        states = [state for _, state in step]
        assert all(other == states[0] for other in states), "all ranks must keep the same state"
        found.append(([sample for ids, _ in step for sample in ids], states[0]))
    return found


def run_with_workers(
    arguments: dict[str, Any], workers: int, state: State | None, steps: int
) -> list[tuple[Ids, State]]:
    """The same of one rank, by the workers of a DataLoader."""
    dataset = StreamingDataset(batch_size=GLOBAL_BATCH, rank=0, world_size=1, **arguments)
    loader = StreamingDataLoader(dataset, num_workers=workers)
    if state is not None:
        loader.load_state_dict(state)
    found: list[tuple[Ids, State]] = []
    while len(found) < steps:
        for batch in loader:
            found.append((ids_of(batch), plain(loader.state_dict())))
            if len(found) == steps:
                break
    dataset.close()
    return found


def ids_of(batch: dict[str, Any]) -> Ids:
    """(stream, row in its dataset) of a batch's samples; -1 for padding."""
    rows = batch["sample_id"].tolist()
    streams = batch["stream_id"].tolist() if "stream_id" in batch else [0] * len(rows)
    # A row says itself which it is: what was read must be what was planned.
    tokens = [int(row[0]) for row in batch["tokens"]]
    assert all(first == number + 1 or number == -1 for first, number in zip(tokens, rows, strict=True))
    return list(zip(streams, rows, strict=True))


def plain(state: dict[str, object]) -> State:
    found: State = json.loads(json.dumps(state))
    return found


def sets(run: list[tuple[Ids, State]]) -> list[Ids]:
    return [sorted(ids) for ids, _ in run]


def states(run: list[tuple[Ids, State]]) -> list[State]:
    return [state for _, state in run]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def make(datasets: dict[str, Dataset], kind: str) -> Maker:
    return maker(datasets, kind)


@pytest.fixture(scope="module")
def reference(make: Maker) -> list[tuple[Ids, State]]:
    return run_of(make, 1, None, STEPS)


def test_the_reference_run_crosses_epochs_and_a_change_of_weights(
    reference: list[tuple[Ids, State]], datasets: dict[str, Dataset], kind: str
) -> None:
    if kind != "mixture":
        delivered = [row for ids, _ in reference for _, row in ids]
        size = SAMPLES[kind]
        assert len(delivered) > 2 * size or kind == "mds"
        assert max(delivered.count(row) for row in range(size)) <= -(-len(delivered) // size) + 1
        return
    before = [stream for ids, _ in reference[:5] for stream, _ in ids]
    for stream, weight in enumerate((10, 6, 2, 1)):
        assert abs(before.count(stream) - len(before) * weight / 19) < 4  # exact for every 19 positions
    after = [stream for ids, _ in reference[6:] for stream, _ in ids]
    assert {stream: after.count(stream) for stream in set(after)} == {0: 240, 3: 960}
    rows = {row for ids, _ in reference for stream, row in ids if stream == 0}
    assert rows == set(range(400)) - {*range(10, 25), 60}


@pytest.mark.parametrize("world_size", WORLDS_BEFORE)
def test_any_number_of_ranks_has_the_same_batches_and_states(
    make: Maker, reference: list[tuple[Ids, State]], world_size: int
) -> None:
    run = run_of(make, world_size, None, STEPS)
    assert sets(run) == sets(reference)
    assert states(run) == states(reference)


@pytest.mark.parametrize("world_size", WORLDS_AFTER)
@pytest.mark.parametrize("stop", ["first_step", "mid_epoch", "epoch_edge", "schedule_change"])
def test_a_run_goes_on_exactly_on_any_number_of_ranks(
    make: Maker, reference: list[tuple[Ids, State]], kind: str, world_size: int, stop: str
) -> None:
    epoch = SAMPLES.get(kind, 700)
    done = {
        "first_step": 1,
        "mid_epoch": 2,
        "epoch_edge": -(-epoch // GLOBAL_BATCH),
        "schedule_change": CHANGE // GLOBAL_BATCH + 1,
    }[stop]
    run = run_of(make, world_size, reference[done - 1][1], STEPS - done)
    assert sets(run) == sets(reference[done:])
    assert states(run) == states(reference[done:])


@pytest.mark.extended
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_workers_of_a_dataloader_make_the_same_batches_and_states_from_anywhere(
    datasets: dict[str, Dataset], reference: list[tuple[Ids, State]], kind: str, workers: int
) -> None:
    arguments = arguments_of(datasets, kind)
    assert run_with_workers(arguments, workers, None, STEPS) == reference
    for done in (1, 2, CHANGE // GLOBAL_BATCH + 1, STEPS - 2):
        rest = run_with_workers(arguments, workers, reference[done - 1][1], STEPS - done)
        assert rest == reference[done:]


@pytest.mark.parametrize("tail", ["drop", "pad"])
@pytest.mark.parametrize("world_size", cases([2, 5], [5]))
def test_dropped_and_padded_tails_are_the_same_too(
    datasets: dict[str, Dataset], kind: str, tail: str, world_size: int
) -> None:
    make = maker(datasets, kind, tail=tail)
    expected = run_of(make, 1, None, 8)
    for done in (0, 1, 3, 5):
        state = expected[done - 1][1] if done else None
        run = run_of(make, world_size, state, 8 - done)
        assert sets(run) == sets(expected[done:])
        assert states(run) == states(expected[done:])


def test_what_differs_is_refused_with_a_list_and_a_fork_goes_on_from_the_position(
    datasets: dict[str, Dataset],
) -> None:
    from shardkit.errors import StateError

    state = run_of(maker(datasets, "mixture"), 2, None, 3)[-1][1]
    streams = [Stream(datasets["tar"]), *(Stream(datasets[name]) for name in list(SAMPLES)[1:])]
    other = StreamingLoader(streams, batch_size=4, seed=5, rank=0, world_size=1)
    with pytest.raises(StateError) as caught:
        other.load_state_dict(state)
    for words in ("seed: saved 17, loader has 5", "stream 0", "without those of exclusion list"):
        assert words in str(caught.value)
    other.load_state_dict(state, on_mismatch="fork")
    assert other.position == 3 * GLOBAL_BATCH
    next(iter(other))
