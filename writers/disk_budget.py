"""Whether what a build will write fits where it goes, found out before it begins.

What it writes is known from a rehearsal (rehearsal.py), less what finished tasks of this very build hold
already. A work folder only grows until the build is done. An output on the same file system is made of hard
links to it and takes nothing; on another one, and of a work folder in a store, it is a copy. Each machine of
a build with its work in a store needs scratch for its workers' running tasks.

An input whose `CERTAIN` fold fits everywhere is not rehearsed: so builds that are small for their disk begin
at once. `check_disk: false` in a recipe leaves the check out.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardkit.errors import BuildError, warn_user
from shardkit.progress import make_listener
from shardkit.units import format_bytes
from shardkit.writers.execution.engine_local import default_workers
from shardkit.writers.execution.task import Commit, Task
from shardkit.writers.execution.work import Work
from shardkit.writers.execution.work_local import LocalWork
from shardkit.writers.making import Plan, make_parts
from shardkit.writers.progress import StageProgress
from shardkit.writers.rehearsal import FILE_BYTES, StageBytes, rehearse
from shardkit.writers.session import Execution

__all__ = ["CERTAIN", "DiskNeed", "Finished", "check_disk", "disk_needs", "finished_stages"]

CERTAIN = 200  # 10 for the expansion of compressed text, 12 for all that stages write of short documents
_DOCUMENT_SCRATCH_BYTES = 64  # of tables that every machine fetches, and of what the one task `near` writes
_STAGE = "disk check"


@dataclass(frozen=True, slots=True)
class Finished:
    """Bytes that finished tasks of a stage hold, and whether all of its tasks are finished."""

    bytes: int = 0
    complete: bool = False


@dataclass(frozen=True, slots=True)
class DiskNeed:
    """What one file system must yet take: `parts` by what they are, in bytes; `folder` is one on it."""

    folder: Path
    parts: Mapping[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())


def check_disk(
    plan: Plan,
    work: Work,
    output: Path | None,
    execution: Execution,
    progress: bool | Callable[[StageProgress], None] = False,
) -> list[DiskNeed]:
    """BuildError if the build does not fit; else what it needs, empty where that was certain.

    `output` is None for a remote one. Nothing is written but a sample in the system's temporary folder.
    """
    if not plan.recipe.check_disk:
        return []
    stored = sum(split.bytes for split in plan.splits)
    places = [work.folder, *([output] if output is not None else [])]
    if CERTAIN * stored <= min(_free_bytes(place) for place in places):
        return []
    workers = default_workers(plan.recipe.memory) if execution.workers is None else execution.workers
    start = time.perf_counter()
    with make_listener(progress) as listener:
        listener(StageProgress(_STAGE, 0, 1, 0, 0, 0, 0.0))
        try:
            estimate = rehearse(plan, min(workers, default_workers(plan.recipe.memory)))
        except BuildError as error:
            warn_user(f"whether the build fits on its disks is not known: {error}")
            return []
        finished = finished_stages(plan, work) if isinstance(work, LocalWork) else {}
        listener(StageProgress(_STAGE, 1, 1, 0, 0, 0, time.perf_counter() - start))
    needs = disk_needs(estimate, finished, work, output, workers)
    for need in needs:
        free = _free_bytes(need.folder)
        if need.bytes > free:
            parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in need.parts.items())
            raise BuildError(
                f"{need.folder}: the build would need about {format_bytes(need.bytes)} more there ({parts}), "
                f"{format_bytes(free)} are free; make room, put `work` or the output "
                f"elsewhere, or build anyway with check_disk=false"
            )
    return needs


def disk_needs(
    estimate: StageBytes, finished: Mapping[str, Finished], work: Work, output: Path | None, workers: int
) -> list[DiskNeed]:
    """What each file system must yet take, one entry for each."""
    wanted: list[tuple[Path, str, int]] = []
    linked = False
    if isinstance(work, LocalWork):
        left = sum(
            0 if (held := finished.get(stage, Finished())).complete else max(0, size - held.bytes)
            for stage, size in estimate.stages.items()
        )
        wanted.append((work.folder, "work folder", left))
        linked = output is not None and _device(work.folder) == _device(output)
    else:
        running = workers * estimate.largest_task
        wanted.append((work.folder, "scratch", running + _DOCUMENT_SCRATCH_BYTES * estimate.documents))
    if output is not None and not linked:
        wanted.append((output, "output", estimate.output))
    needs: dict[int, tuple[Path, dict[str, int]]] = {}
    for folder, name, size in wanted:
        _, parts = needs.setdefault(_device(folder), (folder, {}))
        parts[name] = size
    return [DiskNeed(folder, parts) for folder, parts in needs.values()]


class _UnfinishedError(Exception):
    """What later stages hold is not known before this one is done."""


def finished_stages(plan: Plan, work: Work) -> dict[str, Finished]:
    """What finished tasks of this build hold already, by stage, up to the first stage that is not done."""
    held: dict[str, Finished] = {}

    def look(*groups: Sequence[Task]) -> list[list[Commit]]:
        found = [[commit for commit in work.find(group) if commit is not None] for group in groups]
        for group, commits in zip(groups, found, strict=True):
            size = sum(commit.bytes + FILE_BYTES * (len(commit.outputs) + 1) for commit in commits)
            if group:
                held[group[0].stage] = Finished(size, len(commits) == len(group))
        if not all(stage.complete for stage in held.values()):
            raise _UnfinishedError
        return found

    recipe = plan.recipe
    with suppress(_UnfinishedError, BuildError):  # an error of a finished stage is for the build to tell
        make_parts(plan, recipe, recipe.resolve(recipe.tokenizer.path), look)
    return held


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


def _device(folder: Path) -> int:
    return _existing(folder).stat().st_dev


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(_existing(folder)).free
