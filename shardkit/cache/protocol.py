"""The protocols of a cache of shards and of a dataset that is fetched into it, and the options of a cache.

A cache holds the raw bytes of shards, as entries by name. A `CacheFolder` on a local disk is shared by all
processes of a machine; a `CacheMemory` belongs to one process. A `Slot` is the space for one entry while it
is filled; a `Lease` prevents two threads or processes from filling the same entry. Methods of a cache in a
folder raise CacheFolderError if the folder cannot be used. A `Fetchable` is the interface of a remote dataset
that the planner and the fetcher use.
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
    """The cache folder cannot be used; the message names the folder and the reason."""


@dataclass(frozen=True, slots=True)
class Held:
    """Size and last use of a cache entry, or of the space reserved for an entry that is being filled."""

    bytes: int
    used_seconds_ago: float
    filling: bool = False


CACHE_COUNTERS = ("evictions", "evicted_bytes", "quarantined", "disk_full", "locked_out")
"""Names of a cache's counters. The last two count entries that a cache folder could not store: because the
disk was full, or because another process held the folder's lock too long."""

Contents = Mapping[str, Held]
"""Entries of a cache by name, least recently used first, by the last uses that this process knows."""


class Slot(Protocol):
    """Reserved space for one entry. The caller fills `data`, then calls `commit` or `discard`."""

    @property
    def data(self) -> Bytes:
        """The entry's bytes, writable uint8[raw bytes]; the contents are undefined until they are written."""

    def write(self, at: int, piece: memoryview) -> None:
        """Write `piece` at byte offset `at`. Threads may write different parts at the same time."""

    def commit(self, *, durable: bool = True) -> None:
        """Turn the slot into a complete entry; the caller must not write `data` afterwards.

        Without `durable`, the entry is not synced: a power loss may damage it; its next reader detects that.
        """

    def discard(self, *, damaged: bool = False) -> None:
        """Release the space without making an entry; a cache folder keeps `damaged` data for inspection."""


class Lease(Protocol):
    """The exclusive right to fetch an entry; others wait for the lease instead of fetching it too."""

    def release(self) -> None: ...


class Cache(Protocol):
    """A cache of entries by name (see `shardkit.cache.folder`). Threads may share one."""

    @property
    def is_shared(self) -> bool:
        """Whether other processes of the machine see the same entries."""

    @property
    def capacity(self) -> int:
        """Maximum size of all entries together, in bytes."""

    def find(self, name: str) -> Bytes | None:
        """Return an entry's bytes, verified against its name; None if it is missing or damaged."""

    def has(self, name: str) -> bool:
        """Return whether the entry exists, without checking its bytes."""

    def touch(self, name: str) -> bool:
        """Mark an entry as used now, because its bytes are still being read; return whether it exists."""

    def contents(self) -> Contents:
        """Return all entries, including entries that are being filled."""

    def reserve(self, name: str, raw_bytes: int, victims: Callable[[Contents], Iterable[str]]) -> Slot | None:
        """Reserve space for an entry of `raw_bytes` bytes, evicting other entries as needed.

        `victims` returns the names of entries that may be evicted, in order. Returns None if these do not
        free enough space.
        """

    def lease(self, name: str, timeout_seconds: float = 0.0) -> Lease | None:
        """Acquire the lease on an entry; return None if another holder still has it after the timeout."""

    def remove(self, name: str) -> None:
        """Remove an entry, if it exists."""

    def counters(self) -> dict[str, int]:
        """Return the counters that `CACHE_COUNTERS` names."""

    def free_disk_bytes(self) -> int | None:
        """Return the free bytes of the disk that holds the entries; None for memory."""


class Fetchable(Protocol):
    """A remote dataset whose shards can be planned and fetched. Shards are numbered from 0."""

    store: ResilientStore
    cache: Cache
    counts: Counter[str]
    """Counters of this dataset; the fetcher increments "damaged"."""
    cache_error: Exception | None
    """The error that kept the cache from storing a shard after its delivery; the next load raises it."""

    def names(self) -> EntryPart:
        """Return the number of shards, a function from shard number to entry name, and `name_digests`."""

    def known_sizes(self) -> Ints:
        """Return the size of each entry in bytes, int64[shards]; an unknown shard size counts as 0."""

    def known_objects(self) -> Iterable[tuple[int, str, int]]:
        """Return (number, entry name, entry bytes) of the shards looked up in the store."""

    def entry(self, number: int) -> str:
        """Return the name of a shard's entry; asks the store for a version if the index has no hash."""

    def stored_file(self, number: int) -> FileInfo:
        """Return name, size and hashes of a shard's object; asks the store for a size not in the index."""

    def version(self, number: int) -> str | None:
        """Return the version of a shard's object that must be read; None if any version may be read."""

    def is_compressed(self, number: int) -> bool:
        """Return whether a shard's object is compressed; its entry holds the decompressed bytes."""

    def accept(self, number: int, stored: Bytes, version: str | None) -> Bytes:
        """Verify a fetched object's bytes, count them, and return the shard's raw bytes.

        `version`: the object's version; None if nothing was fetched. Raises DamagedObjectError if the bytes
        do not match the index.
        """

    def note_room(self, number: int, *, found: bool) -> None:
        """Record whether the cache had room for a shard when it was fetched."""

    def forget_room(self, unfit: Set[int]) -> None:
        """Forget that the cache had no room for shards, except for `unfit`, which still do not fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheOptions:
    """The location and limits of a cache. Plain data: may be pickled and compared."""

    folder: str | os.PathLike[str] | None = None
    """Folder on a local disk, shared by all processes of the machine; None: each process uses its memory."""
    capacity: int | str | None = None
    """Size in bytes or as "500GB"; default: the free disk minus a reserve, or a share of free memory."""
    connections: int = 16
    """Maximum number of shards, or ranges of shards, that a process fetches in parallel."""
    processes: int = 1
    """Number of processes on this machine, each of which gets an equal part of the default memory."""

    def __post_init__(self) -> None:
        if self.folder is not None:
            object.__setattr__(self, "folder", local_path(self.folder, "cache_dir"))
        if self.capacity is not None:
            parse_bytes(self.capacity)
        if self.connections < 1 or self.processes < 1:
            raise ValueError("connections and processes must be at least 1")
