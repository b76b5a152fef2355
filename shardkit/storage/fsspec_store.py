"""Any file system of fsspec (gs://, az://, hdfs://, sftp://, …) as a store, within its capabilities.

Reads keep all guarantees of a store: bytes are fetched in blocks of 8 MiB, and a block is returned only if
the object is unchanged after the read. If it was replaced, the read raises ObjectChangedError. This costs one
status request before the first block and one after each block.

Writes depend on the file system: they are atomic if it can commit a file at the end (local files, s3fs,
gcsfs, sftp), and `if_absent` is refused if it has no exclusive creation (mode "xb"). Metadata is not kept.
fsspec's own timeouts apply.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from shardkit.errors import MissingExtraError
from shardkit.storage.store import (
    BaseBody,
    BaseStore,
    ObjectChangedError,
    ObjectExistsError,
    ObjectInfo,
    ObjectNotFoundError,
    StoreError,
    ThrottledError,
    TransientError,
    checked_key,
    checked_range,
    open_source,
)
from shardkit.storage.threads import remake_after_fork

_BLOCK_BYTES = 8 << 20
# Fields of `info` that identify a file's content, best first; each file system reports some of them.
_CONTENT_FIELDS = ("ETag", "etag", "generation", "version_id", "checksum", "md5Hash", "content_md5", "md5")
_TIME_FIELDS = (
    "mtime",
    "last_modified",
    "LastModified",
    "Last-Modified",  # fsspec's HTTP file system
    "updated",
    "modified",
    "modificationTime",
    "created",
)


class FsspecStore(BaseStore):
    """A store of the files below `url`."""

    def __init__(self, url: str) -> None:
        scheme, separator, rest = url.partition("://")
        self._url = f"{scheme.lower()}{separator}{rest}".rstrip("/")
        self.after_fork()
        remake_after_fork(self)

    def after_fork(self) -> None:
        self._found: tuple[Any, str] | None = None

    @property
    def url(self) -> str:
        return self._url

    def head(self, key: str) -> ObjectInfo:
        return self._info(key, self._path(key))

    def open(
        self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None
    ) -> FsspecBody:
        info = self.head(key)
        start, stop = checked_range(self.where(key), info, start, stop, version)
        return FsspecBody(self, info, start, stop)

    def put(
        self,
        key: str,
        data: bytes | Path,
        *,
        if_absent: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        path, where = self._path(key), self.where(key)
        with open_source(where, data) as source:
            try:
                self._write(path, source, if_absent)
            except (ValueError, NotImplementedError) as error:
                if not if_absent:
                    raise _translated(where, error) from error
                raise StoreError(where, "this file system has no exclusive creation (`if_absent`)") from error
            except FileExistsError as error:
                if not if_absent:
                    raise StoreError(where, f"cannot write: {error}") from error
                raise ObjectExistsError(where, "already exists") from error
            except Exception as error:
                raise _translated(where, error) from error
        return self._info(key, path)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        if prefix.startswith("/") or {".", ".."} & set(prefix.split("/")[:-1]):
            return  # no valid key has such a prefix
        system, root = self._system()
        folder = prefix.rpartition("/")[0]
        top = f"{root}/{folder}" if folder else root
        try:
            found = system.find(top, detail=True)
        except FileNotFoundError:
            return
        except Exception as error:
            raise _translated(f"{self._url}/{prefix}", error) from error
        entries = {name[len(root) :].lstrip("/"): entry for name, entry in found.items()}
        for key in sorted(entries):
            if key.startswith(prefix) and entries[key].get("type") == "file":
                yield self._described(key, entries[key])

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            self._system()[0].rm_file(path)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except Exception as error:
            raise _translated(self.where(key), error) from error

    def close(self) -> None:
        self._found = None

    def read_block(self, info: ObjectInfo, start: int, stop: int) -> bytes:
        """Return bytes `start` to `stop` of an object. Raises ObjectChangedError if `info` is outdated."""
        path, where = self._path(info.key), self.where(info.key)
        try:
            data: bytes = self._system()[0].cat_file(path, start=start, end=stop)
        except Exception as error:
            raise _translated(where, error) from error
        now = self._info(info.key, path)
        if now.version != info.version:
            raise ObjectChangedError(where, "was replaced while it was read: open it again")
        if len(data) != stop - start:
            raise TransientError(where, f"sent {len(data):,} of {stop - start:,} bytes at byte {start:,}")
        return data

    def __getstate__(self) -> str:
        return self._url

    def __setstate__(self, url: str) -> None:
        self.__init__(url)  # type: ignore[misc]

    def _write(self, path: str, source: BinaryIO, if_absent: bool) -> None:
        system = self._system()[0]
        system.makedirs(path.rpartition("/")[0], exist_ok=True)
        if if_absent:
            target = system.open(path, "xb")
        else:
            target = system.open(path, "wb", autocommit=False)
        with target:
            shutil.copyfileobj(source, target, _BLOCK_BYTES)
        if not if_absent and hasattr(target, "commit"):
            target.commit()

    def _info(self, key: str, path: str) -> ObjectInfo:
        try:
            entry = self._system()[0].info(path)
        except Exception as error:
            raise _translated(self.where(key), error) from error
        if entry.get("type") != "file":
            raise ObjectNotFoundError(self.where(key), "is not a file")
        return self._described(key, entry)

    def _described(self, key: str, entry: Mapping[str, Any]) -> ObjectInfo:
        if entry.get("size") is None:
            raise StoreError(self.where(key), "the file system does not report the file's size")
        size = int(entry["size"])
        for name in _CONTENT_FIELDS:
            if entry.get(name) is not None:
                return ObjectInfo(key, size, str(entry[name]).strip('"'))
        facts = [_text(entry[name]) for name in (*_TIME_FIELDS, "ino") if entry.get(name) is not None]
        if not facts:
            raise StoreError(
                self.where(key),
                "the file system reports neither times nor checksums, so versions cannot be compared",
            )
        return ObjectInfo(key, size, hashlib.sha256(f"{size} {facts}".encode()).hexdigest()[:32])

    def _system(self) -> tuple[Any, str]:
        """Return (file system, root path of the URL); both are created once per process."""
        if self._found is None:
            try:
                from fsspec.core import url_to_fs
            except ImportError as error:
                raise MissingExtraError("fsspec", "fsspec", self._url) from error
            try:
                # fsspec's cached listings would hide writes of other processes.
                system, root = url_to_fs(self._url, use_listings_cache=False)
            except ImportError as error:
                raise StoreError(self._url, f"{error}") from error
            except ValueError as error:
                known = "; URLs begin with s3://, hf://, https:// or a protocol of fsspec, such as gs://"
                problem = f"fsspec cannot open it: {error}" + known * ("Protocol not known" in str(error))
                raise StoreError(self._url, problem) from error
            except Exception as error:  # some file systems connect here
                raise _translated(self._url, error) from error
            self._found = (system, root.rstrip("/"))
        return self._found

    def _path(self, key: str) -> str:
        checked = checked_key(self._url, key)
        return f"{self._system()[1]}/{checked}"


class FsspecBody(BaseBody):
    """A body that fetches its range in blocks of 8 MiB."""

    def __init__(self, store: FsspecStore, info: ObjectInfo, start: int, stop: int) -> None:
        self.info = info
        self._store = store
        self._next, self._stop = start, stop
        self._block = memoryview(b"")

    def readinto(self, buffer: memoryview, /) -> int:
        if not self._block and self._next < self._stop:
            end = min(self._next + _BLOCK_BYTES, self._stop)
            self._block = memoryview(self._store.read_block(self.info, self._next, end))
            self._next = end
        count = min(len(buffer), len(self._block))
        buffer[:count] = self._block[:count]
        self._block = self._block[count:]
        return count

    @property
    def left(self) -> int:
        return self._stop - self._next + len(self._block)


def _text(fact: Any) -> str:
    """Convert a field of `info` to text; a time as a datetime and as a number of seconds give equal texts."""
    fact = fact.timestamp() if isinstance(fact, datetime) else fact
    return f"{fact:.6f}" if isinstance(fact, float) else str(fact)


def _translated(where: str, error: BaseException) -> StoreError:
    """Return the StoreError for an exception of any file system, by its type or else by its HTTP status."""
    if isinstance(error, StoreError):
        return error
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and cause is not None and getattr(cause, "status", None) != 404:
        return _translated(where, cause)  # fsspec raises it for unreachable HTTP servers, too
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return ObjectNotFoundError(where, "there is no such file")
    status = next(
        (value for name in ("status", "code") if isinstance(value := getattr(error, name, None), int)), None
    )
    problem = f"{type(error).__name__}: {error}"[:300]
    if status in (429, 503):
        return ThrottledError(where, problem, status=status)
    is_network = isinstance(error, ConnectionError | TimeoutError) or type(error).__module__.startswith(
        "aiohttp"
    )
    if is_network or (status is not None and 500 <= status < 600):
        return TransientError(where, problem, status=status)
    return StoreError(where, problem, status=status)
