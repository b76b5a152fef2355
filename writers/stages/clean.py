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
  annotations.parquet  with `annotate`: the value of every filter for every document (annotations.py)
Memory is one batch, one record and a run of keys, for a split of any size.

A split whose task fails in every attempt, by an error, by ending its process or by taking too long, ends the
build unless `max_failed_splits` allows it. Then a task of stage FAILED_SPLITS stands in for it: it reads no
record, and books the whole split as quarantined.

What is published as one file, the quarantine above all, is joined by tasks of stage SIDE_FILES.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from shardkit.errors import BuildError, RecipeError
from shardkit.hashing import digest_of, hash_file
from shardkit.writers.annotations import ANNOTATIONS_FILE, AnnotationFile
from shardkit.writers.dedup.config import DedupConfig
from shardkit.writers.dedup.exact import KEYS
from shardkit.writers.dedup.signatures import word_keys
from shardkit.writers.dedup.urls import URL_KEYS, Tracking, url_keys
from shardkit.writers.documents import (
    DOCUMENT_OPTIONS,
    DOCUMENT_SCHEMA,
    MARKED_SCHEMA,
    content_ranks,
    text_digests,
)
from shardkit.writers.exchange import RunWriter
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.task import Commit, Fallback, RunTasks, Task
from shardkit.writers.filters.chain import FilterChain, Filtered
from shardkit.writers.funnel import FilterCounts
from shardkit.writers.inputs.chat import Masking
from shardkit.writers.inputs.fields import NamedFields
from shardkit.writers.inputs.files import version_now
from shardkit.writers.inputs.readers import SuspectDataError, SuspectFilesError, read_parts
from shardkit.writers.inputs.scan import Split, hash_split
from shardkit.writers.kernels.text_arrays import text_offsets
from shardkit.writers.kernels.words import normalization_version
from shardkit.writers.languages import LANGUAGES_FILE, LanguageFile
from shardkit.writers.ledger import (
    FAILED_SPLIT,
    BadRecord,
    Count,
    Ledger,
    Quarantine,
)
from shardkit.writers.progress import PULSE
from shardkit.writers.recipe import Recipe
from shardkit.writers.removed import DROPPED_FILE, DroppedFile
from shardkit.writers.score_tables import ScoreTable
from shardkit.writers.stages.buckets import BUCKETS_FILE, BucketFile

__all__ = [
    "DOCUMENTS_FILE",
    "FAILED_SPLITS",
    "JOINED_AT_ONCE",
    "QUARANTINE_FILE",
    "SIDE_FILES",
    "Cleaned",
    "clean_split",
    "exact_keys",
    "filter_files",
    "join_side_files",
    "split_name",
    "tasks",
]

DOCUMENTS_FILE = "documents.arrow"
QUARANTINE_FILE = "quarantine.jsonl"

FAILED_SPLITS = "failed_splits"
SIDE_FILES = "side_files"

JOINED_AT_ONCE = 64

_KEYS_MEMORY_BYTES = 48 << 20  # to sort keys in; a third is a run

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class Cleaned:
    """Result of a split: its checked ledger, counts of each filter, and the meaning of language codes.

    `fields` are named fields that no record had (`NamedFields.to_dict`), and `inputs` are `hash_split`, both
    of each part of the split. `urls` are kept documents with a URL, in builds that compare these.
    """

    ledger: Ledger
    filters: FilterCounts
    fields: Sequence[Mapping[str, Any]]
    inputs: Sequence[str]
    languages: Sequence[str] | None = None
    urls: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a commit."""
        plain = {"ledger": self.ledger.to_dict(), "filters": self.filters.to_dict(), "urls": self.urls}
        return plain | {"languages": self.languages, "fields": self.fields, "inputs": self.inputs}

    @classmethod
    def of(cls, commit: Commit) -> Cleaned:
        """What a task of this stage committed."""
        counts = commit.counts
        filters = FilterCounts.from_dict(counts["filters"])
        facts = counts["fields"], counts["inputs"], counts["languages"], counts["urls"]
        return cls(commit.ledger(), filters, *facts)


def tasks(
    recipe: Recipe,
    splits: Sequence[Split],
    files: Mapping[str, str],
    folder: Artifact | None = None,
    masking: Masking | None = None,
    scores: Sequence[ScoreTable] = (),
) -> list[Task]:
    """One task a split; `files` are `filter_files`, and lie in `folder` if not where the recipe says.

    `scores` are the tables of the `scores` filters, in order.
    """
    exact = recipe.dedup.exact
    keys = normalization_version() if exact is not None and exact.text == "normalized" else "raw"
    shared = {
        "filters": [[name, config.model_dump(mode="json")] for name, config in recipe.filter_chain()],
        "annotate": recipe.annotate,
        "dedup.exact.text": keys,
        "max_bad_fraction": recipe.max_bad_fraction,
        "max_record_bytes": recipe.max_record_bytes,
    }
    if recipe.dedup.url is not None:
        shared["dedup.url.drop_parameters"] = list(recipe.dedup.url.drop_parameters)
    if scores:
        shared["scores"] = [table.content for table in scores]
    limit = recipe.max_failed_splits
    fallback = Fallback(FAILED_SPLITS, limit, "max_failed_splits", clean_split) if limit else None
    made = []
    for split in splits:
        places = [_place(part) for part in split.parts]
        fields = recipe.inputs[split.source].model_dump(
            mode="json", exclude={"path", "exclude", "base", "source", "format"}
        )
        config = shared | {"split": places if split.rest else places[0], "inputs": fields}
        if masking is not None:
            config["masking"] = masking.digest if recipe.inputs[split.source].is_masked else ""
        args = (split, recipe, folder, masking, tuple(scores))
        versions = [[part.input.bytes, part.input.version] for part in split.parts]
        inputs = {"file": versions if split.rest else versions[0], "filter_files": dict(files)}
        name = split_name(split)
        made.append(Task("clean", name, config, clean_split, args, split.bytes, inputs, fallback))
    return made


def _place(split: Split) -> dict[str, Any]:
    """What of the split of a file decides what is read, beside the file's contents."""
    names = "source", "format", "compression", "start", "end", "first_record", "bytes"
    place = {"file": split.file} | {name: getattr(split, name) for name in names}
    return place if split.limit is None else place | {"limit": split.limit}


def join_side_files(run: RunTasks, cleaned: Sequence[Commit]) -> list[Commit]:
    """The quarantine, if any, and what filters report in lines, each joined over all splits, in their order.

    A commit has one file, by its name in the dataset. Files are joined by 64, and these again, down to one.
    """
    names = sorted({name for commit in cleaned for name in commit.outputs if name.endswith(".jsonl")})
    made = {name: [commit for commit in cleaned if commit.outputs[name].bytes] for name in names}
    open_names = [name for name in names if made[name] or name != QUARANTINE_FILE]
    level = 0
    while open_names:
        stage = f"{SIDE_FILES}-merge-{level}" if level else SIDE_FILES
        tasks, of_names = [], []
        for name in open_names:
            for at in range(0, max(1, len(made[name])), JOINED_AT_ONCE):
                tasks.append(_join_task(stage, name, at // JOINED_AT_ONCE, made[name][at:][:JOINED_AT_ONCE]))
                of_names.append(name)
        [commits] = run(tasks)
        for name in open_names:
            made[name] = [commit for commit, whose in zip(commits, of_names, strict=True) if whose == name]
        open_names = [name for name in open_names if len(made[name]) > 1]
        level += 1
    return [commit for name in names for commit in made[name]]


def _join_task(stage: str, name: str, number: int, commits: Sequence[Commit]) -> Task:
    outputs = [commit.outputs[name] for commit in commits]
    args = name, [commit.files / name for commit in commits]
    inputs = {"files": [output.xxh3_128 for output in outputs]}
    size = sum(output.bytes for output in outputs)
    return Task(stage, f"{Path(name).stem}-{number:05d}", {"name": name}, _join, args, size, inputs)


def _join(folder: Path, name: str, files: Sequence[Artifact]) -> dict[str, int]:
    with (folder / name).open("wb") as joined:
        for file in files:
            with file.open() as part:
                shutil.copyfileobj(part, joined, 1 << 20)
    return {}


def split_name(split: Split) -> str:
    """The name of all tasks of a split: readable, and unique and constant for (file, start)."""
    readable = _UNSAFE.sub("_", Path(split.file).name)[:40].strip(".") or "file"
    return f"{readable}-{digest_of([split.file, split.start])[:16]}"


def filter_files(recipe: Recipe) -> dict[str, str]:
    """xxh3-128 of files that filters read, by path in the recipe; RecipeError if one cannot be read."""
    digests = {}
    for name, config in recipe.filter_chain():
        for path in config.files():
            try:
                digests[path] = hash_file(recipe.resolve(path), ["xxh3_128"])["xxh3_128"]
            except OSError as error:
                raise RecipeError(f"filters: {name}: {path}: {error.strerror or error}") from None
    return digests


def clean_split(
    folder: Path,
    split: Split,
    recipe: Recipe,
    filter_folder: Artifact | None = None,
    masking: Masking | None = None,
    scores: Sequence[ScoreTable] = (),
    failure: str | None = None,
) -> Cleaned:
    """Write the files of a split into `folder`, which exists and is empty.

    With a `failure`, no record is read, and the split is booked as failed for that reason. BuildError when
    more of the split is unreadable than the recipe's max_bad_fraction allows.
    """
    if filter_folder is not None:
        for _, config in recipe.filter_chain():
            for name in config.files():
                if not Path(name).is_absolute():
                    (filter_folder / name).local()
        recipe = recipe.in_folder(filter_folder.path)
    try:
        return _clean(split, recipe, folder, masking, scores, failure=failure)
    except SuspectFilesError as found:  # at the end of the untrusted data, so start again without it
        return _clean(split, recipe, folder, masking, scores, found.suspects)


def _clean(
    split: Split,
    recipe: Recipe,
    folder: Path,
    masking: Masking | None,
    scores: Sequence[ScoreTable],
    suspects: Mapping[str, SuspectDataError] | None = None,
    *,
    failure: str | None = None,
) -> Cleaned:
    ledger, fields = Ledger(), [NamedFields(recipe.inputs[split.source]) for _ in split.parts]
    chain = _filter_chain(recipe, scores)
    counts = FilterCounts.of_chain(chain)
    allowed = recipe.max_bad_fraction if failure is None else 1.0
    schema = DOCUMENT_SCHEMA if masking is None else MARKED_SCHEMA
    versions = [version_now(part.input) for part in split.parts]
    with (
        Quarantine(folder / QUARANTINE_FILE, max_bad_fraction=allowed) as quarantine,
        _KeyFiles(folder, recipe.dedup) as keys,
        DroppedFile(folder / DROPPED_FILE) if recipe.filters else nullcontext() as dropped,
        AnnotationFile(folder / ANNOTATIONS_FILE) if recipe.annotate else nullcontext() as annotations,
        LanguageFile(folder / LANGUAGES_FILE) if chain.has_languages else nullcontext() as languages,
        _bucket_file(folder, recipe) as buckets,
        ExitStack() as stack,
        pa.OSFile(str(folder / DOCUMENTS_FILE), "wb") as file,
        pa.ipc.new_file(file, schema, options=DOCUMENT_OPTIONS) as documents,
    ):
        sides = {name: stack.enter_context((folder / name).open("wb")) for name in chain.side_files}
        for batch in _read(split, recipe, ledger, quarantine, fields, suspects, masking, failure):
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

    def __init__(self, folder: Path, config: DedupConfig) -> None:
        self.urls = self._rows = 0
        self._normalized = config.exact is not None and config.exact.text == "normalized"
        self._stack, memory_bytes = ExitStack(), _KEYS_MEMORY_BYTES
        self._texts = self._stack.enter_context(
            RunWriter(folder / KEYS.file, KEYS, memory_bytes=memory_bytes)
        )
        self._urls: RunWriter | None = None
        if config.url is not None:
            self._tracking = Tracking.of(config.url.drop_parameters)
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


def _filter_chain(recipe: Recipe, scores: Sequence[ScoreTable]) -> FilterChain:
    return FilterChain(
        recipe.filter_chain(),
        recipe.folder,
        annotate=recipe.annotate,
        seed=recipe.seed,
        lookups=[table.open() for table in scores],
    )


def _bucket_file(folder: Path, recipe: Recipe) -> AbstractContextManager[BucketFile | None]:
    config = recipe.buckets
    if config is None:
        return nullcontext()
    return BucketFile(folder / BUCKETS_FILE, len(config.scores), recipe.seed)


def _read(
    split: Split,
    recipe: Recipe,
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
            recipe.inputs[split.source],
            ledger,
            quarantine,
            max_record_bytes=recipe.max_record_bytes,
            max_bad_fraction=recipe.max_bad_fraction,
            fields=fields,
            suspects=suspects or {},
            masking=masking,
            memory_bytes=recipe.memory,
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
