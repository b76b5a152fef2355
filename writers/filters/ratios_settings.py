"""The settings of ratios of kinds of characters."""

from __future__ import annotations

from pydantic import Field

from shardkit.writers.filters.settings import FilterSettings, Ratio

__all__ = ["RatiosConfig"]


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
