"""Many small files are read by few tasks: their splits are grouped.

A task that starts, writes, commits and is read again by later stages costs as much as filtering some hundred
kilobytes of text. Documents keep their files, record numbers and ids, and files their digests, so grouping
changes no shard. What tasks write for people follows the tasks: the parts of dropped/, and the examples of
texts there and in duplicates/, of which each task keeps some.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import xxhash

from shardkit.writers.inputs.decompress import COMPRESSIONS
from shardkit.writers.inputs.scan import Split

_SMALL_BYTES = 1 << 21  # of text: to filter more takes far longer than its task takes to start and commit
_MANY = 32  # fewer small files in a row stay apart: a task of its own for each costs about a second in all
_GROUP_BYTES = 1 << 24  # of text, on average: two seconds of work
_FILE_BYTES = 1 << 13  # of text that can be filtered while a file is opened and booked
_PACKED = {"parquet", "arrow", *COMPRESSIONS.values()}
_STORED_TEXT = 4  # bytes of text in a byte of a compressed file, at most as a rule


def group_small_files(
    splits: Sequence[Split],
    *,
    small_bytes: int = _SMALL_BYTES,
    many: int = _MANY,
    group_bytes: int = _GROUP_BYTES,
) -> list[Split]:
    """The same splits in the same order; where many small files of an input follow each other, in groups.

    Names and sizes of files decide, nothing else. A group ends after a file by chance, by the hash of its
    name and in proportion to its size, so that a file which is added, removed or changed in size changes the
    groups beside it only. A group that has become twice as large as `group_bytes` ends in any case.
    """
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
    """About the text in splits."""
    return sum(
        split.bytes * (_STORED_TEXT if (split.compression or split.format) in _PACKED else 1)
        for split in splits
    )
