"""What to fetch next and what to evict for it, when a fetcher asks: plans that follow a training loop.

A `FetchPlan` numbers the shards of all datasets that share a cache as one; its `Planner` decides by these
numbers. Both look at the `LoopPosition`, which the loop itself moves.

The plan itself is `shardkit.cache.belady`: farthest next use is evicted, earliest deadline is fetched first,
and no fetch begins before its victims have had their last use. Entries of other jobs and datasets, whose
future is not known here, may be evicted when nobody has used them for a minute. A fetch that failed (another
process is at it, the object is missing, the room was taken) rests before it is planned again.

A cache is not filled as fast as the network allows: when thousands of nodes start together, a store would
have to give a thousand times what they consume. Shards that are in use, or that the loop needs within
minutes, are fetched at once; beyond, a few times as much is fetched as the loop consumes (`Pace`).

Where several plans of one process share a cache that cannot hold the dataset, each plans with an equal part
of it and protects the cached entries that it needs soonest, as many as fit in that part, from the others.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from shardkit.arrays import Ints
from shardkit.cache.belady import NEVER, Fetch, Future, Uses, plan_fetches
from shardkit.cache.entry import EntryNames
from shardkit.cache.protocol import Cache, Contents, Fetchable
from shardkit.order.order import Order
from shardkit.storage.threads import remake_after_fork

PLANNED = 64  # fetches planned at a time
IDLE_SECONDS = 60.0  # entries of others that nobody has used for so long count as abandoned
REST_SECONDS = 5.0  # far more than planning and trying cost, far less than a plan reaches ahead
_LEAST_SECONDS, _MOST_SECONDS = 0.5, 60.0  # over which a loop's speed is measured
_FREE_BYTES = 16 << 20  # of shards smaller than this: too little to hold back
_GOLDEN_RATIO = 0.6180339887498949
_STEPS_AN_EPOCH = 64  # how often a plan that has nothing to do is looked at again
# Shards are wanted so much of the cache ahead of their first use: without a lead, a full cache would give up
# the shard that it has just used, and every fetch would begin at its deadline.
LEADS_IN_CACHE = 32


class LoopPosition:
    """The position of a training loop, in samples of all ranks and epochs; plans look at it."""

    __slots__ = ("given", "read", "reading_to")

    def __init__(self, position: int) -> None:
        self.read = position
        """Everything before it has been read."""
        self.reading_to = position
        """The end of the rows that are being read."""
        self.given = position
        """Everything before it has been handed to the loop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How fast the cache is filled with shards that are not needed soon."""

    factor: float = 3.0
    """Bytes fetched for each byte that the loop needs: all nodes together stay below five in any second."""
    horizon_seconds: float = 120.0
    """Shards that the loop needs within this time, as fast as it is now, are fetched at once."""
    sharers: int = 1
    """Processes that fetch by the same plan into one cache."""
    debt: float = 0.0
    """The part of a shard that is needed before the first is fetched ahead."""

    @classmethod
    def of_rank(cls, rank: int, sharers: int = 1) -> Pace:
        """Return the pace of one process.

        Ranks step together, so their debts start staggered; otherwise all would fetch at one time.
        """
        return cls(sharers=max(1, sharers), debt=rank * _GOLDEN_RATIO % 1)


class _Pacing:
    """Decides which fetches have to wait for the loop."""

    def __init__(self, pace: Pace, loop: LoopPosition, clock: Callable[[], float]) -> None:
        self._pace, self._loop, self._clock = pace, loop, clock
        self._credited = loop.given
        self._bytes_per_position = self._most_credit = 0.0
        self._credit = 0.0  # bytes that may be fetched beyond the horizon
        self._measured = (clock(), loop.given)
        self._horizon = 0  # positions that the loop consumes in `horizon_seconds`
        self.resume_at = NEVER
        """A fetch that waits may begin once the loop has been given everything before this position."""

    @property
    def has_begun(self) -> bool:
        return self._bytes_per_position > 0

    @property
    def horizon(self) -> int:
        """Shards that are needed up to this position are fetched at once."""
        return self._loop.given + self._horizon

    def begin(self, bytes_per_position: float, shard_bytes: int) -> None:
        """Start to hold fetches back, now that it is known how much the loop needs."""
        pace = self._pace
        self._bytes_per_position = max(1e-9, bytes_per_position * pace.factor / pace.sharers)
        self._most_credit = float(max(shard_bytes, _FREE_BYTES))
        self._credit = max(0.0, _FREE_BYTES - shard_bytes) - pace.debt * shard_bytes

    def must_wait(self, deadline: int, size: int) -> bool:
        """Whether a shard that is needed at `deadline` has to wait; if not, it counts as fetched."""
        self.resume_at = NEVER
        if not self.has_begun:
            return False
        self._follow_loop()
        early = deadline - self.horizon
        if early <= 0:
            return False
        if self._credit > 0:
            self._credit -= size
            return False
        self.resume_at = self._loop.given + min(early, int(-self._credit / self._bytes_per_position) + 1)
        return True

    def _follow_loop(self) -> None:
        """Give credit for what has been consumed, and see how fast that goes."""
        consumed, now = self._loop.given, self._clock()
        earned = self._bytes_per_position * max(0, consumed - self._credited)
        self._credit, self._credited = min(self._credit + earned, self._most_credit), consumed
        since, begin = self._measured
        if now - since >= _LEAST_SECONDS and consumed > begin:
            self._horizon = int((consumed - begin) / (now - since) * self._pace.horizon_seconds)
        if now - since >= _MOST_SECONDS or consumed < begin:
            self._measured = now, consumed


class Planner:
    """Plans for one loop of a process, by numbers of shards. For the fetcher's threads."""

    def __init__(
        self,
        future: Future,
        names: EntryNames,
        sizes: Ints,
        samples: int,
        loop: LoopPosition,
        *,
        plans: Callable[[], Sequence[Planner]] = lambda: (),
        pace: Pace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`names`, `sizes`: of all shards' entries; `samples`: of an epoch; `loop`: who is planned for.

        A name that is not known yet comes by `set_entry`. `plans` gives all plans for the same cache:
        other runs of the process have theirs. Without `pace`, all is fetched as early as it may be.
        """
        self.loop = loop
        """The position of the loop."""
        self._pacing = None if pace is None else _Pacing(pace, loop, clock)
        self._plans = plans
        self._future = future
        self._names = names
        self._sizes = sizes.copy()
        self._clock = clock
        self._pause = max(1, samples // _STEPS_AN_EPOCH)
        self._waiting: deque[Fetch] = deque()
        self.wake_at = loop.read
        """There may be something to do once the loop has read everything before this position."""
        self.unfit: frozenset[int] = frozenset()
        """Shards that had no room in the last plan, or were being fetched."""
        self._fruitful = True  # something was fetched since the last plan
        self._taken: set[int] = set()  # fetches that have begun and may still be going on
        self._resting: dict[int, float] = {}  # shards whose fetch failed, and until when
        self._others: list[str] | None = None  # entries of other runs, as the last plan found them
        self._capacity = 0  # of the last plan, before other plans have their parts
        # Shards by their next use, as the last plan found them: cumulated bytes, and names when asked for.
        self._soonest = self._soonest_ends = np.empty(0, dtype=np.int64)
        self._soonest_names: list[str] | None = None
        self.after_fork()
        remake_after_fork(self)

    def after_fork(self) -> None:
        """Reset in a child: a thread of its parent may have held the lock."""
        self._lock = threading.Lock()  # of the future, which is not for several threads

    @property
    def resume_at(self) -> int:
        """A fetch that waits for the loop may begin once everything before this position was given to it."""
        return NEVER if self._pacing is None else self._pacing.resume_at

    def set_entry(self, number: int, name: str, entry_bytes: int) -> None:
        """Set name and size of a shard's entry, where the index does not state them. From any thread."""
        self._sizes[number] = entry_bytes
        self._names.set_name(number, name)

    def next_use(self, number: int) -> int:
        """Return where the loop needs a shard next: a position, or NEVER. From any thread."""
        with self._lock:
            return int(self._future.next_use(self.loop.read, [number])[0])

    def take(self, active: Container[int]) -> Fetch | None:
        """Return the next fetch that may begin, or None."""
        position = self.loop.read
        for number, fetch in enumerate(self._waiting):
            if fetch.start <= position:
                if fetch.shard not in active and self._must_wait(fetch):
                    return None  # and so must what is needed later still
                del self._waiting[number]
                if fetch.shard in active:
                    return self.take(active)
                self._fruitful = True
                self._taken.add(fetch.shard)
                return fetch
        if self._waiting:
            self.wake_at = min(fetch.start for fetch in self._waiting)
        return None

    def _must_wait(self, fetch: Fetch) -> bool:
        if self._pacing is None or fetch.deadline <= self.loop.read:
            return False
        return self._pacing.must_wait(fetch.deadline, int(self._sizes[fetch.shard]))

    def is_ahead(self, fetch: Fetch) -> bool:
        """Whether a fetch is of a shard that the loop does not need within the horizon of its pace."""
        return self._pacing is not None and fetch.deadline > self._pacing.horizon

    def is_stale(self) -> bool:
        """Whether there is reason to plan again."""
        return not self._waiting and (self._fruitful or self.loop.read >= self.wake_at)

    def plan(self, cache: Cache, active: Iterable[int]) -> None:
        """Plan the next fetches from what the cache holds; shards in `active` are as good as there."""
        position = self.loop.read
        # First of all: a cache that cannot list its contents would be asked again at once.
        self._fruitful, self.wake_at = False, position + self._pause
        active = set(active)
        contents = cache.contents()
        cached: dict[int, int] = {}
        others = 0
        for name, held in contents.items():
            if numbers := self._names.numbers(name):
                cached |= dict.fromkeys(numbers, 0)  # of the same content: it takes room once
                cached[numbers[0]] = held.bytes
            elif held.used_seconds_ago < IDLE_SECONDS:
                others += held.bytes
        self._note_others(contents)
        for number in active:
            cached.setdefault(number, int(self._sizes[number]))
        resting = self._backing_off(self._taken - cached.keys())
        self._taken &= active
        capacity = max(0, cache.capacity - others)
        parts = 1 if int(self._sizes.sum()) <= capacity else max(1, len(self._plans()))
        with self._lock:
            if self._pacing is not None and not self._pacing.has_begun:
                flow = self._future.bytes_per_position(position, self._sizes)
                self._pacing.begin(flow, int(self._sizes.max(initial=0)))
            fetches = plan_fetches(self._future, position, cached, self._sizes, capacity // parts, PLANNED)
        possible = [fetch for fetch in fetches if fetch.fits and fetch.shard not in resting]
        self.unfit = frozenset(active.union(fetch.shard for fetch in fetches if not fetch.fits))
        starts = [fetch.start for fetch in possible if fetch.start > position]
        self.wake_at = min([position + self._pause, *starts])
        self._waiting = deque(possible)
        self._note_soonest([*cached, *(fetch.shard for fetch in possible)], position)
        self._capacity = capacity

    def _note_soonest(self, numbers: Sequence[int], position: int) -> None:
        """Sort what is cached, or planned to be, by next use: for `protected`."""
        shards = np.unique(np.array(numbers, dtype=np.int64))
        with self._lock:
            uses = self._future.next_use(position, shards)
        self._soonest = shards[uses < NEVER][np.argsort(uses[uses < NEVER], kind="stable")]
        self._soonest_ends, self._soonest_names = np.cumsum(self._sizes[self._soonest]), None

    def protected(self, parts: int) -> list[str]:
        """Return the entries that this plan needs soonest, as many as its part of the cache holds."""
        names = self._soonest_names
        if names is None:  # seldom asked for: with a plan of several
            names = self._soonest_names = [self._names.name(number) for number in self._soonest.tolist()]
        return names[: int(np.searchsorted(self._soonest_ends, self._capacity // parts, side="right"))]

    def _protected(self) -> Container[str]:
        """Return the entries that other plans protect."""
        plans = self._plans()
        return {name for plan in plans if plan is not self for name in plan.protected(len(plans))}

    def _backing_off(self, failed: Iterable[int]) -> Container[int]:
        """Return the shards to leave out of this plan: their fetch failed within the last REST_SECONDS."""
        now = self._clock()
        self._resting = {number: until for number, until in self._resting.items() if until > now}
        self._resting |= dict.fromkeys(failed, now + REST_SECONDS)
        return self._resting

    def victims_for(self, fetch: Fetch, contents: Contents) -> Iterator[str]:
        """Yield entries in the order in which they may be evicted for `fetch`, those planned for it first."""
        yield from self._idle_others(contents)
        protected = self._protected()
        planned = map(self._names.name, fetch.evict)
        yield from (name for name in planned if name not in protected)
        yield from (name for name in self._by_next_use(contents, fetch.deadline) if name not in protected)

    def victims_now(self, contents: Contents) -> Iterator[str]:
        """Yield entries in the order in which they may be evicted for a shard that is needed at once."""
        yield from self._idle_others(contents)
        protected = self._protected()
        yield from (name for name in self._by_next_use(contents, self.loop.read) if name not in protected)

    def _by_next_use(self, contents: Contents, after: int) -> list[str]:
        """Return this plan's entries whose next use is after position `after`, farthest use first."""
        own = {name: numbers for name in contents if (numbers := self._names.numbers(name))}
        names = list(own)
        if not names:
            return []
        with self._lock:
            uses = self._future.next_use(self.loop.read, [numbers[0] for numbers in own.values()])
            for place, numbers in enumerate(own.values()):
                if len(numbers) > 1:
                    uses[place] = self._future.next_use(self.loop.read, numbers).min()
        order = np.argsort(-uses, kind="stable")
        return [names[i] for i in order.tolist() if uses[i] > after]

    def _idle_others(self, contents: Contents) -> Iterator[str]:
        """Yield entries of other runs that nobody has used for IDLE_SECONDS, the longest ago first."""
        if self._others is None:
            self._note_others(contents)
        for name in self._others or ():
            held = contents.get(name)  # as it is now: it may have been used since the plan was made
            if held is not None and held.used_seconds_ago >= IDLE_SECONDS:
                yield name

    def _note_others(self, contents: Contents) -> None:
        """Sort the entries of other runs by their last use, the longest ago first."""
        others = [name for name in contents if not self._names.numbers(name)]
        self._others = sorted(others, key=lambda name: -contents[name].used_seconds_ago)


class FetchPlan:
    """The future needs of a loop from datasets that share a cache; their shards are numbered as one.

    A fetcher follows it (`Fetcher.follow`) until it is dropped, or until nobody holds it.
    """

    def __init__(
        self,
        parts: Sequence[Fetchable],
        uses: Order | Uses,
        loop: LoopPosition,
        *,
        lanes: Sequence[int] | None,
        pace: Pace | None,
        plans: Callable[[], Sequence[Planner]],
    ) -> None:
        """`uses`: of the shards of all parts, one after another; `lanes`: that the loop reads (None: all).

        `plans`: as for `Planner`. It must not hold this plan, which ends with its last reference.
        """
        self.parts, self.cache = tuple(parts), parts[0].cache
        sizes = [part.known_sizes() for part in parts]
        self._firsts = [0, *accumulate(map(len, sizes))]
        self._first_of = dict(zip(self.parts, self._firsts, strict=False))
        names = EntryNames(part.names() for part in parts)
        total = sum(int(each.sum()) for each in sizes)
        self.fits = total <= self.cache.capacity
        """Whether the cache has room for all shards."""
        lead = uses.samples * self.cache.capacity // max(1, total) // LEADS_IN_CACHE
        future = Future(uses, lanes, lead=min(lead, uses.samples // 2))
        self.planner = Planner(
            future, names, np.concatenate(sizes), uses.samples, loop, pace=pace, plans=plans
        )

    def place(self, number: int) -> tuple[Fetchable, int]:
        """Return the dataset of a shard of this plan, and its number there."""
        part = bisect_right(self._firsts, number) - 1
        return self.parts[part], number - self._firsts[part]

    def take(self, active: Iterable[tuple[Fetchable, int]]) -> Fetch | None:
        """Return the next fetch that may begin and is not `active`, or None."""
        return self.planner.take(self._numbers(active))

    def plan(self, active: Iterable[tuple[Fetchable, int]]) -> None:
        """Plan the next fetches from what the cache holds; `active` shards are as good as there."""
        self.planner.plan(self.cache, self._numbers(active))

    def set_entry(self, part: Fetchable, number: int, name: str, entry_bytes: int) -> None:
        """Set name and size of a shard's entry, where the index does not state them. From any thread."""
        self.planner.set_entry(self._first_of[part] + number, name, entry_bytes)

    def needs(self, part: Fetchable, number: int, before: int) -> bool:
        """Whether the lanes that are planned for read a shard before this position."""
        return self.planner.next_use(self._first_of[part] + number) < before

    def _numbers(self, active: Iterable[tuple[Fetchable, int]]) -> list[int]:
        return [self._first_of[part] + number for part, number in active if part in self._first_of]
