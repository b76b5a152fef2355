"""Gopher's quality rules: datatrove's GopherQualityFilter, decision for decision, on str.split() words.

Source: Rae et al. 2021, table A1, as implemented by datatrove (`gopher_quality_filter.py`): "plain" words are
those with a character outside its punctuation set; # and ellipses are counted in the text but divided by all
words. As there, a bound of null or 0 switches its rule off. A text without any word, where datatrove fails
with a division by zero, has ratios of 0 here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardkit.writers.filters.config import GopherQualityConfig
from shardkit.writers.filters.rules import first_failing, ratio
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

    def __init__(self, config: GopherQualityConfig) -> None:
        self._config = config

    def codes(self, batch: TextBatch) -> npt.NDArray[np.int64]:
        """See Filter.codes."""
        config = self._config
        counts = batch.words(tuple(config.stop_words))
        mean = ratio(counts.plain_word_characters, counts.plain_words)
        measured = counts.plain_words > 0  # the mean of nothing fails neither bound
        symbols = config.max_symbol_word_ratio
        low, high = config.min_avg_word_length, config.max_avg_word_length
        bullets, ends = config.max_bullet_lines_ratio, config.max_ellipsis_lines_ratio
        letters = config.max_non_alpha_words_ratio
        fewest, most = config.min_doc_words, config.max_doc_words
        return first_failing(
            [
                counts.plain_words < fewest if fewest else None,
                counts.plain_words > most if most else None,
                measured & (mean < low) if low else None,
                measured & (mean > high) if high else None,
                ratio(counts.hashes, counts.words) > symbols if symbols else None,
                ratio(counts.ellipses, counts.words) > symbols if symbols else None,
                ratio(counts.bullet_lines, counts.lines) > bullets if bullets else None,
                ratio(counts.ellipsis_lines, counts.lines) > ends if ends else None,
                ratio(counts.letter_words, counts.words) < letters if letters else None,
                counts.stop_words < config.min_stop_words if config.min_stop_words else None,
            ],
            len(batch),
        )
