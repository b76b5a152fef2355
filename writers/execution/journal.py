"""The work of one build while it runs: alone in its folder, or sharing it.

    with Journal(LocalWork(folder)) as journal:
        commits = journal.find(tasks)                      # finished already
        engine.run(journal.queue(missing, done), journal.work)

A finished task is skipped only if the digest of everything that decides its outputs (config, inputs' digests,
code) is the recorded one and every output is there with its size. So a build may be killed at any time: the
same command goes on with what was finished, and what was not leaves no trace.

One build at a time uses a local folder (`flock`), unless all of them say that they share it. A store cannot
be locked: there, work is always shared.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from shardkit.errors import BuildError
from shardkit.writers.execution.claims import Claims
from shardkit.writers.execution.queue import Done, OwnQueue, SharedQueue, TaskQueue, TaskSlice
from shardkit.writers.execution.task import Commit, Task
from shardkit.writers.execution.work import Work, run_task
from shardkit.writers.execution.work_local import LocalWork, lock_folder
from shardkit.writers.execution.work_store import StoreWork

__all__ = ["Journal"]


class Journal:
    """A work folder, claimed while this is open. With a `slice`, several processes may share a local one."""

    def __init__(self, work: Work | Path, *, slice: TaskSlice | None = None) -> None:
        if isinstance(work, Path):
            work = LocalWork(work)
        assert isinstance(work, LocalWork | StoreWork)
        self.is_shared = slice is not None or isinstance(work, StoreWork)
        self._slice = slice
        self._claims = Claims(work.sharing)
        # Temporary files of processes that share a folder lie apart.
        self.work: LocalWork | StoreWork = (
            replace(work, session=self._claims.session) if self.is_shared else work
        )
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            if isinstance(self.work, LocalWork):
                stack.callback(os.close, lock_folder(self.work, shared=self.is_shared))
                if not self.is_shared:
                    self.work.clear_unfinished()
            else:
                self.work.claim_place()
            self.work.prepare()
            if self.is_shared:
                stack.enter_context(self._claims)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def find(self, tasks: Sequence[Task]) -> list[Commit | None]:
        """The finished ones; None for those that have to run."""
        return self.work.find(tasks)

    def run_here(self, task: Task) -> Commit:
        """The commit of a task, which runs in this process if it is not finished."""
        [commit] = self.find([task])
        return run_task(task, task.digest, self.work) if commit is None else commit

    def queue(self, tasks: Sequence[Task], done: Done) -> TaskQueue:
        """Tasks to run; `done` hears of each as it is finished, here or elsewhere."""
        if self.is_shared:
            return SharedQueue(tasks, done, self.work, self._claims, self._slice)
        return OwnQueue(tasks, done)

    def forget_damaged(self, commit: Commit) -> None:
        """BuildError if a finished task's files are no longer what was committed; it will be made again."""
        name = self.work.damaged_output(commit)
        if name is not None:
            self.work.forget(commit)
            raise BuildError(
                f"{commit.folder}: {name} was damaged after it was written; the task is removed, run the "
                f"build again"
            )

    def remove(self) -> None:
        """Remove the whole work folder; the journal stays locked and must be closed next."""
        self.work.remove()
