"""A folder as a store: a write syncs a temporary file, then renames or links it to its final name."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from shardkit.errors import ShardError
from shardkit.files import LACKING, fsync_path, make_folder, publish_bytes, rename_new
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

_TEMPORARY = ".shardkit-put-"


class LocalStore(BaseStore):
    """A store of the files below a folder, which the first `put` creates. Does not keep metadata."""

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
            _info(key, file, file.stat())  # checked before opening, because opening a pipe would block
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
                    # A version contains the mtime and must not repeat, but the kernel sets file times with
                    # a resolution of milliseconds only.
                    with contextlib.suppress(OSError):  # some file systems cannot set times
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

    def put_folder(
        self, prefix: str, folder: Path, last: str, data: bytes, hashes: Mapping[str, str] | None = None
    ) -> None:
        """Publish the folder itself by one rename; it must be on the same file system as the store."""
        target = self._file(prefix)
        try:
            for root, folders, names in os.walk(folder):
                for name in (*names, *folders):
                    fsync_path(Path(root, name))
            publish_bytes(folder / last, data)
            make_folder(target.parent)
            while not _moved(folder, target):
                if (target / last).exists():
                    raise ObjectExistsError(str(target), "already exists")
                _take_away(target, last, folder.parent)
            fsync_path(target.parent)
        except OSError as error:
            raise StoreError(str(target), f"cannot write: {error.strerror or error}") from error

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        folder, slash, name = prefix.rpartition("/")
        if name != ".." and not (slash and {"", ".", ".."} & {*folder.split("/")}):  # else no key matches
            yield from self._walk(folder + slash, prefix)

    def _walk(self, folder: str, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the files below `folder` (ends with a slash) whose keys start with `prefix`, sorted."""
        try:
            with os.scandir(self._folder / folder) as entries:
                found = {
                    folder + entry.name + ("/" if entry.is_dir(follow_symlinks=False) else ""): entry
                    for entry in entries
                    if not entry.name.startswith(_TEMPORARY)
                }
        except OSError:
            return  # the folder does not exist, or was removed meanwhile
        for key in sorted(found):  # names of folders end with a slash, so this is the order of whole keys
            if not key.startswith(prefix):
                continue
            if key.endswith("/"):
                yield from self._walk(key, prefix)
                continue
            with contextlib.suppress(OSError):  # the file may have been removed meanwhile
                if stat.S_ISREG((status := found[key].stat()).st_mode):
                    yield ObjectInfo(key, status.st_size, _version(status))

    def delete(self, key: str) -> None:
        file = self._file(key)
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            raise _translated(file, error) from error

    def _file(self, key: str) -> Path:
        try:  # drive letters and control characters are allowed in keys, but not in file names
            return self._folder / checked_basename(checked_key(self.url, key), self.url)
        except ShardError as error:
            raise StoreError(self.url, f"bad key {key!r:.200}: {error.problem}") from error


class LocalBody(BaseBody):
    """A body that reads the next `left` bytes of an open file."""

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
        raise ObjectNotFoundError(str(file), "is not a regular file")
    return ObjectInfo(key, status.st_size, _version(status))


def _version(status: os.stat_result) -> str:
    return f"{status.st_mtime_ns}-{status.st_ino}-{status.st_size}"


def _translated(file: Path, error: OSError) -> StoreError:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return ObjectNotFoundError(str(file), "there is no such file")
    return StoreError(str(file), f"{error.strerror or error}")


def _moved(folder: Path, target: Path) -> bool:
    """Rename `folder` to `target`; return False if `target` exists and contains files."""
    try:
        folder.rename(target)
    except OSError as error:
        if error.errno in (*LACKING, errno.EXDEV):
            problem = (
                f"{error.strerror}: this file system cannot rename folders; use a folder on a local disk"
            )
            raise OSError(error.errno, problem, str(target)) from error
        # NFS may repeat a rename that has succeeded: then `folder` is gone, `target` exists, and the error
        # of the second rename can be ignored.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) and (folder.exists() or not target.exists()):
            raise
        return False
    return True


def _take_away(target: Path, last: str, beside: Path) -> None:
    """Move the incomplete folder `target` into a temporary folder in `beside`, and delete it there.

    If it contains the file `last` after the move, another process has just completed it: move it back.
    """
    aside = Path(tempfile.mkdtemp(prefix="removed.", dir=beside))
    with contextlib.suppress(FileNotFoundError):
        target.rename(aside)
    if (aside / last).exists():
        with contextlib.suppress(OSError):
            aside.rename(target)
    shutil.rmtree(aside, ignore_errors=True)


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
