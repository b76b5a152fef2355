"""What filters did with a batch of documents: those that stay, those that each rule dropped, and counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.card import Count

SAMPLE = 100  # one in this many documents is judged by every rule independently
EXCERPTS = 3  # dropped documents for each rule whose beginning is reported
EXCERPT_CHARACTERS = 120


@dataclass(frozen=True, slots=True, order=True)
class Excerpt:
    """The beginning of a document when it was dropped; the documents with the lowest hashes are chosen."""

    hash: int
    file: str
    record: int
    text: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """Documents that one rule dropped, as it judged them: `rows`, int64[n], of a batch of DOCUMENT_SCHEMA.

    They are not taken out of the batch, for that would copy all of their texts. `hashes`, uint64[n], choose a
    sample; `values` [n], `bound`, one or float64[n], and `labels`, object[n], are those of the rule.
    """

    rule: str
    documents: pa.RecordBatch
    rows: npt.NDArray[np.int64]
    hashes: npt.NDArray[np.uint64]
    values: npt.NDArray[Any] | None
    bound: float | npt.NDArray[np.float64] | None
    labels: npt.NDArray[np.object_] | None = None


@dataclass
class Filtered:
    """The result for a batch: the kept documents, edited, and counts by "<filter>/<name>".

    `removed` are the documents that each rule dropped, `dropped` their counts by rule, `cut` bytes by edit,
    `counts` further statistics of editors. `alone` counts, over `sampled` documents, those that fail each
    rule, whichever others they fail.
    `excerpts` has up to EXCERPTS of the documents that each rule dropped. `annotations`, if requested, has
    the value of every rule for every document of the batch (before dropping), and under "dropped" the reason
    it was dropped; `failed` has bool[n], which documents fail each rule. `side_rows` has rows for files next
    to the dataset, by file name. `languages` is object[n], the labels of the kept documents, if there is a
    language filter; `scores`, float64[n, scores], those of a `buckets` filter. `by_language` counts, where
    settings differ by language, the documents of each language by the rule that dropped them, "" for those
    that stay; documents that were dropped before have none.
    """

    kept: pa.RecordBatch
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
