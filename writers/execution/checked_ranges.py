"""Ranges of a committed file in a store, each block compared with the hash in its commit.

Neither HTTP nor a client checks a range: a flipped byte would go into the dataset in silence. Blocks that
were read alone are kept for a while, up to `CACHE_BYTES` in a process: a task that reads a little of many
files comes back to their ends and their directories.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

import xxhash

from shardkit.storage.forks import remake_after_fork
from shardkit.storage.store import ObjectNotFoundError, Store, StoreError
from shardkit.writers.execution.task import Output
from shardkit.writers.execution.work import BLOCK_BYTES, block_hashes

__all__ = ["CACHE_BYTES", "CheckedRanges", "DamagedFileError"]

CACHE_BYTES = 16 << 20
_KEPT_AT_ONCE = 2  # blocks; longer reads go straight through a file and do not come back
_TRIES = 3  # damage on the way passes, damage in the store stays


class DamagedFileError(StoreError):
    """A file of a finished task is no longer there, or no longer what was committed."""


class CheckedRanges:
    """The `get` of a store, for one file; `damaged` is called before a DamagedFileError."""

    def __init__(self, store: Store, output: Output, damaged: Callable[[], None] = lambda: None) -> None:
        self._store, self._output, self._damaged = store, output, damaged
        self._hashes = block_hashes(output)  # empty: one block, whose hash is the file's

    def get(self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> bytes:
        """Bytes from `start` to `stop`, or up to the end of the block that `stop` lies in."""
        size = self._output.bytes
        stop = size if stop is None else min(stop, size)
        if start >= stop:
            return b""
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        place = self._store.url, key, self._output.xxh3_128
        if (kept := _cache.get(place, first)) is not None:  # the rest is asked for next
            return kept[start - first * BLOCK_BYTES :]
        data = self._fetch(key, first * BLOCK_BYTES, min(last * BLOCK_BYTES, size))
        if last - first <= _KEPT_AT_ONCE:
            for number in range(first, last):
                at = (number - first) * BLOCK_BYTES
                _cache.put(place, number, data[at : at + BLOCK_BYTES])
        return data[start - first * BLOCK_BYTES :]

    def _fetch(self, key: str, start: int, stop: int) -> bytes:
        where = f"{self._store.url}/{key}"
        problem = f"bytes {start:,} to {stop:,} are not those that were committed, {_TRIES} times"
        for _ in range(_TRIES):
            try:
                data = self._store.get(key, start, stop)
            except ObjectNotFoundError:
                problem = "is gone"
                break
            except StoreError as error:
                if error.status != 416:  # shorter than committed
                    raise
                problem = "is shorter than what was committed"
                break
            if len(data) == stop - start and self._is_right(data, start):
                return data
        found = DamagedFileError(where, f"{problem}; the next run makes its task again")
        try:
            self._damaged()
        except StoreError as failure:
            found.add_note(f"the task could not be removed: {failure}")
        raise found

    def _is_right(self, data: bytes, start: int) -> bool:
        if not self._hashes:
            return xxhash.xxh3_128_hexdigest(data) == self._output.xxh3_128
        view = memoryview(data)
        return all(
            xxhash.xxh3_64_digest(view[at : at + BLOCK_BYTES]) == self._hashes[(start + at) // BLOCK_BYTES]
            for at in range(0, len(data), BLOCK_BYTES)
        )


_Place = tuple[str, str, str]  # store, key, hash of the whole


class _Cache:
    """The blocks that were used last."""

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
