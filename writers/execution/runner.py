"""Runs the tasks of a build: reuses finished tasks, has the engine run the others, and measures times.

    with Journal(Work.at(folder)) as journal, LocalEngine(4) as engine:
        [cleaned] = Runner(journal, engine, listener).run(tasks)

`Journal` is the work folder while a build uses it. A finished task is skipped only if the digest of
everything that its outputs depend on (its arguments, the code) matches its commit, and each output exists
with its size. So a build may be killed at any time: the same command, run again, reuses the finished tasks,
and unfinished tasks leave no trace. One build at a time uses a work folder: a local one is locked (`flock`),
and in a store the build holds the driver's lease (lease.py).

Nothing outlives its last reader: tasks name the runs of the exchange that they consume (`Task.consumed`), and
such a file is removed as soon as all tasks that consume it are finished, in this build or an earlier one. The
record of the task that wrote it stays, so the task counts as finished.

Silent disk corruption must not change a dataset. So before a task runs, or a dataset is published, the files
of earlier builds that it reads are compared with the hashes in their commits, in a local folder; runs of the
exchange are verified by each read, and so is everything in a store (work.py).

A changed recipe may need removed files again, and files may be damaged or lost. Then `Runner.complete`
forgets the tasks that wrote them and runs the steps again: these tasks have to run, and what they read may be
gone, too. So each pass goes further back, down to tasks whose inputs are there, and then everything that is
needed is made again, and nothing else. These passes remove no file before the last one is done, because a
later pass may need it; so no task is lost twice. Tasks are pure functions, so all bytes are the same.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from shardkit.errors import BuildError, warn_user
from shardkit.progress import Listener
from shardkit.storage.store import StoreError
from shardkit.writers.execution.artifacts import (
    RUN_SUFFIX,
    Artifact,
    DamagedRangeError,
    Files,
    LostFilesError,
    files_in,
    may_be_gone,
)
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.engine import Engine
from shardkit.writers.execution.lease import LEASE_SECONDS, DriverLease
from shardkit.writers.execution.progress import News, Pulse, StageProgress
from shardkit.writers.execution.stage import Task
from shardkit.writers.execution.task_queue import TaskQueue
from shardkit.writers.execution.work import Work, run_task, with_fallbacks
from shardkit.writers.rows.ledger import Count

T = TypeVar("T")


class Journal:
    """An open work folder, which no other build can use until it is closed; a context manager.

    In a store, a driver counts as dead after `lease_seconds` without a heartbeat. With `without_lease`, the
    folder is opened even if another driver may be using it.
    """

    def __init__(
        self,
        work: Work,
        *,
        lease_seconds: float = LEASE_SECONDS,
        without_lease: bool = False,
    ) -> None:
        self.work = work
        self._lease_seconds, self._without_lease = lease_seconds, without_lease
        self._lease: DriverLease | None = None
        self._segments = work.segments()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self.work = self.work.claimed()
        self.work.prepare()
        self._segments = self.work.segments()
        locked = self.work.locked(self._lease_seconds, force=self._without_lease)
        self._lease = self._stack.enter_context(locked)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            if isinstance(error, DamagedRangeError):  # not repaired: the next build makes the file again
                self.work.forget_damaged(error)

    def find(self, tasks: Sequence[Task]) -> list[Commit | None]:
        """Return the commit of each task, or None if it is not finished and has to run."""
        return self.work.find(tasks, self._segments)

    def record(self, commit: Commit) -> None:
        """Add a finished task to the segments; raises BuildError if the lease was lost."""
        if self._lease is not None:
            self._lease.check()
        self._segments.add(commit)
        self._segments.write()

    def end_stages(self, stages: Iterable[str]) -> None:
        """Write the last, incomplete segments of these stages, whose tasks are all finished."""
        self._segments.write(rest=True)
        self._segments.end(stages)

    def run_here(self, task: Task) -> Commit:
        """Return the commit of a task; runs it in this process if it is not finished."""
        [commit] = self.find([task])
        return run_task(task, task.digest, self.work) if commit is None else commit

    def check_lease(self) -> None:
        """Raise BuildError if another driver took over the work folder, such as during a suspension."""
        if self._lease is not None:
            with contextlib.suppress(StoreError):
                self._lease.renew()
            self._lease.check()

    def remove_damaged(self, commit: Commit) -> str | None:
        """Remove a finished task if a file differs from its commit. Return that file's name, or None."""
        name = self.work.damaged_output(commit)
        if name is not None:
            self.work.forget(commit.key)
        return name

    def remove(self) -> None:
        """Remove the whole work folder. The journal keeps its lock until the caller closes it."""
        self.work.remove()


_THREADS = 8
_REMOVED_TOGETHER = 1000  # objects that are removed at a time; a store gets their requests concurrently


class FoundFiles:
    """The files of tasks that were finished before: which are gone, and which were not compared so far."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._tasks: dict[str, Commit] = {}  # tasks of a local folder, or with absent files, by key
        self._right: set[Path] = set()

    def add(self, commit: Commit) -> None:
        """Add a finished task that a build found."""
        if commit.absent or self._work.local is not None:
            self._tasks[commit.key] = commit

    def discard(self, key: str) -> None:
        """Forget a task that has to run again."""
        self._tasks.pop(key, None)

    def has(self, file: Path) -> bool:
        """Return whether a run is there, as far as known."""
        key, name = self._work.place_of(file) or ("", "")
        return key not in self._tasks or name not in self._tasks[key].absent

    def lost(self, files: Iterable[Artifact | Files], *, with_runs: bool = True) -> frozenset[str]:
        """Return the keys of tasks whose `files` are gone, or are damaged, of which it warns.

        Without `with_runs`, runs of the exchange, which their readers verify, are not compared.
        """
        lost, compared = set[str](), dict[Path, Commit]()
        for commit, names in self._read(files):
            if {*names} & {*commit.absent}:
                lost.add(commit.key)
            elif self._work.local is not None:
                compared |= {commit.folder / name: commit for name in names}
        for file in [*compared]:
            if file in self._right or not (with_runs or file.suffix != RUN_SUFFIX):
                del compared[file]
        return frozenset(lost | self._damaged(compared))

    def absent(self, files: Iterable[Artifact | Files]) -> frozenset[str]:
        """Return the keys of tasks whose `files` are gone."""
        return frozenset(one.key for one, names in self._read(files) if {*names} & {*one.absent})

    def _read(self, files: Iterable[Artifact | Files]) -> Iterator[tuple[Commit, list[str]]]:
        """Yield finished tasks with the names of those of their outputs that are among `files`."""
        for path in _paths({*map(_key, files)}) if self._tasks else ():
            yield from self._outputs_at(path)

    def _outputs_at(self, path: Path) -> Iterator[tuple[Commit, list[str]]]:
        """Yield the finished tasks at a path (a file, or a folder of a task or stage), and names of outputs.

        Files that go with their last reader are only read by their own paths, not as a part of a folder.
        """
        if (place := self._work.place_of(path)) is None:
            return
        key, name = place
        if name:
            if (commit := self._tasks.get(key)) is not None:
                yield commit, [name]
            return
        keys = [key] if "/" in key else [one for one in self._tasks if one.startswith(f"{key}/")]
        for commit in filter(None, map(self._tasks.get, keys)):
            yield commit, [name for name in commit.outputs if not may_be_gone(name)]

    def _damaged(self, files: Mapping[Path, Commit]) -> set[str]:
        """Compare files with their hashes; return the keys of tasks with a damaged one."""

        def damaged(path: Path) -> str | None:
            return self._work.damaged_output(files[path], [path.relative_to(files[path].folder).as_posix()])

        found = set[str]()
        with ThreadPoolExecutor(_THREADS) as pool:
            for path, name in zip(files, pool.map(damaged, files), strict=True):
                commit = files[path]
                if name is None:
                    self._right.add(path)
                elif commit.key not in found:
                    found.add(commit.key)
                    _warn_of_damage(path)
        return found


def _key(file: Artifact | Files) -> Path | Files:
    return file if isinstance(file, Files) else file.path


def _paths(keys: Iterable[Path | Files]) -> Iterator[Path]:
    for key in keys:
        if isinstance(key, Files):
            yield from key.paths
        else:
            yield key


def _warn_of_damage(file: Path) -> None:
    warn_user(f"{file.parent}: {file.name} was damaged after it was written; its task runs again")


class Runner:
    """Runs the tasks of stages; `seconds` has the time of each stage from its start to its last task.

    With `retry_failed`, tasks that failed in an earlier build, which ran their fallbacks instead, run again.
    """

    def __init__(
        self,
        journal: Journal,
        engine: Engine,
        listener: Listener[StageProgress],
        *,
        retry_failed: bool = False,
    ) -> None:
        self.journal, self._engine, self._listener = journal, engine, listener
        self._retry_failed = retry_failed
        self.seconds: dict[str, float] = {}
        self.tasks = self.tasks_reused = 0
        self._meters: dict[str, _Meter] = {}
        self._made: Counter[str] = Counter()  # tasks of this build that ran, by stage, also in earlier passes
        self._earlier: Counter[str] = Counter()  # those of earlier passes that this one has not found yet
        self._start = 0.0
        self._files = FoundFiles(journal.work)
        self._compares_runs = False  # whether a task met a damaged run, so that there may be more
        self._readers: Counter[Path | Files] = Counter()  # unfinished tasks that consume a file, or many
        self._consumed: list[Path] = []  # files that no task reads any more
        self._kept: set[Path] | None = None  # such files while steps are repeated, which may need them again

    def run(self, *groups: Sequence[Task]) -> list[list[Commit]]:
        """Run unfinished tasks; return the commits of each group, in task order.

        Groups run concurrently. Each has all tasks of one stage. The files that they consume are removed.
        Raises LostFilesError if files that unfinished tasks read are gone or damaged.
        """
        self._start = time.perf_counter()
        tasks = [task for group in groups for task in group]
        self._meters = {group[0].stage: _Meter(group) for group in groups if group}
        # commits[stage][name] is the task, or its commit as soon as it is finished. A single dict for both
        # saves memory, because there may be a million tasks.
        commits: dict[str, dict[str, Task | Commit]] = {stage: {} for stage in self._meters}
        missing: list[Task] = []
        stage_of = {task.fallback.stage.name: task.stage for task in tasks if task.fallback is not None}
        for task, commit in zip(tasks, self._find(tasks), strict=True):
            commits[task.stage][task.name] = task if commit is None else commit
            if commit is None:
                missing.append(task)
            else:
                self._files.add(commit)
                self.journal.record(commit)
                self._meters[task.stage].reuse(task)
        reused = sum(self._not_of_earlier_passes(stage, meter) for stage, meter in self._meters.items())
        read = (file for task in missing for file in files_in(task.args))
        self._check(self._files.lost(read, with_runs=self._compares_runs))
        self._count_readers(tasks, missing)
        for stage in self._meters:
            self._report(stage)

        def done(commit: Commit) -> None:
            task = commits[stage_of.get(commit.stage, commit.stage)][commit.name]
            assert isinstance(task, Task), f"{task.key} was reported twice"
            # A commit from a worker was unpickled with copies of these objects. Share one to save memory.
            work = self.journal.work
            if commit.stage == task.stage:
                commit = replace(commit, stage=task.stage, name=task.name, digest=task.digest)
            commit = replace(commit, remote=work.remote)
            commits[task.stage][task.name] = commit
            self.journal.record(commit)
            self._meters[task.stage].add(task, commit)
            self._made[task.stage] += 1
            self._report(task.stage)
            self._consume(task)

        if missing:
            self._engine.run(TaskQueue(missing, done), self.journal.work, self._hear)
        self._remove_consumed()
        self.journal.end_stages([*self._meters, *stage_of])
        self._meters = {}
        self.tasks += len(tasks)
        self.tasks_reused += reused
        made = [[commits[task.stage][task.name] for task in group] for group in groups]
        return [[commit for commit in group if isinstance(commit, Commit)] for group in made]

    def _not_of_earlier_passes(self, stage: str, meter: _Meter) -> int:
        """Count found tasks that an earlier pass of this build ran as made; return how many are reused."""
        made = min(meter.reused, self._earlier[stage])
        self._earlier[stage] -= made
        meter.made, meter.reused = meter.made + made, meter.reused - made
        return meter.reused

    def _find(self, tasks: Sequence[Task]) -> Sequence[Commit | None]:
        found = self.journal.find(tasks)
        return found if self._retry_failed else with_fallbacks(self.journal.work, tasks, found)

    def require(self, files: Iterable[Artifact | Files]) -> None:
        """Raise LostFilesError if one of these files, which an earlier build wrote, is gone or damaged."""
        self._check(self._files.lost(files))

    def _check(self, lost: frozenset[str]) -> None:
        if lost:
            raise LostFilesError(lost)

    def complete(self, steps: Callable[[], T]) -> T:
        """Return the result of `steps`, which run tasks; repeat them until no file that they read is lost.

        Raises the error of a file that is lost again after it was made again.
        """
        again = set[str]()
        problem: BuildError
        while True:
            try:
                result = steps()
                self.journal.work.remove_files([*(self._kept or ())])
                self._kept = None
                return result
            except LostFilesError as error:
                keys, problem = error.keys, error
            except DamagedRangeError as error:
                place, problem = self.journal.work.place_of(error.path), error
                keys = frozenset() if place is None else frozenset([place[0]])
                if keys - again:
                    _warn_of_damage(error.path)
                self._compares_runs = True
            if not keys or again & keys:
                raise problem
            again |= keys
            for key in keys:
                self.journal.work.forget(key)
                self._files.discard(key)
            self._kept = set()
            self._earlier = self._made.copy()  # none of them is forgotten: no task is lost twice
            self.tasks = self.tasks_reused = 0

    def _count_readers(self, tasks: Sequence[Task], missing: Sequence[Task]) -> None:
        """Count the unfinished readers of consumed files; those without any were left by a killed build."""
        self._readers = Counter(_key(file) for task in missing for file in task.consumed)
        self._consumed.clear()  # an earlier pass may have ended with an error
        if len(missing) < len(tasks):
            read = {_key(file) for task in tasks for file in task.consumed} - self._readers.keys()
            self._consumed += [path for path in _paths(read) if self._files.has(path)]

    def _consume(self, task: Task) -> None:
        """Remove the files that only this task, which is now finished, still had to read."""
        for file in task.consumed:
            self._readers[_key(file)] -= 1
            if not self._readers[_key(file)]:
                self._consumed += _paths([_key(file)])
        most = _REMOVED_TOGETHER if self.journal.work.local is None else 1
        if len(self._consumed) >= most:
            self._remove_consumed()

    def _remove_consumed(self) -> None:
        if self._kept is None:
            self.journal.work.remove_files(self._consumed)
        else:
            self._kept.update(self._consumed)
        self._consumed.clear()

    @property
    def finished(self) -> int:
        """The number of finished tasks in all stages, including those that are still running."""
        return self.tasks + sum(meter.reused + meter.made for meter in self._meters.values())

    def _hear(self, task: Task, news: News) -> None:
        self._meters[task.stage].hear(task, news)
        self._report(task.stage)

    def _report(self, stage: str) -> None:
        self.seconds[stage] = time.perf_counter() - self._start
        self._listener(self._meters[stage].progress(stage, self.seconds[stage]))


def _weight(task: Task) -> int:
    return task.weight + 1  # a task without a weight counts as 1


class _Meter:
    """Counts the finished tasks and the documents of one stage, for its progress reports."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks, self._step = len(tasks), tasks[0].of.title
        self._left = sum(map(_weight, tasks))
        self._work = 0
        self.reused = self.made = 0
        self._cpu_seconds = 0.0
        self._read = self._kept = Count()
        self._pulses: dict[str, tuple[int, Pulse]] = {}  # weight and last report of running tasks, by name
        self._compiling: set[str] = set()
        self._compiled: dict[str, float] = {}

    def reuse(self, task: Task) -> None:
        self.reused += 1
        self._left -= _weight(task)

    def add(self, task: Task, commit: Commit) -> None:
        self.made += 1
        self._left -= _weight(task)
        self._work += _weight(task)
        self._cpu_seconds += commit.cpu_seconds
        self._compiling.discard(commit.name)
        self._pulses.pop(commit.name, None)
        if commit.has_ledger:
            ledger = commit.ledger()
            self._read += ledger.read
            self._kept += ledger.kept

    def hear(self, task: Task, news: News) -> None:
        if isinstance(news, Pulse):
            self._pulses[task.name] = _weight(task), news
        elif news is None:
            self._compiling.add(task.name)
        else:
            self._compiling.discard(task.name)
            self._compiled[task.name] = self._compiled.get(task.name, 0.0) + news

    def progress(self, stage: str, seconds: float) -> StageProgress:
        pulses = [pulse for _, pulse in self._pulses.values()]
        running = 0.0
        if self._work and (text := self._read.bytes / self._work):  # bytes of text per unit of weight
            parts = [pulse.read.bytes / (weight * text) for weight, pulse in self._pulses.values()]
            running = sum(min(1.0, part) for part in parts)
        compiled = max(self._compiled.values(), default=0.0)
        documents = self._read.documents + sum(pulse.read.documents for pulse in pulses)
        kept = self._kept.documents + sum(pulse.kept.documents for pulse in pulses)
        return StageProgress(
            stage,
            self.made + self.reused,
            self._tasks,
            self.reused,
            documents,
            self._read.bytes + sum(pulse.read.bytes for pulse in pulses),
            seconds,
            documents_kept=kept if documents else None,
            seconds_left=(seconds - compiled) * self._left / self._work
            if self._work and self._left
            else None,
            compiling=len(self._compiling),
            compile_seconds=compiled,
            tasks_running=running,
            step=self._step,
            cpu_seconds=self._cpu_seconds,
        )
