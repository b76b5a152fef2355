"""`build`: a recipe to a published dataset.

    recipe -> destination, work folder, engine -> splits -> already published? -> enough disk space?
    -> the stages (stages/graph.py): clean, exact, lines, near, tokenize, pack,
       provenance, side files
    -> check that the counts add up -> publish: shards, provenance, report, card, and the index last

The same inputs and recipe give the same bytes with any engine, and a build that was killed continues where it
stopped. Whether the output already has the dataset is decided by content, not by times: by the card's recipe,
tokenizer and version, and by the digests of the raw inputs, which are read again for this (at the speed of
the disk, much faster than building).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import replace as dataclass_replace
from os import fspath
from pathlib import Path
from typing import Any

import shardkit
from shardkit.card import CARD_NAME, FILES_NAME, DatasetCard, Histogram, listed_files
from shardkit.errors import BuildError, RecipeError, ShardError
from shardkit.formats.provenance import provenance_name
from shardkit.formats.removed import DROPPED_FOLDER, DUPLICATES_FOLDER, part_name
from shardkit.hashing import digest_of
from shardkit.manifest import Manifest
from shardkit.progress import Listener, make_listener
from shardkit.storage.store import StorageOptions
from shardkit.storage.url import is_remote, local_path
from shardkit.writers.annotations import ANNOTATIONS_FILE
from shardkit.writers.card import describe_file, make_card, recipe_content
from shardkit.writers.estimate import check_disk
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.engine import TASK_SECONDS
from shardkit.writers.execution.runner import Journal, Runner
from shardkit.writers.execution.scheduler import TaskSlice
from shardkit.writers.execution.task import Commit, facts_of
from shardkit.writers.execution.work import Work
from shardkit.writers.executors import EngineName, Execution, open_runner, place_files, place_of, work_of
from shardkit.writers.funnel import PACKED, Funnel, filters_card
from shardkit.writers.inputs import scan
from shardkit.writers.inputs.files import check_unchanged
from shardkit.writers.inputs.scan import Split, describe_inputs, hash_splits
from shardkit.writers.languages import add_languages
from shardkit.writers.ledger import FAILED_SPLIT, Count, Ledger
from shardkit.writers.progress import StageProgress, WholeBuild, say
from shardkit.writers.publish import (
    ANNOTATIONS_FOLDER,
    REPORT_NAME,
    RemoteOutput,
    Watch,
    find_published,
    finish_published,
    global_shards,
    publish,
)
from shardkit.writers.recipe import Recipe, apply_override, load_recipe, recipe_from_mapping
from shardkit.writers.removed import DROPPED_FILE
from shardkit.writers.report import render_report
from shardkit.writers.result import BuildResult, StageClock, StageTime
from shardkit.writers.stages.graph import BuildInputs, Outputs, Survivors, run_stages
from shardkit.writers.stages.tokenize import Tokenized, TokenizerFile

__all__ = ["build", "default_work", "destination_of", "refuse_own_files", "with_overrides"]

PUBLISH_WAIT_SECONDS = 24 * 3600.0  # for a suspended driver that holds the lock of a local output


def build(
    recipe: Recipe | Mapping[str, object] | str | Path,
    *,
    output: str | Path | None = None,
    workers: int | None = None,
    overrides: Sequence[str] = (),
    engine: EngineName = "local",
    ray_address: str | None = None,
    task_slice: TaskSlice | None = None,
    task_seconds: float = TASK_SECONDS,
    retry_failed: bool = False,
    speculate: bool = True,
    progress: bool | Callable[[StageProgress], None] = True,
    replace: bool = False,
    storage: StorageOptions | None = None,
) -> BuildResult:
    """Build the dataset of `recipe`: the path of a YAML file, a dict of the same keys, or a Recipe.

    What is finished is skipped. Relative paths in a dict start from the current folder.
    `output` replaces the recipe's output.path: a folder, relative to the current one, or a URL; `overrides`
    such as "pack.sequence_length=512" other keys. `storage` has options of stores. `engine` to `speculate`
    say how tasks run (`Execution`) and never change a byte, if the same splits fail. A place with another
    dataset is refused unless `replace`. RecipeError, BuildError, MissingExtraError; the same call continues.
    """
    start = time.perf_counter()
    recipe = with_overrides(recipe, overrides)
    target = destination_of(recipe, output, storage)
    execution = Execution(
        workers=workers,
        engine=engine,
        task_slice=task_slice,
        ray_address=ray_address,
        task_seconds=task_seconds,
        retry_failed=retry_failed,
        speculate=speculate,
    )
    work = work_of(recipe, recipe.resolve(default_work(target)), storage, execution)
    splits, cuts = _scan(recipe, work, target, storage)
    tokenizer, inputs = TokenizerFile.of(recipe), BuildInputs.of(recipe, splits, storage)
    if card := _published_card(target, inputs, tokenizer.digest, replace=replace, execution=execution):
        _remove_left(recipe, work, execution)
        return _result_of_card(str(target), card, time.perf_counter() - start)

    check_disk(inputs, tokenizer, work, target if isinstance(target, Path) else None, execution, progress)
    scanned = time.perf_counter() - start
    watch = Watch(target, replace=replace)
    clock = StageClock(_listener(progress, recipe, work), start)
    with clock as listener, open_runner(recipe, work, execution, listener) as runner:
        runner.seconds["scan"] = scanned
        _keep_cuts(cuts, runner.journal.work)
        outputs = _run_stages(inputs, tokenizer, runner)
        funnel = _count(inputs, outputs)
        begin = time.perf_counter()
        dataset = _describe(inputs, outputs, funnel)
        if runner.await_turn("publish", lambda: watch.shows(dataset.card)):
            _publish(dataset, outputs.packed, target, runner, watch, listener, replace=replace)
        runner.seconds["publish"] = time.perf_counter() - begin
        stages_run = clock.times(runner.seconds)
        _leave(recipe, runner, say_so=progress is True)
    return _result(str(target), dataset, funnel, runner, time.perf_counter() - start, stages_run)


def _listener(
    progress: bool | Callable[[StageProgress], None], recipe: Recipe, work: Work
) -> Listener[StageProgress]:
    """What hears of stages: a function of the caller as they are, displays beside the build as a whole."""
    if progress is not True:
        return make_listener(progress)
    place = place_of(work)
    return WholeBuild(make_listener(True), recipe.dedup, place if isinstance(place, Path) else None)


def _run_stages(inputs: BuildInputs, tokenizer: TokenizerFile, runner: Runner) -> Outputs:
    """Run all stages, with the files of filters and the tokenizer where their tasks find them."""
    folder, file = place_files(inputs.recipe, runner.journal, inputs.filter_files, tokenizer.digest)
    inputs = dataclass_replace(inputs, filter_folder=folder)
    return run_stages(inputs, dataclass_replace(tokenizer, file=file), runner.run)


def _leave(recipe: Recipe, runner: Runner, *, say_so: bool) -> None:
    """Remove the work folder if the recipe names none, unless other slices may still use it."""
    if recipe.work is not None:
        return
    if not runner.is_shared:
        runner.journal.remove()
    elif say_so:
        place = runner.journal.work.place
        say(f"{place} is kept, because others may use it; delete it when all of them have ended")


def with_overrides(recipe: Recipe | Mapping[str, object] | str | Path, overrides: Sequence[str]) -> Recipe:
    """The recipe, the one that a dict spells, or the one in a YAML file, with some keys replaced."""
    if isinstance(recipe, (str, Path)):
        return load_recipe(recipe, list(overrides))
    if isinstance(recipe, Recipe) and not overrides:
        return recipe
    if isinstance(recipe, Recipe):
        data, folder = recipe.model_dump(mode="json"), recipe.folder
    else:  # of Python's types, those that YAML has, and paths
        data, folder = json.loads(json.dumps(dict(recipe), default=fspath)), Path.cwd()
    for override in overrides:
        data = apply_override(data, override)
    return recipe_from_mapping(data, folder=folder)


def destination_of(
    recipe: Recipe, output: str | Path | None, storage: StorageOptions | None
) -> Path | RemoteOutput:
    """The destination of the dataset; RecipeError if it cannot be used."""
    place = recipe.output.path if output is None else str(output)
    if is_remote(place):
        return RemoteOutput(place.rstrip("/"), storage)
    folder = recipe.resolve(place) if output is None else local_path(place).absolute()
    if not folder.name:
        raise RecipeError(f"output.path: {folder} cannot hold a dataset; name a folder")
    return folder


def default_work(target: Path | RemoteOutput) -> str:
    """The work folder if the recipe names none: next to the output, or for a URL in the recipe's folder."""
    return f"{target}.work" if isinstance(target, Path) else target.work_name


def _scan(
    recipe: Recipe, work: Work, target: Path | RemoteOutput, storage: StorageOptions | None
) -> tuple[list[Split], scan.KeptCuts]:
    """The splits of the inputs, with the help of what the work folder remembers."""
    cuts = scan.KeptCuts(work.read_note(scan.CUTS_NOTE))
    splits = scan.scan_inputs(recipe, storage, kept=cuts)
    refuse_own_files(splits, place_of(work), target if isinstance(target, Path) else str(target))
    return splits, cuts


def _keep_cuts(cuts: scan.KeptCuts, work: Work) -> None:
    if cuts.changed:
        work.write_note(scan.CUTS_NOTE, cuts.to_bytes())


def refuse_own_files(splits: Sequence[Split], *places: Path | str) -> None:
    """RecipeError if an input lies where the build writes: the next build would read the output of this one.

    `places` are folders, and URLs as str.
    """
    roots = [str(place.resolve() if isinstance(place, Path) else place).rstrip("/") for place in places]
    for split in splits:
        identity = split.input.identity
        for root in roots:
            if identity.startswith(root + "/"):
                raise RecipeError(
                    f"inputs[{split.source}].path: {split.file} lies in {root}, where this build writes; "
                    f"keep inputs, output and work apart"
                )


def _published_card(
    output: Path | RemoteOutput,
    inputs: BuildInputs,
    tokenizer_digest: str,
    *,
    replace: bool,
    execution: Execution,
) -> DatasetCard | None:
    """The card of the dataset at `output` if this build would make the same one; None if it has to run.

    BuildError if there is another dataset and `replace` is not set, or if a store cannot be reached.
    """
    found = find_published(output)
    if found is None or replace:
        return None
    damage = found.problem and f"which is damaged ({found.problem})"
    problem = damage
    if found.contents is not None:
        card, failed_splits = found.contents.card, inputs.recipe.max_failed_splits
        if execution.retry_failed:
            failed_splits = 0
        problem = _difference(card, inputs, tokenizer_digest) or _failed(card, failed_splits) or damage
    if problem is not None or found.contents is None:
        raise BuildError(
            f"{output}: already holds a dataset, {problem}; choose another output, or use --replace "
            f"to put this one in its place"
        )
    finish_published(output, found.contents)
    return found.contents.card


def _difference(card: DatasetCard | None, inputs: BuildInputs, tokenizer_digest: str) -> str | None:
    """Why the card is not that of this build, or None."""
    recipe, splits = inputs.recipe, inputs.splits
    if card is None or not card.has("recipe_digest"):
        return "which no recipe made"
    try:
        if card.recipe_digest != digest_of(recipe_content(recipe)):
            return "made by another recipe"
        if card.shardkit_version != shardkit.__version__:
            return f"made by shardkit {card.shardkit_version}"
        if card.tokenizer.digest != tokenizer_digest:
            return "made with another tokenizer"
        near = None if card.dedup is None else card.dedup.near
        if recipe.dedup.near and (near is None or near.indexes != [index.digest for index in inputs.indexes]):
            return "made against other indexes"
        if card.filter_files != inputs.filter_files:
            return "made with other lists or models of its filters"
        names = ("source", "files", "bytes", "digest")
        stated = [{name: getattr(entry, name) for name in names} for entry in card.inputs]
    except ShardError:
        return "whose card cannot be read"
    if stated != describe_inputs(recipe, splits, hash_splits(splits)):
        return "made from other input files"
    return None


def _failed(card: DatasetCard | None, allowed: int) -> str | None:
    """What to say of a dataset that lacks more splits than `allowed` because their tasks failed, or None."""
    failed = Count() if card is None else card.funnel.quarantined.get(FAILED_SPLIT, Count())
    return f"made without {failed.documents:,} splits that failed" if failed.documents > allowed else None


def _remove_left(recipe: Recipe, work: Work, execution: Execution) -> None:
    """Remove the default work folder if a crash came between publishing and removing it."""
    if recipe.work is None and execution.task_slice is None and work.folder.is_dir():
        with suppress(BuildError), Journal(work) as journal:  # in use by another build, or not ours: it stays
            journal.remove()


def _result_of_card(location: str, card: DatasetCard, seconds: float) -> BuildResult:
    names = ("fingerprint", "format", "samples", "shards", "sequence_length", "tokens", "padding")
    funnel = card.funnel
    return BuildResult(
        location,
        **{name: getattr(card, name) for name in names},
        funnel=Ledger(funnel.read, funnel.kept, funnel.dropped, funnel.quarantined),
        seconds={"scan": seconds},
        total_seconds=seconds,
        tasks=0,
        tasks_reused=0,
        up_to_date=True,
        steps=tuple(card.funnel_steps()),
    )


def _count(inputs: BuildInputs, outputs: Outputs) -> Funnel:
    """The counts of all stages; ConservationError unless they add up."""
    survivors = outputs.survivors
    of_splits = {"cleaning": [counts.ledger for counts in survivors.counts]}
    if survivors.lines_cut:
        of_splits["cutting lines"] = list(survivors.lines_cut)
    sources = range(len(inputs.recipe.inputs))
    ledgers = {stage: [Ledger() for _ in sources] for stage in (*of_splits, "tokenizing")}
    tokens = [0 for _ in sources]
    languages: list[list[Any]] = [[] for _ in sources]
    histograms = {"lengths": Histogram(), "row_padding": Histogram(), "row_pieces": Histogram()}
    for number, (split, commit) in enumerate(zip(inputs.splits, outputs.tokenized, strict=True)):
        for stage, parts in of_splits.items():
            ledgers[stage][split.source].merge(parts[number])
        tokenized = Tokenized.of(commit)
        ledgers["tokenizing"][split.source].merge(tokenized.ledger)
        tokens[split.source] += tokenized.tokens
        histograms["lengths"].add(tokenized.lengths)
        languages[split.source].append(tokenized.languages)
    labelled = all(counts is not None for of_source in languages for counts in of_source)
    packed = [part.counts() for part in outputs.parts]
    for part in outputs.parts:
        histograms["row_padding"].add(part.row_padding)
        histograms["row_pieces"].add(part.row_pieces)
    funnel = Funnel(
        ledgers,
        tokens,
        survivors.removed,
        inputs.recipe.pack.sequence_length,
        {name: sum(part[name] for part in packed) for name in PACKED},
        histograms,
        [add_languages(parts) for parts in languages] if labelled else None,
    )
    funnel.check()
    return funnel


@dataclass(frozen=True)
class _Dataset:
    """What is published: `links` are files of the work folder by their names in the dataset.

    `tables` are the commits of those among them that are no shards, with that one output each.
    """

    manifest: Manifest
    links: Mapping[str, Artifact]
    tables: Mapping[str, Commit]
    texts: Mapping[str, bytes]

    @property
    def card(self) -> bytes:
        return self.texts[CARD_NAME]


def _describe(inputs: BuildInputs, outputs: Outputs, funnel: Funnel) -> _Dataset:
    """Number the shards, and make index, report and card; BuildError if there is no sample."""
    recipe, survivors = inputs.recipe, outputs.survivors
    check_unchanged({split.input for split in inputs.splits})
    folders = [commit.files for commit in outputs.packed]
    parts = zip(folders, [part.shards for part in outputs.parts], strict=True)
    shards = global_shards(parts, prefixes=recipe.output.prefixes)
    manifest = Manifest("mds" if recipe.output.format == "mds" else "tar", [shard for _, shard in shards])
    if not manifest.samples:
        raise BuildError("no document has any token: there is nothing to write")
    links = {shard.stored.basename: file for file, shard in shards}
    tables = _tables(recipe, outputs, survivors)
    tables |= {name: commit for commit in outputs.side_files for name in commit.outputs}
    files: dict[str, Any] = {}
    for name, commit in tables.items():
        [(file, table)] = commit.outputs.items()
        links[name] = commit.files / file
        files[name] = {"bytes": table.bytes, "xxh3_128": table.xxh3_128}
    card = make_card(
        recipe,
        manifest,
        funnel,
        tokenizer=outputs.tokenizer,
        inputs=describe_inputs(recipe, inputs.splits, [counts.input for counts in survivors.counts]),
        partitions=len(outputs.packed),
        dedup=survivors.card,
        filters=filters_card(counts.filters for counts in survivors.counts),
        filter_files=inputs.filter_files,
    )
    texts = {REPORT_NAME: render_report(card)}
    files |= {name: describe_file(text) for name, text in texts.items()}
    listed, of_many = listed_files(files)
    texts |= {} if of_many is None else {FILES_NAME: of_many}
    texts[CARD_NAME] = DatasetCard({**card.data, "files": listed}).to_bytes()
    return _Dataset(manifest, links, tables, texts)


def _publish(
    dataset: _Dataset,
    packed: Sequence[Commit],
    target: Path | RemoteOutput,
    runner: Runner,
    watch: Watch,
    listener: Listener[StageProgress],
    *,
    replace: bool,
) -> None:
    runner.check_shared([*packed, *dataset.tables.values()])
    wait_seconds = PUBLISH_WAIT_SECONDS if runner.is_shared else 0.0
    files = (dataset.manifest, dataset.links, dataset.texts)
    try:
        run = runner.run if runner.work_is_remote and not runner.is_shared else None
        publish(target, *files, replace=replace, run=run, wait_seconds=wait_seconds, listener=listener)
    except BuildError:
        # Another slice may have taken the lease over, and have published the dataset.
        if not (runner.is_shared and watch.shows(dataset.card)):
            raise


def _result(
    location: str,
    dataset: _Dataset,
    funnel: Funnel,
    runner: Runner,
    total_seconds: float,
    stages: tuple[StageTime, ...],
) -> BuildResult:
    manifest = dataset.manifest
    return BuildResult(
        location,
        fingerprint=manifest.fingerprint,
        format=manifest.format,
        samples=manifest.samples,
        shards=len(manifest.shards),
        sequence_length=funnel.sequence_length,
        tokens=funnel.packed["tokens"],
        padding=funnel.packed["padding"],
        funnel=funnel.total,
        seconds=dict(runner.seconds),
        total_seconds=total_seconds,
        tasks=runner.tasks,
        tasks_reused=runner.tasks_reused,
        stages=stages,
        steps=tuple(DatasetCard.parse(CARD_NAME, dataset.card).funnel_steps()),
    )


def _tables(recipe: Recipe, outputs: Outputs, survivors: Survivors) -> dict[str, Commit]:
    """The Parquet files beside the shards, by name in the dataset: commits with that one output each."""
    tables = {provenance_name(n): commit for n, commit in enumerate(outputs.provenance)}
    tables |= {part_name(DUPLICATES_FOLDER, n): commit for n, commit in enumerate(outputs.duplicates)}
    of_splits = {ANNOTATIONS_FOLDER: (ANNOTATIONS_FILE, survivors.cleaned)} if recipe.annotate else {}
    pairs = zip(survivors.cleaned, survivors.counts, strict=True)
    of_splits[DROPPED_FOLDER] = DROPPED_FILE, [commit for commit, counts in pairs if counts.filters.dropped]
    for folder, (name, commits) in of_splits.items():
        for n, commit in enumerate(commits):
            facts = facts_of({}, {name: commit.outputs[name]})
            tables[part_name(folder, n)] = dataclass_replace(commit, facts=facts)
    return tables
