"""Tar headers, from a buffer: which members a tar has and where their payloads lie.

Reads v7, ustar, PAX (`x`, `g`: path and size overrides) and GNU (`L`, `K`, base-256 numbers) headers.
Nothing is trusted: checksums, lengths and ends are checked before use, every extension has a limit, and
whatever does not fit is a `ShardError` with the byte offset. Stricter than `tarfile` and GNU tar on purpose,
because both lose samples in silence: a damaged header in mid-file is an error, not the end of the archive,
and so is anything but zeros after the end marker. Member names are only keys; nothing is ever written under
them, so absolute names and `..` are harmless. Costs a few microseconds a member.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from os import PathLike
from typing import NamedTuple, Protocol

from shardkit.errors import ShardError

__all__ = ["BLOCK", "Bytes", "Member", "check_end", "padded", "walk_members"]

BLOCK = 512
MAX_EXTENSION_HEADERS = 16  # before one member; honest writers use at most x + L + K + g
MAX_EXTENSION_BYTES = 1 << 20  # PAX records of one header; honest ones hold a path and a few times
MAX_NAME_BYTES = 1 << 16  # PATH_MAX is 4,096
_ZEROS = bytes(BLOCK)
_END_PIECE = 1 << 20
_REGULAR = frozenset(b"0\x007")  # 7: contiguous file, stored like a regular one
_NO_PAYLOAD = frozenset(b"123456")  # links, devices, folders, pipes: their size field means nothing
_EXTENSIONS = frozenset(b"xgXLK")  # X: Solaris' name for x

Path = str | PathLike[str]


class Member(NamedTuple):
    """A regular member: where its headers start (extensions included), its own header, its payload."""

    start: int
    header: int
    offset: int
    size: int
    name: str


class _Header(NamedTuple):
    kind: int
    size: int
    name: bytes


def padded(size: int) -> int:
    """`size` rounded up to whole blocks."""
    return -(-size // BLOCK) * BLOCK


class Bytes(Protocol):
    """What a walk needs of a tar's bytes: slices, each at or behind the start of the one before."""

    def __len__(self) -> int: ...
    def __getitem__(self, span: slice, /) -> bytes | memoryview: ...


def walk_members(data: Bytes, file: Path) -> Iterator[Member]:
    """The regular members of a tar in order; folders, links and devices are passed over.

    `file` is for messages. Stops at the end marker or, where a tar has none, at the end of the data.
    """
    if len(data) == 0:
        raise ShardError(file, "is empty; a tar without members still has an end marker")
    position, shared = 0, dict[bytes, bytes]()
    while position < len(data):
        start, own, long_name, pending = position, dict[bytes, bytes](), b"", False
        for _ in range(MAX_EXTENSION_HEADERS + 1):
            header = _read_header(data, position, file)
            if header is None or header.kind not in _EXTENSIONS:
                break
            body = _extension_body(data, position, header, file)
            if header.kind == ord("L"):
                long_name = _up_to_nul(body)
            elif header.kind in b"xX":
                own = _pax_records(body, file, position + BLOCK)
            elif header.kind == ord("g"):
                shared |= _pax_records(body, file, position + BLOCK)
            pending = pending or header.kind != ord("g")
            position += BLOCK + padded(header.size)
        else:
            raise ShardError(
                file, f"more than {MAX_EXTENSION_HEADERS} extension headers in a row", offset=start
            )
        if header is None:
            if pending:
                raise ShardError(file, "an extension header without a member", offset=start)
            check_end(data, position, file)
            return
        overrides = {**shared, **own} if shared else own
        size = _payload_size(header, overrides, file, position)
        offset = position + BLOCK
        if offset + padded(size) > len(data):
            problem = (
                f"a member of {size:,} bytes ends after the file ({len(data):,} bytes); the file is cut short"
            )
            raise ShardError(file, problem, offset=position)
        if header.kind in _REGULAR and not (header.kind == 0 and header.name.endswith(b"/")):
            path = overrides.get(b"path", b"").rstrip(b"/")
            name = (path or long_name or header.name).decode("utf-8", "surrogateescape")
            yield Member(start, position, offset, size, name)
        position = offset + padded(size)


def check_end(data: Bytes, position: int, file: Path) -> None:
    """ShardError unless everything from the end marker at `position` on is zeros."""
    for at in range(position, len(data), _END_PIECE):
        piece = bytes(data[at : at + _END_PIECE])
        if piece.count(0) != len(piece):
            problem = (
                "data after the end-of-archive marker; readers would drop it in silence. If tars were "
                "concatenated, keep them as separate shards"
            )
            raise ShardError(file, problem, offset=at + len(piece) - len(piece.lstrip(b"\0")))


def _read_header(data: Bytes, position: int, file: Path) -> _Header | None:
    """The header at `position`, or None at the end of the archive."""
    block = bytes(data[position : position + BLOCK])
    if not block or block == _ZEROS:
        return None
    if len(block) < BLOCK:
        if not any(block):
            return None
        raise ShardError(file, "the file ends inside a tar header; it is cut short", offset=position)
    _check_sum(block, file, position)
    kind = block[156]
    name = _up_to_nul(block[:100])
    if block[257:263] == b"ustar\0" and block[345]:
        name = _up_to_nul(block[345:500]) + b"/" + name
    return _Header(kind, _number(block[124:136], "size", file, position), name)


def _check_sum(block: bytes, file: Path, position: int) -> None:
    """ShardError unless the checksum is that of the header, summed without or with signs."""
    field = block[148:156]
    stored = _number(field, "checksum", file, position)
    instead = sum(field) - 8 * 32  # the field counts as spaces
    # The low half of adler32 is 1 + the sum of all bytes modulo 65,521: the sum itself where at least half of
    # the bytes are zero, and five times faster than `sum`.
    if 2 * block.count(0) >= BLOCK and 1 + stored + instead == zlib.adler32(block) & 0xFFFF:
        return
    unsigned = sum(block) - instead
    if stored != unsigned and stored != unsigned - 256 * sum(1 for c in block[:148] + block[156:] if c > 127):
        raise ShardError(file, f"tar header checksum is {unsigned}, stated {stored}", offset=position)


def _number(field: bytes, what: str, file: Path, position: int) -> int:
    """An octal or base-256 number that is not negative."""
    digits = field.rstrip(b"\0 ")
    if digits.isdigit() and b"8" not in digits and b"9" not in digits:
        return int(digits, 8)
    if field[0] & 0x80:
        value = int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
        if field[0] & 0x40:  # two's complement: a negative number
            raise ShardError(file, f"tar header has a negative {what}", offset=position)
        return value
    text = _up_to_nul(field).strip(b" ")
    if not text:
        return 0
    if not text.isdigit() or b"8" in text or b"9" in text:
        raise ShardError(
            file, f"tar header has no readable {what}: {text!r}; not a tar file?", offset=position
        )
    return int(text, 8)


def _up_to_nul(field: bytes) -> bytes:
    return field.split(b"\0", 1)[0]


def _extension_body(data: Bytes, position: int, header: _Header, file: Path) -> bytes:
    limit = MAX_NAME_BYTES if header.kind in b"LK" else MAX_EXTENSION_BYTES
    if header.size > limit:
        problem = f"an extension header of {header.size:,} bytes; the limit is {limit:,}"
        raise ShardError(file, problem, offset=position)
    if position + BLOCK + padded(header.size) > len(data):
        raise ShardError(file, "an extension header ends after the file; it is cut short", offset=position)
    return bytes(data[position + BLOCK : position + BLOCK + header.size])


def _pax_records(body: bytes, file: Path, offset: int) -> dict[bytes, bytes]:
    """The records that matter here: `path` and `size`. An empty value withdraws a record (POSIX)."""
    records: dict[bytes, bytes] = {}
    at = 0
    while at < len(body) and body[at]:
        space = body.find(b" ", at, at + 8)
        length = int(body[at:space]) if space > at and body[at:space].isdigit() else 0
        stop = at + length
        if not space + 1 < stop <= len(body) or body[stop - 1] != 0x0A:  # also: every record moves on
            raise ShardError(file, "a PAX record whose length or form is wrong", offset=offset + at)
        keyword, equals, value = body[space + 1 : stop - 1].partition(b"=")
        if not keyword or not equals:
            raise ShardError(file, "a PAX record whose length or form is wrong", offset=offset + at)
        if keyword.startswith(b"GNU.sparse"):
            raise ShardError(file, "a sparse member: write it without --sparse", offset=offset + at)
        if keyword == b"path" and len(value) > MAX_NAME_BYTES:
            raise ShardError(file, f"a member name of {len(value):,} bytes", offset=offset + at)
        if keyword in (b"path", b"size"):
            records[keyword] = value
        at = stop
    return records


def _payload_size(header: _Header, overrides: dict[bytes, bytes], file: Path, position: int) -> int:
    """Bytes of payload after a header, PAX override applied."""
    if header.kind == ord("S"):
        raise ShardError(file, "a sparse member: write it without --sparse", offset=position)
    if header.kind in _NO_PAYLOAD or (header.kind == 0 and header.name.endswith(b"/")):
        return 0
    stated = overrides.get(b"size", b"")
    if not stated:
        return header.size
    if not stated.isdigit() or len(stated) > 20:
        raise ShardError(file, f"a PAX size that is no number: {stated[:40]!r}", offset=position)
    return int(stated)
