"""Formats made of members that a decoder takes one at a time, read to the last good byte: bz2, xz, lz4, gzip.

Such a decoder throws away what it made in the call that fails. So a member that failed is decoded once more,
the failing piece byte by byte, and what had not been handed out yet is handed out. Damage costs one member's
time again, sound files nothing.
"""

from __future__ import annotations

import bz2
import lzma
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, cast

from shardkit.errors import MissingExtraError

__all__ = ["ContainerError", "MemberCodec", "MemberReader", "codec_of", "igzip_codec", "read_members"]

_READ_BYTES = 1 << 16
_PIECE_BYTES = 1 << 20
_MAGIC_BYTES = 8
# A decoder of xz holds a dictionary as large as the file says: -9 has 64 MiB, hostile files say 4 GiB.
_XZ_MEMORY_BYTES = 1 << 28


class ContainerError(Exception):
    """A file's container is broken; `rest_bytes` of it (as stored) could not be used."""

    def __init__(self, problem: str, rest_bytes: int) -> None:
        self.problem, self.rest_bytes = problem, rest_bytes
        super().__init__(problem)


@dataclass(frozen=True)
class MemberCodec:
    """A format whose decoders are like those of Python's bz2: needs_input, eof, unused_data."""

    name: str
    member: str
    decoder: Callable[[], Any]
    errors: tuple[type[Exception], ...]
    magic: re.Pattern[bytes]  # how a member begins
    padded: bool = False  # zeros may stand between members


def codec_of(compression: str) -> MemberCodec:
    """The codec of "bz2", "xz" (also .lzma) or "lz4"; MissingExtraError if that one's package is missing."""
    if compression == "bz2":
        magic = re.compile(rb"BZh[1-9]")
        return MemberCodec("bz2", "stream", bz2.BZ2Decompressor, (OSError, ValueError), magic)
    if compression == "xz":
        magic = re.compile(rb"\xfd7zXZ\0|\x5d\0\0")
        return MemberCodec("xz", "stream", _xz_decoder, (lzma.LZMAError,), magic, padded=True)
    try:
        import lz4.frame
    except ImportError:
        raise MissingExtraError("lz4", "formats", "reading .lz4 files") from None
    magic = re.compile(rb"\x04\x22\x4d\x18|[\x50-\x5f]\x2a\x4d\x18")  # frames, and those to be skipped
    return MemberCodec("lz4", "frame", lz4.frame.LZ4FrameDecompressor, (RuntimeError,), magic)


def _xz_decoder() -> lzma.LZMADecompressor:
    return lzma.LZMADecompressor(memlimit=_XZ_MEMORY_BYTES)


def igzip_codec() -> MemberCodec | None:
    """gzip by ISA-L, where it is installed."""
    try:
        from isal import igzip_lib
    except ImportError:
        return None
    decoder = partial(igzip_lib.IgzipDecompressor, flag=igzip_lib.DECOMP_GZIP)
    return MemberCodec(
        "gzip",
        "member",
        decoder,
        (cast("type[Exception]", igzip_lib.error),),
        re.compile(rb"\x1f\x8b"),
        padded=True,
    )


def read_members(file: BinaryIO, size: int, codec: MemberCodec) -> Iterator[bytes]:
    """The content of all members; ContainerError after the last good byte."""
    reader = MemberReader(file, codec)
    try:
        yield from reader
    except codec.errors as error:
        if getattr(error, "errno", None) is not None:  # the disk's error, not the decoder's
            raise
        good = False
        for piece in _replay(file, reader, codec):
            good = True
            yield piece
        rest = size - (reader.failed_at if reader.given or good else reader.start)
        raise ContainerError(_problem(file, reader, codec, error), rest) from None
    if not reader.complete:
        raise ContainerError(f"truncated: the file ends inside {codec.name} {_number(reader, codec)}", 0)


class MemberReader:
    """Members one after the other. What became of the last: where it began and how much was handed out."""

    def __init__(self, file: BinaryIO, codec: MemberCodec) -> None:
        self._file, self._codec = file, codec
        self.members = 0  # complete ones
        self.start = 0  # of the member that is being read, in the file
        self.given = 0  # bytes of it that were handed out
        self.failed_at = 0  # where in the file the piece began that is being decoded
        self.complete = False  # the last member ended where the file ends

    def __iter__(self) -> Iterator[bytes]:
        pending, read = self._file.read(_READ_BYTES), 0
        while pending or not self.members:
            self.start, self.given, self.complete = read, 0, False
            decoder = self._codec.decoder()
            while not decoder.eof:
                if decoder.needs_input and not pending:
                    pending = self._file.read(_READ_BYTES)
                    if not pending:
                        return
                data, pending = pending, b""
                self.failed_at = read
                piece = decoder.decompress(data, _PIECE_BYTES)
                read += len(data)
                self.given += len(piece)
                yield piece
            self.members, self.complete = self.members + 1, True
            pending = decoder.unused_data or b""
            read -= len(pending)
            pending, skipped = self._next_member(pending)
            read += skipped

    def _next_member(self, pending: bytes) -> tuple[bytes, int]:
        """What is known of the next member, and how many bytes of padding stood before it."""
        skipped = 0
        while True:
            if self._codec.padded:
                stripped = pending.lstrip(b"\0")
                skipped += len(pending) - len(stripped)
                pending = stripped
            if pending:
                return pending, skipped
            pending = self._file.read(_READ_BYTES)
            if not pending:
                return b"", skipped


def _replay(file: BinaryIO, reader: MemberReader, codec: MemberCodec) -> Iterator[bytes]:
    """What the member holds behind `given` bytes; sets `failed_at` to the byte that cannot be read."""
    decoder = codec.decoder()
    file.seek(reader.start)
    at, made, failing = reader.start, 0, reader.failed_at
    try:
        while not decoder.eof:
            step = min(_READ_BYTES, failing - at) if at < failing else 1
            data = file.read(step) if decoder.needs_input else b""
            reader.failed_at = at
            piece = decoder.decompress(data, _PIECE_BYTES)
            at += len(data)
            fresh = piece[max(reader.given - made, 0) :]
            made += len(piece)
            if fresh:
                yield fresh
    except codec.errors:
        return


def _problem(file: BinaryIO, reader: MemberReader, codec: MemberCodec, error: Exception) -> str:
    file.seek(reader.start)
    if codec.magic.match(file.read(_MAGIC_BYTES)):
        reason = str(error).rsplit(": ", 1)[-1]
        return f"damaged data in {codec.name} {_number(reader, codec)} ({reason})"
    if reader.members:
        return f"garbage after {reader.members} complete {codec.name} {codec.member}s"
    return f"not {'an' if codec.name[0] in 'lx' else 'a'} {codec.name} file"


def _number(reader: MemberReader, codec: MemberCodec) -> str:
    return f"{codec.member} {reader.members + 1}"
