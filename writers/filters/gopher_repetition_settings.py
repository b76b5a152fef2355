"""Settings of Gopher's repetition rules, with datatrove's names and defaults."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shardkit.writers.filters.settings import FilterSettings, Ratio

__all__ = ["GopherRepetitionConfig", "NgramBound"]

# [n, most]; strict models take no list for a tuple unless told so.
NgramBound = Annotated[tuple[Annotated[int, Field(ge=1, le=64)], Ratio], Field(strict=False)]


class GopherRepetitionConfig(FilterSettings):
    """Gopher's repetition rules as datatrove counts them, on white-space words. null or 0: no rule."""

    dup_line_frac: Ratio | None = Field(
        default=0.3, description="Most lines that stood before, of all lines."
    )
    dup_para_frac: Ratio | None = Field(default=0.3, description="Most paragraphs that stood before, of all.")
    dup_line_char_frac: Ratio | None = Field(
        default=0.2, description="Most characters in lines that stood before."
    )
    dup_para_char_frac: Ratio | None = Field(
        default=0.2, description="Most characters in paragraphs that stood before."
    )
    top_n_grams: tuple[NgramBound, ...] = Field(
        default=((2, 0.2), (3, 0.18), (4, 0.16)),
        strict=False,
        max_length=16,
        description="[n, most characters in the most frequent n-gram].",
    )
    dup_n_grams: tuple[NgramBound, ...] = Field(
        default=((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10)),
        strict=False,
        max_length=16,
        description="[n, most characters in n-grams met before].",
    )
