"""Ranges of a committed file in a store, each block compared with the hash in its commit.

Neither HTTP nor a client checks a range: a flipped byte would go into the dataset in silence.
"""

from __future__ import annotations

import xxhash

from shardkit.storage.errors import StoreError
from shardkit.storage.store import Store
from shardkit.writers.execution.task import Output
from shardkit.writers.execution.work import BLOCK_BYTES, block_hashes

__all__ = ["CheckedRanges"]

_TRIES = 3  # damage on the way passes, damage in the store stays


class CheckedRanges:
    """The `get` of a store, for one file. More is read than asked for: whole blocks of `BLOCK_BYTES`."""

    def __init__(self, store: Store, output: Output) -> None:
        self._store, self._output = store, output
        self._hashes = block_hashes(output)

    def get(self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> bytes:
        """Bytes [start, stop); StoreError if they are not those that were committed."""
        stop = self._output.bytes if stop is None else min(stop, self._output.bytes)
        first = start // BLOCK_BYTES * BLOCK_BYTES if self._hashes else 0
        last = min(-(-stop // BLOCK_BYTES) * BLOCK_BYTES, self._output.bytes)
        for _ in range(_TRIES):
            data = self._store.get(key, first, last) if last > first else b""
            if len(data) == last - first and self._is_right(data, first):
                return data[start - first : stop - first]
        problem = f"bytes {first:,} to {last:,} are not those that were committed, {_TRIES} times"
        raise StoreError(f"{self._store.url}/{key}", f"{problem}; remove the object and build again")

    def _is_right(self, data: bytes, first: int) -> bool:
        if not self._hashes:
            return xxhash.xxh3_128_hexdigest(data) == self._output.xxh3_128
        view = memoryview(data)
        return all(
            xxhash.xxh3_64_digest(view[at : at + BLOCK_BYTES]) == self._hashes[(first + at) // BLOCK_BYTES]
            for at in range(0, len(data), BLOCK_BYTES)
        )
