"""Reads TFRecord files, plain or compressed by gzip, and the tf.train.Example messages in them.

    record      u64 length | u32 masked CRC32C of the length | data | u32 masked CRC32C of the data
    Example     1: Features      Features    1: entries of a map {1: name, 2: Feature}
    Feature     1: BytesList | 2: FloatList | 3: Int64List, each with 1: values, packed or one by one

Both checksums of each record are verified. Messages are read as protobuf does: the last entry of a name and
the last kind of a feature win, and lists of the same kind are joined. Fields that Example does not have are
refused, so that nothing is left out; a SequenceExample is refused by its name.
"""

from __future__ import annotations

import gzip
import re
import struct
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from shardkit.errors import ShardError, naming_extras

MAX_RECORD_BYTES = (1 << 31) - 1  # protobuf's limit of a message
FeatureKind = Literal["bytes", "float", "int64"]

HEADER = struct.Struct("<QI")
"""The beginning of a record: the length of its data, and the masked CRC32C of the length."""

_NAME = re.compile(r".+\.tfrecords?(-\d+-of-\d+)?(\.gz)?", re.DOTALL)
_GZIP = b"\x1f\x8b"
_READ_BYTES = 8 << 20
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_KINDS: dict[int, FeatureKind] = {1: "bytes", 2: "float", 3: "int64"}
_CASTAGNOLI = 0x82F63B78  # the polynomial of CRC32C, its bits reversed
_SHORT_LIST = 24  # bytes of packed varints up to which a loop is faster than NumPy


@dataclass(frozen=True, slots=True)
class Feature:
    """The values of one feature; `kind` is None if the message states none, and then `values` is empty."""

    kind: FeatureKind | None
    values: list[bytes] | npt.NDArray[np.float32] | npt.NDArray[np.int64]


def is_tfrecord_name(name: str) -> bool:
    """Return whether a file's name ends as TFRecord files do, such as c4-train.tfrecord-00000-of-01024."""
    return _NAME.fullmatch(name) is not None


def begins_tfrecord(head: bytes) -> bool:
    """Return whether the first 12 bytes of a file are the length of a record and its checksum.

    Needs no extra, so that a file is recognized, and named in messages, without it.
    """
    if len(head) < HEADER.size:
        return False
    length, checksum = HEADER.unpack_from(head)
    if length > MAX_RECORD_BYTES:
        return False
    crc = 0xFFFFFFFF
    for octet in head[:8]:
        crc ^= octet
        for _ in range(8):
            crc = crc >> 1 ^ (_CASTAGNOLI if crc & 1 else 0)
    return bool(checksum == _masked(crc ^ 0xFFFFFFFF))


def read_records(path: Path) -> Iterator[tuple[int, bytes, int]]:
    """Yield (offset in the uncompressed file, data, stored bytes read since the last one) of each record.

    Raises ShardError, with the offset, for a record that is damaged, truncated or above 2 GiB.
    """
    try:
        with path.open("rb") as raw:
            head = raw.read(HEADER.size)
            raw.seek(0)
            if not head.startswith(_GZIP) or begins_tfrecord(head):
                yield from _records(path, raw, raw)
                return
            with gzip.GzipFile(fileobj=raw, mode="rb") as unzipped:
                yield from _records(path, unzipped, raw)
    except OSError as error:
        raise ShardError(path, f"cannot be read: {error.strerror or error}") from error


def _records(path: Path, stream: BinaryIO | gzip.GzipFile, raw: BinaryIO) -> Iterator[tuple[int, bytes, int]]:
    checksum, offset, stored = masked_crc32c(), 0, 0
    while head := _read(path, stream, HEADER.size, offset):
        if len(head) < HEADER.size:
            raise ShardError(path, f"ends {len(head)} bytes into the header of a record", offset=offset)
        length, expected = HEADER.unpack(head)
        if checksum(head[:8]) != expected:
            problem = "has a length with a wrong checksum: it is damaged here"
            if offset == 0:
                problem = (
                    "does not begin with a record: it is damaged, or not a TFRecord file (plain or gzip)"
                )
            raise ShardError(path, problem, offset=offset)
        if length > MAX_RECORD_BYTES:
            raise ShardError(path, f"states a record of {length:,} bytes, above 2 GiB", offset=offset)
        body = _read(path, stream, length + 4, offset)
        if len(body) < length + 4:
            problem = f"ends inside a record of {length:,} bytes: it is truncated"
            raise ShardError(path, problem, offset=offset)
        data = body[:length]
        if checksum(data) != int.from_bytes(body[length:], "little"):
            raise ShardError(path, f"has a damaged record of {length:,} bytes: wrong checksum", offset=offset)
        place = raw.tell()
        yield offset, data, place - stored
        stored = place
        offset += HEADER.size + len(body)


def _read(path: Path, stream: BinaryIO | gzip.GzipFile, size: int, offset: int) -> bytes:
    """Read up to `size` bytes, in steps: a length that the file does not hold takes no memory."""
    parts: list[bytes] = []
    missing = size
    try:
        while missing and (part := stream.read(min(missing, _READ_BYTES))):
            parts.append(part)
            missing -= len(part)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ShardError(path, f"has damaged or truncated gzip data: {error}", offset=offset) from error
    return parts[0] if len(parts) == 1 else b"".join(parts)


def masked_crc32c() -> Callable[[bytes], int]:
    """Return the function that gives the checksum of bytes as TFRecord stores it."""
    with naming_extras("reading TFRecord files"):
        from google_crc32c import value

    return lambda data: _masked(value(data))


def _masked(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def parse_example(data: bytes, wanted: Collection[str] | None = None) -> dict[str, Feature]:
    """Parse a serialized tf.train.Example; raises ValueError, with the byte, if it is not one.

    Features that are not `wanted` (None: all) are in the result without kind and values.
    """
    features: dict[str, Feature] = {}
    for number, start, end in _messages(data, 0, len(data), "Example"):
        if number == 2:
            raise ValueError("holds a SequenceExample, or no Example: only tf.train.Example can be read")
        _expect(number, 1, start, "Example")
        for entry, first, last in _messages(data, start, end, "Features"):
            _expect(entry, 1, first, "Features")
            name, feature = _entry(data, first, last, wanted)
            features[name] = feature
    return features


def _entry(data: bytes, start: int, end: int, wanted: Collection[str] | None) -> tuple[str, Feature]:
    name, places, parts = "", [], []
    for number, first, last in _messages(data, start, end, "a feature's entry"):
        if number == 1:
            try:
                name = str(data[first:last], "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"byte {first:,}: the name of a feature is not UTF-8") from error
        else:
            _expect(number, 2, first, "a feature's entry")
            places.append((first, last))
    if wanted is not None and name not in wanted:
        return name, Feature(None, [])
    for first, last in places:
        parts += list(_messages(data, first, last, "Feature"))
    kind: FeatureKind | None = None
    lists: list[tuple[int, int]] = []
    for number, first, last in parts:
        if number not in _KINDS:
            raise ValueError(f"byte {first:,}: Feature has no field {number}")
        if _KINDS[number] != kind:
            kind, lists = _KINDS[number], []
        lists.append((first, last))
    if kind == "bytes":
        return name, Feature(kind, [value for first, last in lists for value in _bytes(data, first, last)])
    dtype: type[np.float32 | np.int64] = np.float32 if kind == "float" else np.int64
    arrays = [part for first, last in lists for part in _numbers(data, first, last, kind)]
    values: Any = arrays[0] if len(arrays) == 1 else np.concatenate([np.zeros(0, dtype), *arrays])
    return name, Feature(kind, values)


def _bytes(data: bytes, start: int, end: int) -> Iterator[bytes]:
    for number, first, last in _messages(data, start, end, "BytesList"):
        _expect(number, 1, first, "BytesList")
        yield data[first:last]


def _numbers(data: bytes, start: int, end: int, kind: str | None) -> Iterator[npt.NDArray[Any]]:
    """Yield the values of a FloatList or Int64List as arrays: one per packed run, one per run of singles."""
    name, single = ("FloatList", _FIXED32) if kind == "float" else ("Int64List", _VARINT)
    singles: list[bytes] = []
    for number, wire, first, last in _fields(data, start, end, name):
        _expect(number, 1, first, name)
        if wire == single:
            singles.append(data[first:last])
            continue
        if wire != _DELIMITED:
            raise ValueError(f"byte {first:,}: {name} has values of wire type {wire}")
        if singles:
            yield _decode(b"".join(singles), kind, first)
            singles = []
        yield _decode(data[first:last], kind, first)
    if singles:
        yield _decode(b"".join(singles), kind, start)


def _decode(packed: bytes, kind: str | None, at: int) -> npt.NDArray[Any]:
    if kind == "float":
        if len(packed) % 4:
            raise ValueError(f"byte {at:,}: a FloatList has {len(packed):,} bytes, not a multiple of 4")
        return np.frombuffer(packed, "<f4").astype(np.float32, copy=False)
    if len(packed) <= _SHORT_LIST:
        values, place = [], 0
        while place < len(packed):
            value, place = _varint(packed, place, len(packed), at)
            values.append(value)
        return np.array(values, np.uint64).view(np.int64)
    octets = np.frombuffer(packed, np.uint8)
    last = np.flatnonzero(octets < 0x80)
    if not len(last) or last[-1] != len(octets) - 1:
        raise ValueError(f"byte {at:,}: an Int64List ends inside a number")
    starts = np.concatenate([[0], last[:-1] + 1])
    sizes = last - starts + 1
    if sizes.max() > 10:
        raise ValueError(f"byte {at:,}: an Int64List has a number of more than 10 bytes")
    places = np.arange(len(octets)) - np.repeat(starts, sizes)
    parts = (octets & 0x7F).astype(np.uint64) << (7 * places).astype(np.uint64)
    return np.bitwise_or.reduceat(parts, starts).view(np.int64)


def _messages(data: bytes, start: int, end: int, name: str) -> Iterator[tuple[int, int, int]]:
    """Yield (number, first byte, end) of each field of a message whose fields all have a length."""
    for number, wire, first, last in _fields(data, start, end, name):
        if wire != _DELIMITED:
            raise ValueError(
                f"byte {first:,}: field {number} of {name} has wire type {wire}: no tf.train.Example"
            )
        yield number, first, last


def _fields(data: bytes, start: int, end: int, name: str) -> Iterator[tuple[int, int, int, int]]:
    """Yield (number, wire type, first byte, end) of each field; raises ValueError if one passes `end`."""
    place = start
    while place < end:
        tag, first = (data[place], place + 1) if data[place] < 0x80 else _varint(data, place, end)
        number, wire = tag >> 3, tag & 7
        if wire == _DELIMITED:
            size, first = _varint(data, first, end)
            last = first + size
        elif wire == _VARINT:
            _, last = _varint(data, first, end)
        elif wire in (_FIXED32, _FIXED64):
            last = first + (4 if wire == _FIXED32 else 8)
        else:
            raise ValueError(f"byte {place:,}: {name} has a field of wire type {wire}: no tf.train.Example")
        if last > end:
            raise ValueError(f"byte {place:,}: field {number} of {name} ends {last - end:,} bytes behind it")
        yield number, wire, first, last
        place = last


def _varint(data: bytes, place: int, end: int, base: int = 0) -> tuple[int, int]:
    """Return the number at `place`, below 2**64, and the place behind it."""
    if place < end and (octet := data[place]) < 0x80:
        return octet, place + 1
    value = shift = 0
    for at in range(place, min(end, place + 10)):
        octet = data[at]
        value |= (octet & 0x7F) << shift
        if octet < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at + 1
        shift += 7
    problem = "is cut off" if end < place + 10 else "has more than 10 bytes"
    raise ValueError(f"byte {base + place:,}: a number {problem}")


def _expect(number: int, known: int, at: int, name: str) -> None:
    if number != known:
        raise ValueError(f"byte {at:,}: {name} has no field {number}")
