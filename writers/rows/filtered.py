"""The result of filters for a batch: the kept documents, the documents that each rule dropped, and counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.card import Count

SAMPLE = 100  # one in 100 documents is judged by all rules, even after one has dropped it, for statistics
EXCERPTS = 3  # number of dropped documents per rule whose beginning is reported
EXCERPT_CHARACTERS = 120


@dataclass(frozen=True, slots=True, order=True)
class Excerpt:
    """The beginning of a dropped document. Reports show the documents with the lowest hashes."""

    hash: int
    file: str
    record: int
    text: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """The n documents of a batch that one rule dropped.

    `documents` is the whole batch, with the texts that the rule judged, and `rows`, int64[n], are the offsets
    of the dropped documents in it: selecting them would copy texts. `hashes`, uint64[n], choose a sample.
    `values` [n] are the values that the rule compared with `bound`, its threshold (one number or float64[n]).
    `labels`, object[n], are the labels that the rule judged.
    """

    rule: str
    documents: pa.RecordBatch
    rows: npt.NDArray[np.int64]
    hashes: npt.NDArray[np.uint64]
    values: npt.NDArray[Any] | None
    bound: float | npt.NDArray[np.float64] | None
    labels: npt.NDArray[np.object_] | None = None


@dataclass(slots=True)
class FilterCost:
    """The documents that one filter judged and dropped in some batches, and its CPU seconds.

    `spent` has what a filter that pays for documents reports: requests, tokens and so on, by name.
    """

    documents: int = 0
    dropped: int = 0
    seconds: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)

    def add(self, other: FilterCost) -> None:
        """Add the cost of other batches."""
        self.documents += other.documents
        self.dropped += other.dropped
        self.seconds += other.seconds
        for name, amount in other.spent.items():
            self.spent[name] = self.spent.get(name, 0) + amount


@dataclass
class Filtered:
    """The result of filters for a batch: the kept documents, edited, and counts by "<filter>/<name>".

    `stays`, bool[n], marks the kept documents of the batch. `removed` has the documents that each rule
    dropped, `dropped` their counts by rule, `cut` the bytes that each edit removed, `counts` further
    statistics of editors. `sampled` documents were judged by all rules, and `alone` counts how many of them
    fail each rule, whether or not they fail others too. `excerpts` has up to EXCERPTS excerpts per rule.
    `annotations`, if requested, has the value of every rule for every document of the batch, and under
    "dropped" the rule that dropped the document. `failed` has bool[n] per rule: whether each document fails
    it. `side_rows` has rows for files next to the dataset, by file name. `languages`, object[kept], has the
    languages of the kept documents if the pass has a language filter. `scores`, float64[kept, scores], has
    their scores if it has a `buckets` filter. If settings differ by language, `by_language` counts the
    documents of each language by the rule that dropped them, with "" for kept documents. Documents dropped
    before their language was known are not counted there.
    """

    kept: pa.RecordBatch
    stays: npt.NDArray[np.bool_] = field(default_factory=lambda: np.ones(0, np.bool_))
    removed: list[Dropped] = field(default_factory=list)
    dropped: dict[str, Count] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    alone: dict[str, int] = field(default_factory=dict)
    sampled: int = 0
    excerpts: dict[str, list[Excerpt]] = field(default_factory=dict)
    annotations: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    failed: dict[str, npt.NDArray[np.bool_]] = field(default_factory=dict)
    side_rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    languages: npt.NDArray[np.object_] | None = None
    scores: npt.NDArray[np.float64] | None = None
    by_language: dict[str, Counter[str]] = field(default_factory=dict)
