"""Which stream the sample at a position comes from: exact proportions by arithmetic on integer weights.

    segment of `position` (the schedule's), n = position - its start, W = sum of its weights w_1 … w_S
    after n positions: n_S = n, n_j = n_(j+1) * c_j // c_(j+1)      c_j = w_1 + … + w_j, nested floors
    stream j has had n_j - n_(j-1) of them, so the samples of each stream in a block are known at once
    block k begins at n = k * W // B                B = ceil(W / 1024) blocks of one size, or two, in W
    inside a block: its slots, in the order of the upper 54 bits of a hash of (seed, first position of the
    block, slot), take first stream 1, then stream 2, …; each stream's samples then ascend with the position

Guarantees. Each stream's samples come in its own order, 0, 1, 2, …, none left out, through all epochs and
segments. Proportions are exact in each run of W positions from the segment's start on, and where W <= 1024
that is a block; at the other blocks' edges each count is less than S away from its exact share n * w_j / W.
What is at a position depends on the seed and on the segments that start at or before it alone, so a schedule
may change anywhere, in the middle of a block too, without touching what was before. Integers only; golden
vectors and a plain-Python reference in the tests pin all of it.

Costs. No memory but for a call's. Seeking costs one block (about 100 microseconds), a position 30-50 ns in
calls for thousands (tests/benchmarks/bench_mixture.py). Threads and forked processes may share a `Mixture`.
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
from shardkit.order.order import MAX_POSITION, check_positions
from shardkit.order.permutation import CHUNK, GOLDEN, ONE, mix64

MAX_STREAMS = 4096  # far above any mixture; stream numbers fit int16, and a block's counts a cache
MAX_WEIGHT = 1 << 31  # sum of a segment's weights: the product of two of them stays below 2**62

_SHARE_BITS = 30  # what is finer than MAX_WEIGHT allows is rounded to multiples of 2**-30

_BLOCK = 1024  # positions in a block, at most: a few arrays of it stay in a core's first-level cache
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

    The first segment starts at 0, starts ascend, weights are whole numbers >= 0 and not all 0. Schedules that
    mean the same are equal: weights are divided by their greatest common divisor, and a segment with the
    weights of the one before it is part of that. ValueError for anything else.
    """

    segments: tuple[tuple[int, Weights], ...]

    def __post_init__(self) -> None:
        reduced: list[tuple[int, Weights]] = []
        previous = -1
        for start, weights in self.segments:
            if isinstance(start, bool) or not isinstance(start, int) or not previous < start < MAX_POSITION:
                raise ValueError(
                    f"segments of a schedule start at ascending positions from 0 to 2**62, not at {start!r}"
                    + (f" after {previous:,}" if reduced else "")
                )
            weights = _reduced(weights)
            if reduced and len(weights) != len(reduced[0][1]):
                raise ValueError(
                    f"the segment from position {start:,} has {len(weights)} weights, the first "
                    f"{len(reduced[0][1])}: give every stream one, 0 where it does not take part"
                )
            if not reduced or weights != reduced[-1][1]:
                reduced.append((start, weights))
            previous = start
        if not reduced or reduced[0][0] != 0:
            raise ValueError("the first segment of a schedule must start at position 0")
        object.__setattr__(self, "segments", tuple(reduced))

    @classmethod
    def of(cls, weights: Sequence[Weight]) -> Schedule:
        """One segment. A decimal stands for what it is written as: weights 0.7 and 0.3 are 7 and 3.

        1 / 6, which no decimal writes exactly, is taken as `Fraction(1, 6)`; `_whole` has the rule.
        """
        return cls(((0, _whole(weights)),))

    @property
    def streams(self) -> int:
        """S, the number of streams."""
        return len(self.segments[0][1])

    def weights_at(self, position: int) -> Weights:
        """The reduced weights that hold at `position`."""
        if not 0 <= position <= MAX_POSITION:
            raise ValueError(f"positions go from 0 to 2**62, not {position:,}")
        starts = [start for start, _ in self.segments]
        return self.segments[bisect_right(starts, position) - 1][1]

    def changed(self, start: int, weights: Sequence[Weight]) -> Schedule:
        """A schedule that is this one before `start`, and has these weights from there on."""
        return Schedule((*self._before(start), (start, _whole(weights))))

    def padded(self, streams: int) -> Schedule:
        """The same schedule for more streams, which have weight 0 so far."""
        if streams < self.streams:
            raise ValueError(f"the schedule has {self.streams} streams already, not {streams}")
        more = (0,) * (streams - self.streams)
        return Schedule(tuple((start, weights + more) for start, weights in self.segments))

    def agrees_before(self, other: Schedule, position: int) -> bool:
        """Whether both say the same of all positions before this one; a missing stream has weight 0."""
        streams = max(self.streams, other.streams)
        return self.padded(streams)._before(position) == other.padded(streams)._before(position)

    def to_list(self) -> list[list[object]]:
        """Plain data for a state, [[start, [w_1, …, w_S]], …]; `from_list` reads it back."""
        return [[start, list(weights)] for start, weights in self.segments]

    @classmethod
    def from_list(cls, data: object) -> Schedule:
        """StateError when `data` is not what `to_list` gives."""
        if not isinstance(data, list) or not all(
            isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], list) for entry in data
        ):
            raise StateError(f"a schedule is a list of [start, [weights]]; this one: {data!r:.200}")
        try:
            return cls(tuple((start, tuple(weights)) for start, weights in data))
        except ValueError as error:
            raise StateError(f"not a schedule: {error}") from error

    def _before(self, position: int) -> tuple[tuple[int, Weights], ...]:
        return tuple(segment for segment in self.segments if segment[0] < position)


def _whole(weights: Sequence[Weight]) -> Weights:
    """Whole numbers in the same proportions; floats count as the decimals that they are printed as.

    Where those are too fine (1 / 6 has 16 digits), a float counts as the fraction with a small denominator
    that it is the nearest float of. If that is too fine as well, shares are rounded to 2**-30: with S
    streams, each is off by less than S * 2**-30.
    """
    for weight in weights:
        if isinstance(weight, bool) or not isinstance(weight, (Rational, float)):
            raise ValueError(f"weights are numbers, not {weight!r}")
        if not 0 <= weight < float("inf"):
            raise ValueError(f"weights are numbers >= 0, not {weight!r}")
    exact = [Fraction(str(each)) if isinstance(each, float) else Fraction(each) for each in weights]
    if _is_too_fine(whole := _scaled(exact)):
        simplest = [_simplest(each) if isinstance(each, float) else Fraction(each) for each in weights]
        whole = _scaled(simplest)
    if _is_too_fine(whole):
        total = sum(whole)
        rounded = tuple(round(Fraction(each << _SHARE_BITS, total)) for each in whole)
        # A stream whose share would become 0 is left to the error: it would never come.
        return rounded if all(bool(a) == bool(b) for a, b in zip(rounded, whole, strict=True)) else whole
    return whole


def _scaled(weights: Sequence[Fraction]) -> Weights:
    scale = lcm(*(weight.denominator for weight in weights))
    return tuple(int(weight * scale) for weight in weights)


def _is_too_fine(weights: Weights) -> bool:
    return sum(weights) > MAX_WEIGHT * gcd(*weights)


def _simplest(weight: float) -> Fraction:
    """The fraction with a small denominator that has this nearest float."""
    exact, denominator = Fraction(weight), 1
    while float(found := exact.limit_denominator(denominator)) != weight:
        denominator *= 2
    return found


def _reduced(weights: Weights) -> Weights:
    """`weights` divided by their greatest common divisor; ValueError if they are no weights."""
    if not 1 <= len(weights) <= MAX_STREAMS:
        raise ValueError(f"a mixture has 1 to {MAX_STREAMS:,} streams, not {len(weights):,}")
    for weight in weights:
        if isinstance(weight, bool) or not isinstance(weight, int) or weight < 0:
            raise ValueError(f"weights are whole numbers >= 0, not {weight!r}")
    divisor = gcd(*weights)
    if not divisor:
        raise ValueError("at least one weight must be above 0")
    if (total := sum(weights) // divisor) > MAX_WEIGHT:
        raise ValueError(
            f"the weights {list(weights)!r:.200} are too fine: as smallest whole numbers they add up to "
            f"{total:.3g}, more than 2**31; round them"
        )
    return tuple(weight // divisor for weight in weights)


@dataclass(frozen=True, slots=True)
class _Segment:
    """Positions from `start` to `end` under constant weights; streams of weight 0 are not in it."""

    start: int
    end: int
    streams: _Streams  # those of weight > 0, and their weights, and the sums of those
    weights: Ints
    sums: Ints
    before: Ints  # samples of every stream of the mixture before `start`

    @classmethod
    def of(cls, start: int, end: int, weights: Weights, before: Ints) -> _Segment:
        streams = np.flatnonzero(weights).astype(np.int16)
        positive = np.array(weights, dtype=np.int64)[streams]
        return cls(start, end, streams, positive, np.cumsum(positive), before)

    @property
    def total(self) -> int:
        """W: positions in a period, which gives each stream exactly its weight."""
        return int(self.sums[-1])

    @property
    def blocks(self) -> int:
        """B: blocks in a period."""
        return -(-self.total // _BLOCK)

    @property
    def chunk(self) -> int:
        """How many blocks to work on at once."""
        return CHUNK * self.blocks // self.total

    def block(self, done: _Number) -> _Number:
        """The block of the position `done` positions behind the segment's start."""
        period, rest = done // self.total, done % self.total
        return period * self.blocks + ((rest + 1) * self.blocks - 1) // self.total

    def edge(self, block: _Number) -> _Number:
        """How far behind the segment's start a block begins."""
        return block // self.blocks * self.total + block % self.blocks * self.total // self.blocks

    def shares(self, counts: Ints) -> Ints:
        """int64[len(counts), len(streams)]: what each stream has of the first `counts` positions."""
        # n = q * W + r gives q * w_j and what r gives: no product reaches 2**62.
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
    """The streams of all positions under a schedule; see the module's docstring."""

    def __init__(self, seed: int, schedule: Schedule) -> None:
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
            segment = _Segment.of(start, end, weights, before)
            self._segments.append(segment)
            before = self._counts(segment, end)

    def locate(self, start: int, count: int) -> tuple[_Streams, Ints]:
        """(stream, index) of the `count` positions from `start` on.

        `index` counts a stream's samples from 0 on, through all its epochs. ValueError outside of [0, 2**62).
        """
        check_positions(start, count)
        stream, index = np.empty(count, dtype=np.int16), np.empty(count, dtype=np.int64)
        for segment, begin, end in self._pieces(start, start + count):
            first, last = segment.block(begin - segment.start), segment.block(end - 1 - segment.start)
            streams, indices = self._blocks(segment, np.arange(first, last + 1, dtype=np.int64))
            origin = segment.start + segment.edge(first)
            taken, piece = slice(begin - origin, end - origin), slice(begin - start, end - start)
            stream[piece], index[piece] = streams[taken], indices[taken]
        return stream, index

    def locate_at(self, positions: Ints) -> tuple[_Streams, Ints]:
        """`locate` for a flat array of positions in any order; a block is worked out for each in use."""
        if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) < MAX_POSITION:
            raise ValueError(f"positions go from 0 to 2**62, not {positions.min():,} to {positions.max():,}")
        stream, index = np.empty(len(positions), dtype=np.int16), np.empty(len(positions), dtype=np.int64)
        ascending = np.argsort(positions, kind="stable")
        edges = [*np.searchsorted(positions, self._starts, sorter=ascending).tolist(), len(positions)]
        for segment, (low, high) in zip(self._segments, pairwise(edges), strict=True):
            which = ascending[low:high]
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
        """int64[S]: samples of each stream before `position`, exact for any from 0 to 2**62."""
        if not 0 <= position <= MAX_POSITION:
            raise ValueError(f"positions go from 0 to 2**62, not {position:,}")
        return self._counts(self._segment(position), position)

    def position_of(self, stream: int, index: int) -> int | None:
        """Return where `stream` delivers its `index`-th sample, from 0 on. None if it never does.

        The inverse of `locate`; about a millisecond.
        """
        if not 0 <= stream < self.schedule.streams or index < 0:
            raise IndexError(f"no sample {index:,} of stream {stream} of {self.schedule.streams}")
        befores = [int(segment.before[stream]) for segment in self._segments]
        segment = self._segments[bisect_right(befores, index) - 1]
        column = np.flatnonzero(segment.streams == stream)
        if not column.size:
            return None
        left = index - int(segment.before[stream])
        low = left // int(segment.weights[column[0]]) * segment.blocks  # of the period that holds it
        if segment.start + segment.edge(low) >= MAX_POSITION:
            return None
        high = low + segment.blocks - 1
        while low < high:  # the last block before which the stream has no more than `left` samples
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
        """The positions from `start` to `end`, cut at segments and at blocks, about a chunk each."""
        while start < end:
            segment = self._segment(start)
            block = segment.block(start - segment.start)
            stop = min(end, segment.end, segment.start + segment.edge(block + segment.chunk))
            yield segment, start, stop
            start = stop

    def _counts(self, segment: _Segment, position: int) -> Ints:
        """`counts` at a position of the segment or at its end."""
        done = position - segment.start
        block = segment.block(done)
        edge = segment.edge(block)
        counts = segment.before.copy()
        counts[segment.streams] += segment.shares(np.array([edge]))[0]
        if edge < done:
            streams, _ = self._blocks(segment, np.array([block]))
            counts += np.bincount(streams[: done - edge], minlength=len(counts))
        return counts

    def _blocks(self, segment: _Segment, numbers: Ints) -> tuple[_Streams, Ints]:
        """(stream, index) of all positions of these blocks, one after another."""
        edges = segment.edge(numbers)
        first = segment.shares(edges)
        counts = segment.shares(segment.edge(numbers + 1)) - first
        sizes = counts.sum(axis=1)
        size = int(sizes.max())
        # The samples of a stream before the block, less the ranks that streams before it take.
        offsets = segment.before[segment.streams] + first - (np.cumsum(counts, axis=1) - counts)
        keys = mix64(self._key + GOLDEN * ((segment.start + edges).view(np.uint64) + ONE))
        hashes = mix64(keys[:, None] + GOLDEN * (_SLOTS[:size] + ONE))
        short = np.flatnonzero(sizes < size)
        streams_of = segment.streams
        if short.size:
            # One slot less: a stream -1 takes the last slot, last of all, and is left out at the end.
            hashes[short, size - 1] = ~np.uint64(0)
            counts = np.column_stack([counts, size - sizes])
            offsets = np.column_stack([offsets, np.zeros_like(sizes)])
            streams_of = np.append(streams_of, np.int16(-1))
        # A sort by value of what is unique gives the same on every machine, and is faster than an argsort.
        hashes = np.sort(hashes & ~_SLOT_MASK | _SLOTS[:size], axis=1)
        columns = np.repeat(
            np.tile(np.arange(counts.shape[1], dtype=np.uint32), len(numbers)), counts.ravel()
        )
        slots = (hashes & _SLOT_MASK).astype(np.uint32)
        slots |= columns.reshape(slots.shape) << np.uint32(_SLOT_BITS)
        slots = np.sort(slots, axis=1) & np.uint32(_BLOCK - 1)  # of each stream, ascending
        places = (slots + np.arange(len(numbers), dtype=np.int64)[:, None] * size).ravel()
        ranks = np.tile(np.arange(size, dtype=np.int64), len(numbers))
        streams, indices = np.empty(len(places), dtype=np.int16), np.empty(len(places), dtype=np.int64)
        streams[places] = streams_of[columns]
        indices[places] = np.repeat(offsets.ravel(), counts.ravel()) + ranks
        if short.size:
            kept = streams >= 0
            return streams[kept], indices[kept]
        return streams, indices
