"""Settings of mC4's rule about paragraphs."""

from __future__ import annotations

from pydantic import Field

from shardkit.writers.filters.settings import FilterSettings

__all__ = ["C4ParagraphConfig"]


class C4ParagraphConfig(FilterSettings):
    """mC4's rule with datatrove's names and defaults: some long lines must be there."""

    min_paragraphs: int = Field(default=3, ge=0, description="Fewest long lines.")
    min_paragraph_len: int = Field(default=200, ge=0, description="Characters from which a line is long.")
