"""Assigns each position to a stream of a mixture: exact proportions by arithmetic on integer weights.

    segment of `position` (the schedule's), n = position - its start, W = sum of its weights w_1 … w_S
    version 3: `shardkit.order.spread` spreads the streams evenly over every W positions
    versions 1 and 2, of which all below tells:
    after n positions: n_S = n, n_j = n_(j+1) * c_j // c_(j+1)      c_j = w_1 + … + w_j, nested floors
    stream j has had n_j - n_(j-1) of them, so the samples of each stream in a block are known at once
    block k begins at n = k * W // B                B = ceil(W / 1024) blocks of one size, or two, in W
    inside a block: its slots, in the order of the upper 54 bits of a hash of (seed, first position of the
    block, slot), take first stream 1, then stream 2, …; each stream's samples then ascend with the position

Guarantees. Each stream's samples come in its own order, 0, 1, 2, …, none left out, through all epochs and
segments. In version 3 a count is never off by a sample from its exact share if W <= 4096 (`spread`); in all
versions, proportions are exact in each run of W positions from the segment's start on; where W <= 1024, such
a run is one block. At the edges of other blocks, each count differs from its exact share n * w_j / W by less
than S. The sample at a position depends only on the seed and on the segments that start at or before it, so a
schedule may change anywhere, also inside a block, without affecting earlier positions. Integers only; golden
vectors and a plain-Python reference in the tests pin all of it.

Costs. Nothing is kept in memory between calls. Seeking costs one block (about 100 microseconds), a position
10-50 ns in calls for thousands (tests/benchmarks/bench_mixture.py). Threads and forks may share a `Mixture`.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import gcd, lcm
from numbers import Rational
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shardkit.arrays import Ints
from shardkit.errors import StateError
from shardkit.order.order import MAX_POSITION, VERSION, check_positions
from shardkit.order.permutation import CHUNK, GOLDEN, ONE, mix64
from shardkit.order.spread import Pattern, Tree, spread_of

MAX_STREAMS = 4096  # far above any mixture; stream numbers fit int16, and a block's counts fit a CPU cache
MAX_WEIGHT = 1 << 31  # limit of the sum of a segment's weights: products of two sums stay below 2**62

_SHARE_BITS = 30  # weights too fine for MAX_WEIGHT are rounded to multiples of 2**-30 of their sum

_BLOCK = 1024  # maximum number of positions in a block: a few arrays of this size fit a core's L1 cache
_SPREAD_AT_ONCE = 1 << 12  # positions: their arrays fit the CPU caches
_SLOT_BITS = 10
_SLOTS = np.arange(_BLOCK, dtype=np.uint64)
_SLOT_MASK = np.uint64(_BLOCK - 1)

Weight = int | float | Fraction
Weights = tuple[int, ...]
_Streams = npt.NDArray[np.int16]
_Number = TypeVar("_Number", int, Ints)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The weights of S streams, and the positions from which they hold: ((start, (w_1, …, w_S)), …).

    The first segment starts at 0, starts ascend, weights are whole numbers >= 0 and not all 0. Equivalent
    schedules compare equal: weights are divided by their greatest common divisor, and a segment with the same
    weights as the one before it is merged into it. Raises ValueError for invalid segments.
    """

    segments: tuple[tuple[int, Weights], ...]

    def __post_init__(self) -> None:
        reduced: list[tuple[int, Weights]] = []
        previous = -1
        for start, weights in self.segments:
            if isinstance(start, bool) or not isinstance(start, int) or not previous < start < MAX_POSITION:
                raise ValueError(
                    f"segments of a schedule must start at ascending positions from 0 to 2**62, not {start!r}"
                    + (f" after {previous:,}" if reduced else "")
                )
            weights = _reduced(weights)
            if reduced and len(weights) != len(reduced[0][1]):
                raise ValueError(
                    f"the segment from position {start:,} has {len(weights)} weights, the first "
                    f"{len(reduced[0][1])}: give every stream a weight, 0 for a stream that is not used"
                )
            if not reduced or weights != reduced[-1][1]:
                reduced.append((start, weights))
            previous = start
        if not reduced or reduced[0][0] != 0:
            raise ValueError("the first segment of a schedule must start at position 0")
        object.__setattr__(self, "segments", tuple(reduced))

    @classmethod
    def of(cls, weights: Sequence[Weight]) -> Schedule:
        """Make a schedule of one segment. A float counts as its decimal text: 0.7 and 0.3 become 7 and 3.

        1 / 6, which has no exact decimal text, counts as `Fraction(1, 6)`; see `_whole` for the rule.
        """
        return cls(((0, _whole(weights)),))

    @property
    def streams(self) -> int:
        """The number of streams, S."""
        return len(self.segments[0][1])

    def weights_at(self, position: int) -> Weights:
        """Return the reduced weights that hold at `position`."""
        if not 0 <= position <= MAX_POSITION:
            raise ValueError(f"positions go from 0 to 2**62, not {position:,}")
        starts = [start for start, _ in self.segments]
        return self.segments[bisect_right(starts, position) - 1][1]

    def changed(self, start: int, weights: Sequence[Weight]) -> Schedule:
        """Return a schedule equal to this one before `start`, with these weights from `start` on."""
        return Schedule((*self._before(start), (start, _whole(weights))))

    def padded(self, streams: int) -> Schedule:
        """Return the same schedule for more streams; added streams have weight 0."""
        if streams < self.streams:
            raise ValueError(f"the schedule has {self.streams} streams already: cannot pad it to {streams}")
        more = (0,) * (streams - self.streams)
        return Schedule(tuple((start, weights + more) for start, weights in self.segments))

    def agrees_before(self, other: Schedule, position: int) -> bool:
        """Return whether both schedules are equal before `position`; a missing stream has weight 0."""
        streams = max(self.streams, other.streams)
        return self.padded(streams)._before(position) == other.padded(streams)._before(position)

    def to_list(self) -> list[list[object]]:
        """Return plain data for a state, [[start, [w_1, …, w_S]], …]; `from_list` reads it back."""
        return [[start, list(weights)] for start, weights in self.segments]

    @classmethod
    def from_list(cls, data: object) -> Schedule:
        """Build a schedule from what `to_list` returns; raises StateError for any other data."""
        if not isinstance(data, list) or not all(
            isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], list) for entry in data
        ):
            raise StateError(f"a schedule must be a list of [start, [weights]]; got {data!r:.200}")
        try:
            return cls(tuple((start, tuple(weights)) for start, weights in data))
        except ValueError as error:
            raise StateError(f"not a valid schedule: {error}") from error

    def _before(self, position: int) -> tuple[tuple[int, Weights], ...]:
        return tuple(segment for segment in self.segments if segment[0] < position)


def _whole(weights: Sequence[Weight]) -> Weights:
    """Return whole numbers in the same proportions; a float counts as the decimal that `str` prints.

    If these decimals are too fine (1 / 6 has 16 digits), a float counts as a fraction with a small
    denominator whose nearest float it is. If these are too fine as well, shares are rounded to multiples of
    2**-30: with S streams, each is off by less than S * 2**-30.
    """
    for weight in weights:
        if isinstance(weight, bool) or not isinstance(weight, (Rational, float)):
            raise ValueError(f"weights must be numbers, not {weight!r}")
        if not 0 <= weight < float("inf"):
            raise ValueError(f"weights must be finite numbers >= 0, not {weight!r}")
    exact = [Fraction(str(each)) if isinstance(each, float) else Fraction(each) for each in weights]
    if _is_too_fine(whole := _scaled(exact)):
        simplest = [_simplest(each) if isinstance(each, float) else Fraction(each) for each in weights]
        whole = _scaled(simplest)
    if _is_too_fine(whole):
        total = sum(whole)
        rounded = tuple(round(Fraction(each << _SHARE_BITS, total)) for each in whole)
        # If a positive share would round to 0, its stream would never be read: leave the weights as they are,
        # so that `_reduced` raises an error.
        return rounded if all(bool(a) == bool(b) for a, b in zip(rounded, whole, strict=True)) else whole
    return whole


def _scaled(weights: Sequence[Fraction]) -> Weights:
    scale = lcm(*(weight.denominator for weight in weights))
    return tuple(int(weight * scale) for weight in weights)


def _is_too_fine(weights: Weights) -> bool:
    return sum(weights) > MAX_WEIGHT * gcd(*weights)


def _simplest(weight: float) -> Fraction:
    """Return a fraction with a small denominator whose nearest float is `weight`."""
    exact, denominator = Fraction(weight), 1
    while float(found := exact.limit_denominator(denominator)) != weight:
        denominator *= 2
    return found


def _reduced(weights: Weights) -> Weights:
    """Return `weights` divided by their greatest common divisor; raises ValueError if they are not valid."""
    if not 1 <= len(weights) <= MAX_STREAMS:
        raise ValueError(f"a mixture must have 1 to {MAX_STREAMS:,} streams, not {len(weights):,}")
    for weight in weights:
        if isinstance(weight, bool) or not isinstance(weight, int) or weight < 0:
            raise ValueError(f"weights must be whole numbers >= 0, not {weight!r}")
    divisor = gcd(*weights)
    if not divisor:
        raise ValueError("at least one weight must be above 0")
    if (total := sum(weights) // divisor) > MAX_WEIGHT:
        raise ValueError(
            f"the weights {list(weights)!r:.200} are too fine: as the smallest whole numbers in these "
            f"proportions they add up to {total:.3g}, more than 2**31; round them"
        )
    return tuple(weight // divisor for weight in weights)


@dataclass(frozen=True, slots=True)
class _Segment:
    """Positions from `start` to `end` under constant weights, without the streams of weight 0."""

    start: int
    end: int
    streams: _Streams  # streams of weight > 0
    weights: Ints  # weights of these streams
    sums: Ints  # cumulative sums of the weights
    before: Ints  # number of samples of every stream (also of weight 0) before `start`
    spread: Pattern | Tree | None  # None in versions 1 and 2

    @classmethod
    def of(cls, start: int, end: int, weights: Weights, before: Ints, key: np.uint64 | None) -> _Segment:
        streams = np.flatnonzero(weights).astype(np.int16)
        positive = np.array(weights, dtype=np.int64)[streams]
        spread = None
        if key is not None:
            word = mix64(key + GOLDEN * (np.array([start], dtype=np.uint64) + ONE))[0]
            spread = spread_of(word, positive.tolist())
        return cls(start, end, streams, positive, np.cumsum(positive), before, spread)

    @property
    def total(self) -> int:
        """The number of positions in a period, W; a period has `weight` samples of each stream."""
        return int(self.sums[-1])

    @property
    def blocks(self) -> int:
        """The number of blocks in a period, B."""
        return -(-self.total // _BLOCK)

    @property
    def chunk(self) -> int:
        """The number of blocks to process at once, about CHUNK positions in all."""
        return CHUNK * self.blocks // self.total

    def block(self, done: _Number) -> _Number:
        """Return the block of the position that is `done` positions after the segment's start."""
        period, rest = done // self.total, done % self.total
        return period * self.blocks + ((rest + 1) * self.blocks - 1) // self.total

    def edge(self, block: _Number) -> _Number:
        """Return the first position of a block, counted from the segment's start."""
        return block // self.blocks * self.total + block % self.blocks * self.total // self.blocks

    def shares(self, counts: Ints) -> Ints:
        """Return each stream's samples in the first `counts` positions, int64[len(counts), len(streams)]."""
        # Split n = q * W + r: q whole periods give q * w_j, and r < W is small, so no product reaches 2**62.
        periods, upper = np.divmod(counts, self.total)
        shares: Ints = periods[:, None] * self.weights
        if not upper.any():
            return shares
        for stream in range(len(self.sums) - 1, 0, -1):
            lower = upper * self.sums[stream - 1] // self.sums[stream]
            shares[:, stream] += upper - lower
            upper = lower
        shares[:, 0] += upper
        return shares


class Mixture:
    """The assignment of positions to streams under a schedule; see the module docstring."""

    def __init__(self, seed: int, schedule: Schedule, version: int = VERSION) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 64:
            raise ValueError(f"seed must be a whole number from 0 to 2**64 - 1, not {seed!r}")
        self.seed, self.schedule = seed, schedule
        digest = hashlib.blake2b(f"{seed}:mixture".encode(), digest_size=8, person=b"shardkit.mix.1").digest()
        self._key = np.uint64(int.from_bytes(digest, "little"))
        self._starts = [start for start, _ in schedule.segments]
        self._segments: list[_Segment] = []
        before = np.zeros(schedule.streams, dtype=np.int64)
        for (start, end), (_, weights) in zip(
            pairwise([*self._starts, MAX_POSITION]), schedule.segments, strict=True
        ):
            segment = _Segment.of(start, end, weights, before, self._key if version >= 3 else None)
            self._segments.append(segment)
            before = self._counts(segment, end)

    def locate(self, start: int, count: int) -> tuple[_Streams, Ints]:
        """Return (streams, indices) of the `count` positions from `start` on.

        An index counts a stream's samples from 0 on, through all its epochs. Raises ValueError for positions
        outside of [0, 2**62).
        """
        check_positions(start, count)
        stream, index = np.empty(count, dtype=np.int16), np.empty(count, dtype=np.int64)
        for segment, begin, end in self._pieces(start, start + count):
            if segment.spread is not None:
                piece = slice(begin - start, end - start)
                stream[piece], index[piece] = _spread(segment, np.arange(begin, end, dtype=np.int64))
                continue
            first, last = segment.block(begin - segment.start), segment.block(end - 1 - segment.start)
            streams, indices = self._blocks(segment, np.arange(first, last + 1, dtype=np.int64))
            origin = segment.start + segment.edge(first)
            taken, piece = slice(begin - origin, end - origin), slice(begin - start, end - start)
            stream[piece], index[piece] = streams[taken], indices[taken]
        return stream, index

    def locate_at(self, positions: Ints) -> tuple[_Streams, Ints]:
        """Locate a flat array of positions in any order; each block that is needed is computed once."""
        if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) < MAX_POSITION:
            raise ValueError(f"positions go from 0 to 2**62, not {positions.min():,} to {positions.max():,}")
        stream, index = np.empty(len(positions), dtype=np.int16), np.empty(len(positions), dtype=np.int64)
        ascending = np.argsort(positions, kind="stable")
        edges = [*np.searchsorted(positions, self._starts, sorter=ascending).tolist(), len(positions)]
        for segment, (low, high) in zip(self._segments, pairwise(edges), strict=True):
            which = ascending[low:high]
            if segment.spread is not None:
                for first in range(0, len(which), _SPREAD_AT_ONCE):
                    some = which[first : first + _SPREAD_AT_ONCE]
                    stream[some], index[some] = _spread(segment, positions[some])
                continue
            done = positions[which] - segment.start
            blocks, of_block = np.unique(segment.block(done), return_inverse=True)
            slots = done - segment.edge(blocks)[of_block]
            for first in range(0, len(blocks), segment.chunk):
                numbers = blocks[first : first + segment.chunk]
                streams, indices = self._blocks(segment, numbers)
                sizes = segment.edge(numbers + 1) - segment.edge(numbers)
                own = slice(*np.searchsorted(of_block, [first, first + segment.chunk]).tolist())
                places = (np.cumsum(sizes) - sizes)[of_block[own] - first] + slots[own]
                stream[which[own]], index[which[own]] = streams[places], indices[places]
        return stream, index

    def counts(self, position: int) -> Ints:
        """Return the samples of each stream before `position` (0 to 2**62), exactly, int64[S]."""
        if not 0 <= position <= MAX_POSITION:
            raise ValueError(f"positions go from 0 to 2**62, not {position:,}")
        return self._counts(self._segment(position), position)

    def position_of(self, stream: int, index: int) -> int | None:
        """Return the position of sample `index` (from 0 on) of `stream`; None if it is never delivered.

        The inverse of `locate`; takes about a millisecond.
        """
        if not 0 <= stream < self.schedule.streams or index < 0:
            raise IndexError(f"no sample {index:,} of stream {stream} of {self.schedule.streams}")
        befores = [int(segment.before[stream]) for segment in self._segments]
        segment = self._segments[bisect_right(befores, index) - 1]
        column = np.flatnonzero(segment.streams == stream)
        if not column.size:
            return None
        left = index - int(segment.before[stream])
        if segment.spread is not None:
            position = segment.start + segment.spread.place_of(int(column[0]), left)
            return position if position < MAX_POSITION else None
        low = left // int(segment.weights[column[0]]) * segment.blocks  # first block of the sample's period
        if segment.start + segment.edge(low) >= MAX_POSITION:
            return None
        high = low + segment.blocks - 1
        while low < high:  # find the last block before which the stream has at most `left` samples
            middle = (low + high + 1) // 2
            had = segment.shares(np.array([segment.edge(middle)]))[0, column[0]]
            low, high = (middle, high) if had <= left else (low, middle - 1)
        streams, indices = self._blocks(segment, np.array([low]))
        slot = int(np.flatnonzero((streams == stream) & (indices == index))[0])
        position = segment.start + segment.edge(low) + slot
        return position if position < MAX_POSITION else None

    def _segment(self, position: int) -> _Segment:
        return self._segments[bisect_right(self._starts, position) - 1]

    def _pieces(self, start: int, end: int) -> Iterator[tuple[_Segment, int, int]]:
        """Yield (segment, start, end) of pieces of the positions from `start` to `end`.

        Pieces end at edges of segments and blocks, and have about CHUNK positions each.
        """
        while start < end:
            segment = self._segment(start)
            if segment.spread is not None:
                stop = min(end, segment.end, start + _SPREAD_AT_ONCE)
            else:
                block = segment.block(start - segment.start)
                stop = min(end, segment.end, segment.start + segment.edge(block + segment.chunk))
            yield segment, start, stop
            start = stop

    def _counts(self, segment: _Segment, position: int) -> Ints:
        """Return the samples of each stream before `position`, which is in `segment` or at its end."""
        done = position - segment.start
        if segment.spread is not None:
            counts = segment.before.copy()
            counts[segment.streams] += np.array(segment.spread.counts(done), dtype=np.int64)
            return counts
        block = segment.block(done)
        edge = segment.edge(block)
        counts = segment.before.copy()
        counts[segment.streams] += segment.shares(np.array([edge]))[0]
        if edge < done:
            streams, _ = self._blocks(segment, np.array([block]))
            counts += np.bincount(streams[: done - edge], minlength=len(counts))
        return counts

    def _blocks(self, segment: _Segment, numbers: Ints) -> tuple[_Streams, Ints]:
        """Return (streams, indices) of all positions of these blocks, concatenated."""
        edges = segment.edge(numbers)
        first = segment.shares(edges)
        counts = segment.shares(segment.edge(numbers + 1)) - first
        sizes = counts.sum(axis=1)
        size = int(sizes.max())
        # Samples of a stream before the block, minus the ranks in the block that earlier streams take.
        offsets = segment.before[segment.streams] + first - (np.cumsum(counts, axis=1) - counts)
        keys = mix64(self._key + GOLDEN * ((segment.start + edges).view(np.uint64) + ONE))
        hashes = mix64(keys[:, None] + GOLDEN * (_SLOTS[:size] + ONE))
        short = np.flatnonzero(sizes < size)
        streams_of = segment.streams
        if short.size:
            # These blocks are one slot shorter: a dummy stream -1 fills their last slot and is removed below.
            hashes[short, size - 1] = ~np.uint64(0)
            counts = np.column_stack([counts, size - sizes])
            offsets = np.column_stack([offsets, np.zeros_like(sizes)])
            streams_of = np.append(streams_of, np.int16(-1))
        # The low bits hold the slot, so values are unique: sorting them gives the same result on every
        # machine, and is faster than an argsort.
        hashes = np.sort(hashes & ~_SLOT_MASK | _SLOTS[:size], axis=1)
        columns = np.repeat(
            np.tile(np.arange(counts.shape[1], dtype=np.uint32), len(numbers)), counts.ravel()
        )
        slots = (hashes & _SLOT_MASK).astype(np.uint32)
        slots |= columns.reshape(slots.shape) << np.uint32(_SLOT_BITS)
        slots = np.sort(slots, axis=1) & np.uint32(_BLOCK - 1)  # grouped by stream, ascending in each
        places = (slots + np.arange(len(numbers), dtype=np.int64)[:, None] * size).ravel()
        ranks = np.tile(np.arange(size, dtype=np.int64), len(numbers))
        streams, indices = np.empty(len(places), dtype=np.int16), np.empty(len(places), dtype=np.int64)
        streams[places] = streams_of[columns]
        indices[places] = np.repeat(offsets.ravel(), counts.ravel()) + ranks
        if short.size:
            kept = streams >= 0
            return streams[kept], indices[kept]
        return streams, indices


def _spread(segment: _Segment, positions: Ints) -> tuple[_Streams, Ints]:
    """Return (streams, indices) of positions in a segment of version 3."""
    assert segment.spread is not None
    columns, indices = segment.spread.locate(positions - segment.start)
    streams = segment.streams[columns]
    return streams, indices + segment.before[streams]
