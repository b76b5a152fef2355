"""What is simulated (dataset, cluster, settings, network, store), and what each node reads at each step.

`Demand` locates a million positions at a time and keeps a few such parts: for each node and step the shards
and the number of rows in each. `NodeUses` are the intervals in which one node's lanes need shards, numbered
within the node, so that a cache plan costs what the node's own shards cost.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shardkit.cache.folder import SEAL_BYTES
from shardkit.loaders.defaults import DEFAULT_WINDOWS_BYTES
from shardkit.order.order import Order, OrderSpec, default_lanes, default_window, rank_slice
from shardkit.order.residency import ShardUses, lanes_of_part, shard_uses

__all__ = ["AllUses", "Demand", "Network", "NodeUses", "Scenario", "choose_window"]

_Ints = npt.NDArray[np.int64]


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
    """(lanes, window) that a loader with this cache chooses, as its `shuffle_sizes` does for a dataset."""
    lanes = lanes or default_lanes(global_batch, nodes)
    parts = (rank_slice(global_batch, node, nodes) for node in range(nodes))
    served = max(len(lanes_of_part(global_batch, lanes, part)) for part in parts)
    largest, budget = int(shard_bytes.max()), DEFAULT_WINDOWS_BYTES
    if cache_bytes < int(shard_bytes.sum()):
        room = (cache_bytes - 2 * served * largest) * lanes // served
        budget = min(budget, max(room, largest * lanes))
    return lanes, default_window(lanes, sample_bytes, budget)


_PART_POSITIONS = 1 << 20
_LEAST_POSITIONS = 1 << 12
_PARTS_KEPT = 4
_EPOCHS_KEPT = 3


class Demand:
    """Shards and rows that the simulated nodes read; nodes are given by their place among the simulated."""

    def __init__(self, scenario: Scenario, order: Order) -> None:
        self._scenario, self._order = scenario, order
        self._shards = len(scenario.shard_samples)
        wanted = max(scenario.steps * scenario.global_batch, _LEAST_POSITIONS)
        self._steps = max(1, min(wanted, _PART_POSITIONS) // scenario.global_batch)  # of a part
        self._parts: OrderedDict[int, tuple[_Ints, _Ints, _Ints]] = OrderedDict()

    def rows(self, node: int, first: int, stop: int) -> tuple[_Ints, _Ints]:
        """(shards, ascending; rows of each) that a node reads in the steps [first, stop)."""
        found: list[tuple[_Ints, _Ints]] = []
        while first < stop:
            number, within = divmod(first, self._steps)
            end = min(stop, (number + 1) * self._steps)
            starts, shards, counts = self._part(number)
            low = starts[node * self._steps + within]
            high = starts[node * self._steps + within + end - first]
            found.append((shards[low:high], counts[low:high]))
            first = end
        shards, where = np.unique(np.concatenate([s for s, _ in found]), return_inverse=True)
        rows = np.bincount(where, np.concatenate([c for _, c in found]), minlength=len(shards))
        return shards, rows.astype(np.int64)

    def _part(self, number: int) -> tuple[_Ints, _Ints, _Ints]:
        """(where each node's each step begins, shards, rows) of a run of steps."""
        if number in self._parts:
            self._parts.move_to_end(number)
            return self._parts[number]
        size, steps = self._scenario.global_batch, self._steps
        nodes = self._scenario.simulated_nodes
        position = number * steps * size
        if len(nodes) == self._scenario.nodes:
            shard = self._order.global_batches(position, size, steps).shard
            of_node = shard.reshape(steps, len(nodes), -1).swapaxes(0, 1)
        else:
            parts = map(self._scenario.part, nodes)
            each = [self._order.global_batches(position, size, steps, part=part).shard for part in parts]
            of_node = np.stack(each)
        owner = np.arange(len(nodes) * steps, dtype=np.int64).reshape(len(nodes), steps, 1)
        keys, counts = np.unique(owner * self._shards + of_node, return_counts=True)
        edges = np.arange(len(nodes) * steps + 1, dtype=np.int64) * self._shards
        self._parts[number] = np.searchsorted(keys, edges), keys % self._shards, counts.astype(np.int64)
        while len(self._parts) > _PARTS_KEPT:
            self._parts.popitem(last=False)
        return self._parts[number]


class AllUses:
    """The uses of all lanes, an epoch worked out once for all nodes."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self._epochs: OrderedDict[int, tuple[ShardUses, _Ints]] = OrderedDict()

    def of_lanes(self, epoch: int, lanes: range) -> ShardUses:
        """As `shard_uses(order, epoch, lanes)`."""
        if epoch not in self._epochs:
            uses = shard_uses(self.order, epoch)
            # Position g of an epoch is in lane g % L, and a use begins at a position of its lane.
            lane = (uses.begin - epoch * self.order.samples) % self.order.spec.lanes
            self._epochs[epoch] = uses, lane
            while len(self._epochs) > _EPOCHS_KEPT:
                self._epochs.popitem(last=False)
        uses, lane = self._epochs[epoch]
        if len(lanes) == self.order.spec.lanes:
            return uses
        return uses.take(np.flatnonzero((lane >= lanes.start) & (lane < lanes.stop)))


class NodeUses:
    """What `shardkit.cache.belady.Future` plans from: the uses of one node's lanes, its shards numbered."""

    def __init__(self, every: AllUses, lanes: range, last_epoch: int) -> None:
        """Of runs that end in `last_epoch`."""
        self._every, self._lanes = every, lanes
        self.samples = every.order.samples
        if last_epoch or len(lanes) == every.order.spec.lanes:
            # At an epoch's edge a node may read shards of other lanes.
            self.numbers = np.arange(every.order.shards, dtype=np.int64)
        else:
            both = [every.of_lanes(epoch, lanes).shard for epoch in (0, 1)]
            self.numbers = np.unique(np.concatenate(both)).astype(np.int64)
        self.shards = len(self.numbers)

    def uses(self, epoch: int, lanes: range | None = None) -> ShardUses:
        """Those of an epoch; `lanes` is for the protocol only: they are the node's."""
        found = self._every.of_lanes(epoch, self._lanes)
        own = np.searchsorted(self.numbers, found.shard).astype(np.int32)
        known = (own < self.shards) & (self.numbers[np.minimum(own, self.shards - 1)] == found.shard)
        by_begin = np.lexsort((own[known], found.begin[known]))
        return ShardUses(own[known], found.begin[known], found.end[known]).take(by_begin)

    def local(self, shards: _Ints) -> _Ints:
        """The node's numbers of shards that it reads."""
        return np.searchsorted(self.numbers, shards)
