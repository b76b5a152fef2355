"""Runs the tasks of a build: takes those that are finished, has the engine run the others, keeps the times.

    with Journal(LocalWork(folder)) as journal, LocalEngine(4) as engine:
        [cleaned] = Runner(journal, engine, listener).run(tasks)

`Journal` is the work folder while a build uses it. A finished task is skipped only if the digest of
everything that decides its outputs (config, digests of inputs, code) is the recorded one and each output
exists with its size. So a build may be killed at any time: the same command continues with what was finished,
and what was not leaves no trace. One build at a time uses a local folder (`flock`), unless all of them say
that they share it. A store cannot be locked: there, work is always shared.

`Proofs` compares files that tasks wrote in earlier runs with their commits before anything reads them. A disk
that returns other bytes than were written would otherwise change a dataset in silence. A damaged file is made
again by the task that made it: tasks are pure functions, so nothing that follows from it changes. Only what
is read is compared, once in a build: what tasks that are to run name in their arguments, and what this
process opens. In a work folder in a store each read is checked instead (work_store.py); where several
processes share a folder, only what is published is compared, because each of them would read all of it.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shardkit.errors import BuildError, warn_user
from shardkit.hashing import digest_of
from shardkit.progress import Listener
from shardkit.writers.execution import work_files
from shardkit.writers.execution.engine import Engine
from shardkit.writers.execution.scheduler import (
    Claims,
    Done,
    OwnQueue,
    SharedQueue,
    TaskQueue,
    TaskSlice,
    Waiting,
    take_turn,
)
from shardkit.writers.execution.task import Commit, Task
from shardkit.writers.execution.work import Work, run_task
from shardkit.writers.execution.work_local import LocalWork, locked_folder
from shardkit.writers.execution.work_store import StoreWork
from shardkit.writers.ledger import Count
from shardkit.writers.progress import StageProgress, names_of

__all__ = ["Journal", "Proofs", "Runner"]


class Journal:
    """A work folder, claimed while this is open. With a `slice`, several processes may share a local one."""

    def __init__(self, work: Work | Path, *, slice: TaskSlice | None = None) -> None:
        if isinstance(work, Path):
            work = LocalWork(work)
        assert isinstance(work, LocalWork | StoreWork)
        self.is_shared = slice is not None or isinstance(work, StoreWork)
        self.work: LocalWork | StoreWork = work
        self._slice = slice
        self.claims = Claims(work.sharing)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        session = self.claims.session  # what processes that share a folder are at lies apart
        with contextlib.ExitStack() as stack:
            if isinstance(self.work, StoreWork):
                self.work = self.work.claimed(session)
            else:
                stack.enter_context(locked_folder(self.work, shared=self.is_shared))
                if self.is_shared:
                    self.work = replace(self.work, session=session)
            self.work.prepare()
            if self.is_shared:
                stack.enter_context(self.claims)
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
            return SharedQueue(tasks, done, self.work, self.claims, self._slice, waiting=waiting)
        return OwnQueue(tasks, done)

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


class Runner:
    """`seconds` holds each stage's time from its start to its last task."""

    def __init__(self, journal: Journal, engine: Engine, listener: Listener[StageProgress]) -> None:
        self.journal, self._engine, self._listener = journal, engine, listener
        self.seconds: dict[str, float] = {}
        self.tasks = self.tasks_reused = 0
        self._meters: dict[str, _Meter] = {}
        self._start = 0.0
        self._proofs: Proofs | None = None
        if isinstance(journal.work, LocalWork) and not journal.is_shared:
            self._proofs = Proofs(journal.work, self._run_again)

    def run(self, *groups: Sequence[Task]) -> list[list[Commit]]:
        """Commits of each group, in task order. Groups run side by side; each is one whole stage."""
        self._start = time.perf_counter()
        tasks = [task for group in groups for task in group]
        found = self.journal.find(tasks)
        missing = [task for task, commit in zip(tasks, found, strict=True) if commit is None]
        commits = {commit.folder: commit for commit in found if commit is not None}
        self._meters = {group[0].stage: _Meter(list(group)) for group in groups if group}
        for task, commit in zip(tasks, found, strict=True):
            if commit is not None:
                self._meters[task.stage].reuse(task)
                if self._proofs is not None:
                    self._proofs.add(task, commit)
        for stage in self._meters:
            self._report(stage)

        def done(commit: Commit) -> None:
            commits[commit.folder] = commit
            self._done(commit)

        if missing:
            if self._proofs is not None:
                self._proofs.prove_inputs(missing)
            queue = self.journal.queue(missing, done, self._wait)
            self._engine.run(queue, self.journal.work, self._compiling)
        self.tasks += len(tasks)
        self.tasks_reused += len(tasks) - len(missing)
        work = self.journal.work.folder
        return [[commits[work / task.key] for task in group] for group in groups]

    def guarding(self) -> AbstractContextManager[None]:
        """Meanwhile this process opens no damaged file of an earlier run (proofs.py)."""
        return contextlib.nullcontext() if self._proofs is None else self._proofs.guarding()

    def prove(self, commits: Sequence[Commit]) -> None:
        """All files of these are right, or made again; BuildError, where work is shared, if one is not."""
        if self._proofs is not None:
            self._proofs.prove([commit.folder / name for commit in commits for name in commit.outputs])
        else:
            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(self.journal.forget_damaged, [commit for commit in commits if commit.reused]))

    def _run_again(self, tasks: Sequence[Task]) -> None:
        queue = self.journal.queue(tasks, lambda commit: None)
        self._engine.run(queue, self.journal.work, self._compiling)

    @property
    def is_shared(self) -> bool:
        """Whether other processes may be at the same work."""
        return self.journal.is_shared

    def exclusive(self, step: str, place: str, is_done: Callable[[], bool]) -> AbstractContextManager[bool]:
        """Let one process at a time, of those that share the work, do `step` at `place`.

        Gives whether it is still to be done: at once, or when the others have done it, let go of it or died.
        As all claims, this saves work: what must not happen twice at once needs a lock of its own.
        """
        if not self.is_shared:
            return contextlib.nullcontext(True)
        start = time.perf_counter()

        def wait(holders: Mapping[str, int]) -> None:
            seconds = time.perf_counter() - start
            self._listener(StageProgress(step, 0, 1, 0, 0, 0, seconds, waiting=names_of(holders)))

        return take_turn(self.journal.claims, f"{step}/{digest_of(place)}", is_done, wait)

    def _wait(self, holders: Mapping[str, int]) -> None:
        for stage, meter in self._meters.items():
            meter.waiting = names_of(holders)
            if not meter.progress(stage, 0.0).finished:
                self._report(stage)

    def _done(self, commit: Commit) -> None:
        self._meters[commit.stage].add(commit)
        self._report(commit.stage)

    def _compiling(self, task: Task, seconds: float | None) -> None:
        if task.stage in self._meters:  # not one of an earlier stage that runs again
            self._meters[task.stage].compile(task, seconds)
            self._report(task.stage)

    def _report(self, stage: str) -> None:
        self.seconds[stage] = time.perf_counter() - self._start
        self._listener(self._meters[stage].progress(stage, self.seconds[stage]))


class _Meter:
    """Counts of one stage."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._weights = {task.name: task.weight + 1 for task in tasks}  # tasks without a weight count too
        self._left = sum(self._weights.values())
        self._work = 0
        self._made = self._reused = 0
        self._read = self._kept = Count()
        self._compiling: set[str] = set()
        self._compiled: dict[str, float] = {}
        self._elsewhere = 0
        self.waiting = ""

    def reuse(self, task: Task) -> None:
        self._reused += 1
        self._left -= self._weights[task.name]

    def add(self, commit: Commit) -> None:
        self._made += 1
        self._elsewhere += commit.reused
        self.waiting = ""
        self._left -= self._weights[commit.name]
        self._work += self._weights[commit.name]
        self._compiling.discard(commit.name)
        if "ledger" in commit.counts:
            ledger = commit.ledger()
            self._read += ledger.read
            self._kept += ledger.kept

    def compile(self, task: Task, seconds: float | None) -> None:
        if seconds is None:
            self._compiling.add(task.name)
        else:
            self._compiling.discard(task.name)
            self._compiled[task.name] = self._compiled.get(task.name, 0.0) + seconds

    def progress(self, stage: str, seconds: float) -> StageProgress:
        return StageProgress(
            stage,
            self._made + self._reused,
            len(self._weights),
            self._reused,
            self._read.documents,
            self._read.bytes,
            seconds,
            documents_kept=self._kept.documents if self._read.documents else None,
            seconds_left=seconds * self._left / self._work if self._work and self._left else None,
            compiling=len(self._compiling),
            compile_seconds=max(self._compiled.values(), default=0.0),
            tasks_elsewhere=self._elsewhere,
            waiting=self.waiting,
        )
