"""What a cache of shards can do: `CacheFolder` on a disk, for all processes; `CacheMemory` in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Cache", "Contents", "Held", "Lease", "Slot"]

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Held:
    """An entry, or room for one that is being filled."""

    bytes: int
    used_seconds_ago: float
    filling: bool = False


Contents = Mapping[str, Held]
"""Entries by name."""


class Slot(Protocol):
    """Room for one entry: fill `data`, then `commit` or `discard`."""

    @property
    def data(self) -> Bytes:
        """uint8[raw bytes], writable: what has been filled so far."""

    def write(self, at: int, piece: memoryview) -> None:
        """Fill some of it; threads may fill different parts at once."""

    def commit(self) -> Bytes:
        """Make it an entry, whole and durable; returns its bytes, read-only, readable for as long as held."""

    def discard(self, *, damaged: bool = False) -> None:
        """Give the room back; what is `damaged` is kept aside for inspection, if there is a place for it."""


class Lease(Protocol):
    """The right to fetch an entry while others need not."""

    def release(self) -> None: ...


class Cache(Protocol):
    """Entries by name (see `shardkit.cache.entry`). Threads may share one."""

    @property
    def is_shared(self) -> bool:
        """Whether other processes of the machine see the same entries."""

    @property
    def capacity(self) -> int:
        """Bytes that entries may take together."""

    def find(self, name: str) -> Bytes | None:
        """The entry's bytes, proved to be what its name says; None if there is none, or it was damaged."""

    def has(self, name: str) -> bool:
        """Whether there is such an entry; its bytes are not looked at."""

    def touch(self, name: str) -> bool:
        """Whether there is such an entry, which counts as used now: its bytes are still being read."""

    def contents(self) -> Contents:
        """All entries, and those being filled."""

    def reserve(self, name: str, raw_bytes: int, victims: Callable[[Contents], Iterable[str]]) -> Slot | None:
        """Room for an entry; the entries that `victims` names are evicted in that order, as far as needed.

        None if there is no room all the same.
        """

    def lease(self, name: str, timeout_seconds: float = 0.0) -> Lease | None:
        """The lease on an entry; None if another process or thread has it for all of `timeout_seconds`."""

    def counters(self) -> dict[str, int]:
        """evictions, evicted_bytes, quarantined."""

    def free_disk_bytes(self) -> int | None:
        """Free bytes where entries lie, None for memory."""
