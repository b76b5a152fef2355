"""When each shard is needed: the positions of an epoch at which a sample of it may be read.

A lane shuffles its samples inside windows, so a shard under a window may be read from the window's first
position to its last. A shard lies under one run of consecutive windows of a lane (under several lanes, if it
is large): `shard_uses` gives one interval for each pair of a shard and a lane, from the first position of
that run to just behind its last. The intervals of one shard in several lanes stay apart and may overlap.

Guarantees. Every sample's position lies in an interval of its shard. Each interval is tight: its first and
last positions belong to windows that hold a sample of the shard. Shards without samples never appear. All of
it is a function of the `Order`. With shuffle "none" an interval is the shard's own rows, with "global" the
whole epoch.

Costs: no more intervals than shards + lanes, 20 bytes each, whatever the window. 450,000 shards take 0.1 to
0.25 s, most of it the sorting.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardkit.lanes import Lanes
from shardkit.order import Order

__all__ = ["ShardUses", "lanes_of_part", "shard_uses"]

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ShardUses:
    """Samples at global positions [begin, end) may read the shard. Sorted by (begin, shard)."""

    shard: npt.NDArray[np.int32]
    begin: _Ints
    end: _Ints

    def __len__(self) -> int:
        return len(self.shard)

    def take(self, which: slice | npt.NDArray[np.intp]) -> ShardUses:
        """Some of the intervals; for a slice they are views."""
        return ShardUses(self.shard[which], self.begin[which], self.end[which])


def shard_uses(order: Order, epoch: int, lanes: range | None = None) -> ShardUses:
    """All uses in one epoch; those of `lanes` only, if given (consecutive ones, as `lanes_of_part` gives)."""
    if epoch < 0:
        raise ValueError(f"epochs are numbered from 0, not {epoch}")
    lane_count = order.spec.lanes
    wanted = range(lane_count) if lanes is None else lanes
    if wanted.step != 1 or wanted.start < 0 or wanted.stop > lane_count:
        raise ValueError(f"lanes must be consecutive and in range({lane_count}), not {wanted}")
    # "none" delivers the epoch as it lies: as one lane of windows of one sample.
    geometry = Lanes(order.samples, 1, 1) if order.spec.shuffle == "none" else order.geometry
    low, high = (_lane_start(geometry, lane) for lane in (wanted.start, max(wanted.start, wanted.stop)))
    shards_of_epoch = order.epoch(epoch)
    # Pieces of the span, cut where a shard or a lane begins: each is one shard in one lane.
    cuts = np.union1d(shards_of_epoch.starts, geometry.starts)
    cuts = np.union1d(cuts[(cuts >= low) & (cuts < high)], np.array([low, high], dtype=np.int64))
    places, sizes = cuts[:-1], np.diff(cuts)
    # Of shards that start at one place, all but the last are empty, and `right` finds the last.
    slots = np.searchsorted(shards_of_epoch.starts, places, side="right") - 1
    shards = slots.astype(np.int32) if shards_of_epoch.shards is None else shards_of_epoch.shards[slots]
    first, last = _positions(geometry, places, sizes)
    base = epoch * order.samples
    by_begin = np.lexsort((shards, first))
    return ShardUses(shards[by_begin], base + first[by_begin], base + last[by_begin] + 1)


def lanes_of_part(global_batch: int, lanes: int, part: slice) -> range:
    """The lanes that a part of each global batch (`rank_slice`, or a node's ranks together) draws from.

    All lanes if the batch does not divide into them, since batches then begin in different lanes. For the
    batch at an epoch's edge, alone, the answer may fall short: with a number of samples that is no multiple
    of the lanes, or tail "pad", it takes a different number from each lane, and the parts shift by a few
    lanes. What a part reads there of other lanes' shards is not foreseen: it is fetched when read.
    """
    if global_batch < 1 or lanes < 1:
        raise ValueError(f"global_batch and lanes must be at least 1, not {global_batch} and {lanes}")
    start, stop, step = part.indices(global_batch)
    if step != 1:
        raise ValueError(f"a part is a run of the batch, not {part}")
    if start >= stop:
        return range(0)
    if global_batch % lanes:
        return range(lanes)
    from_each = global_batch // lanes
    return range(start // from_each, (stop - 1) // from_each + 1)


def _lane_start(geometry: Lanes, lane: int) -> int:
    """Where the lane's span begins in the epoch's; for the lane behind the last, where the epoch ends."""
    return int(geometry.starts[lane]) if lane < geometry.lanes else geometry.samples


def _positions(geometry: Lanes, places: _Ints, sizes: _Ints) -> tuple[_Ints, _Ints]:
    """First and last position, within the epoch, of the windows over runs of `sizes` places in a lane."""
    lanes, rows = geometry.find(places)
    first, _ = geometry.bounds(lanes, geometry.windows(lanes, rows))
    last_first, last_size = geometry.bounds(lanes, geometry.windows(lanes, rows + sizes - 1))
    last = last_first + last_size - 1
    return first * geometry.lanes + lanes, last * geometry.lanes + lanes
