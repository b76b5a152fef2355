"""Files that tasks wrote in earlier runs are compared with their commits before anything reads them.

A disk that gives other bytes than were written would otherwise change a dataset in silence. What is damaged
is made again, by the task that made it: tasks are pure functions, so nothing that follows from it changes.

Only what is read is compared, once in a build: what tasks that are to run name in their arguments, and what
this process opens. In a work folder in a store every read is checked instead (`checked_ranges.py`); where
several processes share a folder, only what is published is compared, since each would read all of it.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardkit.errors import warn_user
from shardkit.writers.execution import work_files
from shardkit.writers.execution.task import Commit, Task
from shardkit.writers.execution.work_local import LocalWork

__all__ = ["Proofs"]

_THREADS = 8


@dataclass(slots=True)
class _Found:
    """A finished task that an earlier run left, and its files that were not compared yet."""

    task: Task
    commit: Commit
    unproved: set[str]


class Proofs:
    """What is known of a local work folder that this build has for itself. `run_again` runs tasks."""

    def __init__(self, work: LocalWork, run_again: Callable[[Sequence[Task]], None]) -> None:
        self._work, self._run_again = work, run_again
        self._found: dict[Path, _Found] = {}
        self._lock = threading.RLock()

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Meanwhile this process opens no file that was not compared."""
        with work_files.heeded(self._work.folder, lambda path: self.prove([path])):
            yield

    def add(self, task: Task, commit: Commit) -> None:
        """A task that was finished when this build came to it."""
        with self._lock:
            self._found.setdefault(commit.folder, _Found(task, commit, set(commit.outputs)))

    def prove_inputs(self, tasks: Iterable[Task]) -> None:
        """What these tasks read is right from here on."""
        paths = set[Path]()
        for task in tasks:
            paths |= _paths_in(task.args)
        self.prove(paths)

    def prove(self, paths: Iterable[Path]) -> None:
        """These files, and all of these folders of tasks, are right from here on."""
        with self._lock:
            wanted: dict[Path, set[str]] = {}
            for path in paths:
                for folder in (path, *path.parents[:2]):
                    found = self._found.get(folder)
                    if found is not None and found.unproved:
                        names = found.unproved if folder == path else {path.relative_to(folder).as_posix()}
                        wanted.setdefault(folder, set()).update(names & found.unproved)
            if any(wanted.values()):
                self._compare(wanted)

    def _compare(self, wanted: dict[Path, set[str]]) -> None:
        # In the order in which they were found: what a task reads was found before it.
        some = [(found, wanted[folder]) for folder, found in self._found.items() if wanted.get(folder)]

        def damaged(item: tuple[_Found, set[str]]) -> str | None:
            found, names = item
            outputs = {name: found.commit.outputs[name] for name in sorted(names)}
            return self._work.damaged_output(replace(found.commit, outputs=outputs))

        with ThreadPoolExecutor(_THREADS) as pool:
            results = list(pool.map(damaged, some))
        for (found, names), name in zip(some, results, strict=True):
            if name is None:
                found.unproved -= names
                continue
            warn_user(f"{found.commit.folder}: {name} was damaged after it was written; its task runs again")
            found.unproved.clear()  # all of them will be new
            self._work.forget(found.commit)
            self.prove_inputs([found.task])
            self._run_again([found.task])


class _PathFinder(pickle.Pickler):
    """Meets every object that is sent with a task."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.found: set[Path] = set()

    def persistent_id(self, item: Any) -> None:
        if isinstance(item, Path):
            self.found.add(item)


def _paths_in(arguments: tuple[Any, ...]) -> set[Path]:
    finder = _PathFinder()
    finder.dump(arguments)
    return finder.found
