"""Stage `exact`: removes all but one of the documents with the same key.

Cleaning wrote a key for each document (`dedup/exact.py`). Each task takes a partition of the keys of all
splits and decides; its outcomes go back to the splits (`dedup/removals.py`). The number of partitions follows
from the number of documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardkit.writers.dedup.exact import KEYS, find_copies, partition_bounds
from shardkit.writers.dedup.removals import (
    GROUP_SIZES,
    OUTCOMES,
    SplitTable,
    by_split,
    count_groups,
    document_keys,
    outcomes,
)
from shardkit.writers.exchange import Limits, RunWriter, Slice, exchange
from shardkit.writers.execution.task import Commit, PlainCounts, RunTasks, Task, partition_name
from shardkit.writers.runs import DEFAULT_LIMITS

__all__ = ["ExactDuplicates", "find_exact", "remove_exact"]


@dataclass(frozen=True, slots=True)
class ExactDuplicates(PlainCounts):
    """What one partition removes. `groups` counts the documents that represent 2, 3, … documents, in the
    classes of `count_groups`.
    """

    losers: int
    bytes: int
    groups: Sequence[int]
    largest_group: int


def remove_exact(
    run: RunTasks,
    cleaned: Sequence[Commit],
    documents: int,
    memory_bytes: int,
    *,
    limits: Limits = DEFAULT_LIMITS,
) -> tuple[list[ExactDuplicates], list[SplitTable]]:
    """Run the stage: what each partition removed, and the outcomes of each split.

    `documents` is the number of rows of KEYS that the tasks `cleaned` wrote, one task a split.
    """
    partitions = limits.partitions(documents, KEYS.dtype)
    keys = exchange(run, "exact", KEYS, cleaned, readers=partitions, limits=limits)
    tasks = []
    for number in range(partitions):
        piece = keys.slice(*partition_bounds(number, partitions))
        name, inputs = partition_name(number, partitions), {"keys": piece.digest}
        tasks.append(Task("exact", name, {}, find_exact, (piece, memory_bytes), piece.bytes, inputs))
    [commits] = run(tasks)
    removed = by_split(run, "exact_removed", OUTCOMES, commits, len(cleaned), limits=limits)
    return [ExactDuplicates.of(commit) for commit in commits], removed


def find_exact(folder: Path, keys: Slice, memory_bytes: int) -> ExactDuplicates:
    """Write the outcomes of one partition into `folder`."""
    losers = size = 0
    largest, groups = 1, np.zeros(len(GROUP_SIZES) + 1, np.int64)
    file, limits = folder / OUTCOMES.file, keys.limits
    with RunWriter(file, OUTCOMES, memory_bytes=memory_bytes // 4, limits=limits) as writer:
        for found in find_copies(keys, memory_bytes):
            lost, kept, copies = found.lost, found.winners, found.represented
            places = document_keys(lost["split"], lost["row"])
            writer.write(outcomes(places, bytes=lost["bytes"], kept=found.kept["id"], similarity=1))
            writer.write(outcomes(document_keys(kept["split"], kept["row"]), copies=copies))
            losers, size = losers + len(lost), size + int(lost["bytes"].sum())
            groups += count_groups(copies)
            largest = max(largest, int(copies.max(initial=1)))
    return ExactDuplicates(losers, size, groups.tolist(), largest)
