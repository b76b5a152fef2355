"""Gopher's quality and repetition rules as dolma implements them; every decision equals dolma's.

Source: dolma's `gopher_v1` tagger, with the bounds and the order of Dolma v1.5's `mixing/cc-head.yaml`;
settings have the names of the tagger's attributes.

Quality, compared with datatrove (`gopher.py`): the median length of words instead of the mean, words with a
symbol instead of symbols, occurrences of required words instead of distinct ones, lines without stripping,
and * instead of •.

Repetition, compared with datatrove: every copy counts, the first one too; characters are those of words, and
those of all n-grams for repeated n-grams; there is no rule about paragraphs. That configuration names the
most common n-grams "…2gram" while the tagger writes "…2grams", so these three rules may never have dropped a
document in Dolma; `most_common_ngrams: []` leaves them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from pydantic import Field

from shardkit.writers.filters.base import FilterSettings, Rule, ratio
from shardkit.writers.filters.gopher import NgramBound
from shardkit.writers.settings import FieldName, Ratio

if TYPE_CHECKING:
    from shardkit.writers.filters.text_batch import TextBatch

__all__ = ["DolmaQualityConfig", "DolmaQualityFilter", "DolmaRepetitionConfig", "DolmaRepetitionFilter"]


class DolmaQualityConfig(FilterSettings):
    """Gopher's quality rules as dolma counts them. null: no rule."""

    min_word_count: int | None = Field(default=50, ge=0, description="Fewest words.")
    max_word_count: int | None = Field(default=100_000, ge=0, description="Most words.")
    min_median_word_length: float | None = Field(default=3, ge=0, description="Least median word length.")
    max_median_word_length: float | None = Field(
        default=10, ge=0, le=1024, description="Greatest median word length."
    )
    max_symbol_to_word_ratio: Ratio | None = Field(default=0.1, description="Most words with # or ….")
    min_alpha_word_fraction: Ratio | None = Field(
        default=0.8, description="Least part of words with a letter."
    )
    min_required_word_count: int | None = Field(
        default=2, ge=0, description="Fewest occurrences of required words."
    )
    required_words: tuple[FieldName, ...] = Field(
        default=("the", "be", "to", "of", "and", "that", "have", "with"),
        strict=False,
        max_length=64,
        description="The required words, compared exactly.",
    )
    max_bullet_line_fraction: Ratio | None = Field(
        default=0.9, description="Most lines that start with * or -."
    )
    max_ellipsis_line_fraction: Ratio | None = Field(default=0.3, description="Most lines that end with ….")

    def build(self, folder: Path) -> DolmaQualityFilter:
        """See FilterSettings.build."""
        return DolmaQualityFilter(self)


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

    def __init__(self, config: DolmaQualityConfig) -> None:
        self._config = config

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge."""
        from shardkit.writers.kernels.dolma_statistics import dolma_statistics

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


class DolmaRepetitionConfig(FilterSettings):
    """Gopher's repetition rules as dolma counts them: all copies. null: no rule."""

    max_duplicate_line_fraction: Ratio | None = Field(
        default=0.3, description="Most lines of which there are copies."
    )
    max_duplicate_line_character_fraction: Ratio | None = Field(
        default=0.3, description="Most characters in those, per character of words."
    )
    most_common_ngrams: tuple[NgramBound, ...] = Field(
        default=((2, 0.2), (3, 0.18), (4, 0.16)),
        strict=False,
        max_length=16,
        description="[n, most characters in the most frequent n-gram].",
    )
    duplicate_ngrams: tuple[NgramBound, ...] = Field(
        default=((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10)),
        strict=False,
        max_length=16,
        description="[n, most characters in n-grams that occur twice or more, of those of all n-grams].",
    )

    def build(self, folder: Path) -> DolmaRepetitionFilter:
        """See FilterSettings.build."""
        return DolmaRepetitionFilter(self)


class DolmaRepetitionFilter:
    """Drops documents that say the same again and again."""

    def __init__(self, config: DolmaRepetitionConfig) -> None:
        self._config = config
        self.reasons = (
            "duplicate_lines",
            "characters_in_duplicate_lines",
            *(f"characters_in_most_common_{n}grams" for n, _ in config.most_common_ngrams),
            *(f"characters_in_duplicate_{n}grams" for n, _ in config.duplicate_ngrams),
        )

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge."""
        from shardkit.writers.kernels.lines import ALL_LINES, line_repetition
        from shardkit.writers.kernels.ngrams import COPIES, TOP, ngram_statistics

        config = self._config
        where = (batch.data, batch.offsets, batch.wanted)
        jobs = [(n, TOP) for n, _ in config.most_common_ngrams]
        jobs += [(n, COPIES) for n, _ in config.duplicate_ngrams]
        counts = ngram_statistics(*where, jobs)
        lines = line_repetition(*where, ALL_LINES)
        bounds: list[float | None] = [
            config.max_duplicate_line_fraction,
            config.max_duplicate_line_character_fraction,
            *(most for _, most in config.most_common_ngrams + config.duplicate_ngrams),
        ]
        characters = np.maximum(counts.word_characters, 1)
        values = [ratio(lines.repeated, lines.elements), ratio(lines.characters, characters)]
        for row, (_, kind) in enumerate(jobs):
            if kind == TOP:
                values.append(ratio(counts.first[row] * counts.second[row], characters))
            else:
                values.append(ratio(counts.first[row], counts.second[row]))
        return [
            Rule(name, None if most is None else value > most, value)
            for name, most, value in zip(self.reasons, bounds, values, strict=True)
        ]
