"""`buckets`: sort documents into quality classes by an ensemble of scores, without dropping any.

Each score puts a document into a bin. With `thresholds`, the bin is the number of thresholds that the score
reaches; otherwise it is one of `bins` classes of equal size, whose edges are percentiles of the corpus. The
bins of all scores are combined by their maximum or mean, and `labels` name ranges of the result. This is how
Nemotron-CC (arXiv 2412.02595) classifies pages: three classifiers, 20 bins each, the maximum, five labels.
With one score, ten bins and `{high: 9, low: 0}`, "high" is the best tenth, which DCLM (arXiv 2406.11794)
keeps.

Percentiles are computed over the documents that remain after duplicate removal. Therefore this filter only
computes the scores, and stage `buckets` assigns the labels (stages/buckets.py). After that stage the label is
a field of the document's metadata, which `output.where`, provenance and text outputs use. A document that
lacks a score is in the lowest bin of that score.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from shardkit.settings import FieldName, Listed, StrictModel
from shardkit.writers.filters.base import FilterSettings, Rule
from shardkit.writers.filters.fasttext import ClassifierConfig, ClassifierFilter

if TYPE_CHECKING:
    from shardkit.writers.filters.batch import TextBatch


class BucketScore(StrictModel):
    """One score: the probability of a label by a fastText model, or a column of a `scores` filter."""

    model: FieldName | None = Field(default=None, description="A fastText model file, .bin or .ftz.")
    label: FieldName | None = Field(default=None, description="The model's label, without __label__.")
    characters: int | None = Field(
        default=None, ge=1, description="The model reads only this many first characters; null: all."
    )
    column: FieldName | None = Field(
        default=None, description="Instead of a model: a column of an earlier `scores` filter."
    )
    thresholds: Listed[float] = Field(
        default=(),
        max_length=999,
        description="Ascending bin edges: the bin is the number of edges that the score reaches. Empty: the "
        "edges are percentiles of the corpus.",
    )

    @property
    def name(self) -> str:
        """The score's name in annotations, and the name of its bin edges in the card."""
        return self.column or f"{PurePosixPath(self.model or '').stem}.{self.label}"

    @property
    def classifier(self) -> ClassifierConfig | None:
        """Settings of a `classifier` with the score's model; None if the score is a `scores` column."""
        if self.model is None or self.label is None:
            return None
        return ClassifierConfig(model=self.model, label=self.label, characters=self.characters, threshold=0.0)

    @model_validator(mode="after")
    def _is_one_score(self) -> Self:
        if (self.model is None) != (self.label is None) or (self.model is None) == (self.column is None):
            raise ValueError("give `model` and `label`, or the `column` of a `scores` filter")
        if any(one >= other for one, other in pairwise(self.thresholds)):
            raise ValueError("thresholds must ascend, without repetitions")
        return self


class BucketsConfig(FilterSettings):
    """Settings of `buckets`: the scores, how they become bins, and the labels of combined bins."""

    scores: Listed[BucketScore] = Field(
        min_length=1,
        max_length=16,
        description="The scores of the ensemble.",
        examples=[[{"model": "quality.bin", "label": "hq"}, {"column": "edu"}]],
    )
    field: FieldName = Field(
        default="bucket", description="Metadata field in which the label is stored, for output.where."
    )
    bins: int = Field(
        default=20, ge=2, le=1000, description="Number of classes of equal size, divided at percentiles."
    )
    combine: Literal["max", "mean"] = Field(
        default="max", description="How the bins of several scores become one number."
    )
    labels: Annotated[dict[FieldName, float], Field(min_length=1)] | None = Field(
        default=None,
        description="Lowest combined bin of each label; one label must begin at 0. null: the label is the "
        "combined bin, rounded down.",
        examples=[{"high": 19, "medium": 12, "low": 0}],
    )
    fit_documents: int = Field(
        default=100_000,
        ge=1,
        le=10_000_000,
        description="Number of documents, sampled by hash, from which percentiles are computed; all of them "
        "if there are fewer.",
    )

    @property
    def is_fitted(self) -> bool:
        """Whether the bin edges are percentiles of the corpus."""
        return not self.scores[0].thresholds

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        names = [score.name for score in self.scores]
        if len(set(names)) < len(names):
            raise ValueError(f"two scores have the same name: {', '.join(sorted(names))}")
        if len({bool(score.thresholds) for score in self.scores}) > 1:
            raise ValueError(
                "give thresholds to all scores or to none: bins of thresholds and of percentiles cannot be "
                "combined"
            )
        if self.labels is not None:
            bounds = sorted(self.labels.values())
            most = max((len(score.thresholds) or self.bins - 1) for score in self.scores)
            if bounds[0] != 0 or len(set(bounds)) < len(bounds):
                raise ValueError("labels: the lowest must begin at bin 0, and each label at a different bin")
            if bounds[-1] > most:
                raise ValueError(f"labels: no document can be in bin {bounds[-1]:g}; the highest is {most}")
        return self

    def build(self, folder: Path) -> BucketsFilter:
        """See FilterSettings.build."""
        return BucketsFilter(self, folder)

    def files(self) -> tuple[str, ...]:
        """See FilterSettings.files."""
        return tuple(score.model for score in self.scores if score.model is not None)


class BucketsFilter:
    """Computes the scores of documents. Each score is the value of a rule that no document fails."""

    def __init__(self, config: BucketsConfig, folder: Path) -> None:
        self.reasons = tuple(score.name for score in config.scores)
        models = [score.classifier for score in config.scores]
        self._models = [
            None if model is None else ClassifierFilter(model, folder, key="buckets") for model in models
        ]

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge."""
        rules = []
        for name, model in zip(self.reasons, self._models, strict=True):
            if model is None:
                values = batch.numbers(name)
            else:
                [rule] = model.judge(batch)
                assert rule.values is not None
                values = rule.values
            rules.append(Rule(name, None, values.astype(np.float64)))
        return rules
