"""Documents with equal keys: who stays is what one dictionary over all documents says."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.writers.dedup.exact import KEYS, WEIGHTED_KEYS, Order, find_copies, rank_copies
from shardkit.writers.dedup.outcomes import SplitRemovals, SplitTable
from shardkit.writers.dedup.urls import URL_KEYS
from shardkit.writers.exchange.exchange import Limits, RunWriter, exchange
from shardkit.writers.execution.commit import Commit
from shardkit.writers.stages.exact import (
    EQUAL_TEXTS,
    EQUAL_URLS,
    URL_LEFT,
    ExactDuplicates,
    keys_left,
    remove_equal,
)
from support.task_folders import TaskFolders, commit_folder

Row = tuple[bytes, bytes, int, int]  # key, id, bytes, source
Place = tuple[int, int]  # split, row
SMALL = Limits(fan_in=3, least_segments=4, block_bytes=200, read_bytes=400)


def rows_of(seed: int, count: int, texts: int) -> list[Row]:
    rng = random.Random(seed)
    # Some keys agree in their first or last half only.
    halves = [rng.randbytes(8) for _ in range(texts)]
    keys = [halves[rng.randrange(texts)] + halves[rng.randrange(2)] for _ in range(count)]
    return [(key, rng.randbytes(16), rng.randrange(99), rng.randrange(3)) for key in keys]


def clean(folder: Path, rows: list[Row], urls: list[bytes | None] | None = None) -> Commit:
    """The commit of the split's task that wrote its keys, and those of its URLs."""
    folder.mkdir(parents=True)
    keys = np.zeros(len(rows), KEYS.dtype)
    for at, (key, id, size, source) in enumerate(rows):
        keys[at]["key"], keys[at]["low"] = (int.from_bytes(key[half : half + 8], "big") for half in (0, 8))
        keys[at]["id"] = [int.from_bytes(id[half : half + 8], "big") for half in (0, 8)]
        keys[at]["row"], keys[at]["bytes"], keys[at]["source"], keys[at]["split"] = at, size, source, -1
    with RunWriter(folder / KEYS.file, KEYS, memory_bytes=1 << 20) as writer:
        writer.write(keys)
    with RunWriter(folder / URL_KEYS.file, URL_KEYS, memory_bytes=1 << 20) as writer:
        some = [at for at, url in enumerate(urls or []) if url is not None]
        keys = keys[some]
        keys["key"] = [int.from_bytes(url[:8], "big") for url in urls or [] if url is not None]
        keys["low"] = [int.from_bytes(url[8:], "big") for url in urls or [] if url is not None]
        writer.write(keys)
    return commit_folder(folder, "clean", folder.name)


def remove(
    run: TaskFolders,
    cleaned: list[Commit],
    documents: int,
    *,
    memory_bytes: int = 1 << 20,
    partitions: int = 1,
) -> tuple[list[ExactDuplicates], list[SplitTable]]:
    rows = max(1, -(-documents // partitions))
    limits = replace(SMALL, partition_bytes=rows * KEYS.dtype.itemsize)
    return remove_equal(run, EQUAL_TEXTS, KEYS, cleaned, documents, "first", memory_bytes, limits)


def brute_force(splits: list[list[Row]], *, order: Order = "first") -> dict[Place, Place]:
    """{loser: its winner} by one dictionary over everything."""
    groups: dict[bytes, list[tuple[tuple[int, ...], bytes, Place]]] = {}
    for split, rows in enumerate(splits):
        for at, (key, id, size, source) in enumerate(rows):
            first, longest = (source,), (-size, source)
            rank = {"first": first, "longest_of_source": (source, -size), "longest": longest}[order]
            groups.setdefault(key, []).append((rank, id, (split, at)))
    return {rank[-1]: min(group)[-1] for group in groups.values() for rank in group if rank != min(group)}


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    count=st.integers(0, 60),
    texts=st.integers(2, 30),
    splits=st.integers(1, 5),
    partitions=st.integers(1, 9),
    memory_bytes=st.sampled_from([100, 5000, 1 << 20]),
)
def test_outcomes_are_those_of_a_dictionary_for_any_splits_partitions_and_memory(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    count: int,
    texts: int,
    splits: int,
    partitions: int,
    memory_bytes: int,
) -> None:
    rows = rows_of(seed, count, texts)
    cut = [rows[at::splits] for at in range(splits)]
    folder = tmp_path_factory.mktemp("exact")
    cleaned = [clean(folder / f"clean-{at}", own) for at, own in enumerate(cut)]
    found, tables = remove(
        TaskFolders(folder), cleaned, count, memory_bytes=memory_bytes, partitions=partitions
    )
    expected = brute_force(cut)
    lost: dict[int, list[int]] = {}
    represent: dict[Place, int] = {}
    for split, table in enumerate(tables):
        removed = SplitRemovals({"exact": table}).load()
        lost[split] = removed.rows["exact"].tolist()
        represent |= {
            (split, row): copies
            for row, copies in zip(removed.copied.tolist(), removed.copies.tolist(), strict=True)
        }
        assert table.lost.documents == len(lost[split])
        assert table.lost.bytes == sum(cut[split][row][2] for row in lost[split])
    assert {(split, row) for split, own in lost.items() for row in own} == set(expected)
    copies = Counter(expected.values())
    assert represent == {place: number + 1 for place, number in copies.items()}
    assert sum(one.losers for one in found) == len(expected)
    assert sum(one.bytes for one in found) == sum(table.lost.bytes for table in tables)
    assert max(one.largest_group for one in found) == max([1, *represent.values()])
    assert np.sum([one.groups for one in found], axis=0).tolist()[1] == sum(
        number == 2 for number in represent.values()
    )


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    count=st.integers(0, 60),
    texts=st.integers(2, 30),
    splits=st.integers(1, 5),
    order=st.sampled_from(get_args(Order)),
    memory_bytes=st.sampled_from([100, 20_000, 40_000, 1 << 20]),
)
def test_each_loser_comes_with_who_stays_for_any_memory(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    count: int,
    texts: int,
    splits: int,
    order: Order,
    memory_bytes: int,
) -> None:
    rows = rows_of(seed, count, texts)
    cut = [rows[at::splits] for at in range(splits)]
    folder = tmp_path_factory.mktemp("copies")
    runs = [clean(folder / f"{at}", own) for at, own in enumerate(cut)]
    whole = exchange(TaskFolders(folder), EQUAL_TEXTS.find, KEYS, runs, readers=1, limits=SMALL).slice(
        0, 1 << 64
    )
    winners: dict[Place, Place] = {}
    represented: dict[Place, int] = {}
    for found in find_copies(whole, memory_bytes, order=order):
        lost, kept, several = (
            list(zip(rows["split"].tolist(), rows["row"].tolist(), strict=True))
            for rows in (found.lost, found.kept, found.winners)
        )
        assert not winners.keys() & set(lost)
        winners |= zip(lost, kept, strict=True)
        represented |= zip(several, found.represented.tolist(), strict=True)
    assert winners == brute_force(cut, order=order)
    assert represented == {place: 1 + losers for place, losers in Counter(winners.values()).items()}


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    count=st.integers(0, 60),
    texts=st.integers(2, 30),
    splits=st.integers(1, 5),
    partitions=st.integers(1, 9),
    keep=st.sampled_from(["first", "longest"]),
    memory_bytes=st.sampled_from([100, 5000, 1 << 20]),
)
def test_urls_are_compared_first_and_those_who_stay_stand_for_what_lost_to_them(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    count: int,
    texts: int,
    splits: int,
    partitions: int,
    keep: Literal["first", "longest"],
    memory_bytes: int,
) -> None:
    rows, rng = rows_of(seed, count, texts), random.Random(seed)
    names = [rng.randbytes(16) for _ in range(texts)]
    urls = [rng.choice([None, *names]) for _ in rows]
    cut, cut_urls = [rows[at::splits] for at in range(splits)], [urls[at::splits] for at in range(splits)]
    folder = tmp_path_factory.mktemp("urls")
    cleaned = [clean(folder / f"clean-{at}", own, cut_urls[at]) for at, own in enumerate(cut)]
    run, limits = TaskFolders(folder), replace(SMALL, partition_bytes=count // partitions * 56 + 1)
    known = sum(url is not None for url in urls)
    by_url, tables = remove_equal(run, EQUAL_URLS, URL_KEYS, cleaned, known, keep, memory_bytes, limits)
    removals = [SplitRemovals({"url_duplicate": table}) for table in tables]
    left = keys_left(run, URL_LEFT, cleaned, removals, memory_bytes, limits)
    by_text, texts_tables = remove_equal(
        run, EQUAL_TEXTS, WEIGHTED_KEYS, left, count, "first", memory_bytes, limits
    )
    # A document without URL, or that lost before, has a key of its own.
    of_urls = [
        [(url or bytes([split, at]), *row[1:]) for at, (row, url) in enumerate(zip(own, its, strict=True))]
        for split, (own, its) in enumerate(zip(cut, cut_urls, strict=True))
    ]
    lost = brute_force(of_urls, order="longest" if keep == "longest" else "first")
    stayed = [
        [(bytes([split, at]) if (split, at) in lost else row[0], *row[1:]) for at, row in enumerate(own)]
        for split, own in enumerate(cut)
    ]
    lost_texts = brute_force(stayed)
    assert not lost.keys() & lost_texts.keys()
    stands = Counter((split, at) for split, own in enumerate(cut) for at in range(len(own)))
    for loser, winner in [*lost.items(), *lost_texts.items()]:
        stands[winner] += stands.pop(loser)
    for split, pair in enumerate(zip(tables, texts_tables, strict=True)):
        removed = SplitRemovals({"url": pair[0], "exact": pair[1]}).load()
        for reason, expected in (("url", lost), ("exact", lost_texts)):
            assert removed.rows[reason].tolist() == sorted(row for at, row in expected if at == split)
        copies = dict(zip(removed.copied.tolist(), removed.copies.tolist(), strict=True))
        expected_copies = {row: number for (at, row), number in stands.items() if at == split and number > 1}
        assert {row: n for row, n in copies.items() if (split, row) in stands} == expected_copies
    groups = np.sum([one.groups for one in (*by_url, *by_text)], axis=0).tolist()
    assert groups[1] == sum(number == 2 for number in stands.values())
    assert sum(groups) == sum(number > 1 for number in stands.values())
    assert max(one.largest_group for one in (*by_url, *by_text)) == max([1, *stands.values()])


def test_a_file_more_changes_the_removals_of_those_splits_only_that_lose_other_documents(
    tmp_path: Path,
) -> None:
    rng = random.Random(5)
    shared = rng.randbytes(16)
    splits = [[(rng.randbytes(16), rng.randbytes(16), 5, 0) for _ in range(9)] for _ in range(4)]
    splits[1].append((shared, b"\1" * 16, 7, 0))
    splits[2][3] = (*splits[0][2][:1], b"\xff" * 16, 5, 0)
    cleaned = [clean(tmp_path / f"clean-{at}", own) for at, own in enumerate(splits)]
    run = TaskFolders(tmp_path)
    _, before = remove(run, cleaned, 37)
    added = clean(tmp_path / "clean-new", [(rng.randbytes(16), rng.randbytes(16), 5, 0)])
    _, after = remove(run, [cleaned[0], added, *cleaned[1:]], 38)
    assert [table.content for table in before] == [after[at].content for at in (0, 2, 3, 4)]
    added = clean(tmp_path / "clean-better", [(shared, b"\0" * 16, 5, 0)])
    _, after = remove(run, [cleaned[0], added, *cleaned[1:]], 38)
    same = [table.content == after[at].content for table, at in zip(before, (0, 2, 3, 4), strict=True)]
    assert same == [True, False, True, True]


def test_who_wins_is_by_source_and_if_so_wanted_by_length_and_then_the_lowest_id() -> None:
    rows = np.zeros(5, KEYS.dtype)
    rows["source"] = [1, 0, 0, 0, 0]
    rows["bytes"] = [9, 5, 5, 6, 1]
    rows["id"] = [(0, 0), (1, 2), (1, 1), (2, 0), (9, 9)]
    rows["key"][4] = 1
    chosen, winners = rank_copies(rows)
    assert (chosen.tolist(), winners.tolist()) == ([2, 1, 3, 0], [0, 0, 0, 0])
    chosen, winners = rank_copies(rows, order="longest_of_source")
    assert (chosen.tolist(), winners.tolist()) == ([3, 2, 1, 0], [0, 0, 0, 0])
    chosen, winners = rank_copies(rows, order="longest")
    assert (chosen.tolist(), winners.tolist()) == ([0, 3, 2, 1], [0, 0, 0, 0])
