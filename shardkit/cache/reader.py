"""A loop that reads remote datasets: its plan, how long it waits, and its first rows.

Several loops may read the same open datasets, such as training and an evaluation in mid-epoch. Each has its
own place in its own order, so each has a `CacheRun` of its own. A run has one plan for all of its datasets
that share a cache (`FetchPlan`): what the loop needs soonest is fetched first and what it needs last is
evicted first, whichever stream it belongs to. A plan ends when its run is closed, starts anew, or is garbage.

A run begins with an empty cache and a loop that waits. Until the next rows would be more than
`FetchLimits.single_rows` in all, shards that are needed and not cached are not waited for: their rows are
fetched one by one, in parallel, before or while the whole shards stream in, unless only the whole shard can
prove them (`RowReader.can_read`). From then on, reads wait for whole shards, which come by deadline: requests
for rows would only delay shards that are about to be whole.
Replicas on one machine read each of these rows once between them, so they may read as many more.
Shards for which the cache has no room among the others in use are always read by rows: fetched whole, they
would be dropped and fetched again each time. So are rows of shards that no lane of this machine needs now,
which a loader moves here to balance the work of ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from shardkit.cache.belady import Fetch, Future, Uses
from shardkit.cache.entry import EntryNames
from shardkit.cache.fetcher import Fetcher, FetchLimits
from shardkit.cache.planner import Pace, Planner
from shardkit.cache.protocol import Cache, Contents
from shardkit.cache.rows import FetchedRows
from shardkit.cache.shards import CachedShards
from shardkit.order.order import Order
from shardkit.storage.clock import running_seconds

__all__ = ["LEADS_IN_CACHE", "CacheReader", "CacheRun", "FetchPlan", "PlanRequest"]

FIRST_ROWS = 16  # up to so many rows are fetched before any whole shard; more of them at the same time

# Shards are wanted so much of the cache ahead of their first use: without a lead, a full cache would give up
# the shard that it has just used, and every fetch would begin at its deadline.
LEADS_IN_CACHE = 32

RowsOf = Callable[[int], npt.NDArray[np.int64]]
"""The rows that are needed of a shard."""


class FetchPlan:
    """What a run will need of the datasets that share a cache; their shards are numbered as one.

    The fetcher follows it until `close`, or until nobody holds it.
    """

    def __init__(
        self,
        parts: Sequence[CachedShards],
        uses: Order | Uses,
        position: int,
        lanes: Sequence[int] | None,
        pace: Pace | None = None,
    ) -> None:
        """`uses`: of the shards of all parts, one after another; the run is at `position` of it and reads
        these lanes (None: all).
        """
        self.parts, self.cache = tuple(parts), parts[0].cache
        self._fetcher = parts[0].fetcher
        self._firsts = [0, *accumulate(map(len, parts))]
        self._first_of = dict(zip(self.parts, self._firsts, strict=False))
        names = EntryNames(part.names() for part in parts)
        sizes = np.concatenate([part.known_sizes() for part in parts])
        total = int(sizes.sum())
        self.fits = total <= self.cache.capacity
        """Whether the cache has room for all shards."""
        lead = uses.samples * self.cache.capacity // max(1, total) // LEADS_IN_CACHE
        self.planner = Planner(
            Future(uses, lanes, lead=min(lead, uses.samples // 2)),
            names,
            sizes,
            uses.samples,
            position,
            pace=pace,
            # Not a method of this: a plan must end with its last reference, not with a garbage collection.
            plans=partial(_planners, self._fetcher, self.cache),
        )
        self._fetcher.add_plan(self)
        for part in parts:  # other threads may have asked for some since
            for number in part.known_objects():
                self.learn(part, number)

    def place(self, number: int) -> tuple[CachedShards, int]:
        """The dataset of a shard of this plan, and its number there."""
        part = bisect_right(self._firsts, number) - 1
        return self.parts[part], number - self._firsts[part]

    def take(self, active: Iterable[tuple[CachedShards, int]]) -> Fetch | None:
        """The next fetch that may begin and is not `active`, or None."""
        return self.planner.take(self._numbers(active))

    def is_stale(self) -> bool:
        """Whether there is reason to plan again."""
        return self.planner.is_stale()

    def plan(self, active: Iterable[tuple[CachedShards, int]]) -> None:
        """Plan the next fetches from what the cache holds; `active` shards are as good as there."""
        self.planner.plan(self.cache, self._numbers(active))
        unfit = [plan.place(number) for plan in self._fetcher.plans() for number in plan.planner.unfit]
        for part in self.parts:
            part.forget_room({number for other, number in unfit if other is part})

    def learn(self, part: CachedShards, number: int) -> None:
        """A part's shard has a name and size now, where the index does not state them. From any thread."""
        self.planner.learn(self._first_of[part] + number, part.known_entry(number), part.known_size(number))

    def victims_for(self, fetch: Fetch, contents: Contents) -> Iterable[str]:
        """Entries in the order in which they may be evicted for `fetch`."""
        return self.planner.victims_for(fetch, contents)

    def victims_now(self, contents: Contents) -> Iterable[str]:
        """Entries in the order in which they may be evicted for a shard that is needed at once."""
        return self.planner.victims_now(contents)

    def needs(self, part: CachedShards, number: int, before: int) -> bool:
        """Whether the lanes that are planned for read a part's shard before this position."""
        return self.planner.next_use(self._first_of[part] + number) < before

    def advance(self, position: int) -> None:
        """The loop has read everything before `position`; cheap."""
        if self.planner.advance(position):
            self._fetcher.wake()

    def consume(self, position: int) -> None:
        """The loop has been given everything before `position`; cheap."""
        if self.planner.consume(position):
            self._fetcher.wake()

    def close(self) -> None:
        """Fetch no longer as this says."""
        self._fetcher.drop(self)

    def _numbers(self, active: Iterable[tuple[CachedShards, int]]) -> list[int]:
        return [self._first_of[part] + number for part, number in active if part in self._first_of]


def _planners(fetcher: Fetcher, cache: Cache) -> list[Planner]:
    """Of all plans for this cache."""
    return [plan.planner for plan in fetcher.plans() if plan.cache is cache]


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The arguments of a `FetchPlan` but the position."""

    parts: Sequence[CachedShards]
    uses: Order | Uses
    lanes: Sequence[int] | None
    pace: Pace | None = None


class CacheReader:
    """Reads one remote dataset in a loop."""

    def __init__(self, shards: CachedShards, timeout_seconds: float | None = None) -> None:
        self.shards = shards
        self.timeout_seconds = timeout_seconds or shards.timeout_seconds
        self.using: frozenset[int] = frozenset()
        """The shards that the loop reads now; they stay open."""
        self.is_open = False
        """Whether a run was started and this was not closed since."""
        self.plan: FetchPlan | None = None
        self.foreseen_to: int | None = None
        """Where the rows end that are read now, if the loop reads rows of other lanes than it plans for."""

    def reads_singly(self, number: int) -> bool:
        """Whether a shard's rows are not worth waiting for the whole shard.

        The cache had no room for it, or no lane of the plan needs it now: a row or two of it were moved here.
        """
        if self.shards.has_no_room(number):
            return True
        if self.plan is None or self.foreseen_to is None:
            return False
        return not self.plan.needs(self.shards, number, self.foreseen_to)

    def load(self, number: int) -> npt.NDArray[np.uint8]:
        """As `CachedShards.load`, waiting no longer than this reader should."""
        return self.shards.load(number, self.timeout_seconds, self.plan)

    def missing(self, numbers: Sequence[int]) -> list[int]:
        """Which of these shards are not here yet."""
        return [number for number in numbers if not self.shards.is_there(number)]

    def progress(self) -> str:
        """What is being waited for, as the end of a sentence; "" if nothing is."""
        progress = self.shards.progress()
        return f"; waiting for {progress}" if progress else ""


class CacheRun:
    """The readers of one loop, its plans and its first rows; `start` says where the loop is."""

    def __init__(self, readers: Sequence[CacheReader]) -> None:
        """`readers`: of different datasets."""
        self.readers = tuple(readers)
        self._requests: tuple[Sequence[PlanRequest], int] | None = None  # fetching ahead has not begun
        self._plans: list[FetchPlan] = []
        self._replicas, self._reads_other_lanes = 1, False
        self._rows_left = self._single_rows

    @property
    def _single_rows(self) -> int:
        own = max((reader.shards.fetcher.limits.single_rows for reader in self.readers), default=0)
        return max(own, min(own * self._replicas, FetchLimits().single_rows))

    def start(
        self,
        requests: Sequence[PlanRequest],
        position: int,
        *,
        replicas: int = 1,
        reads_other_lanes: bool = False,
    ) -> None:
        """Begin a run at `position`, with a plan for each cache; they begin after its first rows.

        `replicas`: processes with this cache that read the same, this one among them. `reads_other_lanes`:
        the loop reads rows of other lanes too, one by one where that is possible.
        """
        self.close()
        self._replicas, self._reads_other_lanes = replicas, reads_other_lanes
        self._rows_left, self._requests = self._single_rows, (requests, position)
        for reader in self.readers:
            reader.is_open = True
            reader.shards.readers.add(reader)
            reader.shards.warn_if_unproved()

    def close(self) -> None:
        """Stop fetching ahead. May be started again."""
        self._requests = None
        for reader in self.readers:
            reader.is_open, reader.using, reader.plan = False, frozenset(), None
        for plan in self._plans:
            plan.close()
        self._plans = []

    def advance(self, position: int) -> None:
        """Everything before `position` has been read."""
        for plan in self._plans:
            plan.advance(position)

    def consume(self, position: int) -> None:
        """The loop has been given everything before `position`."""
        for plan in self._plans:
            plan.consume(position)

    def foresee(self, position: int) -> None:
        """The rows that are read next end before `position`."""
        for reader in self.readers:
            reader.foreseen_to = position if self._reads_other_lanes else None

    def fetch_ahead(self) -> None:
        """Begin to fetch ahead, unless that has begun."""
        if self._requests is None:
            return
        (requests, position), self._requests = self._requests, None
        self._plans = [FetchPlan(each.parts, each.uses, position, each.lanes, each.pace) for each in requests]
        plan_of = {part: plan for plan in self._plans for part in plan.parts}
        for reader in self.readers:
            reader.plan = plan_of.get(reader.shards)

    def first_rows(
        self, needed: Mapping[CacheReader, tuple[Sequence[int], RowsOf]]
    ) -> dict[CacheReader, dict[int, FetchedRows]]:
        """The rows that are needed of shards that are not here, as far as they should not be waited for.

        `needed`: of each reader its missing shards and their rows. All are read side by side. Fetching ahead
        has begun when this returns.
        """
        wanted = {
            reader: {
                number: np.unique(rows_of(number))
                for number in missing
                if reader.shards.rows.can_read(number)
            }
            for reader, (missing, rows_of) in needed.items()
        }
        count = _count(wanted)
        complete = all(len(wanted[reader]) == len(missing) for reader, (missing, _) in needed.items())
        if complete and count <= self._rows_left:
            self._rows_left -= count
        else:
            self._rows_left = 0
            if self._reads_other_lanes:
                self.fetch_ahead()  # the plan knows which shards its own lanes need
            wanted = {
                reader: {n: each for n, each in rows.items() if reader.reads_singly(n)}
                for reader, rows in wanted.items()
            }
        if _count(wanted) > FIRST_ROWS:
            self.fetch_ahead()
        began = running_seconds()
        with ExitStack() as stack:
            sent = {
                reader: stack.enter_context(reader.shards.rows.begin(rows, shared=self._replicas > 1))
                for reader, rows in wanted.items()
                if rows
            }
            found = {
                reader: reader.shards.rows.finish(requests, began + reader.timeout_seconds)
                for reader, requests in sent.items()
            }
        self.fetch_ahead()
        return found


def _count(wanted: Mapping[CacheReader, Mapping[int, npt.NDArray[np.int64]]]) -> int:
    return sum(len(rows) for each in wanted.values() for rows in each.values())
