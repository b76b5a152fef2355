"""Find the shards of remote datasets that this machine reads: in which order, and if its caches have room.

A rank reads some lanes of the order. A cache that the processes of a machine share must hold the shards of
all their ranks, and is filled in the order in which any of them needs a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardkit.cache.planner import Pace
from shardkit.cache.run import PlanRequest
from shardkit.datasets.dataset import Dataset
from shardkit.errors import warn_user
from shardkit.loaders.streams import Streams
from shardkit.order.arrangement import Arrangement
from shardkit.order.batches import BatchPlan
from shardkit.order.order import OrderSpec
from shardkit.order.residency import lanes_of_ranks
from shardkit.order.run_settings import RunSettings
from shardkit.units import format_bytes


@dataclass(frozen=True)
class ShardUses:
    """The uses of remote shards by a loader with these settings."""

    streams: Streams
    settings: RunSettings
    arrangement: Arrangement
    plan: BatchPlan
    is_balanced: bool
    """Whether rows of any lane may be moved to this rank."""
    machine_ranks: Callable[[], tuple[int, ...]]
    """Returns the ranks that share this machine; the first call is a collective of all ranks."""

    def requests(self) -> list[PlanRequest]:
        """Return the order in which this machine's ranks need the shards of remote datasets, by cache."""
        requests = []
        for parts in self.streams.by_cache():
            cache = parts[0][0].cache
            lanes = {who: self.lanes_read(who, is_shared=cache.is_shared) for _, who in parts}
            uses = self.arrangement.uses(lanes, cache.capacity)
            sharers = len(self.machine_ranks()) if cache.is_shared else 1
            pace = Pace.of_rank(self.plan.rank, sharers=sharers)
            requests.append(PlanRequest([shards for shards, _ in parts], *uses, pace))
        return requests

    def warn_of_small_caches(self, *, is_starting: bool) -> None:
        """Warn of caches that are too small. `is_starting`: check caches shared by ranks, else all others."""
        for dataset, who in zip(self.streams.once.datasets, self.streams.sharing, strict=True):
            if dataset.shards is not None and is_starting == (
                dataset.shards.cache.is_shared and self.plan.world_size > 1
            ):
                order = self.settings.order_of(who[0])
                lanes = self.lanes_read(who, is_shared=dataset.shards.cache.is_shared)
                warn_of_small_cache(dataset, order, order.lanes if lanes is None else len(lanes))

    def lanes_read(self, streams: Sequence[int], *, is_shared: bool) -> list[int] | None:
        """Return the lanes of a dataset that this process, or all processes sharing its cache, may read.

        Returns None, which means all lanes, if the `streams` of the dataset have different lanes, or if rows
        of any lane may be moved to this rank and the dataset cannot fetch single rows.
        """
        shards = self.streams.datasets[streams[0]].shards
        if self.is_balanced and shards is not None and not shards.reads_single_rows:
            return None
        ranks = self.machine_ranks() if is_shared else (self.plan.rank,)
        orders = [self.settings.order_of(stream) for stream in streams]
        if any(order.lanes != orders[0].lanes for order in orders):
            return None
        return lanes_of_ranks(orders[0], self.plan.global_batch, ranks, self.plan.world_size)


def warn_of_small_cache(dataset: Dataset, order: OrderSpec, served: int) -> None:
    """Warn if the cache cannot hold the shards that `served` lanes of the order use at the same time."""
    assert dataset.shards is not None
    capacity = dataset.shards.cache.capacity
    sizes = dataset.manifest.raw_bytes.clip(0)
    total, largest = int(sizes.sum()), int(sizes.max(initial=0))
    # A window may begin and end inside a shard, so each lane may use two more shards.
    window = min(order.window or len(dataset), -(-len(dataset) // order.lanes))
    window_bytes = window * total // max(1, len(dataset))
    needed = min(served * (window_bytes + 2 * largest), total)
    if capacity < needed:
        warn_user(
            f"cache_bytes of {format_bytes(capacity)} is below {format_bytes(needed)}, which {served:,} "
            f"lanes use at a time: about {100 * (1 - capacity / needed):.0f}% of rows will be read one by "
            "one; raise cache_bytes, or use a smaller window, fewer lanes or smaller shards"
        )
