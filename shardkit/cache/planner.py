"""What to fetch next and what to give up for it, as a fetcher asks: the plan, kept up with the training loop.

The plan itself is `shardkit.cache.belady`: farthest next use is evicted, earliest deadline is fetched first,
and no fetch begins before its victims have had their last use. Entries of other jobs and datasets, whose
future is not known here, give way when nobody has used them for a minute. A fetch that came to nothing
(another process is at it, the object is missing, the room was taken) rests before it is planned again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from shardkit.cache.belady import Fetch, Future, plan_fetches
from shardkit.cache.contract import Cache, Contents
from shardkit.storage.forks import remake_after_fork

__all__ = ["Planner"]

PLANNED = 64  # fetches planned at a time
IDLE_SECONDS = 60.0  # entries of others, unused for so long, are taken for abandoned
REST_SECONDS = 5.0  # far more than planning and trying cost, far less than a plan reaches ahead
_STEPS_AN_EPOCH = 64  # how often a plan that has nothing to do is looked at again


class Planner:
    """Plans for one process. `advance` belongs to the training loop, everything else to the fetcher."""

    def __init__(
        self,
        future: Future,
        names: Sequence[str],
        sizes: npt.NDArray[np.int64],
        samples: int,
        position: int,
        *,
        share: float = 1.0,
        is_beside: Callable[[str], bool] = lambda name: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`names`, `sizes`: of all shards' entries; `samples`: of an epoch; `position`: where the run is.

        A name that is not known yet is "": `learn` tells it later. `is_beside` knows the entries of other
        plans of the same run, which leave this one a `share` of the cache.
        """
        self._share, self._is_beside = share, is_beside
        self._future = future
        self._names = list(names)
        self._numbers = {name: number for number, name in enumerate(names) if name}
        self._sizes = sizes.copy()
        self._clock = clock
        self._pause = max(1, samples // _STEPS_AN_EPOCH)
        self._position = position
        self._waiting: deque[Fetch] = deque()
        self._wake_at = position
        self.unfit: frozenset[int] = frozenset()  # no room in the last plan, or not in it: they were coming
        self._fruitful = True  # something was fetched since the last plan
        self._taken: set[int] = set()  # fetches that have begun and may still be going on
        self._resting: dict[int, float] = {}  # shards whose fetch came to nothing: until when
        self.after_fork()
        remake_after_fork(self)

    def after_fork(self) -> None:
        """In a child: a thread of its parent may have held the lock."""
        self._lock = threading.Lock()  # of the future, which is not for several threads

    def learn(self, number: int, name: str, entry_bytes: int) -> None:
        """Name and size of a shard's entry, where the index does not state them. From any thread."""
        self._sizes[number] = entry_bytes
        self._names[number] = name
        self._numbers[name] = number

    def knows(self, name: str) -> bool:
        """Whether an entry is one of this plan's."""
        return name in self._numbers

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
        # Said first: a cache that cannot list its contents would be asked again at once.
        self._fruitful, self._wake_at = False, position + self._pause
        active = set(active)
        contents = cache.contents()
        cached: dict[int, int] = {}
        others = 0
        for name, held in contents.items():
            number = self._numbers.get(name)
            if number is not None:
                cached[number] = held.bytes
            elif held.used_seconds_ago < IDLE_SECONDS and not self._is_beside(name):
                others += held.bytes
        for number in active:
            cached.setdefault(number, int(self._sizes[number]))
        resting = self._rest(self._taken - cached.keys())
        self._taken &= active
        with self._lock:
            fetches = plan_fetches(
                self._future,
                position,
                cached,
                self._sizes,
                int(self._share * max(0, cache.capacity - others)),
                PLANNED,
            )
        possible = [fetch for fetch in fetches if fetch.fits and fetch.shard not in resting]
        self.unfit = frozenset(active.union(fetch.shard for fetch in fetches if not fetch.fits))
        starts = [fetch.start for fetch in possible if fetch.start > position]
        self._wake_at = min([position + self._pause, *starts])
        self._waiting = deque(possible)

    def _rest(self, in_vain: Iterable[int]) -> Container[int]:
        """The shards that are not to be planned now: those just tried in vain, and some before them."""
        now = self._clock()
        self._resting = {number: until for number, until in self._resting.items() if until > now}
        self._resting |= dict.fromkeys(in_vain, now + REST_SECONDS)
        return self._resting

    def victims_for(self, fetch: Fetch, contents: Contents) -> list[str]:
        """Entries in the order in which they may be evicted for `fetch`."""
        planned = [self._names[number] for number in fetch.evict]
        return [
            *self._idle_others(contents),
            *planned,
            *self._by_next_use(contents, fetch.deadline),
        ]

    def victims_now(self, contents: Contents) -> list[str]:
        """Entries in the order in which they may be evicted for a shard that is needed at once."""
        return [*self._idle_others(contents), *self._by_next_use(contents, self._position)]

    def _by_next_use(self, contents: Contents, after: int) -> list[str]:
        """Own entries that are not needed up to `after`, those that are needed last first."""
        names = [name for name in contents if name in self._numbers]
        numbers = np.array([self._numbers[name] for name in names], dtype=np.int64)
        if not len(numbers):
            return []
        with self._lock:
            uses = self._future.next_use(self._position, numbers)
        order = np.argsort(-uses, kind="stable")
        return [names[i] for i in order.tolist() if uses[i] > after]

    def _idle_others(self, contents: Contents) -> list[str]:
        """Entries of other runs that nobody has used for long, the longest ago first."""
        idle = [
            name
            for name, held in contents.items()
            if name not in self._numbers
            and held.used_seconds_ago >= IDLE_SECONDS
            and not self._is_beside(name)
        ]
        return sorted(idle, key=lambda name: -contents[name].used_seconds_ago)
