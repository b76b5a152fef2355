"""The unfinished tasks of a stage: an engine takes them from a queue, and reports what became of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardkit.errors import BuildError, warn_user
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.stage import Task, TaskFailedError


class TaskQueue:
    """Hands out each task once, heavy ones first; `done` is called with each commit.

    Fallbacks of tasks that failed run after all other tasks: if too many tasks fail, none is given up.
    """

    def __init__(self, tasks: Sequence[Task], done: Callable[[Commit], None]) -> None:
        self._waiting = sorted(tasks, key=lambda task: task.weight)  # the heaviest is last
        self._open = len(tasks)
        self._done = done
        self._errors: dict[str, str] = {}  # by key of the task that failed
        self._failed: list[tuple[Task, str]] = []  # whose fallbacks have not started

    @property
    def exhausted(self) -> bool:
        """Whether all tasks are finished."""
        return not self._open

    def take(self) -> Task | None:
        """A task to run now; None if there is none, or not before one that runs has ended."""
        if not self._waiting and self._open == len(self._failed):
            self._waiting = [task.fallback.task(task, error) for task, error in self._failed if task.fallback]
            self._failed.clear()
        return self._waiting.pop() if self._waiting else None

    def done(self, commit: Commit) -> None:
        """Report that a task that was taken is finished."""
        self._open -= 1
        self._done(commit)

    def failed(self, task: Task, error: TaskFailedError) -> None:
        """Report that a task that was taken failed in every attempt; BuildError if more failed than may."""
        fallback = task.fallback
        assert fallback is not None, f"{task.key} has no fallback"
        self._errors[task.key] = str(error)
        self._failed.append((task, str(error)))
        if len(self._errors) > fallback.limit:
            listed = "".join(f"\n  {self._errors[key]}" for key in sorted(self._errors))
            raise BuildError(
                f"{len(self._errors):,} tasks failed, {fallback.setting} allows {fallback.limit:,}; "
                f"mend or remove their inputs, or raise {fallback.setting}; finished tasks are kept:{listed}"
            ) from error
        warn_user(
            f"{error}; the build goes on without it ({len(self._errors):,} of {fallback.limit:,} that "
            f"{fallback.setting} allows)"
        )
