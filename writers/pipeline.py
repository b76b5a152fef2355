"""`build`: a recipe to a dataset.

    scan -> clean -> duplicates -> tokenize, tokenizer parity -> pack -> provenance -> publish

Every stage is a list of tasks that the journal skips or an engine runs; what a stage has to do follows from
the recipe and from what the stages before it committed, never from the number of workers or from time. So the
same inputs and recipe give the same bytes, and a build that was killed goes on where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace as dataclass_replace
from functools import partial
from pathlib import Path
from typing import Any

from shardkit.errors import BuildError
from shardkit.formats.provenance import provenance_name
from shardkit.manifest import Manifest
from shardkit.progress import make_listener
from shardkit.storage.store import StorageOptions
from shardkit.writers.annotations import ANNOTATIONS_FILE
from shardkit.writers.card import card_bytes, describe_file, make_card
from shardkit.writers.estimate import check_disk
from shardkit.writers.execution.runner import Journal, Runner
from shardkit.writers.execution.scheduler import TURN_SECONDS, TaskSlice
from shardkit.writers.execution.task import Commit
from shardkit.writers.execution.work import Work
from shardkit.writers.execution.work_files import read_bytes
from shardkit.writers.funnel import Funnel, collect_funnel, filters_card
from shardkit.writers.inputs import scan
from shardkit.writers.inputs.files import check_unchanged
from shardkit.writers.inputs.scan import describe_inputs
from shardkit.writers.ledger import Ledger
from shardkit.writers.machine_files import place_files
from shardkit.writers.making import Made, Plan, make_parts
from shardkit.writers.places import default_work, destination_of
from shardkit.writers.preparation import open_indexes, refuse_own_files, with_overrides
from shardkit.writers.progress import StageProgress, say
from shardkit.writers.publish import (
    ANNOTATIONS_FOLDER,
    CARD_NAME,
    QUARANTINE_NAME,
    REPORT_NAME,
    Watch,
    global_shards,
    publish,
)
from shardkit.writers.recipe import Recipe
from shardkit.writers.report import render_report
from shardkit.writers.result import BuildResult, StageClock
from shardkit.writers.session import EngineName, Execution, open_runner, place_of, work_of
from shardkit.writers.stages import tasks as stages
from shardkit.writers.stages.clean import QUARANTINE_FILE
from shardkit.writers.tokenizer import tokenizer_digest
from shardkit.writers.up_to_date import check_output

__all__ = ["build"]

Publisher = Callable[[Manifest, Mapping[str, Path], Mapping[str, bytes]], None]
"""Puts shards, files and texts to where the dataset goes, the index last."""


def build(
    recipe: Recipe | str | Path,
    *,
    output: str | Path | None = None,
    workers: int | None = None,
    overrides: Sequence[str] = (),
    engine: EngineName = "local",
    ray_address: str | None = None,
    task_slice: TaskSlice | None = None,
    progress: bool | Callable[[StageProgress], None] = True,
    replace: bool = False,
    storage: StorageOptions | None = None,
) -> BuildResult:
    """Build the dataset that `recipe` (or the YAML file it names) describes; what is finished is not redone.

    `output` replaces the recipe's output.path: a folder, relative to the current one, or a URL. Stores, of
    inputs too, are reached as `storage` says. `overrides` such as "pack.sequence_length=512" replace other
    keys. `engine`, `workers`, `ray_address` and `task_slice` say who runs the tasks (`Execution`; default: a
    process a core, as memory allows), which never changes a byte. A place that holds another dataset is
    refused unless `replace`.
    Raises RecipeError, BuildError, MissingExtraError; after an interruption the same call goes on.
    """
    recipe = with_overrides(recipe, overrides)
    target = destination_of(recipe, output, storage)
    execution = Execution(workers=workers, engine=engine, task_slice=task_slice, ray_address=ray_address)
    work = work_of(recipe, recipe.resolve(default_work(target)), storage, execution)
    start = time.perf_counter()
    splits = scan.scan_inputs(recipe, storage)
    refuse_own_files(splits, place_of(work), target if isinstance(target, Path) else str(target))
    digest, indexes = tokenizer_digest(recipe.resolve(recipe.tokenizer.path)), open_indexes(recipe)
    files = stages.filter_files(recipe)
    if card := check_output(target, recipe, splits, digest, indexes, files, replace=replace):
        if recipe.work is None and task_slice is None:
            _remove_left(work)
        return _result_of_card(str(target), card, time.perf_counter() - start)
    plan = Plan(recipe, splits, digest, indexes, files)
    check_disk(plan, work, target if isinstance(target, Path) else None, execution, progress)
    scanned = time.perf_counter() - start
    clock = StageClock(make_listener(progress), start)
    with clock as listener, open_runner(recipe, work, execution, listener) as runner:
        runner.seconds["scan"] = scanned
        watch = Watch(target, replace=replace)
        wait_seconds = TURN_SECONDS if runner.is_shared else 0.0
        place = partial(publish, target, replace=replace, wait_seconds=wait_seconds, listener=listener)
        result = _Build(plan, runner, watch).run(str(target), place)
        stages_run = clock.times(runner.seconds)
        if recipe.work is None and not runner.is_shared:
            runner.journal.remove()
    if recipe.work is None and runner.is_shared and progress is True:
        say(f"{work.place} is kept, as others may be at work in it; delete it when all have ended")
    return dataclass_replace(result, total_seconds=time.perf_counter() - start, stages=stages_run)


def _remove_left(work: Work) -> None:
    """The default work folder goes after success, also where a crash came between the two."""
    if work.folder.is_dir():
        with suppress(BuildError), Journal(work) as journal:  # of another build, or not ours: it stays
            journal.remove()


def _result_of_card(location: str, card: Mapping[str, Any], seconds: float) -> BuildResult:
    names = ("fingerprint", "format", "samples", "shards", "sequence_length", "tokens", "padding")
    return BuildResult(
        location,
        **{name: card[name] for name in names},
        funnel=Ledger.from_dict(card["funnel"]),
        seconds={"scan": seconds},
        total_seconds=seconds,
        tasks=0,
        tasks_reused=0,
        up_to_date=True,
    )


class _Build:
    """One build from its plan to the published dataset."""

    def __init__(self, plan: Plan, runner: Runner, watch: Watch) -> None:
        self._plan, self._runner, self._watch = plan, runner, watch

    def run(self, location: str, place: Publisher) -> BuildResult:
        plan, recipe, runner = self._plan, self._plan.recipe, self._runner
        moved, tokenizer_path = place_files(recipe, runner.journal, plan.files, plan.digest)
        made = make_parts(plan, moved, tokenizer_path, runner.run)
        unique = made.prepared.unique
        funnel = collect_funnel(
            plan.splits,
            len(recipe.inputs),
            ledgers={"cleaning": [commit.ledger() for commit in made.prepared.cleaned]}
            | ({"cutting lines": unique.cut} if unique.cut else {}),
            removed=unique.removed,
            tokenized=made.spilled,
            packed=made.packed,
            sequence_length=recipe.pack.sequence_length,
        )
        funnel.check()
        start = time.perf_counter()
        manifest = self._publish(location, place, made, funnel)
        runner.seconds["publish"] = time.perf_counter() - start
        return BuildResult(
            location,
            fingerprint=manifest.fingerprint,
            format=manifest.format,
            samples=manifest.samples,
            shards=len(manifest.shards),
            sequence_length=recipe.pack.sequence_length,
            tokens=funnel.packed["tokens"],
            padding=funnel.packed["padding"],
            funnel=funnel.total,
            seconds=dict(runner.seconds),
            total_seconds=0.0,
            tasks=runner.tasks,
            tasks_reused=runner.tasks_reused,
        )

    def _publish(self, location: str, place: Publisher, made: Made, funnel: Funnel) -> Manifest:
        plan, recipe = self._plan, self._plan.recipe
        prepared, packed = made.prepared, made.packed
        check_unchanged({split.input for split in plan.splits})
        tables = _tables(recipe, made.provenance, prepared.cleaned)
        shards = global_shards((commit.folder, stages.shards_of(commit)) for commit in packed)
        manifest = Manifest("mds" if recipe.output.format == "mds" else "tar", [shard for _, shard in shards])
        if not manifest.samples:
            raise BuildError("no document has any token: there is nothing to write")
        links = {shard.stored.basename: path for path, shard in shards}
        files: dict[str, Any] = {}
        for name, commit in tables.items():
            [(file, table)] = commit.outputs.items()
            links[name] = commit.folder / file
            files[name] = {"bytes": table.bytes, "xxh3_128": table.xxh3_128}
        inputs = describe_inputs(recipe, plan.splits, [c.counts["input"] for c in prepared.cleaned])
        card = make_card(
            recipe,
            manifest,
            funnel,
            tokenizer=made.tokenizer,
            inputs=inputs,
            partitions=len(packed),
            dedup=prepared.unique.card,
            filters=filters_card(commit.counts["filters"] for commit in prepared.cleaned),
            filter_files=plan.files,
        )
        texts = {REPORT_NAME: render_report(card)}
        quarantine = _joined(prepared.cleaned, QUARANTINE_FILE)
        if quarantine:
            texts[QUARANTINE_NAME] = quarantine
        told = {name for commit in prepared.cleaned for name in commit.outputs if name.endswith(".jsonl")}
        for name in sorted(told - {QUARANTINE_FILE}):  # what filters have to tell beyond the report
            texts[name] = _joined(prepared.cleaned, name)
        card["files"] = files | {name: describe_file(text) for name, text in texts.items()}
        texts[CARD_NAME] = card_bytes(card)

        def is_done() -> bool:
            return self._watch.shows(texts[CARD_NAME])

        with self._runner.take_turn("publish", location, is_done) as is_ours:
            if is_ours:
                self._runner.prove([*packed, *tables.values()])
                try:
                    place(manifest, links, texts)
                except BuildError:
                    if not (self._runner.is_shared and is_done()):  # by one who took us for dead
                        raise
        return manifest


def _joined(commits: Sequence[Commit], name: str) -> bytes:
    """One output of all tasks; what is empty is not read, which in a store would be a request."""
    return b"".join(read_bytes(commit.folder / name) for commit in commits if commit.outputs[name].bytes)


def _tables(recipe: Recipe, provenance: Sequence[Commit], cleaned: Sequence[Commit]) -> dict[str, Commit]:
    """The Parquet files beside the shards, by name in the dataset: commits with that one output each."""
    tables = {provenance_name(n): commit for n, commit in enumerate(provenance)}
    if recipe.annotate:
        for n, commit in enumerate(cleaned):
            outputs = {ANNOTATIONS_FILE: commit.outputs[ANNOTATIONS_FILE]}
            tables[f"{ANNOTATIONS_FOLDER}/part-{n:05d}.parquet"] = dataclass_replace(commit, outputs=outputs)
    return tables
