"""Batches made a few at a time: thousands of positions planned at once, a cache-sized group gathered at once.

Planning costs about 100 ns a sample in calls for thousands; a gather is fastest while its result fits a
core's second-level cache. So a plan covers up to `PLAN_ROWS` samples, after shorter ones at first (the first
batch must wait neither for a long plan nor for shards that only later batches need), and a group up to
`GROUP_BYTES`. Datasets of more than `MAX_PLAN_SHARDS` shards are planned in shorter pieces; of their shards,
those that the plan before did not use are mapped anew, which costs tens of microseconds each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardkit.cache.waits import FetchTimeoutError
from shardkit.errors import StreamExhaustedError
from shardkit.loaders.arrangement import Arrangement
from shardkit.loaders.batch import Batch, BatchMaker
from shardkit.loaders.mixed_source import MixedShapesError
from shardkit.loaders.plan import BatchPlan, Cursor
from shardkit.loaders.prefetch import LoaderTimeoutError
from shardkit.loaders.rows import Reader
from shardkit.loaders.sources import SourceInfo
from shardkit.loaders.streams import Streams
from shardkit.storage.store import StoreError

__all__ = ["Group", "GroupMaker"]

PLAN_ROWS = 65536  # of one rank; six milliseconds of planning
PLAN_POSITIONS = 1 << 20  # of all ranks; 8 MiB
GROUP_BYTES = 2 << 20
_GROWTH = 8  # of each plan over the one before
# A plan maps all its shards, the next one is made while it is read, and Linux allows a process 65,530 maps.
MAX_PLAN_SHARDS = 8192


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive batches and where the loader is after each."""

    batches: list[Batch]
    cursors: list[Cursor]
    ids: npt.NDArray[np.int64]  # (batches, batch size): of the samples, -1 is padding
    bytes: int

    @property
    def batch_count(self) -> int:
        return len(self.batches)


@dataclass(frozen=True, slots=True)
class _Planned:
    """Batches that are planned, and a reader that has their shards open."""

    cursors: list[Cursor]
    ids: npt.NDArray[np.int64]
    reader: Reader
    is_late: bool  # shards had to be waited for
    real: npt.NDArray[np.int64] | None  # how many samples before entry i are no padding; None: all


class GroupMaker:
    """Makes the groups of one rank from any position on."""

    def __init__(
        self,
        arrangement: Arrangement,
        plan: BatchPlan,
        source: SourceInfo,
        maker: BatchMaker,
        *,
        streams: Streams,
    ) -> None:
        self._arrangement, self._plan, self._source, self._maker = arrangement, plan, source, maker
        self._streams = streams
        self._planning, self._reading = "", 0

    def groups(self, cursor: Cursor, *, endless: bool, first: int = 0, every: int = 1) -> Iterator[Group]:
        """The batches of the epoch of the next batch; all that follow, if endless.

        Of these batches, number `first` and each `every`-th after it; the others cost nothing.
        """
        skip = first
        rows = self._plan.batch_size
        most = max(rows, min(self._source.plan_bytes // self._source.stored_bytes, PLAN_ROWS))
        if len(self._streams.infos) > MAX_PLAN_SHARDS:
            most = max(rows, min(most, MAX_PLAN_SHARDS))  # each row may lie in a shard of its own
        while True:
            left = self._plan.batches_left(cursor[0])
            while left:
                passed = min(skip, left)
                cursor, skip, left = self._plan.advance(cursor, passed), skip - passed, left - passed
                if not left:
                    break
                planned = self._next_plan(cursor, left, rows, every)
                yield from self._groups(planned)
                cursor, skip = planned.cursors[-1], every - 1
                left -= (len(planned.cursors) - 1) * every + 1
                # A plan waits for all its shards: where they have to come first, short plans wait for few.
                if planned.is_late:
                    rows = max(rows // _GROWTH, self._plan.batch_size)
                else:
                    rows = min(rows * _GROWTH, most)
            if not endless:
                return

    def describe(self) -> str:
        """Where this rank is, what it is reading and planning."""
        plan, position = self._plan, self._reading
        step = position // plan.global_batch
        place = f"rank {plan.rank} of {plan.world_size}, step {step:,} (up to position {position:,})"
        return f"{place}{self._planning}{self._streams.progress()}"

    def _next_plan(self, cursor: Cursor, left: int, rows: int, every: int) -> _Planned:
        """Plan about `rows` samples, of each `every`-th of the `left` batches that the epoch still has."""
        position, delivered = cursor
        most = min(rows // self._plan.batch_size, PLAN_POSITIONS // self._plan.global_batch)
        count = self._allowed(position, max(1, min(most, -(-left // every))), every)
        self._streams.advance(self._arrangement.positions(position))
        self._reading = position
        self._planning = f"; planning from position {position:,}"
        steps = self._plan.steps(self._arrangement.order, position, count, every=every)
        cursors = [(after, delivered + number * every + 1) for number, after in enumerate(steps.after)]
        if (count - 1) * every + 1 == left:
            cursors[-1] = (steps.after[-1], 0)
        shard, row, ids = steps.shard.ravel(), steps.row.ravel(), steps.sample_id.ravel()
        real = None
        if steps.padded:
            is_real = ids >= 0
            shard, row = shard[is_real], row[is_real]
            real = np.concatenate([[0], np.cumsum(is_real)])
        self._planning = f"; opening {self._names(shard)}"
        with self._placed():
            reader, is_late = self._source.source.reader(self._streams.in_datasets(shard), row)
        self._planning = ""
        return _Planned(cursors, ids, reader, is_late, real)

    def _allowed(self, position: int, count: int, every: int) -> int:
        """How many of `count` batches the streams' limits allow; StreamExhaustedError if none."""
        limit, plan = self._arrangement.limit, self._plan
        if limit is None:
            return count
        start, batch = plan.start(position), plan.global_batch
        if plan.tail == "pad":  # an epoch's last batch draws on less
            batch = min(batch, plan.samples - start % plan.samples)
        if start + batch > limit.position:
            raise StreamExhaustedError(limit.message(plan.global_batch))
        allowed = (limit.position - start) // plan.global_batch
        return max(1, min(count, -(-allowed // every)))

    def _groups(self, planned: _Planned) -> Iterator[Group]:
        size, cursors, ids, real = self._plan.batch_size, planned.cursors, planned.ids, planned.real
        make, reader = self._maker.make, planned.reader
        per_group = max(1, GROUP_BYTES // (size * (self._source.delivered_bytes or GROUP_BYTES)))
        for first in range(0, len(cursors), per_group):
            done = cursors[first : first + per_group]
            low, high = first * size, (first + len(done)) * size
            self._reading = done[0][0]
            with self._placed():
                columns = reader(low, high) if real is None else reader(int(real[low]), int(real[high]))
            batches, count = make(columns, ids[low:high])
            yield Group(batches, done, ids[low:high].reshape(-1, size), count)

    @contextmanager
    def _placed(self) -> Iterator[None]:
        """Errors of the store say where in the run they struck."""
        try:
            yield
        except FetchTimeoutError as error:
            raise LoaderTimeoutError(f"{self.describe()}: {error}") from error
        except MixedShapesError as error:
            raise MixedShapesError(f"{self.describe()}: {error}") from error
        except StoreError as error:
            raise type(error)(
                error.where, f"{error.problem}; {self.describe()}", status=error.status
            ) from error

    def _names(self, shard: npt.NDArray[np.int32]) -> str:
        if not len(shard):
            return "nothing"
        used = np.unique(shard)
        more = f" and {len(used) - 1} more" if len(used) > 1 else ""
        return f"{self._streams.infos[int(used[0])].stored.basename}{more}"
