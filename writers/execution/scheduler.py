"""Task queues of a stage, and the lease of the driver.

An engine takes tasks from a queue and reports finished ones to it. `OwnQueue` hands out every task: one
driver runs the build. `SliceQueue` is for processes that share a build without a scheduler (`--task-slice`,
such as the elements of a Slurm array): each runs the tasks that a hash of their names assigns to it, then
waits for what the others commit.

A work folder that several processes can reach has one *driver*: the build itself, or one of the slices. It
holds the lease, an object that it rewrites every few seconds:

    lease/<epoch>     the holder's name and the number of its heartbeat; the highest epoch counts

A lease whose heartbeat has not changed for `lease_seconds` of the observer's own clock has expired; clocks of
different machines are never compared. To take it over is to create the next epoch, which a store lets one
process do. A driver that was suspended meanwhile finds a higher epoch and ends.

Of slices, the driver publishes, and runs the tasks that nobody has committed for `scavenge_seconds`. If the
driver is gone, the next idle slice takes the lease. None of this decides a byte: tasks are pure, and a task
that two processes run is committed once.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

import xxhash

from shardkit.errors import BuildError, warn_user
from shardkit.files import Closing
from shardkit.storage.store import ObjectExistsError, ObjectInfo, Store, StoreError
from shardkit.writers.execution.segments import Segments
from shardkit.writers.execution.task import Commit, Task, TaskFailedError
from shardkit.writers.execution.work import Work, with_fallbacks

__all__ = [
    "DEFAULT_TIMES",
    "Done",
    "DriverLease",
    "OwnQueue",
    "SharingTimes",
    "SliceQueue",
    "Stragglers",
    "TaskQueue",
    "TaskSlice",
    "process_name",
]

_PREFIX = "lease/"
_REMEMBERED_TASKS = 1000  # enough for a median, of stages of a million

Done = Callable[[Commit], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class SharingTimes:
    """How often processes that share a work folder look for each other. Only time depends on it."""

    lease_seconds: float = 60.0
    """Silence after which a driver counts as dead."""
    beat_seconds: float = 10.0
    poll_seconds: float = 2.0
    """First wait of an idle slice; doubles up to `longest_poll_seconds` while nothing is found."""
    longest_poll_seconds: float = 30.0
    scavenge_seconds: float = 900.0
    """Time without any commit in a stage after which the driver runs the tasks of other slices."""


DEFAULT_TIMES = SharingTimes()


class DriverLease(Closing):
    """The lease of the driver of a work folder, as one process sees it. `name` identifies it to people."""

    def __init__(
        self,
        store: Store,
        *,
        name: str,
        times: SharingTimes = DEFAULT_TIMES,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.name, self.times = name, times
        self._store, self._clock, self._sleep = store, clock, sleep
        self._id = f"{name} {os.urandom(8).hex()}"
        self._own = ("", "")  # key and version of what this process wrote last
        self._beats = 0
        self._seen = ("", "")  # key and version of another's lease, and since when it has been like that
        self._seen_since = 0.0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.held = False
        self.was_lost = False

    def acquire(self) -> None:
        """Take the lease; wait for that of a dead driver to expire. BuildError if a driver is at work."""
        is_first = True
        try:
            while not self.try_acquire():
                before, holder = self._seen, self.holder()
                if is_first:
                    warn_user(
                        f"{self._store.url}: {holder} holds the lease of this work folder; waiting up to "
                        f"{self.times.lease_seconds:.0f} s to see whether it is alive"
                    )
                    is_first = False
                self._sleep(self.times.beat_seconds / 4)
                newest = self._newest()
                if newest is not None and newest.key == before[0] and newest.version != before[1]:
                    raise BuildError(
                        f"{self._store.url}: {holder} runs a build in this work folder; its lease expires "
                        f"{self.times.lease_seconds:.0f} s after its last renewal, which was just now. Stop "
                        f"that build, wait for it, or set another `work`; processes that are to share a "
                        f"build are started with --task-slice"
                    )
        except StoreError as error:
            raise BuildError(f"work folder {self._store.url}: {error}; the same command continues") from error

    def try_acquire(self) -> bool:
        """Take the lease if it is free or has expired since this process first saw it. StoreError."""
        if self.held:
            return True
        now, newest = self._clock(), self._newest()
        if newest is not None:
            if self._seen != (newest.key, newest.version):
                self._seen, self._seen_since = (newest.key, newest.version), now
            if now - self._seen_since < self.times.lease_seconds:
                return False
        epoch = 1 if newest is None else int(newest.key.removeprefix(_PREFIX)) + 1
        try:
            self._write(f"{_PREFIX}{epoch:08d}", if_absent=True)
        except ObjectExistsError:
            return False  # another process was faster
        if newest is not None:
            self._store.delete(newest.key)
        if self._newest_key() > self._own[0]:  # a listing of a folder may miss what is renamed meanwhile
            self._store.delete(self._own[0])
            return False
        self.held, self.was_lost = True, False
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat_on, name="shardkit-lease", daemon=True)
            self._thread.start()
        return True

    def check(self) -> None:
        """BuildError if another process has taken the lease over."""
        if self.was_lost:
            raise BuildError(
                f"{self._store.url}: another driver has taken over this work folder, because this process "
                f"was silent for more than {self.times.lease_seconds:.0f} s (suspended, or cut off from the "
                f"store); finished tasks are kept, and that driver continues"
            )

    def holder(self) -> str:
        """The name of the process that holds the lease, for messages."""
        with contextlib.suppress(StoreError):
            newest = self._newest()
            if newest is not None:
                return self._store.get(newest.key).decode(errors="replace").partition(" ")[0]
        return "another process"

    def close(self) -> None:
        """Give the lease back. What cannot be removed now expires."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(self.times.beat_seconds)
        if self.held:
            self.held = False
            with contextlib.suppress(StoreError):
                self._store.delete(self._own[0])

    def renew(self) -> None:
        """Write the next heartbeat; give up the lease if another process has it. StoreError."""
        newest = self._newest()
        if newest is None or (newest.key, newest.version) != self._own:
            is_ours = newest is not None and self._store.get(newest.key).startswith(self._id.encode())
            if not is_ours:  # otherwise our last write arrived, though its answer did not
                self.held, self.was_lost = False, True
                if newest is not None and newest.key > self._own[0]:
                    self._store.delete(self._own[0])  # a late write of ours may have brought it back
                return
        self._write(self._own[0])

    def _beat_on(self) -> None:
        while not self._ended.wait(self.times.beat_seconds):
            if self.held:
                with contextlib.suppress(StoreError):  # the next beat may arrive
                    self.renew()
        if not self.held and self._own[0]:  # `close` did not wait until the last beat had been written
            with contextlib.suppress(StoreError):
                if self._store.get(self._own[0]).startswith(self._id.encode()):
                    self._store.delete(self._own[0])

    def _write(self, key: str, *, if_absent: bool = False) -> None:
        self._beats += 1
        info = self._store.put(key, f"{self._id} {self._beats}".encode(), if_absent=if_absent)
        self._own = key, info.version

    def _newest_key(self) -> str:
        newest = self._newest()
        return "" if newest is None else newest.key

    def _newest(self) -> ObjectInfo | None:
        return max(self._store.list(_PREFIX), key=lambda info: info.key, default=None)


def process_name() -> str:
    """A name for this process that no other has: host, number and a random part."""
    return f"{socket.gethostname()[:40]}-{os.getpid()}-{os.urandom(4).hex()}"


class TaskQueue(Protocol):
    """The unfinished tasks of a stage."""

    @property
    def exhausted(self) -> bool:
        """Whether all tasks are finished, here or elsewhere."""

    @property
    def poll_seconds(self) -> float | None:
        """How often to `take` again while there is room for a task; None: no new tasks will appear."""

    def take(self) -> Task | None:
        """A task to run now, heavy ones first; None if none is available at the moment."""

    def done(self, commit: Commit) -> None:
        """Report that a task that was taken is finished."""

    def failed(self, task: Task, error: TaskFailedError) -> None:
        """Report that a task that was taken failed in every attempt.

        Its fallback runs after all other tasks; BuildError if more tasks failed than that allows.
        """


class _Failures:
    """Tasks that failed. Fallbacks run last: if too many tasks fail, none of them is given up."""

    def __init__(self) -> None:
        self._errors: dict[str, str] = {}  # by key of the task
        self._waiting: list[tuple[Task, str]] = []

    def __len__(self) -> int:
        return len(self._waiting)  # fallbacks that have not started

    def add(self, task: Task, error: TaskFailedError) -> None:
        """Note a failure; BuildError with all of them if there are too many."""
        fallback = task.fallback
        assert fallback is not None, f"{task.key} has no fallback"
        self._errors[task.key] = str(error)
        self._waiting.append((task, str(error)))
        if len(self._errors) > fallback.limit:
            listed = "".join(f"\n  {self._errors[key]}" for key in sorted(self._errors))
            raise BuildError(
                f"{len(self._errors):,} tasks failed, {fallback.setting} allows {fallback.limit:,}; "
                f"mend or remove their inputs, or raise {fallback.setting}; finished tasks are kept:{listed}"
            ) from error
        warn_user(
            f"{error}; the build goes on without it ({len(self._errors):,} of {fallback.limit:,} that "
            f"{fallback.setting} allows)"
        )

    def pop_stand_ins(self) -> list[Task]:
        """The tasks to run in place of those that failed."""
        tasks = [task.fallback.task(task, error) for task, error in self._waiting if task.fallback]
        self._waiting.clear()
        return tasks


class OwnQueue:
    """All tasks, for one process."""

    poll_seconds = None

    def __init__(self, tasks: Sequence[Task], done: Done) -> None:
        self._waiting = sorted(tasks, key=lambda task: task.weight)  # the heaviest is last
        self._open = len(tasks)
        self._done = done
        self._failures = _Failures()

    @property
    def exhausted(self) -> bool:
        return not self._open

    def take(self) -> Task | None:
        if not self._waiting and self._open == len(self._failures):
            self._waiting = self._failures.pop_stand_ins()
        return self._waiting.pop() if self._waiting else None

    def done(self, commit: Commit) -> None:
        self._open -= 1
        self._done(commit)

    def failed(self, task: Task, error: TaskFailedError) -> None:
        self._failures.add(task, error)


@dataclass(slots=True)
class Stragglers:
    """Says how long a task may run before another machine runs it, too, if it has nothing else to do.

    That is `factor` times the median of the tasks of its stage that finished last, and `least_seconds`.
    """

    least_seconds: float = 60.0
    factor: float = 3.0
    _seconds: dict[str, deque[float]] = field(default_factory=dict)  # by stage

    def finished(self, stage: str, seconds: float) -> None:
        """Note how long a task ran."""
        self._seconds.setdefault(stage, deque(maxlen=_REMEMBERED_TASKS)).append(seconds)

    def limit_seconds(self, stage: str) -> float:
        """Infinite as long as no task of the stage has finished."""
        seconds = self._seconds.get(stage)
        return max(self.least_seconds, self.factor * median(seconds)) if seconds else math.inf


@dataclass(frozen=True, slots=True)
class TaskSlice:
    """Rank `index` of `count` processes that share a build: a hash of its name assigns a task to one rank."""

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise BuildError(f"task slice {self.index}/{self.count}: must be one of 0/n to (n-1)/n")

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def rank_of(self, task: Task) -> int:
        """The rank that is to run the task."""
        return xxhash.xxh3_64_intdigest(f"{task.stage}/{task.name}".encode()) % self.count

    def owns(self, task: Task) -> bool:
        """Whether this process is the one to run the task."""
        return self.rank_of(task) == self.index


class SliceQueue:
    """The tasks of one slice; then waits for those of the others, and runs them itself as a last resort.

    `absent` are ranks whose tasks the driver had to run. It is kept from stage to stage, so that a slice that
    never comes is waited for once.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        done: Done,
        work: Work,
        segments: Segments | None,
        lease: DriverLease,
        slice: TaskSlice,
        absent: set[int],
        *,
        waiting: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own = sorted((t for t in tasks if slice.owns(t)), key=lambda t: t.weight)  # heaviest last
        self._others = {task.key: task for task in tasks if not slice.owns(task)}
        self._running: set[str] = set()
        self._done, self._work, self._segments, self._lease = done, work, segments, lease
        self._waiting, self._clock, self._times = waiting, clock, lease.times
        self._moved = clock()  # when something was last finished
        self._idle_seconds = self._times.poll_seconds
        self._next_poll = float("-inf")
        self._slice, self._absent = slice, absent
        self._left: list[Task] = []  # tasks of others that this process runs, the lightest is last
        self._failures = _Failures()
        if lease.held:
            self._scavenge(task for task in self._others.values() if slice.rank_of(task) in absent)

    @property
    def exhausted(self) -> bool:
        return not self._own and not self._others and not self._running and not len(self._failures)

    @property
    def poll_seconds(self) -> float:
        return self._idle_seconds

    def take(self) -> Task | None:
        if not self._own and not self._running:
            self._own = self._failures.pop_stand_ins()
        if self._own:
            return self._start(self._own.pop())
        if self._others and self._clock() >= self._next_poll:
            self._poll()
        while self._left:
            task = self._left.pop()
            if task.key in self._others and task.key not in self._running:
                return self._start(task)
        return None

    def done(self, commit: Commit) -> None:
        key = commit.key
        self._running.discard(key)
        self._others.pop(key, None)
        self._moved = self._clock()
        self._done(commit)

    def failed(self, task: Task, error: TaskFailedError) -> None:
        self._running.discard(task.key)
        self._others.pop(task.key, None)
        self._failures.add(task, error)

    def _start(self, task: Task) -> Task:
        self._running.add(task.key)
        return task

    def _poll(self) -> None:
        """Find what others have finished; as the driver, take their tasks if nothing moves for long."""
        found = self._look()
        now = self._clock()
        for key, commit in found:
            self._absent.discard(self._slice.rank_of(self._others.pop(key)))
            self._done(commit)
        if found:
            self._moved, self._idle_seconds = now, self._times.poll_seconds
        else:
            self._idle_seconds = min(2 * self._idle_seconds, self._times.longest_poll_seconds)
        self._next_poll = now + self._idle_seconds
        with contextlib.suppress(StoreError):  # the next poll may succeed
            is_driver = bool(self._others) and self._lease.try_acquire()
            if is_driver and not self._left and now - self._moved >= self._times.scavenge_seconds:
                self._scavenge(self._others.values())
        if self._others and not self._running and not self._left:
            self._waiting(f"{len(self._others):,} tasks of other slices")

    def _scavenge(self, tasks: Iterable[Task]) -> None:
        """Run tasks of other slices here, the lightest first: if they live, they begin with the heaviest."""
        self._left = sorted(tasks, key=lambda task: -task.weight)
        self._absent.update(map(self._slice.rank_of, self._left))

    def _look(self) -> list[tuple[str, Commit]]:
        """What others have finished since the last look: in a store, only the driver reads their records."""
        tasks = {key: task for key, task in self._others.items() if key not in self._running}
        found: list[tuple[str, Commit]] = []
        if self._segments is not None:
            for stage in sorted({task.stage for task in tasks.values()}):
                for commit in self._segments.read(stage):
                    if commit.key in tasks and tasks[commit.key].digest == commit.digest:
                        del tasks[commit.key]
                        found.append((commit.key, commit))
            for key, commit in self._stand_ins(self._segments, tasks.values()):
                del tasks[key]
                found.append((key, commit))
        if self._segments is None or self._lease.held:
            looked = list(tasks.values())
            commits = with_fallbacks(self._work, looked, self._work.finished(looked))
            found += [(key, commit) for key, commit in zip(tasks, commits, strict=True) if commit is not None]
        return found

    def _stand_ins(self, segments: Segments, tasks: Iterable[Task]) -> list[tuple[str, Commit]]:
        """(key of the task, commit) of fallbacks that new segments have."""
        waiting = {(task.fallback.stage, task.name): task for task in tasks if task.fallback is not None}
        found = []
        for stage in sorted({stage for stage, _ in waiting}):
            for commit in segments.read(stage):
                task = waiting.get((stage, commit.name))
                if (
                    task is not None
                    and task.fallback is not None
                    and task.fallback.task(task).key == commit.key
                ):
                    found.append((task.key, commit))
        return found
