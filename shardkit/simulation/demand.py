"""What the nodes of a scenario read at each step, and when they need which shards, worked out in one go.

`Demand` locates a million positions at once and keeps what it found for a few such parts: for each node and
step the shards and how many rows of each. `NodeUses` are the intervals in which one node's lanes need shards,
numbered within the node, so that a plan for it costs what its own shards cost.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from shardkit.order import Order
from shardkit.simulation.scenario import Scenario
from shardkit.uses import ShardUses, shard_uses

__all__ = ["AllUses", "Demand", "NodeUses"]

_PART_POSITIONS = 1 << 20
_LEAST_POSITIONS = 1 << 12
_PARTS_KEPT = 4
_EPOCHS_KEPT = 3

_Ints = npt.NDArray[np.int64]


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
