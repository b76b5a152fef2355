"""What is simulated (dataset, cluster, settings, network, store), and what each node reads at each step.

`Demand` locates a million positions at a time and keeps a few such parts: for each node and step the shards
and the number of rows in each. `NodeUses` are the intervals in which one node's lanes need shards, numbered
within the node, so that a cache plan costs what the node's own shards cost.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shardkit.arrays import Ints
from shardkit.cache.entry import SEAL_BYTES
from shardkit.cache.planner import Pace
from shardkit.loaders.config import LoaderConfig
from shardkit.order.order import Order, OrderSpec, default_lanes, default_window, rank_slice
from shardkit.order.residency import BatchLanes, ShardUses, rows_in_lanes, shard_uses
from shardkit.units import parse_bytes

__all__ = ["AllUses", "Demand", "Network", "NodeUses", "Scenario", "Shards", "spread_nodes"]

_LOADER = LoaderConfig()  # its defaults

_PART_POSITIONS = 1 << 20
_LEAST_POSITIONS = 1 << 12
_PARTS_KEPT = 4
_SAMPLES_OF_LANE = 64
_EPOCHS_KEPT = 3
_ALL_NODES = 16  # up to this number, all nodes are simulated by default, else
_SOME_NODES = 8


@dataclass(frozen=True, eq=False, slots=True)
class Shards:
    """What a simulation needs to know of a dataset."""

    samples: Ints
    """int64[K]: of each shard."""
    bytes: Ints
    """int64[K]: of each shard as it is fetched and kept."""
    sample_bytes: int

    def __post_init__(self) -> None:
        if len(self.samples) != len(self.bytes) or not int(self.samples.sum()):
            raise ValueError("a dataset needs samples, and a size for each shard")
        if self.sample_bytes < 1:
            raise ValueError("sample_bytes must be at least 1")


def spread_nodes(nodes: int, count: int | None = None) -> tuple[int, ...]:
    """`count` of the nodes, evenly spread; by default all up to 16, else 8: nodes are statistically alike."""
    some = min(count or (nodes if nodes <= _ALL_NODES else _SOME_NODES), nodes)
    return tuple(nodes * n // some for n in range(some))


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """The network between a store and the nodes, and the store's answers."""

    node_bytes_per_second: float = 1.25e9
    """Bandwidth of a node."""
    connection_bytes_per_second: float = 80e6
    """Bandwidth of one request."""
    latency_seconds: float = 0.05
    """To a request's first byte; the median, if `latency_p99_seconds` is given."""
    latency_p99_seconds: float | None = None
    """The 99th percentile of log-normal latencies; None: latency is constant."""
    store_bytes_per_second: float | None = None
    """Bandwidth of the store, shared equally by all nodes; None: no limit."""
    throttled_share: float = 0.0
    """Share of requests that are answered with 503 (and retried, with fewer at a time)."""

    def __post_init__(self) -> None:
        rates = [self.node_bytes_per_second, self.connection_bytes_per_second]
        if self.store_bytes_per_second is not None:
            rates.append(self.store_bytes_per_second)
        if min(rates) <= 0 or self.latency_seconds < 0:
            raise ValueError("bandwidths must be above 0, and latencies at least 0")
        if self.latency_p99_seconds is not None and self.latency_p99_seconds < self.latency_seconds:
            raise ValueError("the 99th percentile of latencies cannot be below their median")
        if not 0 <= self.throttled_share <= 0.9:
            raise ValueError("the share of throttled requests must be from 0 to 0.9")


@dataclass(frozen=True, kw_only=True, eq=False)
class Scenario:
    """A run from its first step on, with an empty cache that the ranks of a node share."""

    shards: Shards
    nodes: int = 1
    gpus_per_node: int = 8
    batch_size: int = 8
    """Sequences of each rank in a step."""
    lanes: int = 0
    """0: the loader's default for these shards."""
    window: int = 0
    """0: the loader's default for these shards."""
    cache_bytes: int
    """Of each node."""
    seed: int = 17
    delivered_bytes: int = 0
    """Of a sample in a batch; 0: as stored."""
    prefetch_batches: int = _LOADER.prefetch_batches
    prefetch_bytes: int = parse_bytes(_LOADER.prefetch_bytes)
    connections: int = _LOADER.connections
    """Of each rank."""
    pace: Pace = field(default_factory=Pace)
    network: Network = field(default_factory=Network)
    step_seconds: float = 1.0
    """Compute time of a step, without waiting."""
    steps: int = 1000
    simulated: tuple[int, ...] = ()
    """The nodes to simulate; (): all of them."""

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node", "batch_size", "steps", "connections"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.cache_bytes < 0 or self.step_seconds < 0 or self.prefetch_batches < 0:
            raise ValueError("cache_bytes, step_seconds and prefetch_batches must not be negative")
        if any(not 0 <= node < self.nodes for node in self.simulated):
            raise ValueError(f"the nodes to simulate are numbered from 0 to {self.nodes - 1}")
        samples = self.shards.samples
        shards = int(np.count_nonzero(samples))
        object.__setattr__(self, "lanes", self.lanes or default_lanes(shards))
        window = self.window or default_window(int(samples.sum()), shards, self.lanes)
        object.__setattr__(self, "window", window)

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
    def entry_bytes(self) -> Ints:
        """int64[K]: what each shard takes in a cache."""
        return self.shards.bytes + SEAL_BYTES

    @property
    def spec(self) -> OrderSpec:
        return OrderSpec(self.seed, self.lanes, self.window)

    def order(self) -> Order:
        return Order(self.shards.samples, self.spec)

    def part(self, node: int) -> slice:
        """Return the part of each global batch that a node's ranks take."""
        return rank_slice(self.global_batch, node, self.nodes)

    def lanes_of(self, node: int) -> list[int]:
        """The lanes that a node's ranks read."""
        return BatchLanes(self.spec, self.global_batch).of_part(self.part(node))

    def lane_parts(self, node: int, order: Order) -> npt.NDArray[np.float64]:
        """Return the part of each of its lanes that a node reads: others may read it too."""
        size, lanes = self.global_batch, self.lanes_of(node)
        # As many batches as give each lane some dozens of samples, or one of each beginning.
        count = max(1, min(_SAMPLES_OF_LANE * self.lanes // size, order.samples // size))
        read = order.global_batches(0, size, count, part=self.part(node)).lane
        drawn = np.bincount(np.arange(count * size) % self.lanes, minlength=self.lanes)
        own = np.bincount(read.ravel(), minlength=self.lanes)
        parts: npt.NDArray[np.float64] = own[lanes] / np.maximum(drawn[lanes], 1)
        return parts


class Demand:
    """Shards and rows that the simulated nodes read; nodes are given by their place among the simulated."""

    def __init__(self, scenario: Scenario, order: Order) -> None:
        self._scenario, self._order = scenario, order
        self._shards = len(scenario.shards.samples)
        wanted = max(scenario.steps * scenario.global_batch, _LEAST_POSITIONS)
        self._steps = max(1, min(wanted, _PART_POSITIONS) // scenario.global_batch)  # of a part
        self._parts: OrderedDict[int, tuple[Ints, Ints, Ints]] = OrderedDict()

    def rows(self, node: int, first: int, stop: int) -> tuple[Ints, Ints]:
        """(shards, ascending; rows of each) that a node reads in the steps [first, stop)."""
        found: list[tuple[Ints, Ints]] = []
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

    def _part(self, number: int) -> tuple[Ints, Ints, Ints]:
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
    """The uses of all lanes; an epoch is computed once for all nodes."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self._epochs: OrderedDict[int, tuple[ShardUses, Ints]] = OrderedDict()

    def of_lanes(self, epoch: int, lanes: Sequence[int]) -> ShardUses:
        """Return the same as `shard_uses(order, epoch, lanes)`."""
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
        return uses.take(np.flatnonzero(np.isin(lane, lanes)))


class NodeUses:
    """What `shardkit.cache.belady.Future` plans from: the uses of one node's lanes, its shards numbered."""

    def __init__(
        self,
        every: AllUses,
        lanes: Sequence[int],
        last_epoch: int,
        parts: npt.NDArray[np.float64] | None = None,
    ) -> None:
        """Find the shards that runs use which end in `last_epoch`.

        `parts`: what the node reads of each of its lanes (None: all).
        """
        self._every, self._lanes = every, lanes
        self._parts = np.ones(len(lanes)) if parts is None else parts
        self.samples = every.order.samples
        if last_epoch or len(lanes) == every.order.spec.lanes:
            # At an epoch's edge a node may read shards of other lanes.
            self.numbers = np.arange(every.order.shards, dtype=np.int64)
        else:
            both = [every.of_lanes(epoch, lanes).shard for epoch in (0, 1)]
            self.numbers = np.unique(np.concatenate(both)).astype(np.int64)
        self.shards = len(self.numbers)

    def uses(self, epoch: int, lanes: Sequence[int] | None = None) -> ShardUses:
        """Return the uses of an epoch; `lanes` is for the protocol only: they are the node's."""
        found = self._every.of_lanes(epoch, self._lanes)
        own = np.searchsorted(self.numbers, found.shard).astype(np.int32)
        known = (own < self.shards) & (self.numbers[np.minimum(own, self.shards - 1)] == found.shard)
        return ShardUses(own[known], found.begin[known], found.end[known]).sorted()

    def own_rows(self, epoch: int) -> Ints:
        """int64[shards]: samples of each shard that the node reads in an epoch, about."""
        return rows_in_lanes(self._every.order, epoch, self._lanes, self._parts)[self.numbers]

    def local(self, shards: Ints) -> Ints:
        """The node's numbers of shards that it reads."""
        return np.searchsorted(self.numbers, shards)
