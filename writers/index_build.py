"""`build_dedup_index`: a recipe's unique documents as an index that later builds are deduplicated against.

    scan -> clean -> duplicates -> index -> publish

The first stages are those of a build, so the work folder of one that keeps it (`work`) is used as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_field
from pathlib import Path
from typing import Any

from shardkit.errors import RecipeError
from shardkit.hashing import digest_of
from shardkit.progress import make_listener
from shardkit.storage.store import StorageOptions
from shardkit.storage.url import local_path
from shardkit.writers.card import recipe_content
from shardkit.writers.dedup.config import NearDedupConfig
from shardkit.writers.dedup.index import (
    SKETCH,
    IndexPart,
    check_indexable,
    index_part,
    publish_index,
)
from shardkit.writers.dedup.near import NearResult
from shardkit.writers.dedup.removals import SplitRemovals, SplitTable
from shardkit.writers.dedup.signatures import part_settings
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.task import Commit, Task
from shardkit.writers.executors import EngineName, Execution, open_runner, place_files, place_of, work_of
from shardkit.writers.inputs import scan
from shardkit.writers.inputs.scan import describe_inputs
from shardkit.writers.kernels.words import normalization_version
from shardkit.writers.pipeline import refuse_own_files, with_overrides
from shardkit.writers.progress import StageProgress
from shardkit.writers.recipe import Recipe
from shardkit.writers.stages.clean import DOCUMENTS_FILE
from shardkit.writers.stages.duplicate_losses import NEAR
from shardkit.writers.stages.graph import BuildInputs, Survivors, find_survivors

__all__ = ["DedupIndexResult", "build_dedup_index"]


@dataclass(frozen=True)
class DedupIndexResult:
    """What an index holds, and what was removed on the way: documents by reason."""

    location: str
    documents: int
    bytes: int
    stored_bytes: int
    digest: str
    removed: Mapping[str, int]
    seconds: Mapping[str, float]
    total_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {
            "seconds": {stage: round(seconds, 3) for stage, seconds in self.seconds.items()},
            "total_seconds": round(self.total_seconds, 3),
        }


def build_dedup_index(
    recipe: Recipe | str | Path,
    index: str | Path,
    *,
    workers: int | None = None,
    engine: EngineName = "local",
    ray_address: str | None = None,
    overrides: Sequence[str] = (),
    sketch: int = SKETCH,
    replace: bool = False,
    progress: bool | Callable[[StageProgress], None] = True,
    storage: StorageOptions | None = None,
) -> DedupIndexResult:
    """Write the index of what `recipe` keeps after duplicate removal into the folder `index`.

    Of each document's n-grams the `sketch` smallest hashes are kept; 0: all. `storage` says how inputs in
    stores are reached. After an interruption the same call goes on. Raises RecipeError, also where the recipe
    has no dedup.near, and BuildError.
    """
    start = time.perf_counter()
    recipe = with_overrides(recipe, overrides)
    config = check_indexable(recipe.dedup.near, sketch)
    target = local_path(str(index)).absolute()
    if not target.name:
        raise RecipeError(f"{target} cannot hold an index; name a folder")
    execution = Execution(workers=workers, engine=engine, ray_address=ray_address)
    work = work_of(recipe, target.with_name(target.name + ".work"), storage, execution)
    splits = scan.scan_inputs(recipe, storage)
    refuse_own_files(splits, place_of(work), target)
    inputs = BuildInputs.of(recipe, splits)
    with make_listener(progress) as listener, open_runner(recipe, work, execution, listener) as runner:
        folder, _ = place_files(recipe, runner.journal, inputs.filter_files)
        survivors = find_survivors(replace_field(inputs, filter_folder=folder), runner.run)
        assert survivors.near is not None
        [made] = runner.run(_index_tasks(survivors.documents, survivors.near, config, sketch))
        facts = {
            "recipe_digest": digest_of(recipe_content(recipe)),
            "inputs": describe_inputs(recipe, splits, [counts.input for counts in survivors.counts]),
            "against": [other.digest for other in inputs.indexes],
        }
        runner.check_shared(made)
        for commit in made:
            for name in commit.outputs:
                (commit.files / name).local()
        parts = [(commit.folder, IndexPart.of(commit)) for commit in made]
        settings = parts[0][1].settings
        opened = publish_index(parts, target, facts, settings, sketch=sketch, replace=replace)
        if recipe.work is None:
            runner.journal.remove()
    return DedupIndexResult(
        str(target),
        opened.documents,
        opened.bytes,
        opened.stored_bytes,
        opened.digest,
        _removed(survivors),
        dict(runner.seconds),
        time.perf_counter() - start,
    )


def _index_tasks(
    documents: Sequence[Commit], near: NearResult, config: NearDedupConfig, sketch: int
) -> list[Task]:
    """One task a split."""
    tasks = []
    for split, part, removed in zip(documents, near.parts, near.removed, strict=True):
        inputs = {
            "documents": split.outputs[DOCUMENTS_FILE].xxh3_128,
            "part": part.content,
            "removed": removed.digest,
        }
        settings = {
            "dedup.near": part_settings(config),
            "normalization": normalization_version(),
            "sketch": sketch,
        }
        args = (split.files / DOCUMENTS_FILE, part.files, removed, config, sketch)
        weight = split.outputs[DOCUMENTS_FILE].bytes
        tasks.append(Task("index", split.name, settings, _index, args, weight, inputs))
    return tasks


def _index(
    folder: Path,
    documents: Artifact,
    part: Artifact,
    removed: SplitTable,
    config: NearDedupConfig,
    sketch: int,
) -> IndexPart:
    rows = SplitRemovals({NEAR: removed}).load().rows[NEAR]
    return index_part(documents, part, rows, config, sketch, folder)


def _removed(survivors: Survivors) -> dict[str, int]:
    removed: dict[str, int] = {}
    for counts in survivors.counts:
        for reason, count in counts.ledger.dropped.items():
            removed[reason] = removed.get(reason, 0) + count.documents
    for stage in survivors.card.stages if survivors.card else ():
        removed[stage.stage] = stage.documents
    return removed
