"""The order of training samples that come from several streams, or from a stream with excluded rows.

    position       -> (stream s, index i)            by `shardkit.order.mixture`
    index i        -> epoch, lane, shard, row        by `Order.locate` of stream s (its kept rows only)
    shard, sample  -> number over all streams        numbers of stream s follow those of stream s - 1

A `StreamOrder` wraps an `Order` of the rows that are kept: the size of a shard is its number of kept samples,
and the order returns kept ids, which rank and select convert to rows of the real dataset. Without exclusions
it equals the wrapped order. A `MixedOrder` has the methods of an `Order` that a loader uses.

Guarantees. Each stream is delivered in its own order: every kept sample once in each of its own epochs, for
any other streams, weights and schedule. A global batch is a set of consecutive positions, the same for any
number of ranks. It is sorted by `lane_keys`, the keys of the samples' lanes in their streams, so that each
rank reads the same part of every stream's lanes from batch to batch, as nearly as the mixture allows; streams
may have different numbers of lanes. A mixture of one stream is that stream's order.

Costs. A rank computes stream, index and lane of all positions of a global batch, at 40-60 ns each; it locates
only its own part. One rank plans a mixture of five streams at about twice the cost of one stream, 160-180 ns
per sample instead of 80 (tests/benchmarks/bench_mixture.py). Threads and forked processes may share these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from shardkit.arrays import Ints
from shardkit.order.exclusions import Exclusions
from shardkit.order.mixture import Mixture
from shardkit.order.order import (
    MAX_SAMPLES,
    MAX_SHARDS,
    Located,
    Order,
    as_int64,
    batch_starts,
    groups,
    lane_keys,
)

_CHUNK = 1 << 15  # number of positions sorted at once: larger sorts do not fit the CPU caches

_Streams = npt.NDArray[np.int16]


def stream_seed(seed: int, number: int) -> int:
    """Return the 64-bit seed of stream `number`'s own order in a mixture with `seed`."""
    text = f"{seed}:stream:{number}".encode()
    digest = hashlib.blake2b(text, digest_size=8, person=b"shardkit.mix.1").digest()
    return int.from_bytes(digest, "little")


class StreamOrder:
    """The order of the kept rows of a dataset with `shard_samples` samples in each shard.

    `order` must have been made from `exclusions.kept_of_shards(shard_samples)`. Shard numbers and sample ids
    are those of the real dataset.
    """

    def __init__(self, order: Order, exclusions: Exclusions | None, shard_samples: npt.ArrayLike) -> None:
        sizes = np.asarray(shard_samples, dtype=np.int64)
        kept = sizes if exclusions is None else exclusions.kept_of_shards(sizes)
        if not np.array_equal(order.shard_starts, _starts(kept)):
            raise ValueError(
                f"the order has {order.samples:,} samples, which are not the samples that the shards keep "
                f"({kept.sum():,} of {sizes.sum():,}): make it from exclusions.kept_of_shards()"
            )
        self.order, self.exclusions = order, exclusions
        self.shard_starts = _starts(sizes)
        """The sample id at which each shard of the real dataset begins, int64[shards + 1]."""

    @property
    def samples(self) -> int:
        """The number of samples in an epoch, without excluded ones."""
        return self.order.samples

    @property
    def shards(self) -> int:
        """The number of shards in the dataset, including shards without kept rows."""
        return len(self.shard_starts) - 1

    @property
    def dataset_samples(self) -> int:
        """The number of samples in the dataset, including excluded ones."""
        return int(self.shard_starts[-1])

    def locate(self, positions: Ints | tuple[int, int]) -> Located:
        """Locate samples as `Order.locate` does; rows and sample ids count excluded rows, too."""
        return self._real(self.order.locate(positions))

    def positions_of(self, sample_ids: npt.ArrayLike, epoch: int) -> Ints:
        """Return positions as `Order.positions_of` does. Raises IndexError for an excluded row."""
        kept = np.asarray(sample_ids) if self.exclusions is None else self.exclusions.rank(sample_ids)
        return self.order.positions_of(kept, epoch)

    def global_batch(self, position: int, size: int) -> Ints:
        """Return the sorted positions of a global batch, as `Order.global_batch` does."""
        return self.order.global_batch(position, size)

    def global_batches(
        self, position: int, size: int, count: int, *, part: slice = slice(None), every: int = 1
    ) -> Located:
        """Locate global batches as `Order.global_batches` does; rows and sample ids count excluded rows."""
        return self._real(self.order.global_batches(position, size, count, part=part, every=every))

    def _real(self, located: Located) -> Located:
        """Convert rows and sample ids that count kept samples only to numbers that count all samples."""
        if self.exclusions is None:
            return located
        rows = self.exclusions.select(located.sample_id)
        return replace(located, row=rows - self.shard_starts[located.shard], sample_id=rows)


class MixedOrder:
    """The order of `streams` in a `mixture`; the caller chooses the positions per epoch, `epoch_samples`.

    Shard numbers and sample ids count through the datasets of all streams, one after another.
    """

    def __init__(self, streams: Sequence[StreamOrder], mixture: Mixture, epoch_samples: int) -> None:
        if len(streams) != mixture.schedule.streams:
            raise ValueError(f"{len(streams)} streams need as many weights, not {mixture.schedule.streams}")
        if not 1 <= epoch_samples <= MAX_SAMPLES:
            raise ValueError(f"epoch_samples must be from 1 to {MAX_SAMPLES:,}, not {epoch_samples:,}")
        for number, stream in enumerate(streams):
            used = any(weights[number] for _, weights in mixture.schedule.segments)
            if used and not stream.samples:
                raise ValueError(
                    f"stream {number} has weight, but no samples, or all are excluded: set its weight to 0"
                )
        self.streams, self.mixture = tuple(streams), mixture
        self._samples = epoch_samples
        shards, samples = sum(one.shards for one in streams), sum(one.dataset_samples for one in streams)
        if shards > MAX_SHARDS or samples > MAX_SAMPLES:
            raise ValueError(
                f"{shards:,} shards with {samples:,} samples are too many for a mixture: at most "
                f"{MAX_SHARDS:,} and {MAX_SAMPLES:,} in all streams together"
            )
        self.first_shards = _starts([stream.shards for stream in streams])
        self.first_samples = _starts([stream.dataset_samples for stream in streams])
        specs = [stream.order.spec for stream in streams]
        self._lanes = np.array([spec.lanes for spec in specs], dtype=np.int64)
        self._keys = np.concatenate([lane_keys(spec.lanes, spec.version) for spec in specs])
        self._first_keys = _starts(self._lanes)[:-1]
        self._sizes = np.array([max(stream.samples, 1) for stream in streams], dtype=np.int64)

    @property
    def samples(self) -> int:
        """The number of positions in an epoch."""
        return self._samples

    def locate(self, positions: Ints | tuple[int, int]) -> Located:
        """Locate the samples at `positions`, an array or (start, count) for consecutive positions.

        Positions may be in any order and repeat; the result has their shape. Its `epoch` and `lane` are
        numbers of the sample's own stream.
        """
        if isinstance(positions, tuple):
            start, count = positions
            stream, index = self.mixture.locate(start, count)
            return self._located(np.arange(start, start + count, dtype=np.int64), stream, index)
        array = as_int64(positions, "positions").copy()  # the result must not change with the caller's array
        return self._located(array, *self.mixture.locate_at(array.ravel()))

    def position_of(self, sample_id: int, epoch: int) -> int | None:
        """Return the position of a sample in its stream's own `epoch`; None if it is never delivered."""
        if not 0 <= sample_id < self.first_samples[-1]:
            raise IndexError(f"sample ids go from 0 to {self.first_samples[-1] - 1:,}, not {sample_id:,}")
        number = int(np.searchsorted(self.first_samples, sample_id, side="right")) - 1
        index = self.streams[number].positions_of(sample_id - self.first_samples[number], epoch)
        return self.mixture.position_of(number, int(index))

    def global_batch(self, position: int, size: int) -> Ints:
        """Return the `size` positions from `position` on, sorted by lane key, then by position."""
        batch: Ints = self._parts(position, size, 1, slice(None))[0][0]
        return batch

    def global_batches(
        self, position: int, size: int, count: int, *, part: slice = slice(None), every: int = 1
    ) -> Located:
        """Locate `count` global batches of `size` samples; the result's arrays have shape (count, size).

        Row i is `global_batch(position + i * every * size, size)`. `part` (a `rank_slice`) selects from each
        row before the samples are located.
        """
        return self._located(*self._parts(position, size, count, part, every))

    def _parts(
        self, position: int, size: int, count: int, part: slice, every: int = 1
    ) -> tuple[Ints, _Streams, Ints]:
        """Return (positions, streams, indices) of `part` of each global batch, of shape [count, part]."""
        all_starts, _ = batch_starts(position, size, count, every)
        shape = (count, len(range(*part.indices(size))))
        positions, indices = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
        streams = np.empty(shape, dtype=np.int16)
        rows = max(1, _CHUNK // max(size, 1))
        for first in range(0, count, rows):
            piece = slice(first, min(first + rows, count))
            starts = all_starts[piece]
            batches = len(starts)
            if every == 1:
                stream, index = self.mixture.locate(int(starts[0]), batches * size)
            else:
                stream, index = self.mixture.locate_at((starts[:, None] + np.arange(size)).ravel())
            by_lane = self._by_lane(stream.reshape(batches, size), index.reshape(batches, size))[:, part]
            own = by_lane + np.arange(batches)[:, None] * size
            positions[piece], streams[piece], indices[piece] = (
                starts[:, None] + by_lane,
                stream[own],
                index[own],
            )
        return positions, streams, indices

    def _by_lane(self, stream: _Streams, index: Ints) -> npt.NDArray[np.intp]:
        """Return the indices that sort each row of samples by lane key, stably."""
        if (self._lanes == 1).all() or not index.size:
            return np.broadcast_to(np.arange(index.shape[1]), index.shape)
        lanes = index % self._sizes[stream] % self._lanes[stream]
        # The keys are uint16, which NumPy sorts stably by radix, in linear time.
        return np.argsort(self._keys[self._first_keys[stream] + lanes], axis=1, kind="stable")

    def _located(self, positions: Ints, stream: _Streams, index: Ints) -> Located:
        """Locate samples by their streams and indices; the result has the shape of these arrays."""
        stream, index, count = stream.ravel(), index.ravel(), positions.size
        epoch, row, sample_id = (np.empty(count, dtype=np.int64) for _ in range(3))
        shard, lane = (np.empty(count, dtype=np.int32) for _ in range(2))
        for number, which in groups(stream):
            found = self.streams[number].locate(index[which])
            epoch[which], row[which], lane[which] = found.epoch, found.row, found.lane
            shard[which] = found.shard + np.int32(self.first_shards[number])
            sample_id[which] = found.sample_id + self.first_samples[number]
        located = Located(positions.ravel(), epoch, shard, row, lane, sample_id)
        return located.reshape(*positions.shape)


def _starts(sizes: npt.ArrayLike) -> Ints:
    return np.concatenate([[0], np.cumsum(np.asarray(sizes, dtype=np.int64))])
