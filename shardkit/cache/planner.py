"""What to fetch next and what to evict for it, when a fetcher asks: a plan that follows the training loop.

The plan itself is `shardkit.cache.belady`: farthest next use is evicted, earliest deadline is fetched first,
and no fetch begins before its victims have had their last use. Entries of other jobs and datasets, whose
future is not known here, may be evicted when nobody has used them for a minute. A fetch that failed (another
process is at it, the object is missing, the room was taken) rests before it is planned again.

Where several plans of one process share a cache that cannot hold the dataset, each plans with an equal part
of it and protects the cached entries that it needs soonest, as many as fit in that part, from the others.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence

import numpy as np

from shardkit.arrays import Ints
from shardkit.cache.belady import NEVER, Fetch, Future, plan_fetches
from shardkit.cache.contract import Cache, Contents
from shardkit.storage.threads import remake_after_fork

__all__ = ["Planner"]

PLANNED = 64  # fetches planned at a time
IDLE_SECONDS = 60.0  # entries of others that nobody has used for so long count as abandoned
REST_SECONDS = 5.0  # far more than planning and trying cost, far less than a plan reaches ahead
_STEPS_AN_EPOCH = 64  # how often a plan that has nothing to do is looked at again


class Planner:
    """Plans for one process. `advance` belongs to the training loop, everything else to the fetcher."""

    def __init__(
        self,
        future: Future,
        names: Sequence[str],
        sizes: Ints,
        samples: int,
        position: int,
        *,
        plans: Callable[[], Sequence[Planner]] = lambda: (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`names`, `sizes`: of all shards' entries; `samples`: of an epoch; `position`: where the run is.

        A name that is not known yet is "": it comes by `learn`. `plans` gives all plans for the same cache:
        other runs of the process have theirs.
        """
        self._plans = plans
        self._future = future
        self._names = list(names)
        self._numbers: dict[str, int] = {}
        self._alike: dict[str, list[int]] = {}  # further shards of the same content, by name
        for number, name in enumerate(names):
            self._note_name(number, name)
        self._sizes = sizes.copy()
        self._clock = clock
        self._pause = max(1, samples // _STEPS_AN_EPOCH)
        self._position = position
        self._waiting: deque[Fetch] = deque()
        self._wake_at = position
        self.unfit: frozenset[int] = frozenset()  # had no room in the last plan, or were being fetched
        self._fruitful = True  # something was fetched since the last plan
        self._taken: set[int] = set()  # fetches that have begun and may still be going on
        self._resting: dict[int, float] = {}  # shards whose fetch failed, and until when
        self._others: list[str] | None = None  # entries of other runs, as the last plan found them
        self._capacity = 0  # of the last plan, before other plans have their parts
        self._soonest: tuple[list[str], Ints] = ([], np.empty(0, dtype=np.int64))  # and cumulated bytes
        self.after_fork()
        remake_after_fork(self)

    def after_fork(self) -> None:
        """In a child: a thread of its parent may have held the lock."""
        self._lock = threading.Lock()  # of the future, which is not for several threads

    def learn(self, number: int, name: str, entry_bytes: int) -> None:
        """Name and size of a shard's entry, where the index does not state them. From any thread."""
        self._sizes[number] = entry_bytes
        self._names[number] = name
        self._note_name(number, name)

    def _note_name(self, number: int, name: str) -> None:
        if name and self._numbers.setdefault(name, number) != number:
            self._alike.setdefault(name, []).append(number)

    def advance(self, position: int) -> bool:
        """The loop has reached `position`; True if there may be something to do."""
        self._position = position
        return position >= self._wake_at

    def take(self, active: Container[int]) -> Fetch | None:
        """The next fetch that may begin, or None."""
        position = self._position
        for number, fetch in enumerate(self._waiting):
            if fetch.start <= position:
                del self._waiting[number]
                if fetch.shard in active:
                    return self.take(active)
                self._fruitful = True
                self._taken.add(fetch.shard)
                return fetch
        if self._waiting:
            self._wake_at = min(fetch.start for fetch in self._waiting)
        return None

    def is_stale(self) -> bool:
        """Whether there is reason to plan again."""
        return not self._waiting and (self._fruitful or self._position >= self._wake_at)

    def plan(self, cache: Cache, active: Iterable[int]) -> None:
        """Plan the next fetches from what the cache holds; shards in `active` are as good as there."""
        position = self._position
        # First of all: a cache that cannot list its contents would be asked again at once.
        self._fruitful, self._wake_at = False, position + self._pause
        active = set(active)
        contents = cache.contents()
        cached: dict[int, int] = {}
        others = 0
        for name, held in contents.items():
            number = self._numbers.get(name)
            if number is not None:
                cached[number] = held.bytes
                cached |= dict.fromkeys(self._alike.get(name, ()), 0)
            elif held.used_seconds_ago < IDLE_SECONDS:
                others += held.bytes
        self._note_others(contents)
        for number in active:
            cached.setdefault(number, int(self._sizes[number]))
        resting = self._rest(self._taken - cached.keys())
        self._taken &= active
        capacity = max(0, cache.capacity - others)
        parts = 1 if int(self._sizes.sum()) <= capacity else max(1, len(self._plans()))
        with self._lock:
            fetches = plan_fetches(self._future, position, cached, self._sizes, capacity // parts, PLANNED)
        possible = [fetch for fetch in fetches if fetch.fits and fetch.shard not in resting]
        self.unfit = frozenset(active.union(fetch.shard for fetch in fetches if not fetch.fits))
        starts = [fetch.start for fetch in possible if fetch.start > position]
        self._wake_at = min([position + self._pause, *starts])
        self._waiting = deque(possible)
        self._note_soonest([*cached, *(fetch.shard for fetch in possible)], position)
        self._capacity = capacity

    def _note_soonest(self, numbers: Sequence[int], position: int) -> None:
        """Sort what is cached, or planned to be, by next use: for `protected`."""
        shards = np.unique(np.array(numbers, dtype=np.int64))
        with self._lock:
            uses = self._future.next_use(position, shards)
        shards = shards[uses < NEVER][np.argsort(uses[uses < NEVER], kind="stable")]
        self._soonest = [self._names[number] for number in shards.tolist()], np.cumsum(self._sizes[shards])

    def protected(self, parts: int) -> list[str]:
        """The entries that this plan needs soonest, as many as its part of the cache holds."""
        names, ends = self._soonest
        return names[: int(np.searchsorted(ends, self._capacity // parts, side="right"))]

    def _protected(self) -> Container[str]:
        """The entries that other plans protect."""
        plans = self._plans()
        return {name for plan in plans if plan is not self for name in plan.protected(len(plans))}

    def _rest(self, failed: Iterable[int]) -> Container[int]:
        """The shards that are not to be planned now: those whose fetch has just failed, and some before."""
        now = self._clock()
        self._resting = {number: until for number, until in self._resting.items() if until > now}
        self._resting |= dict.fromkeys(failed, now + REST_SECONDS)
        return self._resting

    def victims_for(self, fetch: Fetch, contents: Contents) -> Iterator[str]:
        """Entries in the order in which they may be evicted for `fetch`; those planned are found at once."""
        yield from self._idle_others(contents)
        protected = self._protected()
        planned = [self._names[number] for number in fetch.evict]
        yield from (name for name in planned if name not in protected)
        yield from (name for name in self._by_next_use(contents, fetch.deadline) if name not in protected)

    def victims_now(self, contents: Contents) -> Iterator[str]:
        """Entries in the order in which they may be evicted for a shard that is needed at once."""
        yield from self._idle_others(contents)
        protected = self._protected()
        yield from (name for name in self._by_next_use(contents, self._position) if name not in protected)

    def _by_next_use(self, contents: Contents, after: int) -> list[str]:
        """Own entries that are not needed up to `after`, those that are needed last first."""
        names = [name for name in contents if name in self._numbers]
        numbers = np.array([self._numbers[name] for name in names], dtype=np.int64)
        if not len(numbers):
            return []
        with self._lock:
            uses = self._future.next_use(self._position, numbers)
            for place, name in enumerate(names if self._alike else ()):
                if name in self._alike:
                    alike = self._future.next_use(self._position, self._alike[name])
                    uses[place] = min(uses[place], alike.min())
        order = np.argsort(-uses, kind="stable")
        return [names[i] for i in order.tolist() if uses[i] > after]

    def _idle_others(self, contents: Contents) -> Iterator[str]:
        """Entries of other runs that nobody has used for long, the longest ago first."""
        if self._others is None:
            self._note_others(contents)
        for name in self._others or ():
            held = contents.get(name)  # as it is now: it may have been used since the plan was made
            if held is not None and held.used_seconds_ago >= IDLE_SECONDS:
                yield name

    def _note_others(self, contents: Contents) -> None:
        """Sort the entries of other runs by their last use, the longest ago first."""
        others = [name for name in contents if name not in self._numbers]
        self._others = sorted(others, key=lambda name: -contents[name].used_seconds_ago)
