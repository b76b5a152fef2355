"""Stage `clean`: read and filter a split, and write what later stages need, with a ledger that adds up.

One task a split, named after its file and its start in the file, so that a new file costs only its own tasks;
of a group of small files (`group_small_files`) after the first one.
The folder of a task receives
  documents.arrow   kept documents in record order (Arrow IPC file, DOCUMENT_SCHEMA, zstd)
  keys.run          KEYS, one row for each kept document: what exact dedup needs
  url_keys.run      with `dedup.url`: the same of each kept document with a URL, by its URL
  quarantine.jsonl  unreadable records; often empty
  languages.npy     with a language filter: the language of each kept document (languages.py)
  buckets.npy       with a buckets filter: the scores of each kept document (buckets.py)
  dropped.parquet  with filters: the documents that they drop, and why (removed.py)
  annotations.parquet  with `annotate`: the value of every filter for every document (rows/annotations.py)
Memory is one batch, one record and a run of keys, for a split of any size.

A split whose task fails in every attempt, by an error, by ending its process or by taking too long, ends the
build unless `max_failed_splits` allows it. Then a task of stage FAILED_SPLITS stands in for it: it reads no
record, and books the whole split as quarantined.

What is published as one file, the quarantine above all, is joined by tasks of stage SIDE_FILES.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from shardkit.errors import BuildError
from shardkit.writers.dedup.exact import KEYS
from shardkit.writers.dedup.outcomes import SplitRemovals
from shardkit.writers.dedup.signatures import word_keys
from shardkit.writers.dedup.urls import URL_KEYS, Tracking, url_keys
from shardkit.writers.exchange.exchange import RunWriter
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.digests import DecidesNoByte, MemoryBytes, RecipeKey
from shardkit.writers.execution.progress import PULSE
from shardkit.writers.execution.stage import Fallback, RunTasks, Stage
from shardkit.writers.filters.base import FilterSettings
from shardkit.writers.filters.buckets import BucketsConfig
from shardkit.writers.filters.chain import FilterChain
from shardkit.writers.inputs.chat import Masking
from shardkit.writers.inputs.fields import NamedFields, check_named_fields, warn_of_notes
from shardkit.writers.inputs.files import version_now
from shardkit.writers.inputs.readers import SuspectDataError, SuspectFilesError, read_parts
from shardkit.writers.inputs.scan import Split, hash_split, parts_of
from shardkit.writers.kernels.text_arrays import text_offsets
from shardkit.writers.kernels.words import normalization_version
from shardkit.writers.recipe.recipe import InputConfig, Recipe
from shardkit.writers.rows.annotations import ANNOTATIONS_FILE, AnnotationFile
from shardkit.writers.rows.documents import (
    DOCUMENT_OPTIONS,
    DOCUMENT_SCHEMA,
    DOCUMENTS_FILE,
    MARKED_SCHEMA,
    content_ranks,
    text_digests,
)
from shardkit.writers.rows.dropped_file import DROPPED_FILE, DroppedFile
from shardkit.writers.rows.filtered import Filtered
from shardkit.writers.rows.funnel import FilterCounts
from shardkit.writers.rows.ledger import (
    FAILED_SPLIT,
    BadRecord,
    Count,
    Ledger,
    Quarantine,
    check_bad_fraction,
    first_of,
)
from shardkit.writers.stages.flow import Build, Cleaned, Documents, Step
from shardkit.writers.stages.labels import BUCKETS_FILE, BucketFile, Buckets
from shardkit.writers.stages.languages import LANGUAGES_FILE, LanguageFile
from shardkit.writers.stages.needs import DOCUMENTS, Needs
from shardkit.writers.stages.record_counts import count_records
from shardkit.writers.stages.score_tables import ScoreTable

QUARANTINE_FILE = "quarantine.jsonl"

JOINED_AT_ONCE = 64

_KEYS_MEMORY_BYTES = 48 << 20  # to sort keys in; a third is a run


@dataclass(frozen=True, slots=True)
class CleanSettings:
    """What cleaning reads of a recipe for the splits of one input.

    `exact_text` is "raw", or the version of the normalization that keys are made with. `url_parameters` is
    None in builds that compare no URLs. `seed` selects the documents that filters count and show, None
    without filters.
    """

    input: Annotated[InputConfig, RecipeKey("inputs")]
    filters: tuple[tuple[str, FilterSettings], ...]
    annotate: bool
    exact_text: Annotated[str, RecipeKey("dedup.exact.text")]
    url_parameters: Annotated[Sequence[str] | None, RecipeKey("dedup.url.drop_parameters")]
    max_bad_fraction: float
    max_record_bytes: int
    seed: int | None
    memory_bytes: MemoryBytes

    @classmethod
    def of(cls, recipe: Recipe, source: int) -> CleanSettings:
        """Return those of an input, without what says where its files are, which splits know."""
        exact, url, filters = recipe.dedup.exact, recipe.dedup.url, recipe.filter_chain()
        elsewhere = {"path": "", "exclude": (), "base": None, "source": None, "format": None}
        return cls(
            recipe.inputs[source].model_copy(update=elsewhere),
            filters,
            recipe.annotate,
            normalization_version() if exact is not None and exact.text == "normalized" else "raw",
            None if url is None else url.drop_parameters,
            recipe.max_bad_fraction,
            recipe.max_record_bytes,
            recipe.seed if filters else None,
            recipe.memory,
        )


def read_and_filter(documents: Documents, build: Build) -> Documents:
    """Read the records of all splits and judge them; other tasks of the build run beside.

    RecipeError if no record of a file has a field that the recipe names. BuildError if too much is
    unreadable, or if nothing is left.
    """
    recipe, inputs = documents.recipe, build.inputs
    splits = count_records(documents.splits, build.run)
    limit = recipe.max_failed_splits
    fallback = Fallback(FAILED_SPLITS, limit, "max_failed_splits") if limit else None
    folder = Artifact(recipe.folder) if inputs.filter_folder is None else inputs.filter_folder
    settings = [CleanSettings.of(recipe, source) for source in range(len(recipe.inputs))]
    made = []
    for split in splits:
        own = settings[split.source]
        render = None if inputs.masking is None else inputs.masking.of_input(own.input)
        args = split, own, inputs.filter_files, folder, render, documents.scores
        made.append(replace(CLEAN.task(split.task_name, split.bytes, *args), fallback=fallback))
    beside, cleaned = build.run(build.beside, made)
    counts = [CLEAN.result(commit) for commit in cleaned]
    _check(recipe, splits, cleaned, counts)
    return replace(
        documents,
        splits=splits,
        beside=beside,
        cleaned=cleaned,
        counts=counts,
        files=cleaned,
        removals=[SplitRemovals() for _ in splits],
        labels=_given_labels(recipe),
    )


def _given_labels(recipe: Recipe) -> Buckets | None:
    """How scores become labels, where the recipe has the edges of a `buckets` filter."""
    config = recipe.buckets
    if config is None or config.is_fitted:
        return None
    return Buckets(config, [score.thresholds for score in config.scores])


def _check(
    recipe: Recipe, splits: Sequence[Split], cleaned: Sequence[Commit], counts: Sequence[Cleaned]
) -> None:
    """Check the counts of all splits together."""
    total = Ledger()
    for one in counts:
        total.merge(one.ledger)
    facts = [fields for one in counts for fields in one.fields]
    check_named_fields(parts_of(splits), facts)
    warn_of_notes(parts_of(splits), facts)
    check_bad_fraction("all inputs", total, recipe.max_bad_fraction)
    failed = total.quarantined.get(FAILED_SPLIT, Count()).documents
    if failed > recipe.max_failed_splits:  # found finished, or made by several processes
        pairs = zip(splits, counts, strict=True)
        names = sorted(split.file for split, one in pairs if FAILED_SPLIT in one.ledger.quarantined)
        raise BuildError(
            f"{failed:,} splits failed, more than max_failed_splits {recipe.max_failed_splits:,} allows "
            f"({', '.join(names)}); raise it, or run again with --retry-failed"
        )
    if not total.kept.documents:
        raise BuildError(_nothing_left(total, cleaned))


def _nothing_left(total: Ledger, cleaned: Sequence[Commit]) -> str:
    message = f"no document is left of {total.read.documents:,} that were read"
    message += "; loosen or remove a filter" if total.dropped else ""
    for fate, reasons in (("dropped", total.dropped), ("quarantined", total.quarantined)):
        by_loss = sorted(reasons.items(), key=lambda item: (-item[1].documents, item[0]))
        lost = [f"{count.documents:,} by {reason}" for reason, count in by_loss]
        message += f"; {fate}: {', '.join(lost)}" if lost else ""
    quarantines = (
        commit.files / QUARANTINE_FILE for commit in cleaned if commit.outputs[QUARANTINE_FILE].bytes
    )
    first = next((first_of(file.read_bytes()) for file in quarantines), None)
    return f"{message} (first: {first})" if first else message


def join_side_files(run: RunTasks, cleaned: Sequence[Commit]) -> list[Commit]:
    """The quarantine, if any, and what filters report in lines, each joined over all splits, in their order.

    A commit has one file, by its name in the dataset. Files are joined by 64, and these again, down to one.
    """
    names = sorted({name for commit in cleaned for name in commit.outputs if name.endswith(".jsonl")})
    made = {name: [commit for commit in cleaned if commit.outputs[name].bytes] for name in names}
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
    """Write files one after the other as `name`."""
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
    scores: Sequence[ScoreTable] = (),
    failure: str | None = None,
) -> Cleaned:
    """Write the files of a split into `folder`, which exists and is empty.

    `filter_files` are what its function of that name returns; relative paths are in `filter_folder`.
    With a `failure`, no record is read, and the split is booked as failed for that reason. BuildError when
    more of the split is unreadable than `max_bad_fraction` allows.
    """
    for name in filter_files:
        if not Path(name).is_absolute():
            (filter_folder / name).local()
    chain = FilterChain(
        settings.filters,
        filter_folder.path,
        annotate=settings.annotate,
        seed=settings.seed or 0,
        lookups=[table.open() for table in scores],
    )
    try:
        return _clean(folder, split, settings, chain, masking, failure=failure)
    except SuspectFilesError as found:  # at the end of the untrusted data, so start again without it
        return _clean(folder, split, settings, chain, masking, found.suspects)


CLEAN = Stage("clean", "read and filter", clean_split, cost=150)


def clean_failed(
    folder: Path,
    failed: str,
    args: Annotated[Mapping[str, Any], DecidesNoByte("`failed` is the digest of what they decide")],
    error: Annotated[str, DecidesNoByte("a later build finds the split without it")],
) -> Cleaned:
    """Book a split whose task failed; see `Fallback`."""
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
) -> Cleaned:
    ledger, fields = Ledger(), [NamedFields(settings.input) for _ in split.parts]
    counts = FilterCounts.of_rules(chain.reasons, chain.edits)
    allowed = settings.max_bad_fraction if failure is None else 1.0
    schema = DOCUMENT_SCHEMA if masking is None else MARKED_SCHEMA
    versions = [version_now(part.input) for part in split.parts]
    with (
        Quarantine(folder / QUARANTINE_FILE, max_bad_fraction=allowed) as quarantine,
        _KeyFiles(folder, settings) as keys,
        DroppedFile(folder / DROPPED_FILE) if settings.filters else nullcontext() as dropped,
        AnnotationFile(folder / ANNOTATIONS_FILE) if settings.annotate else nullcontext() as annotations,
        LanguageFile(folder / LANGUAGES_FILE) if chain.has_languages else nullcontext() as languages,
        _bucket_file(folder, settings) as buckets,
        ExitStack() as stack,
        pa.OSFile(str(folder / DOCUMENTS_FILE), "wb") as file,
        pa.ipc.new_file(file, schema, options=DOCUMENT_OPTIONS) as documents,
    ):
        sides = {name: stack.enter_context((folder / name).open("wb")) for name in chain.side_files}
        for batch in _read(split, settings, ledger, quarantine, fields, suspects, masking, failure):
            filtered = chain.apply(batch)
            kept = filtered.kept
            _book(filtered, ledger)
            counts.add(filtered)
            for name, rows in filtered.side_rows.items():
                sides[name].writelines(orjson.dumps(row) + b"\n" for row in rows)
            if dropped is not None:
                for one in filtered.removed:
                    dropped.write(one)
            if annotations is not None:
                annotations.write(batch, filtered)
            if kept.num_rows:
                documents.write_batch(kept)
                keys.write(kept)
                if languages is not None:
                    assert filtered.languages is not None
                    languages.write(filtered.languages)
                if buckets is not None:
                    assert filtered.scores is not None
                    buckets.write(kept, filtered.scores)
            PULSE.tell(ledger)
    ledger.check(f"{split.file} (split {split.index})")
    labels = None if languages is None else languages.labels
    found, hashes = [one.to_dict() for one in fields], [hash_split(part) for part in split.parts]
    # The hashes must be those of what was read just now. That this is what was found is checked at the end.
    for part, before in zip(split.parts, versions, strict=True):
        if version_now(part.input) != before:
            raise BuildError(f"{part.path}: changed while it was read; run the build again")
    return Cleaned(ledger, counts, found, hashes, labels, keys.urls)


class _KeyFiles:
    """Writes the keys of documents, and those of their URLs if these are compared; `urls` have one."""

    def __init__(self, folder: Path, settings: CleanSettings) -> None:
        self.urls = self._rows = 0
        self._normalized = settings.exact_text != "raw"
        self._stack, memory_bytes = ExitStack(), _KEYS_MEMORY_BYTES
        self._texts = self._stack.enter_context(
            RunWriter(folder / KEYS.file, KEYS, memory_bytes=memory_bytes)
        )
        self._urls: RunWriter | None = None
        if settings.url_parameters is not None:
            self._tracking = Tracking.of(settings.url_parameters)
            urls = RunWriter(folder / URL_KEYS.file, URL_KEYS, memory_bytes=memory_bytes)
            self._urls = self._stack.enter_context(urls)

    def write(self, batch: pa.RecordBatch) -> None:
        """Append the keys of the next documents."""
        keys = exact_keys(batch, self._normalized, first_row=self._rows)
        self._texts.write(keys)
        self._rows += len(keys)
        if self._urls is not None:
            keys = url_keys(keys, batch.column("url"), self._tracking)
            self._urls.write(keys)
            self.urls += len(keys)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)


def _bucket_file(folder: Path, settings: CleanSettings) -> AbstractContextManager[BucketFile | None]:
    for _, config in settings.filters:
        if isinstance(config, BucketsConfig):
            assert settings.seed is not None
            return BucketFile(folder / BUCKETS_FILE, len(config.scores), settings.seed)
    return nullcontext()


def _read(
    split: Split,
    settings: CleanSettings,
    ledger: Ledger,
    quarantine: Quarantine,
    fields: Sequence[NamedFields],
    suspects: Mapping[str, SuspectDataError] | None,
    masking: Masking | None,
    failure: str | None,
) -> Iterator[pa.RecordBatch]:
    """The records of a split; of one that failed none, but one entry in the quarantine for all of it."""
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
        )
        return
    assert not split.rest, "files are not grouped where splits may fail"
    is_table = split.format == "parquet"
    part = f"{'row groups' if is_table else 'bytes'} {split.start:,} to {split.end:,} were not read"
    start = None if is_table else split.start
    quarantine.add(BadRecord(split.file, split.first_record, start, FAILED_SPLIT, f"{part}: {failure}", ""))
    ledger.read += Count(1, split.bytes)
    ledger.quarantine(FAILED_SPLIT, 1, split.bytes)


def _book(filtered: Filtered, ledger: Ledger) -> None:
    """Book what was kept, dropped, and cut out of documents."""
    for reason, count in filtered.dropped.items():
        ledger.drop(reason, count.documents, count.bytes)
    for reason, size in filtered.cut.items():
        if size:
            ledger.drop(reason, 0, size)
    kept = filtered.kept
    ledger.kept += Count(kept.num_rows, int(np.diff(text_offsets(kept.column("text"))).sum()))


def exact_keys(
    batch: pa.RecordBatch, normalized: bool = False, *, first_row: int = 0
) -> npt.NDArray[np.void]:
    """Rows of KEYS: xxh3-128 of each document's UTF-8 text, or a hash of its words if `normalized`.

    Each row also has the source, the size, the row in the split and, as `id`, the content rank. A text
    without words equals only the same text.
    """
    texts = batch.column("text")
    keys = np.empty(len(texts), KEYS.dtype)
    hashes = digests = text_digests(texts)
    if normalized:
        words, some = word_keys(texts)
        hashes = np.where(some[:, None], words, digests)
    keys["key"], keys["low"] = hashes.view(">u8").T
    keys["id"] = content_ranks(digests, batch.column("document_id")).view(">u8")
    keys["row"] = np.arange(first_row, first_row + len(texts))
    keys["split"] = -1  # its number, once the exchange reads it
    keys["source"] = batch.column("source").to_numpy()
    keys["bytes"] = np.diff(text_offsets(texts))
    return keys


def needs(n: Needs) -> None:
    """State what cleaning writes; raw files are read from where they are."""
    c = n.corpus
    keys_bytes = (1 + ("url" in c.dedup)) * c.documents * KEYS.dtype.itemsize
    shape = c.shape
    files = 3 + sum(("url" in c.dedup, shape.scores > 0, shape.has_buckets, shape.annotates))
    written = c.text_bytes * DOCUMENTS + keys_bytes
    n.add(CLEAN, c.splits, n.looked_up * c.splits, 0, files=files, written=written)


STEP = Step(lambda recipe: (CLEAN,), read_and_filter, needs)
