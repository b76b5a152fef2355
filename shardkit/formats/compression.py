"""Compressed shard files: the algorithms of MDS, written deterministically, read within a stated size.

A name is an algorithm with an optional level: `zstd`, `zstd:7`, `br:5`, `bz2`, `gz:9`, `snappy`; the file's
suffix is the algorithm alone. Compressing streams piece by piece (snappy's raw format and gz:0 excepted,
which hold the whole), and the same bytes and level always give the same file: gzip members carry no time.
Decompressing never produces more than the bytes the index states, so no small file can fill the memory; it
accepts exactly one stream (zstd: any number of frames) and nothing behind it. zstd windows are limited to
128 MiB, the most that any level up to 22 uses.
"""

from __future__ import annotations

import bz2
import zlib
from collections.abc import Callable
from os import PathLike
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import zstandard

from shardkit.errors import MissingExtraError, ShardError

__all__ = [
    "COMPRESSIONS",
    "Compressor",
    "compress",
    "compression_suffix",
    "decompress",
    "new_compressor",
    "parse_compression",
]

Bytes = bytes | memoryview
# Algorithm -> (levels, default level), as MosaicML has them.
COMPRESSIONS: dict[str, tuple[range, int] | None] = {
    "br": (range(12), 11),
    "bz2": (range(1, 10), 9),
    "gz": (range(10), 9),
    "snappy": None,
    "zstd": (range(1, 23), 3),
}

_PIECE_BYTES = 1 << 20  # input and output of one step; zlib copies what is left of its input at each

_GZIP_WBITS = 31  # zlib's code for "gzip header, 32 KiB window"

_BROTLI_MINOR = 2  # the first 1.x whose decompressor can be stopped (output_buffer_limit)

_MAX_VARINT_BYTES = 5  # snappy sizes are u32


class Compressor(Protocol):
    """Takes a file piece by piece; what `compress` and `flush` return, joined, is the compressed file."""

    def compress(self, data: Bytes, /) -> bytes: ...
    def flush(self) -> bytes: ...


def parse_compression(name: str) -> tuple[str, int]:
    """(algorithm, level) of a name such as `zstd:7`; the default level when it has none (snappy: 0).

    ValueError for anything that MosaicML would not understand.
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
        raise ValueError(f"compression {name[:40]!r}: {algorithm} has no such level; levels: {choice}")
    return algorithm, int(text)


def compression_suffix(name: str) -> str:
    """The file suffix of a compression name: the algorithm without its level."""
    return parse_compression(name)[0]


class _BrotliCompressor:
    def __init__(self, level: int) -> None:
        self._compressor = _brotli().Compressor(quality=level)

    def compress(self, data: Bytes, /) -> bytes:
        return bytes(self._compressor.process(data))

    def flush(self) -> bytes:
        return bytes(self._compressor.finish())


class _WholeCompressor:
    """For algorithms that need the whole file at once, or whose bytes depend on the pieces."""

    def __init__(self, compress_whole: Callable[[bytes], bytes]) -> None:
        self._compress_whole = compress_whole
        self._pieces: list[bytes] = []

    def compress(self, data: Bytes, /) -> bytes:
        self._pieces.append(bytes(data))
        return b""

    def flush(self) -> bytes:
        return self._compress_whole(b"".join(self._pieces))


def new_compressor(name: str, total_bytes: int) -> Compressor:
    """A compressor for one file of `total_bytes`; ValueError for an unknown name."""
    algorithm, level = parse_compression(name)
    if algorithm == "zstd":
        # The size goes into the frame's header; MosaicML's reader relies on it.
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


def compress(name: str, data: Bytes) -> bytes:
    """`data` compressed in one go; the same bytes as `new_compressor` gives piece by piece."""
    compressor = new_compressor(name, len(data))
    return compressor.compress(data) + compressor.flush()


def decompress(name: str, data: Bytes, *, raw_bytes: int, file: str | PathLike[str]) -> npt.NDArray[np.uint8]:
    """uint8[raw_bytes], what `data` holds; ShardError (naming `file`) if it holds less, more or nonsense.

    Costs one buffer of `raw_bytes` (snappy: two) and a few MiB; never more, whatever the data claims.
    """
    algorithm, _ = parse_compression(name)
    output = _Output(raw_bytes)
    try:
        _READERS[algorithm](data, output)
        if output.filled != raw_bytes:
            raise ValueError(f"it ends after {output.filled:,} of {raw_bytes:,} bytes")
    except (ValueError, OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise ShardError(file, f"{algorithm} data cannot be used: {error}; fetch the file again") from error
    return output.buffer


class _Output:
    """The buffer for what a file should hold, which refuses to hold more."""

    def __init__(self, raw_bytes: int) -> None:
        self.buffer: npt.NDArray[np.uint8] = np.empty(raw_bytes, dtype=np.uint8)
        self.filled = 0

    def put(self, piece: bytes) -> None:
        end = self.filled + len(piece)
        if end > len(self.buffer):
            raise ValueError(f"it holds more than the {len(self.buffer):,} bytes that the index states")
        self.buffer[self.filled : end] = np.frombuffer(piece, dtype=np.uint8)
        self.filled = end


def _read_zstd(data: Bytes, output: _Output) -> None:
    reader = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True)
    output.filled = reader.readinto(output.buffer)
    output.put(reader.read(1))  # anything left is too much


def _read_gzip(data: Bytes, output: _Output) -> None:
    stream = zlib.decompressobj(_GZIP_WBITS)
    for start in range(0, len(data), _PIECE_BYTES):
        waiting = data[start : start + _PIECE_BYTES]
        while len(waiting) and not stream.eof:
            output.put(stream.decompress(waiting, _PIECE_BYTES))
            waiting = stream.unconsumed_tail
        if stream.eof:
            _check_end(len(data) - start - _PIECE_BYTES, stream.unused_data)
            return
    while not stream.eof:  # output that did not fit into the last step
        piece = stream.decompress(b"", _PIECE_BYTES)
        if not piece and not stream.eof:
            raise EOFError("it is truncated")
        output.put(piece)


def _read_bzip2(data: Bytes, output: _Output) -> None:
    stream = bz2.BZ2Decompressor()
    for start in range(0, len(data), _PIECE_BYTES):
        output.put(stream.decompress(data[start : start + _PIECE_BYTES], _PIECE_BYTES))
        while not stream.eof and not stream.needs_input:
            output.put(stream.decompress(b"", _PIECE_BYTES))
        if stream.eof:
            _check_end(len(data) - start - _PIECE_BYTES, stream.unused_data)
            return
    raise EOFError("it is truncated")


def _check_end(bytes_unread: int, unused: bytes) -> None:
    if bytes_unread > 0 or unused:
        raise ValueError("data follows the end of the compressed stream")


def _read_brotli(data: Bytes, output: _Output) -> None:
    brotli = _brotli()
    stream = brotli.Decompressor()
    try:
        for start in range(0, len(data), _PIECE_BYTES):
            output.put(stream.process(data[start : start + _PIECE_BYTES], output_buffer_limit=_PIECE_BYTES))
            while not stream.can_accept_more_data():
                output.put(stream.process(b"", output_buffer_limit=_PIECE_BYTES))
    except brotli.error as error:
        raise ValueError(str(error)) from error
    if not stream.is_finished():
        raise EOFError("it is truncated")


def _read_snappy(data: Bytes, output: _Output) -> None:
    """The raw format: a varint with the size of the whole, checked before anything is allocated."""
    snappy = _snappy()
    stated = 0
    for shift, byte in enumerate(data[:_MAX_VARINT_BYTES]):
        stated |= (byte & 127) << (7 * shift)
        if byte < 128:
            break
    else:
        raise ValueError("its header is damaged")
    if stated != len(output.buffer):
        raise ValueError(f"its header states {stated:,} bytes, the index {len(output.buffer):,}")
    try:
        output.put(snappy.decompress(bytes(data)))
    except snappy.UncompressError as error:
        raise ValueError("it is damaged") from error


_READERS: dict[str, Callable[[Bytes, _Output], None]] = {
    "br": _read_brotli,
    "bz2": _read_bzip2,
    "gz": _read_gzip,
    "snappy": _read_snappy,
    "zstd": _read_zstd,
}


def _brotli() -> Any:
    try:
        import brotli
    except ImportError as error:
        raise MissingExtraError("Brotli", "formats", "br compression") from error
    if int(brotli.__version__.split(".")[1]) < _BROTLI_MINOR and brotli.__version__.startswith("1."):
        raise MissingExtraError(f"Brotli 1.{_BROTLI_MINOR} or newer", "formats", "br compression")
    return brotli


def _snappy() -> Any:
    try:
        import snappy
    except ImportError as error:
        raise MissingExtraError("python-snappy", "formats", "snappy compression") from error
    return snappy
