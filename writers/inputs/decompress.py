"""Decompressed bytes of an input file, in bounded pieces, with damage found and named.

gzip of several members, zstd of several frames (also skippable ones, also without content size), bz2, xz and
lz4. All bytes before the damage are handed out first, then `ContainerError` is raised: truncation, bad
checksums, garbage after the end. Cost: one read buffer, one output piece and the decoder's own window.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import BinaryIO

import zstandard

from shardkit.writers.inputs.compressed_members import (
    ContainerError,
    MemberReader,
    codec_of,
    igzip_codec,
    read_members,
)

__all__ = ["COMPRESSIONS", "ContainerError", "decompressed", "plain_range"]

COMPRESSIONS = {
    ".gz": "gzip",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".bz2": "bz2",
    ".xz": "xz",
    ".lzma": "xz",
    ".lz4": "lz4",
}
_READ_BYTES = 1 << 18
_PIECE_BYTES = 1 << 20
# A zstd block of 4 bytes can stand for 128 KiB and the binding has no limit on output: 8 KiB of hostile input
# make 256 MiB at most, 8 KiB of text some 30 KiB; larger pieces are not faster.
_ZSTD_READ_BYTES = 1 << 13


def decompressed(file: BinaryIO, compression: str | None, size: int) -> Iterator[bytes]:
    """The content of an open file of `size` bytes in pieces; ContainerError after the last good byte."""
    if compression == "gzip":
        yield from _gunzip(file, size)
    elif compression == "zstd":
        yield from _unzstd(file, size)
    elif compression is not None:
        yield from read_members(file, size, codec_of(compression))
    else:
        yield from plain_range(file, 0, size)


def plain_range(file: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    """Bytes [start, end) of an uncompressed file; ContainerError when the file has become shorter."""
    file.seek(start)
    left = end - start
    while left:
        piece = file.read(min(left, _PIECE_BYTES))
        if not piece:
            raise ContainerError("the file became shorter while it was read", left)
        left -= len(piece)
        yield piece


def _gunzip(file: BinaryIO, size: int) -> Iterator[bytes]:
    """By ISA-L where it is installed; whatever it refuses is read again by zlib, whose word counts."""
    codec = igzip_codec()
    if codec is None:
        yield from _zlib_members(file, size)
        return
    reader = MemberReader(file, codec)
    with suppress(*codec.errors):
        yield from reader
    if not reader.complete:
        file.seek(reader.start)
        left = reader.given
        for piece in _zlib_members(file, size, used=reader.start, members=reader.members):
            if left < len(piece):
                yield piece[left:]
            left = max(left - len(piece), 0)


def _zlib_members(file: BinaryIO, size: int, *, used: int = 0, members: int = 0) -> Iterator[bytes]:
    """gzip members from byte `used` on, where `file` stands and behind `members` others."""
    pending = b""
    decoder = None
    while True:
        pending = pending or file.read(_READ_BYTES)
        if not pending:
            break
        if decoder is None:
            if members:  # zeros after the last member are padding, as gzip itself sees it
                stripped = pending.lstrip(b"\0")
                used += len(pending) - len(stripped)
                pending = stripped
                if not pending:
                    continue
            decoder = zlib.decompressobj(wbits=31)
        before, given = decoder.copy(), pending
        try:
            piece = decoder.decompress(pending, _PIECE_BYTES)
        except zlib.error as error:
            good, taken = _until_error(before, pending)
            yield from good
            problem = _gzip_problem(str(error), members)
            raise ContainerError(problem, size - used - (taken if any(good) else 0)) from None
        if decoder.eof:
            members, pending, decoder = members + 1, decoder.unused_data, None
        else:
            pending = decoder.unconsumed_tail
        used += len(given) - len(pending)
        yield piece
    if decoder is not None:
        try:
            yield decoder.flush()  # what the last piece had no room for
        except zlib.error as error:
            raise ContainerError(_gzip_problem(str(error), members), 0) from None
        members += decoder.eof
    if not members or (decoder is not None and not decoder.eof):
        raise ContainerError(f"truncated: the file ends inside gzip member {members + 1}", 0)


def _until_error(decoder: zlib._Decompress, data: bytes) -> tuple[list[bytes], int]:
    """What a decoder makes of `data` up to the byte it fails at: zlib's call throws that output away."""
    pieces = []
    for at in range(len(data)):
        try:
            pieces.append(decoder.decompress(data[at : at + 1]))
        except zlib.error:
            return pieces, at
    return pieces, len(data)


def _gzip_problem(error: str, members: int) -> str:
    reason = error.rsplit(": ", 1)[-1]
    if "header check" in reason:
        return f"garbage after {members} complete gzip members" if members else "not a gzip file"
    kind = "bad checksum" if "data check" in reason or "length check" in reason else "damaged data"
    return f"{kind} in gzip member {members + 1} ({reason})"


def _unzstd(file: BinaryIO, size: int) -> Iterator[bytes]:
    frames, used, pending = 0, 0, b""
    decoder = None
    while True:
        pending = pending or file.read(_ZSTD_READ_BYTES)
        if not pending:
            break
        if decoder is None:
            decoder = zstandard.ZstdDecompressor().decompressobj()
        try:
            piece = decoder.decompress(pending)
        except zstandard.ZstdError as error:
            reason = str(error).rsplit(": ", 1)[-1]
            garbage = "Unknown frame descriptor" in reason
            if garbage:
                problem = f"garbage after {frames} complete zstd frames" if frames else "not a zstd file"
            else:
                problem = f"damaged data in zstd frame {frames + 1} ({reason})"
            raise ContainerError(problem, size - used) from None
        used += len(pending)
        pending = b""
        if decoder.eof:
            frames, pending, decoder = frames + 1, decoder.unused_data, None
            used -= len(pending)
        yield piece
    if decoder is not None or not frames:
        raise ContainerError(f"truncated: the file ends inside zstd frame {frames + 1}", 0)
