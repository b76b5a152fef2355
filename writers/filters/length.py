"""Bounds on the number of words and characters."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardkit.writers.filters.config import LengthConfig
from shardkit.writers.filters.rules import first_failing
from shardkit.writers.filters.text_batch import TextBatch

__all__ = ["LengthFilter"]


class LengthFilter:
    """Drops documents outside the bounds."""

    reasons = ("too_few_words", "too_many_words", "too_few_characters", "too_many_characters")

    def __init__(self, config: LengthConfig) -> None:
        self._config = config

    def codes(self, batch: TextBatch) -> npt.NDArray[np.int64]:
        """See Filter.codes."""
        config, counts = self._config, batch.words()
        return first_failing(
            [
                None if config.min_words is None else counts.words < config.min_words,
                None if config.max_words is None else counts.words > config.max_words,
                None if config.min_chars is None else counts.characters < config.min_chars,
                None if config.max_chars is None else counts.characters > config.max_chars,
            ],
            len(batch),
        )
