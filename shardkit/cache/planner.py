"""Plans that follow a training loop: they tell a fetcher what to fetch next and what to evict for it.

A `FetchPlan` numbers the shards of all datasets that share a cache as one; its `Planner` decides by these
numbers. Both read the `LoopPosition`, which the loop itself updates.

`shardkit.cache.belady` computes the plan: the entry with the farthest next use is evicted, the fetch with the
earliest deadline comes first, and no fetch begins before its victims have had their last use. Entries of
other jobs and datasets, whose future use is unknown, may be evicted when nobody has used them for a minute. A
fetch that failed (another process is fetching the shard, the object is missing, the space was taken) is not
planned again for a few seconds.

A cache is not filled as fast as the network allows: when thousands of nodes start together, a store would
have to deliver a thousand times what they consume. Shards that are in use, or that the loop needs within
minutes, are fetched at once; the rest is fetched at a few times the rate at which the loop consumes (`Pace`).

If several plans of one process share a cache that cannot hold all datasets, each plans with an equal part of
it, and protects the cached entries that it needs soonest, as many as fit in that part, from the others.
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

PLANNED = 64  # number of fetches planned at a time
IDLE_SECONDS = 60.0  # time after which unused entries of other jobs count as abandoned
REST_SECONDS = 5.0  # pause after a failed fetch: far longer than an attempt, far shorter than a plan lasts
_LEAST_SECONDS, _MOST_SECONDS = 0.5, 60.0  # limits of the interval over which a loop's speed is measured
_FREE_BYTES = 16 << 20  # bytes that every loop may fetch ahead: delaying less is not worth it
_GOLDEN_RATIO = 0.6180339887498949
_STEPS_AN_EPOCH = 64  # how often per epoch a plan that has nothing to do is checked again
# Shards are fetched ahead of their first use by 1/32 of the positions that the cache covers. Without this
# lead, a full cache would evict the shard that it has just used, and every fetch would begin at its deadline.
LEADS_IN_CACHE = 32


class LoopPosition:
    """The position of a training loop, in samples of all ranks and epochs; plans read it."""

    __slots__ = ("given", "read", "reading_to")

    def __init__(self, position: int) -> None:
        self.read = position
        """All samples before this position have been read."""
        self.reading_to = position
        """The end, exclusive, of the positions that are being read."""
        self.given = position
        """All samples before this position have been delivered to the loop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """The rate at which the cache is filled with shards that are not needed soon."""

    factor: float = 3.0
    """Bytes fetched per byte that the loop consumes. Over all nodes, the ratio is below 5 in any second."""
    horizon_seconds: float = 120.0
    """Shards that the loop, at its current speed, needs within this time are fetched at once."""
    sharers: int = 1
    """Number of processes that fetch by the same plan into one cache."""
    debt: float = 0.0
    """Fraction of a shard that must be consumed before the first shard is fetched ahead."""

    @classmethod
    def of_rank(cls, rank: int, sharers: int = 1) -> Pace:
        """Return the pace of one process, with a debt that depends on its rank.

        Ranks advance in lockstep: with equal debts, all would fetch at the same time.
        """
        return cls(sharers=max(1, sharers), debt=rank * _GOLDEN_RATIO % 1)


class _Pacing:
    """Decides which fetches have to wait until the loop has consumed more."""

    def __init__(self, pace: Pace, loop: LoopPosition, clock: Callable[[], float]) -> None:
        self._pace, self._loop, self._clock = pace, loop, clock
        self._credited = loop.given
        self._bytes_per_position = self._most_credit = 0.0
        self._credit = 0.0  # bytes that may be fetched past the horizon
        self._measured = (clock(), loop.given)
        self._horizon = 0  # number of positions that the loop consumes in `horizon_seconds`
        self.resume_at = NEVER
        """Delivered position from which a waiting fetch may begin; NEVER if none is waiting."""

    @property
    def has_begun(self) -> bool:
        return self._bytes_per_position > 0

    @property
    def horizon(self) -> int:
        """The position up to which needed shards are fetched at once."""
        return self._loop.given + self._horizon

    def begin(self, bytes_per_position: float, shard_bytes: int) -> None:
        """Begin to delay fetches, once the bytes per position are known. `shard_bytes`: largest shard."""
        pace = self._pace
        self._bytes_per_position = max(1e-9, bytes_per_position * pace.factor / pace.sharers)
        self._most_credit = float(max(shard_bytes, _FREE_BYTES))
        self._credit = max(0.0, _FREE_BYTES - shard_bytes) - pace.debt * shard_bytes

    def must_wait(self, deadline: int, size: int) -> bool:
        """Return whether a shard that is needed at `deadline` has to wait; if not, count it as fetched."""
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
        """Add credit for consumed samples, and measure the loop's speed."""
        consumed, now = self._loop.given, self._clock()
        earned = self._bytes_per_position * max(0, consumed - self._credited)
        self._credit, self._credited = min(self._credit + earned, self._most_credit), consumed
        since, begin = self._measured
        if now - since >= _LEAST_SECONDS and consumed > begin:
            self._horizon = int((consumed - begin) / (now - since) * self._pace.horizon_seconds)
        if now - since >= _MOST_SECONDS or consumed < begin:
            self._measured = now, consumed


class Planner:
    """Plans fetches and evictions for one loop, by shard number; the fetcher's threads use it."""

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
        """Plan for `loop`. `names`, `sizes`: of all entries, sizes in bytes; `samples`: positions per epoch.

        `set_entry` supplies names that are not known yet. `plans` returns all plans for the same cache,
        including those of other runs of the process. Without `pace`, each shard is fetched as early as
        possible.
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
        """Value of `loop.read` from which there may be something to fetch; before it, there is nothing."""
        self.unfit: frozenset[int] = frozenset()
        """Shards that had no room in the last plan, or were being fetched."""
        self._fruitful = True  # whether a fetch has begun since the last plan
        self._taken: set[int] = set()  # shards whose fetches have begun and may still be running
        self._resting: dict[int, float] = {}  # shards whose fetch failed, and when they may be planned again
        self._others: list[str] | None = None  # entries of other runs at the last plan
        self._capacity = 0  # capacity for all plans at the last plan, before it is divided among them
        # Shards by next use at the last plan: their cumulative bytes, and their names (computed on demand).
        self._soonest = self._soonest_ends = np.empty(0, dtype=np.int64)
        self._soonest_names: list[str] | None = None
        self.after_fork()
        remake_after_fork(self)

    def after_fork(self) -> None:
        """Reset in a forked child: a thread of its parent may have held the lock."""
        self._lock = threading.Lock()  # guards `_future`, which is not thread-safe

    @property
    def resume_at(self) -> int:
        """Delivered position from which a fetch that waits for the loop may begin; NEVER if none waits."""
        return NEVER if self._pacing is None else self._pacing.resume_at

    def set_entry(self, number: int, name: str, entry_bytes: int) -> None:
        """Set name and size of a shard's entry if the index does not have them. Thread-safe."""
        self._sizes[number] = entry_bytes
        self._names.set_name(number, name)

    def next_use(self, number: int) -> int:
        """Return the position at which the loop needs a shard next, or NEVER. Thread-safe."""
        with self._lock:
            return int(self._future.next_use(self.loop.read, [number])[0])

    def take(self, active: Container[int]) -> Fetch | None:
        """Return the next fetch that may begin now, or None. `active`: shards that are being fetched."""
        position = self.loop.read
        for number, fetch in enumerate(self._waiting):
            if fetch.start <= position:
                if fetch.shard not in active and self._must_wait(fetch):
                    return None  # all later fetches must wait, too
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
        """Return whether the loop does not need a fetch's shard within the horizon of its pace."""
        return self._pacing is not None and fetch.deadline > self._pacing.horizon

    def is_stale(self) -> bool:
        """Return whether to plan again: no fetch is left, and a new plan may have some."""
        return not self._waiting and (self._fruitful or self.loop.read >= self.wake_at)

    def plan(self, cache: Cache, active: Iterable[int]) -> None:
        """Plan the next fetches from the cache's contents; shards in `active` count as cached."""
        position = self.loop.read
        # Before anything can fail: if the cache cannot list its contents, it is not asked again at once.
        self._fruitful, self.wake_at = False, position + self._pause
        active = set(active)
        contents = cache.contents()
        cached: dict[int, int] = {}
        others = 0
        for name, held in contents.items():
            if numbers := self._names.numbers(name):
                cached |= dict.fromkeys(numbers, 0)  # shards with equal content share one entry
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
        """Keep these shards, which are or will be cached, sorted by next use, for `protected`."""
        shards = np.unique(np.array(numbers, dtype=np.int64))
        with self._lock:
            uses = self._future.next_use(position, shards)
        self._soonest = shards[uses < NEVER][np.argsort(uses[uses < NEVER], kind="stable")]
        self._soonest_ends, self._soonest_names = np.cumsum(self._sizes[self._soonest]), None

    def protected(self, parts: int) -> list[str]:
        """Return the entries that this plan needs soonest, as many as fit its part of the cache."""
        names = self._soonest_names
        if names is None:  # computed on demand: needed only if several plans share the cache
            names = self._soonest_names = [self._names.name(number) for number in self._soonest.tolist()]
        return names[: int(np.searchsorted(self._soonest_ends, self._capacity // parts, side="right"))]

    def _protected(self) -> Container[str]:
        """Return the entries that other plans protect."""
        plans = self._plans()
        return {name for plan in plans if plan is not self for name in plan.protected(len(plans))}

    def _backing_off(self, failed: Iterable[int]) -> Container[int]:
        """Add newly failed shards and return all whose fetch failed within the last REST_SECONDS."""
        now = self._clock()
        self._resting = {number: until for number, until in self._resting.items() if until > now}
        self._resting |= dict.fromkeys(failed, now + REST_SECONDS)
        return self._resting

    def victims_for(self, fetch: Fetch, contents: Contents) -> Iterator[str]:
        """Yield the entries that may be evicted for `fetch`, in order.

        First abandoned entries of other runs, then the plan's victims, then entries with the farthest use.
        """
        yield from self._idle_others(contents)
        protected = self._protected()
        planned = map(self._names.name, fetch.evict)
        yield from (name for name in planned if name not in protected)
        yield from (name for name in self._by_next_use(contents, fetch.deadline) if name not in protected)

    def victims_now(self, contents: Contents) -> Iterator[str]:
        """Yield the entries to evict for a shard that is needed at once, abandoned entries first."""
        yield from self._idle_others(contents)
        protected = self._protected()
        yield from (name for name in self._by_next_use(contents, self.loop.read) if name not in protected)

    def _by_next_use(self, contents: Contents, after: int) -> list[str]:
        """Return this plan's entries whose next use is after position `after`, farthest first."""
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
        """Yield entries of other runs that nobody has used for IDLE_SECONDS, least recently used first."""
        if self._others is None:
            self._note_others(contents)
        for name in self._others or ():
            held = contents.get(name)  # its current state: it may have been used since the plan was made
            if held is not None and held.used_seconds_ago >= IDLE_SECONDS:
                yield name

    def _note_others(self, contents: Contents) -> None:
        """Sort the entries of other runs by last use, least recently used first."""
        others = [name for name in contents if not self._names.numbers(name)]
        self._others = sorted(others, key=lambda name: -contents[name].used_seconds_ago)


class FetchPlan:
    """The plan of one loop for all datasets that share a cache, with shards numbered through the datasets.

    A fetcher follows the plan (`Fetcher.follow`) until it is dropped, or its last reference is gone.
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
        """Plan for the datasets `parts`, whose shards `uses` numbers one dataset after another.

        `lanes`: the lanes that the loop reads (None: all). `plans`: see `Planner`; it must not
        reference this plan, because a plan ends with its last reference.
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
        """Return the dataset of a shard of this plan, and the shard's number in that dataset."""
        part = bisect_right(self._firsts, number) - 1
        return self.parts[part], number - self._firsts[part]

    def take(self, active: Iterable[tuple[Fetchable, int]]) -> Fetch | None:
        """Return the next fetch that may begin and is not `active`, or None."""
        return self.planner.take(self._numbers(active))

    def plan(self, active: Iterable[tuple[Fetchable, int]]) -> None:
        """Plan the next fetches from the cache's contents; `active` shards count as cached."""
        self.planner.plan(self.cache, self._numbers(active))

    def set_entry(self, part: Fetchable, number: int, name: str, entry_bytes: int) -> None:
        """Set name and size of a shard's entry if the index does not have them. Thread-safe."""
        self.planner.set_entry(self._first_of[part] + number, name, entry_bytes)

    def needs(self, part: Fetchable, number: int, before: int) -> bool:
        """Return whether the planned lanes read shard `number` of `part` before position `before`."""
        return self.planner.next_use(self._first_of[part] + number) < before

    def _numbers(self, active: Iterable[tuple[Fetchable, int]]) -> list[int]:
        return [self._first_of[part] + number for part, number in active if part in self._first_of]
