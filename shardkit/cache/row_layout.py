"""Where rows are in shards of any format, if the index alone says so: what lets single rows be read by range.

These are raw MDS shards whose columns all have a fixed size, ranges of flat token files, and tars as shardkit
writes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardkit.arrays import Bytes
from shardkit.formats.tar.members import BLOCK
from shardkit.formats.tar.values import make_npy_header
from shardkit.formats.tar.writer import RECORD_BYTES, member_bytes
from shardkit.manifest import ShardInfo

__all__ = ["MAX_ROW_BYTES", "ColumnPlace", "RowLayout", "row_layout"]

MAX_ROW_BYTES = 4 << 20  # longer ones are not worth a request of their own
_NAME_BYTES = 100  # of a member, at the start of its header


@dataclass(frozen=True, slots=True)
class ColumnPlace:
    """Values are the `size` bytes from `at` on in a row: of all columns together, or of a member of a tar.

    Before those of a member come the .npy header `head`, and the block with its name, which has `suffix`.
    """

    at: int
    size: int
    head: bytes = b""
    suffix: bytes = b""

    def is_in(self, row: bytes) -> bool:
        """Whether what comes before the values is in a row."""
        start = self.at - len(self.head)
        name = row[max(0, start - BLOCK) : start][:_NAME_BYTES].rstrip(b"\0")
        return row.startswith(self.head, start) and name.endswith(self.suffix)


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Row r is the bytes [first + r * stride, + size) of a shard, with values of `columns` in their order."""

    first: int
    stride: int
    size: int
    columns: tuple[ColumnPlace, ...]

    def values(self, row: Bytes | bytes) -> bytes:
        """The columns' bytes in a row, one after the other."""
        return b"".join(bytes(row[column.at : column.at + column.size]) for column in self.columns)


def row_layout(kind: str, info: ShardInfo) -> RowLayout | None:
    """Where rows are in a shard of that format, if the index says so."""
    sizes = [column.size for column in info.columns]
    total = sum(size or 0 for size in sizes)
    if info.samples < 1 or not total or None in sizes or info.compression or total > MAX_ROW_BYTES:
        return None
    if kind == "tokens":
        return RowLayout(0, total, total, (ColumnPlace(0, total),))
    if kind == "mds":
        first = info.raw.bytes - info.samples * total  # samples fill the file's end
        return RowLayout(first, total, total, (ColumnPlace(0, total),)) if first > 0 else None
    names = [column.name for column in info.columns]
    if kind != "tar" or names != sorted(names):  # as members are written; lists of others have any order
        return None
    places, size = [], 0
    for column in info.columns:
        parts = column.encoding.split(":")
        if len(parts) != 3 or not parts[2].isdigit():
            return None
        dtype, length = np.dtype(parts[1]), int(parts[2])
        head = make_npy_header(dtype, length)
        at, name = size + BLOCK + len(head), f".{column.name}".encode()
        places.append(ColumnPlace(at, length * dtype.itemsize, head, name))
        size += member_bytes(length, dtype)
    end = -(-(info.samples * size + 2 * BLOCK) // RECORD_BYTES) * RECORD_BYTES
    return RowLayout(0, size, size, tuple(places)) if end == info.raw.bytes else None
