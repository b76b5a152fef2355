"""The shards of a remote dataset, through a cache: what `Dataset` and the loader read them by.

`load` gives a shard's raw bytes from the cache, or waits while `fetcher` brings it. `rows` fetches single
rows by ranged requests. What belongs to one reader of several, its plan and how long it waits, is in
`shardkit.cache.reader`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from shardkit.arrays import Bytes
from shardkit.cache.belady import Future
from shardkit.cache.contract import Cache
from shardkit.cache.fetcher import Fetcher, FetchLimits
from shardkit.cache.folder import entry_name, sealed_size
from shardkit.cache.planner import Planner
from shardkit.cache.rows import RowReader
from shardkit.manifest import FileInfo, Manifest, ShardInfo
from shardkit.order.order import Order
from shardkit.order.residency import MixedUses
from shardkit.storage.resilient import ResilientStore
from shardkit.storage.threads import remake_after_fork

if TYPE_CHECKING:
    from shardkit.cache.reader import CacheReader

__all__ = ["CachedShards"]

DEFAULT_TIMEOUT_SECONDS = 600.0
# Shards are wanted so much of the cache ahead of their first use: without a lead, a full cache would give up
# the shard that it has just used, and every fetch would begin at its deadline.
_LEADS_IN_CACHE = 32


class CachedShards:
    """May be shared by threads; a forked child or a pickled copy has threads and connections of its own."""

    def __init__(
        self,
        store: ResilientStore,
        manifest: Manifest,
        cache: Cache,
        *,
        connections: int,
        objects: Mapping[int, tuple[int, str]] | None = None,
        limits: FetchLimits | None = None,
    ) -> None:
        """`objects`: size and version of those known already; no other version of them is read."""
        self.store, self.cache = store, cache
        self.kind = manifest.format
        self.timeout_seconds = DEFAULT_TIMEOUT_SECONDS
        self._manifest = manifest
        self._connections, self.limits = connections, limits or FetchLimits()
        self._objects = dict(objects or {})  # size and version of those that the index says little of
        self.fetcher = Fetcher(self, cache, connections=connections, limits=self.limits)
        self.rows = RowReader(store, manifest, cache.free_disk_bytes)
        self.after_fork()
        remake_after_fork(self)

    def after_fork(self) -> None:
        """In a child: its parent's readers read nothing here."""
        self.readers: weakref.WeakSet[CacheReader] = weakref.WeakSet()
        """Those that have started."""

    def load(self, number: int, timeout_seconds: float | None = None, plan: Planner | None = None) -> Bytes:
        """uint8[raw bytes] of a shard, read-only; waits for it if need be.

        FetchTimeoutError, DamagedObjectError and the errors of the store.
        """
        raw = self.fetcher.load(number, timeout_seconds or self.timeout_seconds, plan)
        self.rows.prove(number, raw)
        return raw

    def keeps(self, number: int) -> bool:
        """Whether a shard may stay open though one reader needs it no more.

        Because another reader needs it, or because it is not evicted, and need not be: where the cache is
        smaller than the dataset, an open shard would hold the room of an evicted one.
        """
        if any(number in reader.using for reader in list(self.readers)):
            return True
        name = self._known_entry(number)
        return name is not None and self._total_bytes <= self.cache.capacity and self.cache.touch(name)

    def make_plan(
        self,
        order: Order | MixedUses,
        position: int,
        lanes: Sequence[int] | None,
        *,
        share: float = 1.0,
        siblings: Sequence[CachedShards] = (),
    ) -> Planner:
        """Fetch ahead of a run that is at `position` of `order` and reads these lanes (None: all).

        The plan is followed in turn with those of other readers, until its holder drops it. `siblings`
        share the cache in the same run; `share`: the part of the cache for this dataset.
        """
        numbers = range(len(self._manifest.shards))
        names = [self._known_entry(number) or "" for number in numbers]
        sizes = np.array([self._known_size(number) for number in numbers], dtype=np.int64)
        samples = order.samples
        capacity = int(self.cache.capacity * share)
        lead = samples * capacity // max(1, int(sizes.sum())) // _LEADS_IN_CACHE
        future = Future(order, lanes, lead=min(lead, samples // 2))
        plan = Planner(
            future,
            names,
            sizes,
            samples,
            position,
            share=share,
            is_sibling=_any_owns(siblings),
            plans=self.fetcher.plans,
        )
        self.fetcher.add_plan(plan)
        for number in list(self._objects):  # other threads may have asked for some since
            self._teach(number)
        return plan

    def close(self) -> None:
        """Stop fetching, for all readers. What is cached stays; the shards may be used again."""
        self.fetcher.close()

    def counters(self) -> dict[str, float]:
        """What the cache did, by this process."""
        counts = self.fetcher.counts
        names = (
            "hits", "misses", "fetched_bytes", "fetched_shards", "refetched_bytes",
            "decompressed_bytes", "bypassed", "damaged",
        )  # fmt: skip
        contents = self.cache.contents()
        return {name: float(counts[name]) for name in names} | {
            "used_bytes": float(sum(held.bytes for held in contents.values())),
            "capacity_bytes": float(self.cache.capacity),
            "row_reads": float(self.rows.count),
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
        name = self._known_entry(number)
        if name is None:
            self._object(number)
            name = self._known_entry(number)
        assert name is not None
        return name

    def version(self, number: int) -> str | None:
        known = self._objects.get(number)
        return None if known is None else known[1]

    def where(self, number: int) -> str:
        """The object's URL."""
        return f"{self.store.url}/{self.info(number).stored.basename}"

    def __reduce__(self) -> tuple[object, ...]:
        remade = partial(
            CachedShards, connections=self._connections, objects=self._objects, limits=self.limits
        )
        return remade, (self.store, self._manifest, self.cache)

    @cached_property
    def _total_bytes(self) -> int:
        """Of all entries, as far as the index states them."""
        return sum(sealed_size(max(info.raw.bytes, 0)) for info in self._manifest.shards)

    def owns(self, name: str) -> bool:
        """Whether an entry is one of this dataset's, as far as their names are known."""
        return any(plan.knows(name) for plan in self.fetcher.plans())

    def _known_entry(self, number: int) -> str | None:
        known = self._objects.get(number)
        return entry_name(self.info(number), self.store.url, known and known[1])

    def _object(self, number: int) -> tuple[int, str]:
        """(size, version) of a shard's object, asked for once."""
        if number not in self._objects:
            found = self.store.head(self.info(number).stored.basename)
            # Of threads that ask at once, the first is right: all are to fetch one version.
            self._objects.setdefault(number, (found.bytes, found.version))
            self._teach(number)
        return self._objects[number]

    def _known_size(self, number: int) -> int:
        """Bytes of a shard's entry, as far as index and object state them."""
        raw_bytes = self.info(number).raw.bytes
        if raw_bytes < 0 and number in self._objects:
            raw_bytes = self._objects[number][0]
        return sealed_size(max(raw_bytes, 0))

    def _teach(self, number: int) -> None:
        """Give the plans what only the object states; they would take the entry for somebody else's."""
        name = self._known_entry(number)
        if name is not None:
            for plan in self.fetcher.plans():
                plan.learn(number, name, self._known_size(number))


def _any_owns(others: Sequence[CachedShards]) -> Callable[[str], bool]:
    return lambda name: any(other.owns(name) for other in others)
