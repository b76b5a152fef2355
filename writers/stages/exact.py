"""Stage `exact`: removes all but one of the documents with the same key.

Cleaning wrote a key for each document (`dedup/exact.py`). Each task takes one partition of the keys of all
splits, and writes the removed documents (`losers.npy`) and the kept ones with their number of copies
(`winners.npy`), both sorted by (split, row). The number of partitions follows from the number of documents
and the memory of a task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardkit.hashing import digest_of
from shardkit.writers.dedup.exact import find_losers, find_winners
from shardkit.writers.dedup.removals import LOSERS_FILE, WINNERS_FILE, count_groups
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.task import Commit, PlainCounts, Task, partition_name
from shardkit.writers.ledger import Count
from shardkit.writers.stages.clean import KEYS_FILE

__all__ = ["ExactDuplicates", "find_exact", "tasks"]


@dataclass(frozen=True, slots=True)
class ExactDuplicates(PlainCounts):
    """Losses of one partition: `splits` maps a split's number to (documents, bytes) that it lost.

    `groups` counts the documents that represent 2, 3, … documents, in the classes of `count_groups`.
    """

    losers: int
    bytes: int
    splits: Mapping[str, Sequence[int]]
    groups: Sequence[int]
    largest_group: int

    def by_split(self) -> dict[int, Count]:
        """What each split lost."""
        return {int(split): Count(*lost) for split, lost in self.splits.items()}


def tasks(cleaned: Sequence[Commit], partitions: int) -> list[Task]:
    """One task a partition of keys."""
    paths = tuple(commit.files / KEYS_FILE for commit in cleaned)
    inputs = {"keys": digest_of([commit.outputs[KEYS_FILE].xxh3_128 for commit in cleaned])}
    made = []
    for number in range(partitions):
        config = {"partition": number, "partitions": partitions}
        args = (paths, number, partitions)
        made.append(
            Task("exact", partition_name(number, partitions), config, find_exact, args, inputs=inputs)
        )
    return made


def find_exact(folder: Path, paths: Sequence[Artifact], partition: int, partitions: int) -> ExactDuplicates:
    """Write the losers and winners among the keys of one partition into `folder`."""
    losers = find_losers(paths, partition, partitions)
    winners = find_winners(losers)
    np.save(folder / LOSERS_FILE, losers, allow_pickle=False)
    np.save(folder / WINNERS_FILE, winners, allow_pickle=False)
    documents = np.bincount(losers["split"])
    sizes = np.bincount(losers["split"], losers["bytes"]).astype(np.int64)
    return ExactDuplicates(
        losers=len(losers),
        bytes=int(losers["bytes"].sum()),
        splits={str(n): [int(documents[n]), int(sizes[n])] for n in np.flatnonzero(documents).tolist()},
        groups=count_groups(winners["copies"]),
        largest_group=int(winners["copies"].max(initial=1)),
    )
