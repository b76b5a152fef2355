"""What can run a build's tasks."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from shardkit.writers.execution.queue import TaskQueue
from shardkit.writers.execution.task import Task
from shardkit.writers.execution.work import Work

__all__ = ["Engine"]


class Engine(Protocol):
    """Takes tasks from a queue, runs them anywhere, and tells the queue of each that is committed.

    `compiling`, if set, hears of Numba compiling kernels for a task: None as it starts, then its seconds.
    """

    workers: int
    compiling: Callable[[Task, float | None], None] | None

    def run(self, queue: TaskQueue, work: Work) -> None:
        """Run tasks until the queue is exhausted; the first error ends the run, what is finished is kept."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
