"""What to fetch, and what to evict for it, when the future is known: Belady's MIN, for shards of any size.

`plan_fetches` simulates a cache that fetches a shard at the first position that needs it, its deadline, and
evicts then what is needed again farthest in the future, never a shard in use. It adds from which position
the fetch can begin: since when its victims have had their last use before the deadline. To fetch as early as
that costs nothing, for up to the deadline nobody asks for the victims or for the fetched shard.

Guarantees. Shards of equal size are fetched exactly as often as MIN fetches them on demand, the fewest times
possible, whenever fetches begin between start and deadline. For unequal sizes, where finding the optimum is
hard, farthest first is a good rule only (tests/cache/test_cache_belady.py states what is seen). A plan never
evicts a shard in use, never exceeds the capacity, and for one position and one state of the cache is always
the same.

The future is what is used in the epoch of the position and in the next one. A shard without a use there is
the first to go; with all lanes there is none. A plan that reaches far into the next epoch may be refined by
the one made when that has begun.

MIN itself leaves little time: with a full cache its victim is often the shard used last, which is free only
just before the deadline. A `lead` makes each use begin so many positions earlier. Then every fetch may begin
at least that long before the first sample is due, at the price of the room that the waiting shards take.

Costs, measured with 450,000 shards, 64 lanes and 8,000 shards cached: 4 to 6 ms for a plan of 64 fetches,
1 ms for the next uses of all that is cached, half a second for the first call in each epoch, 40 MB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shardkit.arrays import Ints
from shardkit.order.order import Order
from shardkit.order.residency import ShardUses, shard_uses

NEVER = int(np.iinfo(np.int64).max)  # the next use of a shard that has none

_CHUNK = 4096  # uses looked at together: a few microseconds of work, seldom much more than needed
_EPOCHS = 2  # known ahead: each shard's next use is in this epoch or the next

_Numbers = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Fetch:
    """One fetch of a plan."""

    shard: int
    deadline: int  # position where its first use begins; the plan's position if it is needed already
    start: int  # position from which it may begin; the plan's position: now
    evict: tuple[int, ...]  # to be removed first, all of them unneeded from `start` to the deadline
    fits: bool  # False: what else is in use at the deadline leaves no room; then nothing is evicted


class Uses(Protocol):
    """Intervals of other positions than one order's: a mixture's, or a simulated node's."""

    samples: int
    """Positions in an epoch."""
    shards: int

    def uses(self, epoch: int, lanes: Sequence[int] | None = None) -> ShardUses: ...


class Future:
    """The uses of the shards by some lanes (None: by all) from a position on, in its epoch and the next.

    `lead`: by how many positions each use begins earlier, so that shards are there in time.
    Positions may go forth and back; each new epoch costs a sort. Not for several threads at once.
    """

    def __init__(self, order: Order | Uses, lanes: Sequence[int] | None = None, lead: int = 0) -> None:
        if lead < 0:
            raise ValueError(f"lead must not be negative: {lead}")
        self._order = order
        self._shards = order.shards
        self._lead = lead
        self._lanes = lanes
        self._epoch = -1  # nothing is loaded before the first position is known
        self._position = 0  # of the last call
        self._passed = 0  # uses before this one have ended at that position

    def next_use(self, position: int, shards: npt.ArrayLike) -> Ints:
        """Return where each shard is needed next: `position` if it is in use, NEVER if not here."""
        return np.maximum(self._next_begins(position, np.asarray(shards, dtype=np.int64)), position)

    def upcoming(self, position: int) -> ShardUses:
        """Return the uses at or after `position`, by begin. Uses of a shard that touch have become one."""
        in_use, begun = self._split(position)
        return self._uses.take(np.concatenate([in_use, np.arange(begun, len(self._uses))]))

    def bytes_per_position(self, position: int, sizes: Ints) -> float:
        """Return the mean bytes of a position from `position` on, by the shards' `sizes`."""
        uses = self.upcoming(position)
        positions = _EPOCHS * self._order.samples - position % self._order.samples
        return float(sizes[uses.shard].sum()) / max(1, positions)

    def _split(self, position: int) -> tuple[_Numbers, int]:
        """Return (the uses that run at `position`, the first that begins after it), as numbers of uses."""
        self._move(position)
        begun = int(np.searchsorted(self._uses.begin, position, side="right"))
        in_use = self._passed + np.flatnonzero(self._uses.end[self._passed : begun] > position)
        self._passed = int(in_use[0]) if len(in_use) else begun
        return in_use, begun

    def _next_begins(self, position: int, shards: Ints) -> Ints:
        """Return where each shard's first use begins that has not ended at `position`; NEVER without one."""
        self._move(position)
        # A binary search, for all shards at once, among the places of a shard's uses in `_by_shard`.
        low, stop = self._first[shards], self._first[shards + 1]
        high = stop
        for _ in range(self._most.bit_length()):
            searching = low < high
            middle = (low + high) // 2
            ended = searching & (self._ends[self._by_shard[middle]] <= position)
            low, high = np.where(ended, middle + 1, low), np.where(ended, high, middle)
        return np.where(low < stop, self._begins[self._by_shard[low]], NEVER)

    def _move(self, position: int) -> None:
        if position < 0:
            raise ValueError(f"positions are numbered from 0, not {position}")
        epoch = position // max(1, self._order.samples)
        if epoch != self._epoch:
            self._load(epoch)
        if position < self._position:
            self._passed = 0
        self._position = position

    def _load(self, epoch: int) -> None:
        uses = _joined(self._order, range(epoch, epoch + _EPOCHS), self._lanes)
        uses, by_shard = _merged(ShardUses(uses.shard, np.maximum(uses.begin - self._lead, 0), uses.end))
        count = len(uses)
        # One more entry than uses in these, so that number `count` stands for "no use".
        self._begins = np.append(uses.begin, NEVER)
        self._ends = np.append(uses.end, NEVER)
        self._uses = ShardUses(uses.shard, self._begins[:-1], self._ends[:-1])
        self._by_shard = np.append(by_shard, count)  # numbers of `_uses`, shard after shard
        counts = np.bincount(uses.shard, minlength=self._shards)
        self._first = np.concatenate([[0], np.cumsum(counts)])  # where each shard's numbers begin there
        self._most = int(counts.max(initial=0))
        same = uses.shard[by_shard[:-1]] == uses.shard[by_shard[1:]]
        self._again = np.full(count, NEVER, dtype=np.int64)  # where each use's shard is needed after it
        self._again[by_shard[:-1][same]] = uses.begin[by_shard[1:][same]]
        self._epoch, self._passed = epoch, 0


def plan_fetches(
    future: Future,
    position: int,
    cached: Mapping[int, int],
    sizes: Ints,
    capacity: int,
    limit: int,
) -> list[Fetch]:
    """Plan the next fetches, `limit` at most, by deadline; and all that are needed already and do not fit.

    `cached`: the bytes of each shard in the cache; a shard that is being fetched counts as there. `sizes`: of
    all shards. `capacity`: in bytes, less what others occupy. Take the fetches in their order, leaving out
    those whose `start` has not come: a fetch may use the room that one before it leaves.
    """
    if capacity < 0 or limit < 0:
        raise ValueError(f"capacity and limit must not be negative: {capacity:,}, {limit}")
    simulated = _Simulation(future, position, cached, sizes, capacity, limit)
    fetches: list[Fetch] = []
    in_use, begun = future._split(position)
    left = limit
    chunks = [range(first, first + _CHUNK) for first in range(begun, len(future._uses), _CHUNK)]
    for chunk in [in_use, *chunks]:
        numbers = np.asarray(chunk, dtype=np.intp)
        numbers = numbers[numbers < len(future._uses)]
        while len(numbers) and left > 0:
            hits = simulated.use(numbers)
            if hits < len(numbers):
                fetch = simulated.fetch(int(numbers[hits]))
                fetches.append(fetch)
                # Where more is in use than fits, these would leave no place for what comes after them.
                left -= fetch.fits or fetch.deadline > position
            numbers = numbers[hits + 1 :]
        if left <= 0:
            break
    return fetches


class _Simulation:
    """A cache at a position that moves on with the uses of its shards. Each shard in it has a slot."""

    def __init__(
        self,
        future: Future,
        position: int,
        cached: Mapping[int, int],
        sizes: Ints,
        capacity: int,
        limit: int,
    ) -> None:
        shards = np.fromiter(cached.keys(), dtype=np.int64, count=len(cached))
        by_number = np.argsort(shards)  # the plan must not depend on the order of `cached`
        spare = np.zeros(limit, dtype=np.int64)
        self._future, self._position, self._sizes = future, position, sizes
        self._count = len(shards)  # of slots
        self._shards = np.concatenate([shards[by_number], spare])
        held = np.fromiter(cached.values(), dtype=np.int64, count=len(cached))
        self._bytes = np.concatenate([held[by_number], spare])
        # Where the use began that is under way or to come, and where the one before it ended.
        self._next = np.concatenate([future._next_begins(position, shards[by_number]), spare])
        self._free = np.full(len(self._shards), position, dtype=np.int64)
        self._slots = np.full(len(sizes), -1, dtype=np.int32)
        self._slots[self._shards[: self._count]] = np.arange(self._count)
        self._gone: dict[int, int] = {}  # from which position on an evicted shard is
        self._room = _Room(capacity - int(held.sum()), position)
        self._too_large = NEVER  # bytes for which there is no room among what is in use now

    def use(self, numbers: _Numbers) -> int:
        """Pass through the uses up to the first whose shard is missing; returns how many they are."""
        slots = self._slots[self._future._uses.shard[numbers]]
        missing = np.flatnonzero(slots < 0)
        hits = int(missing[0]) if len(missing) else len(numbers)
        # Uses of one shard follow one another: the last assignment, which is the one that stays, is right.
        self._next[slots[:hits]] = self._future._again[numbers[:hits]]
        self._free[slots[:hits]] = self._future._uses.end[numbers[:hits]]
        return hits

    def fetch(self, number: int) -> Fetch:
        """Make room for the shard of a use when it begins, and fetch it."""
        shard = int(self._future._uses.shard[number])
        deadline = max(int(self._future._uses.begin[number]), self._position)
        size, is_needed = int(self._sizes[shard]), deadline == self._position
        is_hopeless = is_needed and size >= self._too_large
        victims = None if is_hopeless else self._victims(size - self._room.bytes, deadline)
        if victims is None:
            self._too_large = min(size, self._too_large) if is_needed else self._too_large
            return Fetch(shard, deadline, self._position, (), fits=False)
        start = self._gone.get(shard, self._position)  # not while it is still there from an earlier use
        for slot in victims:
            start = max(start, int(self._free[slot]))
        for slot in victims:
            self._room.add(int(self._bytes[slot]), start)
            self._slots[self._shards[slot]] = -1
            self._gone[int(self._shards[slot])] = start
            self._next[slot] = -1  # before any deadline: no victim again
        start = self._room.take(size, start)
        slot, self._count = self._count, self._count + 1
        self._shards[slot], self._bytes[slot], self._slots[shard] = shard, size, slot
        self._next[slot] = self._future._again[number]
        self._free[slot] = self._future._uses.end[number]
        return Fetch(shard, deadline, start, tuple(self._shards[victims].tolist()), fits=True)

    def _victims(self, needed: int, deadline: int) -> list[int] | None:
        """Choose slots to evict for `needed` bytes at `deadline`, farthest use first; None if too few."""
        if needed <= 0:
            return []
        count = self._count
        # A use that begins at the deadline may not have been passed yet: its shard is in use all the same.
        idle = (self._free[:count] <= deadline) & (self._next[:count] > deadline)
        if int(self._bytes[:count][idle].sum()) < needed:
            return None
        farness = np.where(idle, self._next[:count], -1)
        victims: list[int] = []
        freed = 0
        while freed < needed:
            slots = np.flatnonzero(farness == farness.max())
            slots = slots[self._free[slots] == self._free[slots].min()]  # of those, what can go first
            slot = int(slots[self._shards[slots].argmin()])
            farness[slot] = -1
            victims.append(slot)
            freed += int(self._bytes[slot])
        # The last one may be so large that others can stay.
        for slot in victims[::-1]:
            if freed - int(self._bytes[slot]) >= needed:
                freed -= int(self._bytes[slot])
                victims.remove(slot)
        return victims


class _Room:
    """Free bytes, and from which position on each of them is free."""

    def __init__(self, count: int, position: int) -> None:
        self.bytes = count  # negative while the cache holds more than its capacity
        self._pieces = [(position, count)]

    def add(self, count: int, position: int) -> None:
        self.bytes += count
        self._pieces.append((position, count))

    def take(self, count: int, position: int) -> int:
        """Take `count` bytes; returns from where on they are free, which is not before `position`."""
        assert count <= self.bytes
        self.bytes -= count
        kept = []
        begin = position
        for free_from, size in sorted(self._pieces, key=lambda piece: _preference(piece, begin)):
            taken = min(size, count)
            count -= taken
            if taken:
                position = max(position, free_from)
            if size > taken:
                kept.append((free_from, size - taken))
        self._pieces = kept
        return position


def _preference(piece: tuple[int, int], position: int) -> tuple[bool, bool, int]:
    free_from, size = piece
    # What is lacking comes first. Then, of what is free at `position`, the latest: what is free early may
    # help another fetch to begin early.
    return size > 0, free_from > position, abs(free_from - position)


def _joined(order: Order | Uses, epochs: range, lanes: Sequence[int] | None) -> ShardUses:
    """Return the uses of consecutive epochs: sorted, because an epoch ends before the next begins."""
    if isinstance(order, Order):
        return ShardUses.joined([shard_uses(order, epoch, lanes) for epoch in epochs])
    return ShardUses.joined([order.uses(epoch, lanes) for epoch in epochs])


def _merged(uses: ShardUses) -> tuple[ShardUses, _Numbers]:
    """Join uses of one shard that overlap or touch; returns (uses, their numbers by shard)."""
    # Stable, so that a shard's uses stay in the order of their begins.
    by_shard = np.argsort(uses.shard, kind="stable")
    shard, begin, end = uses.shard[by_shard], uses.begin[by_shard], uses.end[by_shard]
    # The farthest end among a shard's uses so far: a running maximum, over twice as many in each pass.
    reach = 1
    while reach < len(shard) and (same := shard[reach:] == shard[:-reach]).any():
        end[reach:] = np.maximum(end[reach:], np.where(same, end[:-reach], 0))
        reach *= 2
    is_first = np.ones(len(shard), dtype=np.bool_)
    is_first[1:] = (shard[1:] != shard[:-1]) | (begin[1:] > end[:-1])
    first = np.flatnonzero(is_first)
    last = np.append(first[1:], len(shard))[: len(first)] - 1
    kept = np.zeros(len(shard), dtype=np.bool_)
    kept[by_shard[first]] = True
    merged_end = np.empty_like(end)
    merged_end[by_shard[first]] = end[last]
    numbers = np.cumsum(kept) - 1
    return ShardUses(uses.shard[kept], uses.begin[kept], merged_end[kept]), numbers[by_shard[first]]
