"""The perplexity of documents to a KenLM model of the user's own.

As CCNet has it: every line with a word is a sentence, and the perplexity is 10 ** -(the sum of log10 of their
probabilities / (words + sentences)). A document without a word has none, told as 0, and passes. Words are
those that the model was trained on: normalized ones (`dedup/normalization.py`), or split at white space;
models of sentence pieces are not read. KenLM takes one sentence a call: this is one of the slow filters.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.errors import MissingExtraError, RecipeError
from shardkit.writers.filters.perplexity_settings import PerplexityConfig
from shardkit.writers.filters.rules import Rule
from shardkit.writers.filters.text_batch import TextBatch
from shardkit.writers.kernels.words import normalized_words

__all__ = ["PerplexityFilter"]


class PerplexityFilter:
    """Drops documents that are too predictable or not predictable enough. RecipeError for a bad model."""

    reasons = ("too_low", "too_high")

    def __init__(self, config: PerplexityConfig, folder: Path | None = None) -> None:
        path = (folder or Path()) / config.model
        try:
            state = path.stat()
        except OSError as error:
            raise RecipeError(f"perplexity.model: {path}: {error.strerror or error}") from None
        self._config = config
        self._model = _load(path, state.st_size, state.st_mtime_ns)
        self._split = normalized_words if config.words == "normalized" else str.split

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge."""
        values = np.zeros(len(batch), np.float64)
        for number in np.flatnonzero(batch.wanted).tolist():
            values[number] = self._perplexity(batch.texts[number].as_py())
        low, high = self._config.min_perplexity, self._config.max_perplexity
        return [
            Rule("too_low", None if low is None else (values < low) & (values > 0), values),
            Rule("too_high", None if high is None else values > high, values),
        ]

    def _perplexity(self, text: str) -> float:
        total, length = 0.0, 0
        for line in text.splitlines():
            words = self._split(line)
            if words:
                total += self._model.score(" ".join(words))
                length += len(words) + 1
        return float(10 ** min(-total / length, 300)) if length else 0.0


@lru_cache(maxsize=2)
def _load(path: Path, _size: int, _time: int) -> Any:
    """The model, kept for the process's next task as long as the file stays the same."""
    try:
        import kenlm
    except ImportError as error:
        raise MissingExtraError("kenlm", "perplexity", "the perplexity filter") from error
    config = kenlm.Config()
    config.show_progress = False
    config.arpa_complain = kenlm.ARPALoadComplain.NONE
    try:
        return kenlm.Model(str(path), config)
    except (OSError, RuntimeError) as error:
        raise RecipeError(f"perplexity.model: {path} is not a KenLM model: {error}") from error
