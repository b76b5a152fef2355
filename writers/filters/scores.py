"""`scores`: judge documents by scores that were computed elsewhere, joined by the id of the document.

The score files are tables with one row per document: a column with the document's id, and columns of numbers,
such as the predictions of a classifier on a GPU. A build sorts them by a hash of the id once
(stages/scores.py), so they may be larger than memory and in any order. Each column named in `columns` is a
rule whose value is the document's score; later filters such as `buckets` find the score by this name.

A document lacks scores if no row has its id, or if a named column is null or NaN in its row. The setting
`missing` says what happens then: the build fails, the document is dropped, or it stays and passes the bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, Field, model_validator

from shardkit.settings import Bounds, FieldName, Listed, Source
from shardkit.writers.filters.base import FilterSettings, Rule

if TYPE_CHECKING:
    from shardkit.writers.filters.batch import TextBatch


MISSING = "missing"  # name of the rule that drops documents without scores
REFUSED = "refused"  # name of this rule with `missing: refuse`; a document that fails it stops the build

DocumentId = Literal["document_id", "id", "url"]
"""The ids of a document, by which values from elsewhere are joined."""

ScoreLookup = Callable[[Sequence[str | bytes | None]], npt.NDArray[np.float64]]
"""A function that takes n ids and returns their scores, float64[n, columns], NaN where one is missing."""


def _no_bounds(given: object) -> object:
    """Convert a column without bounds, written as `edu:`, to `edu: {}`."""
    if isinstance(given, dict):
        return {name: {} if bounds is None else bounds for name, bounds in given.items()}
    return given


class ScoresConfig(FilterSettings):
    """Settings of `scores`: files with scores of documents, and the bounds of each score."""

    path: Listed[Source] = Field(
        min_length=1,
        description="Parquet files or JSON lines with one row per document: paths, globs or URLs.",
    )
    key: FieldName = Field(
        default="document_id", description="Column of the files with a document's id, as text or integers."
    )
    document: DocumentId = Field(
        default="document_id",
        description="Which id of a document the key is compared with: document_id as in text outputs and "
        "annotations, or the document's own `id` or `url`.",
    )
    columns: Annotated[
        dict[FieldName, Bounds], BeforeValidator(_no_bounds), Field(min_length=1, max_length=64)
    ] = Field(
        description="Columns with scores, by name, and the bounds of each; without bounds a score is joined "
        "for `buckets` and annotations only.",
        examples=[{"edu": {"min": 2.5}, "toxicity": {"max": 0.3}}],
    )
    missing: Literal["refuse", "drop", "keep"] = Field(
        default="refuse",
        description="If a document has no scores: refuse the build, drop the document, or keep it.",
    )

    @model_validator(mode="after")
    def _names(self) -> Self:
        if taken := sorted({MISSING, REFUSED} & self.columns.keys()):
            raise ValueError(f"a column cannot be called {taken[0]!r}, the name of a rule; rename the column")
        if self.key in self.columns:
            raise ValueError(f"{self.key!r} is the id column; it cannot be a score too")
        return self

    def build(self, folder: Path) -> ScoresFilter:
        """Build the filter without scores, for the trial run before a build, in which all documents pass."""
        return ScoresFilter(self, None)


class ScoresFilter:
    """Drops documents by scores that are looked up by document id.

    With `missing: refuse`, this filter only marks documents without scores; FilterChain raises the error.
    """

    def __init__(self, config: ScoresConfig, lookup: ScoreLookup | None) -> None:
        self._config, self._lookup = config, lookup
        self.reasons = (REFUSED if config.missing == "refuse" else MISSING, *config.columns)

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge. Stores the scores in `batch.scores` for later filters."""
        scores = np.full((len(batch), len(self._config.columns)), np.nan)
        missing: npt.NDArray[np.bool_] | None = None
        if self._lookup is not None:
            scores = self._lookup(self._ids(batch))
            missing = np.asarray(np.isnan(scores).any(axis=1))
        rules = [Rule(self.reasons[0], None if self._config.missing == "keep" else missing)]
        for values, (name, bounds) in zip(scores.T, self._config.columns.items(), strict=True):
            batch.scores[name] = values
            rules.append(Rule(name, bounds.fails(values), values, bounds.only))
        return rules

    def _ids(self, batch: TextBatch) -> list[Any]:
        """Return the ids of the wanted documents, and None for the others."""
        ids = batch.column(self._config.document)
        return [one if wanted else None for one, wanted in zip(ids, batch.wanted.tolist(), strict=True)]
