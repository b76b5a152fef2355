"""The times at which each shard is needed: the positions of an epoch at which its samples may be read.

A lane shuffles its samples inside windows, so a shard under a window may be read from the window's first
position to its last. Within a lane, a shard spans one run of consecutive windows (a large shard spans several
lanes): `shard_uses` returns one interval per pair of a shard and a lane, from the first position of that run
to one past its last. Intervals of one shard in several lanes are not merged and may overlap.

Guarantees. Every sample's position is in an interval of its shard. Each interval is tight: its first and
last positions belong to windows that have a sample of the shard. Shards without samples never appear. All of
it is a function of the `Order`. With shuffle "none" an interval is the shard's own rows, with "global" the
whole epoch.

Mixtures. `MixedUses` has the intervals of all streams that read a dataset, by positions of the mixture.
Between two positions where the weights change, a stream's samples come at a constant rate. An interval in the
stream's own positions is therefore converted by linear interpolation of exact counts, and widened by the
possible deviation within one block of the mixture. A stream that starts over more than a few times in an
epoch of the mixture counts as using all of its shards throughout. So do all streams if they would have more
than four million intervals: with so many streams, nearly all shards are in use at any time. The intervals
only decide when to fetch and what to keep; the order of samples does not depend on them.

Costs: at most shards + lanes intervals of 20 bytes, for any window. 450,000 shards take 0.1 to 0.25 s, most
of it for sorting.
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

_MAX_PASSES = 4  # maximum of a stream's epochs per epoch of the mixture: more give many short intervals
_MAX_INTERVALS = 1 << 22  # maximum number of intervals: sorting these takes a second and 100 MB
_MOST_BEGINS = 256  # maximum number of batches whose parts are compared; further batches add few lanes
_MOST_KEYS = 1 << 21  # maximum number of keys sorted for that comparison: tens of milliseconds
_SAMPLES = 2  # samples by which a stream's count may be off between two edges of blocks or periods
_SLACK = 1024  # positions by which intervals are widened: a block, in which streams come in any order


@dataclass(frozen=True, slots=True)
class ShardUses:
    """Intervals of global positions: samples at positions in [begin[i], end[i]) may be in shard[i]."""

    shard: npt.NDArray[np.int32]
    begin: Ints
    end: Ints

    def __len__(self) -> int:
        return len(self.shard)

    def take(self, which: slice | npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> ShardUses:
        """Return the intervals `which`; for a slice they are views."""
        return ShardUses(self.shard[which], self.begin[which], self.end[which])

    @classmethod
    def joined(cls, parts: Sequence[ShardUses]) -> ShardUses:
        """Concatenate the intervals of several parts, without sorting."""
        empty = np.empty(0, dtype=np.int64)
        return cls(
            np.concatenate([empty.astype(np.int32), *(part.shard for part in parts)]),
            np.concatenate([empty, *(part.begin for part in parts)]),
            np.concatenate([empty, *(part.end for part in parts)]),
        )

    def sorted(self) -> ShardUses:
        """Return the intervals sorted by (begin, shard)."""
        return self.take(np.lexsort((self.shard, self.begin)))


def shard_uses(order: Order, epoch: int, lanes: Sequence[int] | None = None) -> ShardUses:
    """Return the uses of shards in one epoch, sorted by begin; if `lanes` (ascending) is given, theirs."""
    # Shuffle "none" delivers the dataset order, which is one lane with windows of one sample.
    geometry = Lanes(order.samples, 1, 1) if order.spec.shuffle == "none" else order.geometry
    shards, places, sizes = _pieces(order, geometry, epoch, lanes)
    first, last = _positions(geometry, places, sizes)
    base = epoch * order.samples
    return ShardUses(shards, base + first, base + last + 1).sorted()


def rows_in_lanes(order: Order, epoch: int, lanes: Sequence[int], parts: npt.NDArray[np.float64]) -> Ints:
    """Return how many samples of each shard these lanes read in an epoch, int64[shards].

    `parts`: the fraction of each lane's samples that is read.
    """
    shards, places, sizes = _pieces(order, order.geometry, epoch, lanes)
    read = sizes * parts[np.searchsorted(lanes, order.geometry.find(places)[0])]
    return np.ceil(np.bincount(shards, read, minlength=order.shards)).astype(np.int64)


def _pieces(
    order: Order, geometry: Lanes, epoch: int, lanes: Sequence[int] | None
) -> tuple[npt.NDArray[np.int32], Ints, Ints]:
    """Cut an epoch's span into pieces of one shard in one lane; return their (shards, offsets, sizes)."""
    if epoch < 0:
        raise ValueError(f"epochs are numbered from 0, not {epoch}")
    lane_count = order.spec.lanes
    wanted = np.arange(lane_count) if lanes is None else np.asarray(lanes, dtype=np.int64)
    if len(wanted) and not (wanted[0] >= 0 and wanted[-1] < lane_count and (np.diff(wanted) > 0).all()):
        raise ValueError(f"lanes must be ascending numbers in range({lane_count}), not {lanes}")
    shards_of_epoch = order.epoch(epoch)
    places = np.union1d(shards_of_epoch.starts, geometry.starts)
    places = places[places < order.samples]  # empty shards and lanes may begin at the end
    sizes = np.diff(places, append=order.samples)
    if len(wanted) < lane_count:
        is_wanted = np.isin(geometry.find(places)[0], wanted)
        places, sizes = places[is_wanted], sizes[is_wanted]
    # Of shards that start at the same offset, all but the last are empty; side "right" finds the last.
    slots = np.searchsorted(shards_of_epoch.starts, places, side="right") - 1
    shards = slots.astype(np.int32) if shards_of_epoch.shards is None else shards_of_epoch.shards[slots]
    return shards, places, sizes


class BatchLanes:
    """The lanes that supply each part of the global batches of one size."""

    def __init__(self, spec: OrderSpec, global_batch: int) -> None:
        if global_batch < 1:
            raise ValueError(f"global_batch must be at least 1, not {global_batch}")
        lanes, keys = spec.lanes, lane_keys(spec.lanes, spec.version)
        self._batch, self._lanes = global_batch, np.argsort(keys, kind="stable")
        self._keys = keys[self._lanes]
        # Batches begin in `begins` different lanes. For parts that are powers of two, the first and last of
        # them already give the extreme keys.
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
        """Return the lanes, ascending, of a part of each batch: a `rank_slice`, or that of a node's ranks.

        Exact for powers of two, and if the batch size is a multiple of the lanes. Otherwise, lanes at the
        edges are shared with neighboring parts, and a batch that was not compared may reach one more lane, as
        batches at an epoch's edge may (several lanes with tail "pad"). Such rows are fetched when read.
        """
        start, stop, step = part.indices(self._batch)
        if step != 1:
            raise ValueError(f"a part must be a run of the batch with step 1, not {part}")
        if start >= stop:
            return []
        low = np.searchsorted(self._keys, self._low[start], side="left")
        high = np.searchsorted(self._keys, self._high[stop - 1], side="right")
        found: list[int] = np.sort(self._lanes[low:high]).tolist()
        return found


def lanes_of_ranks(spec: OrderSpec, global_batch: int, ranks: Iterable[int], world_size: int) -> list[int]:
    """Return the lanes that any of `ranks` reads, ascending."""
    alike = replace(
        spec, seed=0, window=1
    )  # lanes do not depend on seed and window, so streams of a mixture share cached results
    return list(_lanes_of_ranks(alike, global_batch, tuple(ranks), world_size))


@lru_cache(maxsize=64)
def _lanes_of_ranks(
    spec: OrderSpec, global_batch: int, ranks: tuple[int, ...], world_size: int
) -> tuple[int, ...]:
    lanes = BatchLanes(spec, global_batch)
    parts = (rank_slice(global_batch, rank, world_size) for rank in ranks)
    return tuple(sorted({lane for part in parts for lane in lanes.of_part(part)}))


def _positions(geometry: Lanes, places: Ints, sizes: Ints) -> tuple[Ints, Ints]:
    """Return the first and last positions, within the epoch, of the windows over pieces of lanes.

    A piece is `sizes` samples from offset `places` of the epoch's span.
    """
    lanes, rows = geometry.find(places)
    first, _ = geometry.bounds(lanes, geometry.windows(lanes, rows))
    last_first, last_size = geometry.bounds(lanes, geometry.windows(lanes, rows + sizes - 1))
    last = last_first + last_size - 1
    return first * geometry.lanes + lanes, last * geometry.lanes + lanes


class MixedUses:
    """The uses of one dataset's shards by streams of a mixture; `orders` is {stream number: its order}."""

    def __init__(self, orders: Mapping[int, Order], mixture: Mixture, epoch_samples: int) -> None:
        assert orders
        self._orders, self._mixture = dict(orders), mixture
        self.samples = epoch_samples
        """The number of positions in an epoch of the mixture."""
        self.shards = next(iter(orders.values())).shards
        """The number of shards in the dataset."""

    def uses(self, epoch: int, lanes: Sequence[int] | None = None) -> ShardUses:
        """Return the uses in an epoch of the mixture by these lanes (None: all); intervals may overlap."""
        begin = epoch * self.samples
        knots = np.array([begin, *self._changes(begin), begin + self.samples], dtype=np.int64)
        counts = np.stack([self._mixture.counts(knot) for knot in knots.tolist()])
        coarse = len(self._orders) * self.shards > _MAX_INTERVALS
        parts = [
            _of_stream(order, knots, counts[:, stream], lanes, 0 if coarse else _MAX_PASSES)
            for stream, order in self._orders.items()
        ]
        uses = ShardUses.joined(parts)
        if coarse:  # each stream uses all shards throughout: keep one interval per shard
            _, kept = np.unique(uses.shard, return_index=True)
            uses = uses.take(kept)
        return uses.sorted()

    def _changes(self, begin: int) -> list[int]:
        """Return the positions, inside the epoch that starts at `begin`, where weights change."""
        starts = [start for start, _ in self._mixture.schedule.segments]
        return starts[bisect_right(starts, begin) : bisect_left(starts, begin + self.samples)]


class JoinedUses:
    """The uses of several datasets in one mixture, with shards numbered through all datasets."""

    def __init__(self, parts: Sequence[tuple[MixedUses, Sequence[int] | None]]) -> None:
        """Join `parts`: the uses of each dataset, and the lanes that are read of it (None: all)."""
        assert parts
        self._parts = tuple(parts)
        self.samples = parts[0][0].samples
        self.shards = sum(part.shards for part, _ in parts)

    def uses(self, epoch: int, lanes: Sequence[int] | None = None) -> ShardUses:
        """Return the uses of all datasets, as `MixedUses.uses` does for one."""
        assert lanes is None  # each dataset has its own lanes, given to the constructor
        first, found = 0, []
        for part, own in self._parts:
            uses = part.uses(epoch, own)
            found.append(ShardUses(uses.shard + np.int32(first), uses.begin, uses.end))
            first += part.shards
        return ShardUses.joined(found).sorted()


def _of_stream(
    order: Order, knots: Ints, counts: Ints, lanes: Sequence[int] | None, most_passes: int
) -> ShardUses:
    """Return the unsorted uses by a stream that has delivered `counts[i]` samples at position `knots[i]`."""
    low, high, size = int(counts[0]), int(counts[-1]), max(1, order.samples)
    passes = range(low // size, -(-high // size)) if high > low else range(0)
    if len(passes) > most_passes:
        shard = np.flatnonzero(np.diff(order.shard_starts)).astype(np.int32)
        return ShardUses(shard, np.full(len(shard), knots[0]), np.full(len(shard), knots[-1]))
    uses = ShardUses.joined([shard_uses(order, number, lanes) for number in passes])
    uses = uses.take((uses.end > low) & (uses.begin < high))
    begin = np.interp(uses.begin - _SAMPLES, counts, knots).astype(np.int64) - _SLACK
    end = np.interp(uses.end + _SAMPLES, counts, knots).astype(np.int64) + 1 + _SLACK
    return ShardUses(uses.shard, np.maximum(begin, knots[0]), np.minimum(end, knots[-1]))
