"""Runs tasks in this process, one after the other: for libraries that call a stage, and for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from shardkit.closing import Closing
from shardkit.writers.journal import Commit, Task, run_task

__all__ = ["InlineEngine"]


class InlineEngine(Closing):
    """An `Engine` (shardkit.writers.engine_local) without workers: errors come as they are."""

    workers = 1
    compiling: Callable[[Task, float | None], None] | None = None  # never called: errors of it would be ours

    def run(self, tasks: Sequence[Task], work: Path, done: Callable[[Commit], None]) -> list[Commit]:
        """Run all tasks in order; `done` hears of each as it finishes."""
        commits = []
        for task in tasks:
            commits.append(run_task(task, task.digest, work))
            done(commits[-1])
        return commits

    def close(self) -> None:
        """Nothing to end."""
