"""Reads documents from the samples of MDS shards and WebDataset tars, which were written for loaders.

A column of an MDS shard, or a member of a tar's sample by its extension, is a field; fields inside JSON
columns and members are named by dotted paths: `json.text`. Only fields that the recipe names are decoded:
images and arrays are skipped, and pickles are never loaded. Field `__key__` of a tar's sample is its key,
which is also its id unless the recipe or a member named `id` gives another.

A shard is read from front to back, compressed or not (a compressed tar twice, because its length has to be
known), and needs no index: an MDS shard has a header with its columns and offsets. A sample is quarantined
alone if its bytes do not fit its columns, its text is not of the declared type, or, in a tar, two members
have the same extension. Carried fields never cost a sample its text: a value that cannot be decoded becomes
null in MDS shards, whose columns have types, and binary data in tars, whose members have none. An invalid MDS
header, decreasing offsets, and a tar header with a wrong checksum or a size past the end of the file cost
everything after them, because the start of the next sample would be a guess; the sample they are in is not
used at all.

Memory is the offsets of a shard and the named values of one sample, whose total is at most
`max_record_bytes`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from shardkit.errors import RecipeError, ShardError
from shardkit.formats.compression import gunzip
from shardkit.formats.mds.encodings import ARRAY_DTYPES, Encoding
from shardkit.formats.mds.shard import SampleLayout, read_header
from shardkit.formats.tar.members import Bytes, split_name, walk_members
from shardkit.manifest import Column
from shardkit.writers.inputs.decompress import ContainerError, decompressed
from shardkit.writers.inputs.fields import MISSING, field_at
from shardkit.writers.inputs.files import InputFile, open_input
from shardkit.writers.inputs.lines import PieceReader
from shardkit.writers.inputs.records import RecordSink
from shardkit.writers.recipe.inputs import InputConfig

_MAX_MEMBERS = 4096  # maximum number of members in a tar's sample; real samples have a few
_SHOWN = 20  # maximum number of names in a message
_OF_TEXT = frozenset({"str", "bytes", "json"})
_PLAIN = _OF_TEXT | {"int", "str_int", "str_float", "str_decimal", *ARRAY_DTYPES.values()}
_JSON, _NUMBERS = frozenset({"json", "jsn"}), frozenset({"cls", "cls2", "index", "inx", "id"})
_SMALL = _JSON | _NUMBERS | {"txt", "text", "transcript", "md", "html"}
_SMALL_BYTES = 1 << 24  # maximum size of a sample or member that `shardkit init` looks at


def read_mds(sink: RecordSink, config: InputConfig) -> Iterator[None]:
    """Read an MDS shard: pass all of its samples to the sink."""
    split = sink.split
    sink.offset = 0
    with open_input(split.input) as file:
        stream = PieceReader(sink.pieces(file))
        try:
            columns, offsets = read_header(split.file, stream.read)
        except ShardError as error:
            other = sink.content.problem("mds", f"inputs[{split.source}]")
            problem = error.problem if other is None else f"{error.problem}: {other}"
            sink.damaged(problem, bytes=max(split.bytes, stream.tell()))
            return
        layout = SampleLayout(split.file, columns)
        unfit = _unfit(layout, sink, config)
        if unfit is not None:
            sink.no_column(unfit, bytes=split.bytes, records=len(offsets) - 1)
            return
        try:
            for row in range(len(offsets) - 1):
                _take_row(sink, config, stream, layout, offsets, row)
                sink.record, sink.offset = row + 1, int(offsets[row + 1])
                yield
            if left := stream.skip(1 << 62):
                sink.damaged(f"{left:,} bytes follow the last sample", bytes=left)
        except _CutShortError:
            lost, ends = stream.tell() - int(offsets[sink.record]), int(offsets[-1])
            problem = f"truncated: the file ends at byte {stream.tell():,}, but its last sample at {ends:,}"
            sink.damaged(problem, bytes=lost, records=len(offsets) - 1 - sink.record)
        except ContainerError as damage:
            unfinished = sink.position - int(offsets[sink.record])
            sink.cut_short(damage, bytes=unfinished, records=len(offsets) - 1 - sink.record)


class _CutShortError(Exception):
    """The shard ends inside a sample."""


class _BadSampleError(Exception):
    """A sample cannot be read; `reason` is its quarantine reason, and `problem` describes the problem."""

    def __init__(self, reason: str, problem: str) -> None:
        super().__init__(problem)
        self.reason, self.problem = reason, problem


def _unfit(layout: SampleLayout, sink: RecordSink, config: InputConfig) -> str | None:
    """Return why no text column is usable, or None; raise RecipeError if a carried column is unusable."""
    split = sink.split
    for column in layout.columns:
        named = (config.id, config.url, *config.metadata)
        if column.encoding not in _PLAIN and any(path and _within(path, column.name) for path in named):
            problem = f"column {column.name!r} holds {column.encoding}, not text, JSON or numbers"
            raise RecipeError(f"inputs[{split.source}]: {split.file}: {problem}; name another column")
    held = {column.name: column.encoding for column in layout.columns}
    if config.text in held:
        kind = held[config.text]
        return None if kind in _OF_TEXT else f"column {config.text!r} holds {kind}, not text"
    if any(kind == "json" and _within(config.text, name) for name, kind in held.items()):
        return None
    return f"no column {config.text!r}; its columns: {', '.join([*held][:_SHOWN])}"


def _within(path: str, name: str) -> bool:
    """Return whether `path` names the field `name` or a field inside it."""
    return path == name or path.startswith(f"{name}.")


def _take_row(
    sink: RecordSink,
    config: InputConfig,
    stream: PieceReader,
    layout: SampleLayout,
    offsets: npt.NDArray[np.uint32],
    row: int,
) -> None:
    """Read one sample, pass it to the sink, and leave the stream at the end of the sample."""
    begin, end = int(offsets[row]), int(offsets[row + 1])
    paths = {config.text, *sink.carried}
    found, size = _Found(), end - begin
    try:
        head = stream.read(min(layout.head_bytes, size))
        if len(head) < min(layout.head_bytes, size):
            raise _CutShortError
        for column, encoding, position, length in layout.spans(row, begin, size, head):
            found.fields[column.name] = MISSING
            if column.encoding in _PLAIN and any(_within(path, column.name) for path in paths):
                stream.skip(begin + position - stream.tell())
                left = sink.max_record_bytes - found.taken
                of_text = _within(config.text, column.name)
                value = _value(stream, encoding, column, length, sink, left, of_text=of_text)
                found.put(column.name, value, length, length)
    except ShardError as error:
        found.problem = _BadSampleError("bad_record", error.problem)
    except _BadSampleError as error:
        found.problem = error
    left = end - stream.tell()
    if stream.skip(left) < left:
        raise _CutShortError
    _book(sink, config, found, size)


def _value(
    stream: PieceReader,
    encoding: Encoding,
    column: Column,
    size: int,
    sink: RecordSink,
    left: int,
    *,
    of_text: bool,
) -> object:
    """Return the value of a column; None if it cannot be decoded and does not contain the text."""
    name = column.name
    _check_size(size, name, sink, left)
    data = stream.read(size)
    if len(data) < size:
        raise _CutShortError
    try:
        if sink.replaces and column.encoding in ("str", "json"):
            data = sink.decode(data).encode()
        return encoding.decode(memoryview(data))
    except (ValueError, RecursionError) as error:
        if not of_text:
            return None
        if isinstance(error, UnicodeDecodeError):
            raise _BadSampleError("bad_utf8", f"byte {error.start:,} of {name!r} is not UTF-8") from None
        problem = "nested too deeply" if isinstance(error, RecursionError) else error
        raise _BadSampleError("bad_record", f"column {name!r}: {problem}") from None


def _check_size(size: int, name: str, sink: RecordSink, left: int) -> None:
    """Raise _BadSampleError if a value is larger than the `left` bytes that its sample may still use."""
    if size > left:
        limit = sink.max_record_bytes
        together = "" if size > limit else f" after {limit - left:,} bytes of other values"
        problem = f"{name!r} has {size:,} bytes{together}, more than max_record_bytes {limit:,}"
        raise _BadSampleError("too_long", problem)


@dataclass
class _Found:
    """The fields of a sample that have been read so far, by name; MISSING for a skipped field."""

    fields: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    taken: int = 0  # bytes of `max_record_bytes` used so far
    problem: _BadSampleError | None = None

    def put(self, name: str, value: object, size: int, taken: int) -> None:
        """Add a field that was decoded from `size` bytes, or `taken` bytes after decompression."""
        self.fields[name], self.sizes[name] = value, size
        self.taken += taken

    def at(self, path: str) -> Any:
        """Return the value at `path`, or MISSING; a field's own name may contain dots, such as meta.json."""
        if path in self.fields:
            return self.fields[path]
        name = max((name for name in self.sizes if _within(path, name)), key=len, default=None)
        if name is None or not isinstance(self.fields[name], Mapping):
            return MISSING
        return field_at(self.fields[name], path.removeprefix(f"{name}."))


def _book(sink: RecordSink, config: InputConfig, found: _Found, size: int) -> None:
    """Pass a sample of `size` bytes to the sink, as a document or as a bad record."""
    try:
        if found.problem is not None:
            raise found.problem
        carried = {path: found.at(path) for path in sink.carried}
        carried = {path: _carried(sink, value) for path, value in carried.items() if value is not MISSING}
        text = _text(sink, found.at(config.text), config.text)
        if not isinstance(text, str):
            raise _BadSampleError("no_text", f"the value at {config.text!r} is not text")
    except _BadSampleError as error:
        sink.bad(error.reason, error.problem, bytes=size)
        return
    of_text = max(
        (found.sizes[name] for name in found.sizes if _within(config.text, name)), default=len(text)
    )
    sink.add(text, found.fields | carried, bytes=of_text)


def _carried(sink: RecordSink, value: Any) -> Any:
    """Return the value of a carried field, with bad text replaced if the recipe says so."""
    if sink.replaces and isinstance(value, str | dict | list):
        with suppress(RecursionError):
            return sink.check_value(value)
    return value


def _text(sink: RecordSink, value: Any, path: str) -> Any:
    """Decode `value` if it is bytes, else check the texts in it; raise _BadSampleError if one is invalid."""
    try:
        if isinstance(value, bytes):
            return sink.text_of(value) if path == sink.text_path else sink.decode(value)
        return sink.check_value(value)
    except UnicodeError:
        raise _BadSampleError("bad_utf8", f"{path!r} is not UTF-8") from None
    except RecursionError:
        raise _BadSampleError("bad_record", f"{path!r} is nested too deeply") from None


def read_wds(sink: RecordSink, config: InputConfig) -> Iterator[None]:
    """Read a WebDataset tar: pass all of its samples to the sink."""
    split = sink.split
    sink.offset = 0
    with open_input(split.input) as file:
        sink.look_at(file)
        if sink.compression is None:
            sink.refuse_others()
        data: _FileBytes | _StreamBytes = _FileBytes(file, split.input.bytes)
        damage = None
        if sink.compression is not None:
            size, damage = _sound_bytes(sink, file, salvage=config.salvage)
            data = _StreamBytes(_unpacked(sink, file), size)
        samples = _Samples(sink, config, data)
        try:
            for found, size in samples:
                _explain_missing(sink, config, found)
                _book(sink, config, found, size)
                sink.record, sink.offset = sink.record + 1, samples.start
                yield
        except ShardError as error:
            problem, left = error.problem, len(data) - samples.start
        else:
            problem, left = "", 0
        if damage:
            sink.cut_short(damage, bytes=left)
        elif problem:
            sink.damaged(problem, bytes=left)


def _unpacked(sink: RecordSink, file: BinaryIO) -> Iterator[bytes]:
    """Return the content of the split's compressed file."""
    size = sink.split.input.bytes
    return decompressed(file, sink.compression, size, window_bytes=sink.window_bytes)


def _sound_bytes(sink: RecordSink, file: BinaryIO, *, salvage: bool) -> tuple[int, ContainerError | None]:
    """Return (number of decompressed bytes of a tar that a checksum confirms, damage after them or None).

    With `salvage`, the number includes bytes of the damaged member, which no checksum confirms.
    """
    size = 0
    try:
        for piece in _unpacked(sink, file):
            size += len(piece)
    except ContainerError as damage:
        if salvage:
            return size, ContainerError(damage.problem, damage.rest_bytes)
        return size - damage.suspect_bytes, ContainerError(
            damage.problem, damage.rest_bytes + damage.suspect_bytes
        )
    return size, None


def _explain_missing(sink: RecordSink, config: InputConfig, found: _Found) -> None:
    """If a sample has no text, set its error: which members it has and, for the first one, what to do."""
    if found.problem is None and found.at(config.text) is MISSING:
        names = ", ".join(sorted(name for name in found.fields if name not in ("id", "__key__"))[:_SHOWN])
        problem = f"no member .{config.text}; its members: {names or 'none'}"
        if not sink.records:
            problem += f"; set inputs[{sink.split.source}].text to the one with the text"
        found.problem = _BadSampleError("no_text", problem)


class _Samples:
    """Iterates over a tar's samples: (fields, size in bytes with headers); raises ShardError at damage.

    `start` is the offset of the sample after the last one that was yielded.
    """

    def __init__(self, sink: RecordSink, config: InputConfig, data: Bytes) -> None:
        self._sink, self._data = sink, data
        self._text, self._paths = config.text, {config.text, *sink.carried}
        self.start = 0

    def __iter__(self) -> Iterator[tuple[_Found, int]]:
        key: str | None = None
        found, start = _Found(), 0
        for member in walk_members(self._data, self._sink.split.file):
            parts = split_name(member.name)
            if parts is None:
                continue
            if parts[0] != key:
                if key is not None:
                    self.start = member.start
                    yield found, member.start - start
                key, start = parts[0], member.start
                found = _Found({"__key__": key, "id": key})
            self._take(found, parts[1], member.offset, member.size)
        if key is not None:
            self.start = len(self._data)
            yield found, self.start - start

    def _take(self, found: _Found, extension: str, offset: int, size: int) -> None:
        """Read a member if the recipe names a field in it; otherwise note that it exists."""
        repeated = extension in found.sizes or (extension in found.fields and extension != "id")
        if repeated or len(found.fields) > _MAX_MEMBERS:
            problem = f"two members .{extension}" if repeated else f"more than {_MAX_MEMBERS:,} members"
            found.problem = found.problem or _BadSampleError("bad_record", problem)
            return
        if not any(_within(path, extension) for path in self._paths):
            found.fields[extension] = MISSING
            return
        try:
            left = self._sink.max_record_bytes - found.taken
            _check_size(size, f".{extension}", self._sink, left)
            data = bytes(self._data[offset : offset + size])
            if extension.endswith(".gz"):
                data = gunzip(memoryview(data), left)
            is_text = extension == self._sink.text_path  # may be a web page in any encoding
            value: object = None
            try:
                value = _member(extension, data, self._sink.text_of if is_text else self._sink.decode)
            except ValueError as error:
                if _within(self._text, extension):
                    raise
                value = data if isinstance(error, UnicodeDecodeError) else None
            found.put(extension, value, size, max(size, len(data)))
        except UnicodeDecodeError as error:
            problem = f"byte {error.start:,} of member .{extension} is not UTF-8"
            found.problem = found.problem or _BadSampleError("bad_utf8", problem)
        except ValueError as error:
            found.problem = found.problem or _BadSampleError("bad_record", f"member .{extension}: {error}")
        except _BadSampleError as error:
            found.problem = found.problem or error


def _member(extension: str, data: bytes, decode: Callable[[bytes], str]) -> object:
    """Return the value of a member by its extension: JSON, a number, or else text by `decode`.

    `data` is decompressed. Raises ValueError if it is not valid for the extension.
    """
    kind = extension.removesuffix(".gz").rpartition(".")[2]
    try:
        return int(data) if kind in _NUMBERS else json.loads(decode(data)) if kind in _JSON else decode(data)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error


class _FileBytes:
    """A file of `size` bytes whose slices are read on demand."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, span: slice, /) -> bytes:
        start, stop, _ = span.indices(self._size)
        self._file.seek(start)
        return self._file.read(max(stop - start, 0))


class _StreamBytes:
    """A stream of `size` bytes that can be sliced; a slice must not start before the previous one."""

    def __init__(self, pieces: Iterator[bytes], size: int) -> None:
        self._stream, self._size = PieceReader(pieces), size
        self._last, self._start = b"", 0  # the last slice, and where it begins

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, span: slice, /) -> bytes:
        start, stop, _ = span.indices(self._size)
        held = self._last[start - self._start :]
        self._stream.skip(max(start - self._stream.tell(), 0))
        self._start = start
        self._last = held[: stop - start] + self._stream.read(max(stop - max(start, self._stream.tell()), 0))
        return self._last


def first_samples(
    file: InputFile, format: str, compression: str | None, count: int
) -> list[dict[str, object]]:
    """Return texts, JSON and numbers of `count` samples; raise ShardError, ContainerError or OSError."""
    with open_input(file) as stored:
        if format == "mds":
            pieces = decompressed(stored, compression, file.bytes)
            return _first_rows(PieceReader(pieces), file.name, count)
        if compression is not None:
            return _first_members(
                _StreamBytes(decompressed(stored, compression, file.bytes), 4 * _SMALL_BYTES), file, count
            )
        return _first_members(_FileBytes(stored, file.bytes), file, count)


def _first_rows(stream: PieceReader, name: str, count: int) -> list[dict[str, object]]:
    columns, offsets = read_header(name, stream.read)
    layout = SampleLayout(name, columns)
    rows: list[dict[str, object]] = []
    for row in range(min(count, len(offsets) - 1)):
        begin, size = int(offsets[row]), int(offsets[row + 1] - offsets[row])
        if size > _SMALL_BYTES:
            break
        data = stream.read(size)
        spans = layout.spans(row, begin, size, data[: layout.head_bytes])
        held = {one.name: (encoding, data[at : at + length]) for one, encoding, at, length in spans}
        small = {column.name for column in columns if column.encoding in _PLAIN - {"bytes"}}
        rows.append({one: held[one][0].decode(memoryview(held[one][1])) for one in held if one in small})
    return rows


def _first_members(data: Bytes, file: InputFile, count: int) -> list[dict[str, object]]:
    samples: list[dict[str, object]] = []
    key: str | None = None
    try:
        for member in walk_members(data, file.name):
            parts = split_name(member.name)
            if parts is None:
                continue
            if parts[0] != key:
                if len(samples) == count:
                    break
                key = parts[0]
                samples.append({})
            if parts[1].rpartition(".")[2] in _SMALL and member.size <= _SMALL_BYTES:
                held = bytes(data[member.offset : member.offset + member.size])
                held = gunzip(memoryview(held), _SMALL_BYTES) if parts[1].endswith(".gz") else held
                samples[-1][parts[1]] = _member(parts[1], held, bytes.decode)
    except ShardError:
        if not samples:  # after some samples, the error may only mean that not all was decompressed
            raise
    return samples
