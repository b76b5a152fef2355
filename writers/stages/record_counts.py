"""Stage `record_counts`: numbers the records of large plain files in a store, which are split unread.

A document's id contains its file and the number of its record, so a split must know how many records precede
it. In a local file they are counted while it is split. A file in a store may be too large for one machine to
read in reasonable time, so each task counts the lines of one split, and a split's first record number is the
sum over the splits before it. Such files are read twice; a compressed file is one split and is read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shardkit.writers.execution.stage import RunTasks, Stage
from shardkit.writers.inputs.cuts import UNCOUNTED
from shardkit.writers.inputs.decompress import plain_range
from shardkit.writers.inputs.files import InputFile, open_input
from shardkit.writers.inputs.scan import Split


def count_records(splits: Sequence[Split], run: RunTasks) -> Sequence[Split]:
    """Return the splits with the number of their first record, running tasks to count where it is unknown."""
    uncounted = {split.input for split in splits if split.first_record == UNCOUNTED}
    if not uncounted:
        return splits
    counted = [split for split in splits if split.input in uncounted]
    tasks = [
        RECORD_COUNTS.task(split.task_name, split.bytes, split.input, split.start, split.end)
        for split in counted
    ]
    [commits] = run(tasks)
    lines = {
        split.index: RECORD_COUNTS.result(commit) for split, commit in zip(counted, commits, strict=True)
    }
    made, before = [], 0
    for split in splits:
        if split.index not in lines:
            made.append(split)
            continue
        before = before if split.start else 0  # the splits of a file are consecutive, from offset 0 on
        made.append(replace(split, first_record=before))
        before += lines[split.index]
    return made


def count_lines(folder: Path, file: InputFile, start: int, end: int) -> int:
    """Return the number of lines that end in bytes [start, end) of a plain file."""
    with open_input(file) as opened:
        return sum(piece.count(b"\n") for piece in plain_range(opened, start, end))


RECORD_COUNTS = Stage("record_counts", "read and filter", count_lines)
