"""`scores`: judge documents by scores that were computed elsewhere, joined by the id of the document.

The score files are tables with a row for each document: a column with its id, and columns of numbers, such as
the predictions of a classifier on a GPU. A build sorts them by a hash of the id once (stages/scores.py), so
they may be larger than memory and in any order. Each column that is named is a rule, whose value is the
document's score, and later filters of the recipe find it by that name (`buckets`).

A document lacks scores if no row has its id, or if a named column is null or NaN in its row. `missing` says
what becomes of it: the build is refused, the document is dropped, or it stays, and passes the bounds.
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


MISSING = "missing"
REFUSED = "refused"  # in place of it, where the build ends at such a document

ScoreLookup = Callable[[Sequence[str | None]], npt.NDArray[np.float64]]
"""float64[n, columns] for n ids; NaN where there is none."""


def _no_bounds(given: object) -> object:
    """`edu:` is short for `edu: {}`."""
    if isinstance(given, dict):
        return {name: {} if bounds is None else bounds for name, bounds in given.items()}
    return given


class ScoresConfig(FilterSettings):
    """Files with scores of documents, and the bounds that these must keep."""

    path: Listed[Source] = Field(
        min_length=1,
        description="Parquet files or JSON lines with a row for each document: paths, globs or URLs.",
    )
    key: FieldName = Field(
        default="document_id", description="Column of these files with the document's id: text or integers."
    )
    document: Literal["document_id", "id", "url"] = Field(
        default="document_id",
        description="Which id that is: document_id as in text outputs and annotations, or the document's "
        "own `id` or `url`.",
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
        description="A document without scores: refuse the build, drop the document, or keep it.",
    )

    @model_validator(mode="after")
    def _names(self) -> Self:
        if taken := sorted({MISSING, REFUSED} & self.columns.keys()):
            raise ValueError(f"a column cannot be called {taken[0]!r}, which is a reason to drop documents")
        if self.key in self.columns:
            raise ValueError(f"{self.key!r} is the id, so it is no score")
        return self

    def build(self, folder: Path) -> ScoresFilter:
        """Without scores, as in the rehearsal of a build: all documents pass."""
        return ScoresFilter(self, None)


class ScoresFilter:
    """Drops documents by joined scores. Whether a missing score is an error is for the chain to say."""

    def __init__(self, config: ScoresConfig, lookup: ScoreLookup | None) -> None:
        self._config, self._lookup = config, lookup
        self.reasons = (REFUSED if config.missing == "refuse" else MISSING, *config.columns)

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge. Leaves the scores in `batch.scores`."""
        scores = np.full((len(batch), len(self._config.columns)), np.nan)
        missing: npt.NDArray[np.bool_] | None = None
        if self._lookup is not None:
            scores = self._lookup(self._ids(batch))
            missing = np.asarray(np.isnan(scores).any(axis=1))
        rules = [Rule(self.reasons[0], None if self._config.missing == "keep" else missing)]
        for values, (name, bounds) in zip(scores.T, self._config.columns.items(), strict=True):
            batch.scores[name] = values
            both = bounds.min is not None and bounds.max is not None
            bound = None if both else bounds.min if bounds.max is None else bounds.max
            rules.append(Rule(name, bounds.fails(values), values, bound))
        return rules

    def _ids(self, batch: TextBatch) -> list[Any]:
        """The ids of the wanted documents; None for the others."""
        ids = batch.column(self._config.document)
        texts = [one.hex() if isinstance(one, bytes) else one for one in ids]
        return [text if wanted else None for text, wanted in zip(texts, batch.wanted.tolist(), strict=True)]
