"""Runs the tasks of stages at once in this process, and reuses those that ran, as a build does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardkit.writers.exchange.exchange import Limits, Slice, Table
from shardkit.writers.exchange.sorted_runs import DEFAULT_LIMITS
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.commit import Commit, facts_of, hash_output
from shardkit.writers.execution.stage import Task

__all__ = ["TaskFolders", "commit_folder", "read_run", "slice_of"]


class TaskFolders:
    """`ran` are the tasks that were not found finished, in order, as `stage/name`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._finished: dict[str, Commit] = {}
        self.ran: list[str] = []

    def __call__(self, *groups: Sequence[Task]) -> list[list[Commit]]:
        return [[self._run(task) for task in group] for group in groups]

    def _run(self, task: Task) -> Commit:
        if task.key not in self._finished:
            self.ran.append(str(task))
            folder = self._folder / task.key
            folder.mkdir(parents=True)
            result = task.of.recorded(task.run(folder))
            self._finished[task.key] = commit_folder(folder, task.stage, task.name, result)
        return self._finished[task.key]


def commit_folder(folder: Path, stage: str, name: str, result: object = None) -> Commit:
    """The commit of a task that wrote the files of a folder; the result passes through JSON."""
    outputs = {path.name: hash_output(path) for path in sorted(folder.iterdir())}
    return Commit(stage, name, folder, "", facts_of(result, outputs))


def read_run(path: Path, table: Table) -> npt.NDArray[np.void]:
    """All rows of a run."""
    return slice_of(path, table).read()[0]


def slice_of(path: Path, table: Table, limits: Limits = DEFAULT_LIMITS) -> Slice:
    """A run, whole."""
    return Slice.whole(table, [Artifact(path)], limits)
