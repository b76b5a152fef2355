"""Stage `record_counts`: number the records of large plain files in a store, which are cut unread.

A document's id is made of its file and the number of its record, so a split must know how many records come
before it. Of a local file that is counted while it is cut. A file in a store may be larger than any machine
reads in reasonable time: each task counts the lines of one split, and the first record of a split is the sum
over those before it. Such files are read twice; compressed ones are one split and read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shardkit.writers.execution.task import RunTasks, Task
from shardkit.writers.inputs.cuts import UNCOUNTED
from shardkit.writers.inputs.decompress import plain_range
from shardkit.writers.inputs.files import open_input
from shardkit.writers.inputs.scan import Split
from shardkit.writers.stages.clean import split_name

__all__ = ["count_records"]

STAGE = "record_counts"


def count_records(splits: Sequence[Split], run: RunTasks) -> Sequence[Split]:
    """The splits, each with its first record."""
    uncounted = {split.input for split in splits if split.first_record == UNCOUNTED}
    if not uncounted:
        return splits
    counted = [split for split in splits if split.input in uncounted]
    tasks = [
        Task(
            STAGE,
            split_name(split),
            {"file": split.file, "range": [split.start, split.end]},
            _count,
            (split,),
            split.bytes,
            {"file": [split.input.bytes, split.input.version]},
        )
        for split in counted
    ]
    [commits] = run(tasks)
    lines = {split.index: int(commit.counts["lines"]) for split, commit in zip(counted, commits, strict=True)}
    made, before = [], 0
    for split in splits:
        if split.index not in lines:
            made.append(split)
            continue
        before = before if split.start else 0  # of the same file: its splits follow each other
        made.append(replace(split, first_record=before))
        before += lines[split.index]
    return made


def _count(folder: Path, split: Split) -> dict[str, int]:
    with open_input(split.input) as file:
        return {"lines": sum(piece.count(b"\n") for piece in plain_range(file, split.start, split.end))}
