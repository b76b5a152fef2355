"""Runs tasks in this process, one after the other: for libraries that call a stage, and for tests."""

from __future__ import annotations

import time
from collections.abc import Callable

from shardkit.files import Closing
from shardkit.writers.execution.queue import TaskQueue
from shardkit.writers.execution.task import Task
from shardkit.writers.execution.work import Work, run_task

__all__ = ["InlineEngine"]


class InlineEngine(Closing):
    """An `Engine` without workers: errors come as they are."""

    workers = 1
    compiling: Callable[[Task, float | None], None] | None = None  # never called: errors of it would be ours

    def run(self, queue: TaskQueue, work: Work) -> None:
        """Run tasks until the queue is exhausted."""
        while not queue.exhausted:
            task = queue.take()
            if task is not None:
                queue.done(run_task(task, task.digest, work))
            elif not queue.exhausted:
                time.sleep(queue.poll_seconds or 0.0)

    def close(self) -> None:
        """Nothing to end."""
