"""Stage `buckets`: from the scores of a `buckets` filter to a label in the metadata of each document.

Cleaning a split keeps the scores of what stays as BUCKETS_FILE, in the order of documents.arrow. Once
duplicates are known, one task draws the `fit_documents` documents of lowest hash(seed, document id) among
those that are left, and computes the edges of bins; it reads 8 bytes a document and score, and holds the
sample. The tasks that tokenize a split, or write its text, put the labels in (`marked_batches`).

The edge of bin j of n is the value at place floor(j * count / n) of the sorted sample; a score is in bin j
if it reaches j edges: without ties each bin has its share of the sample to within one document. Documents of
equal scores are in one bin, the highest that one of them would be in; but those of the lowest score are all
in bin 0, however many they are (of a score that is mostly 0, a zero says nothing good).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from shardkit.hashing import digest_of, keyed_hashes
from shardkit.writers.dedup.lines import ROWS_FILE
from shardkit.writers.dedup.removals import SplitRemovals
from shardkit.writers.dedup.tables import Rows, RowsWriter
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.task import Commit, PlainCounts, RunTasks, Task
from shardkit.writers.filters.buckets import BucketsConfig
from shardkit.writers.recipe import Recipe

__all__ = ["BUCKETS_FILE", "BucketFile", "BucketLabels", "Buckets", "fit_buckets", "marked_batches"]

BUCKETS_FILE = "buckets.npy"


def _dtype(scores: int) -> np.dtype[np.void]:
    return np.dtype([("hash", "<u8"), ("values", "<f8", (scores,))])


class BucketFile:
    """Writes the scores of a split's documents."""

    def __init__(self, path: Path, scores: int, seed: int) -> None:
        self._rows = RowsWriter(path, _dtype(scores))
        self._seed = seed

    def __enter__(self) -> Self:
        self._rows.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rows.__exit__(kind, error, trace)

    def write(self, documents: pa.RecordBatch, scores: npt.NDArray[np.float64]) -> None:
        """Append those of a batch, float64[n, scores]."""
        rows = np.empty(len(scores), self._rows.dtype)
        rows["hash"] = keyed_hashes(documents.column("document_id").to_pylist(), self._seed, "bucket sample")
        rows["values"] = scores
        self._rows.write(rows)


@dataclass(frozen=True, slots=True)
class _Edges(PlainCounts):
    """Result of the task: the edges of each score, of how many of the documents."""

    edges: Sequence[Sequence[float]]
    sampled: int
    documents: int


@dataclass(frozen=True)
class Buckets:
    """How scores become labels. `sampled` of `documents` gave the edges; both are 0 if they were given."""

    config: BucketsConfig
    edges: Sequence[Sequence[float]]
    sampled: int = 0
    documents: int = 0

    @property
    def facts(self) -> dict[str, Any]:
        """Plain data, for the card and as what tasks depend on."""
        names = [score.name for score in self.config.scores]
        settings = self.config.model_dump(mode="json", include={"field", "combine", "labels"})
        edges = dict(zip(names, [list(edges) for edges in self.edges], strict=True))
        return settings | {"edges": edges, "sampled": self.sampled, "documents": self.documents}

    def labels(self, scores: npt.NDArray[np.float64]) -> list[str]:
        """The label of each of n documents by its scores, float64[n, scores]."""
        bins = np.zeros(scores.shape, np.int64)
        for number, edges in enumerate(self.edges):
            values = scores[:, number]
            bins[:, number] = np.where(np.isnan(values), 0, np.searchsorted(edges, values, side="right"))
        combined = bins.max(axis=1) if self.config.combine == "max" else bins.mean(axis=1)
        if self.config.labels is None:
            return [str(one) for one in np.floor(combined).astype(np.int64).tolist()]
        names, bounds = zip(*sorted(self.config.labels.items(), key=lambda item: item[1]), strict=True)
        found = np.searchsorted(bounds, combined, side="right") - 1
        return [names[number] for number in found.tolist()]


def fit_buckets(
    recipe: Recipe,
    run: RunTasks,
    cleaned: Sequence[Commit],
    documents: Sequence[Commit],
    removals: Sequence[SplitRemovals],
) -> Buckets | None:
    """Run the stage, if the recipe has a `buckets` filter that needs it; None if it has no such filter.

    `documents` are the commits that have what is left of each split, `cleaned` unless lines were cut.
    """
    config = recipe.buckets
    if config is None:
        return None
    if not config.is_fitted:
        return Buckets(config, [score.thresholds for score in config.scores])
    parts, inputs = [], []
    for first, commit, removed in zip(cleaned, documents, removals, strict=True):
        rows = None if commit is first else commit.files / ROWS_FILE
        parts.append((first.files / BUCKETS_FILE, rows, removed))
        row_digest = None if rows is None else commit.outputs[ROWS_FILE].xxh3_128
        inputs.append([first.outputs[BUCKETS_FILE].xxh3_128, row_digest, removed.digest])
    settings = {"bins": config.bins, "fit_documents": config.fit_documents}
    args = parts, len(config.scores), config.bins, config.fit_documents
    size = sum(commit.outputs[BUCKETS_FILE].bytes for commit in cleaned)
    [[commit]] = run([Task("buckets", "buckets", settings, _fit, args, size, {"splits": digest_of(inputs)})])
    found = _Edges.of(commit)
    return Buckets(config, found.edges, found.sampled, found.documents)


def _fit(
    folder: Path,
    parts: Sequence[tuple[Artifact, Artifact | None, SplitRemovals]],
    scores: int,
    bins: int,
    most: int,
) -> _Edges:
    """The edges, from the documents of lowest hash."""
    sample, documents = np.empty(0, _dtype(scores)), 0
    for file, rows, removed in parts:
        found = _of_split(file, rows, scores)
        left = np.ones(len(found), np.bool_)
        for lost in removed.load().rows.values():
            left[lost] = False
        found = found[left]
        documents += len(found)
        sample = np.concatenate([sample, found])
        if len(sample) > most:
            sample = sample[np.argsort(sample["hash"], kind="stable")[:most]]
    edges: list[list[float]] = []
    for number in range(scores):
        values = sample["values"][:, number]
        values = np.sort(values[~np.isnan(values)])
        places = np.arange(1, bins) * len(values) // bins
        above_least = np.nextafter(values[:1], np.inf)  # so that the lowest score reaches no edge
        edges.append(np.maximum(values[places], above_least).tolist() if len(values) else [])
    return _Edges(edges, len(sample), documents)


def _of_split(file: Artifact, rows: Artifact | None, scores: int) -> npt.NDArray[np.void]:
    found: npt.NDArray[np.void] = Rows(file, _dtype(scores)).read()
    return found if rows is None else found[Rows(rows, np.int64).read()]


@dataclass(frozen=True)
class BucketLabels:
    """Where the scores of a split's documents lie: `rows` leads from those left after line dedup to them."""

    buckets: Buckets
    scores: Artifact
    rows: Artifact | None

    @classmethod
    def of(cls, buckets: Buckets, cleaned: Commit, documents: Commit) -> tuple[BucketLabels, dict[str, Any]]:
        """Those of a split, and the inputs that a task depends on if it reads them."""
        rows = None if documents is cleaned else documents.files / ROWS_FILE
        inputs = {"bucket_scores": cleaned.outputs[BUCKETS_FILE].xxh3_128, "buckets": buckets.facts}
        inputs |= {} if rows is None else {"bucket_rows": documents.outputs[ROWS_FILE].xxh3_128}
        return cls(buckets, cleaned.files / BUCKETS_FILE, rows), inputs

    def open(self) -> list[bytes]:
        """What each document's metadata gets."""
        found = _of_split(self.scores, self.rows, len(self.buckets.edges))
        labels, field = self.buckets.labels(found["values"]), self.buckets.config.field
        texts = {label: orjson.dumps({field: label})[1:] for label in set(labels)}
        return [texts[label] for label in labels]


def marked_batches(
    reader: pa.ipc.RecordBatchFileReader, labels: BucketLabels | None
) -> Iterator[pa.RecordBatch]:
    """The batches of a split's documents, with their labels if there are any."""
    added, start = None if labels is None else labels.open(), 0
    for number in range(reader.num_record_batches):
        batch = reader.get_batch(number)
        yield batch if added is None else _mark(batch, added[start : start + batch.num_rows])
        start += batch.num_rows


def _mark(batch: pa.RecordBatch, added: Sequence[bytes]) -> pa.RecordBatch:
    """The documents with one more field in their metadata, JSON objects, which keep their bytes otherwise."""
    texts = []
    for one, more in zip(batch.column("metadata").to_pylist(), added, strict=True):
        begin = "{" if one in (None, "{}") else one[:-1] + ","
        texts.append(begin + more.decode())
    number = batch.schema.get_field_index("metadata")
    return batch.set_column(number, batch.schema.field(number), pa.array(texts, pa.string()))
