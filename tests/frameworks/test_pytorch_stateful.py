"""torchdata's StatefulDataLoader over a StreamingDataset: exact, and its states are ours."""

from __future__ import annotations

import copy
import json
import traceback
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from shardkit.errors import StateError
from shardkit.loaders import StreamingLoader
from shardkit.loaders.config import grouped
from shardkit.loaders.pytorch import StreamingDataset, state_of, unchanged
from support.loader_data import make_dataset
from support.resume import Batch, State, assert_equal, assert_same, batches, run

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]

ARGUMENTS: dict[str, Any] = {"batch_size": 4, "rank": 0, "world_size": 1, "return_ids": True, "window": 9}
STEPS = 34  # epochs of 14, 13 and 13 batches
LENGTHS = [14, 13]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data"), "mds", samples=53)


@pytest.fixture(scope="module")
def expected(path: Path) -> list[tuple[Batch, State]]:
    with StreamingLoader(path, **grouped(ARGUMENTS)) as loader:
        return run(loader, STEPS)


def make(path: Path, workers: int, **more: Any) -> StatefulDataLoader:
    context = "fork" if workers else None
    return StatefulDataLoader(
        StreamingDataset(path, **grouped(ARGUMENTS)),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context=context,
        collate_fn=unchanged,
        **more,
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("workers", "every", "persistent"),
    [
        (0, 1, False),
        (1, 3, False),
        pytest.param(2, 1, False, marks=pytest.mark.extended),
        (2, 3, True),
        pytest.param(3, 3, False, marks=pytest.mark.extended),
    ],
)
def test_it_goes_on_exactly_from_any_state(
    path: Path, expected: list[tuple[Batch, State]], workers: int, every: int, persistent: bool
) -> None:
    loader = make(path, workers, snapshot_every_n_steps=every, persistent_workers=persistent)
    states: dict[tuple[int, bool], Any] = {}
    step = 0
    for length in LENGTHS:
        first = step
        for batch in loader:
            assert_equal(batch, expected[step][0], f"batch {step}")
            step += 1
            states[step, False] = state = copy.deepcopy(loader.state_dict())
            assert state_of(state) == expected[step - 1][1], f"plain state after batch {step - 1}"
        assert step - first == length
        states[step, True] = state = copy.deepcopy(loader.state_dict())
        assert state_of(state) == expected[step - 1][1], "plain state after an epoch"
    # In the middle, with the epoch's last batch, after its end, one batch later; in the same process.
    for at, ended in ((5, False), (14, False), (14, True), (15, False), (27, True)):
        loader = make(path, workers, snapshot_every_n_steps=every, persistent_workers=persistent)
        loader.load_state_dict(json.loads(json.dumps(states[at, ended])))
        count = 12 if at < 14 else 5  # over the edge
        assert_same(list(islice(batches(loader), count)), expected[at : at + count], f"from {at}, {ended}")
    loader.load_state_dict(states[9, False])
    assert_same(list(islice(loader, 3)), expected[9:12], "the same loader, given an earlier state")


def test_a_run_goes_on_with_other_workers_or_without_torchdata(
    path: Path, expected: list[tuple[Batch, State]]
) -> None:
    loader = make(path, 2, snapshot_every_n_steps=3)
    list(islice(loader, 8))
    state = loader.state_dict()
    other = make(path, 1)
    other.dataset.load_state_dict(state_of(state))
    assert_same(list(islice(batches(other), 8)), expected[8:16], "one worker")
    with StreamingLoader(path, **grouped(ARGUMENTS)) as plain:
        plain.load_state_dict(state_of(state))
        assert_same(list(islice(plain, 4)), expected[8:12], "a StreamingLoader")


def test_an_early_end_starts_the_iteration_again(path: Path, expected: list[tuple[Batch, State]]) -> None:
    loader = make(path, 2)
    for _ in range(2):
        assert_same(list(islice(loader, 3)), expected[:3], "left early")
    list(loader)
    assert_same(list(islice(loader, 3)), expected[14:17], "the next epoch")


def test_what_does_not_fit_is_refused(path: Path) -> None:
    loader = make(path, 2)
    list(islice(loader, 3))
    with pytest.raises(StateError, match="StatefulDataLoader"):
        state_of({"epoch": 3})
    other = StatefulDataLoader(
        StreamingDataset(path, **grouped(ARGUMENTS | {"batch_size": 5})),
        batch_size=None,
        num_workers=2,
        multiprocessing_context="fork",
    )
    other.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="state_of") as raised:
        next(iter(other))
    traceback.clear_frames(raised.tb)  # which would keep an iterator, and its workers
    del raised
