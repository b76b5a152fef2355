"""Bounds on the length of a text, and on its shares of symbols, digits, capitals, white space and letters.

Words are those of `str.split()`, characters are code points. Kinds of characters are Python's (`str.isdigit`,
…); a symbol is of Unicode category P or S, so combining marks, which many scripts need in every word, are
none. A ratio without a denominator is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from shardkit.writers.filters.base import FilterSettings, Rule, ratio
from shardkit.writers.settings import Ratio

if TYPE_CHECKING:
    from shardkit.writers.filters.text_batch import TextBatch

__all__ = [
    "LengthConfig",
    "LengthFilter",
    "RatiosConfig",
    "RatiosFilter",
]


class LengthConfig(FilterSettings):
    """Bounds on a document's length; null means no bound. Words are separated by white space."""

    min_words: int | None = Field(default=None, ge=0, description="Fewest words.")
    max_words: int | None = Field(default=None, ge=0, description="Most words.")
    min_chars: int | None = Field(default=None, ge=0, description="Fewest characters (code points).")
    max_chars: int | None = Field(default=None, ge=0, description="Most characters (code points).")

    def build(self, folder: Path) -> LengthFilter:
        """See FilterSettings.build."""
        return LengthFilter(self)


class LengthFilter:
    """Drops documents outside the bounds."""

    reasons = ("too_few_words", "too_many_words", "too_few_characters", "too_many_characters")

    def __init__(self, config: LengthConfig) -> None:
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


class RatiosConfig(FilterSettings):
    """Bounds on kinds of characters (code points); null: no rule."""

    max_symbol_ratio: Ratio | None = Field(
        default=None, description="Most symbols and punctuation (Unicode P and S) per character."
    )
    max_digit_ratio: Ratio | None = Field(
        default=None, description="Most digits (str.isdigit) per character."
    )
    max_uppercase_ratio: Ratio | None = Field(
        default=None, description="Most upper-case letters per letter (str.isupper, str.isalpha)."
    )
    max_white_space_ratio: Ratio | None = Field(
        default=None, description="Most white space (str.isspace) per character."
    )
    min_alphabetic_ratio: Ratio | None = Field(
        default=None, description="Least letters (str.isalpha) per character that is no white space."
    )

    def build(self, folder: Path) -> RatiosFilter:
        """See FilterSettings.build."""
        return RatiosFilter(self)


class RatiosFilter:
    """Drops documents outside the bounds."""

    reasons = (
        "too_many_symbols",
        "too_many_digits",
        "too_many_capitals",
        "too_much_white_space",
        "too_few_letters",
    )

    def __init__(self, config: RatiosConfig) -> None:
        self._config = config

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge."""
        from shardkit.writers.kernels.utf8 import count_kinds

        config, counts = self._config, count_kinds(batch.data, batch.offsets, batch.wanted)
        symbols, digits, upper = counts.symbols, counts.digits, counts.upper_case
        space, letters, characters = counts.space, counts.letters, counts.characters
        most = (
            (config.max_symbol_ratio, ratio(symbols, characters)),
            (config.max_digit_ratio, ratio(digits, characters)),
            (config.max_uppercase_ratio, ratio(upper, letters)),
            (config.max_white_space_ratio, ratio(space, characters)),
        )
        rules = [
            Rule(name, None if bound is None else values > bound, values)
            for name, (bound, values) in zip(self.reasons, most, strict=False)
        ]
        values = ratio(letters, characters - space)
        least = config.min_alphabetic_ratio
        return [*rules, Rule("too_few_letters", None if least is None else values < least, values)]
