"""The settings of C4's line rules."""

from __future__ import annotations

from pydantic import Field

from shardkit.writers.filters.settings import FilterSettings

__all__ = ["C4QualityConfig"]


class C4QualityConfig(FilterSettings):
    """C4's rules with datatrove's names and defaults: lines are cut out, and some documents dropped."""

    remove_citations: bool = Field(default=True, description="Take out [1], [], [edit], [citation needed].")
    filter_no_terminal_punct: bool = Field(
        default=True,
        description="Cut lines that do not end in . ? ! \" or ', or that end in ...; FineWeb: off.",
    )
    min_num_sentences: int = Field(default=5, ge=-1, description="Fewest sentences that stay; -1: no rule.")
    min_words_per_line: int = Field(default=3, ge=-1, description="Fewest words of a line; -1: no rule.")
    max_word_length: int = Field(
        default=1000, ge=-1, description="Most characters of each word of a line; -1: no rule."
    )
    filter_lorem_ipsum: bool = Field(default=True, description="Drop documents with lorem ipsum.")
    filter_javascript: bool = Field(default=True, description="Cut lines with javascript.")
    filter_curly_bracket: bool = Field(default=True, description="Drop documents with {.")
    filter_policy: bool = Field(default=True, description="Cut lines about cookies, privacy or terms of use.")
