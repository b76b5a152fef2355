"""Read row groups of Parquet files in place, as shards.

The footer of a file says where the values of each row group are. pyarrow reads the ranges of the file which
hold the wanted columns as a file whose other bytes are missing, with a footer of these row groups only.

A footer is parsed here and not by pyarrow, because pyarrow's column metadata can end the process if a file is
hostile (`shardkit.formats.parquet_limits`). Only the schema is taken from pyarrow. All offsets and sizes are
checked against the file's size. `ParquetFooter.of_groups` returns a footer of some row groups, with which
pyarrow reads these without parsing the others. parquet.thrift numbers the fields:

    FileMetaData    2 schema   3 num_rows   4 row_groups: [RowGroup]   8 encryption_algorithm
    RowGroup        1 columns: [ColumnChunk]   3 num_rows
    ColumnChunk     1 file_path   3 meta_data   8 crypto_metadata
    meta_data       3 path_in_schema   5 num_values   6 total_uncompressed_size   7 total_compressed_size
                    9 data_page_offset   11 dictionary_page_offset   12 statistics: 3 null_count
"""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

import zstandard

from shardkit.errors import NOT_WHOLE, ShardError, naming_extras
from shardkit.formats.parquet_limits import CompactThrift
from shardkit.formats.rows.columns import encodings_of
from shardkit.formats.rows.contract import (
    Chunk,
    Pieces,
    PiecesFile,
    Read,
    ReadColumns,
    RowFile,
    RowGroup,
    RowPart,
    Selected,
    title_of,
)

if TYPE_CHECKING:
    import pyarrow as pa

UNIT = "row group"
MAGIC = b"PAR1"
MAX_FOOTER_BYTES = 256 << 20  # a footer of a million column chunks has about 100 MB
TAIL_BYTES = 1 << 16  # size of the first read at a file's end, which includes most footers

_ENCRYPTED_MAGIC = b"PARE"
_END_BYTES = 8  # the length of the footer, and the magic
_ROW_GROUPS, _ENCRYPTION = 4, 8
_LIST_OF_STRUCTS, _LONG_LIST = 0x0C, 0xFC
_MAX_COUNT = 1 << 53

Where = str | PathLike[str]


def footer_bytes(where: Where, tail: bytes, file_bytes: int) -> int:
    """Return the size of the footer of a file that ends with the bytes `tail`, without magic and length.

    Raises ShardError if the file does not end like a Parquet file.
    """
    if file_bytes < _END_BYTES + len(MAGIC) or tail[-4:] not in (MAGIC, _ENCRYPTED_MAGIC):
        raise ShardError(where, f"is not a Parquet file, or {NOT_WHOLE}: it does not end with PAR1")
    if tail[-4:] == _ENCRYPTED_MAGIC:
        raise ShardError(where, "is encrypted; only Parquet files without encryption can be read")
    size = int.from_bytes(tail[-8:-4], "little")
    if size > file_bytes - _END_BYTES - len(MAGIC):
        raise ShardError(where, f"states a footer of {size:,} bytes in a file of {file_bytes:,}: {NOT_WHOLE}")
    if size > MAX_FOOTER_BYTES:
        raise ShardError(where, f"has a footer of {size:,} bytes; at most {MAX_FOOTER_BYTES:,} are read")
    return size


@dataclass(frozen=True, slots=True)
class ParquetPart:
    """Row groups of a file, which are a shard.

    `footer` is a footer of these row groups only, compressed with zstd.
    """

    file: str
    file_bytes: int
    groups: range
    first_row: int
    footer: bytes

    @property
    def title(self) -> str:
        """The row groups, for messages."""
        return title_of(UNIT, self.groups)

    def open(self, pieces: Pieces) -> ReadColumns:
        """Return the reader of the shard whose bytes are `pieces`."""
        import pyarrow.parquet as pq

        metadata = pq.read_metadata(as_file(zstandard.decompress(self.footer, MAX_FOOTER_BYTES)))
        source = PiecesFile(self.file_bytes, pieces)
        file = pq.ParquetFile(source, metadata=metadata, pre_buffer=False)
        groups = list(range(len(self.groups)))

        def read(names: Sequence[str]) -> dict[str, Any]:
            table = file.read_row_groups(groups, columns=[*names], use_threads=False)
            return {name: table.column(name) for name in names}

        return read


def as_file(footer: bytes) -> io.BytesIO:
    """Return a file that has this footer and nothing else."""
    return io.BytesIO(MAGIC + footer + len(footer).to_bytes(4, "little") + MAGIC)


class ParquetFooter:
    """The row groups of one file, and its schema as pyarrow reads it."""

    def __init__(self, where: Where, data: bytes, file_bytes: int) -> None:
        """Parse the footer `data` of a file of `file_bytes`. Raises ShardError if it is malformed."""
        self._where, self._data, self._file_bytes = where, data, file_bytes
        self.seen = data
        self._end = file_bytes - _END_BYTES - len(data)  # where the footer begins and all values have ended
        with naming_extras("a Parquet file", pyarrow="parquet"):
            import pyarrow as pa
            import pyarrow.parquet as pq
        try:
            self.schema: pa.Schema = pq.read_schema(as_file(data))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise ShardError(where, f"has a footer that cannot be read: {error}; {NOT_WHOLE}") from error
        try:
            groups = self._parse()
        except (IndexError, KeyError, TypeError, AttributeError, ValueError, struct.error) as error:
            problem = f"has a footer that cannot be read ({error}); {NOT_WHOLE}"
            raise ShardError(where, problem) from error
        self.groups = tuple(self._group(number, group) for number, group in enumerate(groups))
        try:
            self.encodings = encodings_of(self.schema)
        except ValueError as error:
            raise ShardError(where, f"{error}; write the file with different names") from error
        self.broken: dict[str, str] = {}

    def part(self, file: str, groups: range, first_row: int, columns: Sequence[str]) -> ParquetPart:
        """Return some row groups of this file, called `file`, as a part."""
        footer = zstandard.compress(self.of_groups(groups.start, groups.stop))
        return ParquetPart(file, self._file_bytes, groups, first_row, footer)

    def of_groups(self, first: int, stop: int) -> bytes:
        """Return the footer of a file that has only the row groups from `first` to `stop` (exclusive)."""
        if not self._spans:
            return self._data
        count = stop - first
        head = bytes([count << 4 | _LIST_OF_STRUCTS]) if count < 15 else bytes([_LONG_LIST]) + _varint(count)
        groups = self._data[self._spans[first] : self._spans[stop]]
        return self._data[: self._list_at] + head + groups + self._data[self._spans[-1] :]

    def _parse(self) -> Sequence[Any]:
        """Parse the row groups; set `_spans`: where each begins in the footer, and where the last ends."""
        thrift = CompactThrift(self._data)
        self._spans: list[int] = []
        self._list_at = number = 0
        groups: list[Any] = []
        while (head := thrift.byte()) != 0:
            step, kind = head >> 4, head & 15
            number = number + step if step else thrift.integer()
            if number == _ENCRYPTION:
                raise ValueError("it is signed or its columns are encrypted")
            if number != _ROW_GROUPS:
                if kind > 2:  # booleans are in the head
                    thrift.value(kind, 0)
                continue
            self._list_at = thrift.at
            head = thrift.byte()
            count = thrift.varint() if head >> 4 == 15 else head >> 4
            if kind != 9 or head & 15 != 12 or count > len(self._data) or groups:
                raise ValueError("its row groups are not a list")
            self._spans.append(thrift.at)
            for _ in range(count):
                groups.append(thrift.struct(1))
                self._spans.append(thrift.at)
        return groups

    def _group(self, number: int, group: Any) -> RowGroup:
        try:
            rows = group[3]
            if type(rows) is not int or not 0 <= rows < _MAX_COUNT:
                raise ValueError(f"it states {rows!r:.30} rows")
            chunks: dict[str, list[Chunk]] = {}
            for column in group[1] if rows else ():  # without rows, there is nothing at the stated places
                name = column[3][3][0].decode()
                chunks.setdefault(name, []).append(self._chunk(column, name))
        except (IndexError, KeyError, TypeError, AttributeError, ValueError) as error:
            raise ShardError(self._where, f"row group {number}: is malformed ({error})") from error
        return RowGroup(rows, {name: tuple(found) for name, found in chunks.items()})

    def _chunk(self, column: Any, name: str) -> Chunk:
        facts = column[3]
        if 1 in column:
            raise ValueError(f"column {name!r} is in another file")
        if 8 in column:
            raise ValueError(f"column {name!r} is encrypted")
        values, decoded, size, start = facts[5], facts[6], facts[7], facts[9]
        dictionary = facts.get(11, 0)
        start = dictionary if 0 < dictionary < start else start
        if not (len(MAGIC) <= start <= start + size <= self._end and values >= 0 and decoded >= 0):
            raise ValueError(f"column {name!r} is not inside the file: {NOT_WHOLE}")
        nulls = facts.get(12, {}).get(3)
        return Chunk(start, start + size, values, decoded, nulls if type(nulls) is int else None)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


class ParquetFormat:
    """Parquet files, whose row groups are groups of rows (`shardkit.formats.rows: RowFormat`)."""

    title: str = "Parquet"
    suffixes: tuple[str, ...] = (".parquet", ".pq")
    unit: str = UNIT
    version: int = 1
    is_read_whole: bool = False

    def read(self, where: str, read: Read, file_bytes: int) -> bytes:
        """Return the footer of a file, with one request, or two if it is longer than `TAIL_BYTES`."""
        start = max(0, file_bytes - TAIL_BYTES)
        tail = read(start, file_bytes) if file_bytes else b""
        size = footer_bytes(where, tail, file_bytes)
        begin = file_bytes - 8 - size
        if begin < start:
            tail = read(begin, start) + tail
            start = begin
        return tail[begin - start : -8]

    def parse(self, where: str, data: bytes, file_bytes: int) -> ParquetFooter:
        """Parse a footer. Raises ShardError if it is malformed."""
        return ParquetFooter(where, data, file_bytes)

    def alike(self, files: Sequence[RowFile]) -> Sequence[RowFile]:
        """Return the files as they are: their columns must be alike."""
        return files

    def select(self, part: RowPart, names: Sequence[str], where: str) -> Selected:
        """Return the part, whose footer has all columns, and the ranges of some columns."""
        assert isinstance(part, ParquetPart)
        data = zstandard.decompress(part.footer, MAX_FOOTER_BYTES)
        footer = ParquetFooter(where, data, part.file_bytes)
        groups = footer.groups[: len(part.groups)]
        chunks = (chunk for group in groups for name in names for chunk in group.chunks.get(name, ()))
        ranges = [(chunk.start, chunk.stop) for chunk in chunks]
        return Selected(part, footer.encodings, ranges)
