"""The contracts of a cache of shards and of what is fetched into it, and the options that describe a cache.

A cache holds the raw bytes of shards, as entries by name. A `CacheFolder` on a local disk is shared by all
processes of a machine; a `CacheMemory` belongs to one process. A `Slot` is room for one entry while it is
filled; a `Lease` keeps two threads or processes from filling the same one. Methods of a cache in a folder
raise CacheFolderError if the folder cannot be used. A `Fetchable` is a remote dataset as planner and fetcher
see it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Protocol

from shardkit.arrays import Bytes, Ints
from shardkit.cache.entry import EntryPart
from shardkit.errors import ShardkitError
from shardkit.files import local_path
from shardkit.manifest import FileInfo
from shardkit.storage.resilient import ResilientStore
from shardkit.units import parse_bytes


class CacheFolderError(ShardkitError):
    """The cache folder cannot be used; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Held:
    """An entry, or room for one that is being filled."""

    bytes: int
    used_seconds_ago: float
    filling: bool = False


CACHE_COUNTERS = ("evictions", "evicted_bytes", "quarantined", "disk_full", "locked_out")
"""Of the last two: how often a folder could take nothing, as its disk was full or its lock not given back."""

Contents = Mapping[str, Held]
"""Entries by name, the least recently used first, as far as the cache knows."""


class Slot(Protocol):
    """Room for one entry: fill `data`, then `commit` or `discard`."""

    @property
    def data(self) -> Bytes:
        """uint8[raw bytes], writable: what has been filled so far."""

    def write(self, at: int, piece: memoryview) -> None:
        """Fill some of it; threads may fill different parts at once."""

    def commit(self, *, durable: bool = True) -> None:
        """Make it an entry, whole and durable; `data` is not to be written any more.

        Not `durable`: a loss of power may damage it, which its next reader notices.
        """

    def discard(self, *, damaged: bool = False) -> None:
        """Give the room back; what is `damaged` is kept aside for inspection, if there is a place for it."""


class Lease(Protocol):
    """The right to fetch an entry while others need not."""

    def release(self) -> None: ...


class Cache(Protocol):
    """Entries by name (see `shardkit.cache.folder`). Threads may share one."""

    @property
    def is_shared(self) -> bool:
        """Whether other processes of the machine see the same entries."""

    @property
    def capacity(self) -> int:
        """Bytes that entries may take together."""

    def find(self, name: str) -> Bytes | None:
        """Return an entry's bytes, proved to be what its name says; None if it is missing or damaged."""

    def has(self, name: str) -> bool:
        """Whether there is such an entry; its bytes are not looked at."""

    def touch(self, name: str) -> bool:
        """Whether there is such an entry, which counts as used now: its bytes are still being read."""

    def contents(self) -> Contents:
        """Return all entries, and those being filled."""

    def reserve(self, name: str, raw_bytes: int, victims: Callable[[Contents], Iterable[str]]) -> Slot | None:
        """Reserve room for an entry; those that `victims` names are evicted in that order, as far as needed.

        None if there is no room all the same.
        """

    def lease(self, name: str, timeout_seconds: float = 0.0) -> Lease | None:
        """Take the lease on an entry; None if somebody else has it for all of `timeout_seconds`."""

    def remove(self, name: str) -> None:
        """Remove an entry, if it is there."""

    def counters(self) -> dict[str, int]:
        """Return the counts by name of `CACHE_COUNTERS`."""

    def free_disk_bytes(self) -> int | None:
        """Return the free bytes where entries lie, None for memory."""


class Fetchable(Protocol):
    """A remote dataset whose shards are planned for and fetched. Shards are numbered from 0."""

    store: ResilientStore
    cache: Cache
    counts: Counter[str]
    """Counters of this dataset; the fetcher counts "damaged"."""
    cache_error: Exception | None
    """Why the cache could not keep a shard that was delivered; the next load raises it."""

    def names(self) -> EntryPart:
        """Return what `EntryNames` needs of this dataset."""

    def known_sizes(self) -> Ints:
        """Return int64[shards]: bytes of each entry, as far as index and store have stated them."""

    def known_objects(self) -> Iterable[tuple[int, str, int]]:
        """Return (number, entry name, entry bytes) of the shards whose objects the store was asked for."""

    def entry(self, number: int) -> str:
        """Return the name of a shard's entry; asks the store if the index does not state enough."""

    def stored_file(self, number: int) -> FileInfo:
        """Return the shard's object, with its size even where the index does not state one."""

    def version(self, number: int) -> str | None:
        """Return the version of the object that is to be read; None: any."""

    def is_compressed(self, number: int) -> bool:
        """Whether the object must be decompressed to get the entry."""

    def accept(self, number: int, stored: Bytes, version: str | None) -> Bytes:
        """Prove an object that came, count it, and return the shard's raw bytes; DamagedObjectError.

        `version`: of the object; None if none of it was fetched.
        """

    def note_room(self, number: int, *, found: bool) -> None:
        """Remember whether the cache had room for a shard that is read."""

    def forget_room(self, unfit: Set[int]) -> None:
        """Forget which shards found no room, except for `unfit`: plans have room for the others now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheOptions:
    """The place of a cache and the fetches at a time. Plain data: may be pickled and compared."""

    folder: str | os.PathLike[str] | None = None
    """On a local disk, shared by all processes of the machine; None: each process keeps shards in memory."""
    capacity: int | str | None = None
    """In bytes or as "500GB"; default: the folder's free disk but a reserve, or a share of free memory."""
    connections: int = 16
    """Ranges and shards that a process fetches at a time."""
    processes: int = 1
    """Processes of this machine that divide the default memory among them."""

    def __post_init__(self) -> None:
        if self.folder is not None:
            object.__setattr__(self, "folder", local_path(self.folder, "cache_dir"))
        if self.capacity is not None:
            parse_bytes(self.capacity)
        if self.connections < 1 or self.processes < 1:
            raise ValueError("connections and processes must be at least 1")
