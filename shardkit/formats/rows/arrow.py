"""Read record batches of Arrow files (Feather 2) and Arrow streams in place, as shards.

Streams are what Hugging Face's `datasets` writes (`save_to_disk`, its cache). A file ends in a footer with
the places of its record batches; in a stream, each message begins with its length, so they are found one
after the other. The metadata of a batch say where the buffers of each column are, so that only those of
wanted columns are read, from both formats.

pyarrow reads a shard as an Arrow file whose other bytes are missing, with a footer made here that names only
the batches of the shard. The footer refers to the schema in the bytes that the file has, which follow it:

    u32 20 | pad | vtable | table: version, schema, dictionaries, batches | blocks | flatbuffer of the schema
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkit.errors import NOT_WHOLE, ShardError, naming_extras
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
from shardkit.formats.rows.flatbuffers import Table

if TYPE_CHECKING:
    import pyarrow as pa

UNIT = "record batch"
MAX_DECODED_BYTES = 16 << 30  # of a compressed column of a shard
_MAGIC = b"ARROW1"
_WINDOW_BYTES = 1 << 16  # size of a read of metadata
_MAX_METADATA_BYTES = 256 << 20
_CONTINUES = 0xFFFFFFFF
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3  # types of messages
_BLOCK = "<qi4xq"  # offset, bytes of metadata, bytes of body
_RATIO = 4  # memory of a compressed column, of which the metadata tell only the stored size

Block = tuple[int, ...]
"""A message: its offset, and the bytes of its metadata (prefix included) and of its body."""


@dataclass(frozen=True, slots=True)
class Skeleton:
    """The schema of a file or stream, and the dictionaries that its batches refer to."""

    data: bytes = field(repr=False)  # a flatbuffer
    schema_at: int  # where its table of the schema is
    version: int  # of the metadata
    dictionaries: tuple[Block, ...]

    def end_of_file(self, start: int, batches: Sequence[Block]) -> bytes:
        """Return the bytes that end an Arrow file with these batches, from the offset `start` on."""
        blocks = [struct.pack(_BLOCK, *block) for block in (*self.dictionaries, *batches)]
        count = len(self.dictionaries)
        second = 48 + 24 * count  # place of the batches' count, less 4
        base = second + 8 + 24 * len(batches)
        table = struct.pack(
            "<iIIIhxx", 12, base + self.schema_at - 24, 44 - 28, second + 4 - 32, self.version
        )
        footer = b"".join(
            [
                struct.pack("<I4x", 20),
                struct.pack("<6H", 12, 20, 16, 4, 8, 12),
                table,
                struct.pack("<4xI", count),
                *blocks[:count],
                struct.pack("<4xI", len(batches)),
                *blocks[count:],
                self.data,
            ]
        )
        return bytes(-start % 8) + footer + struct.pack("<i", len(footer)) + _MAGIC

    def schema(self) -> pa.Schema:
        """Return the schema as pyarrow reads it."""
        import pyarrow as pa

        return pa.ipc.open_file(pa.py_buffer(_MAGIC + bytes(2) + self.end_of_file(8, []))).schema


@dataclass(frozen=True, slots=True)
class ArrowPart:
    """Record batches of a file or stream, which are a shard."""

    file: str
    file_bytes: int
    groups: range
    first_row: int
    skeleton: Skeleton
    batches: tuple[Block, ...]

    @property
    def title(self) -> str:
        """The record batches, for messages."""
        return title_of(UNIT, self.groups)

    def open(self, pieces: Pieces) -> ReadColumns:
        """Return the reader of the shard whose bytes are `pieces`."""
        import pyarrow as pa

        end = np.frombuffer(self.skeleton.end_of_file(self.file_bytes, self.batches), np.uint8)
        file = PiecesFile(self.file_bytes + len(end), [*pieces, (self.file_bytes, end)])
        schema = self.skeleton.schema()

        def read(name: str) -> Any:
            [number] = schema.get_all_field_indices(name)
            self._check_memory(file, schema, name)
            options = pa.ipc.IpcReadOptions(included_fields=[number], use_threads=False)
            reader = pa.ipc.open_file(file, options=options)
            batches = [reader.get_batch(batch) for batch in range(len(self.batches))]
            for batch in batches:
                batch.validate(full=True)  # offsets that leave their buffers would crash the process
            return pa.chunked_array([batch.column(0) for batch in batches], schema.field(number).type)

        return lambda names: {name: read(name) for name in names}

    def _check_memory(self, file: PiecesFile, schema: pa.Schema, name: str) -> None:
        """Raise ValueError if a compressed column states that it takes too much memory."""
        total = 0
        for offset, metadata_bytes, _ in self.batches:
            file.seek(offset)
            batch = _record_batch(file.read(metadata_bytes))
            if batch.table(3) is None:
                return
            for start, size in _buffers(schema, batch, self.skeleton.version)[name][0]:
                if size >= 8:
                    file.seek(offset + metadata_bytes + start)
                    total += max(0, int.from_bytes(file.read(8), "little", signed=True))
        if total > MAX_DECODED_BYTES:
            raise ValueError(
                f"column {name!r} states {total:,} bytes; at most {MAX_DECODED_BYTES:,} are read"
            )


class ArrowFile:
    """The record batches of a file or stream."""

    def __init__(
        self, skeleton: Skeleton, batches: Sequence[Block], metadata: Sequence[bytes], file_bytes: int
    ) -> None:
        """`metadata`: that of each batch. Raises ValueError, IndexError or ArrowException if malformed."""
        self._skeleton, self._batches, self._file_bytes = skeleton, batches, file_bytes
        schema = skeleton.schema()
        self.encodings: Mapping[str, str] = encodings_of(schema)
        self.broken: Mapping[str, str] = {}
        self.seen = _pack(skeleton, batches, metadata)
        self.groups = [self._group(schema, block, one) for block, one in zip(batches, metadata, strict=True)]

    def part(self, file: str, groups: range, first_row: int, columns: Sequence[str]) -> ArrowPart:
        """Return some batches of this file, called `file`, as a part."""
        batches = tuple(self._batches[groups.start : groups.stop])
        return ArrowPart(file, self._file_bytes, groups, first_row, self._skeleton, batches)

    def _group(self, schema: pa.Schema, block: Block, metadata: bytes) -> RowGroup:
        offset, metadata_bytes, body_bytes = block
        batch = _record_batch(metadata)
        ratio = 1 if batch.table(3) is None else _RATIO
        rows = batch.number(0, "<q")
        if not 0 <= rows < 1 << 53:
            raise ValueError(f"a batch states {rows:,} rows")
        chunks = {}
        begin = offset + metadata_bytes
        for name, (buffers, nulls) in _buffers(schema, batch, self._skeleton.version).items():
            if any(start < 0 or size < 0 or start + size > body_bytes for start, size in buffers):
                raise ValueError(f"column {name!r} is not inside of its batch")
            start = min((start for start, size in buffers if size), default=0)
            stop = max((start + size for start, size in buffers if size), default=0)
            memory = ratio * sum(size for _, size in buffers)
            chunks[name] = (Chunk(begin + start, begin + stop, rows, memory, nulls),)
        common = [(offset, begin)]
        common += [(at, at + size + body) for at, size, body in self._skeleton.dictionaries]
        return RowGroup(rows, chunks, tuple(common))


class ArrowFormat:
    """Arrow files and streams, whose record batches are groups of rows (`contract: RowFormat`)."""

    title: str = "Arrow"
    suffixes: tuple[str, ...] = (".arrow", ".feather", ".arrows", ".ipc")
    unit: str = UNIT
    version: int = 1
    is_read_whole: bool = False

    def read(self, where: str, read: Read, file_bytes: int) -> bytes:
        """Return the schema, and the places and metadata of all batches.

        Of a file, this takes a request for the footer and one for each batch; of a stream, one for some
        consecutive batches, if they are small, or for each.
        """
        try:
            head = read(0, min(file_bytes, _WINDOW_BYTES)) if file_bytes else b""
            if head.startswith(b"FEA1"):
                raise ValueError("is Feather version 1: write it again with version 2, the default today")
            if head.startswith(_MAGIC):
                return _pack(*_scan_file(read, file_bytes))
            return _pack(*_scan_stream(read, head, file_bytes))
        except (ValueError, IndexError, struct.error) as error:
            raise ShardError(where, f"is no readable Arrow file or stream ({error}); {NOT_WHOLE}") from error

    def parse(self, where: str, data: bytes, file_bytes: int) -> ArrowFile:
        """Parse what `read` returned. Raises ShardError if it is malformed."""
        with naming_extras("an Arrow file", pyarrow="parquet"):
            import pyarrow as pa
        try:
            return ArrowFile(*_unpack(data), file_bytes)
        except (pa.ArrowException, ValueError, IndexError, OSError, struct.error) as error:
            raise ShardError(where, f"has metadata that cannot be read ({error}); {NOT_WHOLE}") from error

    def alike(self, files: Sequence[RowFile]) -> Sequence[RowFile]:
        """Return the files as they are: their columns must be alike."""
        return files

    def select(self, part: RowPart, names: Sequence[str], where: str) -> Selected:
        """Return the part, which can read all columns, and the ranges of its batches with all columns.

        Where a column is in a batch is said there, in metadata that a part does not have.
        """
        assert isinstance(part, ArrowPart)
        blocks = (*part.skeleton.dictionaries, *part.batches)
        ranges = [(offset, offset + metadata + body) for offset, metadata, body in blocks]
        return Selected(part, encodings_of(part.skeleton.schema()), ranges)


_Scan = tuple[Skeleton, list[Block], list[bytes]]


def _scan_file(read: Read, file_bytes: int) -> _Scan:
    """Return the skeleton, the batches and the metadata of each batch, of a file."""
    start = max(0, file_bytes - _WINDOW_BYTES)
    tail = read(start, file_bytes)
    if not tail.endswith(_MAGIC) or len(tail) < 10:
        raise ValueError("it does not end with ARROW1")
    size = int.from_bytes(tail[-10:-6], "little")
    begin = file_bytes - 10 - size
    if begin < 8 or size > _MAX_METADATA_BYTES:
        raise ValueError(f"it states a footer of {size:,} bytes")
    data = tail[begin - start : -10] if begin >= start else read(begin, file_bytes - 10)
    footer = Table.root(data)
    schema = footer.table(1)
    if schema is None:
        raise ValueError("it has no schema")
    blocks = footer.structs(3, _BLOCK)
    dictionaries = footer.structs(2, _BLOCK)
    for block in (*blocks, *dictionaries):
        _check_block(block, begin)
    skeleton = Skeleton(data, schema.at, footer.number(0, "<h"), tuple(dictionaries))
    return skeleton, blocks, [read(offset, offset + size) for offset, size, _ in blocks]


def _scan_stream(read: Read, head: bytes, file_bytes: int) -> _Scan:
    """Return the skeleton, the batches and their metadata, of a stream that begins with `head`."""
    schema: Table | None = None
    version = at = begin = 0
    window = head
    batches: list[Block] = []
    metadata: list[bytes] = []
    dictionaries: dict[int, Block] = {}

    def get(start: int, stop: int) -> bytes:
        nonlocal window, begin
        if stop > file_bytes:
            raise ValueError(f"a message at byte {at:,} ends after the file")
        if not begin <= start <= stop <= begin + len(window):
            begin, window = start, read(start, max(stop, min(start + _WINDOW_BYTES, file_bytes)))
        return window[start - begin : stop - begin]

    while at < file_bytes:
        size = int.from_bytes(get(at, at + 4), "little")
        prefix = 4
        if size == _CONTINUES:
            size, prefix = int.from_bytes(get(at + 4, at + 8), "little"), 8
        if not size:
            break  # the end of the stream
        if size > _MAX_METADATA_BYTES:
            raise ValueError(f"a message at byte {at:,} states {size:,} bytes of metadata")
        data = get(at, at + prefix + size)
        message = Table.root(data[prefix:])
        block = (at, prefix + size, message.number(3, "<q"))
        _check_block(block, file_bytes)
        kind, header = message.number(1, "<B"), message.table(2)
        if header is None or (schema is None) != (kind == _SCHEMA):
            raise ValueError(f"a message of another kind is at byte {at:,}")
        if kind == _SCHEMA:
            schema, version = header, message.number(0, "<h")
        elif kind == _DICTIONARY:
            number = header.number(0, "<q")
            if number in dictionaries:
                raise ValueError("it changes a dictionary between batches: write it as an Arrow file")
            dictionaries[number] = block
        elif kind == _BATCH:
            batches.append(block)
            metadata.append(data)
        at += sum(block[1:])
    if schema is None:
        raise ValueError("it has no schema")
    return Skeleton(schema.data, schema.at, version, tuple(dictionaries.values())), batches, metadata


def _check_block(block: Block, end: int) -> None:
    offset, metadata_bytes, body_bytes = block
    if min(block) < 0 or metadata_bytes < 8 or offset + metadata_bytes + body_bytes > end:
        raise ValueError(f"a message at byte {offset:,} is not inside of the file")


def _pack(skeleton: Skeleton, batches: Sequence[Block], metadata: Sequence[bytes]) -> bytes:
    blocks = [*skeleton.dictionaries, *batches]
    counts = len(skeleton.dictionaries), len(batches)
    return b"".join(
        [
            struct.pack("<5q", len(skeleton.data), skeleton.schema_at, skeleton.version, *counts),
            skeleton.data,
            *(struct.pack(_BLOCK, *block) for block in blocks),
            *metadata,
        ]
    )


def _unpack(data: bytes) -> tuple[Skeleton, list[Block], list[bytes]]:
    size, schema_at, version, dictionaries, batches = struct.unpack_from("<5q", data)
    at = 40 + size
    stop = at + 24 * (dictionaries + batches)
    blocks = list(struct.iter_unpack(_BLOCK, data[at:stop]))
    metadata = []
    for block in blocks[dictionaries:]:
        metadata.append(data[stop : stop + block[1]])
        stop += block[1]
    skeleton = Skeleton(data[40:at], schema_at, version, tuple(blocks[:dictionaries]))
    return skeleton, blocks[dictionaries:], metadata


def _record_batch(metadata: bytes) -> Table:
    """Return the table of the record batch whose message has this metadata, prefix included."""
    prefix = 8 if metadata.startswith(b"\xff\xff\xff\xff") else 4
    message = Table.root(metadata[prefix:])
    batch = message.table(2)
    if message.number(1, "<B") != _BATCH or batch is None:
        raise ValueError("a block is not a record batch")
    return batch


def _buffers(schema: pa.Schema, batch: Table, version: int) -> dict[str, tuple[list[tuple[int, ...]], int]]:
    """Return the (offset, size) of the buffers of each column in the body of a batch, and its nulls.

    Buffers are in the order of the fields, depth first.
    """
    nodes, buffers = iter(batch.structs(1, "<qq")), iter(batch.structs(2, "<qq"))
    views = iter(batch.structs(4, "<q"))
    found = {}
    try:
        for one in schema:
            own: list[tuple[int, ...]] = []
            nulls = [_take(own, kind, nodes, buffers, views, version) for kind in _flat(one.type)]
            found[one.name] = own, nulls[0]
    except StopIteration:
        raise ValueError("a batch has fewer buffers than its columns need") from None
    if next(nodes, None) is not None or next(buffers, None) is not None:
        raise ValueError("a batch has more buffers than its columns need")
    return found


def _take(
    own: list[tuple[int, ...]],
    kind: pa.DataType,
    nodes: Iterator[tuple[int, ...]],
    buffers: Iterator[tuple[int, ...]],
    views: Iterator[tuple[int, ...]],
    version: int,
) -> int:
    """Move the buffers of a type, without those of its children, to `own`; return its number of nulls."""
    import pyarrow as pa

    types = pa.types
    nulls = next(nodes)[1]
    count = 2
    if types.is_null(kind) or types.is_run_end_encoded(kind):
        count = 0
    elif types.is_union(kind):
        if version < 4:
            raise ValueError("it has unions of an old format: write it again")
        count = 1 if kind.mode == "sparse" else 2
    elif types.is_struct(kind) or types.is_fixed_size_list(kind):
        count = 1
    elif str(kind) in ("string", "binary", "large_string", "large_binary") or "list_view" in str(kind)[:15]:
        count = 3
    elif str(kind) in ("string_view", "binary_view"):
        count += next(views)[0]
    own += [next(buffers) for _ in range(count)]
    return nulls


def _flat(kind: pa.DataType) -> Iterator[pa.DataType]:
    """Yield a type and those of its children, depth first, as they have buffers."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    yield kind
    if pa.types.is_dictionary(kind):
        return  # the values are in another message
    if pa.types.is_run_end_encoded(kind):
        children = [kind.run_end_type, kind.value_type]
    elif pa.types.is_map(kind):
        children = [pa.struct([("key", kind.key_type), ("value", kind.item_type)])]
    else:
        children = [kind.field(number).type for number in range(kind.num_fields)]
    for child in children:
        yield from _flat(child)
