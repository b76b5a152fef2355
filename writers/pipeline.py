"""`build`: makes and publishes the dataset of a recipe.

    recipe -> destination, work folder, engine -> splits -> already published? -> enough disk space?
    -> the steps (stages/graph.py), from raw files to shards and tables of removed documents
    -> check that the counts add up -> publish: shards, provenance, report, card, and the index last

The same inputs and recipe give the same bytes with any engine, and a build that was killed continues where it
stopped. Whether the output already has the dataset is decided by content, not by times: a build compares the
card's recipe, tokenizer and version, and the digests of the raw inputs, which it reads again for this (at the
speed of the disk, much faster than building).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace as dataclass_replace
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

from shardkit.card import DatasetCard, Histogram, RepeatFacts
from shardkit.errors import BuildError, RecipeError, ShardError
from shardkit.files import not_for_everyone
from shardkit.formats.dropped_table import DROPPED_FOLDER, DUPLICATES_FOLDER, part_name
from shardkit.formats.provenance import provenance_name
from shardkit.hashing import digest_of
from shardkit.hints import answers_keywords
from shardkit.manifest import Manifest, ShardInfo
from shardkit.progress import Listener, make_listener
from shardkit.settings import ANNOTATIONS_FOLDER, TRAIN, Bounds
from shardkit.storage.store import StorageOptions
from shardkit.storage.url import is_remote, local_path
from shardkit.synonyms import BUILD
from shardkit.version import __version__
from shardkit.writers.card import BuiltDataset, assemble, make_card
from shardkit.writers.dedup.outcomes import AMOUNT, NOT_SAMPLED
from shardkit.writers.estimate import check_disk
from shardkit.writers.execution.commit import Commit, facts_of
from shardkit.writers.execution.engine import TASK_SECONDS
from shardkit.writers.execution.progress import StageProgress, WholeBuild
from shardkit.writers.execution.runner import Journal, Runner
from shardkit.writers.execution.work import Work
from shardkit.writers.executors import EngineName, Execution, open_runner, place_files, work_of
from shardkit.writers.inputs import scan
from shardkit.writers.inputs.files import InputFile, identities
from shardkit.writers.inputs.scan import Split, check_unchanged, describe_inputs, hash_splits
from shardkit.writers.inputs.small_files import text_bytes
from shardkit.writers.recipe.plain import plain_recipe
from shardkit.writers.recipe.recipe import Recipe, load_recipe
from shardkit.writers.report.costs import step_costs
from shardkit.writers.report.result import BuildResult, Ran, StageClock
from shardkit.writers.rows.annotations import ANNOTATIONS_FILE
from shardkit.writers.rows.dropped_file import DROPPED_FILE
from shardkit.writers.rows.funnel import Funnel, Trained, filters_card
from shardkit.writers.rows.ledger import FAILED_SPLIT, Count, Ledger
from shardkit.writers.stages.flow import Documents, Outputs
from shardkit.writers.stages.given import write_given
from shardkit.writers.stages.graph import run_build, stages_of
from shardkit.writers.stages.inputs import BuildInputs
from shardkit.writers.stages.languages import add_languages
from shardkit.writers.stages.losses import dedup_facts
from shardkit.writers.stages.pack import PACK, sums_of
from shardkit.writers.stages.publish import (
    UPLOAD,
    RemoteOutput,
    find_published,
    finish_published,
    publish,
)
from shardkit.writers.stages.text import TEXT
from shardkit.writers.stages.tokenize import TOKENIZE, Tokenized


class ArrowTable(Protocol):
    """A table of any library with Arrow's PyCapsule interface: pandas, polars, pyarrow, DuckDB."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


# Sequences and iterators, not any iterable, which a dict is, too: type checkers could not infer its keys.
Data: TypeAlias = Sequence[object] | Iterator[object] | ArrowTable
_RECIPE_KEYS = {
    key: f'a key of the recipe: {{"{key}": …}}, or overrides=["{key}=…"]' for key in Recipe.model_fields
}


@answers_keywords({**BUILD, **_RECIPE_KEYS})
@not_for_everyone()
def build(
    recipe: Recipe | Mapping[str, object] | str | PathLike[str] | Data,
    output: str | PathLike[str] | None = None,
    *,
    tokenizer: str | PathLike[str] | Mapping[str, object] | None = None,
    sequence_length: int | None = None,
    text: str | None = None,
    workers: int | None = None,
    overrides: Sequence[str] = (),
    engine: EngineName = "local",
    ray_address: str | None = None,
    task_seconds: float = TASK_SECONDS,
    retry_failed: bool = False,
    speculate: bool = True,
    progress: bool | Callable[[StageProgress], None] = True,
    replace: bool = False,
    storage: StorageOptions | None = None,
    documents: object = None,
) -> BuildResult:
    """Build the dataset of `recipe`: the path of a YAML file, a dict of the same keys, or a Recipe.

    `documents` are read in place of files: an iterable of dicts, a DataFrame, an Arrow table, or a dataset of
    Arrow or Hugging Face. Finished tasks are skipped. Relative paths in a dict start at the current folder.
    `output` replaces output.path: a folder, relative to the current one, or a URL; `overrides`, such as
    "seed=5", replace other keys. The arguments `engine` to `speculate` control how tasks run (`Execution`)
    and never change a byte, as long as the same splits fail. If the output has another dataset, `replace` is
    needed to replace it.

    Data may take the place of a recipe: a glob, a folder, a list of files, or such documents. Then `output`
    and `tokenizer` (a file, a model's name, or a mapping of the recipe's keys) are needed. `sequence_length`:
    tokens per row (default: 2,049). `text`: field with the text (default: found in files, "text" in
    documents). No document is removed: filters and duplicate removal are keys of a recipe, or `overrides`.
    Raises RecipeError, BuildError, MissingExtraError.
    """
    settings = {"tokenizer": tokenizer, "sequence_length": sequence_length, "text": text}
    recipe, documents = _with_data(recipe, documents, output, settings, storage)
    execution = Execution(
        workers=workers,
        engine=engine,
        ray_address=ray_address,
        task_seconds=task_seconds,
        retry_failed=retry_failed,
        speculate=speculate,
    )
    checked = load_recipe(recipe, overrides, for_documents=documents is not None)
    return _build(
        checked, documents, execution, output=output, progress=progress, replace=replace, storage=storage
    )


def _build(
    recipe: Recipe,
    documents: object,
    execution: Execution,
    *,
    output: str | PathLike[str] | None,
    progress: bool | Callable[[StageProgress], None],
    replace: bool,
    storage: StorageOptions | None,
) -> BuildResult:
    """Build all datasets of a checked recipe that their targets do not have yet."""
    start = time.perf_counter()
    targets = destinations_of(recipe, output, storage)
    work = work_of(recipe, recipe.resolve(default_work(recipe, output, storage)), storage, execution)
    given = _given(documents, recipe, work, execution, progress)
    splits, cuts = _scan(recipe, work, targets, storage, given, progress=progress is True)
    inputs = BuildInputs.of(recipe, splits, storage)
    places = zip(recipe.datasets(), targets, strict=True)
    cards = [_published_card(place, one, inputs, replace, execution) for one, place in places]
    found, ran = [card for card in cards if card is not None], None
    if len(found) < len(targets):
        check_disk(inputs, work, _first_folder(targets), execution, progress)
        scanned = time.perf_counter() - start
        clock = StageClock(_listener(progress, recipe, work), start)
        execution = execution.for_text(text_bytes(splits), recipe.memory)
        with clock as listener, open_runner(recipe, work, execution, listener) as runner:
            runner.seconds["scan"] = scanned
            _keep_cuts(cuts, runner.journal.work)
            remaining, built = _run_steps(inputs, runner)
            _publish_all(built, targets, runner, listener, replace=replace)
            ran = _ran(runner, clock, remaining)
            if recipe.work is None:
                runner.journal.remove()
        found = [dataset.facts for dataset in built]
    else:
        _remove_left(recipe, work)
    return _result(targets, found, time.perf_counter() - start, ran)


def _ran(runner: Runner, clock: StageClock, documents: Documents) -> Ran:
    times = clock.times(runner.seconds)
    cpu_seconds = {one.stage: None if one.tasks_reused else one.cpu_seconds for one in times}
    costs = tuple(step_costs(documents, cpu_seconds))
    return Ran(runner.seconds, runner.tasks, runner.tasks_reused, times, costs)


def _result(
    targets: Sequence[Path | RemoteOutput], cards: Sequence[DatasetCard], seconds: float, ran: Ran | None
) -> BuildResult:
    made = zip(targets, cards, strict=True)
    first, *others = [BuildResult.of_card(str(target), card, seconds, ran) for target, card in made]
    return dataclass_replace(first, others=tuple(others))


def build_unpublished(
    recipe: Recipe,
    *,
    workers: int | None = None,
    progress: bool = True,
    storage: StorageOptions | None = None,
) -> list[BuiltDataset]:
    """Run all stages of a sample's recipe in its local work folder; return its datasets, not published.

    Parts such as validation may be empty. Raises the errors that `build` would raise.
    """
    assert recipe.work is not None
    work, splits = Work.at(recipe.resolve(recipe.work)), scan.scan_inputs(recipe, storage)
    inputs = BuildInputs.of(recipe, splits, storage)
    clock = StageClock(_listener(progress, recipe, work), time.perf_counter())
    execution = Execution(workers=workers).for_text(text_bytes(splits), recipe.memory)
    with clock as listener, open_runner(recipe, work, execution, listener) as runner:
        return _run_steps(inputs, runner)[1]


def _listener(
    progress: bool | Callable[[StageProgress], None], recipe: Recipe, work: Work
) -> Listener[StageProgress]:
    """Return the listener for reports of stages; a display also gets reports of the whole build."""
    if progress is not True:
        return make_listener(progress)
    stages = [*stages_of(recipe), UPLOAD]
    return WholeBuild(make_listener(True), stages, work.local)


def _run_steps(inputs: BuildInputs, runner: Runner) -> tuple[Documents, list[BuiltDataset]]:
    """Place the files that tasks read, and run all steps.

    Returns the documents that are left, and the datasets, ready to publish.
    """
    inputs = place_files(inputs, runner.journal)

    def steps() -> tuple[Documents, list[BuiltDataset]]:
        documents = run_build(inputs, runner.run)
        check_unchanged(inputs.splits, documents.input_hashes)
        for files in inputs.joined:
            check_unchanged(files.splits, files.hashes)
        built = [_describe(inputs, documents, one) for one in documents.outputs]
        runner.require(file for dataset in built for file in dataset.links.values())
        return documents, built

    return runner.complete(steps)


def _first_folder(targets: Sequence[Path | RemoteOutput]) -> Path | None:
    return next((target for target in targets if isinstance(target, Path)), None)


def _publish_all(
    built: Sequence[BuiltDataset],
    targets: Sequence[Path | RemoteOutput],
    runner: Runner,
    listener: Listener[StageProgress],
    *,
    replace: bool,
) -> None:
    begin = time.perf_counter()
    for dataset, target in zip(built, targets, strict=True):
        publish_dataset(dataset, target, runner, listener, replace=replace)
    runner.seconds["publish"] = time.perf_counter() - begin


def _with_data(
    given: Recipe | Mapping[str, object] | str | PathLike[str] | Data,
    documents: object,
    output: str | PathLike[str] | None,
    settings: Mapping[str, Any],
    storage: StorageOptions | None,
) -> tuple[Recipe | Mapping[str, object] | str | PathLike[str], object]:
    """Return (recipe, documents or None) of a build: as given, or made for data that has no recipe."""
    named = [name for name, value in settings.items() if value is not None]
    if isinstance(given, (Recipe, Mapping)) and not named:
        return given, documents
    from shardkit.writers.init_recipe import names_data, recipe_of_data

    if names_data(given, has_settings=bool(named)):
        if documents is not None:
            raise RecipeError("documents: the first argument is data, too; give a recipe, or leave one out")
        return recipe_of_data(given, output=output, storage=storage, **settings)
    if named:
        key = {"sequence_length": "pack.sequence_length", "text": "inputs[0].text"}.get(named[0], named[0])
        raise RecipeError(
            f"{named[0]}: is for data without a recipe; set {key} in the recipe, or in `overrides`"
        )
    return cast(Recipe | Mapping[str, object] | str | PathLike[str], given), documents


def names_no_files(
    recipe: Recipe | Mapping[str, object] | str | PathLike[str], overrides: Sequence[str]
) -> bool:
    """Return whether a recipe has no input with a path: it was written for documents given in Python."""
    if isinstance(recipe, Recipe):
        return False
    given = plain_recipe(recipe, overrides)[0].get("inputs") or {}
    entry = given[0] if isinstance(given, list) and len(given) == 1 else given
    return isinstance(entry, Mapping) and "path" not in entry


def destinations_of(
    recipe: Recipe, output: str | PathLike[str] | None, storage: StorageOptions | None
) -> list[Path | RemoteOutput]:
    """Return the destination of each dataset of the recipe; raises RecipeError if one cannot be used.

    `output` replaces the path of the only output, or the folder of the parts of a split.
    """
    if output is not None and recipe.outputs:
        raise RecipeError(
            f"--output is one place, but the recipe has {len(recipe.outputs)} outputs; set outputs[].path "
            f"instead"
        )
    found: list[Path | RemoteOutput] = []
    for one in recipe.datasets():
        place = one.output.path
        if output is not None:
            place = str(output) if one.part is None else f"{str(output).rstrip('/')}/{one.part}"
        if is_remote(place):
            found.append(RemoteOutput(place.rstrip("/"), storage))
            continue
        folder = recipe.resolve(place) if output is None else local_path(place).absolute()
        if not folder.name:
            raise RecipeError(f"output.path: {folder} cannot hold a dataset; give a folder with a name")
        found.append(folder)
    return found


def default_work(recipe: Recipe, output: str | PathLike[str] | None, storage: StorageOptions | None) -> str:
    """Return the default work folder: next to the output, or in the recipe's folder for a remote output."""
    target = destinations_of(recipe, output, storage)[0]
    if isinstance(target, Path):
        return f"{target if recipe.split is None else target.parent}.work"
    url = target if recipe.split is None else RemoteOutput(target.url.rpartition("/")[0])
    return url.work_name


def _given(
    documents: object,
    recipe: Recipe,
    work: Work,
    execution: Execution,
    progress: bool | Callable[[StageProgress], None],
) -> list[InputFile] | None:
    """Write the documents that the caller gives into files of the work folder; None without documents."""
    if documents is None:
        return None
    lease_seconds = execution.lease_seconds
    return write_given(documents, recipe, work, lease_seconds=lease_seconds, progress=progress)


def _scan(
    recipe: Recipe,
    work: Work,
    targets: Sequence[Path | RemoteOutput],
    storage: StorageOptions | None,
    given: Sequence[InputFile] | None,
    *,
    progress: bool,
) -> tuple[list[Split], scan.KeptCuts]:
    """Return the splits of the inputs, and their cuts. The offsets of cuts in the work folder are reused.

    `given` are the files of documents given in Python.
    """
    cuts = scan.KeptCuts(work.read_note(scan.CUTS_NOTE))
    if given is not None:
        return scan.scan_inputs(recipe, storage, given=given), cuts
    splits = scan.scan_inputs(recipe, storage, kept=cuts, progress=progress)
    places = [target if isinstance(target, Path) else str(target) for target in targets]
    refuse_own_files(splits, work.place, *places)
    return splits, cuts


def _keep_cuts(cuts: scan.KeptCuts, work: Work) -> None:
    if cuts.changed:
        work.write_note(scan.CUTS_NOTE, cuts.to_bytes())


def refuse_own_files(splits: Sequence[Split], *places: Path | str) -> None:
    """Raise RecipeError if an input is in a place where the build writes: later builds would read outputs."""
    roots = [str(place if is_remote(place) else Path(place).resolve()).rstrip("/") for place in places]
    for split, identity in zip(splits, identities(split.input for split in splits), strict=True):
        for root in roots:
            if identity.startswith(root + "/"):
                raise RecipeError(
                    f"inputs[{split.source}].path: {split.file} is in {root}, where this build writes; use "
                    f"separate folders for inputs, output and work"
                )


def _published_card(
    output: Path | RemoteOutput,
    recipe: Recipe,
    inputs: BuildInputs,
    replace: bool,
    execution: Execution,
) -> DatasetCard | None:
    """Return the card of the dataset at `output` if this build would write the same one; None otherwise.

    Raises BuildError if there is another dataset and `replace` is not set, or a store cannot be reached.
    """
    found = find_published(output)
    if found is None or replace:
        return None
    damage = found.problem and f"which is damaged ({found.problem})"
    problem = damage
    if found.contents is not None:
        card, failed_splits = found.contents.card, recipe.max_failed_splits
        if execution.retry_failed:
            failed_splits = 0
        problem = _difference(card, recipe, inputs) or _failed(card, failed_splits) or damage
    if problem is not None or found.contents is None:
        raise BuildError(
            f"{output}: already holds a dataset, {problem}; choose another output, or use --replace "
            f"to replace it"
        )
    finish_published(output, found.contents)
    return found.contents.card


def _difference(card: DatasetCard | None, recipe: Recipe, inputs: BuildInputs) -> str | None:
    """Return how the dataset with this card differs from the one that this build would write, or None."""
    splits, tokenizer = inputs.splits, inputs.tokenizer
    if card is None or not card.has("recipe_digest"):
        return "not made by a recipe"
    try:
        if card.recipe_digest != digest_of(recipe.content()):
            return "made by another recipe"
        if card.shardkit_version != __version__:
            return f"made by shardkit {card.shardkit_version}"
        if not recipe.output.is_text and (tokenizer is None or card.tokenizer.digest != tokenizer.digest):
            return "made with another tokenizer"
        dedup = card.dedup
        nears = [] if dedup is None else [one for one in (*dedup.earlier_near, dedup.near) if one is not None]
        known = {digest for one in nears for digest in one.indexes}
        if recipe.dedup.near and known != {index.digest for index in inputs.indexes.values()}:
            return "made against other indexes"
        if card.filter_files != inputs.read_files:
            return "made with other lists, models or code of its filters"
        names = ("source", "files", "bytes", "digest")
        stated = [{name: getattr(entry, name) for name in names} for entry in card.inputs]
    except ShardError:
        return "whose card cannot be read"
    if stated != describe_inputs(recipe, splits, hash_splits(splits)):
        return "made from other input files"
    return None


def _failed(card: DatasetCard | None, allowed: int) -> str | None:
    """Return a description if the dataset lacks more than `allowed` splits, whose tasks failed; else None."""
    failed = Count() if card is None else card.funnel.quarantined.get(FAILED_SPLIT, Count())
    return f"made without {failed.documents:,} splits that failed" if failed.documents > allowed else None


def _remove_left(recipe: Recipe, work: Work) -> None:
    """Remove the default work folder if an earlier build crashed between publishing and removing it."""
    if recipe.work is None and work.folder.is_dir():
        with suppress(BuildError), Journal(work) as journal:  # BuildError: it is in use, or no work folder
            journal.remove()


_Shards = list[tuple[Commit, Sequence[ShardInfo]]]


def _count_text(documents: Documents, made: Outputs) -> tuple[Funnel, _Shards]:
    """Return the counts of all steps for a dataset of text, and its shards by task."""
    written = [TEXT.result(commit) for commit in made.texts]
    shards = [one.shards for one in written]
    funnel = Funnel(
        _ledgers(documents, "writing", [ledger for one in written for ledger in one.ledgers]),
        [0 for _ in documents.recipe.inputs],
        _removed(documents),
        None,
        {"documents": sum(shard.samples for one in shards for shard in one)},
    )
    return funnel, list(zip(made.texts, shards, strict=True))


def _count_rows(documents: Documents, made: Outputs) -> tuple[Funnel, _Shards]:
    """Return the counts of all steps for a dataset of tokens, and its shards by task."""
    recipe = made.recipe
    tokenized = [TOKENIZE.result(commit) for commit in made.tokenized]
    parts = [PACK.result(commit) for commit in made.packed]
    packed = sums_of(parts)
    tokens = [0 for _ in recipe.inputs]
    languages: list[list[Any]] = [[] for _ in recipe.inputs]
    lengths, row_padding, row_pieces = Histogram(), Histogram(), Histogram()
    for split, one in zip(documents.splits, tokenized, strict=True):
        tokens[split.source] += one.tokens
        languages[split.source].append(one.languages)
        lengths.add(one.lengths)
    for part in parts:
        row_padding.add(part.row_padding)
        row_pieces.add(part.row_pieces)
    trained = None
    if recipe.is_masked or recipe.has_masked_rows:
        trained = Trained(
            sum(one.trained for one in tokenized)
            if recipe.is_masked
            else sum(tokens) - packed.get("joined", 0),
            sum(part.trained for part in parts),
            sum(part.cropped_trained for part in parts),
            packed.get("repeated", 0),
        )
    labelled = all(counts is not None for of_source in languages for counts in of_source)
    funnel = Funnel(
        _ledgers(documents, "tokenizing", [one.ledger for one in tokenized]),
        tokens,
        _removed(documents),
        recipe.pack.sequence_length if recipe.output.has_rows else None,
        packed,
        {"lengths": lengths, "row_padding": row_padding, "row_pieces": row_pieces},
        [add_languages(of_source) for of_source in languages] if labelled else None,
        trained,
        _repeated(documents, tokenized) if recipe.repeats else (),
    )
    return funnel, [(commit, part.shards) for commit, part in zip(made.packed, parts, strict=True)]


def _removed(documents: Documents) -> dict[str, Count]:
    """Return by reason what steps over all documents removed, for reasons of the last files of documents."""
    lost = documents.lost
    removed = {reason: sum(lost[reason], Count()) for reason in documents.pending if reason in lost}
    for one in documents.amounts:
        reason = NOT_SAMPLED if one.sample else AMOUNT
        removed[reason] = removed.get(reason, Count()) + one.left_out
    return removed


def _repeated(documents: Documents, tokenized: Sequence[Tokenized]) -> list[RepeatFacts]:
    """Return the copies of documents of each source beyond the first ones."""
    copies = documents.by_source([one.repeated for one in tokenized])
    tokens = [0 for _ in copies]
    for split, one in zip(documents.splits, tokenized, strict=True):
        tokens[split.source] += one.repeated_tokens
    return [
        RepeatFacts(documents=count.documents, bytes=count.bytes, tokens=number)
        for count, number in zip(copies, tokens, strict=True)
    ]


def _ledgers(documents: Documents, last: str, written: Sequence[Ledger]) -> dict[str, list[Ledger]]:
    """Return one ledger per source for each step. `written` has the ledgers, by split, of the last step."""
    of_splits = {step.title: list(step.ledgers) for step in documents.written}
    of_splits[last] = list(written)
    found = {name: [Ledger() for _ in documents.recipe.inputs] for name in of_splits}
    for name, ledgers in of_splits.items():
        for split, ledger in zip(documents.splits, ledgers, strict=True):
            found[name][split.source].merge(ledger)
    return found


def _describe(inputs: BuildInputs, documents: Documents, made: Outputs) -> BuiltDataset:
    """Return one dataset, ready to publish; raises BuildError if it has no samples."""
    recipe = made.recipe
    funnel, shards = _count_text(documents, made) if recipe.output.is_text else _count_rows(documents, made)
    funnel.check()
    tables = _tables(recipe, documents, made)
    tables |= {name: commit for commit in made.side_files for name in commit.outputs}

    def describe(manifest: Manifest) -> DatasetCard:
        may_be_empty = recipe.part not in (None, TRAIN) and any(one.is_sample for one in recipe.inputs)
        if not manifest.samples and not may_be_empty:
            raise BuildError(_nothing_to_write(recipe))
        return make_card(
            recipe,
            manifest,
            funnel,
            tokenizer=made.tokenizer,
            inputs=describe_inputs(recipe, inputs.splits, documents.input_hashes),
            partitions=len(made.packed),
            amounts=documents.amounts,
            split=documents.parts,
            dedup=dedup_facts(documents),
            filters=filters_card([one.filters for one in step.filtering] for step in documents.written),
            filter_files=inputs.read_files,
            buckets=None if documents.labels is None else documents.labels.facts,
        )

    return assemble(recipe, shards, tables, describe)


def _nothing_to_write(recipe: Recipe) -> str:
    if recipe.part in (None, TRAIN):
        if recipe.output.where is not None:
            asked = "; ".join(f"{name}: {_condition(one)}" for name, one in recipe.output.where.items())
            return f"output.where: no document matches {asked}; there is nothing to write"
        return "no document with a token is left; there is nothing to write"
    return f"split: no document is in {recipe.part}; raise its share, or raise `similarity`"


def _condition(asked: Sequence[str] | Bounds) -> str:
    if not isinstance(asked, Bounds):
        return " or ".join(asked)
    least, most = asked.min, asked.max
    found = [f"{word} {one:g}" for word, one in (("at least", least), ("at most", most)) if one is not None]
    return " and ".join(found)


def publish_dataset(
    dataset: BuiltDataset,
    target: Path | RemoteOutput,
    runner: Runner,
    listener: Listener[StageProgress],
    *,
    replace: bool,
) -> None:
    """Publish a dataset at `target`; raises BuildError if another driver took over the work folder."""
    runner.journal.check_lease()
    files = (dataset.manifest, dataset.links, dataset.texts)
    publish(target, *files, replace=replace, run=runner.run, listener=listener)


def _tables(recipe: Recipe, documents: Documents, made: Outputs) -> dict[str, Commit]:
    """Return a commit for each Parquet file next to the shards, by its name; it has only that one output."""
    tables = {provenance_name(n): commit for n, commit in enumerate(made.provenance)}
    if not made.has_removed:
        return tables
    tables |= {part_name(DUPLICATES_FOLDER, n): commit for n, commit in enumerate(made.duplicates)}
    annotated = documents.joined or documents.cleaned
    of_splits = {ANNOTATIONS_FOLDER: (ANNOTATIONS_FILE, annotated)} if recipe.annotate else {}
    judged = [  # by `Filtering`: readers drop documents, too
        commit for step in documents.written for commit in step.judged if commit.result["filters"]["dropped"]
    ]
    of_splits[DROPPED_FOLDER] = DROPPED_FILE, judged
    for folder, (name, commits) in of_splits.items():
        for n, commit in enumerate(commits):
            facts = facts_of({}, {name: commit.outputs[name]})
            tables[part_name(folder, n)] = dataclass_replace(commit, facts=facts)
    return tables
