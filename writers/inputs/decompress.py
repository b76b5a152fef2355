"""Decompressed bytes of an input file, in bounded pieces, with damage found and named.

gzip, zstd, bz2, xz and lz4 files are sequences of members (zstd and lz4 call them frames, bz2 and xz
streams), which one loop decodes. Members may be empty, zstd and lz4 frames skippable, gzip and xz padded with
zeros. Every byte before the damage is handed out, then `ContainerError` is raised: for truncation, damaged
data, a bad checksum, garbage after the last member.

A decoder discards what it made in the call that fails. So a damaged member is decoded once more, byte by byte
where it failed, to hand out the rest: damage costs the time of one member, sound files cost nothing extra.
Memory is one read buffer, one output piece and the decoder's own window. A zstd frame whose content needs a
larger window than is allowed is a MemoryError. A first frame to be skipped that holds a zstd dictionary,
compressed or not, gives the frames after it theirs, as in `.warc.zst` files.

`ConfirmedMembers` reads a gzip file in which every member begins with a record, as web archives are written:
it hands out nothing that a checksum has not confirmed, and continues after damage at the next such member.
"""

from __future__ import annotations

import bz2
import lzma
import math
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, cast

import zstandard

from shardkit.errors import MissingExtraError
from shardkit.formats.compression import ZSTD_WINDOW_ERROR, ZstdFrame
from shardkit.writers.inputs.first_bytes import HEAD_BYTES

COMPRESSIONS = {
    ".gz": "gzip",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".bz2": "bz2",
    ".xz": "xz",
    ".lzma": "xz",
    ".lz4": "lz4",
}
_READ_BYTES = 1 << 16
_PIECE_BYTES = 1 << 20
_ZSTD_READ_BYTES = 1 << 13  # less than a block takes: how far a file was decoded is known closely (estimates)
# A decoder of xz holds a dictionary as large as the file says: -9 has 64 MiB, hostile files say 4 GiB.
_XZ_MEMORY_BYTES = 1 << 28
_MAGIC_BYTES = 8
_WINDOW_BYTES = 1 << 27  # of zstd, the most that levels up to 22 use without `--long`
_ZSTD_HEADER_BYTES = 18  # the longest header of a frame
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_DICTIONARY_MAGIC = b"\x37\xa4\x30\xec"
_DICTIONARY_MISMATCH = "Dictionary mismatch"
_SKIPPED_HEADER_BYTES = 8  # of a frame to be skipped: its magic and size
_OUT_OF_MEMORY = (ZSTD_WINDOW_ERROR, "not enough memory")
_CONFIRMED_BYTES = 1 << 24  # content of a member that is held until it is confirmed; more is decoded twice
_GZIP_START = re.compile(rb"\x1f\x8b\x08[\x00-\x1f]", re.DOTALL)
_SEARCH_BYTES = 1 << 14
_MAX_FIRST_LINE = 1 << 13  # of a record: WARC's is some ten bytes, ARC's holds a URL
_MAX_WASTE = 2  # times the file's size, and `_FREE_WASTE`: hostile files could make each search as long
_FREE_WASTE = 1 << 26
_CHECKSUM = re.compile(r"(?:data|length) check|checksum")


class ContainerError(Exception):
    """A file's container is damaged or cut short.

    `rest_bytes` of it, as stored, could not be used. The last `suspect_bytes` that were handed out are of the
    damaged member: its checksum does not confirm them. If it `resumes`, sound data follows.
    """

    def __init__(
        self, problem: str, rest_bytes: int, suspect_bytes: int = 0, *, resumes: bool = False
    ) -> None:
        self.problem, self.rest_bytes, self.suspect_bytes = problem, rest_bytes, suspect_bytes
        self.resumes = resumes
        super().__init__(problem)


def with_head(pieces: Iterator[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """Return the first bytes of a content for `look`, and all of it; damage is met where it is reached."""
    held: list[bytes] = []
    damage: ContainerError | None = None
    try:
        while sum(map(len, held)) < HEAD_BYTES and (piece := next(pieces, None)) is not None:
            held.append(piece)
    except ContainerError as error:
        damage = error

    def whole() -> Iterator[bytes]:
        yield from held
        if damage is not None:
            raise damage
        yield from pieces

    return b"".join(held)[:HEAD_BYTES], whole()


def decompressed(
    file: BinaryIO, compression: str | None, size: int, *, window_bytes: int = _WINDOW_BYTES
) -> Iterator[bytes]:
    """Yield the content of an open file of `size` bytes in pieces; ContainerError after the last good byte.

    MemoryError if a zstd frame needs a window of more than `window_bytes`.
    """
    if compression is None:
        yield from plain_range(file, 0, size)
        return
    reader, codec = _MemberReader(file), _codec(compression, window_bytes)
    if compression == "gzip" and (fast := _igzip()) is not None:
        with suppress(*fast.errors):
            yield from reader.read_on(fast)
        if reader.complete:
            return  # else zlib decides: it reads the member again
    try:
        yield from reader.read_on(codec)
    except codec.errors as error:
        if getattr(error, "errno", None) is not None:  # the disk's error, not the decoder's
            raise
        if any(words in str(error) for words in _OUT_OF_MEMORY):
            raise MemoryError(_window_problem(reader, codec)) from None
        with suppress(*codec.errors):
            yield from reader.read_on(codec, bytewise_from=reader.failed_at)
        rest = size - (reader.failed_at if reader.given else reader.start)
        raise ContainerError(_problem(reader, codec, error), rest, reader.given) from None
    if not reader.complete:
        raise ContainerError(_truncated(reader, codec), 0, reader.given)


class ConfirmedMembers(Iterator[bytes]):
    """The content of a gzip file of records, each member after its checksum has confirmed all of it.

    Iterating raises ContainerError at a damaged member and may be continued if that `resumes`: with the next
    member whose first line `begins` recognizes. `rest_bytes` are then the stored bytes between the two, so
    that these and the sound members add up to the file. A member that lies inside a damaged one, because a
    record holds an archive, is taken for one of the file's.
    """

    def __init__(self, file: BinaryIO, size: int, begins: Callable[[bytes], bool]) -> None:
        self._file, self._size, self._begins = file, size, begins
        self._members = _MemberReader(file)
        self._wasted = 0  # stored bytes that were read to no effect
        self._pieces: Iterator[bytes] | None = self._confirmed()

    def __next__(self) -> bytes:
        if self._pieces is None:
            raise StopIteration
        try:
            return next(self._pieces)
        except ContainerError as damage:
            self._pieces = self._confirmed() if damage.resumes else None
            raise

    def _confirmed(self) -> Iterator[bytes]:
        """The content up to a damaged member, then ContainerError."""
        members = self._members
        slow = _codec("gzip")
        for codec in (_igzip(), slow):
            if codec is None:
                continue
            try:
                yield from self._checked(codec)
            except codec.errors as error:
                if codec is slow:
                    raise self._damage(_problem(members, codec, error)) from None
                members.given = 0  # none of it was handed out: zlib decides, from its start
                continue
            if not members.complete:
                raise self._damage(_truncated(members, codec))
            return

    def _checked(self, codec: _Codec) -> Iterator[bytes]:
        """The content of member after member, each once it is known to be sound; errors of the codec."""
        members = self._members
        held: list[bytes] = []
        number, size, is_sound = members.members, 0, False
        try:
            for piece in members.read_on(codec):
                if members.members > number:
                    yield from held
                    held, number, size, is_sound = [], members.members, 0, False
                held.append(piece)
                size += len(piece)
                if size > _CONFIRMED_BYTES and not is_sound:
                    self._check_rest(codec)
                    is_sound = True
                if is_sound:
                    yield from held
                    held = []
        except codec.errors:
            if members.members > number:  # the damage is in the member after what is held
                yield from held
            raise
        if members.members > number:
            yield from held

    def _check_rest(self, codec: _Codec) -> None:
        """Decode the current member to its end for its checksum; errors of the codec, or if it is cut."""
        place, probe = self._file.tell(), _MemberReader(self._file)
        probe.start = self._members.start
        try:
            for _ in probe.read_on(codec):
                if probe.members:
                    break
        except codec.errors:
            if not probe.members:  # else it is the next member that is damaged
                raise
        if not probe.members:
            raise codec.errors[0](f"Error -3: the file ends inside {codec.name} {codec.member}")
        self._file.seek(place)

    def _damage(self, problem: str) -> ContainerError:
        """The error of the current member; moves to where the next sound one may begin."""
        members, start = self._members, self._members.start
        self._wasted += max(members.failed_at - start, 0) + _READ_BYTES
        end = self._size
        if self._wasted <= _MAX_WASTE * self._size + _FREE_WASTE:
            end = self._next_start(start + 1)
        members.start, members.given, members.failed_at = end, 0, end
        members.members += 1
        place = f"stored bytes {start:,} to {end:,} are lost"
        return ContainerError(f"{problem}; {place}", end - start, resumes=end < self._size)

    def _next_start(self, at: int) -> int:
        """The first place from `at` on where a member begins with a record; the file's size if none does."""
        while at < self._size:
            self._file.seek(at)
            data = self._file.read(_SEARCH_BYTES)
            self._wasted += len(data)
            for found in _GZIP_START.finditer(data):
                if self._is_start(at + found.start()):
                    return at + found.start()
            if len(data) < 4:
                break
            at += len(data) - 3  # a magic may lie across the end
        return self._size

    def _is_start(self, at: int) -> bool:
        self._file.seek(at)
        try:
            head = zlib.decompressobj(wbits=31).decompress(self._file.read(_SEARCH_BYTES), _MAX_FIRST_LINE)
        except zlib.error:
            return False
        self._wasted += _SEARCH_BYTES
        return self._begins(head.lstrip(b"\r\n").partition(b"\n")[0] + b"\n")


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


@dataclass(frozen=True)
class _Codec:
    """A format whose decoders are like those of Python's bz2: needs_input, eof, unused_data."""

    name: str
    member: str
    decoder: Callable[[], Any]
    errors: tuple[type[Exception], ...]
    magic: re.Pattern[bytes]  # how a member begins
    padded: bool = False  # zeros may stand between members
    read_bytes: int = _READ_BYTES


class _MemberReader:
    """Decodes members one after the other and remembers where in the file it is.

    `read_on` may be called again after an error, with another decoder or in smaller steps: it starts again at
    the member that failed and hands out only what has not been handed out before.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.members = 0  # complete ones
        self.start = 0  # of the member that is being read, in the file
        self.given = 0  # bytes of it that were handed out
        self.failed_at = 0  # where in the file the data begins that is being decoded
        self.complete = False  # the file ends where a member ends

    def read_on(self, codec: _Codec, *, bytewise_from: int = sys.maxsize) -> Iterator[bytes]:
        """The content from the current member on; ends early, not `complete`, where a member is cut short."""
        read = self.start
        self.file.seek(read)

        def more() -> bytes:
            return self.file.read(min(codec.read_bytes, max(bytewise_from - read, 1)))

        pending = more()
        while pending or not self.members:
            decoder, made, self.complete = codec.decoder(), 0, False
            while not decoder.eof:
                if decoder.needs_input and not pending:
                    pending = more()
                    if not pending:
                        return
                data, pending, self.failed_at = pending, b"", read
                piece = decoder.decompress(data, _PIECE_BYTES)
                read += len(data)
                made += len(piece)
                if made > self.given:
                    fresh, self.given = piece[self.given - made :], made
                    yield fresh
            pending = decoder.unused_data or b""
            read -= len(pending)
            self.members += 1
            while True:  # to where the next member begins
                content = pending.lstrip(b"\0") if codec.padded else pending
                read += len(pending) - len(content)
                pending = content or more()
                if content or not pending:
                    break
            self.start, self.given, self.complete = read, 0, not pending


class _ZstdFrames:
    """Makes the decoders of a file's frames; those after a frame with a dictionary have it."""

    def __init__(self, window_bytes: int) -> None:
        self._window_bytes = 1 << (window_bytes.bit_length() - 1)
        self._last: ZstdFrame | None = None
        self._dictionary: zstandard.ZstdCompressionDict | None = None

    def __call__(self) -> ZstdFrame:
        if self._dictionary is None and self._last is not None and self._last.dictionary:
            data = bytes(self._last.dictionary[_SKIPPED_HEADER_BYTES:])
            if data.startswith(_ZSTD_MAGIC):
                decoder = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
                with decoder.stream_reader(data) as reader:
                    data = reader.read(_WINDOW_BYTES)
            if data.startswith(_DICTIONARY_MAGIC):
                self._dictionary = zstandard.ZstdCompressionDict(data)
        self._last = ZstdFrame(self._window_bytes, self._dictionary)
        return self._last


def _codec(compression: str, window_bytes: int = _WINDOW_BYTES) -> _Codec:
    """The codec of a value of COMPRESSIONS; MissingExtraError if its package is missing."""
    if compression == "gzip":
        return _Codec("gzip", "member", _ZlibDecoder, (zlib.error,), re.compile(rb"\x1f\x8b"), padded=True)
    if compression == "zstd":
        magic = re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")  # frames, and those to be skipped
        errors = (zstandard.ZstdError,)
        decoder = _ZstdFrames(window_bytes)
        return _Codec("zstd", "frame", decoder, errors, magic, read_bytes=_ZSTD_READ_BYTES)
    if compression == "bz2":
        magic = re.compile(rb"BZh[1-9]")
        return _Codec("bz2", "stream", bz2.BZ2Decompressor, (OSError, ValueError), magic)
    if compression == "xz":
        magic = re.compile(rb"\xfd7zXZ\0|\x5d\0\0")
        stream = partial(lzma.LZMADecompressor, memlimit=_XZ_MEMORY_BYTES)
        return _Codec("xz", "stream", stream, (lzma.LZMAError,), magic, padded=True)
    try:
        import lz4.frame
    except ImportError:
        raise MissingExtraError("lz4", "formats", "reading .lz4 files") from None
    magic = re.compile(rb"\x04\x22\x4d\x18|[\x50-\x5f]\x2a\x4d\x18")
    return _Codec("lz4", "frame", lz4.frame.LZ4FrameDecompressor, (RuntimeError,), magic)


def _igzip() -> _Codec | None:
    """gzip by ISA-L, twice as fast as zlib, where it is installed."""
    try:
        from isal import igzip_lib
    except ImportError:
        return None
    decoder = partial(igzip_lib.IgzipDecompressor, flag=igzip_lib.DECOMP_GZIP)
    errors = (cast("type[Exception]", igzip_lib.error),)
    return _Codec("gzip", "member", decoder, errors, re.compile(rb"\x1f\x8b"), padded=True)


class _ZlibDecoder:
    """A decoder of zlib for one gzip member, with the interface of bz2's."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(wbits=31)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        piece = self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)
        self.needs_input = not self._zlib.unconsumed_tail and len(piece) < max_length
        return piece


def _window_problem(reader: _MemberReader, codec: _Codec) -> str:
    """Say what window the current zstd frame asks for."""
    reader.file.seek(reader.start)
    needs = f"{codec.name} {codec.member} {reader.members + 1} needs"
    try:
        window = zstandard.get_frame_parameters(reader.file.read(_ZSTD_HEADER_BYTES)).window_size
    except zstandard.ZstdError:
        return f"{needs} more memory than there is; raise `memory`"
    least = math.ceil(window * 4 / 3e8) / 10  # GB; three quarters of `memory` may be a window
    return f"{needs} a window of {window / (1 << 30):.3g} GiB; raise `memory` to {least:g}GB, or leave it out"


def _truncated(reader: _MemberReader, codec: _Codec) -> str:
    if not reader.file.seek(0, os.SEEK_END):
        return f"truncated: the file has 0 bytes, which is no {codec.name} file"
    return f"truncated: the file ends inside {codec.name} {codec.member} {reader.members + 1}"


def _problem(reader: _MemberReader, codec: _Codec, error: Exception) -> str:
    reader.file.seek(reader.start)
    if codec.magic.match(reader.file.read(_MAGIC_BYTES)):
        reason = str(error).rsplit(": ", 1)[-1]
        if reason == _DICTIONARY_MISMATCH:
            reader.file.seek(reader.start)
            wanted = "another dictionary"
            with suppress(zstandard.ZstdError):  # damaged, its header may make no sense
                parameters = zstandard.get_frame_parameters(reader.file.read(_ZSTD_HEADER_BYTES))
                wanted = f"dictionary {parameters.dict_id}"
            return (
                f"{codec.name} {codec.member} {reader.members + 1} was compressed with {wanted}, "
                "which is not in the first frame of the file"
            )
        kind = "bad checksum" if _CHECKSUM.search(reason) else "damaged data"
        return f"{kind} in {codec.name} {codec.member} {reader.members + 1} ({reason})"
    if reader.members:
        return f"garbage after {reader.members} complete {codec.name} {codec.member}s"
    return f"not {'an' if codec.name[0] in 'lx' else 'a'} {codec.name} file"
