"""Runs a stage's tasks: the journal's finished ones are taken, the engine runs the rest; keeps the times."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

from shardkit.hashing import digest_of
from shardkit.progress import Listener
from shardkit.writers.execution.engine import Engine
from shardkit.writers.execution.journal import Journal
from shardkit.writers.execution.proofs import Proofs
from shardkit.writers.execution.task import Commit, Task
from shardkit.writers.execution.work_local import LocalWork
from shardkit.writers.ledger import Count
from shardkit.writers.progress import StageProgress, names_of

__all__ = ["Runner"]

_THREADS = 8


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
        engine.compiling = self._compiling

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
            self._engine.run(self.journal.queue(missing, done, self._wait), self.journal.work)
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
        self._engine.run(self.journal.queue(tasks, lambda commit: None), self.journal.work)

    @property
    def is_shared(self) -> bool:
        """Whether other processes may be at the same work."""
        return self.journal.is_shared

    def take_turn(self, step: str, place: str, is_done: Callable[[], bool]) -> AbstractContextManager[bool]:
        """`Journal.take_turn` for what is done once at a place; tells who is waited for."""
        start = time.perf_counter()

        def wait(holders: Mapping[str, int]) -> None:
            seconds = time.perf_counter() - start
            self._listener(StageProgress(step, 0, 1, 0, 0, 0, seconds, waiting=names_of(holders)))

        return self.journal.take_turn(f"{step}/{digest_of(place)}", is_done, wait)

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
