"""Runs the tasks of a build: reuses finished tasks, has the engine run the others, and measures times.

    with Journal(Work.at(folder)) as journal, LocalEngine(4) as engine:
        [cleaned] = Runner(journal, engine, listener).run(tasks)

`Journal` is the work folder while a build uses it. A finished task is skipped only if the digest of
everything that its outputs depend on (its arguments, the code) matches its commit, and each output exists
with its size. So a build may be killed at any time: the same command, run again, reuses the finished tasks,
and unfinished tasks leave no trace. One build at a time uses a work folder: a local one is locked (`flock`),
and in a store the build holds the driver's lease (lease.py).

Silent disk corruption must not change a dataset. So when `Runner` finds a finished task of an earlier run in
a local folder, it compares the task's files with the hashes in its commit before anything reads them: once
per build, at the speed of the disk. A task with a damaged file runs again; tasks are pure functions, so its
outputs, and all later outputs, are the same. In a store, each read is checked instead (work.py), and so are
files of the exchange, which are most of a large work folder: when a task meets a damaged one, the build
starts again with the files of all finished tasks compared (`Runner.repair`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Self

from shardkit.errors import warn_user
from shardkit.progress import Listener
from shardkit.storage.store import StoreError
from shardkit.writers.execution.artifacts import DamagedRangeError
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.engine import Engine
from shardkit.writers.execution.lease import LEASE_SECONDS, DriverLease
from shardkit.writers.execution.progress import News, Pulse, StageProgress
from shardkit.writers.execution.stage import Task
from shardkit.writers.execution.task_queue import TaskQueue
from shardkit.writers.execution.work import Work, run_task, with_fallbacks
from shardkit.writers.rows.ledger import Count


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

    def remove_damaged(self, commit: Commit, *, runs: bool = True) -> str | None:
        """Remove a finished task if a file differs from its commit. Return that file's name, or None.

        `runs`: also compare files of the exchange.
        """
        name = self.work.damaged_output(commit, runs=runs)
        if name is not None:
            self.work.forget(commit.key)
        return name

    def remove(self) -> None:
        """Remove the whole work folder. The journal keeps its lock until the caller closes it."""
        self.work.remove()


_THREADS = 8


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
        self._start = 0.0
        self._checks_files = journal.work.local is not None
        self._checks_runs = False

    def run(self, *groups: Sequence[Task]) -> list[list[Commit]]:
        """Run unfinished tasks; return the commits of each group, in task order.

        Groups run concurrently. Each has all tasks of one stage.
        """
        self._start = time.perf_counter()
        tasks = [task for group in groups for task in group]
        self._meters = {group[0].stage: _Meter(group) for group in groups if group}
        # commits[stage][name] is the task, or its commit as soon as it is finished. A single dict for both
        # saves memory, because there may be a million tasks.
        commits: dict[str, dict[str, Task | Commit]] = {stage: {} for stage in self._meters}
        missing: list[Task] = []
        stage_of = {task.fallback.stage.name: task.stage for task in tasks if task.fallback is not None}
        for task, commit in zip(tasks, self._intact(self._find(tasks)), strict=True):
            commits[task.stage][task.name] = task if commit is None else commit
            if commit is None:
                missing.append(task)
            else:
                self.journal.record(commit)
                self._meters[task.stage].reuse(task)
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
            self._report(task.stage)

        if missing:
            self._engine.run(TaskQueue(missing, done), self.journal.work, self._hear)
        self.journal.end_stages([*self._meters, *stage_of])
        self._meters = {}
        self.tasks += len(tasks)
        self.tasks_reused += len(tasks) - len(missing)
        made = [[commits[task.stage][task.name] for task in group] for group in groups]
        return [[commit for commit in group if isinstance(commit, Commit)] for group in made]

    def _find(self, tasks: Sequence[Task]) -> Sequence[Commit | None]:
        found = self.journal.find(tasks)
        return found if self._retry_failed else with_fallbacks(self.journal.work, tasks, found)

    def _intact(self, found: Sequence[Commit | None]) -> Iterator[Commit | None]:
        """Yield the commits in order. If a file is damaged, remove its task and yield None instead."""
        if not self._checks_files:
            yield from found
            return

        def damaged(commit: Commit | None) -> str | None:
            return None if commit is None else self.journal.remove_damaged(commit, runs=self._checks_runs)

        with ThreadPoolExecutor(_THREADS) as pool:
            for commit, name in zip(found, pool.map(damaged, found), strict=True):
                if commit is not None and name is not None:
                    warn_user(
                        f"{commit.folder}: {name} was damaged after it was written; its task runs again"
                    )
                    yield None
                else:
                    yield commit

    def repair(self, error: DamagedRangeError) -> None:
        """Make damaged files of the exchange anew when the same tasks run again. Raises a second `error`."""
        if self._checks_runs:
            raise error
        self._checks_runs = True
        self.tasks = self.tasks_reused = 0

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
            seconds_left=seconds * self._left / self._work if self._work and self._left else None,
            compiling=len(self._compiling),
            compile_seconds=max(self._compiled.values(), default=0.0),
            tasks_running=running,
            step=self._step,
        )
