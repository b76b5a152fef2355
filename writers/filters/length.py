"""Bounds on the number of words and characters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardkit.writers.filters.config import LengthConfig
from shardkit.writers.filters.rules import Rule
from shardkit.writers.filters.text_batch import TextBatch

__all__ = ["LengthFilter"]


class LengthFilter:
    """Drops documents outside the bounds."""

    reasons = ("too_few_words", "too_many_words", "too_few_characters", "too_many_characters")

    def __init__(self, config: LengthConfig, folder: Path | None = None) -> None:
        self._config = config

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge."""
        config, counts = self._config, batch.words()
        words, characters = counts.words, counts.characters
        fails = (
            (None if config.min_words is None else words < config.min_words, words),
            (None if config.max_words is None else words > config.max_words, words),
            (None if config.min_chars is None else characters < config.min_chars, characters),
            (None if config.max_chars is None else characters > config.max_chars, characters),
        )
        return [Rule(name, *judged) for name, judged in zip(self.reasons, fails, strict=True)]
