"""One version of an object as a read-only, seekable file, for libraries that need a file.

Data is fetched in ranges of 1 MiB at first, doubled up to 16 MiB during sequential reads; from the second
sequential range on, the next range is prefetched while the current one is read. So at most 32 MiB are held, a
reader that seeks (a Parquet footer, then columns) fetches little unneeded data, and an idle file holds no
connection. Errors are OSErrors with an errno, as for a disk: ESTALE if the object no longer has the requested
version, otherwise EIO.
"""

from __future__ import annotations

import errno
import io
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Protocol

from shardkit.storage.store import ObjectChangedError, ObjectInfo, StoreError
from shardkit.storage.threads import Workers

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


FIRST_RANGE_BYTES = 1 << 20
MOST_RANGE_BYTES = 16 << 20
_BUFFER_BYTES = 1 << 16  # size of the buffer that serves small reads


class Ranges(Protocol):
    """The only method of a `Store` that `open_object` uses."""

    def get(
        self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None
    ) -> bytes: ...


def open_object(
    store: Ranges, info: ObjectInfo, *, first_bytes: int = FIRST_RANGE_BYTES
) -> io.BufferedReader:
    """Open the object as a file of `info.bytes` bytes; no request is made before the first read.

    The first request is for `first_bytes` bytes; `store` may return more bytes than were requested. `store`
    must retry by itself, as a `ResilientStore` does.
    """
    return io.BufferedReader(_ObjectFile(store, info, first_bytes), _BUFFER_BYTES)


class _ObjectFile(io.RawIOBase):
    """A raw file that holds one block of the object in memory, and prefetches at most one more block."""

    def __init__(self, store: Ranges, info: ObjectInfo, first_bytes: int) -> None:
        self._store, self._info = store, info
        self._first_bytes = first_bytes
        self._position = 0
        self._start, self._block = 0, b""
        self._next_bytes = first_bytes
        self._coming: Future[bytes] | None = None  # the block after the current one, being fetched
        self._workers = Workers(1)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._info.bytes}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, f"cannot seek to byte {base + offset}: it is before the file's start")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill `buffer` with at most the rest of the current block; return 0 only at the end of the file."""
        view = memoryview(buffer).cast("B")
        if not view or self._position >= self._info.bytes:
            return 0
        if not self._start <= self._position < self._start + len(self._block):
            self._load(len(view))
        offset = self._position - self._start
        count = min(len(view), len(self._block) - offset)
        view[:count] = memoryview(self._block)[offset : offset + count]
        self._position += count
        return count

    def close(self) -> None:
        self._coming, self._block = None, b""
        super().close()

    def _load(self, wanted: int) -> None:
        """Load the block at the current position; if reads are sequential, start to prefetch the next one."""
        is_next = bool(self._block) and self._position == self._start + len(self._block)
        coming, self._coming = self._coming, None
        if not is_next:
            self._next_bytes = max(self._first_bytes, min(wanted, MOST_RANGE_BYTES))
        if is_next and coming is not None:
            self._block = b""  # free the current block first, so that memory holds two blocks, not three
            block = coming.result()
        else:
            block = self._get(self._position, self._next_bytes)
        self._start, self._block = self._position, block
        self._next_bytes = min(2 * self._next_bytes, MOST_RANGE_BYTES)
        stop = self._start + len(block)
        if is_next and stop < self._info.bytes:
            self._coming = self._workers.submit(partial(self._get, stop, self._next_bytes))

    def _get(self, start: int, count: int) -> bytes:
        stop = min(start + count, self._info.bytes)
        try:
            return self._store.get(self._info.key, start, stop, version=self._info.version)
        except ObjectChangedError as error:
            problem = f"the object changed after it was listed ({error.problem}): start again"
            raise OSError(errno.ESTALE, problem) from error
        except StoreError as error:
            status = "" if error.status is None else f" (status {error.status})"
            raise OSError(errno.EIO, error.problem + status, error.where) from error
