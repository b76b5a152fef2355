"""Gopher's quality rules as dolma has them, decision for decision.

Source: dolma's `gopher_v1` tagger, and bounds and order of Dolma v1.5's `mixing/cc-head.yaml`. Other than in
datatrove's reading: the median length of words instead of the mean, words with a symbol instead of symbols,
occurrences of required words instead of distinct ones, lines as they are, * instead of •.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardkit.writers.filters.dolma_settings import DolmaQualityConfig
from shardkit.writers.filters.dolma_statistics import dolma_statistics
from shardkit.writers.filters.rules import Rule, ratio
from shardkit.writers.filters.text_batch import TextBatch

__all__ = ["DolmaQualityFilter"]


class DolmaQualityFilter:
    """Drops documents that do not look like running text."""

    reasons = (
        "word_count_below",
        "word_count_above",
        "median_word_length_below",
        "median_word_length_above",
        "symbol_to_word_ratio",
        "words_with_alpha_character",
        "required_word_count",
        "lines_starting_with_bullet_point",
        "lines_ending_with_ellipsis",
    )

    def __init__(self, config: DolmaQualityConfig, folder: Path | None = None) -> None:
        self._config = config

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge."""
        config = self._config
        counts = dolma_statistics(batch.data, batch.offsets, batch.wanted, config.required_words)
        median: npt.NDArray[np.float64] = counts.median_twice / 2
        symbols, letters = ratio(counts.symbol_words, counts.words), ratio(counts.letter_words, counts.words)
        bullets, ends = ratio(counts.bullet_lines, counts.lines), ratio(counts.ellipsis_lines, counts.lines)
        below = (
            (0, counts.words, config.min_word_count),
            (2, median, config.min_median_word_length),
            (5, letters, config.min_alpha_word_fraction),
            (6, counts.required, config.min_required_word_count),
        )
        above = (
            (1, counts.words, config.max_word_count),
            (3, median, config.max_median_word_length),
            (4, symbols, config.max_symbol_to_word_ratio),
            (7, bullets, config.max_bullet_line_fraction),
            (8, ends, config.max_ellipsis_line_fraction),
        )
        rules = {
            at: Rule(self.reasons[at], None if bound is None else values < bound, values)
            for at, values, bound in below
        }
        for at, values, bound in above:
            rules[at] = Rule(self.reasons[at], None if bound is None else values > bound, values)
        return [rules[at] for at in range(len(self.reasons))]
