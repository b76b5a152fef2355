"""Read blocks of JSON lines in place, as shards.

A file says nothing about itself, so `JsonLinesFormat.read` reads all of it once and notes the blocks of lines
with their numbers of rows, and the types of the columns. A block is about `BLOCK_BYTES` of lines. In a
compressed file it is the lines that begin in one or more of its frames (of zstd; members of gzip), which are
decompressed with the frames in which its last line ends: a file of one frame is one block.

A row is a line that is not blank; each must be a JSON object. Types are those that Arrow infers: of all rows
of all files together, so integers and floats in one column make floats, and a missing key is a null, like a
null. No value is changed to fit a type. A column of mixed types, or with integers beyond 64 bits, cannot be
read, but the other columns can. Of a key that occurs twice in a row, the last value counts, as in Python.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import xxhash
import zstandard

from shardkit.errors import ShardError, naming_extras
from shardkit.formats.compression import decompress_streams, frames
from shardkit.formats.rows.columns import encodings_of
from shardkit.formats.rows.contract import (
    Chunk,
    Pieces,
    Range,
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

UNIT = "block"
BLOCK_BYTES = 4 << 20  # of lines
MAX_FRAME_BYTES = 1 << 30  # of lines in a frame; a block has at least one, and is read as a whole
MAX_LINE_BYTES = 256 << 20
MAX_DEPTH = 64  # of lists and objects in a value; Arrow cannot store types of some hundreds
_READ_BYTES = 4 << 20
_BOM = b"\xef\xbb\xbf"
_MAGICS = {b"\x1f\x8b": "gz", b"\x28\xb5\x2f\xfd": "zstd"}
# An integer beyond 64 bits has 19 digits in a row, and few other values do.
_LONG_INTEGER = b"0" * 19
_DIGITS = bytes(48 if 48 <= byte < 58 else 32 for byte in range(256))
_SHOWN = 80  # characters of a line in a message


@dataclass(frozen=True, slots=True)
class Block:
    """Lines of a file: bytes `start` to `stop` of its content, with all of its compressed frames before.

    `file_start` and `file_stop` are the bytes of the file which hold them; `origin` is the offset in the
    content of the first byte that they hold.
    """

    file_start: int
    file_stop: int
    origin: int
    start: int
    stop: int
    rows: int


@dataclass(frozen=True, slots=True)
class JsonLinesPart:
    """Blocks of a file, which are a shard: `size` bytes of their content after the first `skip`."""

    file: str
    groups: range
    first_row: int
    where: Range  # the bytes of the file that hold the blocks
    compression: str | None
    skip: int
    size: int
    schema: bytes  # of all columns
    columns: tuple[str, ...]  # that are wanted

    @property
    def title(self) -> str:
        """The blocks, for messages."""
        return title_of(UNIT, self.groups)

    def open(self, pieces: Pieces) -> ReadColumns:
        """Return the reader of the shard whose bytes are `pieces`: one range."""
        import pyarrow as pa

        [(_, data)] = pieces
        content = data
        if self.compression is not None:
            limit = self.skip + self.size + 2 * MAX_FRAME_BYTES
            content = decompress_streams(self.compression, data.data, limit=limit, file=self.file)
        lines = content[self.skip : self.skip + self.size].tobytes()
        rows = [row for _, row in _rows(lines, self.first_row)]
        columns = {}
        schema = pa.ipc.read_schema(pa.py_buffer(self.schema))
        for one in map(schema.field, self.columns):
            try:
                columns[one.name] = pa.array([row.get(one.name) for row in rows], one.type)
            except OverflowError as error:
                raise ValueError(f"column {one.name!r}: {error}") from error
        return lambda names: {name: pa.chunked_array([columns[name]]) for name in names}


@dataclass(frozen=True)
class JsonLines:
    """The blocks of a file, and the types of its columns."""

    compression: str | None
    blocks: Sequence[Block]
    schema: pa.Schema
    sizes: Mapping[str, int]  # bytes of all values of a column, decoded
    hash: str  # of the file
    broken: Mapping[str, str] = field(default_factory=dict)

    @property
    def seen(self) -> bytes:
        """The hash of the file."""
        return self.hash.encode()

    @property
    def encodings(self) -> Mapping[str, str]:
        """The encodings of the columns; of those that are broken, too."""
        return encodings_of(self.schema) | dict.fromkeys(self.broken, "mixed")

    @property
    def groups(self) -> list[RowGroup]:
        """The blocks as groups of rows."""
        total = max(1, sum(block.rows for block in self.blocks))
        found = []
        for block in self.blocks:
            chunks = {}
            for one in self.schema:
                size = self.sizes.get(one.name, 0) * block.rows // total
                at = block.file_start
                chunks[one.name] = (Chunk(at, at, block.rows, size, int(one.nullable)),)
            found.append(RowGroup(block.rows, chunks, ((block.file_start, block.file_stop),)))
        return found

    def part(self, file: str, groups: range, first_row: int, columns: Sequence[str]) -> JsonLinesPart:
        """Return some blocks of this file, called `file`, as a part that has only `columns`."""

        first, last = self.blocks[groups[0]], self.blocks[groups[-1]]
        where = first.file_start, last.file_stop
        skip, size = first.start - first.origin, last.stop - first.start
        return JsonLinesPart(
            file, groups, first_row, where, self.compression, skip, size, self._stored_schema, tuple(columns)
        )

    @cached_property
    def _stored_schema(self) -> Any:
        return self.schema.serialize().to_pybytes()


class JsonLinesFormat:
    """JSON lines, whose blocks are groups of rows (`contract: RowFormat`)."""

    title: str = "JSON lines"
    suffixes: tuple[str, ...] = tuple(
        f".{name}{compressed}"
        for name in ("jsonl", "ndjson", "json")
        for compressed in ("", ".gz", ".zst", ".zstd")
    )
    unit: str = UNIT
    version: int = 1
    is_read_whole: bool = True

    def read(self, where: str, read: Read, file_bytes: int) -> bytes:
        """Read all lines, and return what they are, as JSON. Raises ShardError if one cannot be parsed."""
        with naming_extras("reading JSON lines", pyarrow="parquet", orjson="parquet"):
            import orjson  # noqa: F401
            import pyarrow  # noqa: F401
        scan = _Scan(where)
        starts = range(0, file_bytes, _READ_BYTES)
        inputs = (read(at, min(at + _READ_BYTES, file_bytes)) for at in starts)
        head = read(0, min(4, file_bytes)) if file_bytes else b""
        compression = next((name for magic, name in _MAGICS.items() if head.startswith(magic)), None)
        if compression is None:
            scan.take_plain(inputs)
        else:
            scan.take_frames(_decompressed(where, compression, scan.hashed(inputs)))
        return scan.result(compression)

    def parse(self, where: str, data: bytes, file_bytes: int) -> JsonLines:
        """Parse what `read` returned."""
        import pyarrow as pa

        found = json.loads(data)
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(found["schema"])))
        blocks = [Block(*block) for block in found["blocks"]]
        return JsonLines(found["compression"], blocks, schema, found["bytes"], found["hash"], found["broken"])

    def alike(self, files: Sequence[RowFile]) -> Sequence[RowFile]:
        """Return the files with the columns of all of them, each with the type of all its values."""
        import pyarrow as pa

        types: dict[str, pa.DataType] = {}
        nullable: set[str] = set()
        own = [file for file in files if isinstance(file, JsonLines)]
        for file in own:
            for one in file.schema:
                known = types.get(one.name, one.type)
                types[one.name] = _merged(known, one.type) or known  # unlike files are named by the caller
                nullable |= {one.name} if one.nullable else set()
        filled = [file for file in own if file.blocks]
        nullable |= {name for name in types if any(name not in file.schema.names for file in filled)}
        made = []
        for file in own:
            given = {one.name: one.type for one in file.schema}
            fields = [
                pa.field(
                    name, kind if _merged(given.get(name, kind), kind) else given[name], name in nullable
                )
                for name, kind in types.items()
                if name not in file.broken
            ]
            made.append(replace(file, schema=pa.schema(fields)))
        return made

    def select(self, part: RowPart, names: Sequence[str], where: str) -> Selected:
        """Return the part with other columns, of those that can be read, and the range of its lines."""
        import pyarrow as pa

        assert isinstance(part, JsonLinesPart)
        encodings = encodings_of(pa.ipc.read_schema(pa.py_buffer(part.schema)))
        columns = tuple(name for name in names if name in encodings)
        return Selected(replace(part, columns=columns), encodings, [part.where])


def _decompressed(
    where: str, compression: str, inputs: Iterator[bytes]
) -> Iterator[tuple[bytes, int | None]]:
    """Yield what `frames` yields. Raises ShardError if the data are damaged."""
    try:
        yield from frames(compression, inputs)
    except (EOFError, ValueError, zlib.error, zstandard.ZstdError) as error:
        raise ShardError(where, f"cannot be decompressed ({error}); copy the file again") from error


class _Scan:
    """Collects the blocks of a file and the types of its columns, line by line."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._blocks: list[Block] = []
        self._types: dict[str, Any] = {}  # of columns, by name: pa.DataType
        self._filled: dict[str, int] = {}  # number of values that are not null
        self._bytes: dict[str, int] = {}
        self._broken: dict[str, str] = {}
        self._hash = xxhash.xxh3_128()
        self._lines = self._rows = 0
        self._held: list[bytes] = []  # content from `_at` on, which is not parsed yet
        self._has_lines = False  # whether a line ends in what is held
        self._held_bytes = self._at = 0
        self._begun: tuple[int, int, int] = (0, 0, 0)  # content, content and file offset of a block's start
        self._block_rows = 0

    def hashed(self, inputs: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the inputs, and add them to the hash of the file."""
        for data in inputs:
            self._hash.update(data)
            yield data

    def take_plain(self, inputs: Iterator[bytes]) -> None:
        """Take the content of a file that is not compressed."""
        for data in self.hashed(inputs):
            self._hold(data)
            if self._parse():
                self._end_block(self._at, self._at, self._at)
        self._finish()
        self._end_block(self._at, self._at, self._at)

    def take_frames(self, found: Iterator[tuple[bytes, int | None]]) -> None:
        """Take the content of a compressed file, and where its frames end."""
        starts = [(0, 0)]  # (content, file) offsets of the frames from that with `_at` on
        end = 0
        for data, ended in found:
            self._hold(data)
            if self._held_bytes >= BLOCK_BYTES:
                self._parse()
            content = self._at + self._held_bytes
            if content - starts[-1][0] > MAX_FRAME_BYTES:
                raise ShardError(self._where, _too_long())
            if ended is None:
                continue
            self._parse()
            end = ended
            starts.append((content, ended))
            while len(starts) > 1 and starts[1][0] <= self._at:
                starts.pop(0)
            if self._at - self._begun[0] >= BLOCK_BYTES:
                self._end_block(ended, *starts[0])
        self._finish()
        self._end_block(end, 0, 0)

    def result(self, compression: str | None) -> bytes:
        """Return what was found, as JSON."""
        import pyarrow as pa

        schema = pa.schema(
            [pa.field(name, kind, self._filled[name] < self._rows) for name, kind in self._types.items()]
        )
        found = {
            "compression": compression,
            "blocks": [[b.file_start, b.file_stop, b.origin, b.start, b.stop, b.rows] for b in self._blocks],
            "schema": base64.b64encode(schema.serialize().to_pybytes()).decode(),
            "bytes": self._bytes,
            "broken": self._broken,
            "hash": self._hash.hexdigest(),
        }
        return json.dumps(found).encode()

    def _hold(self, data: bytes) -> None:
        if not self._at and not self._held_bytes and data:
            if data.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise ShardError(self._where, "is UTF-16; JSON lines are UTF-8: convert it")
            if data.startswith(_BOM):
                self._at, data = len(_BOM), data[len(_BOM) :]
                self._begun = (self._at, 0, 0)
        self._held.append(data)
        self._held_bytes += len(data)
        self._has_lines = self._has_lines or b"\n" in data
        if self._held_bytes > MAX_LINE_BYTES and not self._has_lines:
            raise self._error(self._lines + 1, f"is longer than {MAX_LINE_BYTES:,} bytes")

    def _parse(self) -> bool:
        """Parse the whole lines that are held; return whether there are any."""
        if not self._has_lines:
            return False
        whole, _, rest = b"".join(self._held).rpartition(b"\n")
        self._held, self._held_bytes, self._has_lines = [rest], len(rest), False
        self._take(whole)
        self._at += len(whole) + 1
        return True

    def _finish(self) -> None:
        """Parse what is held, whose last line may have no end."""
        whole = b"".join(self._held)
        self._held, self._held_bytes = [], 0
        self._take(whole)
        self._at += len(whole)

    def _end_block(self, file_stop: int, origin: int, file_start: int) -> None:
        """End a block at `_at`; the next begins in the frame at these offsets (content, file)."""
        start, own_origin, own_file_start = self._begun
        if self._block_rows:
            block = Block(own_file_start, file_stop, own_origin, start, self._at, self._block_rows)
            self._blocks.append(block)
        self._begun, self._block_rows = (self._at, origin, file_start), 0

    def _take(self, lines: bytes) -> None:
        """Parse lines and add the types of their values."""
        import pyarrow as pa

        if not self._lines and lines.lstrip()[:1] == b"[":
            raise ShardError(self._where, f"is one JSON array, not JSON lines; {_ONE_OBJECT_A_LINE}")
        numbers, rows = [], []
        try:
            for number, row in _rows(lines, 0):
                numbers.append(number)
                rows.append(row)
        except _LineError as error:
            is_cut = "end of data" in str(error) and not self._lines and not rows
            hint = f"; {_ONE_OBJECT_A_LINE}" if is_cut else ""
            raise self._error(self._lines + error.line, f"{error}{hint}") from error
        names: dict[str, None] = {}
        for row in rows:
            if row.keys() != names.keys():
                names |= dict.fromkeys(row)
        if _LONG_INTEGER in lines.translate(_DIGITS):  # ten times as fast as a regular expression
            self._refuse_long(lines)
        for name in [name for name in names if name not in self._broken]:
            values = [row.get(name) for row in rows]
            try:
                array = _array(values)
            except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
                self._break(name, f"has values of several types ({' '.join(str(error).split())})")
                continue
            if str(array.type).count("<") > MAX_DEPTH:
                self._break(name, f"is nested deeper than {MAX_DEPTH} levels")
                continue
            is_list = pa.types.is_list(array.type) and pa.types.is_integer(array.type.value_type)
            if is_list and array.flatten().null_count:
                self._break(name, "has nulls inside of its lists of integers")
                continue
            kind = _merged(self._types.get(name, array.type), array.type)
            if kind is None:
                self._break(
                    name, f"is {array.type} from line {self._lines + 1:,} on, {self._types[name]} before"
                )
                continue
            self._types[name] = kind
            self._filled[name] = self._filled.get(name, 0) + len(array) - array.null_count
            self._bytes[name] = self._bytes.get(name, 0) + array.nbytes
        self._lines += lines.count(b"\n") + 1
        self._rows += len(rows)
        self._block_rows += len(rows)

    def _refuse_long(self, lines: bytes) -> None:
        """Mark the columns that have integers beyond 64 bits as broken; orjson makes floats of them."""
        for number, line in enumerate(lines.split(b"\n"), 1):
            if _LONG_INTEGER not in line.translate(_DIGITS):
                continue
            try:
                found = [
                    name for name, value in json.loads(line, parse_int=_Integer).items() if _has_long(value)
                ]
            except RecursionError:
                raise self._error(self._lines + number, "is nested too deeply") from None
            for name in found:
                self._break(name, f"has an integer beyond 64 bits in line {self._lines + number:,}")

    def _break(self, name: str, problem: str) -> None:
        self._types.pop(name, None)
        self._broken.setdefault(name, f"column {name!r} {problem}")

    def _error(self, line: int, problem: str) -> ShardError:
        return ShardError(self._where, f"line {line:,} {problem}")


_ONE_OBJECT_A_LINE = "JSON lines have one object a line (`jq -c .` makes them)"


class _LineError(ValueError):
    """A line is no JSON object; `line` is its number, from 1."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(problem)
        self.line = line


class _Integer(str):
    """The digits of an integer."""

    __slots__ = ()


def _has_long(value: object) -> bool:
    if isinstance(value, _Integer):
        return not -(1 << 63) <= int(value) < 1 << 64
    if isinstance(value, dict):
        return any(map(_has_long, value.values()))
    return isinstance(value, list) and any(map(_has_long, value))


def _rows(lines: bytes, first: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number of the line from 1, object) of each line that is not blank. Raises _LineError."""
    import orjson

    loads: Callable[[bytes], Any] = orjson.loads
    for number, line in enumerate(lines.split(b"\n"), first + 1):
        try:
            row = loads(line)
        except ValueError as error:
            if not line.strip():
                continue
            shown = line[:_SHOWN].decode(errors="replace")
            problem = str(error).partition(": line 1 ")[0]
            raise _LineError(number, f"is not JSON: {problem}: {shown!r}") from error
        if type(row) is not dict:
            raise _LineError(number, f"is {line[:_SHOWN].decode(errors='replace')!r}, not a JSON object")
        yield number, row


def _array(values: list[Any]) -> Any:
    """Return values as an Arrow array of the type that fits all. Raises if there is none."""
    import pyarrow as pa

    try:
        return pa.array(values)
    except OverflowError:
        return pa.array(values, pa.uint64())


def _merged(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    """Return the type that holds the values of both; None if there is none."""
    import pyarrow as pa

    if first == second:
        return first
    if {first, second} == {pa.int64(), pa.uint64()}:
        return pa.uint64()  # a negative value is an error when it is read
    schemas = [pa.schema([pa.field("x", kind)]) for kind in (first, second)]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return None


def _too_long() -> str:
    return (
        f"has over {MAX_FRAME_BYTES:,} bytes in one compressed frame, which can only be read as a whole: "
        "decompress it, or compress it in frames (pzstd, bgzip)"
    )
