"""The shards of a remote dataset, through a cache: what `Dataset` and the loader read them by.

`load` gives a shard's raw bytes from the cache, or waits while `fetcher` brings it, which does the same for
other datasets of the process. `rows` fetches single rows by ranged requests. What belongs to one reader of
several, its plan and how long it waits, is in `shardkit.cache.reader`.

A `SharedCache` is opened once, with its threads, for all remote datasets of a process that are given it.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardkit.arrays import Bytes, Ints
from shardkit.cache.entry import EntryPart, entry_name, name_digests, sealed_size
from shardkit.cache.fetcher import Fetcher, FetchLimits, FetchTimeoutError
from shardkit.cache.folder import CacheFolder
from shardkit.cache.indexes import TRUST_SECONDS, NodeIndexes
from shardkit.cache.memory import CacheMemory
from shardkit.cache.protocol import Cache, CacheOptions
from shardkit.cache.rows import NodeRows, RowReader
from shardkit.errors import warn_user
from shardkit.limits import available_bytes
from shardkit.manifest import FileInfo, Manifest, ShardInfo
from shardkit.storage.clock import running_seconds, wait_until
from shardkit.storage.resilient import ResilientStore
from shardkit.storage.store import StorageOptions
from shardkit.storage.threads import remake_after_fork
from shardkit.units import parse_bytes

if TYPE_CHECKING:
    from shardkit.cache.reader import CacheReader, FetchPlan

__all__ = ["CachedShards", "SharedCache", "open_cache"]

DEFAULT_TIMEOUT_SECONDS = 600.0
LOOK_SECONDS = 10.0  # a sixth of the time after which entries count as left by their users
_MAX_MEMORY_BYTES = 8 << 30  # of a default cache in memory
_MEMORY_SHARE = 4  # a quarter of what is free, for all processes of the machine together


def open_cache(options: CacheOptions, *, system: Path = Path("/")) -> Cache:
    """Open the cache that `options` describe; CacheFolderError if the folder cannot be used.

    `system`: root of the files that say how much memory is free.
    """
    capacity = None if options.capacity is None else parse_bytes(options.capacity)
    memory = min(_MAX_MEMORY_BYTES, available_bytes(system) // _MEMORY_SHARE) // options.processes
    if options.folder is not None:
        return CacheFolder(options.folder, capacity, spare_bytes=memory)
    return CacheMemory(memory if capacity is None else capacity)


class SharedCache:
    """A cache and the threads that fill it, opened when the first of its remote datasets needs them."""

    def __init__(self, options: CacheOptions, limits: FetchLimits | None = None) -> None:
        self.options, self._limits = options, limits
        self._lock = threading.Lock()
        self._opened: tuple[Cache, Fetcher] | None = None

    def open(self) -> tuple[Cache, Fetcher]:
        """The same for each caller; CacheFolderError."""
        with self._lock:
            if self._opened is None:
                self._opened = open_cache(self.options), Fetcher(self.options.connections, self._limits)
            return self._opened

    def indexes(self, storage: StorageOptions | None = None) -> NodeIndexes | None:
        """The indexes of remote datasets in the cache folder; None without one."""
        folder, processes = self.options.folder, self.options.processes
        if folder is None:
            return None
        seconds = (storage or StorageOptions()).retry_seconds
        trusted = TRUST_SECONDS if processes > 1 else 0.0
        return NodeIndexes(folder, trust_seconds=trusted, wait_seconds=seconds)


class CachedShards:
    """May be shared by threads; a forked child or a pickled copy has threads and connections of its own."""

    def __init__(
        self,
        store: ResilientStore,
        manifest: Manifest,
        cache: Cache,
        fetcher: Fetcher,
        *,
        objects: Mapping[int, tuple[int, str]] | None = None,
        blocks: FileInfo | None = None,
    ) -> None:
        """`objects`: size and version of those known already; no other version of them is read.

        `blocks`: the dataset's blocks.bin, as its card states it.
        """
        self.store, self.cache, self.fetcher = store, cache, fetcher
        self.kind = manifest.format
        self.timeout_seconds = DEFAULT_TIMEOUT_SECONDS
        self._manifest = manifest
        self._objects = dict(objects or {})  # size and version of those that the index says little of
        self.rows = RowReader(
            store,
            manifest,
            fetcher.row_workers,
            cache.free_disk_bytes,
            node=NodeRows(cache, self.entry) if cache.is_shared else None,
            peer_seconds=fetcher.limits.peer_seconds,
            blocks=blocks,
        )
        self._blocks = blocks
        self._is_warned = False
        self.counts: Counter[str] = Counter()
        self.unkept: Exception | None = None
        """Why the cache could not keep what was delivered; raised by the next `load`."""
        self._fetched: set[int] = set()
        self._without_room: set[int] = set()  # shards that found no room lately
        self._look_again: dict[int, float] = {}  # when to look whether an open shard is still cached
        self.after_fork()
        remake_after_fork(self)

    def after_fork(self) -> None:
        """In a child: its parent's readers read nothing here."""
        self.readers: weakref.WeakSet[CacheReader] = weakref.WeakSet()
        """Those that have started."""

    def __len__(self) -> int:
        """Shards of the dataset."""
        return len(self._manifest.shards)

    def load(self, number: int, timeout_seconds: float | None = None, plan: FetchPlan | None = None) -> Bytes:
        """uint8[raw bytes] of a shard, read-only; waits for it if need be. `plan` is that of who asks.

        FetchTimeoutError; DamagedObjectError if the object is not what the index states; StoreError.
        """
        raw = self._load(number, timeout_seconds or self.timeout_seconds, plan)
        self.rows.prove(number, raw)
        if self.has_no_room(number):
            self.rows.see(number, raw)
        return raw

    def _load(self, number: int, timeout_seconds: float, plan: FetchPlan | None) -> Bytes:
        deadline = running_seconds() + timeout_seconds
        waited = False
        while True:
            data = self.cache.find(self.entry(number))
            if data is not None:
                self.counts["misses" if waited else "hits"] += 1
                return data
            if self.unkept is not None:
                error, self.unkept = self.unkept, None
                raise error
            job = self.fetcher.demand(self, number, plan)
            waited = True
            if not wait_until(job.done.wait, deadline):
                raise FetchTimeoutError(f"did not arrive within {timeout_seconds:g} s: {job.describe()}")
            if job.data is not None:
                self.counts["misses"] += 1
                return job.data
            if job.error is not None:
                raise job.error

    @cached_property
    def reads_single_rows(self) -> bool:
        """Whether rows can be fetched without their shards, as far as the first shard with samples shows."""
        first = next((n for n, info in enumerate(self._manifest.shards) if info.samples), None)
        return first is not None and self.rows.can_read(first)

    def warn_if_unproved(self) -> None:
        """Warn once if nothing states hashes of the shards, so that only their sizes are checked."""
        first = next((n for n, info in enumerate(self._manifest.shards) if info.samples), None)
        if self._is_warned or first is None or self._can_prove(first):
            return
        self._is_warned = True
        what, remedy = "its index states no hashes", "shardkit convert makes a dataset that is proved"
        if self.kind == "tokens":
            what, remedy = "flat token files have no hashes", "shardkit convert makes a dataset that has some"
        warn_user(
            f"{self.store.url}: rows cannot be proved, because {what}: of what arrives, only the size is "
            f"checked (unproved_bytes in stats()); {remedy}"
        )

    def _can_prove(self, number: int) -> bool:
        return self._blocks is not None or self.info(number).has_hashes

    def is_there(self, number: int) -> bool:
        """Whether a shard could be loaded without waiting."""
        return self.cache.has(self.entry(number))

    def has_no_room(self, number: int) -> bool:
        """Whether the cache had no room for a shard when it was last needed."""
        return number in self._without_room

    def progress(self) -> str:
        """What is being waited for, with how much of it has come; "" if nothing is."""
        job = self.fetcher.waited_for(self)
        return "" if job is None else job.describe()

    def note_room(self, number: int, *, found: bool) -> None:
        """Remember whether the cache had room for a shard that is read."""
        if found:
            self._without_room.discard(number)
            return
        self.counts["bypassed"] += 1
        self._without_room.add(number)

    def forget_room(self, unfit: set[int]) -> None:
        """Shards other than `unfit` have room in the plans made since."""
        self._without_room &= unfit

    def count_fetched(self, number: int) -> None:
        """Count a shard that has come."""
        size = self.stored_file(number).bytes
        if not self._can_prove(number):
            self.counts["unproved_bytes"] += size
        self.counts["fetched_bytes"] += size
        self.counts["fetched_shards"] += 1
        if number in self._fetched:
            self.counts["refetched_bytes"] += size
        self._fetched.add(number)

    def kept(self, unused: Set[int]) -> Set[int]:
        """Those of some shards that may stay open though one reader needs them no more.

        Because another reader needs them, or because they are not evicted, and need not be: where the cache
        is smaller than what is read through it, an open shard would hold the room of an evicted one.
        """
        readers = list(self.readers)
        used = unused & frozenset[int]().union(*(reader.using for reader in readers))
        plans = [reader.plan for reader in readers if reader.plan is not None]
        has_room = all(plan.fits for plan in plans) and self._total_bytes <= self.cache.capacity
        return used | set(filter(self._is_still_cached, unused - used)) if has_room else used

    def _is_still_cached(self, number: int) -> bool:
        """Whether a shard was still cached when that was last looked at, a short while ago."""
        now = time.monotonic()
        if now < self._look_again.get(number, 0.0):
            return True
        self._look_again[number] = now + LOOK_SECONDS
        name = self.known_entry(number)
        return bool(name) and self.cache.touch(name)

    def close(self) -> None:
        """Stop fetching, for all readers. Shards that are cached stay and may be used again."""
        self.fetcher.close(self)
        self.rows.close()

    def counters(self) -> dict[str, float]:
        """What the cache did, by this process."""
        counts = self.counts
        names = (
            "hits", "misses", "fetched_bytes", "fetched_shards", "refetched_bytes",
            "decompressed_bytes", "bypassed", "damaged",
        )  # fmt: skip
        contents = self.cache.contents()
        return {name: float(counts[name]) for name in names} | {
            "used_bytes": float(sum(held.bytes for held in contents.values())),
            "capacity_bytes": float(self.cache.capacity),
            "row_reads": float(self.rows.count),
            "unproved_bytes": float(counts["unproved_bytes"] + self.rows.unproved_bytes),
            **self.cache.counters(),
            "quarantined": float(max(counts["damaged"], self.cache.counters()["quarantined"])),
        }

    def info(self, number: int) -> ShardInfo:
        return self._manifest.shards[number]

    def stored_file(self, number: int) -> FileInfo:
        """The object, with its size even where the index does not state one."""
        file = self.info(number).stored
        return file if file.bytes >= 0 else replace(file, bytes=self._object(number)[0])

    def entry(self, number: int) -> str:
        """The name of a shard's entry in the cache; asks the store if the index does not state enough."""
        name = self.known_entry(number)
        if not name:
            self._object(number)
            name = self.known_entry(number)
        assert name
        return name

    def version(self, number: int) -> str | None:
        known = self._objects.get(number)
        return None if known is None else known[1]

    def where(self, number: int) -> str:
        """The object's URL."""
        return f"{self.store.url}/{self.info(number).stored.basename}"

    def __reduce__(self) -> tuple[object, ...]:
        remade = partial(CachedShards, objects=self._objects, blocks=self._blocks)
        return remade, (self.store, self._manifest, self.cache, self.fetcher)

    @cached_property
    def _total_bytes(self) -> int:
        """Of all entries, as far as the index states them."""
        return int(sealed_size(self._manifest.raw_bytes.clip(0)).sum())

    def known_entry(self, number: int) -> str:
        """The name of a shard's entry as far as index and store have told it; "" if they have not."""
        known = self._objects.get(number)
        return entry_name(self.info(number), self.store.url, known and known[1]) or ""

    def known_size(self, number: int) -> int:
        """Bytes of a shard's entry, as far as index and store have stated them."""
        raw_bytes = self.info(number).raw.bytes
        if raw_bytes < 0 and number in self._objects:
            raw_bytes = self._objects[number][0]
        return sealed_size(max(raw_bytes, 0))

    def known_sizes(self) -> Ints:
        """int64[shards]: `known_size` of each."""
        sizes = sealed_size(self._manifest.raw_bytes.clip(0))
        for number in self._objects:
            sizes[number] = self.known_size(number)
        return sizes

    def names(self) -> EntryPart:
        """For `EntryNames`."""
        shards = self._manifest.shards
        return len(shards), self.known_entry, name_digests(shards)

    def known_objects(self) -> list[int]:
        """The shards whose objects the store was asked for, or that were known from the start."""
        return list(self._objects)

    def _object(self, number: int) -> tuple[int, str]:
        """(size, version) of a shard's object, asked for once."""
        if number not in self._objects:
            found = self.store.head(self.info(number).stored.basename)
            # Of threads that ask at once, the first is right: all are to fetch one version.
            self._objects.setdefault(number, (found.bytes, found.version))
            self._teach(number)
        return self._objects[number]

    def _teach(self, number: int) -> None:
        """Give the plans what only the object states; they would take the entry for somebody else's."""
        if self.known_entry(number):
            for plan in self.fetcher.plans():
                if self in plan.parts:
                    plan.learn(self, number)
