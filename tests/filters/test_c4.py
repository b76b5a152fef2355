"""C4's line rules and mC4's rule about long lines: against plain Python."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from reference.c4 import reference_c4
from shardkit.writers.filters.c4 import C4ParagraphFilter, C4QualityEditor
from support.filter_runs import decisions, edit, fails, judge, text_batch, values
from support.filter_texts import C4_TEXT

ROOMY = C4QualityEditor(min_num_sentences=1, min_words_per_line=2, max_word_length=12)
LINES_ONLY = C4QualityEditor(
    min_num_sentences=-1,
    min_words_per_line=-1,
    max_word_length=-1,
    filter_no_terminal_punct=False,
    filter_lorem_ipsum=False,
    filter_curly_bracket=False,
)


def edited(texts: list[str], config: C4QualityEditor) -> list[tuple[str | None, str]]:
    """What reference_c4 says of each text, by the kernel."""
    found = edit(config, text_batch(texts))
    assert all((cut >= 0).all() for cut in found.cut.values())
    return list(zip(decisions(found.rules, len(texts)), found.texts.to_pylist(), strict=True))


@settings(max_examples=150, deadline=None)
@given(st.lists(C4_TEXT, max_size=4))
@example(["", " ", "\n", "\r\n\r\n", "a b c.[1]\nd e f [2].\n", "\u2028a b.\x85c d."])
@example(["{ a b.\nlorem ipsum a.", "lorem ipsum a.\n{ a b.", "javascript { a b c.", "{ no end\na b."])
def test_lines_and_reasons_are_those_of_plain_python(texts: list[str]) -> None:
    for config in (ROOMY, LINES_ONLY):
        assert edited(texts, config) == [reference_c4(text, config) for text in texts]


def test_a_line_of_a_megabyte_is_one_line() -> None:
    texts = ["This is a sentence of some words. " * 30_000, "x" * (1 << 20) + ".", " " * (1 << 20)]
    found = edit(C4QualityEditor(), text_batch(texts))
    assert decisions(found.rules, 3) == [None, *["too_few_sentences"] * 2]
    assert values(found.rules[2]) == [30_000, 0, 0]


def test_dropped_documents_keep_their_text() -> None:
    found = edit(ROOMY, text_batch(["x\n", "It is good.\nx"]))
    assert found.texts.to_pylist() == ["x\n", "It is good."]
    assert {name: cut.tolist() for name, cut in found.cut.items() if cut.any()} == {
        "no_terminal_punct": [0, 1],
        "white_space": [0, 1],
    }


LINES = st.lists(st.sampled_from(["a", "é", "\n", "\r\n", "\u2028", " ", "wörd"]), max_size=40).map("".join)


@settings(max_examples=60, deadline=None)
@given(st.lists(LINES, max_size=4), st.integers(0, 4), st.integers(0, 5))
@example(["", "\n", "\n\n", "é" * 5, "abcde\nabcd\n", "abcde\nabcde"], 2, 5)
def test_long_lines_are_counted_as_in_plain_python(texts: list[str], fewest: int, length: int) -> None:
    config = C4ParagraphFilter(min_paragraphs=fewest, min_paragraph_len=length)
    [rule] = judge(config, text_batch(texts))
    long_lines = [sum(len(line) >= length for line in text.split("\n")) for text in texts]
    assert values(rule) == long_lines
    assert fails(rule) == [lines < fewest for lines in long_lines]
