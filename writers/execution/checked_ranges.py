"""Reads ranges of committed files in a store, each compared with the hashes of its blocks.

Neither HTTP nor S3 clients verify a range, and a flipped byte would silently go into the dataset. Bytes that
differ are read again: this corrects damage in transit; damage in the store stays and is an error. A process
caches up to `CACHE_BYTES` of blocks from short reads, because tasks that read small parts of many files read
the same blocks, such as a file's footer, repeatedly.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import xxhash

from shardkit.storage.store import ObjectNotFoundError, Store, StoreError
from shardkit.storage.threads import remake_after_fork
from shardkit.writers.execution.commit import BLOCK_BYTES, Output, block_hashes

CACHE_BYTES = 16 << 20
_KEPT_AT_ONCE = 2  # reads of more blocks are not cached: they are sequential, and not repeated
_TRIES = 3  # attempts per range: damage in transit goes away on a new attempt, damage in the store stays


class DamagedFileError(StoreError):
    """A file of a finished task is gone, or differs from its commit."""


class CheckedRanges:
    """Reads ranges of one file and verifies them; calls `damaged` before it raises DamagedFileError."""

    def __init__(self, store: Store, output: Output, damaged: Callable[[], None] = lambda: None) -> None:
        self._store, self._output, self._damaged = store, output, damaged
        self._hashes = block_hashes(output)  # empty for a file of one block: the file's own hash is used

    def get(self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> bytes:
        """Return bytes from `start` to the end of a block, which may be before or after `stop`."""
        size = self._output.bytes
        stop = size if stop is None else min(stop, size)
        if start >= stop:
            return b""
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        place = self._store.url, key, self._output.xxh3_128
        if (kept := _cache.get(place, first)) is not None:  # return one block; the caller requests the others
            return kept[start - first * BLOCK_BYTES :]
        data = self._fetch(key, first * BLOCK_BYTES, min(last * BLOCK_BYTES, size))
        if last - first <= _KEPT_AT_ONCE:
            for number in range(first, last):
                at = (number - first) * BLOCK_BYTES
                _cache.put(place, number, data[at : at + BLOCK_BYTES])
        return data[start - first * BLOCK_BYTES :]

    def _fetch(self, key: str, start: int, stop: int) -> bytes:
        is_right = partial(self._is_right, start=start)
        return get_checked(self._store, key, (start, stop), is_right, self._damaged)

    def _is_right(self, data: bytes, start: int) -> bool:
        if not self._hashes:
            return xxhash.xxh3_128_hexdigest(data) == self._output.xxh3_128
        view = memoryview(data)
        return all(
            xxhash.xxh3_64_digest(view[at : at + BLOCK_BYTES]) == self._hashes[(start + at) // BLOCK_BYTES]
            for at in range(0, len(data), BLOCK_BYTES)
        )


def get_checked(
    store: Store,
    key: str,
    bytes_range: tuple[int, int],
    is_right: Callable[[bytes], bool],
    damaged: Callable[[], None],
) -> bytes:
    """Return a range of an object that `is_right` accepts; else call `damaged` and raise DamagedFileError."""
    start, stop = bytes_range
    problem = f"bytes {start:,} to {stop:,} differ from the commit in {_TRIES} attempts"
    for _ in range(_TRIES):
        try:
            data = store.get(key, start, stop)
        except ObjectNotFoundError:
            problem = "is gone"
            break
        except StoreError as error:
            if error.status != 416:  # status 416: the object ends before the range
                raise
            problem = "is shorter than recorded in its commit"
            break
        if len(data) == stop - start and is_right(data):
            return data
    found = DamagedFileError(f"{store.url}/{key}", f"{problem}; run the build again to repeat its task")
    try:
        damaged()
    except StoreError as failure:
        found.add_note(f"the record of its task could not be removed: {failure}")
    raise found


_Place = tuple[str, str, str]  # URL of the store, key of the object, hash of the whole object


class _Cache:
    """An LRU cache of blocks, shared by all threads of the process."""

    def __init__(self) -> None:
        self.after_fork()
        remake_after_fork(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._blocks: OrderedDict[tuple[_Place, int], bytes] = OrderedDict()
        self._bytes = 0

    def get(self, place: _Place, number: int) -> bytes | None:
        with self._lock:
            block = self._blocks.get((place, number))
            if block is not None:
                self._blocks.move_to_end((place, number))
            return block

    def put(self, place: _Place, number: int, block: bytes) -> None:
        with self._lock:
            self._bytes += len(block) - len(self._blocks.pop((place, number), b""))
            self._blocks[place, number] = block
            while self._bytes > CACHE_BYTES:
                self._bytes -= len(self._blocks.popitem(last=False)[1])


_cache = _Cache()
