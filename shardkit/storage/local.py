"""A folder as a store: every write is a temporary file that is synced, then renamed or linked into place."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from shardkit.errors import ShardError
from shardkit.files import LACKING, fsync_path, make_folder, rename_new
from shardkit.manifest import checked_basename
from shardkit.storage.store import (
    BaseBody,
    BaseStore,
    ObjectExistsError,
    ObjectInfo,
    ObjectNotFoundError,
    StoreError,
    checked_key,
    checked_range,
    open_source,
)

__all__ = ["LocalStore"]

_TEMPORARY = ".shardkit-put-"


class LocalStore(BaseStore):
    """Files below a folder, which the first `put` creates. Metadata is not kept."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)

    @property
    def url(self) -> str:
        return str(self._folder)

    def head(self, key: str) -> ObjectInfo:
        file = self._file(key)
        try:
            return _info(key, file, file.stat())
        except OSError as error:
            raise _translated(file, error) from error

    def open(
        self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None
    ) -> LocalBody:
        file = self._file(key)
        try:
            _info(key, file, file.stat())  # first, because opening a pipe would wait forever
            handle = file.open("rb", buffering=0)
        except OSError as error:
            raise _translated(file, error) from error
        try:
            info = _info(key, file, os.fstat(handle.fileno()))
            start, stop = checked_range(str(file), info, start, stop, version)
            handle.seek(start)
        except BaseException:
            handle.close()
            raise
        return LocalBody(handle, info, stop - start)

    def put(
        self,
        key: str,
        data: bytes | Path,
        *,
        if_absent: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        file = self._file(key)
        # Machines that share the folder may have processes with the same id.
        temporary = file.with_name(f"{_TEMPORARY}{os.getpid()}-{os.urandom(6).hex()}")
        with open_source(str(file), data) as source, contextlib.ExitStack() as stack:
            try:
                make_folder(file.parent)
                stack.callback(temporary.unlink, missing_ok=True)
                with temporary.open("xb") as handle:
                    shutil.copyfileobj(source, handle, 1 << 20)
                    handle.flush()
                    # The kernel's dates have a resolution of milliseconds, and a version must not repeat.
                    with contextlib.suppress(OSError):  # which some file systems cannot set
                        os.utime(handle.fileno(), ns=(time.time_ns(), time.time_ns()))
                    os.fsync(handle.fileno())
                    info = _info(key, file, os.fstat(handle.fileno()))
                if if_absent:
                    _link(temporary, file)
                else:
                    temporary.rename(file)
                fsync_path(file.parent)
            except OSError as error:
                raise StoreError(str(file), f"cannot write: {error.strerror or error}") from error
        return info

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        if prefix.startswith("/") or ".." in prefix.split("/"):
            return  # no key starts like this
        top = self._folder / prefix.rpartition("/")[0]
        found = []
        for folder, _, names in os.walk(top):
            for name in names:
                file = Path(folder, name)
                key = file.relative_to(self._folder).as_posix()
                if name.startswith(_TEMPORARY) or not key.startswith(prefix):
                    continue
                try:
                    found.append(_info(key, file, file.stat()))
                except (OSError, StoreError):
                    continue  # removed meanwhile, or not a file
        yield from sorted(found, key=lambda info: info.key)

    def delete(self, key: str) -> None:
        file = self._file(key)
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            raise _translated(file, error) from error

    def _file(self, key: str) -> Path:
        try:  # a name of a file, which may mean more than a key: a drive, control characters
            return self._folder / checked_basename(checked_key(self.url, key), self.url)
        except ShardError as error:
            raise StoreError(self.url, f"bad key {key!r:.200}: {error.problem}") from error


class LocalBody(BaseBody):
    """An open file, of which the next `left` bytes are read."""

    def __init__(self, handle: BinaryIO, info: ObjectInfo, left: int) -> None:
        self.info = info
        self._handle = handle
        self._left = left

    def readinto(self, buffer: memoryview, /) -> int:
        try:
            count: int = self._handle.readinto(buffer[: self._left])  # type: ignore[attr-defined]
        except OSError as error:
            raise StoreError(self.info.key, f"cannot read: {error.strerror or error}") from error
        if not count and self._left:
            raise StoreError(self.info.key, f"truncated while it was read: {self._left:,} bytes are missing")
        self._left -= count
        return count

    @property
    def left(self) -> int:
        return self._left

    def close(self) -> None:
        self._handle.close()


def _info(key: str, file: Path, status: os.stat_result) -> ObjectInfo:
    if not stat.S_ISREG(status.st_mode):
        raise ObjectNotFoundError(str(file), "not a regular file")
    return ObjectInfo(key, status.st_size, f"{status.st_mtime_ns}-{status.st_ino}-{status.st_size}")


def _translated(file: Path, error: OSError) -> StoreError:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return ObjectNotFoundError(str(file), "there is no such file")
    return StoreError(str(file), f"{error.strerror or error}")


def _link(temporary: Path, file: Path) -> None:
    try:
        try:
            os.link(temporary, file)
        except OSError as error:
            if error.errno not in LACKING:
                raise
            rename_new(temporary, file)
    except FileExistsError as error:
        raise ObjectExistsError(str(file), "already exists") from error
