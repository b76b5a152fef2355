from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import BuildError
from shardkit.writers.dedup import exact
from shardkit.writers.dedup.exact import (
    KEY_DTYPE,
    LOSER_DTYPE,
    WINNER_DTYPE,
    KeyFile,
    find_losers,
    find_winners,
    partitions_for,
    read_key_runs,
)
from shardkit.writers.dedup.tables import Rows
from shardkit.writers.execution.artifacts import Artifact

Row = tuple[bytes, bytes, int, int]  # key, id, bytes, source
Place = tuple[int, int]  # split, row


def write(folder: Path, splits: list[list[Row]]) -> list[Path]:
    paths = []
    for number, rows in enumerate(splits):
        keys = np.zeros(len(rows), KEY_DTYPE)
        for row, (key, id, size, source) in zip(keys, rows, strict=True):
            row["key"], row["id"] = np.frombuffer(key, np.uint8), np.frombuffer(id, np.uint8)
            row["bytes"], row["source"] = size, source
        paths.append(folder / f"{number}.npy")
        with KeyFile(paths[-1]) as file:
            file.write(keys[: len(keys) // 3])
            file.write(keys[len(keys) // 3 :])
        found = [np.zeros(0, KEY_DTYPE), *read_key_runs(Artifact(paths[-1]))]
        assert np.array_equal(np.concatenate(found), keys)
        assert len(np.load(paths[-1])) == len(keys)
    return paths


def brute_force(splits: list[list[Row]], longest_first: bool = False) -> dict[Place, Place]:
    """{loser: its winner} by one dictionary over everything."""
    groups: dict[bytes, list[tuple[int, int, bytes, Place]]] = {}
    for split, rows in enumerate(splits):
        for at, (key, id, size, source) in enumerate(rows):
            length = -size if longest_first else 0
            groups.setdefault(key, []).append((source, length, id, (split, at)))
    return {rank[-1]: min(group)[-1] for group in groups.values() for rank in group if rank != min(group)}


def found(paths: list[Path], partitions: int, **options: Any) -> npt.NDArray[np.void]:
    parts = [
        find_losers([Artifact(path) for path in paths], partition, partitions, **options)
        for partition in range(partitions)
    ]
    for part in parts:
        assert part.dtype == LOSER_DTYPE
        assert part.tolist() == sorted(part.tolist())
    return np.concatenate(parts)


def as_dictionary(losers: npt.NDArray[np.void]) -> dict[Place, Place]:
    return {(split, row): (winner, at) for split, row, _, winner, at in losers.tolist()}


def rows_of(seed: int, count: int, texts: int) -> list[Row]:
    rng = random.Random(seed)
    # Some keys agree in their first or last half only.
    halves = [rng.randbytes(8) for _ in range(texts)]
    keys = [halves[rng.randrange(texts)] + halves[rng.randrange(2)] for _ in range(count)]
    return [(key, rng.randbytes(16), rng.randrange(99), rng.randrange(3)) for key in keys]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    count=st.integers(0, 60),
    texts=st.integers(2, 30),
    splits=st.integers(1, 4),
    partitions=st.integers(1, 9),
    longest_first=st.booleans(),
    run_rows=st.sampled_from([5, 16, 1 << 18]),
)
def test_losers_and_winners_are_those_of_a_dictionary_for_any_partitions_and_runs(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    count: int,
    texts: int,
    splits: int,
    partitions: int,
    longest_first: bool,
    run_rows: int,
) -> None:
    rows = rows_of(seed, count, texts)
    cut = [rows[at::splits] for at in range(splits)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "RUN_ROWS", run_rows)
        losers = found(write(tmp_path_factory.mktemp("keys"), cut), partitions, longest_first=longest_first)
    expected = brute_force(cut, longest_first)
    assert len(losers) == len(expected)
    assert as_dictionary(losers) == expected
    assert [size for *_, size, _, _ in losers.tolist()] == [
        cut[split][row][2] for split, row, *_ in losers.tolist()
    ]
    winners = find_winners(losers)
    assert winners.dtype == WINNER_DTYPE
    copies = Counter(expected.values())
    assert winners.tolist() == [(split, row, copies[split, row] + 1) for split, row in sorted(copies)]


def test_the_documents_that_lose_do_not_depend_on_the_order_of_splits(tmp_path: Path) -> None:
    rows = rows_of(3, 2000, 40)
    cut = [rows[at::7] for at in range(7)]
    lost = []
    for order in (range(7), [3, 1, 6, 0, 2, 5, 4]):
        splits = [cut[at] for at in order]
        folder = tmp_path / str(order[0])
        folder.mkdir()
        losers = as_dictionary(found(write(folder, splits), 5)).items()
        lost.append({(splits[a][b][1], splits[c][d][1]) for (a, b), (c, d) in losers})
    assert lost[0] == lost[1]
    assert len(lost[0]) > 1000


def test_the_first_source_wins_then_the_lowest_id_compared_as_bytes(tmp_path: Path) -> None:
    key = b"k" * 16
    low, high = b"\x01" + b"\xff" * 15, b"\x80" + b"\0" * 15
    paths = write(tmp_path, [[(key, low, 5, 1), (key, high, 5, 0)], [(key, low[::-1], 5, 0)]])
    assert as_dictionary(find_losers([Artifact(path) for path in paths], 0, 1)) == {
        (0, 0): (0, 1),
        (1, 0): (0, 1),
    }


def test_the_longest_text_of_the_first_source_wins_if_so_wanted(tmp_path: Path) -> None:
    key, low, high = b"k" * 16, b"\0" * 16, b"\1" * 16
    paths = write(tmp_path, [[(key, low, 5, 0), (key, high, 6, 0), (key, low, 9, 1)]])
    assert set(find_losers([Artifact(path) for path in paths], 0, 1)["winner_row"]) == {0}
    assert set(find_losers([Artifact(path) for path in paths], 0, 1, longest_first=True)["winner_row"]) == {1}


def test_a_file_may_come_before_or_after_all_sources(tmp_path: Path) -> None:
    key = b"k" * 16
    paths = write(tmp_path, [[(key, bytes([at]) * 16, 5, at)] for at in range(3)])
    losers = find_losers([Artifact(path) for path in paths], 0, 1, sources=[1 << 20, None, -1])
    assert as_dictionary(losers) == {(0, 0): (2, 0), (1, 0): (2, 0)}


def test_partitions_hold_all_keys_once_and_about_evenly(tmp_path: Path) -> None:
    rng = random.Random(1)
    rows = [(rng.randbytes(16), rng.randbytes(16), 1, 0) for _ in range(3000)]
    paths = write(tmp_path, [rows + [(key, rng.randbytes(16), 1, 1) for key, *_ in rows]])
    sizes = [len(find_losers([Artifact(path) for path in paths], partition, 7)) for partition in range(7)]
    assert sum(sizes) == 3000
    assert min(sizes) > 300


def test_a_partition_reads_its_part_of_a_file_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "RUN_ROWS", 1 << 13)
    rng = np.random.default_rng(1)
    keys = np.zeros(1 << 16, KEY_DTYPE)
    keys["key"] = rng.integers(0, 256, (len(keys), 16))
    with KeyFile(tmp_path / "keys.npy") as file:
        file.write(keys)
    read: list[int] = []
    read_rows = Rows.read

    def count(table: Rows, start: int, stop: int) -> npt.NDArray[Any]:
        read.append(stop - start)
        return read_rows(table, start, stop)

    monkeypatch.setattr(Rows, "read", count)
    assert len(find_losers([Artifact(tmp_path / "keys.npy")], 3, 16)) == 0
    assert len(read) <= 10  # eight runs
    assert sum(read) < len(keys) / 5


def test_keys_that_crowd_at_one_end_are_all_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "RUN_ROWS", 1000)
    rows = [(bytes([255, at % 5]) * 8, at.to_bytes(16, "big"), 1, 0) for at in range(1500)]
    rows += [(bytes(16), at.to_bytes(16, "big"), 1, 0) for at in range(1500, 1600)]
    paths = write(tmp_path, [rows])
    assert len(found(paths, 300)) == 1600 - 6


def test_no_keys_have_no_losers(tmp_path: Path) -> None:
    assert len(find_losers([], 0, 1)) == 0
    losers = find_losers([Artifact(path) for path in write(tmp_path, [[], []])], 0, 1)
    assert len(losers) == len(find_winners(losers)) == 0


def test_foreign_and_short_files_and_bad_partitions_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(100, np.int64))
    (tmp_path / "y.npy").write_bytes(b"")
    with pytest.raises(BuildError, match=r"x.npy: rows of int64"):
        find_losers([Artifact(tmp_path / "x.npy")], 0, 1)
    with pytest.raises(BuildError, match=r"y.npy: not a table"):
        find_losers([Artifact(tmp_path / "y.npy")], 0, 1)
    [path] = write(tmp_path, [rows_of(1, 10, 5)])
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(BuildError, match="bytes, but its header states"):
        find_losers([Artifact(path)], 0, 1)
    with pytest.raises(ValueError, match="partition 2 of 2"):
        find_losers([], 2, 2)


def test_partitions_follow_the_memory_budget() -> None:
    assert partitions_for(0, 10**9) == 1
    assert partitions_for(10**6, 10**9) == 1
    assert partitions_for(10**9, 2 * 10**9) == 150
    assert partitions_for(10**15, 10**9) == 1 << 16
