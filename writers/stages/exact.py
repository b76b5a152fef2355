"""Stages `url` and `exact`: remove all but one of the documents with the same key.

Cleaning wrote a key of each document (`dedup/exact.py`), with `dedup.url` one of its URL (`dedup/urls.py`).
Each task takes a partition of the keys of all splits and decides; its outcomes go back to the splits
(`dedup/removals.py`). The number of partitions follows from the number of documents.

What lost to an equal URL must not win over an equal text: stage `url_left`, a task a split, writes the keys
of the documents that are left, with the number of documents that each stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardkit.writers.dedup.config import UrlDedupConfig
from shardkit.writers.dedup.exact import KEYS, WEIGHTED_KEYS, Order, find_copies, partition_bounds
from shardkit.writers.dedup.removals import (
    GROUP_SIZES,
    OUTCOME,
    OUTCOMES,
    SplitTable,
    by_split,
    count_groups,
    document_keys,
    outcomes,
)
from shardkit.writers.dedup.urls import URL_KEYS
from shardkit.writers.exchange import Limits, RunWriter, Slice, Table, exchange
from shardkit.writers.execution.task import Commit, PlainCounts, RunTasks, Task, partition_name
from shardkit.writers.runs import DEFAULT_LIMITS

__all__ = ["ExactDuplicates", "find_exact", "remove_exact", "remove_urls"]


@dataclass(frozen=True, slots=True)
class ExactDuplicates(PlainCounts):
    """What one partition removes. `groups` counts the documents that represent 2, 3, … documents, in the
    classes of `count_groups`; less those that represented several in the stage before, and do so no longer.
    """

    losers: int
    bytes: int
    groups: Sequence[int]
    largest_group: int


_Removed = tuple[list[ExactDuplicates], list[SplitTable]]


def remove_urls(
    run: RunTasks,
    cleaned: Sequence[Commit],
    documents: int,
    config: UrlDedupConfig,
    memory_bytes: int,
    *,
    limits: Limits = DEFAULT_LIMITS,
) -> _Removed:
    """Run stage `url`: what each partition removed, and the outcomes of each split.

    `documents` is the number of rows of URL_KEYS that the tasks `cleaned` wrote, one task a split.
    """
    order: Order = "longest" if config.keep == "longest" else "first"
    return _remove(run, "url", URL_KEYS, cleaned, documents, order, memory_bytes, limits)


def remove_exact(
    run: RunTasks,
    cleaned: Sequence[Commit],
    documents: int,
    memory_bytes: int,
    *,
    urls: Sequence[SplitTable] | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> _Removed:
    """Run stage `exact`: what each partition removed, and the outcomes of each split.

    `documents` is the number of rows of KEYS that the tasks `cleaned` wrote, one task a split; `urls` are the
    outcomes of stage `url`.
    """
    if urls is None:
        return _remove(run, "exact", KEYS, cleaned, documents, "first", memory_bytes, limits)
    tasks = []
    for commit, table in zip(cleaned, urls, strict=True):
        keys = exchange(run, "url_left", KEYS, [commit], readers=1, limits=limits).slice(0, 1 << 64)
        inputs = {"keys": keys.digest, "removed": table.digest}
        args = (keys, table, memory_bytes)
        tasks.append(Task("url_left", commit.name, {}, write_left, args, keys.bytes, inputs))
    [left] = run(tasks)
    return _remove(run, "exact", WEIGHTED_KEYS, left, documents, "first", memory_bytes, limits)


def _remove(
    run: RunTasks,
    stage: str,
    table: Table,
    written: Sequence[Commit],
    documents: int,
    order: Order,
    memory_bytes: int,
    limits: Limits,
) -> _Removed:
    partitions = limits.partitions(documents, table.dtype)
    keys = exchange(run, stage, table, written, readers=partitions, limits=limits)
    settings = {} if order == "first" else {"order": order}
    tasks = []
    for number in range(partitions):
        piece = keys.slice(*partition_bounds(number, partitions))
        name, inputs = partition_name(number, partitions), {"keys": piece.digest}
        args = (piece, memory_bytes, order)
        tasks.append(Task(stage, name, settings, find_exact, args, piece.bytes, inputs))
    [commits] = run(tasks)
    removed = by_split(run, f"{stage}_removed", OUTCOMES, commits, len(written), limits=limits)
    return [ExactDuplicates.of(commit) for commit in commits], removed


def find_exact(folder: Path, keys: Slice, memory_bytes: int, order: Order = "first") -> ExactDuplicates:
    """Write the outcomes of one partition into `folder`. The similarity of equal URLs is unknown."""
    losers = size = 0
    largest, groups = 1, np.zeros(len(GROUP_SIZES) + 1, np.int64)
    file, limits = folder / OUTCOMES.file, keys.limits
    similarity = np.nan if keys.table == URL_KEYS else 1
    with RunWriter(file, OUTCOMES, memory_bytes=memory_bytes // 4, limits=limits) as writer:
        for found in find_copies(keys, memory_bytes, order=order):
            lost, kept, copies = found.lost, found.winners, found.represented
            places = document_keys(lost["split"], lost["row"])
            ranks = found.kept["id"]
            writer.write(outcomes(places, bytes=lost["bytes"], kept=ranks, similarity=similarity))
            writer.write(outcomes(document_keys(kept["split"], kept["row"]), copies=copies))
            losers, size = losers + len(lost), size + int(lost["bytes"].sum())
            groups += count_groups(copies)
            if keys.table == WEIGHTED_KEYS:
                before = np.concatenate([lost["copies"], kept["copies"]])
                groups -= count_groups(before[before > 1])
            largest = max(largest, int(copies.max(initial=1)))
    return ExactDuplicates(losers, size, groups.tolist(), largest)


@dataclass(frozen=True, slots=True)
class Left(PlainCounts):
    """Documents of a split that did not lose to an equal URL."""

    documents: int


def write_left(folder: Path, keys: Slice, urls: SplitTable, memory_bytes: int) -> Left:
    """Write the WEIGHTED_KEYS of one split into `folder`: its KEYS without what `urls` removed."""
    decided = urls.read(OUTCOME)
    decided = decided[np.argsort(decided["row"])]
    documents = 0
    file, limits = folder / WEIGHTED_KEYS.file, keys.limits
    with RunWriter(file, WEIGHTED_KEYS, memory_bytes=memory_bytes // 4, limits=limits) as writer:
        for rows, _ in keys.stream(memory_bytes // 4):
            weighted = np.empty(len(rows), WEIGHTED_KEYS.dtype)
            for name in KEYS.dtype.names or ():
                weighted[name] = rows[name]
            weighted["copies"], weighted["split"] = 1, -1  # its number, once the exchange reads it
            if len(decided):
                places = np.minimum(np.searchsorted(decided["row"], rows["row"]), len(decided) - 1)
                known = decided["row"][places] == rows["row"]
                weighted["copies"][known] = decided["copies"][places[known]]
            weighted = weighted[weighted["copies"] > 0]
            writer.write(weighted)
            documents += len(weighted)
    return Left(documents)
