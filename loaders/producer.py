"""Batches made a few at a time: thousands of positions planned at once, a cache-sized group gathered at once.

Planning costs about 100 ns a sample in calls for thousands; a gather is fastest while its result fits a
core's second-level cache. So a plan covers up to `PLAN_ROWS` samples, after shorter ones at first (the first
batch must wait neither for a long plan nor for shards that only later batches need), and a group up to
`GROUP_BYTES`. Datasets of more than `MAX_PLAN_SHARDS` shards are planned in shorter pieces; of their shards,
those that the plan before did not use are mapped anew, which costs tens of microseconds each.

Batches ready before they are asked for, without a thread where a thread would only cost.

A source (an iterator) is advanced either by the training loop itself or by one background thread, never by
both at once, and what it yields comes out in its order. The thread runs only when the training loop has
something else to do: when it comes back sooner than `BUSY_SECONDS` there is nothing to overlap with, and two
threads that take turns with Python's lock and each other's caches are slower than one (16 microseconds gather
8 rows; waking a thread costs more). So a loop that only reads runs at full speed on a busy machine too, and a
loop that trains finds its batches ready.

The thread stays within `Limits` (one item is always allowed). An error in it is raised where the item was
due, with the thread's traceback. `close` ends the thread; so do leaving the loop and the interpreter's end.
Nothing here survives a fork: a child must start its own.
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
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from shardkit.cache.fetcher import FetchTimeoutError
from shardkit.errors import ShardkitError, StreamExhaustedError
from shardkit.loaders.batch import Batch, BatchMaker
from shardkit.loaders.config import BUSY_SECONDS
from shardkit.loaders.plan import Arrangement, BatchPlan, Cursor
from shardkit.loaders.readers.mixed import MixedShapesError
from shardkit.loaders.readers.sources import SourceInfo
from shardkit.loaders.readers.streams import ReadRows, Streams
from shardkit.storage.store import StoreError

__all__ = [
    "Group",
    "GroupMaker",
    "Limits",
    "LoaderTimeoutError",
    "PrefetchThread",
    "Prefetcher",
]

_BUSY_TIMES = 2  # in a row: once may be the operating system's doing

_JOIN_SECONDS = 5.0  # how long closing waits for a thread in the middle of a read


class LoaderTimeoutError(ShardkitError, TimeoutError):
    """A batch did not arrive in time; the message says which and what was being read."""


class Item(Protocol):
    """What a prefetcher must know of what it hands out."""

    @property
    def bytes(self) -> int: ...

    @property
    def batch_count(self) -> int: ...


T = TypeVar("T", bound=Item)


@dataclass(frozen=True, slots=True)
class Limits:
    """How far ahead a prefetcher may run (0 batches: no thread), and how long a wait may last."""

    batches: int
    bytes: int
    timeout_seconds: float


class Prefetcher(Generic[T]):
    """Hands out what `source` yields; `describe` says what is being read when a wait gets too long."""

    def __init__(self, source: Iterator[T], limits: Limits, describe: Callable[[], str]) -> None:
        self._source = source
        self._limits = limits
        self._describe = describe
        self._changed = threading.Condition()
        self._ready: deque[T] = deque()
        self._ready_batches = self._ready_bytes = 0
        self._busy = False  # someone is advancing the source
        self._wanted = False  # the thread may advance it
        self._ended = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._returned = time.perf_counter()
        self._busy_times = 0

    def get(self) -> T | None:
        """The next item, or None at the end. Raises what the source raised, or LoaderTimeoutError."""
        if os.getpid() != self._process:
            raise RuntimeError("this iterator belongs to the parent process: call iter(loader) in this one")
        is_busy = time.perf_counter() - self._returned > BUSY_SECONDS
        self._busy_times = self._busy_times + 1 if is_busy else 0
        wanted = self._busy_times >= _BUSY_TIMES and self._limits.batches > 0
        if self._thread is None and not wanted and not self._ended:
            item = self._advance()
        else:
            item = self._get_from_either(wanted)
        self._returned = time.perf_counter()
        return item

    @property
    def ready_batches(self) -> int:
        """Batches that are ready to be handed out."""
        return self._ready_batches

    def fail(self, error: BaseException) -> None:
        """End with `error`: raised by `get`, at once if it waits. From any thread."""
        with self._changed:
            self._ended, self._error = True, error
            self._ready.clear()
            self._ready_batches = self._ready_bytes = 0
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread and forget what is ready. Safe to call twice, and from a forked child."""
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
        self._source = iter(())  # whoever holds an iterator of a closed loader holds no shards by it

    def _get_from_either(self, wanted: bool) -> T | None:
        with self._changed:
            self._let_thread_run(wanted)
            item = self._take_ready()
            if item is not None or self._ended:
                return item
            self._busy = True
        try:
            return self._advance()
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _take_ready(self) -> T | None:
        """The next ready item, or None; waits for it while the thread is at work."""
        deadline = time.monotonic() + self._limits.timeout_seconds
        while not self._ready and self._busy and self._error is None:
            left = deadline - time.monotonic()
            if left <= 0:
                seconds = self._limits.timeout_seconds
                raise LoaderTimeoutError(f"no batch within {seconds:g} s: {self._describe()}")
            self._changed.wait(left)
        if self._ready:
            item = self._ready.popleft()
            self._ready_batches -= item.batch_count
            self._ready_bytes -= item.bytes
            self._changed.notify_all()
            return item
        if self._error is not None:
            raise self._error
        return None

    def _advance(self) -> T | None:
        """The source's next item, or None at its end; nobody else can advance it meanwhile."""
        try:
            item = next(self._source, None)
        except BaseException as error:
            # A generator that raised is at its end: asked again, it would pass for a finished epoch.
            self._ended, self._error = True, error
            raise
        if item is None:
            self._ended = True
        return item

    def _let_thread_run(self, wanted: bool) -> None:
        if wanted and not self._wanted:
            self._changed.notify_all()
        self._wanted = wanted
        if wanted and self._thread is None and not self._ended:
            self._thread = PrefetchThread(target=self._run, name="shardkit-prefetch", daemon=True)
            # A daemon, so that it cannot keep the process alive; stopped in order at exit all the same.
            atexit.register(self.close)
            self._thread.start()

    def _has_room(self) -> bool:
        return not self._ready or (
            self._ready_batches < self._limits.batches and self._ready_bytes < self._limits.bytes
        )

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._ended and (self._busy or not self._wanted or not self._has_room()):
                    self._changed.wait()
                if self._ended:
                    return
                self._busy = True
            item = error = None
            try:
                item = next(self._source, None)
            except BaseException as raised:
                error = raised
            with self._changed:
                self._busy = False
                if item is None:
                    self._ended, self._error = True, error
                elif not self._ended:
                    self._ready.append(item)
                    self._ready_batches += item.batch_count
                    self._ready_bytes += item.bytes
                self._changed.notify_all()


class PrefetchThread(threading.Thread):
    """A thread that makes batches in the background: what it does must leave the training loop alone."""


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
    """Planned batches, and what reads them from their open shards."""

    cursors: list[Cursor]
    ids: npt.NDArray[np.int64]
    read: ReadRows
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
            read, is_late = self._source.source.open_rows(self._streams.in_datasets(shard), row)
        self._planning = ""
        return _Planned(cursors, ids, read, is_late, real)

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
        make, read = self._maker.make, planned.read
        per_group = max(1, GROUP_BYTES // (size * (self._source.delivered_bytes or GROUP_BYTES)))
        for first in range(0, len(cursors), per_group):
            done = cursors[first : first + per_group]
            low, high = first * size, (first + len(done)) * size
            self._reading = done[0][0]
            with self._placed():
                columns = read(low, high) if real is None else read(int(real[low]), int(real[high]))
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
