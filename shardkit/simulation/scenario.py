"""What is simulated: a dataset, a cluster, the loader's settings, a network and a store.

The rules of the loader that matter for waiting (how far a plan reaches, how many rows are read singly after a
start, how batches are queued) are repeated here as numbers: core must not import the loaders. A test holds
each of them to the loader's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shardkit.cache.entry import SEAL_BYTES
from shardkit.lanes import default_lanes, default_window, rank_slice
from shardkit.order import Order, OrderSpec
from shardkit.uses import lanes_of_part

__all__ = ["LoaderRules", "Network", "Scenario", "choose_window"]

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LoaderRules:
    """How the loader reads; the defaults are its constants."""

    plan_rows: int = 65_536
    plan_positions: int = 1 << 20
    plan_bytes: int = 1 << 30
    plans_in_cache: int = 16
    plan_growth: int = 8
    group_bytes: int = 2 << 20
    cold_rows: int = 32
    first_rows: int = 16
    row_threads: int = 32
    store_connections: int = 32
    part_bytes: int = 2 << 20
    leads_in_cache: int = 32
    windows_bytes: int = 4 << 30
    busy_seconds: float = 200e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """Between a store and the nodes. Rates in bytes a second."""

    node_bytes_per_second: float = 1.25e9
    """What a node can receive."""
    connection_bytes_per_second: float = 80e6
    """What one request delivers."""
    latency_seconds: float = 0.05
    """To a request's first byte; the median, if `latency_p99_seconds` is given."""
    latency_p99_seconds: float | None = None
    """Latencies are log-normal with that 99th percentile; None: all are alike."""
    store_bytes_per_second: float | None = None
    """What the store delivers to all nodes together, each its equal share; None: no limit."""
    throttled_share: float = 0.0
    """Of the requests, how many are answered 503 (and tried again, with fewer at a time)."""

    def __post_init__(self) -> None:
        rates = [self.node_bytes_per_second, self.connection_bytes_per_second]
        if self.store_bytes_per_second is not None:
            rates.append(self.store_bytes_per_second)
        if min(rates) <= 0 or self.latency_seconds < 0:
            raise ValueError("bandwidths must be above 0, and latencies not below")
        if self.latency_p99_seconds is not None and self.latency_p99_seconds < self.latency_seconds:
            raise ValueError("the 99th percentile of latencies cannot be below their median")
        if not 0 <= self.throttled_share <= 0.9:
            raise ValueError("the share of throttled requests is from 0 to 0.9")


@dataclass(frozen=True, kw_only=True, eq=False)
class Scenario:
    """A run from its first step on, with an empty cache that the ranks of a node share."""

    shard_samples: _Ints
    """int64[K]"""
    shard_bytes: _Ints
    """int64[K]: of the shards as they are fetched and kept."""
    sample_bytes: int
    nodes: int = 1
    gpus_per_node: int = 8
    batch_size: int = 8
    """Sequences of each rank in a step."""
    lanes: int
    window: int
    cache_bytes: int
    """Of each node."""
    seed: int = 17
    delivered_bytes: int = 0
    """Of a sample in a batch; 0: as stored."""
    prefetch_batches: int = 64
    prefetch_bytes: int = 256 << 20
    connections: int = 16
    """Of each rank."""
    network: Network = field(default_factory=Network)
    step_seconds: float = 1.0
    """What a step computes, without waiting."""
    steps: int = 1000
    simulated: tuple[int, ...] = ()
    """The nodes to simulate; (): all of them."""
    rules: LoaderRules = field(default_factory=LoaderRules)

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node", "batch_size", "sample_bytes", "steps", "connections"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if len(self.shard_samples) != len(self.shard_bytes) or not int(self.shard_samples.sum()):
            raise ValueError("there must be samples, and as many sizes as shards")
        if self.cache_bytes < 0 or self.step_seconds < 0 or self.prefetch_batches < 0:
            raise ValueError("cache_bytes, step_seconds and prefetch_batches must not be negative")
        if any(not 0 <= node < self.nodes for node in self.simulated):
            raise ValueError(f"the nodes to simulate are numbered from 0 to {self.nodes - 1}")

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def global_batch(self) -> int:
        return self.world_size * self.batch_size

    @property
    def simulated_nodes(self) -> tuple[int, ...]:
        return self.simulated or tuple(range(self.nodes))

    @property
    def entry_bytes(self) -> _Ints:
        """int64[K]: what each shard takes in a cache."""
        return self.shard_bytes + SEAL_BYTES

    def order(self) -> Order:
        return Order(self.shard_samples, OrderSpec(self.seed, self.lanes, self.window))

    def part(self, node: int) -> slice:
        """What a node's ranks take of each global batch."""
        return rank_slice(self.global_batch, node, self.nodes)

    def lanes_of(self, node: int) -> range:
        """The lanes that a node's ranks read."""
        return lanes_of_part(self.global_batch, self.lanes, self.part(node))


def choose_window(
    shard_bytes: _Ints,
    sample_bytes: int,
    *,
    global_batch: int,
    nodes: int,
    cache_bytes: int,
    lanes: int | None = None,
) -> tuple[int, int]:
    """(lanes, window) that a loader with this cache chooses, as `shardkit.loaders.setup` does."""
    lanes = lanes or default_lanes(global_batch, nodes)
    parts = (rank_slice(global_batch, node, nodes) for node in range(nodes))
    served = max(len(lanes_of_part(global_batch, lanes, part)) for part in parts)
    largest, budget = int(shard_bytes.max()), LoaderRules().windows_bytes
    if cache_bytes < int(shard_bytes.sum()):
        room = (cache_bytes - 2 * served * largest) * lanes // served
        budget = min(budget, max(room, largest * lanes))
    return lanes, default_window(lanes, sample_bytes, budget)
