"""The settings of cutting repeated lines within a document."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shardkit.writers.filters.settings import FilterSettings, Ratio

__all__ = ["RepeatedLinesConfig"]


class RepeatedLinesConfig(FilterSettings):
    """What a repetition is within a document; the first copy stays."""

    unit: Literal["line", "paragraph"] = Field(
        default="line", description="line, or paragraph: between blank lines."
    )
    min_characters: int = Field(default=1, ge=1, description="Shorter units are never cut.")
    max_cut_fraction: Ratio | None = Field(
        default=None, description="Drop documents of which more bytes are cut; null: none."
    )
