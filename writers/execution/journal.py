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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from shardkit.errors import BuildError
from shardkit.writers.execution.claims import Claims
from shardkit.writers.execution.queue import Done, OwnQueue, SharedQueue, TaskQueue, TaskSlice, Waiting
from shardkit.writers.execution.task import Commit, Task
from shardkit.writers.execution.turns import take_turn
from shardkit.writers.execution.work import Work, run_task
from shardkit.writers.execution.work_local import LocalWork, locked_folder
from shardkit.writers.execution.work_store import StoreWork

__all__ = ["Journal"]


class Journal:
    """A work folder, claimed while this is open. With a `slice`, several processes may share a local one."""

    def __init__(self, work: Work | Path, *, slice: TaskSlice | None = None) -> None:
        if isinstance(work, Path):
            work = LocalWork(work)
        assert isinstance(work, LocalWork | StoreWork)
        self.is_shared = slice is not None or isinstance(work, StoreWork)
        self.work: LocalWork | StoreWork = work
        self._slice = slice
        self._claims = Claims(work.sharing)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        session = self._claims.session  # what processes that share a folder are at lies apart
        with contextlib.ExitStack() as stack:
            if isinstance(self.work, StoreWork):
                self.work = self.work.claimed(session)
            else:
                stack.enter_context(locked_folder(self.work, shared=self.is_shared))
                if self.is_shared:
                    self.work = replace(self.work, session=session)
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

    def queue(self, tasks: Sequence[Task], done: Done, waiting: Waiting = lambda holders: None) -> TaskQueue:
        """Tasks to run; `done` hears of each as it is finished, here or elsewhere.

        `waiting` hears of those that others are at, while there is nothing to do here.
        """
        if self.is_shared:
            return SharedQueue(tasks, done, self.work, self._claims, self._slice, waiting=waiting)
        return OwnQueue(tasks, done)

    def take_turn(
        self, key: str, is_done: Callable[[], bool], waiting: Waiting = lambda holders: None
    ) -> AbstractContextManager[bool]:
        """Do something that only one process of those that share the work may do at a time.

        Gives whether it is still to be done, at once or when the others let go or die; `waiting` hears of
        them. As all claims, this saves work: what must not happen twice at once needs a lock of its own.
        """
        if not self.is_shared:
            return contextlib.nullcontext(True)
        return take_turn(self._claims, key, is_done, waiting)

    def forget_damaged(self, commit: Commit) -> None:
        """BuildError if a finished task's files are no longer what was committed; it will be made again.

        Those in a store are compared whenever they are read.
        """
        if isinstance(self.work, StoreWork):
            return
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
