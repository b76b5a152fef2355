"""What there is to do in a stage: what an engine takes its tasks from, and tells of finished ones.

`OwnQueue` hands out all of them. `SharedQueue` hands out those that no other process is at, and hears of what
others finish: several machines that run the same build share its work, and whoever comes later, or stops,
changes only how long it takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

from shardkit.errors import BuildError
from shardkit.writers.execution.claims import Claims
from shardkit.writers.execution.task import Commit, Task
from shardkit.writers.execution.work import Work

__all__ = ["OwnQueue", "SharedQueue", "TaskQueue", "TaskSlice"]

POLL_SECONDS = 2.0
WAIT_SECONDS = (
    6 * 3600.0
)  # without a single task finished by anyone: somebody hangs, or a task is far too big

_ORDERS = 16

Done = Callable[[Commit], None]


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

    poll_seconds = POLL_SECONDS

    def __init__(
        self,
        tasks: Sequence[Task],
        done: Done,
        work: Work,
        claims: Claims,
        slice: TaskSlice | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Without a slice, one of many by the session's name: who starts at once begins at different tasks.
        order = slice or TaskSlice(xxhash.xxh3_64_intdigest(claims.session) % _ORDERS, _ORDERS)
        self._waiting = {task.key: task for task in sorted(tasks, key=lambda t: (order.rank(t), -t.weight))}
        self._running: dict[str, Task] = {}
        self._done, self._work, self._claims, self._clock = done, work, claims, clock
        self._polled = float("-inf")
        self._moved = clock()

    @property
    def exhausted(self) -> bool:
        return not self._waiting and not self._running

    def take(self) -> Task | None:
        self._poll()
        for key, task in list(self._waiting.items()):
            if not self._claims.take(task):
                continue
            [commit] = self._work.find([task])
            del self._waiting[key]
            if commit is not None:  # by somebody who let go of it since the last look
                self._claims.release(key)
                self._hear(commit)
                continue
            self._running[key] = task
            return task
        return None

    def done(self, commit: Commit) -> None:
        key = f"{commit.stage}/{commit.folder.name}"
        self._running.pop(key, None)
        self._claims.release(key)
        self._hear(commit)

    def _hear(self, commit: Commit) -> None:
        self._moved = self._clock()
        self._done(commit)

    def _poll(self) -> None:
        """Every few seconds: what others finished, and what they are at."""
        now = self._clock()
        if now - self._polled < self.poll_seconds:
            return
        self._claims.refresh()
        tasks = list(self._waiting.values())
        for task, commit in zip(tasks, self._work.find(tasks), strict=True):
            if commit is not None:
                del self._waiting[task.key]
                self._hear(commit)
        self._polled = self._clock()
        if not self._running and self._waiting and now - self._moved > WAIT_SECONDS:
            task = next(iter(self._waiting.values()))
            who = self._claims.holder(task) or "nobody"
            raise BuildError(
                f"waited {WAIT_SECONDS / 3600:.0f} hours for others to finish {len(self._waiting):,} tasks, "
                f"such as {task} ({who} is at it); stop what hangs, then start again"
            )
