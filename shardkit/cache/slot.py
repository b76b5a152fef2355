"""An entry of a `CacheFolder` while it is filled: a file in filling/ that moves to shards/, whole or never.

Bytes are written rather than put into a map: a page fault costs more than the copy (measured: 0.25 against
0.4 CPU-seconds a gigabyte, and up to 1.6 on fresh pages).
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import time
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shardkit.cache.entry import SEAL_BYTES, make_seal
from shardkit.errors import ShardkitError
from shardkit.local_files import map_file

__all__ = ["CacheFolderError", "FolderSlot"]

Bytes = npt.NDArray[np.uint8]

_numbers = itertools.count()


class CacheFolderError(ShardkitError):
    """The cache folder cannot be used; the message says which and why."""


class Owner(Protocol):
    """What a slot needs of its cache."""

    def enter(self, name: str, file: Path, descriptor: int) -> None: ...
    def set_aside(self, file: Path) -> None: ...


class FolderSlot:
    """Room in a `CacheFolder`: a file of its final size, flocked."""

    def __init__(self, cache: Owner, name: str, folder: Path, size: int) -> None:
        self._cache, self._name, self._size = cache, name, size
        self._entry: Bytes | None = None
        self._file, self._descriptor = _create_locked(folder, name)
        try:
            os.posix_fallocate(self._descriptor, 0, size)  # a full disk is an error here, not a SIGBUS later
        except BaseException:
            self._end(keep=False)
            raise

    @property
    def data(self) -> Bytes:
        if self._entry is None:
            self._entry = map_file(self._descriptor, self._size, writable=True)
        return self._entry[:-SEAL_BYTES]

    def write(self, at: int, piece: memoryview) -> None:
        written = os.pwrite(self._descriptor, piece, at)
        if written != len(piece):  # only where a disk is full, which it cannot be: the room is there
            raise OSError(errno.EIO, f"{written:,} of {len(piece):,} bytes were written")

    def commit(self) -> Bytes:
        try:
            os.pwrite(self._descriptor, make_seal(self.data, self._name), self._size - SEAL_BYTES)
            os.fsync(self._descriptor)
            self._entry = None
            data = map_file(self._descriptor, self._size)
            self._cache.enter(self._name, self._file, self._descriptor)
        except OSError as error:
            self._end(keep=False)
            problem = f"cannot be written: {error.strerror or error}; the disk may be failing"
            raise CacheFolderError(f"{self._file}: {problem}") from error
        self._end(keep=True)
        return data[:-SEAL_BYTES]

    def discard(self, *, damaged: bool = False) -> None:
        if damaged and self._descriptor >= 0:
            self._cache.set_aside(self._file)
        self._end(keep=damaged)

    def _end(self, *, keep: bool) -> None:
        if self._descriptor >= 0:
            if not keep:
                self._file.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1
        self._entry = None


def _create_locked(folder: Path, name: str) -> tuple[Path, int]:
    """A new file that nobody else can have, flocked."""
    while True:
        file = folder / f"{name}~{os.getpid()}~{next(_numbers)}~{time.time_ns()}"
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o664)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return file, descriptor
        except BlockingIOError:
            pass  # taken for abandoned between these two calls
        os.close(descriptor)
