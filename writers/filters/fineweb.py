"""FineWeb's line rules: every decision equals datatrove's FineWebQualityFilter, on `str.split()` words.

Source: Penedo et al. 2024 (the FineWeb paper), as implemented in `fineweb_quality_filter.py`. Lines are cut
at newlines and blank ones do not count; a document without any line is "empty".
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

__all__ = ["FinewebQualityConfig", "FinewebQualityFilter"]


class FinewebQualityConfig(FilterSettings):
    """FineWeb's own line rules as datatrove counts them, on white-space words."""

    line_punct_thr: Ratio = Field(
        default=0.12, description="Least part of lines that end in terminal punctuation."
    )
    line_punct_exclude_zero: bool = Field(
        default=False, description="Pass documents that have no such line at all."
    )
    short_line_thr: Ratio = Field(
        default=0.67, description="Most lines of at most short_line_length characters."
    )
    short_line_length: int = Field(default=30, ge=0, description="Characters up to which a line is short.")
    char_duplicates_ratio: Ratio = Field(default=0.01, description="Most characters in repeated lines.")
    new_line_ratio: float = Field(default=0.3, ge=0, description="Most newlines per word.")

    def build(self, folder: Path) -> FinewebQualityFilter:
        """See FilterSettings.build."""
        return FinewebQualityFilter(self)


class FinewebQualityFilter:
    """Drops documents that look like lists, menus and repeated boilerplate."""

    reasons = ("empty", "line_punct_ratio", "short_line_ratio", "char_dup_ratio", "list_ratio")

    def __init__(self, config: FinewebQualityConfig) -> None:
        self._config = config

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge."""
        config = self._config
        lines, words = batch.lines(config.short_line_length), batch.words()
        terminal = ratio(lines.terminal_lines, lines.lines)
        unpunctuated = terminal < config.line_punct_thr
        if config.line_punct_exclude_zero:
            unpunctuated &= terminal != 0
        repeated = ratio(lines.repeated_characters, words.characters - words.newlines)
        short = ratio(lines.short_lines, lines.lines)
        newlines = ratio(words.newlines, words.words)
        judged = (
            (lines.lines == 0, lines.lines),
            (unpunctuated, terminal),
            (short > config.short_line_thr, short),
            (repeated > config.char_duplicates_ratio, repeated),
            (newlines > config.new_line_ratio, newlines),
        )
        return [Rule(name, *values) for name, values in zip(self.reasons, judged, strict=True)]
