"""Settings of dolma's variants of Gopher's rules: names of its gopher_v1 attributes, bounds of Dolma v1.5."""

from __future__ import annotations

from pydantic import Field

from shardkit.writers.filters.gopher_repetition_settings import NgramBound
from shardkit.writers.filters.settings import FieldName, FilterSettings, Ratio

__all__ = ["DolmaQualityConfig", "DolmaRepetitionConfig"]


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
