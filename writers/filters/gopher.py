"""Gopher's quality and repetition rules: every decision equals datatrove's on the same words.

Source: Rae et al. 2021, table A1, as implemented by datatrove's GopherQualityFilter and
GopherRepetitionFilter (`gopher_quality_filter.py`, `gopher_repetition_filter.py`).

Quality: "plain" words have at least one character outside datatrove's punctuation set. # and ellipses are
counted anywhere in the text and divided by the number of all words. A bound of null or 0 switches its rule
off. For a text without words, where datatrove divides by zero, ratios are 0.

Repetition: only copies after the first count, and characters are divided by all characters of the text,
including white space. A bound of null or 0 switches off a rule about lines or paragraphs, but not one about
n-grams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from shardkit.settings import WHITE_SPACE, FieldName, Listed, Ratio
from shardkit.writers.filters.base import Rule, WordSettings, above, below, ratio

if TYPE_CHECKING:
    from shardkit.writers.filters.batch import TextBatch


# (n, maximum fraction); strict=False accepts a list for the tuple. The fraction may be up to 10, because
# copies of an n-gram may overlap and have more characters than the text. Percentages such as 20 are refused.
NgramBound = Annotated[
    tuple[Annotated[int, Field(ge=1, le=64)], Annotated[float, Field(ge=0, le=10)]], Field(strict=False)
]


class GopherQualityFilter(WordSettings):
    """Gopher's quality rules as implemented in datatrove; null or 0 switches a rule off."""

    reasons: ClassVar = (
        "gopher_short_doc",
        "gopher_long_doc",
        "gopher_below_avg_threshold",
        "gopher_above_avg_threshold",
        "gopher_too_many_hashes",
        "gopher_too_many_ellipsis",
        "gopher_too_many_bullets",
        "gopher_too_many_end_ellipsis",
        "gopher_below_alpha_threshold",
        "gopher_enough_stop_words",  # datatrove's name for dropping documents with too few stop words
    )

    min_doc_words: int | None = Field(
        default=50, ge=0, description="Minimum number of words, without words of punctuation only."
    )
    max_doc_words: int | None = Field(
        default=100_000, ge=0, description="Maximum number of words, without words of punctuation only."
    )
    min_avg_word_length: float | None = Field(
        default=3, ge=0, description="Minimum mean word length, without words of punctuation only."
    )
    max_avg_word_length: float | None = Field(
        default=10, ge=0, description="Maximum mean word length, without words of punctuation only."
    )
    max_symbol_word_ratio: float | None = Field(
        default=0.1, ge=0, description="Maximum # per word, and maximum ellipses (... or U+2026) per word."
    )
    max_bullet_lines_ratio: Ratio | None = Field(
        default=0.9, description="Maximum fraction of lines that start with a bullet (U+2022) or -."
    )
    max_ellipsis_lines_ratio: Ratio | None = Field(
        default=0.3, description="Maximum fraction of lines that end with an ellipsis (... or U+2026)."
    )
    max_non_alpha_words_ratio: Ratio | None = Field(
        default=0.8, description="Minimum fraction of words with a letter; `max_` is datatrove's name."
    )
    min_stop_words: int | None = Field(default=2, ge=0, description="Minimum number of distinct stop words.")
    stop_words: Listed[FieldName] = Field(
        default=("the", "be", "to", "of", "and", "that", "have", "with"),
        max_length=64,
        description="The stop words, compared exactly.",
    )

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge."""
        counts = batch.words(self.stop_words, self.words)
        words, lines, plain = counts.words, counts.lines, counts.plain_words
        mean = ratio(counts.plain_word_characters, plain)
        low, high = self.min_avg_word_length, self.max_avg_word_length
        measured = plain > 0  # a text without plain words has no mean length, and fails neither bound
        symbols = self.max_symbol_word_ratio or None
        letters = ratio(counts.letter_words, words)
        return [
            below("gopher_short_doc", plain, self.min_doc_words or None),
            above("gopher_long_doc", plain, self.max_doc_words or None),
            Rule("gopher_below_avg_threshold", measured & (mean < low) if low else None, mean, low),
            Rule("gopher_above_avg_threshold", measured & (mean > high) if high else None, mean, high),
            above("gopher_too_many_hashes", ratio(counts.hashes, words), symbols),
            above("gopher_too_many_ellipsis", ratio(counts.ellipses, words), symbols),
            above(
                "gopher_too_many_bullets",
                ratio(counts.bullet_lines, lines),
                self.max_bullet_lines_ratio or None,
            ),
            above(
                "gopher_too_many_end_ellipsis",
                ratio(counts.ellipsis_lines, lines),
                self.max_ellipsis_lines_ratio or None,
            ),
            below("gopher_below_alpha_threshold", letters, self.max_non_alpha_words_ratio or None),
            below("gopher_enough_stop_words", counts.stop_words, self.min_stop_words or None),
        ]


class GopherRepetitionFilter(WordSettings):
    """Gopher's repetition rules as implemented in datatrove; null or 0 switches off a rule on lines."""

    dup_line_frac: Ratio | None = Field(
        default=0.3, description="Maximum fraction of lines that repeat an earlier line."
    )
    dup_para_frac: Ratio | None = Field(default=0.3, description="Maximum fraction of repeated paragraphs.")
    dup_line_char_frac: Ratio | None = Field(
        default=0.2, description="Maximum fraction of characters in repeated lines."
    )
    dup_para_char_frac: Ratio | None = Field(
        default=0.2, description="Maximum fraction of characters in repeated paragraphs."
    )
    top_n_grams: tuple[NgramBound, ...] = Field(
        default=((2, 0.2), (3, 0.18), (4, 0.16)),
        strict=False,
        max_length=16,
        description="Pairs of n and the maximum fraction of characters in the most frequent n-gram.",
    )
    dup_n_grams: tuple[NgramBound, ...] = Field(
        default=((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10)),
        strict=False,
        max_length=16,
        description="Pairs of n and the maximum fraction of characters in repeated n-grams.",
    )

    @property
    def reasons(self) -> tuple[str, ...]:
        """See Filter.reasons."""
        return (
            "empty",
            "dup_para_frac",
            "dup_para_char_frac",
            "dup_line_frac",
            "dup_line_char_frac",
            *(f"top_{n}_gram" for n, _ in self.top_n_grams),
            *(f"duplicated_{n}_n_grams" for n, _ in self.dup_n_grams),
        )

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge."""
        from shardkit.writers.kernels.lines import LINES, PARAGRAPHS, line_repetition
        from shardkit.writers.kernels.ngrams import EXCESS, TOP, ngram_statistics

        where = (batch.data, batch.offsets, batch.wanted)
        jobs = [(n, TOP) for n, _ in self.top_n_grams] + [(n, EXCESS) for n, _ in self.dup_n_grams]
        counts = ngram_statistics(*batch.split(self.words), batch.wanted, jobs)
        lines, paragraphs = line_repetition(*where, LINES), line_repetition(*where, PARAGRAPHS)
        whole = counts.characters if self.words == WHITE_SPACE else batch.words().characters
        rules = [
            Rule("empty", batch.sizes == 0, whole),
            above(
                "dup_para_frac", ratio(paragraphs.repeated, paragraphs.elements), self.dup_para_frac or None
            ),
            above("dup_para_char_frac", ratio(paragraphs.characters, whole), self.dup_para_char_frac or None),
            above("dup_line_frac", ratio(lines.repeated, lines.elements), self.dup_line_frac or None),
            above("dup_line_char_frac", ratio(lines.characters, whole), self.dup_line_char_frac or None),
        ]
        row = 0
        for n, most in self.top_n_grams:  # n - 1: the characters of an n-gram include single spaces
            characters = counts.first[row] * (counts.second[row] + n - 1)
            rules.append(above(f"top_{n}_gram", ratio(characters, whole), most))
            row += 1
        for n, most in self.dup_n_grams:
            rules.append(above(f"duplicated_{n}_n_grams", ratio(counts.first[row], whole), most))
            row += 1
        return rules
