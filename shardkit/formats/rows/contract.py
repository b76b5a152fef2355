"""What the formats of row files have in common: Parquet, Arrow, JSON lines.

A *row file* has rows of named columns in *groups*, each of which can be decoded without the others: row
groups, record batches, blocks of lines. Consecutive groups of a file are a shard. A format says where the
bytes of each group are (`RowFormat.read`, `RowFormat.parse`), and how the bytes of a shard are decoded
(`RowPart.open`). Everything else is told once: files are found and shards are cut by
`shardkit.datasets.row_files`, values are made from Arrow columns by `RowShard`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from shardkit.arrays import Bytes
from shardkit.formats.tokens import Piece

Read = Callable[[int, int], bytes]
"""Reads the bytes of a file from one offset to another (exclusive)."""

ReadColumns = Callable[[Sequence[str]], Mapping[str, Any]]
"""Returns columns of a shard as `pyarrow.ChunkedArray`. Raises ValueError, OSError or ArrowException."""

Range = tuple[int, int]
"""Bytes of a file: from one offset to another (exclusive)."""

Pieces = Sequence[tuple[int, Bytes]]
"""The bytes of a shard: (offset in the file, bytes) of each range."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Values of a column in a group: bytes `start` to `stop` (exclusive) of the file.

    `values` counts the values, including nulls; `nulls` is None if the file does not say how many there are.
    """

    start: int
    stop: int
    values: int
    decoded_bytes: int
    nulls: int | None


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A group of rows: its number of rows and, for each top-level column, the chunks of its values.

    `common` are ranges (start, stop) that must be read whatever the columns are.
    """

    rows: int
    chunks: Mapping[str, tuple[Chunk, ...]]
    common: tuple[tuple[int, int], ...] = ()


class RowPart(Protocol):
    """The groups of a file which are a shard; plain data, because loaders are pickled for their workers."""

    @property
    def file(self) -> str:
        """The name of the file."""

    @property
    def first_row(self) -> int:
        """The number of the shard's first row in the file."""

    @property
    def groups(self) -> range:
        """The numbers of the groups in the file."""

    @property
    def title(self) -> str:
        """The groups, for messages: "row groups 3 to 5"."""

    def open(self, pieces: Pieces) -> ReadColumns:
        """Return the reader of the shard whose bytes are `pieces`."""


class RowFile(Protocol):
    """A file whose groups are known."""

    @property
    def encodings(self) -> Mapping[str, str]:
        """The encoding of each column (`shardkit.formats.rows.columns`)."""

    @property
    def seen(self) -> bytes:
        """Facts about the content, for the fingerprint; the same with any version of any library."""

    @property
    def broken(self) -> Mapping[str, str]:
        """Columns that cannot be read, and why."""

    @property
    def groups(self) -> Sequence[RowGroup]: ...

    def part(self, file: str, groups: range, first_row: int, columns: Sequence[str]) -> RowPart:
        """Return some groups of this file, called `file`, as a part of which only `columns` will be read."""


class Selected(NamedTuple):
    """The rows of a part with other columns: those of the wanted ones that its file has."""

    part: RowPart
    encodings: Mapping[str, str]  # of all columns of the file
    ranges: Sequence[Range]  # of the file, which hold the columns


class RowFormat(Protocol):
    """A format of row files."""

    title: str  # for messages
    suffixes: tuple[str, ...]  # of the names of its files
    unit: str  # what a group is called
    version: int  # of what `read` returns
    is_read_whole: bool  # whether `read` reads all of a file, so that the result is kept for local files, too

    def read(self, where: str, read: Read, file_bytes: int) -> bytes:
        """Return what `parse` needs to know of a file. Raises ShardError if it is malformed."""

    def parse(self, where: str, data: bytes, file_bytes: int) -> RowFile:
        """Parse what `read` returned. Raises ShardError if it is malformed."""

    def alike(self, files: Sequence[RowFile]) -> Sequence[RowFile]:
        """Return the files with the types that their columns have in common."""

    def select(self, part: RowPart, names: Sequence[str], where: str) -> Selected:
        """Return the same rows with other columns. Raises ShardError if the file is malformed."""


class PiecesFile(io.RawIOBase):
    """A file of which only some ranges of bytes are there; reading others is an error."""

    def __init__(self, size: int, parts: Pieces) -> None:
        self._size, self._parts, self._at = size, parts, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read_buffer(self, count: int) -> Any:
        """Return the next bytes as an Arrow buffer, without a copy; pyarrow calls this method."""
        import pyarrow as pa

        return pa.py_buffer(self._next(count))

    def read(self, count: int | None = -1, /) -> bytes:
        return self._next(self._size if count is None or count < 0 else count).tobytes()

    def _next(self, count: int) -> Bytes:
        count = min(count, self._size - self._at)
        for start, data in self._parts:
            if start <= self._at and self._at + count <= start + len(data):
                found = data[self._at - start : self._at - start + count]
                self._at += count
                return found
        raise OSError(f"bytes {self._at:,} to {self._at + count:,} do not belong to these columns")


def split_pieces(pieces: Sequence[Piece], raw: Bytes) -> list[tuple[int, Bytes]]:
    """Return (offset in the file, bytes) of each piece of a shard whose concatenated bytes are `raw`."""
    found, at = [], 0
    for piece in pieces:
        found.append((piece.start, raw[at : at + piece.bytes]))
        at += piece.bytes
    return found


def title_of(unit: str, groups: range) -> str:
    """Return the numbers of groups in words."""
    return f"{unit} {groups[0]}" if len(groups) == 1 else f"{plural(unit)} {groups[0]} to {groups[-1]}"


def plural(unit: str) -> str:
    """Return the plural of what a group is called."""
    return f"{unit}es" if unit.endswith("ch") else f"{unit}s"
