"""A cache in this process's memory, for remote datasets without a cache folder."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from shardkit.arrays import Bytes
from shardkit.cache.protocol import CACHE_COUNTERS, Contents, Held
from shardkit.storage.threads import remake_after_fork


@dataclass(slots=True)
class _Entry:
    data: Bytes
    used: float
    filling: bool


class CacheMemory:
    """A cache of entries in a dict. A forked child or a pickled copy starts with an empty cache."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.after_fork()
        remake_after_fork(self)

    @property
    def is_shared(self) -> bool:
        return False

    @property
    def capacity(self) -> int:
        return self._capacity

    def find(self, name: str) -> Bytes | None:
        with self._lock:
            entry = self._entries.get(name)
            if entry is None or entry.filling:
                return None
            entry.used = time.monotonic()
            self._entries[name] = self._entries.pop(name)  # moves the entry to the end: last used comes last
            return entry.data

    def has(self, name: str) -> bool:
        entry = self._entries.get(name)
        return entry is not None and not entry.filling

    def touch(self, name: str) -> bool:
        return self.find(name) is not None

    def contents(self) -> Contents:
        with self._lock:
            return self._contents()

    def reserve(
        self, name: str, raw_bytes: int, victims: Callable[[Contents], Iterable[str]]
    ) -> MemorySlot | None:
        with self._lock:
            if raw_bytes > self._capacity or name in self._entries:
                return None
            used = sum(len(entry.data) for entry in self._entries.values())
            if used + raw_bytes > self._capacity:
                used = self._evict(victims(self._contents()), used, raw_bytes)
            if used + raw_bytes > self._capacity:
                return None
            entry = _Entry(np.empty(raw_bytes, dtype=np.uint8), time.monotonic(), filling=True)
            self._entries[name] = entry
        return MemorySlot(self, name, entry)

    def lease(self, name: str, timeout_seconds: float = 0.0) -> threading.Lock | None:
        with self._lock:
            lock = self._leased.setdefault(name, threading.Lock())
        return lock if lock.acquire(timeout=timeout_seconds) else None

    def remove(self, name: str) -> None:
        with self._lock:
            entry = self._entries.get(name)
            if entry is not None and not entry.filling:
                del self._entries[name]

    def drop_unused(self, seconds: float) -> None:
        """Remove the entries that were not used in the last `seconds`."""
        with self._lock:
            limit = time.monotonic() - seconds
            unused = [name for name, entry in self._entries.items() if entry.used < limit]
            for name in unused:
                if not self._entries[name].filling:
                    del self._entries[name]

    def counters(self) -> dict[str, int]:
        return {key: self._counters[key] for key in CACHE_COUNTERS}

    def free_disk_bytes(self) -> int | None:
        return None

    def __reduce__(self) -> tuple[object, ...]:
        return CacheMemory, (self._capacity,)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._leased: dict[str, threading.Lock] = {}
        self._counters: Counter[str] = Counter()

    def finish(self, name: str, entry: _Entry, *, keep: bool) -> None:
        """End the filling of an entry: make it visible to readers if `keep`, else free its space."""
        with self._lock:
            if keep:
                entry.data.flags.writeable = False
                entry.filling = False
            elif entry.filling and self._entries.get(name) is entry:
                del self._entries[name]

    def _contents(self) -> Contents:
        now = time.monotonic()
        return {n: Held(len(e.data), now - e.used, e.filling) for n, e in self._entries.items()}

    def _evict(self, victims: Iterable[str], used: int, needed: int) -> int:
        """Evict `victims` until `needed` bytes are free; return the bytes then used. Needs the lock."""
        for victim in victims:
            entry = self._entries.get(victim)
            if entry is not None and not entry.filling:
                del self._entries[victim]
                used -= len(entry.data)
                self._counters["evictions"] += 1
                self._counters["evicted_bytes"] += len(entry.data)
            if used + needed <= self._capacity:
                break
        return used


class MemorySlot:
    """Reserved space in a `CacheMemory`."""

    def __init__(self, cache: CacheMemory, name: str, entry: _Entry) -> None:
        self._cache, self._name, self._entry = cache, name, entry

    @property
    def data(self) -> Bytes:
        return self._entry.data

    def write(self, at: int, piece: memoryview) -> None:
        self._entry.data.data[at : at + len(piece)] = piece

    def commit(self, *, durable: bool = True) -> None:
        self._cache.finish(self._name, self._entry, keep=True)

    def discard(self, *, damaged: bool = False) -> None:
        self._cache.finish(self._name, self._entry, keep=False)
