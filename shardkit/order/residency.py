"""When each shard is needed: the positions of an epoch at which a sample of it may be read.

A lane shuffles its samples inside windows, so a shard under a window may be read from the window's first
position to its last. A shard lies under one run of consecutive windows of a lane (under several lanes, if it
is large): `shard_uses` gives one interval for each pair of a shard and a lane, from the first position of
that run to just behind its last. The intervals of one shard in several lanes stay apart and may overlap.

Guarantees. Every sample's position lies in an interval of its shard. Each interval is tight: its first and
last positions belong to windows that hold a sample of the shard. Shards without samples never appear. All of
it is a function of the `Order`. With shuffle "none" an interval is the shard's own rows, with "global" the
whole epoch.

Mixtures. `MixedUses` has the intervals of all streams that draw on a dataset, by positions of the mixture.
Between two places where the weights change, a stream's samples come at a constant rate, so an interval of its
own positions is carried over by linear interpolation of exact counts, and widened by what one block of the
mixture may deviate. A stream that starts over more than a few times in an epoch of the mixture uses all of
its shards throughout. So do all streams where their intervals would be more than four million: with so many
classes, nearly all shards are in use at any time. These intervals say when to fetch, and what to keep; no
sample's place depends on them.

Costs: no more intervals than shards + lanes, 20 bytes each, whatever the window. 450,000 shards take 0.1 to
0.25 s, most of it the sorting.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from shardkit.arrays import Ints
from shardkit.order.mixture import Mixture
from shardkit.order.order import Lanes, Order, OrderSpec, lane_keys, rank_slice

_MAX_PASSES = 4  # of a stream in an epoch of the mixture: more would give many short intervals that touch
_MAX_INTERVALS = 1 << 22  # a second of sorting, 100 MB
_MOST_BEGINS = 256  # of batches whose parts are compared: what others add is a lane here and there
_MOST_KEYS = 1 << 21  # sorted for that: a few tens of milliseconds
_SLACK = 1024  # positions: a block of the mixture, within which the streams come in any order


@dataclass(frozen=True, slots=True)
class ShardUses:
    """Samples at global positions [begin, end) may read the shard. Those of an epoch are `sorted`."""

    shard: npt.NDArray[np.int32]
    begin: Ints
    end: Ints

    def __len__(self) -> int:
        return len(self.shard)

    def take(self, which: slice | npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> ShardUses:
        """Some of the intervals; for a slice they are views."""
        return ShardUses(self.shard[which], self.begin[which], self.end[which])

    @classmethod
    def joined(cls, parts: Sequence[ShardUses]) -> ShardUses:
        """The intervals of the parts, one part after another; not sorted."""
        empty = np.empty(0, dtype=np.int64)
        return cls(
            np.concatenate([empty.astype(np.int32), *(part.shard for part in parts)]),
            np.concatenate([empty, *(part.begin for part in parts)]),
            np.concatenate([empty, *(part.end for part in parts)]),
        )

    def sorted(self) -> ShardUses:
        """The intervals by (begin, shard)."""
        return self.take(np.lexsort((self.shard, self.begin)))


def shard_uses(order: Order, epoch: int, lanes: Sequence[int] | None = None) -> ShardUses:
    """All uses in one epoch; those of `lanes` only, if given (in ascending order)."""
    # "none" delivers the epoch as it lies: as one lane of windows of one sample.
    geometry = Lanes(order.samples, 1, 1) if order.spec.shuffle == "none" else order.geometry
    shards, places, sizes = _pieces(order, geometry, epoch, lanes)
    first, last = _positions(geometry, places, sizes)
    base = epoch * order.samples
    return ShardUses(shards, base + first, base + last + 1).sorted()


def rows_in_lanes(order: Order, epoch: int, lanes: Sequence[int], parts: npt.NDArray[np.float64]) -> Ints:
    """int64[shards]: samples of each shard that an epoch reads by these lanes, this part of each of them."""
    shards, places, sizes = _pieces(order, order.geometry, epoch, lanes)
    read = sizes * parts[np.searchsorted(lanes, order.geometry.find(places)[0])]
    return np.ceil(np.bincount(shards, read, minlength=order.shards)).astype(np.int64)


def _pieces(
    order: Order, geometry: Lanes, epoch: int, lanes: Sequence[int] | None
) -> tuple[npt.NDArray[np.int32], Ints, Ints]:
    """(shard, first place, size) of pieces of an epoch's span: each is one shard in one of the lanes."""
    if epoch < 0:
        raise ValueError(f"epochs are numbered from 0, not {epoch}")
    lane_count = order.spec.lanes
    wanted = np.arange(lane_count) if lanes is None else np.asarray(lanes, dtype=np.int64)
    if len(wanted) and not (wanted[0] >= 0 and wanted[-1] < lane_count and (np.diff(wanted) > 0).all()):
        raise ValueError(f"lanes must ascend in range({lane_count}), not {lanes}")
    shards_of_epoch = order.epoch(epoch)
    places = np.union1d(shards_of_epoch.starts, geometry.starts)
    places = places[places < order.samples]  # what is empty may lie behind the end
    sizes = np.diff(places, append=order.samples)
    if len(wanted) < lane_count:
        is_wanted = np.isin(geometry.find(places)[0], wanted)
        places, sizes = places[is_wanted], sizes[is_wanted]
    # Of shards that start at one place, all but the last are empty, and `right` finds the last.
    slots = np.searchsorted(shards_of_epoch.starts, places, side="right") - 1
    shards = slots.astype(np.int32) if shards_of_epoch.shards is None else shards_of_epoch.shards[slots]
    return shards, places, sizes


class BatchLanes:
    """The lanes from which each part of the global batches of one size draws."""

    def __init__(self, spec: OrderSpec, global_batch: int) -> None:
        if global_batch < 1:
            raise ValueError(f"global_batch must be at least 1, not {global_batch}")
        lanes, keys = spec.lanes, lane_keys(spec.lanes, spec.version)
        self._batch, self._lanes = global_batch, np.argsort(keys, kind="stable")
        self._keys = keys[self._lanes]
        # Batches begin in as many lanes as this; the first and the last of them give the extremes of the keys
        # where parts are powers of two.
        step = math.gcd(global_batch, lanes)
        begins = lanes // step
        most = max(2, min(_MOST_BEGINS, _MOST_KEYS // global_batch))
        some = range(begins) if begins <= most else [*range(0, begins, -(-begins // most)), begins - 1]
        within = np.arange(global_batch, dtype=np.int64)
        self._low = np.full(global_batch, 1 << 16, dtype=np.int64)
        self._high = np.zeros(global_batch, dtype=np.int64)
        for begin in some:
            found = np.sort(keys[(begin * step + within) % lanes], kind="stable")
            np.minimum(self._low, found, out=self._low)
            np.maximum(self._high, found, out=self._high)

    def of_part(self, part: slice) -> list[int]:
        """The lanes, ascending, that a part of each batch draws from: a `rank_slice`, or a node's ranks.

        Exact for powers of two, and where batches are multiples of the lanes. Else lanes at the edges are of
        the neighboring parts too, and a batch that was not looked at may reach a lane farther, as batches at
        an epoch's edge may (with tail "pad" by more). What is read there is not foreseen: it is fetched when
        read.
        """
        start, stop, step = part.indices(self._batch)
        if step != 1:
            raise ValueError(f"a part is a run of the batch, not {part}")
        if start >= stop:
            return []
        low = np.searchsorted(self._keys, self._low[start], side="left")
        high = np.searchsorted(self._keys, self._high[stop - 1], side="right")
        found: list[int] = np.sort(self._lanes[low:high]).tolist()
        return found


def lanes_of_ranks(spec: OrderSpec, global_batch: int, ranks: Iterable[int], world_size: int) -> list[int]:
    """The lanes that any of `ranks` draws from, in order."""
    alike = replace(
        spec, seed=0, window=1
    )  # the streams of a mixture differ in these, which decide nothing here
    return list(_lanes_of_ranks(alike, global_batch, tuple(ranks), world_size))


@lru_cache(maxsize=64)
def _lanes_of_ranks(
    spec: OrderSpec, global_batch: int, ranks: tuple[int, ...], world_size: int
) -> tuple[int, ...]:
    lanes = BatchLanes(spec, global_batch)
    parts = (rank_slice(global_batch, rank, world_size) for rank in ranks)
    return tuple(sorted({lane for part in parts for lane in lanes.of_part(part)}))


def _positions(geometry: Lanes, places: Ints, sizes: Ints) -> tuple[Ints, Ints]:
    """First and last position, within the epoch, of the windows over runs of `sizes` places in a lane."""
    lanes, rows = geometry.find(places)
    first, _ = geometry.bounds(lanes, geometry.windows(lanes, rows))
    last_first, last_size = geometry.bounds(lanes, geometry.windows(lanes, rows + sizes - 1))
    last = last_first + last_size - 1
    return first * geometry.lanes + lanes, last * geometry.lanes + lanes


class MixedUses:
    """The uses of one dataset's shards by `orders`, {number of the stream in the mixture: its order}."""

    def __init__(self, orders: Mapping[int, Order], mixture: Mixture, epoch_samples: int) -> None:
        assert orders
        self._orders, self._mixture = dict(orders), mixture
        self.samples = epoch_samples
        """Positions in an epoch of the mixture."""
        self.shards = next(iter(orders.values())).shards
        """Shards of the dataset."""

    def uses(self, epoch: int, lanes: Sequence[int] | None = None) -> ShardUses:
        """The uses in an epoch of the mixture by these lanes of each stream (None: all); they may overlap."""
        begin = epoch * self.samples
        knots = np.array([begin, *self._changes(begin), begin + self.samples], dtype=np.int64)
        counts = np.stack([self._mixture.counts(knot) for knot in knots.tolist()])
        coarse = len(self._orders) * self.shards > _MAX_INTERVALS
        parts = [
            _of_stream(order, knots, counts[:, stream], lanes, 0 if coarse else _MAX_PASSES)
            for stream, order in self._orders.items()
        ]
        uses = ShardUses.joined(parts)
        if coarse:  # the same for all streams
            _, kept = np.unique(uses.shard, return_index=True)
            uses = uses.take(kept)
        return uses.sorted()

    def _changes(self, begin: int) -> list[int]:
        """Return the positions inside the epoch from `begin` on where weights change."""
        starts = [start for start, _ in self._mixture.schedule.segments]
        return starts[bisect_right(starts, begin) : bisect_left(starts, begin + self.samples)]


class JoinedUses:
    """The uses of several datasets in one mixture, their shards numbered one dataset after another."""

    def __init__(self, parts: Sequence[tuple[MixedUses, Sequence[int] | None]]) -> None:
        """`parts`: the uses of each dataset, and by which of its lanes (None: all)."""
        assert parts
        self._parts = tuple(parts)
        self.samples = parts[0][0].samples
        self.shards = sum(part.shards for part, _ in parts)

    def uses(self, epoch: int, lanes: Sequence[int] | None = None) -> ShardUses:
        """Return the uses of all datasets, as `MixedUses.uses` does for one."""
        assert lanes is None  # each dataset has its own
        first, found = 0, []
        for part, own in self._parts:
            uses = part.uses(epoch, own)
            found.append(ShardUses(uses.shard + np.int32(first), uses.begin, uses.end))
            first += part.shards
        return ShardUses.joined(found).sorted()


def _of_stream(
    order: Order, knots: Ints, counts: Ints, lanes: Sequence[int] | None, most_passes: int
) -> ShardUses:
    """Return the uses by a stream that has had `counts` samples when the mixture is at `knots`, unsorted."""
    low, high, size = int(counts[0]), int(counts[-1]), max(1, order.samples)
    passes = range(low // size, -(-high // size)) if high > low else range(0)
    if len(passes) > most_passes:
        shard = np.flatnonzero(np.diff(order.shard_starts)).astype(np.int32)
        return ShardUses(shard, np.full(len(shard), knots[0]), np.full(len(shard), knots[-1]))
    uses = ShardUses.joined([shard_uses(order, number, lanes) for number in passes])
    uses = uses.take((uses.end > low) & (uses.begin < high))
    begin = np.interp(uses.begin, counts, knots).astype(np.int64) - _SLACK
    end = np.interp(uses.end, counts, knots).astype(np.int64) + 1 + _SLACK
    return ShardUses(uses.shard, np.maximum(begin, knots[0]), np.minimum(end, knots[-1]))
