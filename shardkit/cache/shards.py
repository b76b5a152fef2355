"""The shards of a remote dataset, read through a cache by `Dataset` and the loaders.

`load` returns a shard's raw bytes from the cache, or waits until `fetcher`, which all datasets of the process
share, has fetched it. `rows` reads single rows by ranged requests. A `CacheReader` is one of several readers
of a dataset, with its own plan, open shards and timeout.

A `SharedCache` opens one cache and its threads for all remote datasets that are opened with it.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

from shardkit.arrays import Bytes, Ints
from shardkit.cache.download import FetchTimeoutError, unpack
from shardkit.cache.entry import EntryPart, entry_name, name_digests, sealed_size
from shardkit.cache.fetcher import Fetcher, FetchLimits
from shardkit.cache.folder import CacheFolder
from shardkit.cache.indexes import TRUST_SECONDS, NodeIndexes
from shardkit.cache.memory import CacheMemory
from shardkit.cache.planner import FetchPlan, LoopPosition
from shardkit.cache.protocol import Cache, CacheOptions
from shardkit.cache.rows import NodeRows, RowReader
from shardkit.errors import warn_user
from shardkit.limits import available_bytes
from shardkit.manifest import FileInfo, Manifest, ShardInfo
from shardkit.storage.resilient import ResilientStore
from shardkit.storage.running_clock import running_seconds, wait_until
from shardkit.storage.store import StorageOptions
from shardkit.storage.threads import remake_after_fork
from shardkit.units import parse_bytes

DEFAULT_TIMEOUT_SECONDS = 600.0
LOOK_SECONDS = 10.0  # how often to check that an open shard is cached; 1/6 of planner.IDLE_SECONDS
_MAX_MEMORY_BYTES = 8 << 30  # maximum size of a default cache in memory
_IN_PLACE = {
    "tokens": "flat token files",
    "row_files": "row files",
    "text": "row files",
    "image_files": "image files",
}
"""What data of each format without an index is called in messages."""
_MEMORY_SHARE = 4  # default: 1/4 of the free memory, for all processes of the machine together


def open_cache(options: CacheOptions, *, system: Path = Path("/")) -> Cache:
    """Open the cache that `options` describe; raises CacheFolderError if the folder cannot be used.

    `system`: root of the system files from which the free memory is read.
    """
    capacity = None if options.capacity is None else parse_bytes(options.capacity)
    memory = min(_MAX_MEMORY_BYTES, available_bytes(system) // _MEMORY_SHARE) // options.processes
    if options.folder is not None:
        return CacheFolder(options.folder, capacity, spare_bytes=memory)
    return CacheMemory(memory if capacity is None else capacity)


class SharedCache:
    """A cache and the threads that fill it, opened when the first remote dataset needs them."""

    def __init__(self, options: CacheOptions, limits: FetchLimits | None = None) -> None:
        self.options, self._limits = options, limits
        self._lock = threading.Lock()
        self._opened: tuple[Cache, Fetcher] | None = None

    def open(self) -> tuple[Cache, Fetcher]:
        """Return the cache and its fetcher, the same for each caller; may raise CacheFolderError."""
        with self._lock:
            if self._opened is None:
                self._opened = open_cache(self.options), Fetcher(self.options.connections, self._limits)
            return self._opened

    def indexes(self, storage: StorageOptions | None = None) -> NodeIndexes | None:
        """Return the indexes in the cache folder; None if the cache has no folder."""
        folder, processes = self.options.folder, self.options.processes
        if folder is None:
            return None
        seconds = (storage or StorageOptions()).retry_seconds
        trusted = TRUST_SECONDS if processes > 1 else 0.0
        return NodeIndexes(folder, trust_seconds=trusted, wait_seconds=seconds)


class CachedShards:
    """A remote dataset's shards. Threads may share them; a forked child or a pickled copy has its own."""

    def __init__(
        self,
        store: ResilientStore,
        manifest: Manifest,
        cache: Cache,
        fetcher: Fetcher,
        *,
        objects: Mapping[int, tuple[int, str]] | None = None,
        blocks: FileInfo | None = None,
        unpack_rows: Callable[[int, Bytes, str], Bytes] | None = None,
    ) -> None:
        """Read the shards in `manifest` through `cache`.

        `objects`: size and version of objects, by shard; no other version of these is read. `blocks`: the
        card's entry for the dataset's blocks.bin. `unpack_rows` makes the raw bytes of a shard from its
        number, its stored bytes and its URL; None: they are decompressed.
        """
        self._unpack_rows = unpack_rows
        self.store, self.cache, self.fetcher = store, cache, fetcher
        self.kind = manifest.format
        self.timeout_seconds = DEFAULT_TIMEOUT_SECONDS
        self._manifest = manifest
        self._objects = dict(objects or {})  # size and version of objects for which the index has no hash
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
        self.cache_error: Exception | None = None
        """The error that kept the cache from storing a delivered shard; the next `load` raises it."""
        self._fetched: set[int] = set()
        self._without_room: set[int] = set()  # shards for which the cache had no room when last needed
        self._look_again: dict[int, float] = {}  # times at which to check if an open shard is still cached
        self.after_fork()
        remake_after_fork(self)

    def after_fork(self) -> None:
        """Reset in a forked child, in which its parent's readers do not run."""
        self.readers: weakref.WeakSet[CacheReader] = weakref.WeakSet()
        """Readers that have started a run."""

    def __len__(self) -> int:
        """Return the number of shards."""
        return len(self._manifest.shards)

    def load(self, number: int, timeout_seconds: float | None = None, plan: FetchPlan | None = None) -> Bytes:
        """Return the raw bytes of a shard, read-only uint8; waits until it is fetched if it is not cached.

        `plan`: the plan of the reader, which chooses what to evict. Raises FetchTimeoutError, StoreError, or
        DamagedObjectError if the object does not match the index.
        """
        raw = self._load(number, timeout_seconds or self.timeout_seconds, plan)
        self.rows.verify_rows(number, raw)
        if self.has_no_room(number):
            self.rows.remember_rows(number, raw)
        return raw

    def _load(self, number: int, timeout_seconds: float, plan: FetchPlan | None) -> Bytes:
        deadline = running_seconds() + timeout_seconds
        waited = False
        while True:
            data = self.cache.find(self.entry(number))
            if data is not None:
                self.counts["misses" if waited else "hits"] += 1
                return data
            if self.cache_error is not None:
                error, self.cache_error = self.cache_error, None
                raise error
            job = self.fetcher.demand(self, number, plan)
            waited = True
            if not wait_until(job.done.wait, deadline):
                raise FetchTimeoutError(
                    f"a shard did not arrive within {timeout_seconds:g} s: {job.describe()}"
                )
            if job.data is not None:
                self.counts["misses"] += 1
                return job.data
            if job.error is not None:
                raise job.error

    @cached_property
    def reads_single_rows(self) -> bool:
        """Whether rows can be read without their whole shards, judged by the first shard with samples."""
        first = next((n for n, info in enumerate(self._manifest.shards) if info.samples), None)
        return first is not None and self.rows.can_read(first)

    def warn_if_unproved(self) -> None:
        """Warn once if the shards have no hashes, so that only their sizes can be checked."""
        first = next((n for n, info in enumerate(self._manifest.shards) if info.samples), None)
        if self._is_warned or first is None or self._can_prove(first):
            return
        self._is_warned = True
        what, remedy = "its index has no hashes", "shardkit convert makes a dataset that has some"
        if self.kind in _IN_PLACE:
            files = _IN_PLACE[self.kind]
            what = f"{files} have no hashes"
        warn_user(
            f"{self.store.url}: rows cannot be verified, because {what}: only the size of fetched data is "
            f"checked (unproved_bytes in stats()); {remedy}"
        )

    def _can_prove(self, number: int) -> bool:
        return self._blocks is not None or self.info(number).has_hashes

    def is_there(self, number: int) -> bool:
        """Return whether a shard is cached, so that it can be loaded without waiting."""
        return self.cache.has(self.entry(number))

    def has_no_room(self, number: int) -> bool:
        """Return whether the cache had no room for a shard when it was last needed."""
        return number in self._without_room

    def progress(self) -> str:
        """Describe the shard that a reader waits for, and how much of it has arrived; "" if there is none."""
        job = self.fetcher.waited_for(self)
        return "" if job is None else job.describe()

    def note_room(self, number: int, *, found: bool) -> None:
        """Record whether the cache had room for a shard when it was fetched."""
        if found:
            self._without_room.discard(number)
            return
        self.counts["bypassed"] += 1
        self._without_room.add(number)

    def forget_room(self, unfit: Set[int]) -> None:
        """Forget that the cache had no room for shards, except for `unfit`, which still do not fit."""
        self._without_room &= unfit

    def accept(self, number: int, stored: Bytes, version: str | None) -> Bytes:
        """Verify a fetched object's bytes, count them, and return the shard's raw bytes.

        `version`: the object's version; None if nothing was fetched. Raises DamagedObjectError if the bytes
        do not match the index.
        """
        self.rows.check(number, stored)
        if version is not None:
            self.rows.trust(number, version)
        self._count_fetched(number)
        if not self.is_compressed(number):
            return stored
        where = self.where(number)
        if self._unpack_rows is None:
            raw = unpack(self.kind, self.info(number), stored, where)
        else:
            raw = self._unpack_rows(number, stored, where)
        self.counts["decompressed_bytes"] += len(raw)
        return raw

    def _count_fetched(self, number: int) -> None:
        size = self.stored_file(number).bytes
        if not self._can_prove(number):
            self.counts["unproved_bytes"] += size
        self.counts["fetched_bytes"] += size
        self.counts["fetched_shards"] += 1
        if number in self._fetched:
            self.counts["refetched_bytes"] += size
        self._fetched.add(number)

    def still_open(self, unused: Set[int]) -> Set[int]:
        """Return which of the `unused` shards, which one reader no longer needs, to keep open.

        Shards that other readers need stay open. Shards that are still cached stay open, too, if the cache
        has room for all shards; in a smaller cache, an open shard would occupy its space after its eviction.
        """
        readers = list(self.readers)
        used = unused & frozenset[int]().union(*(reader.using for reader in readers))
        plans = [reader.plan for reader in readers if reader.plan is not None]
        has_room = all(plan.fits for plan in plans) and self._total_bytes <= self.cache.capacity
        return used | set(filter(self._is_still_cached, unused - used)) if has_room else used

    def _is_still_cached(self, number: int) -> bool:
        """Return whether a shard is cached; checks at most every LOOK_SECONDS and assumes so in between."""
        now = time.monotonic()
        if now < self._look_again.get(number, 0.0):
            return True
        self._look_again[number] = now + LOOK_SECONDS
        name = self.known_entry(number)
        return bool(name) and self.cache.touch(name)

    def close(self) -> None:
        """Stop fetching, for all readers. Cached shards stay and can be used again."""
        self.fetcher.close(self)
        self.rows.close()

    def counters(self) -> dict[str, float]:
        """Return the cache statistics of this process, by name."""
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

    def is_compressed(self, number: int) -> bool:
        """Return whether a shard's object is compressed; its entry holds the decompressed bytes."""
        return self.info(number).compression is not None

    def stored_file(self, number: int) -> FileInfo:
        """Return name, size and hashes of a shard's object; asks the store for a size not in the index."""
        file = self.info(number).stored
        return file if file.bytes >= 0 else replace(file, bytes=self._object(number)[0])

    def entry(self, number: int) -> str:
        """Return the name of a shard's entry; asks the store for a version if the index has no hash."""
        name = self.known_entry(number)
        if not name:
            self._object(number)
            name = self.known_entry(number)
        assert name
        return name

    def version(self, number: int) -> str | None:
        """Return the version of a shard's object that must be read; None if any version may be read."""
        known = self._objects.get(number)
        return None if known is None else known[1]

    def where(self, number: int) -> str:
        """Return the URL of a shard's object."""
        return f"{self.store.url}/{self.info(number).stored.basename}"

    def __reduce__(self) -> tuple[object, ...]:
        remade = partial(
            CachedShards, objects=self._objects, blocks=self._blocks, unpack_rows=self._unpack_rows
        )
        return remade, (self.store, self._manifest, self.cache, self.fetcher)

    @cached_property
    def _total_bytes(self) -> int:
        """The size of all entries in bytes; sizes that are not in the index count as 0."""
        return int(sealed_size(self._manifest.raw_bytes.clip(0)).sum())

    def known_entry(self, number: int) -> str:
        """Return the name of a shard's entry; "" if it needs a version that was not looked up yet."""
        known = self._objects.get(number)
        return entry_name(self.info(number), self.store.url, known and known[1]) or ""

    def known_size(self, number: int) -> int:
        """Return the size of a shard's entry in bytes; an unknown shard size counts as 0."""
        raw_bytes = self.info(number).raw.bytes
        if raw_bytes < 0 and number in self._objects:
            raw_bytes = self._objects[number][0]
        return sealed_size(max(raw_bytes, 0))

    def known_sizes(self) -> Ints:
        """Return the `known_size` of each shard, int64[shards]."""
        sizes = sealed_size(self._manifest.raw_bytes.clip(0))
        for number in self._objects:
            sizes[number] = self.known_size(number)
        return sizes

    def names(self) -> EntryPart:
        """Return the number of shards, a function from shard number to entry name, and `name_digests`."""
        shards = self._manifest.shards
        return len(shards), self.known_entry, name_digests(shards)

    def known_objects(self) -> Iterator[tuple[int, str, int]]:
        """Yield (number, entry name, entry bytes) of the shards looked up in the store."""
        for number in list(self._objects):
            yield number, self.known_entry(number), self.known_size(number)

    def _object(self, number: int) -> tuple[int, str]:
        """Return (size, version) of a shard's object; asks the store at the first call for the shard only."""
        if number not in self._objects:
            found = self.store.head(self.info(number).stored.basename)
            # If threads ask at the same time, the first answer is kept: all must fetch one version.
            self._objects.setdefault(number, (found.bytes, found.version))
            self._tell_plans(number)
        return self._objects[number]

    def _tell_plans(self, number: int) -> None:
        """Pass an entry name that was looked up to the dataset's plans, which then know it as theirs."""
        if name := self.known_entry(number):
            for plan in self.fetcher.plans():
                if self in plan.parts:
                    plan.set_entry(self, number, name, self.known_size(number))


class CacheReader:
    """Reads one remote dataset for one loop, with its own plan and timeout."""

    def __init__(self, shards: CachedShards, timeout_seconds: float | None = None) -> None:
        self.shards = shards
        self.timeout_seconds = timeout_seconds or shards.timeout_seconds
        self.using: frozenset[int] = frozenset()
        """The shards that the loop reads now, which stay open."""
        self.is_open = False
        """Whether a run was started and the reader was not closed since."""
        self.plan: FetchPlan | None = None
        self.loop: LoopPosition | None = None
        """The loop's position; set only if the loop also reads rows of lanes that it does not plan for."""

    def reads_singly(self, number: int) -> bool:
        """Return whether to read single rows of a shard instead of waiting for the whole shard.

        True if the cache had no room for the shard, or if no lane of the plan needs it now. In the second
        case, balancing has moved a few of its rows here.
        """
        if self.shards.has_no_room(number):
            return True
        if self.plan is None or self.loop is None:
            return False
        return not self.plan.needs(self.shards, number, self.loop.reading_to)

    def load(self, number: int) -> Bytes:
        """Load a shard as `CachedShards.load` does, with this reader's plan and timeout."""
        return self.shards.load(number, self.timeout_seconds, self.plan)

    def missing(self, numbers: Sequence[int]) -> list[int]:
        """Return which of these shards are not cached yet."""
        return [number for number in numbers if not self.shards.is_there(number)]

    def progress(self) -> str:
        """Describe the shard that a reader waits for, as the end of a sentence; "" if there is none."""
        progress = self.shards.progress()
        return f"; waiting for {progress}" if progress else ""
