"""A classifier of the user's own, a fastText model such as `shardkit train-classifier` makes.

As datatrove's FastTextClassifierFilter with one label: a document has the label if its probability reaches
the threshold. The probability is the value of the rule. Line ends are spaces to the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from shardkit.errors import RecipeError
from shardkit.writers.filters.classifier_settings import ClassifierConfig
from shardkit.writers.filters.rules import Rule
from shardkit.writers.filters.text_batch import TextBatch
from shardkit.writers.kernels.fasttext import FastTextScorer
from shardkit.writers.kernels.fasttext_model import load_fasttext

__all__ = ["ClassifierFilter"]


class ClassifierFilter:
    """Keeps the documents that have a label, or removes them. Raises RecipeError for a bad model."""

    reasons = ("score",)

    def __init__(self, config: ClassifierConfig, folder: Path | None = None) -> None:
        path = (folder or Path()) / config.model
        self._config = config
        self._scorer = _scorer(path, *_state(path))
        labels = self._scorer.model.labels
        if config.label not in labels:
            shown = ", ".join(labels[:12]) + (", …" if len(labels) > 12 else "")
            raise RecipeError(f"classifier.label: {path} has no label {config.label!r}; it has {shown}")
        self._label = labels.index(config.label)

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge."""
        config = self._config
        scores = self._scorer.scores(batch.data, batch.offsets, batch.wanted, config.characters)
        score = scores[:, self._label].astype(np.float64)
        has_label = score >= config.threshold
        return [Rule("score", ~has_label if config.action == "keep" else has_label, score)]


def _state(path: Path) -> tuple[int, int]:
    try:
        state = path.stat()
    except OSError as error:
        raise RecipeError(f"classifier.model: {path}: {error.strerror or error}") from None
    return state.st_size, state.st_mtime_ns


@lru_cache(maxsize=4)
def _scorer(path: Path, _size: int, _time: int) -> FastTextScorer:
    """The model, kept for the process's next task as long as the file stays the same."""
    return FastTextScorer(load_fasttext(path))
