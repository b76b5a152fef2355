"""Runs a stage's tasks: the journal's finished ones are taken, the engine runs the rest; keeps the times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardkit.writers.engine_local import Engine
from shardkit.writers.journal import Commit, Journal, Task
from shardkit.writers.ledger import Count
from shardkit.writers.progress import Listener, StageProgress

__all__ = ["Runner"]


class Runner:
    """`seconds` holds each stage's time from its start to its last task."""

    def __init__(self, journal: Journal, engine: Engine, listener: Listener) -> None:
        self.journal, self._engine, self._listener = journal, engine, listener
        self.seconds: dict[str, float] = {}
        self.tasks = self.tasks_reused = 0

    def run(self, *groups: Sequence[Task]) -> list[list[Commit]]:
        """Commits of each group, in task order. Groups run side by side; each is one whole stage."""
        start = time.perf_counter()
        tasks = [task for group in groups for task in group]
        commits = [self.journal.find(task) for task in tasks]
        missing = [number for number, commit in enumerate(commits) if commit is None]
        meters = {group[0].stage: _Meter(len(group)) for group in groups if group}
        for stage in meters:
            self.journal.sweep(stage, [task.name for task in tasks if task.stage == stage])
        for commit in commits:
            if commit is not None:
                meters[commit.stage].reused += 1

        def report(stage: str) -> None:
            self.seconds[stage] = time.perf_counter() - start
            self._listener(meters[stage].progress(stage, self.seconds[stage]))

        def done(commit: Commit) -> None:
            meters[commit.stage].add(commit)
            report(commit.stage)

        for stage in meters:
            report(stage)
        made = (
            self._engine.run([tasks[number] for number in missing], self.journal.work, done)
            if missing
            else []
        )
        for number, commit in zip(missing, made, strict=True):
            commits[number] = commit
        self.tasks += len(tasks)
        self.tasks_reused += len(tasks) - len(missing)
        results = iter([commit for commit in commits if commit is not None])
        return [[next(results) for _ in group] for group in groups]


@dataclass(slots=True)
class _Meter:
    tasks: int
    reused: int = 0
    made: int = 0
    read: Count = field(default_factory=Count)

    def add(self, commit: Commit) -> None:
        self.made += 1
        if "ledger" in commit.counts:
            self.read += commit.ledger().read

    def progress(self, stage: str, seconds: float) -> StageProgress:
        done = self.made + self.reused
        return StageProgress(
            stage, done, self.tasks, self.reused, self.read.documents, self.read.bytes, seconds
        )
