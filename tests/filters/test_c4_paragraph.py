"""mC4's rule about paragraphs against the rule in plain Python."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardkit.writers.filters.c4 import C4ParagraphConfig, C4ParagraphFilter
from shardkit.writers.filters.text_batch import TextBatch

TEXT = st.lists(st.sampled_from(["a", "é", "\n", "\r\n", "\u2028", " ", "wörd"]), max_size=40).map("".join)


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXT, max_size=4), st.integers(0, 4), st.integers(0, 5))
@example(["", "\n", "\n\n", "é" * 5, "abcde\nabcd\n", "abcde\nabcde"], 2, 5)
def test_long_lines_are_counted_as_in_plain_python(texts: list[str], fewest: int, length: int) -> None:
    config = C4ParagraphConfig(min_paragraphs=fewest, min_paragraph_len=length)
    [rule] = C4ParagraphFilter(config).judge(TextBatch(pa.array(texts, pa.large_string())))
    long_lines = [sum(len(line) >= length for line in text.split("\n")) for text in texts]
    assert rule.values is not None
    assert rule.values.tolist() == long_lines
    assert rule.fails is not None
    assert rule.fails.tolist() == [lines < fewest for lines in long_lines]
