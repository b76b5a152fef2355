"""Produces batches: plans many, reads a few at a time, and prepares them before the loop requests them.

`GroupMaker` plans thousands of positions in one call (100 ns per sample) and gathers a group of batches that
fits a core's L2 cache, where a gather is fastest. A plan covers up to `PLAN_ROWS` samples of a rank. The
first plans are shorter, because the first batch must wait neither for a long plan nor for shards that only
later batches need. A dataset of more than `MAX_PLAN_SHARDS` shards is planned in shorter pieces; each shard
that the previous plan did not use is mapped again, which costs tens of microseconds.

`Prefetcher` advances that iterator either in the training loop or in one background thread, never in both at
once, and keeps its order. The thread runs only while the loop does other work: a loop that returns within
`BUSY_SECONDS` leaves nothing to overlap with, and two threads that alternate between the GIL and each other's
caches are slower than one (gathering 8 rows takes 16 microseconds; waking a thread takes longer). So a loop
that only reads runs at full speed on a busy machine too, and a loop that trains finds its batches ready. An
error in the thread is raised at the point of its group, with the thread's traceback. `close`, leaving the
loop and the interpreter's exit end the thread. None of these objects survives a fork: a child must create its
own.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardkit.cache.download import FetchTimeoutError
from shardkit.errors import ShardkitError, StreamExhaustedError
from shardkit.loaders.batch import Batch, BatchMaker, Fields, batches_of, held_bytes
from shardkit.loaders.config import BUSY_SECONDS
from shardkit.loaders.document_values import RowValues
from shardkit.loaders.profiled import profiled
from shardkit.loaders.sources import MixedShapesError, SourceInfo
from shardkit.loaders.streams import Columns, ReadRows, Streams
from shardkit.loaders.transform import PlannedRows, SampleTransform
from shardkit.order.arrangement import Arrangement
from shardkit.order.balance import BALANCED_POSITIONS, WorkBalance, planned_steps
from shardkit.order.batches import BatchPlan, Cursor
from shardkit.storage.running_clock import LOOK_SECONDS, running_seconds
from shardkit.storage.store import StoreError

PLAN_ROWS = 65536  # maximum rows of one rank in a plan; planning them takes six milliseconds
PLAN_POSITIONS = 1 << 20  # maximum positions of all ranks in a plan; they take 8 MiB of memory
GROUP_BYTES = 2 << 20  # maximum size of a group of batches, unless one batch is larger
PLAN_GROWTH = 8  # factor by which a plan is longer than the previous one
# A plan maps all its shards while the next plan is made, and Linux allows 65,530 maps per process.
MAX_PLAN_SHARDS = 8192

BUSY_TIMES = 2  # consecutive long pauses of the loop that start the thread; one may be due to OS scheduling
_JOIN_SECONDS = 5.0  # longest wait of `close` for a thread that is reading a group


class LoaderTimeoutError(ShardkitError, TimeoutError):
    """A batch did not arrive in time; the message names the batch and what was being read."""


@dataclass(frozen=True, slots=True)
class Portion:
    """The part of the batches that an iteration reads: number `first` and each `every`-th one after it.

    `reads_ahead`: prefetch in a background thread. `makes_batches`: fill `Group.batches`, not only `fields`.
    """

    first: int = 0
    every: int = 1
    reads_ahead: bool = True
    makes_batches: bool = True


WHOLE = Portion()


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive batches and the loader's cursor after each."""

    fields: Fields
    batches: list[Batch]  # made of `fields`; empty without `makes_batches`, if the receiver makes them
    cursors: list[Cursor]
    ids: npt.NDArray[np.int64]  # sample ids of shape (batches, batch size); -1 is padding
    bytes: int
    work: npt.NDArray[np.int64] | None = None  # work of each batch, in the format of `Steps.work`


@dataclass(frozen=True, slots=True)
class _Planned:
    """Planned batches and the rows that they are made of, in open shards."""

    cursors: list[Cursor]
    ids: npt.NDArray[np.int64]
    rows: PlannedRows
    is_late: bool  # whether shards had to be fetched first
    real: npt.NDArray[np.int64] | None  # number of samples before entry i that are not padding; None: all
    values: RowValues | None  # of the documents of all samples, padding included
    work: npt.NDArray[np.int64] | None


class GroupMaker:
    """Makes the groups of one rank, starting at any position."""

    def __init__(
        self,
        streams: Streams,
        arrangement: Arrangement,
        plan: BatchPlan,
        source: SourceInfo,
        maker: BatchMaker,
        *,
        most_bytes: int = GROUP_BYTES,
        balance: WorkBalance | None = None,
        makes_batches: bool = True,
    ) -> None:
        """`most_bytes`: maximum size of a group, except that one batch is always allowed."""
        self._arrangement, self._plan, self._source, self._maker = arrangement, plan, source, maker
        self._balance, self._makes_batches = balance, makes_batches
        self._streams = streams
        self._group_bytes = min(most_bytes, GROUP_BYTES)
        self._planning, self._reading = "", 0
        self._samples = SampleTransform(maker.config, arrangement.seed, maker.memory)

    @property
    def needs_loop(self) -> bool:
        """Whether groups must be made in the thread of the training loop; see `loaders.transform`."""
        return self._samples.needs_loop

    def groups(self, cursor: Cursor, *, endless: bool, first: int = 0, every: int = 1) -> Iterator[Group]:
        """Yield groups of batches from `cursor` to the end of its epoch, or with `endless` without end.

        Of these batches, yields number `first` and each `every`-th after it; skipped batches cost nothing.
        """
        skip = first
        rows = self._plan.batch_size
        most = max(rows, min(self._source.plan_bytes // self._source.stored_bytes, PLAN_ROWS))
        if len(self._streams.infos) > MAX_PLAN_SHARDS:
            most = max(rows, min(most, MAX_PLAN_SHARDS))  # each row may be in another shard
        while True:
            left = self._plan.batches_left(cursor[0])
            while left:
                passed = min(skip, left)
                cursor, skip, left = self._plan.advance(cursor, passed), skip - passed, left - passed
                if not left:
                    break
                planned = self._plan_batches(cursor, left, rows, every)
                yield from self._read(planned)
                cursor, skip = planned.cursors[-1], every - 1
                left -= (len(planned.cursors) - 1) * every + 1
                # A plan waits for all its shards, so use short plans as long as shards must be fetched first.
                if planned.is_late:
                    rows = max(rows // PLAN_GROWTH, self._plan.batch_size)
                else:
                    rows = min(rows * PLAN_GROWTH, most)
            if not endless:
                return

    def describe(self) -> str:
        """Return a text for messages: this rank's step and position, and what it is planning or fetching."""
        plan, position = self._plan, self._reading
        step = position // plan.global_batch
        place = f"rank {plan.rank} of {plan.world_size}, step {step:,} (up to position {position:,})"
        return f"{place}{self._planning}{self._streams.progress()}"

    def _plan_batches(self, cursor: Cursor, left: int, rows: int, every: int) -> _Planned:
        """Plan about `rows` samples and open their shards: each `every`-th of the epoch's `left` batches."""
        position, delivered = cursor
        positions = PLAN_POSITIONS if self._balance is None else BALANCED_POSITIONS
        most = min(rows // self._plan.batch_size, positions // self._plan.global_batch)
        count = self._allowed(position, max(1, min(most, -(-left // every))), every)
        self._reading = position
        self._planning = f"; planning from position {position:,}"
        order, balance = self._arrangement.order, self._balance
        steps = planned_steps(self._plan, balance, order, position, count, every=every)
        self._streams.run.at(reading=(position, steps.after[-1]))
        cursors = [(after, delivered + number * every + 1) for number, after in enumerate(steps.after)]
        if (count - 1) * every + 1 == left:
            cursors[-1] = (steps.after[-1], 0)
        shard, row, ids = steps.shard.ravel(), steps.row.ravel(), steps.sample_id.ravel()
        places, real = steps.position.ravel(), None
        if steps.padded:
            is_real = ids >= 0
            shard, row, places = shard[is_real], row[is_real], places[is_real]
            real = np.concatenate([[0], np.cumsum(is_real)])
        self._planning = f"; opening {self._shard_names(shard)}"
        values = self._maker.values
        with self._errors_with_place():
            of_documents = None if values is None else values.open_rows(ids)
            read, is_late = self._source.source.open_rows(self._streams.in_datasets(shard), row)
        self._planning = ""
        found = PlannedRows(self._checked(read), self._streams, shard, row, places)
        return _Planned(cursors, ids, found, is_late, real, of_documents, steps.work)

    def _allowed(self, position: int, count: int, every: int) -> int:
        """Return how many of `count` batches the streams' limits allow; if 0, raise StreamExhaustedError."""
        limit, plan = self._arrangement.limit, self._plan
        if limit is None:
            return count
        start, batch = plan.start(position), plan.global_batch
        if plan.tail == "pad":  # an epoch's last batch may have fewer samples
            batch = min(batch, plan.samples - start % plan.samples)
        if start + batch > limit.position:
            raise StreamExhaustedError(limit.message(plan.global_batch))
        allowed = (limit.position - start) // plan.global_batch
        return max(1, min(count, -(-allowed // every)))

    def _read(self, planned: _Planned) -> Iterator[Group]:
        per_batch = self._plan.batch_size * (self._source.delivered_bytes or GROUP_BYTES)
        per_group = max(1, self._group_bytes // per_batch)
        with self._errors_with_place():
            for first in range(0, len(planned.cursors), per_group):
                yield self._group(planned, slice(first, first + per_group))

    def _group(self, planned: _Planned, which: slice) -> Group:
        """Read the planned batches `which`."""
        cursors, real = planned.cursors[which], planned.real
        self._reading = cursors[0][0]
        first = which.start * self._plan.batch_size
        ids = planned.ids[first : first + len(cursors) * self._plan.batch_size]
        work = None if planned.work is None else planned.work[which]
        by_batch = ids.reshape(len(cursors), -1)
        low, high = first, first + len(ids)
        if real is not None:
            low, high = int(real[low]), int(real[high])
        if self._samples.collates:
            with profiled("shardkit.make"):
                batch = self._samples.batch(planned.rows, low, high, self._maker.sample_fields(ids))
            return Group({}, [batch], cursors, by_batch, held_bytes(batch), work)
        with profiled("shardkit.gather"):
            columns = self._columns(planned.rows, low, high)
        with profiled("shardkit.make"):
            values = None if planned.values is None else planned.values[first : first + len(ids)]
            fields, count = self._maker.fields(columns, ids, values)
            batches = batches_of(fields, self._maker.tensor) if self._makes_batches else []
        return Group(fields, batches, cursors, by_batch, count, work)

    def _checked(self, read: ReadRows) -> ReadRows:
        """Return a reader that also checks stored token ids, where a transform gets them first."""
        if not (self._maker.config.changes_samples and self._maker.tokens.may_overflow):
            return read

        def checked(low: int, high: int) -> Columns:
            columns = read(low, high)
            self._maker.check_overflow(columns)
            return columns

        return checked

    def _columns(self, rows: PlannedRows, low: int, high: int) -> Columns:
        """Return the columns of planned samples `low` to `high` - 1, transformed."""
        if low < high or not self._samples.transforms:
            return self._samples.columns(rows, low, high)
        # A batch of padding only has the keys and types of other batches: of the run's first sample.
        first = self._arrangement.order.locate((0, 1))
        read, _ = self._source.source.open_rows(self._streams.in_datasets(first.shard), first.row)
        one = PlannedRows(read, self._streams, first.shard, first.row, first.position)
        return {name: values[:0] for name, values in self._samples.columns(one, 0, 1).items()}

    @contextmanager
    def _errors_with_place(self) -> Iterator[None]:
        """Add rank, step and shards to the messages of store and shape errors."""
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

    def _shard_names(self, shard: npt.NDArray[np.int32]) -> str:
        if not len(shard):
            return "nothing"
        used = np.unique(shard)
        more = f" and {len(used) - 1} more" if len(used) > 1 else ""
        return f"{self._streams.infos[int(used[0])].stored.basename}{more}"


class Prefetcher:
    """Delivers the groups of `source`. Timeout errors quote `describe()`, which says what is being read."""

    def __init__(
        self,
        source: Iterator[Group],
        describe: Callable[[], str],
        *,
        most_batches: int,
        most_bytes: int,
        timeout_seconds: float,
    ) -> None:
        """`most_…`: limits of the batches ready ahead of the loop, except that one group is always allowed.

        If `most_batches` is 0, no thread is started.
        """
        self._source, self._describe = source, describe
        self._most_batches, self._most_bytes = most_batches, most_bytes
        self._timeout_seconds = timeout_seconds
        self._changed = threading.Condition()
        self._ready: deque[Group] = deque()
        self._ready_batches = self._ready_bytes = 0
        self._busy = False  # whether the loop or the thread is advancing the source
        self._wanted = False  # whether the thread may advance the source
        self._ended = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._returned = time.perf_counter()
        self._busy_times = 0

    def get(self) -> Group | None:
        """Return the next group, or None at the end. Raises the source's error, or LoaderTimeoutError."""
        if os.getpid() != self._process:
            raise RuntimeError("this iterator belongs to the parent process: call iter(loader) in the child")
        is_busy = time.perf_counter() - self._returned > BUSY_SECONDS
        self._busy_times = self._busy_times + 1 if is_busy else 0
        wanted = self._busy_times >= BUSY_TIMES and self._most_batches > 0
        with profiled("shardkit.wait"):
            if self._thread is None and not wanted and not self._ended:
                group = self._advance()
            else:
                group = self._get_from_either(wanted)
        self._returned = time.perf_counter()
        return group

    @property
    def ready_batches(self) -> int:
        """Number of batches that are ready to be delivered."""
        return self._ready_batches

    def fail(self, error: BaseException) -> None:
        """Make `get` raise `error` from now on, also if it is waiting. Safe in any thread."""
        with self._changed:
            self._ended, self._error = True, error
            self._ready.clear()
            self._ready_batches = self._ready_bytes = 0
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread and drop ready groups. Safe to call twice, and from a forked child."""
        if os.getpid() != self._process:
            return
        with self._changed:
            self._ended = True
            self._ready.clear()
            self._changed.notify_all()
        thread = self._thread
        if thread is not None:
            atexit.unregister(self.close)
            if thread is not threading.current_thread():
                thread.join(_JOIN_SECONDS)
        self._source = iter(())  # drop the source, so that a closed loader's iterator keeps no shards open

    def _get_from_either(self, wanted: bool) -> Group | None:
        with self._changed:
            self._let_thread_run(wanted)
            group = self._take_ready()
            if group is not None or self._ended:
                return group
            self._busy = True
        try:
            return self._advance()
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _take_ready(self) -> Group | None:
        """Return the next ready group, or None; wait for it while the thread is reading."""
        deadline = running_seconds() + self._timeout_seconds
        while not self._ready and self._busy and self._error is None:
            left = deadline - running_seconds()
            if left <= 0:
                raise LoaderTimeoutError(f"no batch within {self._timeout_seconds:g} s: {self._describe()}")
            self._changed.wait(min(left, LOOK_SECONDS))
        if self._ready:
            group = self._ready.popleft()
            self._ready_batches -= len(group.cursors)
            self._ready_bytes -= group.bytes
            self._changed.notify_all()
            return group
        if self._error is not None:
            raise self._error
        return None

    def _advance(self) -> Group | None:
        """Return the source's next group, or None at its end. No other thread may use the source now."""
        try:
            group = next(self._source, None)
        except BaseException as error:
            # A generator that raised is exhausted; another `next` would look like the end of the epoch.
            self._ended, self._error = True, error
            raise
        if group is None:
            self._ended = True
        return group

    def _let_thread_run(self, wanted: bool) -> None:
        if wanted and not self._wanted:
            self._changed.notify_all()
        self._wanted = wanted
        if wanted and self._thread is None and not self._ended:
            self._thread = threading.Thread(target=self._run, name="shardkit-prefetch", daemon=True)
            # A daemon, so that it cannot keep the process alive; it is still stopped cleanly at exit.
            atexit.register(self.close)
            self._thread.start()

    def _has_room(self) -> bool:
        return not self._ready or (
            self._ready_batches < self._most_batches and self._ready_bytes < self._most_bytes
        )

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._ended and (self._busy or not self._wanted or not self._has_room()):
                    self._changed.wait()
                if self._ended:
                    return
                self._busy = True
            group = error = None
            try:
                group = next(self._source, None)
            except BaseException as raised:
                error = raised
            with self._changed:
                self._busy = False
                if group is None:
                    self._ended, self._error = True, error
                elif not self._ended:
                    self._ready.append(group)
                    self._ready_batches += len(group.cursors)
                    self._ready_bytes += group.bytes
                self._changed.notify_all()
