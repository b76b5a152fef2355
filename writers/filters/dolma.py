"""Gopher's quality and repetition rules as dolma implements them; every decision equals dolma's.

Source: dolma's `gopher_v1` tagger, with the bounds and the order of Dolma v1.5's `mixing/cc-head.yaml`;
settings have the names of the tagger's attributes.

The quality rules differ from datatrove's (`gopher.py`): they use the median word length instead of the mean,
count words with a symbol instead of symbols, count all occurrences of required words instead of distinct
words, do not strip lines, and look for * instead of the bullet U+2022.

The repetition rules differ from datatrove's: every copy counts, including the first; character counts are
divided by the characters of all words or, for repeated n-grams, by the characters of all n-grams; there is no
rule about paragraphs. Dolma's configuration names the rules on most common n-grams "...2gram", but the tagger
writes "...2grams", so these three rules may never have dropped a document in Dolma; `most_common_ngrams: []`
switches them off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from shardkit.settings import FieldName, Listed, Ratio
from shardkit.writers.filters.base import FilterSettings, Rule, above, below, ratio
from shardkit.writers.filters.gopher import NgramBound

if TYPE_CHECKING:
    from shardkit.writers.filters.batch import TextBatch


class DolmaQualityFilter(FilterSettings):
    """Gopher's quality rules as implemented in dolma; null switches a rule off."""

    reasons: ClassVar = (
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

    min_word_count: int | None = Field(default=50, ge=0, description="Minimum number of words.")
    max_word_count: int | None = Field(default=100_000, ge=0, description="Maximum number of words.")
    min_median_word_length: float | None = Field(default=3, ge=0, description="Minimum median word length.")
    max_median_word_length: float | None = Field(
        default=10, ge=0, le=1024, description="Maximum median word length."
    )
    max_symbol_to_word_ratio: Ratio | None = Field(
        default=0.1, description="Maximum fraction of words with # or the ellipsis U+2026."
    )
    min_alpha_word_fraction: Ratio | None = Field(
        default=0.8, description="Minimum fraction of words with a letter."
    )
    min_required_word_count: int | None = Field(
        default=2, ge=0, description="Minimum number of occurrences of required words."
    )
    required_words: Listed[FieldName] = Field(
        default=("the", "be", "to", "of", "and", "that", "have", "with"),
        max_length=64,
        description="The required words, compared exactly.",
    )
    max_bullet_line_fraction: Ratio | None = Field(
        default=0.9, description="Maximum fraction of lines that start with * or -."
    )
    max_ellipsis_line_fraction: Ratio | None = Field(
        default=0.3, description="Maximum fraction of lines that end with the ellipsis U+2026."
    )

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge."""
        from shardkit.writers.kernels.dolma_statistics import dolma_statistics

        counts = dolma_statistics(batch.data, batch.offsets, batch.wanted, self.required_words)
        words, lines, median = counts.words, counts.lines, counts.median_twice / 2
        letters, ends = ratio(counts.letter_words, words), ratio(counts.ellipsis_lines, lines)
        return [
            below("word_count_below", words, self.min_word_count),
            above("word_count_above", words, self.max_word_count),
            below("median_word_length_below", median, self.min_median_word_length),
            above("median_word_length_above", median, self.max_median_word_length),
            above("symbol_to_word_ratio", ratio(counts.symbol_words, words), self.max_symbol_to_word_ratio),
            below("words_with_alpha_character", letters, self.min_alpha_word_fraction),
            below("required_word_count", counts.required, self.min_required_word_count),
            above(
                "lines_starting_with_bullet_point",
                ratio(counts.bullet_lines, lines),
                self.max_bullet_line_fraction,
            ),
            above("lines_ending_with_ellipsis", ends, self.max_ellipsis_line_fraction),
        ]


class DolmaRepetitionFilter(FilterSettings):
    """Gopher's repetition rules as in dolma, which counts all copies; null switches a rule off."""

    max_duplicate_line_fraction: Ratio | None = Field(
        default=0.3, description="Maximum fraction of lines that have copies."
    )
    max_duplicate_line_character_fraction: Ratio | None = Field(
        default=0.3, description="Maximum fraction of characters in lines that have copies."
    )
    most_common_ngrams: tuple[NgramBound, ...] = Field(
        default=((2, 0.2), (3, 0.18), (4, 0.16)),
        strict=False,
        max_length=16,
        description="Pairs of n and the maximum fraction of characters in the most frequent n-gram.",
    )
    duplicate_ngrams: tuple[NgramBound, ...] = Field(
        default=((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10)),
        strict=False,
        max_length=16,
        description="Pairs of n and the maximum fraction of characters in n-grams that occur more than once.",
    )

    @property
    def reasons(self) -> tuple[str, ...]:
        """See Filter.reasons."""
        return (
            "duplicate_lines",
            "characters_in_duplicate_lines",
            *(f"characters_in_most_common_{n}grams" for n, _ in self.most_common_ngrams),
            *(f"characters_in_duplicate_{n}grams" for n, _ in self.duplicate_ngrams),
        )

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge."""
        from shardkit.writers.kernels.lines import ALL_LINES, line_repetition
        from shardkit.writers.kernels.ngrams import COPIES, TOP, ngram_statistics

        where = (batch.data, batch.offsets, batch.wanted)
        common = [(n, TOP) for n, _ in self.most_common_ngrams]
        counts = ngram_statistics(*where, common + [(n, COPIES) for n, _ in self.duplicate_ngrams])
        lines = line_repetition(*where, ALL_LINES)
        whole = np.maximum(counts.word_characters, 1)
        in_lines = ratio(lines.characters, whole)
        rules = [
            above("duplicate_lines", ratio(lines.repeated, lines.elements), self.max_duplicate_line_fraction),
            above("characters_in_duplicate_lines", in_lines, self.max_duplicate_line_character_fraction),
        ]
        row = 0
        for n, most in self.most_common_ngrams:
            part = ratio(counts.first[row] * counts.second[row], whole)
            rules.append(above(f"characters_in_most_common_{n}grams", part, most))
            row += 1
        for n, most in self.duplicate_ngrams:
            part = ratio(counts.first[row], counts.second[row])
            rules.append(above(f"characters_in_duplicate_{n}grams", part, most))
            row += 1
        return rules
