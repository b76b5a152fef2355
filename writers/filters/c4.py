"""C4's line rules and mC4's paragraph rule: every decision, and every byte that is kept, equals datatrove's.

`c4_quality` is datatrove's C4QualityFilter with split_paragraph (Raffel et al. 2020, section 2.2). Lines are
those of `str.splitlines()`, words those of `str.split()`, sentences those of `kernels/sentences.py`. The
rules are tried on each line in the order of `edits`. A line that reaches the lorem ipsum or { rule and fails
it drops the document, as do too few sentences in the remaining lines. A dropped document keeps its text, as
in datatrove. The kernel is `kernels/c4_lines.

`c4_paragraph` is datatrove's C4ParagraphFilter (Xue et al. 2021): a "paragraph" is what lies between
newlines, blank or not. (datatrove names the reason "< 3 paragraphs".)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from shardkit.writers.filters.base import Edit, FilterSettings, Rule

if TYPE_CHECKING:
    from shardkit.writers.filters.text_batch import TextBatch
    from shardkit.writers.kernels.c4_lines import LineCounts

__all__ = [
    "C4ParagraphConfig",
    "C4ParagraphFilter",
    "C4QualityConfig",
    "C4QualityFilter",
]

LINE_RULES = ("too_long_word", "no_terminal_punct", "too_few_words", "javascript", "policy")


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

    def build(self, folder: Path) -> C4QualityFilter:
        """See FilterSettings.build."""
        return C4QualityFilter(self)


class C4QualityFilter:
    """Cuts lines that are no prose, and drops documents of too little of it."""

    reasons = ("lorem_ipsum", "curly_bracket", "too_few_sentences")
    edits = (*LINE_RULES, "citations", "white_space")

    def __init__(self, config: C4QualityConfig) -> None:
        self._config = config

    def edit(self, batch: TextBatch) -> Edit:
        """See Editor.edit."""
        from shardkit.writers.kernels.c4_lines import edit_lines

        config = self._config
        switches = (
            config.remove_citations,
            config.filter_no_terminal_punct,
            config.filter_lorem_ipsum,
            config.filter_javascript,
            config.filter_curly_bracket,
            config.filter_policy,
        )
        limits = (config.min_num_sentences, config.min_words_per_line, config.max_word_length)
        texts, sizes, counts = edit_lines(batch.data, batch.offsets, batch.wanted, switches, limits)
        cut = dict(zip(self.edits, counts.cut, strict=False))
        cut["white_space"] = batch.sizes - sizes - counts.cut.sum(axis=0)
        return Edit(texts, self._rules(counts), cut)

    def _rules(self, counts: LineCounts) -> list[Rule]:
        lorem, curly, sentences = counts.lorem, counts.curly, counts.sentences
        enough, least = self._config.min_num_sentences, -1
        return [
            Rule("lorem_ipsum", (lorem > 0) & ((curly == 0) | (lorem < curly)), (lorem > 0).astype(np.int64)),
            Rule("curly_bracket", curly > 0, (curly > 0).astype(np.int64)),
            Rule("too_few_sentences", sentences < enough if enough > least else None, sentences),
        ]


class C4ParagraphConfig(FilterSettings):
    """mC4's rule with datatrove's names and defaults: some long lines must be there."""

    min_paragraphs: int = Field(default=3, ge=0, description="Fewest long lines.")
    min_paragraph_len: int = Field(default=200, ge=0, description="Characters from which a line is long.")

    def build(self, folder: Path) -> C4ParagraphFilter:
        """See FilterSettings.build."""
        return C4ParagraphFilter(self)


class C4ParagraphFilter:
    """Drops documents without enough long lines."""

    reasons = ("too_few_paragraphs",)

    def __init__(self, config: C4ParagraphConfig) -> None:
        self._config = config

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge."""
        from shardkit.writers.kernels.lines import count_long_lines

        counts = count_long_lines(batch.data, batch.offsets, batch.wanted, self._config.min_paragraph_len)
        return [Rule(self.reasons[0], counts < self._config.min_paragraphs, counts)]
