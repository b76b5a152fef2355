"""`explain_build`: which tasks of a build are finished, which have to run, and why; and what is stale.

Nothing is run or written. Stages are walked in order; at the first one that has to do something the rest is
named with what it waits for, because whether it has to run depends on what its inputs turn out to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkit.storage.store import StorageOptions
from shardkit.writers import stages
from shardkit.writers.execution.planner import Planner, StagePlan, UnknownError
from shardkit.writers.execution.task import Commit
from shardkit.writers.execution.work import Work
from shardkit.writers.inputs import scan
from shardkit.writers.machine_files import place_files
from shardkit.writers.making import Plan, make_parts
from shardkit.writers.places import default_work, destination_of
from shardkit.writers.preparation import open_indexes, with_overrides
from shardkit.writers.recipe import Recipe
from shardkit.writers.session import Execution, work_of
from shardkit.writers.tokenizer import tokenizer_digest

__all__ = ["Explanation", "StaleTask", "explain_build", "explain_work", "open_plan"]


@dataclass(frozen=True, slots=True)
class StaleTask:
    """A finished task that this build does not use: of another recipe, or of a file that was removed."""

    key: str
    commit: Commit

    @property
    def bytes(self) -> int:
        """Size of its outputs."""
        return self.commit.bytes


@dataclass(frozen=True)
class Explanation:
    """`stages` were looked up; `later` come after one that has to run, so only their names are known.

    `stale` are finished tasks of the work folder that the looked-up stages do not use, and those of stages
    that the recipe does not have.
    """

    work: str
    stages: Sequence[StagePlan]
    later: Sequence[str]
    stale: Sequence[StaleTask]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
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
    recipe: Recipe | str | Path,
    *,
    output: str | Path | None = None,
    overrides: Sequence[str] = (),
    storage: StorageOptions | None = None,
) -> Explanation:
    """What `build` with the same arguments would do in its work folder. Raises what it would raise before."""
    recipe = with_overrides(recipe, overrides)
    target = destination_of(recipe, output, storage)
    work = work_of(recipe, recipe.resolve(default_work(target)), storage, Execution())
    return explain_work(recipe, work, storage)


def explain_work(recipe: Recipe, work: Work, storage: StorageOptions | None) -> Explanation:
    """The same for a work folder."""
    plan = open_plan(recipe, storage)
    work.prepare()
    planner = Planner(work)
    with suppress(UnknownError):
        moved, tokenizer_path = place_files(recipe, planner, plan.files, plan.digest)
        make_parts(plan, moved, tokenizer_path, planner.run)
    walked = {stage.stage for stage in planner.stages}
    later = [stage for stage in stage_names(recipe) if stage not in walked]
    stale = [
        StaleTask(key, commit)
        for key, commit in work.commits()
        if key not in planner.keys and commit.stage not in later  # of those, what will be used is not known
    ]
    return Explanation(work.place, tuple(planner.stages), tuple(later), tuple(stale))


def open_plan(recipe: Recipe, storage: StorageOptions | None) -> Plan:
    """Look at the inputs, the tokenizer and all other files that the recipe names."""
    splits = scan.scan_inputs(recipe, storage)
    digest = tokenizer_digest(recipe.resolve(recipe.tokenizer.path))
    return Plan(recipe, splits, digest, open_indexes(recipe), stages.filter_files(recipe))


def stage_names(recipe: Recipe) -> list[str]:
    """The stages of a recipe in order."""
    dedup = recipe.dedup
    names = ["tokenizer", "clean"]
    names += ["exact"] if dedup.exact is not None else []
    names += ["line_keys", "line_losers", "lines"] if dedup.lines is not None else []
    if dedup.near is not None:
        measured = dedup.near.measure is not None
        names += ["signatures", *(["planted"] if measured else []), "equal", "equal_mask", "candidates"]
        names += ["shingles", "verify", "near", *(["measure"] if measured else [])]
    return [*names, "parity", "tokenize", "pack", "provenance"]
