"""Decompresses input files in pieces of bounded size; finds damage and says what and where it is.

gzip, zstd, bz2, xz and lz4 files are sequences of members (zstd and lz4 call them frames, bz2 and xz
streams), which one loop decodes. Members may be empty, zstd and lz4 frames may be skippable, and gzip and xz
may be padded with zeros. Every byte before the damage is yielded, then `ContainerError` is raised: for
truncation, damaged data, a bad checksum, or garbage after the last member.

A decoder discards the output of the call that fails. So a damaged member is decoded a second time, byte by
byte where it failed, to yield the rest: damage costs the time of one member, intact files cost nothing extra.
Memory is one read buffer, one output piece and the decoder's own window. A zstd frame that needs a larger
window than allowed raises MemoryError. If the first frame is skippable and contains a zstd dictionary,
compressed or not, the frames after it are decoded with that dictionary, as in `.warc.zst` files.

`ConfirmedMembers` reads a gzip file in which every member begins with a record, as in web archives. It yields
only bytes that a checksum has confirmed, and continues after damage at the next such member.
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
_ZSTD_READ_BYTES = 1 << 13  # less than one zstd block, so that the file position is precise for estimates
# An xz decoder allocates the dictionary size in the file's header: 64 MiB for -9, 4 GiB in hostile files.
_XZ_MEMORY_BYTES = 1 << 28
_MAGIC_BYTES = 8
_WINDOW_BYTES = 1 << 27  # zstd window limit: the largest that levels up to 22 use without `--long`
_ZSTD_HEADER_BYTES = 18  # maximum length of a frame header
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_DICTIONARY_MAGIC = b"\x37\xa4\x30\xec"
_DICTIONARY_MISMATCH = "Dictionary mismatch"
_SKIPPED_HEADER_BYTES = 8  # header of a skippable frame: its magic number and size
_OUT_OF_MEMORY = (ZSTD_WINDOW_ERROR, "not enough memory")
_CONFIRMED_BYTES = 1 << 24  # maximum content that is held until its checksum is read; more is decoded twice
_GZIP_START = re.compile(rb"\x1f\x8b\x08[\x00-\x1f]", re.DOTALL)
_SEARCH_BYTES = 1 << 14
_MAX_FIRST_LINE = 1 << 13  # a record's first line: about ten bytes in WARC, in ARC it contains a URL
# The search for members after damage stops after reading _MAX_WASTE times the file's size + _FREE_WASTE bytes
# in vain, because a hostile file could make each of many searches as long as the file.
_MAX_WASTE = 2
_FREE_WASTE = 1 << 26
_CHECKSUM = re.compile(r"(?:data|length) check|checksum")


class ContainerError(Exception):
    """A file's container is damaged or truncated.

    `rest_bytes` is the number of stored bytes that could not be used. The last `suspect_bytes` of the content
    that was yielded are from the damaged member, so its checksum does not confirm them. If `resumes` is true,
    intact data follows after the damage.
    """

    def __init__(
        self, problem: str, rest_bytes: int, suspect_bytes: int = 0, *, resumes: bool = False
    ) -> None:
        self.problem, self.rest_bytes, self.suspect_bytes = problem, rest_bytes, suspect_bytes
        self.resumes = resumes
        super().__init__(problem)


def with_head(pieces: Iterator[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """Return (first bytes of a content, for `look`; iterator over all of it, which raises any damage)."""
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
    """Yield the decompressed content of an open file of `size` bytes in pieces.

    Raises ContainerError after the last good byte if the file is damaged, and MemoryError if a zstd frame
    needs a window of more than `window_bytes`.
    """
    if compression is None:
        yield from plain_range(file, 0, size)
        return
    reader, codec = _MemberReader(file), _codec(compression, window_bytes)
    if compression == "gzip" and (fast := _igzip()) is not None:
        with suppress(*fast.errors):
            yield from reader.read_on(fast)
        if reader.complete:
            return  # otherwise zlib reads the current member again, to decide whether it is damaged
    try:
        yield from reader.read_on(codec)
    except codec.errors as error:
        if getattr(error, "errno", None) is not None:  # an error of the disk, not of the decoder
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
    """Iterates over the content of a gzip file of records, each member only once its checksum confirms it.

    At a damaged member, iterating raises ContainerError. If the error `resumes`, iterating may go on, at the
    next member whose first line `begins` recognizes. The error's `rest_bytes` is the number of stored bytes
    from the damaged member to that one, so all `rest_bytes` and the intact members add up to the file's size.
    If a damaged member contains gzip members, because a record holds an archive, these are mistaken for
    members of the file.
    """

    def __init__(self, file: BinaryIO, size: int, begins: Callable[[bytes], bool]) -> None:
        self._file, self._size, self._begins = file, size, begins
        self._members = _MemberReader(file)
        self._wasted = 0  # stored bytes that were read in vain, in damaged members and searches
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
        """Yield the content up to a damaged member, then raise ContainerError."""
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
                members.given = 0  # nothing of this member was yielded; zlib reads it again from its start
                continue
            if not members.complete:
                raise self._damage(_truncated(members, codec))
            return

    def _checked(self, codec: _Codec) -> Iterator[bytes]:
        """Yield the content of each member after its checksum has confirmed it; raise errors of the codec."""
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
            if members.members > number:  # what is held belongs to a complete member before the damaged one
                yield from held
            raise
        if members.members > number:
            yield from held

    def _check_rest(self, codec: _Codec) -> None:
        """Decode the current member to its end to verify its checksum; raise a codec error if it is bad."""
        place, probe = self._file.tell(), _MemberReader(self._file)
        probe.start = self._members.start
        try:
            for _ in probe.read_on(codec):
                if probe.members:
                    break
        except codec.errors:
            if not probe.members:  # otherwise the error is in the next member, not in this one
                raise
        if not probe.members:
            raise codec.errors[0](f"Error -3: the file ends inside {codec.name} {codec.member}")
        self._file.seek(place)

    def _damage(self, problem: str) -> ContainerError:
        """Return the error for the damaged current member; continue at the next offset of a member."""
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
        """Return the first offset from `at` on where a member begins with a record, or the file's size."""
        while at < self._size:
            self._file.seek(at)
            data = self._file.read(_SEARCH_BYTES)
            self._wasted += len(data)
            for found in _GZIP_START.finditer(data):
                if self._is_start(at + found.start()):
                    return at + found.start()
            if len(data) < 4:
                break
            at += len(data) - 3  # the 4 bytes of a member's start may straddle two reads
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
    """Yield bytes [start, end) of an uncompressed file; raise ContainerError if the file became shorter."""
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
    """A compression format; its decoders have bz2's interface (needs_input, eof, unused_data)."""

    name: str
    member: str
    decoder: Callable[[], Any]
    errors: tuple[type[Exception], ...]
    magic: re.Pattern[bytes]  # matches the start of a member
    padded: bool = False  # whether zeros may be between members
    read_bytes: int = _READ_BYTES


class _MemberReader:
    """Decodes members one after the other and keeps track of its position in the file.

    `read_on` may be called again after an error, with another decoder or in smaller steps: it starts again at
    the member that failed, and yields only those of its bytes that it has not yielded before.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.members = 0  # number of complete members so far
        self.start = 0  # offset of the current member in the file
        self.given = 0  # decoded bytes of the current member that were yielded
        self.failed_at = 0  # offset in the file of the data that was passed to the decoder last
        self.complete = False  # whether the file ends exactly at the end of a member

    def read_on(self, codec: _Codec, *, bytewise_from: int = sys.maxsize) -> Iterator[bytes]:
        """Yield the content from the current member on; stop without `complete` if a member is truncated."""
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
            while True:  # skip padding up to the next member
                content = pending.lstrip(b"\0") if codec.padded else pending
                read += len(pending) - len(content)
                pending = content or more()
                if content or not pending:
                    break
            self.start, self.given, self.complete = read, 0, not pending


class _ZstdFrames:
    """Makes the decoders of a file's zstd frames; a dictionary in one frame is used for all later ones."""

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
    """Return the codec for a value of COMPRESSIONS; raise MissingExtraError if its package is missing."""
    if compression == "gzip":
        return _Codec("gzip", "member", _ZlibDecoder, (zlib.error,), re.compile(rb"\x1f\x8b"), padded=True)
    if compression == "zstd":
        magic = re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")  # a frame, or a skippable frame
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
    """Return a gzip codec that uses ISA-L, twice as fast as zlib, or None if it is not installed."""
    try:
        from isal import igzip_lib
    except ImportError:
        return None
    decoder = partial(igzip_lib.IgzipDecompressor, flag=igzip_lib.DECOMP_GZIP)
    errors = (cast("type[Exception]", igzip_lib.error),)
    return _Codec("gzip", "member", decoder, errors, re.compile(rb"\x1f\x8b"), padded=True)


class _ZlibDecoder:
    """Decodes one gzip member by zlib, with the interface of bz2's decoder."""

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
    """Describe the zstd window that the current frame needs, and the value of `memory` that allows it."""
    reader.file.seek(reader.start)
    needs = f"{codec.name} {codec.member} {reader.members + 1} needs"
    try:
        window = zstandard.get_frame_parameters(reader.file.read(_ZSTD_HEADER_BYTES)).window_size
    except zstandard.ZstdError:
        return f"{needs} more memory than is available; raise `memory`"
    least = math.ceil(window * 4 / 3e8) / 10  # in GB: a window may take three quarters of `memory`
    return f"{needs} a window of {window / (1 << 30):.3g} GiB; raise `memory` to {least:g}GB, or leave it out"


def _truncated(reader: _MemberReader, codec: _Codec) -> str:
    if not reader.file.seek(0, os.SEEK_END):
        return f"truncated: the file is empty (0 bytes), which is not a valid {codec.name} file"
    return f"truncated: the file ends inside {codec.name} {codec.member} {reader.members + 1}"


def _problem(reader: _MemberReader, codec: _Codec, error: Exception) -> str:
    reader.file.seek(reader.start)
    if codec.magic.match(reader.file.read(_MAGIC_BYTES)):
        reason = str(error).rsplit(": ", 1)[-1]
        if reason == _DICTIONARY_MISMATCH:
            reader.file.seek(reader.start)
            wanted = "another dictionary"
            with suppress(zstandard.ZstdError):  # the header of a damaged frame may be invalid
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
