"""Groups the splits of small files, so that few tasks read many small files.

A task that starts, writes, commits and is read again by later stages costs as much as filtering some hundred
kilobytes of text. Documents keep their files, record numbers and ids, and files their digests, so grouping
changes no shard. Only the reports for people depend on the tasks: the files of dropped/, and the examples of
texts there and in duplicates/, because each task keeps some.

What is a small file grows with the corpus, so that petabytes are not millions of tasks: see `group_size`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import xxhash

from shardkit.writers.inputs.decompress import COMPRESSIONS
from shardkit.writers.inputs.scan import Split

_SMALL_BYTES = 1 << 21  # maximum text in a small file; filtering more takes far longer than starting a task
_MOST_TASKS = 1 << 20  # about how many groups there are at most, if files are not larger
_MANY = 32  # minimum number of small files in a row to group; tasks for fewer take a second in total
_GROUP_BYTES = 1 << 24  # average bytes of text in a group, which take two seconds to filter
_FILE_BYTES = 1 << 13  # bytes of text that can be filtered in the time to open a file and record its counts
_PACKED = {"parquet", "arrow", *COMPRESSIONS.values()}
_STORED_TEXT = 4  # assumed bytes of text per byte of a compressed file; the real ratio is usually lower


def group_small_files(
    splits: Sequence[Split],
    *,
    many: int = _MANY,
    group_bytes: int | None = None,
) -> list[Split]:
    """Group runs of at least `many` small files of an input; return all splits in the same order.

    `group_bytes` is `group_size` of all splits if it is not given.

    The groups depend only on the names and sizes of files. The hash of a file's name decides whether a group
    ends after it, with a probability proportional to its size. So adding, removing or resizing a file changes
    only the groups next to it. A group always ends at twice `group_bytes`.
    """
    group_bytes = group_size(text_bytes(splits)) if group_bytes is None else group_bytes
    small_bytes = _SMALL_BYTES if group_bytes <= _GROUP_BYTES else group_bytes // 2
    made: list[Split] = []
    small: list[Split] = []

    def close() -> None:
        made.extend(small if len(small) < many else _grouped(small, group_bytes))
        small.clear()

    for number, split in enumerate(splits):
        if small and small[-1].source != split.source:
            close()
        cut = any(
            0 <= other < len(splits) and splits[other].input == split.input
            for other in (number - 1, number + 1)
        )
        if not cut and text_bytes([split]) <= small_bytes:
            small.append(split)
        else:
            close()
            made.append(split)
    close()
    return [replace(split, index=index) for index, split in enumerate(made)]


def group_size(text: float) -> int:
    """Return the average bytes of text in a group of small files, for a corpus with so many bytes of text.

    It is 16 MiB up to 17 TB. Above, it is the least power of four times as much with which a corpus of small
    files is a million groups at most. So it rarely changes when a corpus grows.
    """
    size = _GROUP_BYTES
    while text > size * _MOST_TASKS:
        size *= 4
    return size


def _grouped(splits: Sequence[Split], group_bytes: int) -> Iterator[Split]:
    group: list[Split] = []
    size = 0
    for number, split in enumerate(splits):
        group.append(split)
        weight = max(text_bytes([split]), _FILE_BYTES)
        size += weight
        chance = xxhash.xxh3_64_intdigest(split.file.encode())
        ends = chance * group_bytes < weight << 64
        if ends or size >= 2 * group_bytes or number == len(splits) - 1:
            first, *rest = group
            yield replace(first, bytes=sum(one.bytes for one in group), rest=tuple(rest)) if rest else first
            group, size = [], 0


def text_bytes(splits: Iterable[Split]) -> int:
    """Estimate the text in splits, in bytes."""
    return sum(
        split.bytes * (_STORED_TEXT if (split.compression or split.format) in _PACKED else 1)
        for split in splits
    )
