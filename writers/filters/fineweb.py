"""FineWeb's line rules: every decision equals datatrove's FineWebQualityFilter on the same words.

Source: Penedo et al. 2024 (the FineWeb paper), as implemented in `fineweb_quality_filter.py`. Lines are split
at newlines, and blank lines do not count; a document with only blank lines fails the rule "empty".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from shardkit.settings import Ratio
from shardkit.writers.filters.base import Rule, WordSettings, above, ratio

if TYPE_CHECKING:
    from shardkit.writers.filters.batch import TextBatch


class FinewebQualityFilter(WordSettings):
    """FineWeb's own line rules as implemented in datatrove."""

    reasons: ClassVar = ("empty", "line_punct_ratio", "short_line_ratio", "char_dup_ratio", "list_ratio")

    line_punct_thr: Ratio = Field(
        default=0.12, description="Minimum fraction of lines that end in terminal punctuation."
    )
    line_punct_exclude_zero: bool = Field(
        default=False, description="Pass documents that have no line with terminal punctuation."
    )
    short_line_thr: Ratio = Field(
        default=0.67, description="Maximum fraction of lines of at most short_line_length characters."
    )
    short_line_length: int = Field(default=30, ge=0, description="Maximum characters in a short line.")
    char_duplicates_ratio: Ratio = Field(
        default=0.01, description="Maximum fraction of characters in repeated lines."
    )
    new_line_ratio: float = Field(default=0.3, ge=0, description="Maximum number of newlines per word.")

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge."""
        lines, words = batch.lines(self.short_line_length), batch.words(splitter=self.words)
        terminal = ratio(lines.terminal_lines, lines.lines)
        unpunctuated = terminal < self.line_punct_thr
        if self.line_punct_exclude_zero:
            unpunctuated &= terminal != 0
        short = ratio(lines.short_lines, lines.lines)
        repeated = ratio(lines.repeated_characters, words.characters - words.newlines)
        return [
            Rule("empty", lines.lines == 0, lines.lines),
            Rule("line_punct_ratio", unpunctuated, terminal, self.line_punct_thr),
            above("short_line_ratio", short, self.short_line_thr),
            above("char_dup_ratio", repeated, self.char_duplicates_ratio),
            above("list_ratio", ratio(words.newlines, words.words), self.new_line_ratio),
        ]
