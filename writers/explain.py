"""Explains which tasks a build has to run and why, without running it; removes unused tasks of a work folder.

An explanation runs and writes nothing. `Planner.run` replaces `Runner.run`: it looks up which tasks are
finished and stops (UnknownError) at the first stage with unfinished tasks, because later stages depend on its
results; later stages are listed by name only. The reason why a task has to run comes from a comparison with
the finished task of the same name that differs least: which arguments changed, and whether the code did. Or
another task has to run and reads a file of it, which was removed after it had been read.

A build never removes the records of finished tasks, so a return to an earlier recipe or input file reuses
them. `clean_work` removes tasks of other recipes, of other versions of shardkit, or of input files that no
longer exist.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkit.storage.store import StorageOptions
from shardkit.version import __version__
from shardkit.writers.execution.artifacts import LostFilesError, files_in
from shardkit.writers.execution.code_version import code_version
from shardkit.writers.execution.commit import Commit, Record
from shardkit.writers.execution.runner import FoundFiles, Journal
from shardkit.writers.execution.stage import Task, base_name
from shardkit.writers.execution.work import Work, with_fallbacks
from shardkit.writers.executors import Execution, place_files, work_of
from shardkit.writers.inputs import scan
from shardkit.writers.pipeline import default_work, names_no_files
from shardkit.writers.recipe.recipe import Recipe, load_recipe
from shardkit.writers.stages.given import find_given
from shardkit.writers.stages.graph import run_build, stages_of
from shardkit.writers.stages.inputs import BuildInputs

NEW = "new: no task of this name has run"

LOST = "an output is missing or cut"

_LONGEST = 60  # longer values of arguments are cut to this number of characters


class UnknownError(Exception):
    """The tasks of later stages are not known, because tasks of this stage have to run first."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why `tasks` tasks have to run: `what` changed, with old and new value if known; `example` is a task."""

    what: str
    tasks: int
    example: str


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The tasks of a stage: how many there are, how many are finished, and why the others have to run."""

    stage: str
    tasks: int
    finished: int
    reasons: tuple[Reason, ...]


class Planner:
    """Looks up finished tasks instead of running them.

    `stages` has the stages looked up so far, `keys` the keys of the finished tasks that the build uses.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        self.stages: list[StagePlan] = []
        self.keys: set[str] = set()
        self._again: dict[str, str] = {}  # why finished tasks run again, by key
        self._files = FoundFiles(work)

    def find(self, tasks: Sequence[Task]) -> list[Commit | None]:
        """Return the commit of each finished task, and None for the other tasks."""
        found = with_fallbacks(self.work, tasks, self.work.find(tasks))
        return [None if commit is None or commit.key in self._again else commit for commit in found]

    def complete(self, steps: Callable[[], object]) -> None:
        """Look up the tasks of `steps`, up to the first stage with a task that has to run.

        A finished task also has to run if another one needs files that were removed after they were read.
        """
        while True:
            self.stages.clear()
            try:
                steps()
            except LostFilesError as error:
                self.keys |= error.keys
            else:
                return

    def run_here(self, task: Task) -> Commit:
        """Return the commit of a finished task. Raises UnknownError if the task has to run."""
        [[commit]] = self.run([task])
        return commit

    def run(self, *groups: Sequence[Task]) -> list[list[Commit]]:
        """Return the commits of each group, like `Runner.run`. Raises UnknownError if a task has to run."""
        found = [self.find(group) for group in groups]
        complete = True
        for group, commits in zip(groups, found, strict=True):
            if not group:
                continue
            missing = [task for task, commit in zip(group, commits, strict=True) if commit is None]
            self.keys |= {commit.key for commit in commits if commit is not None}
            reasons = self._reasons(group[0].stage, missing)
            self.stages.append(StagePlan(group[0].stage, len(group), len(group) - len(missing), reasons))
            complete = complete and not missing
            for commit in filter(None, commits):
                self._files.add(commit)
            if lost := self._files.absent(file for task in missing for file in files_in(task.args)):
                why = f"removed after it was read; {group[0].stage} reads it again ({reasons[0].what})"
                self._again |= dict.fromkeys(lost, self._again.get(missing[0].key, why))
                raise LostFilesError(lost)
        if not complete:
            raise UnknownError
        return [[commit for commit in commits if commit is not None] for commits in found]

    def _reasons(self, stage: str, missing: Sequence[Task]) -> tuple[Reason, ...]:
        if not missing:
            return ()
        versions: dict[str, list[Record]] = {}
        for record in self.work.records(stage):
            versions.setdefault(record.commit.name, []).append(record)
        counts: dict[str, int] = {}
        examples: dict[str, str] = {}
        for task in missing:
            again = self._again.get(task.key)
            for what in _why(task, versions.get(task.name, ())) if again is None else [again]:
                counts[what] = counts.get(what, 0) + 1
                examples.setdefault(what, task.name)
        return tuple(Reason(what, count, examples[what]) for what, count in counts.items())


def _why(task: Task, versions: Sequence[Record]) -> list[str]:
    """Describe the differences between a task and the one of its finished `versions` that differs least."""
    if not versions:
        return [NEW]
    return min((differences(task, record) for record in versions), key=len)


def differences(task: Task, record: Record) -> list[str]:
    """Describe, one line each, how a task's arguments and code differ from those in a record."""
    found = [
        f"{key.removesuffix(_CONTENT)}: read from other bytes"
        if key.endswith(_CONTENT)
        else f"{key}: {_short(old)} -> {_short(new)}"
        for key, old, new in _changed(record.args, task.deciding())
    ]
    if record.code != code_version():
        found.append(f"code: made by another version of shardkit (this is {__version__}) or of its libraries")
    return found or [LOST]


_ABSENT = object()

_CONTENT = ".content"  # end of the key of a file or another value that counts by its content (see `plain`)


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    before, after = _flat(old), _flat(new)
    keys = [*before, *(key for key in after if key not in before)]
    pairs = [(key, before.get(key, _ABSENT), after.get(key, _ABSENT)) for key in keys]
    return [(key, old, new) for key, old, new in pairs if old is _ABSENT or new is _ABSENT or old != new]


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    """Flatten nested plain data to {dotted key: value}."""
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
        return "(missing)"
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


@dataclass(frozen=True, slots=True)
class StaleTask:
    """A finished task that this build does not use, as of another recipe or of a removed input file."""

    key: str
    commit: Commit

    @property
    def bytes(self) -> int:
        """Size of the task's outputs that are there, in bytes."""
        return self.commit.held_bytes


@dataclass(frozen=True)
class Explanation:
    """The plan of a build: `stages` whose tasks are known, and the names of `later` stages, whose are not.

    `stale` has finished tasks in the work folder that the known stages do not use, or whose stage the recipe
    does not have.
    """

    work: str
    stages: Sequence[StagePlan]
    later: Sequence[str]
    stale: Sequence[StaleTask]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "work": self.work,
            "stages": [
                {
                    "stage": plan.stage,
                    "tasks": plan.tasks,
                    "finished": plan.finished,
                    "reasons": [
                        {"what": reason.what, "tasks": reason.tasks, "example": reason.example}
                        for reason in plan.reasons
                    ],
                }
                for plan in self.stages
            ],
            "later": list(self.later),
            "stale": [{"task": task.key, "bytes": task.bytes} for task in self.stale],
        }


def explain_build(
    recipe: Recipe | Mapping[str, object] | str | Path,
    *,
    output: str | Path | None = None,
    overrides: Sequence[str] = (),
    storage: StorageOptions | None = None,
) -> Explanation:
    """Explain which tasks `build` with the same arguments would run in its work folder.

    A recipe that names no files is explained for the documents that the last build was given. Raises the
    errors that `build` would raise before it runs tasks.
    """
    is_given = names_no_files(recipe, overrides)
    recipe = load_recipe(recipe, overrides, for_documents=is_given)
    work = work_of(recipe, recipe.resolve(default_work(recipe, output, storage)), storage, Execution())
    return explain_work(recipe, work, storage, is_given=is_given)


def explain_work(
    recipe: Recipe, work: Work, storage: StorageOptions | None, *, is_given: bool = False
) -> Explanation:
    """Explain which tasks a build would run in the work folder `work`.

    `is_given` says that its documents were given in Python, and are those that the last build was given.
    """
    work.prepare()
    planner, later = Planner(work), list[str]()
    files = None
    if is_given:
        files, commits = find_given(work)
        planner.keys |= {commit.key for commit in commits}
    kept = scan.KeptCuts(work.read_note(scan.CUTS_NOTE))
    inputs = BuildInputs.of(recipe, scan.scan_inputs(recipe, storage, kept=kept, given=files), storage)
    try:
        placed = place_files(inputs, planner)
        planner.complete(lambda: run_build(placed, planner.run))
    except UnknownError:
        walked = {stage.stage for stage in planner.stages}
        later = [stage.name for stage in stages_of(recipe) if stage.name not in walked]
    stale = [
        StaleTask(key, commit)
        for key, commit in work.commits()
        if key not in planner.keys and base_name(commit.stage) not in later  # tasks that `later` may use stay
    ]
    return Explanation(work.place, tuple(planner.stages), tuple(later), tuple(stale))


@dataclass(frozen=True)
class CleanReport:
    """The tasks that were removed, or would be without `dry_run`; number and bytes of the tasks that stay."""

    work: str
    removed: Sequence[StaleTask]
    kept: int
    kept_bytes: int
    dry_run: bool

    @property
    def removed_bytes(self) -> int:
        """Size of the outputs of all removed tasks, in bytes."""
        return sum(task.bytes for task in self.removed)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "work": self.work,
            "removed": [task.key for task in self.removed],
            "removed_bytes": self.removed_bytes,
            "kept": self.kept,
            "kept_bytes": self.kept_bytes,
            "dry_run": self.dry_run,
        }


def clean_work(
    recipe: Recipe | Mapping[str, object] | str | Path,
    *,
    output: str | Path | None = None,
    overrides: Sequence[str] = (),
    storage: StorageOptions | None = None,
    everything: bool = False,
    dry_run: bool = False,
    force: bool = False,
) -> CleanReport:
    """Remove finished tasks that this build does not use, or with `everything` the whole work folder.

    Tasks of stages after a stage that has to run are kept, because the build may use them. With `dry_run`,
    nothing is removed. Raises BuildError if a build is using the work folder; with `force`, the lease of that
    build's driver in a store is ignored.
    """
    is_given = names_no_files(recipe, overrides)
    recipe = load_recipe(recipe, overrides, for_documents=is_given)
    work = work_of(recipe, recipe.resolve(default_work(recipe, output, storage)), storage, Execution())
    if work.is_empty():
        return CleanReport(work.place, (), 0, 0, dry_run)
    with Journal(work, without_lease=force) as journal:
        found = {key: StaleTask(key, commit) for key, commit in journal.work.commits()}
        removed = tuple(found.values())
        if not everything:
            removed = tuple(explain_work(recipe, journal.work, storage, is_given=is_given).stale)
        if not dry_run and everything:
            journal.remove()
        elif not dry_run:
            for task in removed:
                journal.work.forget(task.commit.key)
    kept = [found[key] for key in sorted(found.keys() - {task.key for task in removed})]
    return CleanReport(work.place, removed, len(kept), sum(task.bytes for task in kept), dry_run)
