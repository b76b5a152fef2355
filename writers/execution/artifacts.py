"""Handles to what finished tasks wrote, wherever the work folder lies.

Tasks and stages pass `Artifact`s around, and open files through them only. In a work folder of this machine
an artifact is a plain file. In a work folder in a store it is an object: `open` reads ranges of it, each
compared with the hashes in the commit, and `local` fetches the whole file to its place in the scratch folder.
A handle is plain data, so it goes to workers, also on other machines, as an argument of their tasks.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from shardkit.errors import BuildError
from shardkit.files import map_path

if TYPE_CHECKING:
    import pyarrow as pa


BinaryFile = io.RawIOBase | io.BufferedReader


class RemoteFiles(Protocol):
    """A work folder in a store, as artifacts see it; `path` is where the file would be on this machine."""

    def open(self, path: Path) -> io.BufferedReader: ...
    def fetch(self, path: Path) -> None: ...
    def borrow(self, path: Path) -> Path: ...
    def content_of(self, path: Path) -> str: ...
    def read_range(self, path: Path, start: int, stop: int, is_right: Callable[[bytes], bool]) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file of a finished task, or its folder of files: `folder / name` is one of them.

    With `remote`, the file is read from there unless it was fetched to `path` before. `content` names the
    bytes where they are known: a task whose argument it is depends on them. `remedy` is what errors advise
    where the file is damaged.
    """

    path: Path
    remote: RemoteFiles | None = None
    content: str = field(default="", compare=False)
    remedy: str = field(default="remove the work folder and build again", compare=False)

    def __truediv__(self, name: str) -> Artifact:
        return Artifact(self.path / name, self.remote, remedy=self.remedy)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def _source(self) -> RemoteFiles | None:
        return None if self.remote is None or self.path.exists() else self.remote

    def open(self) -> BinaryFile:
        """The file, for `seek`, `read` and `readinto`, each of which may give less than asked for."""
        source = self._source
        return self.path.open("rb", buffering=0) if source is None else source.open(self.path)

    def open_arrow(self, *, mapped: bool = False) -> pa.NativeFile:
        """The file for pyarrow; `mapped` maps a file of this machine into memory."""
        import pyarrow as pa

        source = self._source
        if source is not None:
            return pa.PythonFile(source.open(self.path), mode="r")
        return pa.BufferReader(map_path(self.path)) if mapped else pa.OSFile(str(self.path))

    def read_bytes(self) -> bytes:
        """All of a small file."""
        with self.open() as file:
            data: Any = file.read()
            return bytes(data)

    def read_range(
        self, start: int, stop: int, is_right: Callable[[npt.NDArray[np.uint8]], bool]
    ) -> npt.NDArray[np.uint8]:
        """Bytes [start, stop), writable, in one request; `is_right` compares them with a hash.

        From a store, wrong bytes are read again; if they stay wrong, the next run repeats the task.
        """
        source = self._source
        if source is not None:
            found = source.read_range(self.path, start, stop, lambda d: is_right(np.frombuffer(d, np.uint8)))
            return np.frombuffer(found, np.uint8).copy()
        data = np.empty(stop - start, np.uint8)
        with self.path.open("rb", buffering=0) as file:
            file.seek(start)
            count = read_into(file, data.data)
        if count < len(data) or not is_right(data):
            raise BuildError(
                f"{self}: bytes {start:,} to {stop:,} are missing or differ from their hash; {self.remedy}"
            )
        return data

    def size(self) -> int:
        """The file's size in bytes."""
        with self.open() as file:
            return file.seek(0, io.SEEK_END)

    def local(self) -> Path:
        """The path of a whole file on this machine; fetches it if necessary."""
        source = self._source
        if source is not None:
            source.fetch(self.path)
        return self.path

    @contextmanager
    def borrowed(self) -> Iterator[Path]:
        """The path of a whole file on this machine; one that is fetched for this is removed at the end."""
        source = self._source
        if source is None:
            yield self.path
            return
        copy = source.borrow(self.path)
        try:
            yield copy
        finally:
            copy.unlink(missing_ok=True)

    def committed_hash(self) -> str | None:
        """The xxh3-128 that the file was committed with, if it is not on this machine."""
        source = self._source
        return None if source is None else source.content_of(self.path)


def read_into(file: BinaryFile, buffer: memoryview) -> int:
    """Fill `buffer` (bytes) from the file's position on; returns less than its size only at the end."""
    filled = 0
    while filled < len(buffer) and (count := file.readinto(buffer[filled:])):
        filled += count
    return filled
