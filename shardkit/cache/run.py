"""A loop that reads remote datasets: its position, its plans, and its first rows.

Several loops may read the same open datasets, such as training and an evaluation in mid-epoch. Each has its
own position in its own order, and so its own `CacheRun`. A run has one plan for all of its datasets that
share a cache (`shardkit.cache.planner`): shards that the loop needs soonest are fetched first, and shards
that it needs last are evicted first, in all streams. A plan ends when its run is closed, started again, or
garbage-collected. The loop reports its position with `CacheRun.at`; plans and readers use that position.

A run begins with an empty cache and a loop that waits. At first, the loop does not wait for shards that are
needed and not cached: their rows are fetched one by one, in parallel, before or while the whole shards are
fetched, unless only the whole shard can verify them (`RowReader.can_read`). This ends when the rows would be
more than `FetchLimits.single_rows` in all. From then on, reads wait for whole shards, which arrive in
the order of need: requests for rows would only delay shards that are nearly complete.
Replicas on one machine share these rows, so the limit is multiplied by their number.
Shards for which the cache has no room, because other shards in use fill it, are always read by rows: fetched
whole, they would be dropped and fetched again each time. The same holds for shards that no lane of this
machine needs now: a loader has moved rows of them here to balance the work of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardkit.cache.belady import Uses
from shardkit.cache.fetcher import Fetcher, FetchLimits
from shardkit.cache.planner import FetchPlan, LoopPosition, Pace
from shardkit.cache.rows import FetchedRows
from shardkit.cache.shards import CachedShards, CacheReader
from shardkit.order.order import Order
from shardkit.storage.running_clock import running_seconds

FIRST_ROWS = 16  # up to this many rows are fetched before whole shards, more rows in parallel with them

RowsOf = Callable[[int], npt.NDArray[np.int64]]
"""A function from a shard's number to the numbers of its rows that are needed."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A plan that is still to be made: the arguments of `Fetcher.follow`, except the loop."""

    parts: Sequence[CachedShards]
    uses: Order | Uses
    lanes: Sequence[int] | None
    pace: Pace | None = None


class CacheRun:
    """The readers of one loop, its plans, and the reads of its first rows. `start` sets the position."""

    def __init__(self, readers: Sequence[CacheReader]) -> None:
        """Make a run for `readers` of different datasets."""
        self.readers = tuple(readers)
        self._loop = LoopPosition(0)
        self._requests: Sequence[PlanRequest] | None = None  # plans still to be made
        self._plans: list[tuple[Fetcher, FetchPlan]] = []
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
        """Begin a run at `position`. `requests`: one plan per cache, made when the first rows are read.

        `replicas`: number of processes with this cache that read the same rows, including this one.
        `reads_other_lanes`: the loop also reads rows of other lanes, one by one where that is possible.
        """
        self.close()
        self._replicas, self._reads_other_lanes = replicas, reads_other_lanes
        self._rows_left, self._requests, self._loop = self._single_rows, requests, LoopPosition(position)
        for reader in self.readers:
            reader.is_open = True
            reader.shards.readers.add(reader)
            reader.shards.warn_if_unproved()

    def close(self) -> None:
        """Stop fetching ahead. The run may be started again."""
        self._requests = None
        for reader in self.readers:
            reader.is_open, reader.using, reader.plan = False, frozenset(), None
        for fetcher, plan in self._plans:
            fetcher.drop(plan)
        self._plans = []

    def at(self, *, reading: tuple[int, int] | None = None, given: int | None = None) -> None:
        """Report the loop's position; cheap. The reading thread and the delivering thread may both call it.

        `reading`: begin and end of the positions that are being read; all before them have been read.
        `given`: all samples before this position have been delivered to the loop.
        """
        loop = self._loop
        if reading is not None:
            loop.read, loop.reading_to = reading
            for fetcher, plan in self._plans:
                if loop.read >= plan.planner.wake_at:
                    fetcher.wake()
        if given is not None:
            loop.given = given
            for fetcher, plan in self._plans:
                if given >= plan.planner.resume_at:
                    fetcher.wake()

    def fetch_ahead(self) -> None:
        """Make the plans of `start`, by which the fetcher fetches ahead, unless they are made already."""
        if self._requests is None:
            return
        requests, self._requests = self._requests, None
        plan_of: dict[CachedShards, FetchPlan] = {}
        for each in requests:
            fetcher = each.parts[0].fetcher
            plan = fetcher.follow(each.parts, each.uses, self._loop, each.lanes, each.pace)
            self._plans.append((fetcher, plan))
            plan_of |= dict.fromkeys(each.parts, plan)
        for reader in self.readers:
            reader.plan = plan_of.get(reader.shards)
            reader.loop = self._loop if self._reads_other_lanes else None

    def first_rows(
        self, needed: Mapping[CacheReader, tuple[Sequence[int], RowsOf]]
    ) -> dict[CacheReader, dict[int, FetchedRows]]:
        """Read rows of missing shards for which the loop should not wait until the whole shard is fetched.

        `needed`: for each reader, its missing shards, and a function that returns the needed rows of one. All
        rows are read in parallel. When this returns, fetching ahead has begun.
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
                self.fetch_ahead()  # `reads_singly` asks the plan which shards its own lanes need
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
