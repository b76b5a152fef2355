"""TFRecord files of tf.train.Example messages, written byte by byte."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Sequence
from pathlib import Path

__all__ = ["example", "field", "floats", "ints", "record", "repaired", "texts", "write"]


def crc32c(data: bytes) -> int:
    """CRC32C bit by bit, so that it shares nothing with the library that the reader uses."""
    crc = 0xFFFFFFFF
    for octet in data:
        crc ^= octet
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    """The checksum of bytes as it is stored."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def record(data: bytes, length: int | None = None) -> bytes:
    """A record; `length` states another length than that of the data."""
    head = struct.pack("<Q", len(data) if length is None else length)
    return head + masked(head) + data + masked(data)


def varint(value: int) -> bytes:
    """A number of protobuf."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, data: bytes) -> bytes:
    """A field of a message, with a length."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def ints(*values: int, packed: bool = True) -> bytes:
    """A feature of int64 values, packed or one by one."""
    if packed:
        return field(3, field(1, b"".join(map(varint, values))))
    return field(3, b"".join(b"\x08" + varint(value) for value in values))


def floats(*values: float, packed: bool = True) -> bytes:
    """A feature of float values, packed or one by one."""
    if packed:
        return field(2, field(1, struct.pack(f"<{len(values)}f", *values)))
    return field(2, b"".join(b"\x0d" + struct.pack("<f", value) for value in values))


def texts(*values: bytes) -> bytes:
    """A feature of bytes values."""
    return field(1, b"".join(field(1, value) for value in values))


def example(**features: bytes) -> bytes:
    """A tf.train.Example."""
    entries = (field(1, field(1, name.encode()) + field(2, data)) for name, data in features.items())
    return field(1, b"".join(entries))


def write(file: Path, records: Sequence[bytes]) -> Path:
    """Write records to a file, compressed if it is called .gz."""
    data = b"".join(map(record, records))
    file.write_bytes(gzip.compress(data, mtime=0) if file.suffix == ".gz" else data)
    return file


def repaired(data: bytes) -> bytes:
    """The records with right checksums, as far as their lengths lead."""
    made, at = b"", 0
    while at + 16 <= len(data):
        length = int.from_bytes(data[at : at + 8], "little") % (len(data) - at - 15)
        made += record(data[at + 12 : at + 12 + length])
        at += length + 16
    return made + data[at:]
