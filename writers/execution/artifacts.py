"""Handles to the files of finished tasks, in a local work folder or in a store.

Tasks and stages pass `Artifact`s around, and open files through them only. In a work folder of this machine
an artifact is a plain file. In a work folder in a store it is an object: `open` reads ranges of it, each
compared with the hashes in the commit, and `local` fetches the whole file to its place in the scratch folder.
A handle is plain data, so it can be an argument of tasks in workers on this or other machines.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from shardkit.errors import BuildError

if TYPE_CHECKING:
    import pyarrow as pa


BinaryFile = io.RawIOBase | io.BufferedReader

RUN_SUFFIX = ".run"
"""Of the names of files of the exchange, whose blocks have hashes of their own: every read verifies them.

Most of them are removed as soon as the last task that reads them is finished (runner.py)."""

ONCE_SUFFIX = ".once.npy"
"""Of the names of other files that go with their last reader. Their hashes are compared, as of all files.

A task that reads a folder does not read its runs and these files: they are arguments of their own."""


def may_be_gone(name: str) -> bool:
    """Return whether a finished task may lack this output, because it went with its last reader."""
    return name.endswith((RUN_SUFFIX, ONCE_SUFFIX))


class DamagedRangeError(BuildError):
    """Bytes of a local file differ from their hash; `path` is the file."""

    def __init__(self, problem: str, path: Path) -> None:
        super().__init__(problem)
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return DamagedRangeError, (str(self), self.path)


class LostFilesError(BuildError):
    """Files of finished tasks are needed again, but were removed or are damaged; `keys` are these tasks."""

    def __init__(self, keys: frozenset[str]) -> None:
        super().__init__(
            f"files of {len(keys):,} finished tasks, such as {min(keys)}, are needed again, but were removed "
            "or are damaged; run the same command again, which makes them anew"
        )
        self.keys = keys


class RemoteFiles(Protocol):
    """The methods of a remote work folder that artifacts use; `path` is a file's path in a scratch folder."""

    def open(self, path: Path) -> io.BufferedReader: ...
    def fetch(self, path: Path) -> None: ...
    def borrow(self, path: Path) -> Path: ...
    def content_of(self, path: Path) -> str: ...
    def read_range(self, path: Path, start: int, stop: int, is_right: Callable[[bytes], bool]) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file of a finished task, or the folder of all its files; `artifact / name` is a file in the folder.

    With `remote`, the file is read from there unless it was fetched to `path` before. `content` is the hash
    of the file if it is known; the digest of a task with this argument depends on it. `remedy` is the advice
    in errors about a damaged file. A file that no later stage reads `goes` when its readers are finished.
    """

    path: Path
    remote: RemoteFiles | None = None
    content: str = field(default="", compare=False)
    remedy: str = field(default="run the same command again, which makes it anew", compare=False)
    goes: bool = field(default=False, compare=False)

    def __truediv__(self, name: str) -> Artifact:
        return Artifact(self.path / name, self.remote, remedy=self.remedy)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def paths(self) -> Iterator[Path]:
        """The path, as `Files.paths`."""
        yield self.path

    @property
    def consumed(self) -> tuple[Artifact, ...]:
        """The file itself if it goes, as `Task.consumed`."""
        return (self,) if self.goes else ()

    @property
    def _source(self) -> RemoteFiles | None:
        return None if self.remote is None or self.path.exists() else self.remote

    def open(self) -> BinaryFile:
        """Open the file for `seek`, `read` and `readinto`; a read may return less than requested."""
        source = self._source
        return self.path.open("rb", buffering=0) if source is None else source.open(self.path)

    def open_arrow(self) -> pa.NativeFile:
        """Open the file for pyarrow. It is not mapped: batches are compressed, so a map would save no copy,
        and all of a large file's pages would count as memory of the worker.
        """
        import pyarrow as pa

        source = self._source
        if source is not None:
            return pa.PythonFile(source.open(self.path), mode="r")
        return pa.OSFile(str(self.path))

    def read_bytes(self) -> bytes:
        """Return the whole content of a small file."""
        with self.open() as file:
            data: Any = file.read()
            return bytes(data)

    def read_range(
        self, start: int, stop: int, is_right: Callable[[npt.NDArray[np.uint8]], bool]
    ) -> npt.NDArray[np.uint8]:
        """Read bytes [start, stop) in one request; return them as a writable array.

        `is_right` compares them with a hash. Wrong bytes from a store are read again; if they stay wrong, the
        next build repeats the task, as it does if this raises DamagedRangeError for a local file.
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
            problem = f"bytes {start:,} to {stop:,} are missing or differ from their hash"
            raise DamagedRangeError(f"{self}: {problem}; {self.remedy}", self.path)
        return data

    def size(self) -> int:
        """Return the file's size in bytes."""
        with self.open() as file:
            return file.seek(0, io.SEEK_END)

    def local(self) -> Path:
        """Return the path of the whole file on this machine; fetches it if necessary."""
        source = self._source
        if source is not None:
            source.fetch(self.path)
        return self.path

    @contextmanager
    def borrowed(self) -> Iterator[Path]:
        """Yield the path of the whole file on this machine; remove it at the end if it was fetched now."""
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
        """Return the file's committed xxh3-128 if the file is not on this machine, else None."""
        source = self._source
        return None if source is None else source.content_of(self.path)


@dataclass(frozen=True, eq=False)
class Files:
    """Many files, in a form that takes few bytes in each of the many tasks that read them all.

    `names` are their paths below `root`, one a line; `content` identifies their contents.
    """

    root: Path
    remote: RemoteFiles | None
    names: str
    content: str

    @classmethod
    def of(cls, files: Sequence[Artifact], content: str) -> Files:
        """Return a handle of files in one work folder."""
        root = Path(os.path.commonpath([file.path.parent for file in files]))
        names = "\n".join(os.path.relpath(file.path, root) for file in files)
        return cls(root, files[0].remote, names, content)

    @cached_property
    def _names(self) -> list[str]:
        return self.names.split("\n")

    def __getitem__(self, number: int) -> Artifact:
        return Artifact(self.root / self._names[number], self.remote)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_names"}

    @property
    def paths(self) -> Iterator[Path]:
        """The paths of all files."""
        return (self.root / name for name in self._names)


def files_in(value: object) -> Iterator[Artifact | Files]:
    """Yield the files and folders that an argument of a task refers to."""
    if isinstance(value, Artifact | Files):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        for one in fields(value):
            yield from files_in(getattr(value, one.name))
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from files_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from files_in(item)


def read_into(file: BinaryFile, buffer: memoryview) -> int:
    """Fill `buffer` from the file's position; return the number of bytes read: fewer only at the end."""
    filled = 0
    while filled < len(buffer) and (count := file.readinto(buffer[filled:])):
        filled += count
    return filled
