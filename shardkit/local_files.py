"""Files on local disks: mapped without holding descriptors, opened only if they are regular files."""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["NotRegularFileError", "map_file", "map_path", "open_maps", "open_regular"]

Bytes = npt.NDArray[np.uint8]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,  # off_t, on all 64-bit systems that Python runs on but Windows
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value

_addresses: set[int] = set()  # of maps that are open; adding and discarding are atomic


class NotRegularFileError(OSError):
    """A pipe, a folder, a device, or a link where none is allowed."""


def open_regular(file: str | os.PathLike[str], *, follow_links: bool = True) -> int:
    """A descriptor to read a regular file; NotRegularFileError for anything else, without waiting for it."""
    links = 0 if follow_links else os.O_NOFOLLOW
    if links and stat.S_ISLNK(os.lstat(file).st_mode):
        raise NotRegularFileError(f"{os.fspath(file)} is a link")
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | links)  # a pipe would block
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegularFileError("is not a regular file")
    return descriptor


def map_path(file: Path) -> Bytes:
    """A regular file's bytes, mapped read-only; OSError."""
    descriptor = open_regular(file)
    try:
        return map_file(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def map_file(descriptor: int, size: int, *, writable: bool = False) -> Bytes:
    """An open file's bytes, mapped and shared with the file; they stay when the descriptor is closed.

    The map ends when the last array that shows it dies, and not before. `mmap.mmap` would hold a duplicate of
    the descriptor until then (Python 3.13 can do without it), and processes may open 1,024 files by default.
    """
    if not size:
        return np.empty(0, dtype=np.uint8)
    return np.asarray(_Map(descriptor, size, writable))


def open_maps() -> int:
    """Maps that this process has open by `map_file`."""
    return len(_addresses)


class _Map:
    """Owns a map; NumPy keeps it as the base of every array that shows the memory."""

    def __init__(self, descriptor: int, size: int, writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = _libc.mmap(None, size, protection, mmap.MAP_SHARED, descriptor, 0)
        if address == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        _addresses.add(address)
        # Not at exit: arrays may be read until the very end of the process.
        weakref.finalize(self, _unmap, address, size).atexit = False
        self.__array_interface__ = {
            "version": 3,
            "data": (address, not writable),
            "shape": (size,),
            "typestr": "|u1",
        }


def _unmap(address: int, size: int) -> None:
    _addresses.discard(address)  # before the system can give the address to another map
    _libc.munmap(address, size)
