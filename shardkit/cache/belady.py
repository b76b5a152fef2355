"""Plans fetches and evictions when the future is known: Belady's MIN, for shards of any size.

`plan_fetches` simulates a cache that fetches a shard at the first position that needs it (its deadline) and
then evicts the shards whose next use is farthest in the future, never a shard in use. It adds the position
from which the fetch can begin: the position where its victims have had their last use before the deadline.
Fetching as early as that costs nothing, because neither the victims nor the fetched shard are needed until
the deadline.

Guarantees. Shards of equal size are fetched exactly as often as MIN fetches them on demand, the fewest times
possible, if every fetch begins between its start and its deadline. For unequal sizes, where finding the
optimum is hard, farthest first is only a good rule (measured in tests/cache/test_cache_belady.py). A plan
never evicts a shard in use and never exceeds the capacity; for the same position and cache contents it is
always the same.

The known future is the uses in the position's epoch and the next one. A shard without a use there is evicted
first; with all lanes, every shard has one. A plan that reaches far into the next epoch may be improved by the
plan made when that epoch has begun.

MIN itself leaves little time: with a full cache its victim is often the shard used last, which is free only
just before the deadline. A `lead` makes each use begin that many positions earlier. Every fetch may then
begin at least that long before the first sample is due, at the cost of the space that waiting shards take.

Costs, measured with 450,000 shards, 64 lanes and 8,000 cached shards: 4 to 6 ms for a plan of 64 fetches,
1 ms for the next uses of all cached shards, half a second for the first call in each epoch, 40 MB.
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

NEVER = int(np.iinfo(np.int64).max)  # the next use of a shard that is not used again

_CHUNK = 4096  # number of uses that a plan processes at once, in microseconds; rarely far too many
_EPOCHS = 2  # number of epochs known ahead: each shard's next use is in this epoch or the next

_Numbers = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Fetch:
    """One fetch of a plan."""

    shard: int
    deadline: int  # position where the shard's first use begins; the plan's position if it is needed now
    start: int  # position from which the fetch may begin; the plan's position means now
    evict: tuple[int, ...]  # shards to evict first; none of them is needed from `start` to the deadline
    fits: bool  # False if the shards in use at the deadline leave no room; then nothing is evicted


class Uses(Protocol):
    """The uses of shards by something other than a single order: a mixture, or a simulated node."""

    samples: int
    """The number of positions in an epoch."""
    shards: int

    def uses(self, epoch: int, lanes: Sequence[int] | None = None) -> ShardUses: ...


class Future:
    """The uses of shards by `lanes` (None: all) in the epoch of a position and in the next epoch.

    `lead`: number of positions by which each use begins earlier, so that shards arrive in time. Positions may
    be passed in any order; each change of epoch costs a sort. Not thread-safe.
    """

    def __init__(self, order: Order | Uses, lanes: Sequence[int] | None = None, lead: int = 0) -> None:
        if lead < 0:
            raise ValueError(f"lead must not be negative: {lead}")
        self._order = order
        self._shards = order.shards
        self._lead = lead
        self._lanes = lanes
        self._epoch = -1  # no epoch is loaded before the first position is known
        self._position = 0  # position of the last call
        self._passed = 0  # uses with a lower index than this have ended at `_position`

    def next_use(self, position: int, shards: npt.ArrayLike) -> Ints:
        """Return the position of each shard's next use: `position` if it is in use, NEVER if it has none."""
        return np.maximum(self._next_begins(position, np.asarray(shards, dtype=np.int64)), position)

    def upcoming(self, position: int) -> ShardUses:
        """Return the uses that end after `position`, sorted by begin; touching uses of a shard are merged."""
        in_use, begun = self._split(position)
        return self._uses.take(np.concatenate([in_use, np.arange(begun, len(self._uses))]))

    def bytes_per_position(self, position: int, sizes: Ints) -> float:
        """Return the mean number of bytes needed per position from `position` on, given the shards' sizes."""
        uses = self.upcoming(position)
        positions = _EPOCHS * self._order.samples - position % self._order.samples
        return float(sizes[uses.shard].sum()) / max(1, positions)

    def _split(self, position: int) -> tuple[_Numbers, int]:
        """Return the indices of the uses in progress at `position`, and of the first that begins later."""
        self._move(position)
        begun = int(np.searchsorted(self._uses.begin, position, side="right"))
        in_use = self._passed + np.flatnonzero(self._uses.end[self._passed : begun] > position)
        self._passed = int(in_use[0]) if len(in_use) else begun
        return in_use, begun

    def _next_begins(self, position: int, shards: Ints) -> Ints:
        """Return the begin of each shard's first use that has not ended at `position`; NEVER without one."""
        self._move(position)
        # A binary search for all shards at once, each over its own range of `_by_shard`.
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
            raise ValueError(f"positions are numbered from 0; got {position}")
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
        # These arrays have one entry more than there are uses: index `count` means "no use".
        self._begins = np.append(uses.begin, NEVER)
        self._ends = np.append(uses.end, NEVER)
        self._uses = ShardUses(uses.shard, self._begins[:-1], self._ends[:-1])
        self._by_shard = np.append(by_shard, count)  # indices of uses, grouped by shard
        counts = np.bincount(uses.shard, minlength=self._shards)
        self._first = np.concatenate([[0], np.cumsum(counts)])  # first index of each shard in `_by_shard`
        self._most = int(counts.max(initial=0))
        same = uses.shard[by_shard[:-1]] == uses.shard[by_shard[1:]]
        self._again = np.full(count, NEVER, dtype=np.int64)  # for each use, when its shard is used next
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
    """Return the next fetches by deadline: at most `limit`, plus shards needed now that do not fit.

    `cached`: size in bytes of each cached shard; a shard that is being fetched counts as cached. `sizes`: of
    all shards, in bytes. `capacity`: bytes that these shards may occupy. The caller begins the fetches in
    this order, because one may use space that an earlier one leaves, and skips those not at `start` yet.
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
                # Fetches that are needed now and do not fit are not counted: they would use up the limit.
                left -= fetch.fits or fetch.deadline > position
            numbers = numbers[hits + 1 :]
        if left <= 0:
            break
    return fetches


class _Simulation:
    """A simulated cache that moves forward through the uses of its shards. Each cached shard has a slot."""

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
        self._count = len(shards)  # number of slots in use
        self._shards = np.concatenate([shards[by_number], spare])
        held = np.fromiter(cached.values(), dtype=np.int64, count=len(cached))
        self._bytes = np.concatenate([held[by_number], spare])
        # Per slot: when the shard's next unprocessed use begins, and when the use before it ends.
        self._next = np.concatenate([future._next_begins(position, shards[by_number]), spare])
        self._free = np.full(len(self._shards), position, dtype=np.int64)
        self._slots = np.full(len(sizes), -1, dtype=np.int32)
        self._slots[self._shards[: self._count]] = np.arange(self._count)
        self._gone: dict[int, int] = {}  # evicted shard -> position at which its space is free
        self._room = _Room(capacity - int(held.sum()), position)
        self._too_large = NEVER  # smallest size known not to fit in addition to the shards in use now

    def use(self, numbers: _Numbers) -> int:
        """Process these uses in order, up to the first whose shard is not cached; return their number."""
        slots = self._slots[self._future._uses.shard[numbers]]
        missing = np.flatnonzero(slots < 0)
        hits = int(missing[0]) if len(missing) else len(numbers)
        # If a shard has several of these uses, the last assignment wins, and belongs to its last use.
        self._next[slots[:hits]] = self._future._again[numbers[:hits]]
        self._free[slots[:hits]] = self._future._uses.end[numbers[:hits]]
        return hits

    def fetch(self, number: int) -> Fetch:
        """Simulate the fetch for use `number` at its deadline, with its evictions, and return the fetch."""
        shard = int(self._future._uses.shard[number])
        deadline = max(int(self._future._uses.begin[number]), self._position)
        size, is_needed = int(self._sizes[shard]), deadline == self._position
        is_hopeless = is_needed and size >= self._too_large
        victims = None if is_hopeless else self._victims(size - self._room.bytes, deadline)
        if victims is None:
            self._too_large = min(size, self._too_large) if is_needed else self._too_large
            return Fetch(shard, deadline, self._position, (), fits=False)
        start = self._gone.get(shard, self._position)  # not before an earlier copy of the shard is evicted
        for slot in victims:
            start = max(start, int(self._free[slot]))
        for slot in victims:
            self._room.add(int(self._bytes[slot]), start)
            self._slots[self._shards[slot]] = -1
            self._gone[int(self._shards[slot])] = start
            self._next[slot] = -1  # earlier than any deadline, so that the slot is not chosen again
        start = self._room.take(size, start)
        slot, self._count = self._count, self._count + 1
        self._shards[slot], self._bytes[slot], self._slots[shard] = shard, size, slot
        self._next[slot] = self._future._again[number]
        self._free[slot] = self._future._uses.end[number]
        return Fetch(shard, deadline, start, tuple(self._shards[victims].tolist()), fits=True)

    def _victims(self, needed: int, deadline: int) -> list[int] | None:
        """Choose slots to evict for `needed` bytes at `deadline`, farthest use first; None if not enough."""
        if needed <= 0:
            return []
        count = self._count
        # A use that begins at the deadline may not be processed yet, but its shard counts as in use.
        idle = (self._free[:count] <= deadline) & (self._next[:count] > deadline)
        if int(self._bytes[:count][idle].sum()) < needed:
            return None
        farness = np.where(idle, self._next[:count], -1)
        victims: list[int] = []
        freed = 0
        while freed < needed:
            slots = np.flatnonzero(farness == farness.max())
            slots = slots[self._free[slots] == self._free[slots].min()]  # among equals, the earliest free
            slot = int(slots[self._shards[slots].argmin()])
            farness[slot] = -1
            victims.append(slot)
            freed += int(self._bytes[slot])
        # The last victim may be so large that earlier victims are not needed.
        for slot in victims[::-1]:
            if freed - int(self._bytes[slot]) >= needed:
                freed -= int(self._bytes[slot])
                victims.remove(slot)
        return victims


class _Room:
    """Free bytes of the simulated cache, and the position from which each piece is free."""

    def __init__(self, count: int, position: int) -> None:
        self.bytes = count  # negative while the cache holds more than its capacity
        self._pieces = [(position, count)]

    def add(self, count: int, position: int) -> None:
        self.bytes += count
        self._pieces.append((position, count))

    def take(self, count: int, position: int) -> int:
        """Take `count` bytes; return the position, at least `position`, from which all of them are free."""
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
    # Negative pieces (missing bytes) come first. Then, among pieces free at `position`, the one that became
    # free last: earlier pieces may let another fetch begin earlier.
    return size > 0, free_from > position, abs(free_from - position)


def _joined(order: Order | Uses, epochs: range, lanes: Sequence[int] | None) -> ShardUses:
    """Return the uses of consecutive epochs; sorted, because an epoch ends before the next begins."""
    if isinstance(order, Order):
        return ShardUses.joined([shard_uses(order, epoch, lanes) for epoch in epochs])
    return ShardUses.joined([order.uses(epoch, lanes) for epoch in epochs])


def _merged(uses: ShardUses) -> tuple[ShardUses, _Numbers]:
    """Merge uses of one shard that overlap or touch; return the uses, and their numbers grouped by shard."""
    # The sort is stable, so that a shard's uses stay sorted by begin.
    by_shard = np.argsort(uses.shard, kind="stable")
    shard, begin, end = uses.shard[by_shard], uses.begin[by_shard], uses.end[by_shard]
    # Running maximum of the ends of each shard's uses; each pass doubles the number of uses covered.
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
