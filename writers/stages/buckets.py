"""Step: computes the edges of the bins of a `buckets` filter from the documents' scores.

One task samples the `fit_documents` remaining documents with the lowest hash(seed, document id), and computes
the edges of the bins: before the first pass of filters or `sample` behind the filter, which may use the
labels, or else after all steps. It reads 8 bytes per document and score, and holds the
sample. labels.py turns scores and edges into labels.

Edge j of n bins is the value at index floor(j * count / n) of the sorted sample; a score is in bin j if it
reaches j edges. So without ties each bin has its share of the sample to within one document. Documents with
equal scores are in the same bin, the highest that one of them would be in. But all documents with the lowest
score are in bin 0, however many they are: if most scores are 0, a 0 is no sign of quality.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.hashing import digest_of
from shardkit.writers.dedup.outcomes import SplitRemovals
from shardkit.writers.dedup.population import RowFiles
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.digests import plain
from shardkit.writers.execution.stage import Stage
from shardkit.writers.recipe.recipe import Recipe
from shardkit.writers.stages.flow import Build, Documents, Step
from shardkit.writers.stages.labels import BUCKETS_FILE, Buckets, read_scores, score_rows
from shardkit.writers.stages.needs import Needs


@dataclass(frozen=True, slots=True)
class Edges:
    """The edges of each score's bins, computed from `sampled` of the remaining `documents`."""

    edges: Sequence[Sequence[float]]
    sampled: int
    documents: int


def fit_buckets(documents: Documents, build: Build) -> Documents:
    """Compute the edges of bins from a sample of the remaining documents."""
    config, parts = documents.recipe.buckets, []
    assert config is not None
    step = documents.step_with(BUCKETS_FILE)
    for number, (first, removed) in enumerate(zip(step.commits, documents.removals, strict=True)):
        parts.append(SplitScores(first.file(BUCKETS_FILE), documents.rows_since(step, number), removed))
    size = sum(commit.outputs[BUCKETS_FILE].bytes for commit in step.commits)
    task = BUCKETS.task("buckets", size, parts, len(config.scores), config.bins, config.fit_documents)
    [[commit]] = build.run([task])
    found = BUCKETS.result(commit)
    return replace(documents, labels=Buckets(config, found.edges, found.sampled, found.documents))


@dataclass(frozen=True, slots=True)
class SplitScores:
    """The scores of a split's documents; `rows` map the remaining documents to rows of `file`."""

    file: Artifact
    rows: RowFiles
    removed: SplitRemovals

    @property
    def content(self) -> str:
        """The digest of the split's inputs, by which the task over all splits depends on them."""
        return digest_of(plain([self.file, self.rows, self.removed]))


def find_edges(
    folder: Path, splits: Sequence[SplitScores], scores: int, bins: int, fit_documents: int
) -> Edges:
    """Compute the edges of each score's bins from the `fit_documents` documents with the lowest hashes."""
    sample, documents = np.empty(0, score_rows(scores)), 0
    for split in splits:
        found = read_scores(split.file, split.rows, scores)
        found = found[split.removed.load().left(len(found))]
        documents += len(found)
        sample = np.concatenate([sample, found])
        if len(sample) > fit_documents:
            sample = sample[np.argsort(sample["hash"], kind="stable")[:fit_documents]]
    edges: list[list[float]] = []
    for number in range(scores):
        values = sample["values"][:, number]
        values = np.sort(values[~np.isnan(values)])
        places = np.arange(1, bins) * len(values) // bins
        above_least = np.nextafter(values[:1], np.inf)  # so that the lowest score reaches no edge
        edges.append(np.maximum(values[places], above_least).tolist() if len(values) else [])
    return Edges(edges, len(sample), documents)


BUCKETS = Stage("buckets", "read and filter", find_edges)


def needs(n: Needs) -> None:
    """Add the requests and bytes of computing the edges of bins."""
    if n.corpus.shape.has_buckets:
        n.add(BUCKETS, 1, 3 * n.corpus.gathered, 16 * n.corpus.documents)


def _stages(recipe: Recipe) -> Sequence[Stage[..., Any]]:
    return () if recipe.buckets is None or not recipe.buckets.is_fitted else (BUCKETS,)


STEP = Step(_stages, fit_buckets, needs)
