"""Line dedup as tasks: keys of lines, who loses which, and the documents without them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardkit.writers.dedup.config import LinesDedupConfig
from shardkit.writers.dedup.lines_cut import cut_lines
from shardkit.writers.dedup.lines_keys import (
    LINE_LOSERS_FILE,
    find_line_losers,
    partitions_for,
    write_line_keys,
)
from shardkit.writers.dedup.near_stages import SplitDocuments
from shardkit.writers.dedup.removals import LOSERS_FILE, WINNERS_FILE
from shardkit.writers.execution.task import Commit, Task, contents, partition_name

__all__ = ["cut_tasks", "key_tasks", "loser_tasks"]


def key_tasks(
    splits: Sequence[SplitDocuments], exact: Sequence[Commit], config: LinesDedupConfig
) -> list[Task]:
    """One task a split."""
    losers = tuple(commit.folder / LOSERS_FILE for commit in exact)
    settings = {"dedup.lines": config.model_dump(mode="json")}
    duplicates = contents(exact)
    return [
        Task(
            "line_keys",
            split.name,
            settings | {"split": number},
            _write_keys,
            (split.documents, config, number, losers),
            split.bytes,
            {"documents": split.digest, "exact": duplicates},
        )
        for number, split in enumerate(splits)
    ]


def loser_tasks(keys: Sequence[Commit], config: LinesDedupConfig, memory_bytes: int) -> list[Task]:
    """One task a partition of keys."""
    partitions = partitions_for(sum(commit.counts["keys"] for commit in keys), memory_bytes)
    settings = {"dedup.lines.keep": config.keep, "partitions": partitions}
    inputs = {"keys": contents(keys)}
    folders = tuple(commit.folder for commit in keys)
    return [
        Task(
            "line_losers",
            partition_name(number, partitions),
            settings | {"partition": number},
            _find_losers,
            (folders, number, partitions, config.keep),
            inputs=inputs,
        )
        for number in range(partitions)
    ]


def cut_tasks(
    splits: Sequence[SplitDocuments],
    keys: Sequence[Commit],
    losers: Sequence[Commit],
    exact: Sequence[Commit],
    config: LinesDedupConfig,
) -> list[Task]:
    """One task a split: its documents.arrow anew, without repeated lines and exact duplicates."""
    line_losers = tuple(commit.folder / LINE_LOSERS_FILE for commit in losers)
    exact_losers = tuple(commit.folder / LOSERS_FILE for commit in exact)
    exact_winners = tuple(commit.folder / WINNERS_FILE for commit in exact)
    settings = {"dedup.lines": config.model_dump(mode="json")}
    shared = {"losers": contents(losers), "exact": contents(exact)}
    tasks = []
    for number, (split, own) in enumerate(zip(splits, keys, strict=True)):
        inputs = shared | {"documents": split.digest, "keys": own.content}
        tables = (own.folder, line_losers, exact_losers, exact_winners)
        tasks.append(
            Task(
                "lines",
                split.name,
                settings | {"split": number},
                _cut,
                (split.documents, config, number, tables),
                split.bytes,
                inputs,
            )
        )
    return tasks


def _write_keys(
    folder: Path, documents: Path, config: LinesDedupConfig, split: int, exact_losers: Sequence[Path]
) -> dict[str, Any]:
    return write_line_keys(documents, config, folder, split=split, exact_losers=exact_losers)


def _find_losers(
    folder: Path, keys: Sequence[Path], partition: int, partitions: int, keep: int
) -> dict[str, Any]:
    return find_line_losers(keys, partition, partitions, folder, keep=keep)


def _cut(
    folder: Path,
    documents: Path,
    config: LinesDedupConfig,
    split: int,
    tables: tuple[Path, Sequence[Path], Sequence[Path], Sequence[Path]],
) -> dict[str, Any]:
    own, line_losers, exact_losers, exact_winners = tables
    return cut_lines(
        documents,
        config,
        folder,
        split=split,
        keys_folder=own,
        line_losers=line_losers,
        exact_losers=exact_losers,
        exact_winners=exact_winners,
    )
