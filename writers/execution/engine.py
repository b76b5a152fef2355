"""The contract of an engine, which runs a build's tasks, and the engine that uses this process alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from shardkit.files import Closing
from shardkit.writers.execution.scheduler import TaskQueue
from shardkit.writers.execution.task import Task
from shardkit.writers.execution.work import Work, run_task

__all__ = ["Engine", "InlineEngine", "OnCompile"]

OnCompile = Callable[[Task, float | None], None]
"""Called as Numba compiles kernels for a task: with None when it starts, then with its seconds."""


class Engine(Protocol):
    """Takes tasks from a queue, runs them anywhere, and reports each commit to the queue."""

    workers: int

    def run(self, queue: TaskQueue, work: Work, on_compile: OnCompile | None = None) -> None:
        """Run tasks until the queue is exhausted. The first error ends the run; finished tasks are kept."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class InlineEngine(Closing):
    """Runs tasks one after the other in this process, for library calls and tests.

    Errors are not wrapped, and compilation is not reported.
    """

    workers = 1

    def run(self, queue: TaskQueue, work: Work, on_compile: OnCompile | None = None) -> None:
        """Run tasks until the queue is exhausted."""
        while not queue.exhausted:
            task = queue.take()
            if task is not None:
                queue.done(run_task(task, task.digest, work))
            elif not queue.exhausted:
                time.sleep(queue.poll_seconds or 0.0)

    def close(self) -> None:
        """Nothing to close."""
