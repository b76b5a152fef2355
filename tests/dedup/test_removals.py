"""Decisions about documents reach their splits: who was removed, and who stands for how many."""

from __future__ import annotations

import random
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.card import Count
from shardkit.errors import BuildError
from shardkit.writers.dedup.outcomes import (
    NOTHING,
    OUTCOME,
    OUTCOMES,
    SplitRemovals,
    SplitRows,
    SplitTable,
    by_split,
    document_keys,
    outcomes,
    write_tables,
)
from shardkit.writers.dedup.tables import Rows
from shardkit.writers.exchange.exchange import Limits, RunWriter, Table
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.digests import plain
from shardkit.writers.execution.stage import Stage
from support.task_folders import TaskFolders, commit_folder

Decision = tuple[int, int, int, int]  # split, row, bytes, copies; no copies: removed
REMOVED = Stage("removed", "removed", write_tables)
SMALL = Limits(fan_in=3, least_segments=4, block_bytes=50, read_bytes=120)


def decide(folder: Path, decisions: list[Decision]) -> Commit:
    """The commit of a task that decided this."""
    folder.mkdir(parents=True)
    split, row, size, copies = np.array(decisions, np.int64).reshape(-1, 4).T
    with RunWriter(folder / OUTCOMES.file, OUTCOMES, memory_bytes=1 << 20) as writer:
        kept = np.where(copies[:, None] == 0, np.stack([row + 1, row + 2], axis=1), 0)
        similarity = np.where(copies == 0, 0.5, 0)
        keys = document_keys(split, row)
        writer.write(outcomes(keys, bytes=size, copies=copies, kept=kept, similarity=similarity))
    return commit_folder(folder, "decide", folder.name)


def divide(folder: Path, decisions: list[list[Decision]], splits: int) -> list[SplitTable]:
    commits = [decide(folder / f"decide-{at}", some) for at, some in enumerate(decisions)]
    return by_split(TaskFolders(folder), REMOVED, OUTCOMES, commits, splits, limits=SMALL)


def write_table(path: Path, rows: list[tuple[int, int]]) -> SplitTable:
    """A table of (row, copies) of one split, behind rows of another one."""
    table = np.array([(row, copies, 0, 0, 1) for row, copies in [(9, 9), *rows]], OUTCOME)
    table.tofile(path)
    return SplitTable(Artifact(path), 1, len(rows), xxhash.xxh3_128_hexdigest(table[1:].data))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 30), documents=st.integers(0, 400), tasks=st.integers(1, 9))
def test_each_split_receives_its_rows_whoever_decided_them(
    tmp_path_factory: pytest.TempPathFactory, seed: int, documents: int, tasks: int
) -> None:
    rng, splits = random.Random(seed), 150
    numbers = sorted(rng.sample(range(splits), 7))
    places = {(rng.choice(numbers), rng.choice([rng.randrange(50), 2**32 - 1])) for _ in range(documents)}
    decisions = [
        (*place, rng.randrange(99), 0) if rng.random() < 0.6 else (*place, 0, rng.randrange(2, 9))
        for place in sorted(places)
    ]
    rng.shuffle(decisions)
    folder = tmp_path_factory.mktemp("removals")
    tables = divide(folder, [decisions[at::tasks] for at in range(tasks)], splits)
    assert len(tables) == splits
    for split, table in enumerate(tables):
        own = sorted((row, copies, size) for number, row, size, copies in decisions if number == split)
        assert table.read(OUTCOME).tolist() == [
            (row, copies, 0, 0, 0.0) if copies else (row, copies, row + 1, row + 2, 0.5)
            for row, copies, _ in own
        ]
        lost = [size for _, copies, size in own if not copies]
        assert table.lost == Count(len(lost), sum(lost))
        assert (table.content == NOTHING.content) == (not own)


def test_a_digest_is_of_the_rows_and_not_of_the_number_of_the_split_or_of_the_task(tmp_path: Path) -> None:
    own: list[Decision] = [(0, 3, 10, 0), (0, 5, 20, 0), (0, 6, 0, 3)]
    there: list[Decision] = [(70, row, size, copies) for _, row, size, copies in own]
    before = divide(tmp_path / "before", [own, [(1, 3, 10, 0)]], 2)
    after = divide(tmp_path / "after", [[*there[1:], (1, 1, 1, 0)], there[:1]], 71)
    assert before[0].content == after[70].content
    assert len({one.content for one in (*before, *after[1:3])}) == 4


def test_only_groups_whose_rows_changed_are_divided_again(tmp_path: Path) -> None:
    run = TaskFolders(tmp_path)
    first = decide(tmp_path / "decide-0", [(0, 1, 1, 0), (63, 1, 1, 0)])
    more = decide(tmp_path / "decide-1", [(64, 1, 1, 0)])
    by_split(run, REMOVED, OUTCOMES, [first], 65, limits=SMALL)
    assert run.ran == ["removed/00000", "removed/00001"]
    by_split(run, REMOVED, OUTCOMES, [first], 65, limits=SMALL)
    assert len(run.ran) == 2
    by_split(run, REMOVED, OUTCOMES, [first, more], 65, limits=SMALL)
    assert len(run.ran) == 4


def test_rows_of_one_document_are_in_one_order_whoever_wrote_them(tmp_path: Path) -> None:
    table = Table("lines.run", np.dtype([("key", "<u8"), ("unit", "<u4")]))
    commits = []
    for at, units in enumerate(([7, 2], [5])):
        folder = tmp_path / f"decide-{at}"
        folder.mkdir()
        rows = np.zeros(len(units), table.dtype)
        rows["key"], rows["unit"] = document_keys(1, 4), units
        with RunWriter(folder / table.file, table, memory_bytes=1 << 20) as writer:
            writer.write(rows)
        commits.append(commit_folder(folder, "decide", str(at)))
    for order in (commits, commits[::-1]):
        [none, found] = by_split(TaskFolders(tmp_path / order[0].name), REMOVED, table, order, 2)
        assert none == NOTHING
        assert found.read(np.dtype([("row", "<u4"), ("unit", "<u4")])).tolist() == [(4, 2), (4, 5), (4, 7)]


def test_the_latest_stage_counts_the_copies(tmp_path: Path) -> None:
    exact = write_table(tmp_path / "exact", [(0, 2), (2, 0), (4, 2), (5, 0), (9, 3)])
    near = write_table(tmp_path / "near", [(4, 7), (9, 0)])
    removals = SplitRemovals({"exact": exact}).also("near", near)
    removed = removals.load()
    assert {reason: rows.tolist() for reason, rows in removed.rows.items()} == {"exact": [2, 5], "near": [9]}
    assert removed.copied.tolist() == [0, 4, 9]
    assert removed.copies.tolist() == [2, 7, 3]
    nothing = SplitRemovals({"exact": NOTHING, "near": NOTHING})
    loaded = nothing.load()
    assert (len(loaded.copied), [len(rows) for rows in loaded.rows.values()]) == (0, [0, 0])
    counted = [plain(one) for one in (removals, SplitRemovals({"exact": exact}), nothing)]
    assert all(one != other for one, other in combinations(counted, 2))


def test_damaged_rows_are_refused(tmp_path: Path) -> None:
    table = write_table(tmp_path / "exact", [(0, 2), (2, 0)])
    (tmp_path / "exact").write_bytes((tmp_path / "exact").read_bytes()[:-1] + b"\1")
    with pytest.raises(BuildError, match="exact: bytes 28 to 84 are missing or differ from their hash"):
        table.read(OUTCOME)


@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
def test_rows_of_several_tables_come_in_step_with_a_pass_over_the_documents(
    tmp_path: Path, chunk_rows: int
) -> None:
    rows = [(row, unit) for row in range(40) for unit in range(row % 4)]
    row_type = np.dtype([("row", "<u4"), ("unit", "<u4")])
    for at in range(3):
        np.array(rows[at::3], row_type).tofile(tmp_path / str(at))
    tables = [Rows(Artifact(tmp_path / str(at)), row_type, header=False) for at in range(3)]
    pieces = [(table, 0, len(table)) for table in tables]
    found = SplitRows(row_type, pieces, then=["unit"], chunk_rows=chunk_rows)
    steps = [found.before(stop).tolist() for stop in (1, 1, 13, 40, 50)]
    assert [row for step in steps for row in step] == rows
    assert max(row for row, _ in steps[2]) < 13
