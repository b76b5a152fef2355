"""Runs the tasks of a build: reuses finished ones, has the engine run the others, and measures times.

    with Journal(LocalWork(folder)) as journal, LocalEngine(4) as engine:
        [cleaned] = Runner(journal, engine, listener).run(tasks)

`Journal` is the work folder while a build uses it. A finished task is skipped only if the digest of
everything that decides its outputs (config, digests of inputs, code) matches its commit and each output
exists with its size. So a build may be killed at any time: the same command continues with the finished
tasks, and unfinished ones leave no trace. One build at a time uses a work folder: a local one is locked
(`flock`), and in a store the build holds the driver's lease (scheduler.py). Slices of a build share a folder.

Silent disk corruption must not change a dataset. So when `Runner` finds a finished task of an earlier run in
a local folder, it compares the task's files with the hashes in its commit before anything reads them: once in
a build, at the speed of the disk. A task with a damaged file runs again; tasks are pure functions, so its
outputs, and all that follows from them, are the same. In a store, each read is checked instead
(work_store.py); where several processes share a folder, only the published files are compared, because each
of the processes would read everything.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from shardkit.errors import BuildError, warn_user
from shardkit.progress import Listener
from shardkit.storage.store import StoreError
from shardkit.writers.execution.engine import Engine
from shardkit.writers.execution.scheduler import (
    DEFAULT_TIMES,
    Done,
    DriverLease,
    OwnQueue,
    SharingTimes,
    SliceQueue,
    TaskQueue,
    TaskSlice,
    process_name,
)
from shardkit.writers.execution.segments import Segments
from shardkit.writers.execution.task import Commit, Task
from shardkit.writers.execution.work import Work, run_task, with_fallbacks
from shardkit.writers.execution.work_local import LocalWork, locked_folder
from shardkit.writers.execution.work_store import StoreWork
from shardkit.writers.ledger import Count, Ledger
from shardkit.writers.progress import News, Pulse, StageProgress

__all__ = ["Journal", "Runner"]


class Journal:
    """An open work folder. With a `slice`, several processes share it; otherwise it is used alone.

    `without_lease` opens a folder in a store that another driver may be using.
    """

    def __init__(
        self,
        work: Work | Path,
        *,
        slice: TaskSlice | None = None,
        times: SharingTimes = DEFAULT_TIMES,
        without_lease: bool = False,
    ) -> None:
        if isinstance(work, Path):
            work = LocalWork(work)
        assert isinstance(work, LocalWork | StoreWork)
        self.is_shared = slice is not None
        self.work: LocalWork | StoreWork = work
        self._slice, self._without_lease = slice, without_lease
        self._absent: set[int] = set()
        self._segments: Segments | None = None
        name = process_name()  # also keeps temporary files of processes that share a folder apart
        self.lease = DriverLease(work.lease_store, name=name, times=times)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            if isinstance(self.work, StoreWork):
                self.work = self.work.claimed(self.lease.name)
                self._segments = self.work.segments()
            else:
                stack.enter_context(locked_folder(self.work, shared=self.is_shared))
                if self.is_shared:
                    self.work = replace(self.work, session=self.lease.name)
            self.work.prepare()
            stack.enter_context(self.lease)
            if self._slice is not None and self._slice.index == 0:
                with contextlib.suppress(StoreError):  # otherwise the first slice without tasks takes it
                    self.lease.try_acquire()
            elif self._slice is None and isinstance(self.work, StoreWork) and not self._without_lease:
                self.lease.acquire()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def find(self, tasks: Sequence[Task]) -> list[Commit | None]:
        """Commits of finished tasks; None for tasks that have to run.

        In a store, a slice that is not the driver reads records of its own tasks only, and segments.
        """
        if not isinstance(self.work, StoreWork) or self._segments is None:
            return self.work.find(tasks)
        if self._slice is None or self.lease.held:
            return self.work.find(tasks, self._segments)
        wanted = {task.key: task.digest for task in tasks}
        found = {}
        for stage in sorted({task.stage for task in tasks}):
            for commit in self._segments.read(stage, again=True):
                if wanted.get(commit.key) == commit.digest:
                    found[commit.key] = commit
        own = [task for task in tasks if task.key not in found and self._slice.owns(task)]
        for task, made in zip(own, self.work.finished(own), strict=True):
            if made is not None:
                found[task.key] = made
        return [found.get(task.key) for task in tasks]

    def record(self, commit: Commit) -> None:
        """Note a finished task; the driver writes segments of them in a store. BuildError."""
        if self._slice is None:
            self.lease.check()
        if self._segments is not None:
            self._segments.add(commit)
            if self.lease.held:
                self._segments.write()

    def end_stages(self, stages: Iterable[str]) -> None:
        """All tasks of these stages are finished."""
        if self._segments is not None:
            if self.lease.held:
                self._segments.write(rest=True)
            self._segments.end(stages)

    def run_here(self, task: Task) -> Commit:
        """The commit of a task; runs it in this process if it is not finished."""
        [commit] = self.find([task])
        return run_task(task, task.digest, self.work) if commit is None else commit

    def queue(
        self, tasks: Sequence[Task], done: Done, waiting: Callable[[str], None] = lambda text: None
    ) -> TaskQueue:
        """A queue of tasks to run; `done` is called with each commit, made here or elsewhere.

        `waiting` is called with what this process waits for, while other slices run the rest.
        """
        if self._slice is not None:
            shared = (self.work, self._segments, self.lease, self._slice, self._absent)
            return SliceQueue(tasks, done, *shared, waiting=waiting)
        return OwnQueue(tasks, done)

    def await_turn(self, is_done: Callable[[], bool], waiting: Callable[[], None]) -> bool:
        """Whether this process is the one to do a step of the driver; of slices one is, as long as it lives.

        The others wait until `is_done`, and take over if the driver is gone.
        """
        times, pause = self.lease.times, self.lease.times.poll_seconds
        while self._slice is not None:
            with contextlib.suppress(StoreError):
                if self.lease.try_acquire():
                    break
            if is_done():
                return False
            waiting()
            time.sleep(pause)
            pause = min(2 * pause, times.longest_poll_seconds)
        if self._slice is None:
            if self.lease.held:  # this process may have been suspended, and not have noticed yet
                with contextlib.suppress(StoreError):
                    self.lease.renew()
            self.lease.check()
        return not is_done()

    def forget_damaged(self, commit: Commit) -> None:
        """Remove a finished task and raise BuildError if its files differ from its commit.

        Files in a store are compared whenever they are read.
        """
        name = None if isinstance(self.work, StoreWork) else self.remove_damaged(commit)
        if name is not None:
            raise BuildError(
                f"{commit.folder}: {name} was damaged after it was written; the task is removed, run the "
                f"build again"
            )

    def remove_damaged(self, commit: Commit) -> str | None:
        """Remove a finished task whose files differ from its commit; the name of the first one, or None."""
        name = self.work.damaged_output(commit)
        if name is not None:
            self.work.forget(commit)
        return name

    def remove(self) -> None:
        """Remove the whole work folder; the journal stays locked, and must be closed next."""
        self.work.remove()


_THREADS = 8


class Runner:
    """`seconds` holds each stage's time from its start to its last task.

    With `retry_failed`, tasks in whose place an earlier build ran their fallbacks run again.
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
        self._checks_files = isinstance(journal.work, LocalWork) and not journal.is_shared

    def run(self, *groups: Sequence[Task]) -> list[list[Commit]]:
        """Commits of each group, in task order. Groups run concurrently; each is a whole stage."""
        self._start = time.perf_counter()
        tasks = [task for group in groups for task in group]
        self._meters = {group[0].stage: _Meter(group) for group in groups if group}
        # Of each stage by name: the task, until its commit is there. One dict, as tasks may be a million.
        commits: dict[str, dict[str, Task | Commit]] = {stage: {} for stage in self._meters}
        missing: list[Task] = []
        stage_of = {task.fallback.stage: task.stage for task in tasks if task.fallback is not None}
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
            # A million commits share what they can: these objects came by themselves with each of them.
            work = self.journal.work
            if commit.stage == task.stage:
                commit = replace(commit, stage=task.stage, name=task.name, digest=task.digest)
            commit = replace(commit, remote=work.remote)
            commits[task.stage][task.name] = commit
            self.journal.record(commit)
            self._meters[task.stage].add(task, commit)
            self._report(task.stage)

        if missing:
            queue = self.journal.queue(missing, done, self._wait)
            self._engine.run(queue, self.journal.work, self._hear)
        self.journal.end_stages([*self._meters, *stage_of])
        self.tasks += len(tasks)
        self.tasks_reused += len(tasks) - len(missing)
        made = [[commits[task.stage][task.name] for task in group] for group in groups]
        return [[commit for commit in group if isinstance(commit, Commit)] for group in made]

    def _find(self, tasks: Sequence[Task]) -> Sequence[Commit | None]:
        found = self.journal.find(tasks)
        return found if self._retry_failed else with_fallbacks(self.journal.work, tasks, found)

    def _intact(self, found: Sequence[Commit | None]) -> Iterator[Commit | None]:
        """The commits in order; None for tasks with a damaged file, which are removed."""
        if not self._checks_files:
            yield from found
            return

        def damaged(commit: Commit | None) -> str | None:
            return None if commit is None else self.journal.remove_damaged(commit)

        with ThreadPoolExecutor(_THREADS) as pool:
            for commit, name in zip(found, pool.map(damaged, found), strict=True):
                if commit is not None and name is not None:
                    warn_user(
                        f"{commit.folder}: {name} was damaged after it was written; its task runs again"
                    )
                    yield None
                else:
                    yield commit

    def check_shared(self, commits: Sequence[Commit]) -> None:
        """BuildError if work is shared and a file that an earlier run or another process made is damaged."""
        if not self._checks_files:
            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(self.journal.forget_damaged, [commit for commit in commits if commit.reused]))

    @property
    def is_shared(self) -> bool:
        """Whether other processes may be at the same work."""
        return self.journal.is_shared

    @property
    def work_is_remote(self) -> bool:
        """Whether the work folder is in a store, where tasks on any machine reach it."""
        return isinstance(self.journal.work, StoreWork)

    def await_turn(self, step: str, is_done: Callable[[], bool]) -> bool:
        """Whether `step` is this process's to do. Of slices the driver does it, and the others wait.

        A step that must never run twice at once still needs a lock: a driver may be suspended in it.
        """
        start = time.perf_counter()

        def wait() -> None:
            seconds = time.perf_counter() - start
            self._listener(StageProgress(step, 0, 1, 0, 0, 0, seconds, waiting=self.journal.lease.holder()))

        return self.journal.await_turn(is_done, wait)

    def _wait(self, what: str) -> None:
        for stage, meter in self._meters.items():
            meter.waiting = what
            if not meter.progress(stage, 0.0).finished:
                self._report(stage)

    def _hear(self, task: Task, news: News) -> None:
        self._meters[task.stage].hear(task, news)
        self._report(task.stage)

    def _report(self, stage: str) -> None:
        self.seconds[stage] = time.perf_counter() - self._start
        self._listener(self._meters[stage].progress(stage, self.seconds[stage]))


def _weight(task: Task) -> int:
    return task.weight + 1  # so that tasks without a weight count


class _Meter:
    """Progress counts of one stage."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = len(tasks)
        self._left = sum(map(_weight, tasks))
        self._work = 0
        self.reused = self._made = 0
        self._read = self._kept = Count()
        self._pulses: dict[str, tuple[int, Pulse]] = {}  # of tasks that run, with their weights
        self._compiling: set[str] = set()
        self._compiled: dict[str, float] = {}
        self._elsewhere = 0
        self.waiting = ""

    def reuse(self, task: Task) -> None:
        self.reused += 1
        self._left -= _weight(task)

    def add(self, task: Task, commit: Commit) -> None:
        self._made += 1
        self._elsewhere += commit.reused
        self.waiting = ""
        self._left -= _weight(task)
        self._work += _weight(task)
        self._compiling.discard(commit.name)
        self._pulses.pop(commit.name, None)
        if "ledger" in (counts := commit.counts):
            ledger = Ledger.from_dict(counts["ledger"])
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
        if self._work and (text := self._read.bytes / self._work):  # text of a unit of weight
            parts = [pulse.read.bytes / (weight * text) for weight, pulse in self._pulses.values()]
            running = sum(min(1.0, part) for part in parts)
        documents = self._read.documents + sum(pulse.read.documents for pulse in pulses)
        kept = self._kept.documents + sum(pulse.kept.documents for pulse in pulses)
        return StageProgress(
            stage,
            self._made + self.reused,
            self._tasks,
            self.reused,
            documents,
            self._read.bytes + sum(pulse.read.bytes for pulse in pulses),
            seconds,
            documents_kept=kept if documents else None,
            seconds_left=seconds * self._left / self._work if self._work and self._left else None,
            compiling=len(self._compiling),
            compile_seconds=max(self._compiled.values(), default=0.0),
            tasks_elsewhere=self._elsewhere,
            waiting=self.waiting,
            tasks_running=running,
        )
