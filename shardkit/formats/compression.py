"""Compress shard files deterministically with the algorithms of MDS, and decompress them within a limit.

A compression is named by its algorithm, with an optional level: `zstd`, `zstd:7`, `br:5`, `bz2`, `gz:9`,
`snappy`; the file's suffix is the algorithm alone. Compression works piece by piece (snappy's raw format and
gz:0 hold the whole file). Equal bytes and level always give equal files: gzip members have no time stamp.

Decompression also works piece by piece and stops at a limit, so that no small file can fill the memory; a
truncated stream is an error. `decompress` is for files of an MDS dataset: a file must hold one stream (zstd:
any number of frames) with exactly the size that the index records, and nothing after it. `decompress_streams`
is for compressed tars, whose size may not be recorded: it reads all streams of a file, as gunzip does. zstd
windows are limited to 128 MiB, the most that any level up to 22 uses.
"""

from __future__ import annotations

import bz2
import io
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import zstandard

from shardkit.errors import MissingExtraError, ShardError, naming_extras

Bytes = bytes | memoryview
# Maps an algorithm to its (levels, default level), as in MosaicML; to None if it has no levels.
COMPRESSIONS: dict[str, tuple[range, int] | None] = {
    "br": (range(12), 11),
    "bz2": (range(1, 10), 9),
    "gz": (range(10), 9),
    "snappy": None,
    "zstd": (range(1, 23), 3),
}

_INPUT_BYTES = 1 << 16  # compressed input per step; small, because zlib copies unconsumed input in each step
_OUTPUT_BYTES = 1 << 20
_MAX_ZSTD_WINDOW = 1 << 27

_ZSTD_HEADER_BYTES = 8  # size of a skippable frame's header, and of a frame's magic, flags and block header
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPED = b"\x2a\x4d\x18"  # magic of a skippable frame, without its first byte, which varies
_ZSTD_DICTIONARY = 0x5D  # first byte of a skippable frame that holds the dictionary for the next frames
_MAX_DICTIONARY_BYTES = 1 << 26
ZSTD_WINDOW_ERROR = "Frame requires too much memory for decoding"  # zstd's own wording
_ZSTD_REPEATED = 1  # type of a block that consists of one repeated byte

_GZIP_WBITS = 31  # zlib's code for "gzip header, 32 KiB window"

_BROTLI_MINOR = 2  # 1.2 is the first version whose decompressor has an output_buffer_limit

_MAX_VARINT_BYTES = 5  # maximum length of a varint that encodes a u32, the type of snappy's sizes


class Compressor(Protocol):
    """Compresses a file piece by piece; the joined results of all calls are the compressed file."""

    def compress(self, data: Bytes, /) -> bytes: ...
    def flush(self) -> bytes: ...


def parse_compression(name: str) -> tuple[str, int]:
    """Parse a name such as `zstd:7` into (algorithm, level); without a level, the default (snappy: 0).

    Raises ValueError for a name that MosaicML does not accept.
    """
    algorithm, colon, text = name.partition(":") if isinstance(name, str) else ("", "", "")
    if algorithm not in COMPRESSIONS:
        raise ValueError(
            f"unknown compression {str(name)[:40]!r}; known: {', '.join(COMPRESSIONS)}, with a level: zstd:7"
        )
    levels = COMPRESSIONS[algorithm]
    if not colon:
        return algorithm, levels[1] if levels else 0
    choices = [str(level) for level in levels[0]] if levels else []
    if text not in choices:
        choice = f"{choices[0]} to {choices[-1]}" if choices else "none"
        raise ValueError(f"compression {name[:40]!r}: {algorithm} has no such level; its levels: {choice}")
    return algorithm, int(text)


class _BrotliCompressor:
    def __init__(self, level: int) -> None:
        self._compressor = _brotli().Compressor(quality=level)

    def compress(self, data: Bytes, /) -> bytes:
        return bytes(self._compressor.process(data))

    def flush(self) -> bytes:
        return bytes(self._compressor.finish())


class _WholeCompressor:
    """Compresses the whole file in `flush`; for algorithms whose output depends on how input is split."""

    def __init__(self, compress_whole: Callable[[bytes], bytes]) -> None:
        self._compress_whole = compress_whole
        self._pieces: list[bytes] = []

    def compress(self, data: Bytes, /) -> bytes:
        self._pieces.append(bytes(data))
        return b""

    def flush(self) -> bytes:
        return self._compress_whole(b"".join(self._pieces))


def new_compressor(name: str, total_bytes: int) -> Compressor:
    """Return a compressor for one file of `total_bytes`. Raises ValueError for an unknown name."""
    algorithm, level = parse_compression(name)
    if algorithm == "zstd":
        # The frame's header must record the size of the content, because MosaicML's reader relies on it.
        zstd: Compressor = zstandard.ZstdCompressor(level=level).compressobj(size=total_bytes)
        return zstd
    if algorithm == "snappy":
        return _WholeCompressor(_snappy().compress)
    if algorithm == "gz" and level == 0:
        return _WholeCompressor(lambda data: zlib.compress(data, 0, _GZIP_WBITS))
    if algorithm == "gz":
        return zlib.compressobj(level, zlib.DEFLATED, _GZIP_WBITS)
    if algorithm == "bz2":
        return bz2.BZ2Compressor(level)
    return _BrotliCompressor(level)


def decompress(name: str, data: Bytes, *, raw_bytes: int, file: str | PathLike[str]) -> npt.NDArray[np.uint8]:
    """Decompress `data` into uint8[raw_bytes].

    Allocates `raw_bytes` and a few MiB, never more, even for hostile data. Raises ShardError, naming `file`,
    if the data is damaged or its decompressed size differs.
    """
    algorithm, _ = parse_compression(name)
    output: npt.NDArray[np.uint8] = np.empty(raw_bytes, dtype=np.uint8)
    filled = 0
    with _naming(file, algorithm):
        if algorithm == "zstd":
            reader = _new_zstd().stream_reader(data, read_across_frames=True)
            filled = reader.readinto(output)
            pieces = iter([reader.read(1)])  # a further byte exceeds raw_bytes: error below
        elif algorithm == "snappy":
            filled, pieces = _decompress_snappy(data, output), iter(())
        else:
            pieces = _pieces(algorithm, data, is_single=True)
        for piece in pieces:
            end = filled + len(piece)
            if end > raw_bytes:
                raise ValueError(f"it holds more than the {raw_bytes:,} bytes that the index states")
            output[filled:end] = np.frombuffer(piece, dtype=np.uint8)
            filled = end
        if filled != raw_bytes:
            raise ValueError(f"it ends after {filled:,} of {raw_bytes:,} bytes")
    return output


def decompress_streams(
    algorithm: str, data: memoryview, *, limit: int, file: str | PathLike[str]
) -> npt.NDArray[np.uint8]:
    """Decompress all streams of a file (gz, bz2, zstd) into uint8[n].

    Raises ShardError, naming `file`, if it is damaged or holds more than `limit` bytes.
    """
    with _naming(file, algorithm):
        return np.frombuffer(_joined(algorithm, data, limit), dtype=np.uint8)


def gunzip(data: memoryview, limit: int) -> bytes:
    """Return a gzip file's content. Raises ValueError if it is damaged or larger than `limit` bytes."""
    try:
        return _joined("gz", data, limit)
    except (EOFError, zlib.error) as error:
        raise ValueError(f"gzip data cannot be used: {error}") from error


@contextmanager
def _naming(file: str | PathLike[str], algorithm: str) -> Iterator[None]:
    """Context manager that converts errors of any algorithm's library to a ShardError that names `file`."""
    try:
        yield
    except (ValueError, OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise ShardError(file, f"{algorithm} data cannot be used: {error}; fetch the file again") from error


def _joined(algorithm: str, data: memoryview, limit: int) -> bytes:
    output = io.BytesIO()  # getvalue() does not copy the content
    for piece in _pieces(algorithm, data, is_single=False):
        if output.tell() + len(piece) > limit:
            raise ValueError(f"it holds more than {limit:,} bytes")
        output.write(piece)
    return output.getvalue()


def _pieces(algorithm: str, data: Bytes, *, is_single: bool) -> Iterator[bytes]:
    """Yield the decompressed content of `data` in pieces of about `_OUTPUT_BYTES`.

    With `is_single`, `data` must be one stream and nothing else.
    """
    starts = range(0, len(data), _INPUT_BYTES)
    for piece, end in frames(algorithm, (bytes(data[at : at + _INPUT_BYTES]) for at in starts)):
        yield piece
        if is_single and end is not None and end < len(data):
            raise ValueError("data follows the end of the compressed stream")


def frames(algorithm: str, inputs: Iterable[bytes]) -> Iterator[tuple[bytes, int | None]]:
    """Decompress a file that is read in parts; yield (content, where a stream of the file ends or None).

    A file may hold several streams (members of gzip, frames of zstd), which tools such as pigz write, and
    then zeros, which some tools add as padding. Raises EOFError if it is truncated, ValueError, OSError,
    zlib.error or ZstdError if it is damaged.
    """
    new_stream, step = _STREAMS[algorithm]
    stream, read, is_padded = new_stream(), 0, False
    for part in inputs:
        data = part
        read += len(data)
        while data:
            if stream is None:
                is_padded = is_padded or not any(data)
                if is_padded and any(data):
                    raise ValueError("data follows the zeros at its end")
                if is_padded:
                    break
                stream = new_stream()
            done = False
            while not done and not stream.eof:
                piece, done = step(stream, data)
                data = b""
                yield piece, None
            if stream.eof:
                data, stream = bytes(stream.unused_data), None
                yield b"", read - len(data)
    if stream is not None:
        raise EOFError("it is truncated")


# A step function passes input to a stream, and returns (piece of the output, whether it needs more input).


def _step_gzip(stream: Any, data: bytes) -> tuple[bytes, bool]:
    piece = stream.decompress(stream.unconsumed_tail + data, _OUTPUT_BYTES)
    return piece, not stream.unconsumed_tail and len(piece) < _OUTPUT_BYTES


def _step(stream: bz2.BZ2Decompressor | ZstdFrame, data: bytes) -> tuple[bytes, bool]:
    return stream.decompress(data, _OUTPUT_BYTES), stream.needs_input


class ZstdFrame:
    """Decodes one zstd frame with the interface of `bz2.BZ2Decompressor`, in output pieces of limited size.

    The zstandard package has no such limit: 4 bytes can encode 128 KiB, and so 64 KiB can encode 2 GiB. A
    frame is a sequence of blocks of at most 128 KiB of content, each preceded by its size (RFC 8878, section
    3.1.1.2), which are decoded one by one.

    A frame whose header requests a window above `max_window_bytes` is decoded with that maximum, so that a
    small file made with `--long=31` does not take 2 GiB. It is refused once its content exceeds the maximum.
    """

    def __init__(
        self,
        max_window_bytes: int = _MAX_ZSTD_WINDOW,
        dictionary: zstandard.ZstdCompressionDict | None = None,
    ) -> None:
        """Start a frame; `max_window_bytes` must be a power of two."""
        self._max_window = max_window_bytes
        decoder = zstandard.ZstdDecompressor(dict_data=dictionary, max_window_size=max_window_bytes)
        self._frame = decoder.decompressobj()
        self._left = sys.maxsize  # bytes of content that may follow in a frame with a reduced window
        self.dictionary = bytearray()  # the content of a skippable frame that holds a dictionary
        self._holds_dictionary = False
        self._held, self._at = b"", 0  # buffered input, and the index of its first unconsumed byte
        self._to_boundary = 0  # number of input bytes up to the next block header
        self._begun = False
        self._checksum_bytes = 0
        self.needs_input = True

    @property
    def eof(self) -> bool:
        """Whether the frame has ended."""
        return bool(self._frame.eof)

    @property
    def unused_data(self) -> bytes:
        """The input that follows the frame, once the frame has ended; empty before."""
        return bytes(self._frame.unused_data) + self._held[self._at :] if self.eof else b""

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Decode the next block. Raises zstandard.ZstdError if it is damaged.

        `max_length` is ignored, because a block is smaller than any limit that callers pass.
        """
        if data:
            self._held, self._at = self._held[self._at :] + data, 0
        held = memoryview(self._held)
        piece = b""
        while not piece and not self.eof:
            if not self._to_boundary:
                head = self._held[self._at : self._at + _ZSTD_HEADER_BYTES]
                is_first = not self._begun
                self._to_boundary = self._next_boundary(head)
                if is_first and self._begun and self._limit_window(head):
                    held = memoryview(self._held)
            step = held[self._at : self._at + self._to_boundary]
            self.needs_input = not step
            if not step:
                break
            self._at += len(step)
            self._to_boundary -= len(step)
            if self._holds_dictionary and len(self.dictionary) < _MAX_DICTIONARY_BYTES:
                self.dictionary += step
            piece = self._frame.decompress(step)
        self._left -= len(piece)
        if self._left < 0:
            raise zstandard.ZstdError(ZSTD_WINDOW_ERROR)
        return piece

    def _limit_window(self, head: bytes) -> bool:
        """Reduce the window in the buffered frame header to the maximum; return whether it was larger."""
        flags, window = head[4], head[5]
        if flags & 32 or (8 + (window & 7)) << (7 + (window >> 3)) <= self._max_window:
            return False
        at = self._at + 5
        fitting = (self._max_window.bit_length() - 11) << 3
        self._held = self._held[:at] + bytes([fitting]) + self._held[at + 1 :]
        self._left = self._max_window
        return True

    def _next_boundary(self, head: bytes) -> int:
        """Return the number of bytes from `head`, a frame or block header, to the next block header.

        Returns 0 if `head` is incomplete.
        """
        if self._begun:
            if len(head) < 3:
                return 0
            header = int.from_bytes(head[:3], "little")
            is_last, kind, size = header & 1, header >> 1 & 3, header >> 3
            return 3 + (1 if kind == _ZSTD_REPEATED else size) + (self._checksum_bytes if is_last else 0)
        if len(head) < _ZSTD_HEADER_BYTES:  # every frame is longer, so more input is needed
            is_frame = len(head) < 4 or head[:4] == _ZSTD_MAGIC or head[1:4] == _ZSTD_SKIPPED
            return 0 if is_frame else len(head)  # zstd raises the error for input that is not a frame
        if head[1:4] == _ZSTD_SKIPPED:
            self._holds_dictionary = head[0] == _ZSTD_DICTIONARY
            return _ZSTD_HEADER_BYTES + int.from_bytes(head[4:8], "little")
        self._begun = True
        flags = head[4]
        is_single, size_flag = flags >> 5 & 1, flags >> 6
        self._checksum_bytes = 4 * (flags >> 2 & 1)
        sizes = (0, 1, 2, 4)[flags & 3] + (is_single, 2, 4, 8)[size_flag]
        return 5 + (1 - is_single) + sizes


class _BrotliStream:
    """Wraps Brotli's decompressor in the interface that `_pieces` uses for all algorithms."""

    unused_data = b""  # always empty: Brotli raises an error for data after the end

    def __init__(self) -> None:
        self._module = _brotli()
        self._stream = self._module.Decompressor()

    @property
    def eof(self) -> bool:
        return bool(self._stream.is_finished())

    def step(self, data: bytes) -> tuple[bytes, bool]:
        try:
            piece = self._stream.process(data, output_buffer_limit=_OUTPUT_BYTES)
        except self._module.error as error:
            raise ValueError(str(error)) from error
        return piece, self._stream.can_accept_more_data()


def _new_zstd() -> zstandard.ZstdDecompressor:
    return zstandard.ZstdDecompressor(max_window_size=_MAX_ZSTD_WINDOW)


# Maps an algorithm to (function that creates a stream, its step function).
_STREAMS: dict[str, tuple[Callable[[], Any], Callable[[Any, bytes], tuple[bytes, bool]]]] = {
    "br": (_BrotliStream, _BrotliStream.step),
    "bz2": (bz2.BZ2Decompressor, _step),
    "gz": (lambda: zlib.decompressobj(_GZIP_WBITS), _step_gzip),
    "zstd": (ZstdFrame, _step),
}


def _decompress_snappy(data: Bytes, output: npt.NDArray[np.uint8]) -> int:
    """Decompress snappy's raw format into `output`, and return the decompressed size.

    The data begins with this size as a varint. Raises ValueError unless `output` has exactly this size.
    """
    with naming_extras("snappy compression"):
        import cramjam  # called directly: python-snappy copies input and output

    stated = 0
    for shift, byte in enumerate(data[:_MAX_VARINT_BYTES]):
        stated |= (byte & 127) << (7 * shift)
        if byte < 128:
            break
    else:
        raise ValueError("its header is damaged")
    if stated != len(output):
        raise ValueError(f"its header states {stated:,} bytes, the index {len(output):,}")
    try:
        return int(cramjam.snappy.decompress_raw_into(data, output.data))
    except cramjam.DecompressionError as error:
        raise ValueError("it is damaged") from error


def _brotli() -> Any:
    with naming_extras("br compression"):
        import brotli
    if int(brotli.__version__.split(".")[1]) < _BROTLI_MINOR and brotli.__version__.startswith("1."):
        raise MissingExtraError(f"Brotli 1.{_BROTLI_MINOR} or newer", "formats", "br compression")
    return brotli


def _snappy() -> Any:
    with naming_extras("snappy compression"):
        import snappy
    return snappy
