"""Who was removed from a split and who stands for how many, out of tables of several stages."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shardkit.writers.dedup.exact import LOSER_DTYPE, WINNER_DTYPE
from shardkit.writers.dedup.removals import LOSERS_FILE, WINNERS_FILE, Removals
from shardkit.writers.execution.artifacts import Artifact


def write_tables(
    folder: Path, losers: list[tuple[int, int]], winners: list[tuple[int, int, int]]
) -> Artifact:
    """Tables of (split, row) and of (split, row, copies)."""
    folder.mkdir()
    lost = np.zeros(len(losers), LOSER_DTYPE)
    lost["split"], lost["row"] = np.array(losers).reshape(-1, 2).T
    np.save(folder / LOSERS_FILE, lost)
    np.save(folder / WINNERS_FILE, np.array(winners, WINNER_DTYPE))
    return Artifact(folder)


def test_the_latest_stage_counts_the_copies_and_every_partition_its_losers(tmp_path: Path) -> None:
    first = write_tables(tmp_path / "exact-0", [(0, 3), (1, 5)], [(0, 1, 2), (1, 4, 2), (1, 9, 3)])
    second = write_tables(tmp_path / "exact-1", [(1, 2)], [(1, 0, 2)])
    near = write_tables(tmp_path / "near", [(1, 9)], [(1, 4, 7)])
    removals = Removals({"exact": [first, second], "near": [near]})
    removed = removals.of_split(1)
    assert {reason: rows.tolist() for reason, rows in removed.rows.items()} == {"exact": [2, 5], "near": [9]}
    assert dict(zip(removed.copied.tolist(), removed.copies.tolist(), strict=True)) == {0: 2, 4: 7, 9: 3}
    assert removed.copied.tolist() == sorted(removed.copied.tolist())
    nothing = removals.of_split(2)
    assert (len(nothing.copied), [len(rows) for rows in nothing.rows.values()]) == (0, [0, 0])
    assert len({removals.digest(split) for split in range(3)}) == 3


def test_winners_of_a_rewritten_split_come_before_all_stages(tmp_path: Path) -> None:
    own = write_tables(tmp_path / "lines", [], [(0, 4, 2), (0, 6, 5)])
    near = write_tables(tmp_path / "near", [], [(0, 6, 9)])
    removed = Removals({"near": [near]}, [own]).of_split(0)
    assert (removed.copied.tolist(), removed.copies.tolist()) == ([4, 6], [2, 9])
