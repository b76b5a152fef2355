"""FineWeb's own line rules: datatrove's FineWebQualityFilter, decision for decision, on str.split() words.

Source: Penedo et al. 2024 (the FineWeb paper), as implemented in `fineweb_quality_filter.py`. Lines are cut
at newlines, blank ones do not count; a document without any is "empty".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardkit.writers.filters.config import FinewebQualityConfig
from shardkit.writers.filters.rules import Rule, ratio
from shardkit.writers.filters.text_batch import TextBatch

__all__ = ["FinewebQualityFilter"]


class FinewebQualityFilter:
    """Drops documents that look like lists, menus and repeated boilerplate."""

    reasons = ("empty", "line_punct_ratio", "short_line_ratio", "char_dup_ratio", "list_ratio")

    def __init__(self, config: FinewebQualityConfig, folder: Path | None = None) -> None:
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
