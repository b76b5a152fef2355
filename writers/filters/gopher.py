"""Gopher's quality and repetition rules: every decision equals datatrove's, on `str.split()` words.

Source: Rae et al. 2021, table A1, as implemented by datatrove's GopherQualityFilter and
GopherRepetitionFilter (`gopher_quality_filter.py`, `gopher_repetition_filter.py`).

Quality: "plain" words have at least one character outside datatrove's punctuation set; # and ellipses are
counted in the text but divided by the number of all words. A bound of null or 0 switches its rule off. For a
text without words, where datatrove divides by zero, ratios are 0.

Repetition: only copies after the first count, and characters are divided by all characters of the text,
white space included. A bound of null or 0 switches a rule about lines or paragraphs off, but not one about
n-grams.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from shardkit.writers.filters.base import FilterSettings, Rule, ratio
from shardkit.writers.settings import FieldName, Ratio

if TYPE_CHECKING:
    from shardkit.writers.filters.text_batch import TextBatch

__all__ = [
    "GopherQualityConfig",
    "GopherQualityFilter",
    "GopherRepetitionConfig",
    "GopherRepetitionFilter",
    "NgramBound",
]

# [n, most]; in strict mode a list is not accepted for a tuple unless the field says so.
NgramBound = Annotated[tuple[Annotated[int, Field(ge=1, le=64)], Ratio], Field(strict=False)]


class GopherQualityConfig(FilterSettings):
    """Gopher's quality rules as datatrove counts them, on white-space words. null: no rule."""

    min_doc_words: int | None = Field(
        default=50, ge=0, description="Fewest words that are not only punctuation."
    )
    max_doc_words: int | None = Field(
        default=100_000, ge=0, description="Most words that are not only punctuation."
    )
    min_avg_word_length: float | None = Field(
        default=3, ge=0, description="Least mean length of those words."
    )
    max_avg_word_length: float | None = Field(
        default=10, ge=0, description="Greatest mean length of those words."
    )
    max_symbol_word_ratio: float | None = Field(
        default=0.1, ge=0, description="Most # per word; most ... and … per word."
    )
    max_bullet_lines_ratio: Ratio | None = Field(
        default=0.9, description="Most lines that start with • or -."
    )
    max_ellipsis_lines_ratio: Ratio | None = Field(
        default=0.3, description="Most lines that end with ... or …."
    )
    max_non_alpha_words_ratio: Ratio | None = Field(
        default=0.8, description="Least part of words with a letter (datatrove's name; it is a minimum)."
    )
    min_stop_words: int | None = Field(default=2, ge=0, description="Fewest distinct stop words.")
    stop_words: tuple[FieldName, ...] = Field(
        default=("the", "be", "to", "of", "and", "that", "have", "with"),
        strict=False,
        max_length=64,
        description="The stop words, compared exactly.",
    )

    def build(self, folder: Path) -> GopherQualityFilter:
        """See FilterSettings.build."""
        return GopherQualityFilter(self)


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

    def build(self, folder: Path) -> GopherRepetitionFilter:
        """See FilterSettings.build."""
        return GopherRepetitionFilter(self)


class GopherRepetitionFilter:
    """Drops documents that say the same again and again."""

    def __init__(self, config: GopherRepetitionConfig) -> None:
        self._config = config
        self.reasons = (
            "empty",
            "dup_para_frac",
            "dup_para_char_frac",
            "dup_line_frac",
            "dup_line_char_frac",
            *(f"top_{n}_gram" for n, _ in config.top_n_grams),
            *(f"duplicated_{n}_n_grams" for n, _ in config.dup_n_grams),
        )

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge."""
        from shardkit.writers.kernels.lines import LINES, PARAGRAPHS, line_repetition
        from shardkit.writers.kernels.ngrams import EXCESS, TOP, ngram_statistics

        config = self._config
        where = (batch.data, batch.offsets, batch.wanted)
        jobs = [(n, TOP) for n, _ in config.top_n_grams] + [(n, EXCESS) for n, _ in config.dup_n_grams]
        counts = ngram_statistics(*where, jobs)
        lines, paragraphs = line_repetition(*where, LINES), line_repetition(*where, PARAGRAPHS)
        values = [
            (config.dup_para_frac, ratio(paragraphs.repeated, paragraphs.elements)),
            (config.dup_para_char_frac, ratio(paragraphs.characters, counts.characters)),
            (config.dup_line_frac, ratio(lines.repeated, lines.elements)),
            (config.dup_line_char_frac, ratio(lines.characters, counts.characters)),
        ]
        judged = [Rule(self.reasons[0], batch.sizes == 0, counts.characters)]
        for name, (most, value) in zip(self.reasons[1:5], values, strict=True):
            judged.append(Rule(name, value > most if most else None, value))
        tops = len(config.top_n_grams)
        bounds = config.top_n_grams + config.dup_n_grams
        for row, (name, (n, most)) in enumerate(zip(self.reasons[5:], bounds, strict=True)):
            characters = counts.first[row]
            if row < tops:  # an n-gram's words are joined by single spaces
                characters = counts.first[row] * (counts.second[row] + n - 1)
            value = ratio(characters, counts.characters)
            judged.append(Rule(name, value > most, value))
        return judged
