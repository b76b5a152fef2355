"""What a build has to do, and why, without doing it.

`Planner.run` stands in for `Runner.run`: it looks up which tasks are finished and ends (UnknownError) at the
first stage that has to do something, as what later stages do depends on what that gives. Why a task has to
run is told by the finished one of its name that differs least: what of config, inputs and code is another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import shardkit
from shardkit.writers.execution.task import Commit, Task, code_version
from shardkit.writers.execution.work import Work

__all__ = ["Planner", "Reason", "StagePlan", "UnknownError", "differences"]

NEW = "new: no task of this name has run"
LOST = "an output is missing or cut"
_LONGEST = 60  # characters of a value


class UnknownError(Exception):
    """What comes next depends on tasks that have to run first."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why tasks have to run: what changed, from what to what where that can be told, and one of them."""

    what: str
    tasks: int
    example: str


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A stage: how many tasks it has, how many are finished, and why the others have to run."""

    stage: str
    tasks: int
    finished: int
    reasons: tuple[Reason, ...]


class Planner:
    """`stages` holds what was looked up, `keys` the finished tasks that the plan uses."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.stages: list[StagePlan] = []
        self.keys: set[str] = set()

    def find(self, tasks: Sequence[Task]) -> list[Commit | None]:
        """The finished ones."""
        return self.work.find(tasks)

    def run_here(self, task: Task) -> Commit:
        """The commit of a task; UnknownError if it has to be made."""
        [[commit]] = self.run([task])
        return commit

    def run(self, *groups: Sequence[Task]) -> list[list[Commit]]:
        """Commits of each group; UnknownError if one of them has to be made."""
        found = [self.find(group) for group in groups]
        complete = True
        for group, commits in zip(groups, found, strict=True):
            if not group:
                continue
            missing = [task for task, commit in zip(group, commits, strict=True) if commit is None]
            self.keys |= {task.key for task, commit in zip(group, commits, strict=True) if commit}
            reasons = self._reasons(group[0].stage, missing)
            self.stages.append(StagePlan(group[0].stage, len(group), len(group) - len(missing), reasons))
            complete = complete and not missing
        if not complete:
            raise UnknownError
        return [[commit for commit in commits if commit is not None] for commits in found]

    def _reasons(self, stage: str, missing: Sequence[Task]) -> tuple[Reason, ...]:
        if not missing:
            return ()
        versions: dict[str, list[Commit]] = {}
        for _, commit in self.work.commits(stage):
            versions.setdefault(commit.name, []).append(commit)
        counts: dict[str, int] = {}
        examples: dict[str, str] = {}
        for task in missing:
            for what in _why(task, versions.get(task.name, ())):
                counts[what] = counts.get(what, 0) + 1
                examples.setdefault(what, task.name)
        return tuple(Reason(what, count, examples[what]) for what, count in counts.items())


def _why(task: Task, versions: Sequence[Commit]) -> list[str]:
    """What is another than in the finished task of this name that differs least."""
    if not versions:
        return [NEW]
    return min((differences(task, commit) for commit in versions), key=len)


def differences(task: Task, commit: Commit) -> list[str]:
    """What of the task's config, inputs and code is another than the commit's: a line each."""
    found = [
        f"{key}: {_short(old)} -> {_short(new)}" for key, old, new in _changed(commit.config, task.config)
    ]
    for key in sorted({*commit.inputs, *task.inputs}):
        if commit.inputs.get(key) != task.inputs.get(key):
            found.append(f"{key}: read from other bytes")
    if commit.code != code_version():
        found.append(f"code: not made by this version of shardkit ({shardkit.__version__}) and its libraries")
    return found or [LOST]


_ABSENT = object()


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    before, after = _flat(old), _flat(new)
    keys = [*before, *(key for key in after if key not in before)]
    pairs = [(key, before.get(key, _ABSENT), after.get(key, _ABSENT)) for key in keys]
    return [(key, old, new) for key, old, new in pairs if old is _ABSENT or new is _ABSENT or old != new]


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    """{dotted key: value} of nested plain data."""
    if isinstance(value, Mapping) and value:
        parts = [(f"{key}.{name}".lstrip("."), item) for name, item in value.items()]
    elif isinstance(value, list | tuple) and value:
        if len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], Mapping):
            parts = [(f"{key}.{value[0]}", dict(value[1]))]  # a filter and its settings
        else:
            parts = [(f"{key}[{number}]", item) for number, item in enumerate(value)]
    else:
        return {key: list(value) if isinstance(value, tuple) else value}
    return {name: leaf for part, item in parts for name, leaf in _flat(item, part).items()}


def _short(value: Any) -> str:
    if value is _ABSENT:
        return "(not there)"
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
