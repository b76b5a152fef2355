"""Files of finished tasks, wherever the work folder lies.

Tasks name what they read by paths below the work folder. On a local one these are files. A work folder in a
store is mounted (`mount`) at its scratch folder: there, a path that is no file of this machine is read from
the store. A task that reads files of another one must open them by a function of this module.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "BinaryFile",
    "Mounted",
    "borrowed",
    "content_of",
    "file_bytes",
    "heeded",
    "local",
    "mount",
    "open_arrow",
    "open_file",
    "read_bytes",
    "read_into",
]

BinaryFile = io.RawIOBase | io.BufferedReader


class Mounted(Protocol):
    """What a work folder in a store is to this module."""

    @property
    def folder(self) -> Path: ...
    def open(self, path: Path) -> io.BufferedReader: ...
    def fetch(self, path: Path) -> None: ...
    def borrow(self, path: Path) -> Path: ...
    def content_of(self, path: Path) -> str: ...


_mounts: dict[Path, Mounted] = {}
_heeds: dict[Path, Callable[[Path], None]] = {}


def mount(work: Mounted) -> None:
    """Let the functions of this module read `work` in this process; the latest of one folder counts."""
    _mounts[work.folder] = work


@contextmanager
def heeded(folder: Path, heed: Callable[[Path], None]) -> Iterator[None]:
    """Meanwhile `heed` hears of every file below `folder` before this module opens it in this process."""
    _heeds[folder] = heed
    try:
        yield
    finally:
        del _heeds[folder]


def open_file(path: Path) -> BinaryFile:
    """A file to be read by `seek`, `read` and `readinto`, all of which may give less than asked for."""
    work = _mount_of(path)
    return path.open("rb", buffering=0) if work is None else work.open(path)


def open_arrow(path: Path, *, mapped: bool = False) -> pa.NativeFile:
    """The same for pyarrow; `mapped` maps a file of this machine into memory."""
    import pyarrow as pa

    work = _mount_of(path)
    if work is not None:
        return pa.PythonFile(work.open(path), mode="r")
    return pa.memory_map(str(path)) if mapped else pa.OSFile(str(path))


def read_bytes(path: Path) -> bytes:
    """All of a small file."""
    with open_file(path) as file:
        data: Any = file.read()
        return bytes(data)


def read_into(file: BinaryFile, buffer: memoryview) -> int:
    """Fill `buffer` (bytes) with what comes next; less than its size only at the file's end."""
    filled = 0
    while filled < len(buffer) and (count := file.readinto(buffer[filled:])):
        filled += count
    return filled


def file_bytes(path: Path) -> int:
    """A file's size."""
    with open_file(path) as file:
        return file.seek(0, io.SEEK_END)


def local(path: Path) -> Path:
    """The path, as that of a whole file of this machine: fetched if it is none."""
    work = _mount_of(path)
    if work is not None:
        work.fetch(path)
    return path


@contextmanager
def borrowed(path: Path) -> Iterator[Path]:
    """`local` for a while, at another path: what was fetched for it is removed at the end."""
    work = _mount_of(path)
    if work is None:
        yield path
        return
    mine = work.borrow(path)
    try:
        yield mine
    finally:
        mine.unlink(missing_ok=True)


def content_of(path: Path) -> str | None:
    """The xxh3-128 of a file that is not on this machine, as it was committed."""
    work = _mount_of(path)
    return None if work is None else work.content_of(path)


def _mount_of(path: Path) -> Mounted | None:
    """The work folder to read `path` from; None if it is to be read as a file of this machine."""
    for folder, heed in list(_heeds.items()):
        if path.is_relative_to(folder):
            heed(path)
    for folder, work in _mounts.items():
        if path.is_relative_to(folder) and not path.exists():
            return work
    return None
