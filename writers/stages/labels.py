"""The labels of documents: from the scores of a `buckets` filter, and the clusters of `dedup.semantic`.

A pass of filters writes the scores of the kept documents to BUCKETS_FILE, in the order of documents.arrow.
The tasks that tokenize a split, or write its text, add labels to the documents' metadata (`marked_batches`).
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
from shardkit.writers.dedup.population import DOCUMENT, RowFiles, in_rows
from shardkit.writers.dedup.semantic import CLUSTER
from shardkit.writers.dedup.tables import Rows, RowsWriter
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.filters.buckets import BucketsConfig
from shardkit.writers.rows.documents import with_metadata

BUCKETS_FILE = "buckets.npy"


def score_rows(scores: int) -> np.dtype[np.void]:
    """Return the dtype of a row with one document's hash and this number of scores."""
    return np.dtype([("hash", "<u8"), ("values", "<f8", (scores,))])


class BucketFile:
    """Writes a file with the scores of a split's documents, one row per document."""

    def __init__(self, path: Path, scores: int, seed: int) -> None:
        self._rows = RowsWriter(path, score_rows(scores))
        self._seed = seed

    def __enter__(self) -> Self:
        self._rows.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rows.__exit__(kind, error, trace)

    def write(self, documents: pa.RecordBatch, scores: npt.NDArray[np.float64]) -> None:
        """Append the scores of a batch of documents, float64[n, scores]."""
        rows = np.empty(len(scores), self._rows.dtype)
        rows["hash"] = keyed_hashes(documents.column("document_id").to_pylist(), self._seed, "bucket sample")
        rows["values"] = scores
        self._rows.write(rows)


@dataclass(frozen=True)
class Buckets:
    """The rules from scores to labels: settings, and the edges of each score's bins.

    The edges were computed from `sampled` of `documents` documents; both are 0 if the recipe sets the edges.
    """

    config: BucketsConfig
    edges: Sequence[Sequence[float]]
    sampled: int = 0
    documents: int = 0

    @property
    def content(self) -> str:
        """The digest of all values that affect the labels."""
        how = self.config.model_dump(mode="json", include={"field", "combine", "labels"})
        return digest_of([how, [list(edges) for edges in self.edges]])

    @property
    def facts(self) -> dict[str, Any]:
        """The settings and edges as plain data for the dataset card."""
        names = [score.name for score in self.config.scores]
        settings = self.config.model_dump(mode="json", include={"field", "combine", "labels"})
        edges = dict(zip(names, [list(edges) for edges in self.edges], strict=True))
        return settings | {"edges": edges, "sampled": self.sampled, "documents": self.documents}

    def labels(self, scores: npt.NDArray[np.float64]) -> list[str]:
        """Return the label of each of n documents from their scores, float64[n, scores]."""
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


def read_scores(file: Artifact, rows: RowFiles, scores: int) -> npt.NDArray[np.void]:
    """Return the scores of the remaining documents, which `rows` map to rows of `file`."""
    return in_rows(Rows(file, score_rows(scores)).read(), rows)


@dataclass(frozen=True)
class BucketLabels:
    """Computes the bucket labels of a split's remaining documents.

    `scores`: the split's score file; `rows`: for each remaining document, its row in that file.
    """

    buckets: Buckets
    scores: Artifact
    rows: RowFiles

    @property
    def field(self) -> str:
        """The field that has the label."""
        return self.buckets.config.field

    def open(self) -> list[str]:
        """Return the object to add to each document's metadata, which has its label, as JSON."""
        found = read_scores(self.scores, self.rows, len(self.buckets.edges))
        labels = self.buckets.labels(found["values"])
        texts = {label: orjson.dumps({self.field: label}).decode() for label in set(labels)}
        return [texts[label] for label in labels]


@dataclass(frozen=True)
class ClusterLabels:
    """A column of `dedup.semantic`'s clusters, for field `field` of each of a split's remaining documents.

    `clusters` has CLUSTER and `described` the row of each document that has a vector, of `count` that there
    were; `rows` map the remaining documents to these rows.
    """

    field: str
    column: str
    clusters: Artifact
    described: Artifact
    count: int
    rows: RowFiles

    def open(self) -> list[str | None]:
        """Return the object to add to each document's metadata, as JSON; None without a vector."""
        stored = Rows(self.clusters, CLUSTER).read()[self.column]
        found = np.full(self.count, -1, stored.dtype)
        found[Rows(self.described, DOCUMENT).read()["row"]] = stored
        texts = {one: orjson.dumps({self.field: one}).decode() for one in np.unique(stored).tolist()}
        return [texts.get(one) for one in in_rows(found, self.rows).tolist()]


Labels = tuple[BucketLabels | ClusterLabels, ...]
"""The labels of a split's remaining documents, each a field of their metadata."""


def marked_batches(reader: pa.ipc.RecordBatchFileReader, labels: Labels) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a split's documents, with the labels in their metadata."""
    added, start = [(one.field, one.open()) for one in labels], 0
    for number in range(reader.num_record_batches):
        batch = reader.get_batch(number)
        end = start + batch.num_rows
        for name, texts in added:
            batch = with_metadata(batch, [name], texts[start:end])
        yield batch
        start = end
