"""Compressed tars (.tar.gz, .tgz, .tar.bz2, .tbz2, .tar.zst), decompressed into memory within a limit.

Unlike an MDS index, a folder of tars does not say how large its files become, and tools such as pigz write
several streams into one file. So the whole file is decompressed piece by piece, all of its streams, until the
limit: what the index states, or else `MAX_UNSTATED_BYTES`. A truncated stream is an error.
"""

from __future__ import annotations

import bz2
import zlib
from collections.abc import Callable
from os import PathLike
from pathlib import PurePosixPath
from typing import Protocol

import zstandard

from shardkit.errors import ShardError

__all__ = ["MAX_UNSTATED_BYTES", "decompress_tar", "gunzip", "is_tar_name", "tar_compression"]

MAX_UNSTATED_BYTES = 4 << 30  # a shard larger than this should not be read into memory at all

_SUFFIXES = {
    ".tar": ("", ".tar"),
    ".tar.gz": ("gz", ".tar"),
    ".tgz": ("gz", ".tar"),
    ".tar.bz2": ("bz2", ".tar"),
    ".tbz2": ("bz2", ".tar"),
    ".tar.zst": ("zstd", ".tar"),
    ".tar.zstd": ("zstd", ".tar"),
}

_GZIP_WBITS = 31  # zlib's code for "gzip header, 32 KiB window"

_OUTPUT_BYTES = 1 << 20  # of one step
# zstd's stream object has no limit on the output of one step: 4 bytes can become 128 KiB, 4 KiB 128 MiB.
_ZSTD_INPUT_BYTES = 1 << 12

_MAX_ZSTD_WINDOW = 1 << 27


def tar_compression(basename: str) -> tuple[str, str] | None:
    """(algorithm, name of the tar inside) from a file's name: ("", name) for a plain tar, None for no tar."""
    lower = basename.lower()
    for suffix in sorted(_SUFFIXES, key=len, reverse=True):
        if lower.endswith(suffix) and len(PurePosixPath(basename).name) > len(suffix):
            algorithm, tar = _SUFFIXES[suffix]
            return algorithm, basename[: len(basename) - len(suffix)] + tar if algorithm else basename
    return None


def is_tar_name(basename: str) -> bool:
    """Whether a file of this name is read as a tar."""
    return tar_compression(basename) is not None


class _Stream(Protocol):
    """One compressed stream: takes input, says when it ends and what input was left."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def step(self, data: bytes) -> tuple[bytes, bool]: ...


class _Gzip:
    def __init__(self) -> None:
        self._stream = zlib.decompressobj(_GZIP_WBITS)

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data

    def step(self, data: bytes) -> tuple[bytes, bool]:
        piece = self._stream.decompress(self._stream.unconsumed_tail + data, _OUTPUT_BYTES)
        return piece, not self._stream.unconsumed_tail and len(piece) < _OUTPUT_BYTES


class _Bzip2:
    def __init__(self) -> None:
        self._stream = bz2.BZ2Decompressor()

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data

    def step(self, data: bytes) -> tuple[bytes, bool]:
        piece = self._stream.decompress(data, _OUTPUT_BYTES)
        return piece, self._stream.eof or self._stream.needs_input


class _Zstd:
    def __init__(self) -> None:
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_ZSTD_WINDOW)
        self._stream = decompressor.decompressobj(write_size=1 << 17)

    @property
    def eof(self) -> bool:
        return bool(self._stream.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._stream.unused_data)

    def step(self, data: bytes) -> tuple[bytes, bool]:
        return self._stream.decompress(data), True


_STREAMS: dict[str, tuple[Callable[[], _Stream], int]] = {
    "gz": (_Gzip, 1 << 16),
    "bz2": (_Bzip2, 1 << 16),
    "zstd": (_Zstd, _ZSTD_INPUT_BYTES),
}


def decompress_tar(algorithm: str, data: memoryview, limit: int, file: str | PathLike[str]) -> bytearray:
    """All that `data` holds; ShardError (naming `file`) if it is over `limit` bytes, cut or damaged."""
    try:
        return _decompress(algorithm, data, limit)
    except (ValueError, OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise ShardError(file, f"{algorithm} data cannot be used: {error}; fetch the file again") from error


def gunzip(data: memoryview, limit: int) -> bytes:
    """A gzip file's content; ValueError if it is damaged or larger than `limit`."""
    try:
        return bytes(_decompress("gz", data, limit))
    except (EOFError, zlib.error) as error:
        raise ValueError(f"gzip data cannot be used: {error}") from error


def _decompress(algorithm: str, data: memoryview, limit: int) -> bytearray:
    new_stream, input_bytes = _STREAMS[algorithm]
    output = bytearray()
    at, stream = 0, new_stream()
    while True:
        waiting = bytes(data[at : at + input_bytes])
        at += len(waiting)
        done = False
        while not done and not stream.eof:
            piece, done = stream.step(waiting)
            waiting = b""
            if len(output) + len(piece) > limit:
                raise ValueError(f"it holds more than {limit:,} bytes")
            output += piece
        if stream.eof:
            at -= len(stream.unused_data)
            if at == len(data) or (data[at] == 0 and not any(data[at:])):
                return output  # nothing follows, or the zeros that tapes and some tools pad with
            stream = new_stream()
        elif at == len(data):
            raise EOFError("it is truncated")
