"""What there is to do in a stage: what an engine takes its tasks from, and tells of finished ones.

`OwnQueue` hands out all of them. `SharedQueue` hands out those that no other process is at, and hears of what
others finish: several machines that run the same build share its work, and whoever comes later, or stops,
changes only how long it takes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

from shardkit.errors import BuildError
from shardkit.writers.execution.claims import Claims
from shardkit.writers.execution.task import Commit, Task
from shardkit.writers.execution.work import Work

__all__ = ["OwnQueue", "SharedQueue", "TaskQueue", "TaskSlice", "Waiting"]

POLL_SECONDS = 2.0  # at most, while this process has nothing to do
_SOON_SECONDS = 0.1  # the first look of one that has just nothing to do; doubled by each that brings nothing
BUSY_POLL_SECONDS = 15.0  # while it has: who would be in its way is noticed by claims
_POLL_SHARE = 0.05  # of a busy process's time for looks, however many tasks there are; of an idle one's, half
_FINISHED_FOUND = 3  # tasks in a row that others had finished: time to look at all of them
WAIT_SECONDS = 6 * 3600.0  # without a task finished by anyone: somebody hangs, or a task is far too big

_ORDERS = 16

Done = Callable[[Commit], None]
Waiting = Callable[[Mapping[str, int]], None]
"""Hears who is at the tasks that this process waits for: {session: tasks}, "" for those that nobody has."""


class TaskQueue(Protocol):
    """The tasks of a stage that are not finished."""

    @property
    def exhausted(self) -> bool:
        """Whether nothing is left to be finished, here or elsewhere."""

    @property
    def poll_seconds(self) -> float | None:
        """How often to `take` again while there is room for a task; None: nothing new will come."""

    def take(self) -> Task | None:
        """A task to run now, heavy ones first; None if there is none at the moment."""

    def done(self, commit: Commit) -> None:
        """A task that was taken is finished."""


class OwnQueue:
    """All tasks, for one process."""

    poll_seconds = None

    def __init__(self, tasks: Sequence[Task], done: Done) -> None:
        self._waiting = sorted(tasks, key=lambda task: task.weight)  # the heaviest is last
        self._open = len(tasks)
        self._done = done

    @property
    def exhausted(self) -> bool:
        return not self._open

    def take(self) -> Task | None:
        return self._waiting.pop() if self._waiting else None

    def done(self, commit: Commit) -> None:
        self._open -= 1
        self._done(commit)


@dataclass(frozen=True, slots=True)
class TaskSlice:
    """Number `index` of `count` processes that share a build: which tasks it takes first."""

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise BuildError(f"task slice {self.index}/{self.count}: must be one of 0/n to (n-1)/n")

    def rank(self, task: Task) -> int:
        """0 for its own tasks, then those of the next process, and so on."""
        owner = xxhash.xxh3_64_intdigest(f"{task.stage}/{task.name}") % self.count
        return (owner - self.index) % self.count


class SharedQueue:
    """The tasks that no living process is at; own slice first, then others', heavy ones first in each."""

    def __init__(
        self,
        tasks: Sequence[Task],
        done: Done,
        work: Work,
        claims: Claims,
        slice: TaskSlice | None,
        *,
        waiting: Waiting = lambda holders: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Without a slice, one of many by the session's name: who starts at once begins at different tasks.
        order = slice or TaskSlice(xxhash.xxh3_64_intdigest(claims.session) % _ORDERS, _ORDERS)
        self._waiting = {task.key: task for task in sorted(tasks, key=lambda t: (order.rank(t), -t.weight))}
        self._running: dict[str, Task] = {}
        self._done, self._told, self._work, self._claims, self._clock = done, waiting, work, claims, clock
        self._next_poll = self._polled = float("-inf")
        self._poll_took = 0.0
        self._idle_seconds = _SOON_SECONDS
        self._moved = clock()

    @property
    def exhausted(self) -> bool:
        return not self._waiting and not self._running

    @property
    def poll_seconds(self) -> float:
        return POLL_SECONDS if self._running else self._idle_seconds

    def take(self) -> Task | None:
        if self._clock() >= self._next_poll:
            self._poll()
        finished = 0
        for key, task in list(self._waiting.items()):
            if key not in self._waiting or not self._claims.take(key):
                continue
            commit = self._work.finished([task])[0]
            if commit is None:
                del self._waiting[key]
                self._running[key] = task
                self._idle_seconds = _SOON_SECONDS
                return task
            # By somebody who let go of it since the last look.
            self._claims.release(key)
            self._hear(key, commit)
            finished += 1
            if finished == _FINISHED_FOUND:
                self._poll()
                finished = 0
        if not self._running and self._waiting:  # look often now
            self._idle_seconds = min(2 * self._idle_seconds, POLL_SECONDS)
            self._next_poll = min(self._next_poll, self._polled + max(self._idle_seconds, self._poll_took))
            self._tell()
        return None

    def done(self, commit: Commit) -> None:
        key = f"{commit.stage}/{commit.folder.name}"
        self._running.pop(key, None)
        self._claims.release(key)
        self._moved = self._clock()
        self._done(commit)

    def _hear(self, key: str, commit: Commit) -> None:
        del self._waiting[key]
        self._moved = self._clock()
        self._idle_seconds = _SOON_SECONDS
        self._done(commit)

    def _poll(self) -> None:
        """What others finished, and what they are at."""
        start = self._clock()
        self._claims.refresh()
        tasks = list(self._waiting.values())
        for task, commit in zip(tasks, self._work.finished(tasks), strict=True):
            if commit is not None:
                self._hear(task.key, commit)
        self._polled = self._clock()
        self._poll_took = self._polled - start
        self._next_poll = self._polled + max(BUSY_POLL_SECONDS, self._poll_took / _POLL_SHARE)

    def _tell(self) -> None:
        """Who is waited for; BuildError after hours."""
        holders = Counter(self._claims.holder(key) or "" for key in self._waiting)
        self._told(holders)
        if self._clock() - self._moved > WAIT_SECONDS:
            names = ", ".join(sorted(name or "nobody" for name in holders)[:3])
            raise BuildError(
                f"waited {WAIT_SECONDS / 3600:.0f} hours for others to finish {len(self._waiting):,} tasks, "
                f"such as {next(iter(self._waiting.values()))} ({names} at it); stop what hangs, then start "
                f"again"
            )
