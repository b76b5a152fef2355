"""A build that is killed, starved or damaged anywhere and run again gives the same bytes, and no false index.

This runs a part of the crash matrix; `python tests/benchmarks/crash_matrix.py` runs all of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from crash.builds import ORDERS, SPLIT_STAGES, STAGES, Cell, Crashes, Outcome
from crash.faults import damage, kill_often
from crash.grid import Entry, grid, sample
from crash.points import Moment
from crash.reader import look
from crash.stores import FAULTS, StoreCell, StoreCrashes
from shardkit.writers.execution.work import COMMIT_NAME
from support.s3_moto import s3_server

SEED = 8


@pytest.fixture(scope="module")
def crashes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crashes]:
    with Crashes(tmp_path_factory.mktemp("crashes")) as crashes:
        yield crashes


def check(outcome: Outcome) -> None:
    assert outcome.problems == []
    assert outcome.struck
    assert outcome.looks > 10


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "cell",
    [
        Cell(fault="kill", stage="tokenize", moment="committed", skip=1),
        Cell(fault="kill", step=30, replace=True),
    ],
    ids=str,
)
def test_the_same_command_after_a_kill_brings_the_same_bytes(crashes: Crashes, cell: Cell) -> None:
    check(crashes.run(cell))


@pytest.mark.extended
def test_a_build_killed_after_its_index_is_complete(crashes: Crashes) -> None:
    """The last operation on the output removes the mark of a publication."""
    for _ in range(5):  # two threads that make one folder at once take more operations than one
        outcome = Outcome(Cell(fault="kill", step=crashes.steps("out")))
        base = crashes.fresh()
        crashes.strike(outcome, base)
        if outcome.struck and look(base / "out") == (True, None):
            break
    assert look(base / "out") == (True, None)
    crashes.finish(outcome, base)
    assert (outcome.struck, outcome.problems) == (True, [])


@pytest.mark.extended
def test_what_a_disk_damaged_is_made_again(crashes: Crashes) -> None:
    cell = Cell(fault="flipped bit", stage="candidates", moment="before")
    check(damage(crashes, cell, "flipped bit", "bands/*/bands.run"))


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> StoreCrashes:
    return StoreCrashes(tmp_path_factory.mktemp("stores"))


def test_a_commit_whose_answer_is_lost_is_done_once(stores: StoreCrashes) -> None:
    cell = StoreCell(fault="lost_ack", place="work", number=3, operation="put", key=COMMIT_NAME)
    outcome = stores.run(cell)
    assert (outcome.struck, outcome.error, outcome.problems) == (True, "", [])


def test_a_shard_that_cannot_be_read_when_it_is_published_is_named_by_its_url(stores: StoreCrashes) -> None:
    outcome = stores.run(StoreCell(fault="deny", place="work", number=1, operation="open", key=r"\.mds$"))
    assert outcome.problems == []
    named = r"memory://\S+/work/pack/\S+\.mds: cannot be read: AccessDenied"
    assert re.search(named, outcome.error), outcome.error


# A pulled plug ends the thread of the heartbeats too, if that is where it strikes.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.extended
@pytest.mark.parametrize("fault", FAULTS)
def test_an_operation_of_a_store_may_fail(stores: StoreCrashes, fault: str) -> None:
    for place, count in stores.operations.items():
        for number in range(1 + len(fault), count - 20, max(count // 3, 1)):
            outcome = stores.run(StoreCell(fault=fault, place=place, number=number))  # type: ignore[arg-type]
            assert outcome.problems == [], outcome.cell
            assert outcome.struck, outcome.cell


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_a_drawn_part_of_the_matrix_keeps_all_promises(crashes: Crashes) -> None:
    entries = list(grid(["inline"], steps=crashes.steps("out"), all_steps=crashes.steps("."), stride=3))
    drawn = sample(entries, SEED, faults_each=1)
    assert {entry.stage for entry in drawn} >= set(STAGES)
    assert {entry.fault for entry in drawn} == {entry.fault for entry in entries}
    check_all(crashes, drawn)


@pytest.mark.extended
@pytest.mark.parametrize("order", range(1, len(ORDERS)))
def test_other_orders_of_steps_keep_them_too(tmp_path: Path, order: int) -> None:
    with Crashes(tmp_path, order=order) as crashes:
        steps = crashes.steps(".")
        for step in range(1, steps, steps // 7):
            check(crashes.run(Cell(fault="kill", step=step, area=".")))
        assert kill_often(crashes, seed=order, replacing=False).problems == []


@pytest.mark.extended
def test_vectors_from_files_are_joined_again_after_a_kill(tmp_path: Path) -> None:
    stages = ("semantic_vectors", "semantic_tables", "semantic_embed")
    with Crashes(tmp_path, order=2) as crashes:
        for stage, moment in zip(stages, get_args(Moment)[:3], strict=True):
            check(crashes.run(Cell(fault="kill", stage=stage, moment=moment)))


@pytest.mark.extended
def test_builds_with_a_split_keep_them_too(tmp_path: Path) -> None:
    with Crashes(tmp_path, has_split=True) as crashes:
        assert any(name.startswith("validation/") for name in crashes.expected)
        for number, stage in enumerate(SPLIT_STAGES):
            moment: Moment = "committed" if number % 2 else "uncommitted"
            check(crashes.run(Cell(fault="kill", stage=stage, moment=moment)))
        assert kill_often(crashes, seed=0, replacing=False).problems == []


@pytest.mark.extended
def test_other_engines_keep_them_too(tmp_path: Path) -> None:
    with s3_server() as server, Crashes(tmp_path, bucket=server.new_bucket()) as crashes:
        entries = list(grid(["local", "s3"], steps=0, all_steps=0))
        check_all(crashes, sample_of_engines(entries))


def sample_of_engines(entries: list[Entry]) -> list[Entry]:
    """One of each engine and fault."""
    kinds = {(entry.engine, entry.fault) for entry in entries}
    return [
        sample([entry for entry in entries if (entry.engine, entry.fault) == kind], SEED, faults_each=1)[0]
        for kind in sorted(kinds)
    ]


def check_all(crashes: Crashes, entries: list[Entry]) -> None:
    missed = 0
    for entry in entries:
        outcome = entry.do(crashes)
        assert outcome.problems == [], entry
        missed += not outcome.struck
    assert missed <= len(entries) // 10, "only the last steps of a build may not be reached"
