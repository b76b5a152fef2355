"""When a shard is needed that several streams of a mixture draw on, by positions of the whole mixture.

Each stream's uses (`shardkit.uses`) are intervals of its own positions. Between two places where the
mixture's weights change, a stream's samples come at a constant rate, so an interval is carried over by linear
interpolation of exact counts, and widened by what one block of the mixture may deviate. The uses of the
dataset are those of all its streams together. They say when to fetch, and what to keep; no sample's place
depends on them.

A stream that begins anew more than a few times in an epoch of the mixture uses all of its shards throughout.
So do all streams where their intervals would be more than four million: with so many classes, nearly all
shards are in use at any time. A cache that has no room for all then keeps those that fit.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from shardkit.mixture import Mixture
from shardkit.order import Order
from shardkit.uses import ShardUses, shard_uses

__all__ = ["MixedUses"]

_MAX_PASSES = 4  # of a stream in an epoch of the mixture: more would give many short intervals that touch
_MAX_INTERVALS = 1 << 22  # a second of sorting, 100 MB
_SLACK = 1024  # positions: a block of the mixture, within which the streams come in any order

_Ints = npt.NDArray[np.int64]


class MixedUses:
    """The uses of one dataset's shards by `orders`, {number of the stream in the mixture: its order}."""

    def __init__(self, orders: Mapping[int, Order], mixture: Mixture, epoch_samples: int) -> None:
        assert orders
        self._orders, self._mixture = dict(orders), mixture
        self.samples = epoch_samples
        """Positions in an epoch of the mixture."""
        self.shards = next(iter(orders.values())).shards
        """Shards of the dataset."""

    def uses(self, epoch: int, lanes: range | None = None) -> ShardUses:
        """Those in an epoch of the mixture, by these lanes of each stream (None: all); they may overlap."""
        begin = epoch * self.samples
        knots = np.array([begin, *self._changes(begin), begin + self.samples], dtype=np.int64)
        counts = np.stack([self._mixture.counts(knot) for knot in knots.tolist()])
        coarse = len(self._orders) * self.shards > _MAX_INTERVALS
        parts = [
            _of_stream(order, knots, counts[:, stream], lanes, 0 if coarse else _MAX_PASSES)
            for stream, order in self._orders.items()
        ]
        shard, first, last = (np.concatenate(each) for each in zip(*parts, strict=True))
        if coarse:  # which are the same for all streams
            _, kept = np.unique(shard, return_index=True)
            shard, first, last = shard[kept], first[kept], last[kept]
        by_begin = np.lexsort((shard, first))
        return ShardUses(shard[by_begin], first[by_begin], last[by_begin])

    def _changes(self, begin: int) -> list[int]:
        """Where weights change inside of the epoch from `begin` on."""
        starts = [start for start, _ in self._mixture.schedule.segments]
        return starts[bisect_right(starts, begin) : bisect_left(starts, begin + self.samples)]


def _of_stream(
    order: Order, knots: _Ints, counts: _Ints, lanes: range | None, most_passes: int
) -> tuple[npt.NDArray[np.int32], _Ints, _Ints]:
    """(shard, begin, end) of a stream that has had `counts` samples when the mixture is at `knots`."""
    low, high, size = int(counts[0]), int(counts[-1]), max(1, order.samples)
    passes = range(low // size, -(-high // size)) if high > low else range(0)
    if len(passes) > most_passes:
        shard = np.flatnonzero(np.diff(order.shard_starts)).astype(np.int32)
        return shard, np.full(len(shard), knots[0]), np.full(len(shard), knots[-1])
    uses = [shard_uses(order, number, lanes) for number in passes]
    shard = np.concatenate([np.empty(0, dtype=np.int32), *(each.shard for each in uses)])
    begin = np.concatenate([np.empty(0, dtype=np.int64), *(each.begin for each in uses)])
    end = np.concatenate([np.empty(0, dtype=np.int64), *(each.end for each in uses)])
    own = (end > low) & (begin < high)
    first = np.interp(begin[own], counts, knots).astype(np.int64) - _SLACK
    last = np.interp(end[own], counts, knots).astype(np.int64) + 1 + _SLACK
    return shard[own], np.maximum(first, knots[0]), np.minimum(last, knots[-1])
