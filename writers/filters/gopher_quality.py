"""Gopher's quality rules: datatrove's GopherQualityFilter, decision for decision, on str.split() words.

Source: Rae et al. 2021, table A1, as implemented by datatrove (`gopher_quality_filter.py`): "plain" words are
those with a character outside its punctuation set; # and ellipses are counted in the text but divided by all
words. As there, a bound of null or 0 switches its rule off. A text without any word, where datatrove fails
with a division by zero, has ratios of 0 here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardkit.writers.filters.config import GopherQualityConfig
from shardkit.writers.filters.rules import Rule, ratio
from shardkit.writers.filters.text_batch import TextBatch

__all__ = ["GopherQualityFilter"]


class GopherQualityFilter:
    """Drops documents that do not look like running text."""

    reasons = (
        "gopher_short_doc",
        "gopher_long_doc",
        "gopher_below_avg_threshold",
        "gopher_above_avg_threshold",
        "gopher_too_many_hashes",
        "gopher_too_many_ellipsis",
        "gopher_too_many_bullets",
        "gopher_too_many_end_ellipsis",
        "gopher_below_alpha_threshold",
        "gopher_enough_stop_words",  # datatrove's name; the document has too few of them
    )

    def __init__(self, config: GopherQualityConfig, folder: Path | None = None) -> None:
        self._config = config

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge."""
        config = self._config
        counts = batch.words(tuple(config.stop_words))
        mean = ratio(counts.plain_word_characters, counts.plain_words)
        measured = counts.plain_words > 0  # the mean of nothing fails neither bound
        symbols = config.max_symbol_word_ratio
        low, high = config.min_avg_word_length, config.max_avg_word_length
        bullets, ends = config.max_bullet_lines_ratio, config.max_ellipsis_lines_ratio
        letters = config.max_non_alpha_words_ratio
        fewest, most = config.min_doc_words, config.max_doc_words
        hashes, ellipses = ratio(counts.hashes, counts.words), ratio(counts.ellipses, counts.words)
        bullet_lines = ratio(counts.bullet_lines, counts.lines)
        ellipsis_lines = ratio(counts.ellipsis_lines, counts.lines)
        letter_words = ratio(counts.letter_words, counts.words)
        stop_words = config.min_stop_words
        judged = (
            (counts.plain_words < fewest if fewest else None, counts.plain_words),
            (counts.plain_words > most if most else None, counts.plain_words),
            (measured & (mean < low) if low else None, mean),
            (measured & (mean > high) if high else None, mean),
            (hashes > symbols if symbols else None, hashes),
            (ellipses > symbols if symbols else None, ellipses),
            (bullet_lines > bullets if bullets else None, bullet_lines),
            (ellipsis_lines > ends if ends else None, ellipsis_lines),
            (letter_words < letters if letters else None, letter_words),
            (counts.stop_words < stop_words if stop_words else None, counts.stop_words),
        )
        return [Rule(name, *values) for name, values in zip(self.reasons, judged, strict=True)]
