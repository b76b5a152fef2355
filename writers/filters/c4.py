"""C4's line rules and mC4's paragraph rule: every decision, and every byte that is kept, equals datatrove's.

`c4_quality` is datatrove's C4QualityFilter with split_paragraph (Raffel et al. 2020, section 2.2). Lines are
split as by `str.splitlines()`, words as by `str.split()`, and sentences as in `kernels/sentences.py`. The
rules are tried on each line in the order of `edits`. A line that reaches the lorem ipsum rule or the { rule
and fails it drops the document. A document with too few sentences in the remaining lines is dropped, too. A
dropped document keeps its text, as in datatrove. The kernel is in `kernels/c4_lines.py`.

`c4_paragraph` is datatrove's C4ParagraphFilter (Xue et al. 2021), whose "paragraphs" are the parts of a text
between newlines, blank or not. (datatrove names the reason "< 3 paragraphs".)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from shardkit.writers.filters.base import Edit, FilterSettings, Rule, below

if TYPE_CHECKING:
    from shardkit.writers.filters.batch import TextBatch


class C4QualityEditor(FilterSettings):
    """C4's rules, which cut lines and drop some documents, with datatrove's names and defaults."""

    reasons: ClassVar = ("lorem_ipsum", "curly_bracket", "too_few_sentences")
    edits: ClassVar = (
        *("too_long_word", "no_terminal_punct", "too_few_words", "javascript", "policy"),
        *("citations", "white_space"),
    )

    remove_citations: bool = Field(default=True, description="Remove [1], [], [edit], [citation needed].")
    filter_no_terminal_punct: bool = Field(
        default=True,
        description="Cut lines that do not end in . ? ! \" or ', or that end in .... FineWeb sets false.",
    )
    min_num_sentences: int = Field(
        default=5, ge=-1, description="Minimum number of sentences in the remaining lines; -1: no rule."
    )
    min_words_per_line: int = Field(default=3, ge=-1, description="Minimum words in a line; -1: no rule.")
    max_word_length: int = Field(
        default=1000, ge=-1, description="Maximum characters in each word of a line; -1: no rule."
    )
    filter_lorem_ipsum: bool = Field(default=True, description="Drop documents that contain lorem ipsum.")
    filter_javascript: bool = Field(default=True, description="Cut lines that contain javascript.")
    filter_curly_bracket: bool = Field(default=True, description="Drop documents that contain {.")
    filter_policy: bool = Field(default=True, description="Cut lines about cookies, privacy or terms of use.")

    def edit(self, batch: TextBatch) -> Edit:
        """See Editor.edit."""
        from shardkit.writers.kernels.c4_lines import edit_lines

        switches = (
            self.remove_citations,
            self.filter_no_terminal_punct,
            self.filter_lorem_ipsum,
            self.filter_javascript,
            self.filter_curly_bracket,
            self.filter_policy,
        )
        limits = (self.min_num_sentences, self.min_words_per_line, self.max_word_length)
        texts, sizes, counts = edit_lines(batch.data, batch.offsets, batch.wanted, switches, limits)
        cut = dict(zip(self.edits, counts.cut, strict=False))
        cut["white_space"] = batch.sizes - sizes - counts.cut.sum(axis=0)
        lorem, curly = counts.lorem, counts.curly
        rules = (
            Rule("lorem_ipsum", (lorem > 0) & ((curly == 0) | (lorem < curly)), (lorem > 0).astype(np.int64)),
            Rule("curly_bracket", curly > 0, (curly > 0).astype(np.int64)),
            below("too_few_sentences", counts.sentences, None if limits[0] == -1 else limits[0]),
        )
        return Edit(texts, rules, cut)


class C4ParagraphFilter(FilterSettings):
    """mC4's rule that a document needs enough long lines, with datatrove's names and defaults."""

    reasons: ClassVar = ("too_few_paragraphs",)

    min_paragraphs: int = Field(default=3, ge=0, description="Minimum number of long lines.")
    min_paragraph_len: int = Field(default=200, ge=0, description="Minimum characters in a long line.")

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge."""
        from shardkit.writers.kernels.lines import count_long_lines

        counts = count_long_lines(batch.data, batch.offsets, batch.wanted, self.min_paragraph_len)
        return [below("too_few_paragraphs", counts, self.min_paragraphs)]
