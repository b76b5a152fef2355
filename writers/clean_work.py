"""`clean_work`: remove from a work folder what a build does not use.

A build never removes finished work: going back to an earlier recipe or input file finds it. What is left by
other recipes, by versions of shardkit, or by files that went is removed here, on request only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkit.errors import BuildError
from shardkit.storage.store import StorageOptions
from shardkit.writers.execution.journal import Journal
from shardkit.writers.execution.work_local import LocalWork
from shardkit.writers.explain import StaleTask, explain_work
from shardkit.writers.places import default_work, destination_of
from shardkit.writers.preparation import with_overrides
from shardkit.writers.recipe import Recipe
from shardkit.writers.session import Execution, work_of

__all__ = ["CleanReport", "clean_work"]


@dataclass(frozen=True)
class CleanReport:
    """What was removed, or would be; `kept` finished tasks with `kept_bytes` stay."""

    work: str
    removed: Sequence[StaleTask]
    kept: int
    kept_bytes: int
    dry_run: bool

    @property
    def removed_bytes(self) -> int:
        """Size of all outputs that were removed."""
        return sum(task.bytes for task in self.removed)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "work": self.work,
            "removed": [task.key for task in self.removed],
            "removed_bytes": self.removed_bytes,
            "kept": self.kept,
            "kept_bytes": self.kept_bytes,
            "dry_run": self.dry_run,
        }


def clean_work(
    recipe: Recipe | str | Path,
    *,
    output: str | Path | None = None,
    overrides: Sequence[str] = (),
    storage: StorageOptions | None = None,
    everything: bool = False,
    dry_run: bool = False,
    force: bool = False,
) -> CleanReport:
    """Remove finished tasks that this build does not use, or `everything` with the work folder itself.

    Tasks of stages that come after one that has to run are kept: what of them will be used is not known yet.
    `dry_run` removes nothing. BuildError if a build uses the work folder; of one in a store that cannot be
    known for sure, and `force` removes what it wants.
    """
    recipe = with_overrides(recipe, overrides)
    target = destination_of(recipe, output, storage)
    work = work_of(recipe, recipe.resolve(default_work(target)), storage, Execution())
    if isinstance(work, LocalWork) and not work.folder.exists():
        return CleanReport(work.place, (), 0, 0, dry_run)
    with Journal(work) as journal:
        if not force:
            _refuse_others(journal)
        found = {key: StaleTask(key, commit) for key, commit in journal.work.commits()}
        removed = (
            tuple(found.values()) if everything else tuple(explain_work(recipe, journal.work, storage).stale)
        )
        if not dry_run and everything:
            journal.remove()
        elif not dry_run:
            for task in removed:
                journal.work.forget(task.commit)
    kept = [found[key] for key in sorted(found.keys() - {task.key for task in removed})]
    return CleanReport(work.place, removed, len(kept), sum(task.bytes for task in kept), dry_run)


def _refuse_others(journal: Journal) -> None:
    """A store cannot be locked, but those who use it say so."""
    if isinstance(journal.work, LocalWork):
        return
    sessions = [info.key.rpartition("/")[2] for info in journal.work.sharing.list("sessions/")]
    others = [session for session in sessions if session != journal.work.session]
    if others:
        raise BuildError(
            f"{journal.work.place}: {', '.join(others[:3])} may be at work in it; wait for that build, or "
            f"use --force if it is dead"
        )
