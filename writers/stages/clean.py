"""Stage `clean`: reads and filters a split, and writes the files that later stages need, with a ledger.

There is one task per split. It is named after its file and its start in the file, so that a new file adds
only its own tasks; for a group of small files (`group_small_files`), after the first one. A task writes the
files of a pass of filters (passes.py) into its folder, and
  quarantine.jsonl     unreadable records; often empty
  annotations.parquet  with `annotate`: the value of every filter for every document (rows/annotations.py)
A task holds one batch, one record and a run of keys, for a split of any size.

If the task of a split fails in every attempt (by an error, by a crash of its process, or by a timeout), the
build ends, unless `max_failed_splits` allows the failure. Then a task of stage FAILED_SPLITS replaces it: it
reads no record, and counts the whole split as quarantined.

Tasks of stage SIDE_FILES join the quarantines of all splits into one file, and also the files of filters.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa

from shardkit.errors import BuildError
from shardkit.writers.dedup.exact import KEYS
from shardkit.writers.dedup.outcomes import SplitRemovals
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.digests import DecidesNoByte, MemoryBytes, RecipeKey
from shardkit.writers.execution.progress import PULSE
from shardkit.writers.execution.stage import Fallback, RunTasks, Stage
from shardkit.writers.filters.chain import FilterChain
from shardkit.writers.inputs.fields import NamedFields, check_named_fields, warn_of_notes
from shardkit.writers.inputs.files import version_now
from shardkit.writers.inputs.masking import Masking
from shardkit.writers.inputs.read_by_function import UserReader
from shardkit.writers.inputs.readers import SuspectDataError, SuspectFilesError, read_parts
from shardkit.writers.inputs.scan import Split, hash_split, parts_of
from shardkit.writers.recipe.inputs import InputConfig
from shardkit.writers.recipe.recipe import Recipe
from shardkit.writers.rows.annotations import ANNOTATIONS_FILE, AnnotationFile
from shardkit.writers.rows.documents import (
    DOCUMENT_SCHEMA,
    MARKED_SCHEMA,
)
from shardkit.writers.rows.ledger import (
    FAILED_SPLIT,
    BadRecord,
    Count,
    Ledger,
    Quarantine,
    by_loss,
    check_bad_fraction,
    first_of,
)
from shardkit.writers.stages import gather
from shardkit.writers.stages.flow import Build, Cleaned, Documents, Step, Written
from shardkit.writers.stages.gather import GATHER, gather_splits, merged, neighbors
from shardkit.writers.stages.id_tables import IdTable
from shardkit.writers.stages.labels import Buckets
from shardkit.writers.stages.needs import DOCUMENTS, Needs
from shardkit.writers.stages.passes import PassFiles, PassSettings
from shardkit.writers.stages.record_counts import count_records

QUARANTINE_FILE = "quarantine.jsonl"

JOINED_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class CleanSettings:
    """The settings of a recipe that affect how the splits of one input are read and filtered."""

    input: Annotated[InputConfig, RecipeKey("inputs")]
    first_pass: Annotated[PassSettings, RecipeKey()]
    max_bad_fraction: float
    max_record_bytes: int
    memory_bytes: MemoryBytes

    @classmethod
    def of(cls, recipe: Recipe, source: int) -> CleanSettings:
        """Return the settings for input number `source`, without the keys that locate its files."""
        elsewhere = {"path": "", "exclude": (), "base": None, "source": None, "format": None}
        return cls(
            recipe.inputs[source].model_copy(update=elsewhere),
            PassSettings.of(recipe),
            recipe.max_bad_fraction,
            recipe.max_record_bytes,
            recipe.memory,
        )


def read_and_filter(documents: Documents, build: Build) -> Documents:
    """Read and filter the records of all splits; run the build's other tasks (`beside`) at the same time.

    Raises RecipeError if no record of a file has a field that the recipe names. Raises BuildError if too many
    records are unreadable, or if no document is left.
    """
    recipe, inputs = documents.recipe, build.inputs
    splits = count_records(documents.splits, build.run)
    limit = recipe.max_failed_splits
    fallback = Fallback(FAILED_SPLITS, limit, "max_failed_splits") if limit else None
    folder = inputs.folder_of_filters
    settings = [CleanSettings.of(recipe, source) for source in range(len(recipe.inputs))]
    made = []
    for split in splits:
        own = settings[split.source]
        render = None if inputs.masking is None else inputs.masking.of_input(own.input)
        scores = own.first_pass.scores_of(recipe, documents.scores)
        files = inputs.files_of(own.first_pass.filters) | inputs.files_of_reader(split.source)
        args = split, own, files, folder, render, scores
        task, resources = CLEAN.task(split.task_name, split.bytes, *args), own.first_pass.resources
        made.append(replace(task, fallback=fallback, resources=resources))
    beside, cleaned = build.run(build.beside, made)
    found = _check(recipe, splits, cleaned)
    ranges = neighbors(splits, found.kept, build.limits, annotate=recipe.annotate)
    joined, commits = gather_splits(build.run, ranges, splits, cleaned, found.languages)
    counts = [merged([CLEAN.result(cleaned[number]) for number in one]) for one in ranges]
    return replace(
        documents,
        splits=joined,
        beside=beside,
        input_hashes=found.hashes,
        written=[Written("cleaning", commits, [one.ledger for one in counts], counts, cleaned)],
        single=sum(one.documents for one in found.kept),
        removals=[SplitRemovals() for _ in joined],
        labels=_given_labels(recipe),
    )


@dataclass(slots=True)
class _Found:
    """Holds what later steps need of the results of all splits: by split; `hashes` by part of a split."""

    kept: list[Count] = field(default_factory=list)
    languages: list[tuple[str, ...] | None] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)


def _given_labels(recipe: Recipe) -> Buckets | None:
    """Return the label rules if the recipe sets the thresholds of its `buckets` filter, else None."""
    config = recipe.buckets
    if config is None or config.is_fitted:
        return None
    return Buckets(config, [score.thresholds for score in config.scores])


def _check(recipe: Recipe, splits: Sequence[Split], cleaned: Sequence[Commit]) -> _Found:
    """Check limits and named fields on the totals of all splits; raise BuildError or RecipeError.

    The results are parsed one by one and not held, because there may be a million splits.
    """
    total, found, names = Ledger(), _Found(), list[str]()
    facts: list[Mapping[str, Any]] = []
    known: dict[tuple[str, ...], tuple[str, ...]] = {}  # many splits have the same languages
    for split, commit in zip(splits, cleaned, strict=True):
        one = CLEAN.result(commit)
        total.merge(one.ledger)
        facts += one.fields
        labels = None if one.languages is None else tuple(one.languages)
        found.kept.append(one.ledger.kept)
        found.languages.append(labels if labels is None else known.setdefault(labels, labels))
        found.hashes += one.inputs
        names += [split.file] if FAILED_SPLIT in one.ledger.quarantined else []
    check_named_fields(parts_of(splits), facts)
    warn_of_notes(parts_of(splits), facts)
    check_bad_fraction("all inputs", total, recipe.max_bad_fraction)
    failed = total.quarantined.get(FAILED_SPLIT, Count()).documents
    if failed > recipe.max_failed_splits:  # `Fallback` only limits failures in this run
        raise BuildError(
            f"{failed:,} splits failed, more than max_failed_splits {recipe.max_failed_splits:,} allows "
            f"({', '.join(sorted(names))}); raise it, or run again with --retry-failed"
        )
    if not total.kept.documents:
        raise BuildError(_nothing_left(total, cleaned))
    return found


def _nothing_left(total: Ledger, cleaned: Sequence[Commit]) -> str:
    message = f"no document is left of {total.read.documents:,} that were read"
    message += "; loosen or remove a filter" if total.dropped else ""
    if not total.read.documents:
        message += ": the files of `inputs` have no records; name others"
    for fate, reasons in (("dropped", total.dropped), ("quarantined", total.quarantined)):
        message += f"; {fate}: {by_loss(reasons)}" if reasons else ""
    quarantines = (
        commit.files / QUARANTINE_FILE for commit in cleaned if commit.outputs[QUARANTINE_FILE].bytes
    )
    first = next((first_of(file.read_bytes()) for file in quarantines), None)
    return f"{message} (first: {first})" if first else message


def join_side_files(run: RunTasks, cleaned: Sequence[Commit]) -> list[Commit]:
    """Join the quarantines, and each kind of .jsonl file of filters, over all splits in their order.

    Returns commits with one file each, under its name in the dataset; an empty quarantine is left out. Files
    are joined in groups of 64, and the results again, until one file is left.
    """
    names = sorted({name for commit in cleaned for name in commit.outputs if name.endswith(".jsonl")})
    made = {
        name: [one for one in cleaned if name in one.outputs and one.outputs[name].bytes] for name in names
    }
    open_names = [name for name in names if made[name] or name != QUARANTINE_FILE]
    level = 0
    while open_names:
        stage = SIDE_FILES.step(f"merge-{level}") if level else SIDE_FILES
        tasks, of_names = [], []
        for name in open_names:
            for number, at in enumerate(range(0, max(1, len(made[name])), JOINED_AT_ONCE)):
                files = [commit.file(name) for commit in made[name][at : at + JOINED_AT_ONCE]]
                size = sum(commit.outputs[name].bytes for commit in made[name][at : at + JOINED_AT_ONCE])
                tasks.append(stage.task(f"{Path(name).stem}-{number:05d}", size, name, files))
                of_names.append(name)
        [commits] = run(tasks)
        for name in open_names:
            made[name] = [commit for commit, whose in zip(commits, of_names, strict=True) if whose == name]
        open_names = [name for name in open_names if len(made[name]) > 1]
        level += 1
    return [commit for name in names for commit in made[name]]


def join_files(folder: Path, name: str, files: Sequence[Artifact]) -> None:
    """Concatenate files in order into one file `name` in `folder`."""
    with (folder / name).open("wb") as joined:
        for file in files:
            with file.open() as part:
                shutil.copyfileobj(part, joined, 1 << 20)


SIDE_FILES = Stage("side_files", "write", join_files, cost=0.2)


def clean_split(
    folder: Path,
    split: Annotated[Split, RecipeKey()],
    settings: Annotated[CleanSettings, RecipeKey()],
    filter_files: Mapping[str, str],
    filter_folder: Annotated[Artifact, DecidesNoByte("where the files of filters are")],
    masking: Masking | None = None,
    scores: Sequence[IdTable] = (),
    failure: str | None = None,
) -> Cleaned:
    """Read and filter a split; write its files into `folder`, which exists and is empty.

    `filter_files` has the digests of the files of filters and of the reader by path
    (`inputs.filter_files`); relative paths start at `filter_folder`. With `failure`, an error message, no
    record is read, and the whole split is counted as failed. Raises BuildError if more records are
    unreadable than `max_bad_fraction` allows.
    """
    chain = settings.first_pass.chain(filter_files, filter_folder, scores)
    reader = settings.input.reader
    if reader is not None and failure is None:
        function = reader.make(f"inputs[{split.source}].reader", filter_folder.path)
        return _clean(folder, split, settings, chain, masking, function=function)
    try:
        return _clean(folder, split, settings, chain, masking, failure=failure)
    except SuspectFilesError as found:  # discard the split, read it without these
        return _clean(folder, split, settings, chain, masking, found.suspects)


CLEAN = Stage("clean", "read and filter", clean_split, cost=150)


def clean_failed(
    folder: Path,
    failed: str,
    args: Annotated[Mapping[str, Any], DecidesNoByte("`failed` is the digest of these arguments")],
    error: Annotated[str, DecidesNoByte("a later build finds the split without it")],
) -> Cleaned:
    """Write the files of a split whose task failed, without records; see `Fallback`."""
    return clean_split(folder, **{**args, "failure": error})


FAILED_SPLITS = Stage("failed_splits", "read and filter", clean_failed)


def _clean(
    folder: Path,
    split: Split,
    settings: CleanSettings,
    chain: FilterChain,
    masking: Masking | None,
    suspects: Mapping[str, SuspectDataError] | None = None,
    *,
    failure: str | None = None,
    function: UserReader | None = None,
) -> Cleaned:
    ledger, fields = Ledger(), [NamedFields(settings.input) for _ in split.parts]
    allowed = settings.max_bad_fraction if failure is None else 1.0
    schema = DOCUMENT_SCHEMA if masking is None else MARKED_SCHEMA
    versions = [version_now(part.input) for part in split.parts]
    with (
        Quarantine(folder / QUARANTINE_FILE, max_bad_fraction=allowed) as quarantine,
        AnnotationFile(folder / ANNOTATIONS_FILE)
        if settings.first_pass.annotate
        else nullcontext() as annotations,
        PassFiles(folder, settings.first_pass, chain, schema) as files,
    ):
        for batch in _read(split, settings, ledger, quarantine, fields, suspects, masking, failure, function):
            filtered = chain.apply(batch)
            files.write(filtered, ledger)
            if annotations is not None:
                annotations.write(batch, filtered)
            PULSE.tell(ledger)
    ledger.check(f"{split.file} (split {split.index})")
    found, hashes = [one.to_dict() for one in fields], [hash_split(part) for part in split.parts]
    # The hashes must be of the bytes that were just read, so no file may have changed in the meantime. The
    # end of the build checks that these hashes are those of the files found at its start.
    for part, before in zip(split.parts, versions, strict=True):
        if version_now(part.input) != before:
            raise BuildError(f"{part.path}: changed while it was read; run the build again")
    made = files.result(ledger)
    return Cleaned(
        made.ledger, made.filters, made.languages, made.urls, made.costs, fields=found, inputs=hashes
    )


def _read(
    split: Split,
    settings: CleanSettings,
    ledger: Ledger,
    quarantine: Quarantine,
    fields: Sequence[NamedFields],
    suspects: Mapping[str, SuspectDataError] | None,
    masking: Masking | None,
    failure: str | None,
    function: UserReader | None,
) -> Iterator[pa.RecordBatch]:
    """Yield the records of a split; with `failure`, only quarantine the whole split as one entry."""
    if failure is None:
        yield from read_parts(
            split,
            settings.input,
            ledger,
            quarantine,
            max_record_bytes=settings.max_record_bytes,
            max_bad_fraction=settings.max_bad_fraction,
            fields=fields,
            suspects=suspects or {},
            masking=masking,
            memory_bytes=settings.memory_bytes,
            function=function,
        )
        return
    assert not split.rest, "files are not grouped where splits may fail"
    is_table = split.format == "parquet"
    part = f"{'row groups' if is_table else 'bytes'} {split.start:,} to {split.end:,} were not read"
    start = None if is_table else split.start
    quarantine.add(BadRecord(split.file, split.first_record, start, FAILED_SPLIT, f"{part}: {failure}", ""))
    ledger.read += Count(1, split.bytes)
    ledger.quarantine(FAILED_SPLIT, 1, split.bytes)


def needs(n: Needs) -> None:
    """Add the requests and bytes of cleaning; raw files are outside the work folder and not counted."""
    c = n.corpus
    keys_bytes = (1 + ("url" in c.steps)) * c.documents * KEYS.row_bytes
    files = 3 + ("url" in c.steps) + c.shape.side_files + c.shape.columns
    written = c.text_bytes * DOCUMENTS + keys_bytes
    n.add(CLEAN, c.splits, n.looked_up * c.splits, 0, files=files, written=written)
    gather.needs(n)


STEP = Step(lambda recipe: (CLEAN,) if recipe.annotate else (CLEAN, GATHER), read_and_filter, needs)
