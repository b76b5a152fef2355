"""Bounds on the length of a text, and on its shares of symbols, digits, capitals, white space and letters.

Words are split as by `str.split()`; characters are code points. Kinds of characters are Python's
(`str.isdigit` and so on). A symbol has Unicode category P or S; combining marks, which many scripts need in
every word, are not symbols. A ratio whose denominator is 0 is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from shardkit.settings import Ratio
from shardkit.writers.filters.base import FilterSettings, Rule, above, below, ratio

if TYPE_CHECKING:
    from shardkit.writers.filters.batch import TextBatch


class LengthFilter(FilterSettings):
    """Bounds on a document's length; null switches a bound off. Words are separated by white space."""

    reasons: ClassVar = ("too_few_words", "too_many_words", "too_few_characters", "too_many_characters")

    min_words: int | None = Field(default=None, ge=0, description="Minimum number of words.")
    max_words: int | None = Field(default=None, ge=0, description="Maximum number of words.")
    min_chars: int | None = Field(default=None, ge=0, description="Minimum number of characters.")
    max_chars: int | None = Field(default=None, ge=0, description="Maximum number of characters.")

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge."""
        counts = batch.words()
        return [
            below("too_few_words", counts.words, self.min_words),
            above("too_many_words", counts.words, self.max_words),
            below("too_few_characters", counts.characters, self.min_chars),
            above("too_many_characters", counts.characters, self.max_chars),
        ]


class RatiosFilter(FilterSettings):
    """Bounds on the fractions of kinds of characters (code points); null switches a rule off."""

    reasons: ClassVar = (
        "too_many_symbols",
        "too_many_digits",
        "too_many_capitals",
        "too_much_white_space",
        "too_few_letters",
    )

    max_symbol_ratio: Ratio | None = Field(
        default=None, description="Maximum fraction of symbols and punctuation (Unicode P and S)."
    )
    max_digit_ratio: Ratio | None = Field(
        default=None, description="Maximum fraction of digits (str.isdigit)."
    )
    max_uppercase_ratio: Ratio | None = Field(
        default=None, description="Maximum fraction of letters (str.isalpha) in upper case (str.isupper)."
    )
    max_white_space_ratio: Ratio | None = Field(
        default=None, description="Maximum fraction of white space (str.isspace)."
    )
    min_alphabetic_ratio: Ratio | None = Field(
        default=None, description="Minimum fraction of letters (str.isalpha), white space not counted."
    )

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge."""
        from shardkit.kernels.utf8 import count_kinds

        counts = count_kinds(batch.data, batch.offsets, batch.wanted)
        characters = counts.characters
        return [
            above("too_many_symbols", ratio(counts.symbols, characters), self.max_symbol_ratio),
            above("too_many_digits", ratio(counts.digits, characters), self.max_digit_ratio),
            above("too_many_capitals", ratio(counts.upper_case, counts.letters), self.max_uppercase_ratio),
            above("too_much_white_space", ratio(counts.space, characters), self.max_white_space_ratio),
            below(
                "too_few_letters", ratio(counts.letters, characters - counts.space), self.min_alphabetic_ratio
            ),
        ]
