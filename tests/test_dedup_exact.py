from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import BuildError
from shardkit.writers.dedup.exact import KEY_DTYPE, KeyFile, find_losers, partitions_for

Row = tuple[bytes, bytes, int, int]  # key, id, bytes, source


def write(folder: Path, splits: list[list[Row]]) -> list[Path]:
    paths = []
    for number, rows in enumerate(splits):
        keys = np.zeros(len(rows), KEY_DTYPE)
        for row, (key, id, size, source) in zip(keys, rows, strict=True):
            row["key"], row["id"] = np.frombuffer(key, np.uint8), np.frombuffer(id, np.uint8)
            row["bytes"], row["source"] = size, source
        paths.append(folder / f"{number}.npy")
        with KeyFile(paths[-1]) as file:
            file.write(keys[: len(keys) // 2])
            file.write(keys[len(keys) // 2 :])
        assert np.array_equal(np.load(paths[-1]), keys)
    return paths


def brute_force(splits: list[list[Row]]) -> set[tuple[int, int, int]]:
    """Losers by one dictionary over everything."""
    winners: dict[bytes, tuple[int, bytes]] = {}
    for rows in splits:
        for key, id, _, source in rows:
            winners[key] = min(winners.get(key, (1 << 30, b"")), (source, id))
    return {
        (split, at, size)
        for split, rows in enumerate(splits)
        for at, (key, id, size, source) in enumerate(rows)
        if winners[key] != (source, id)
    }


def found(paths: list[Path], partitions: int) -> list[Any]:
    parts = [find_losers(paths, partition, partitions) for partition in range(partitions)]
    for part in parts:
        assert part.tolist() == sorted(part.tolist())
    return [loser for part in parts for loser in part.tolist()]


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
)
def test_losers_are_those_of_a_dictionary_for_any_partitions(
    tmp_path_factory: pytest.TempPathFactory, seed: int, count: int, texts: int, splits: int, partitions: int
) -> None:
    rows = rows_of(seed, count, texts)
    cut = [rows[at::splits] for at in range(splits)]
    losers = found(write(tmp_path_factory.mktemp("keys"), cut), partitions)
    assert len(losers) == len(set(losers))
    assert set(losers) == brute_force(cut)


def test_the_documents_that_lose_do_not_depend_on_the_order_of_splits(tmp_path: Path) -> None:
    rows = rows_of(3, 2000, 40)
    cut = [rows[at::7] for at in range(7)]
    lost = []
    for order in (range(7), [3, 1, 6, 0, 2, 5, 4]):
        splits = [cut[at] for at in order]
        folder = tmp_path / str(order[0])
        folder.mkdir()
        lost.append({splits[split][row][1] for split, row, _ in found(write(folder, splits), 5)})
    assert lost[0] == lost[1]
    assert len(lost[0]) > 1000


def test_the_first_source_wins_then_the_lowest_id_compared_as_bytes(tmp_path: Path) -> None:
    key = b"k" * 16
    low, high = b"\x01" + b"\xff" * 15, b"\x80" + b"\0" * 15
    paths = write(tmp_path, [[(key, low, 5, 1), (key, high, 5, 0)], [(key, low[::-1], 5, 0)]])
    assert find_losers(paths, 0, 1).tolist() == [(0, 0, 5), (1, 0, 5)]


def test_partitions_hold_all_keys_once_and_about_evenly(tmp_path: Path) -> None:
    rng = random.Random(1)
    rows = [(rng.randbytes(16), rng.randbytes(16), 1, 0) for _ in range(3000)]
    paths = write(tmp_path, [rows + [(key, rng.randbytes(16), 1, 1) for key, *_ in rows]])
    sizes = [len(find_losers(paths, partition, 7)) for partition in range(7)]
    assert sum(sizes) == 3000
    assert min(sizes) > 300


def test_no_keys_have_no_losers(tmp_path: Path) -> None:
    assert len(find_losers([], 0, 1)) == 0
    assert len(find_losers(write(tmp_path, [[], []]), 0, 1)) == 0


def test_foreign_files_and_bad_partitions_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(100, np.int64))
    with pytest.raises(BuildError, match=r"x.npy: not a file of keys"):
        find_losers([tmp_path / "x.npy"], 0, 1)
    with pytest.raises(ValueError, match="partition 2 of 2"):
        find_losers([], 2, 2)


def test_partitions_follow_the_memory_budget() -> None:
    assert partitions_for(0, 10**9) == 1
    assert partitions_for(10**6, 10**9) == 1
    assert partitions_for(10**9, 2 * 10**9) == 140
    assert partitions_for(10**15, 10**9) == 1 << 16
