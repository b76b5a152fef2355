"""Runs tasks on an engine, as a build does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardkit.writers.execution.engine import Engine
from shardkit.writers.execution.queue import OwnQueue
from shardkit.writers.execution.task import Commit, Task
from shardkit.writers.execution.work import Work

__all__ = ["run_all"]


def run_all(
    engine: Engine, tasks: Sequence[Task], work: Work, hear: Callable[[Commit], object] = lambda commit: None
) -> list[Commit]:
    """Commits in the order of the tasks; `hear` gets each as it is finished."""
    commits: dict[str, Commit] = {}

    def done(commit: Commit) -> None:
        commits[commit.folder.name] = commit
        hear(commit)

    engine.run(OwnQueue(tasks, done), work)
    return [commits[task.key.partition("/")[2]] for task in tasks]
