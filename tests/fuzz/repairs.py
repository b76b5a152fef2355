"""Checksums made right again, so that hostile files are not stopped by them, one function a format."""

from __future__ import annotations

import io
import json
import struct
import zipfile

import xxhash

__all__ = ["repaired_record", "repaired_table", "repaired_tar", "repaired_tar_index"]

_BLOCK = 512
_SEAL = b',\n "seal": "'


def repaired_tar(data: bytes) -> bytes:
    """Every block that looks like a header gets the checksum of its bytes."""
    blocks = [data[at : at + _BLOCK] for at in range(0, len(data), _BLOCK)]
    return b"".join(_header(block) if block[257:262] == b"ustar" else block for block in blocks)


def _header(block: bytes) -> bytes:
    total = sum(block[:148]) + 8 * 32 + sum(block[156:])
    return block[:148] + b"%06o\0 " % total + block[156:]


def repaired_record(data: bytes) -> bytes:
    """A task's record, with the seal of what it says now."""
    body = data.partition(_SEAL)[0].removesuffix(b"\n}") + b"\n}"
    try:
        value = json.loads(data)
        value.pop("seal", None)
        body = json.dumps(value, indent=1, sort_keys=True).encode()
    except (ValueError, RecursionError, AttributeError, TypeError):
        pass  # no JSON object any more
    return body[:-2] + _SEAL + xxhash.xxh3_128_hexdigest(body).encode() + b'"\n}\n'


def repaired_tar_index(data: bytes) -> bytes:
    """The file that a cache keeps of a tar, with the digests of its head and body."""
    size = struct.unpack_from("<I", data.ljust(12, b"\0"), 8)[0]
    start = min(12 + size, max(len(data) - 16, 0))
    head, body = data[:start], data[start + 16 : -16]
    return head + xxhash.xxh3_128_digest(head) + body + xxhash.xxh3_128_digest(body)


def repaired_table(data: bytes) -> bytes:
    """index.bin: a zip file whose members are stored, with their checksums and a fresh directory."""
    made, at = io.BytesIO(), 0
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        names: set[str] = set()
        while (at := data.find(b"PK\x03\x04", at)) >= 0 and len(data) > at + 30:
            size, name_size, extra_size = struct.unpack_from("<IHH", data, at + 22)
            begin = at + 30 + name_size + extra_size
            name = data[at + 30 : at + 30 + name_size].decode("ascii", "replace").replace("\0", "0")
            end = begin + size if size < len(data) else data.find(b"PK\x01\x02", begin)
            if following := data.find(b"PK\x03\x04", begin) + 1:
                end = min(end, following - 1) if end >= 0 else following - 1
            if name not in names and begin <= end:
                archive.writestr(zipfile.ZipInfo(name or "a"), data[begin:end])
                names.add(name)
            at = max(end, at + 4)
    repaired = made.getvalue()
    return repaired if len(repaired) > 22 else data
