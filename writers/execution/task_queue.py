"""The queue of unfinished tasks: an engine takes tasks from it, and reports each as finished or failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardkit.errors import BuildError, warn_user
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.stage import Task, TaskFailedError


class TaskQueue:
    """Returns each task once from `take`, heavy tasks first, and calls `done` with each commit.

    Fallbacks of failed tasks run after all other tasks, so that no fallback runs if too many tasks fail.
    """

    def __init__(self, tasks: Sequence[Task], done: Callable[[Commit], None]) -> None:
        self._waiting = sorted(tasks, key=lambda task: task.weight)  # the heaviest is last
        self._open = len(tasks)
        self._done = done
        self._errors: dict[str, str] = {}  # error messages by key of the failed task
        self._failed: list[tuple[Task, str]] = []  # failed tasks, with errors, whose fallbacks must still run

    @property
    def exhausted(self) -> bool:
        """Whether all tasks are finished, including fallbacks of failed tasks."""
        return not self._open

    def take(self) -> Task | None:
        """Return a task to run now; None if there is none, or fallbacks must wait for running tasks."""
        if not self._waiting and self._open == len(self._failed):
            self._waiting = [task.fallback.task(task, error) for task, error in self._failed if task.fallback]
            self._failed.clear()
        return self._waiting.pop() if self._waiting else None

    def done(self, commit: Commit) -> None:
        """Record that a task is finished, and pass its commit on."""
        self._open -= 1
        self._done(commit)

    def failed(self, task: Task, error: TaskFailedError) -> None:
        """Record that a task failed in every attempt; raises BuildError if more tasks failed than allowed."""
        fallback = task.fallback
        assert fallback is not None, f"{task.key} has no fallback"
        self._errors[task.key] = str(error)
        self._failed.append((task, str(error)))
        if len(self._errors) > fallback.limit:
            listed = "".join(f"\n  {self._errors[key]}" for key in sorted(self._errors))
            raise BuildError(
                f"{len(self._errors):,} tasks failed, but {fallback.setting} allows {fallback.limit:,}; "
                f"fix or remove their inputs, or raise {fallback.setting}; finished tasks are kept:{listed}"
            ) from error
        warn_user(
            f"{error}; the build continues without it ({len(self._errors):,} of {fallback.limit:,} "
            f"failures that {fallback.setting} allows)"
        )
