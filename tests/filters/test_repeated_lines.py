"""Lines and paragraphs that stood before in their document are cut, byte for byte as in plain Python."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reference.lines import reference_repeated_lines
from shardkit.writers.filters.repeated_lines import RepeatedLinesEditor
from support.filter_runs import edit, fails, text_batch, values

PARTS = st.sampled_from(
    ["a", "b", "ab", "é", " ", "\n", "\n", "\n\n", "\r\n", "\t", "\u2028", "\u0301", "a\n"]
)
CONFIGS = (
    RepeatedLinesEditor(),
    RepeatedLinesEditor(min_characters=2),
    RepeatedLinesEditor(unit="paragraph"),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(PARTS, max_size=20).map("".join), max_size=4))
@example(["a\na", "a\na\n", "a\r\na\n a \nb", "a\n\na\n\n\nb\n\na", "x" * (1 << 20) + "\n" + "x" * (1 << 20)])
def test_texts_are_those_of_plain_python(texts: list[str]) -> None:
    for config in CONFIGS:
        found = edit(config, text_batch(texts))
        assert found.texts.to_pylist() == [reference_repeated_lines(text, config) for text in texts]


@pytest.mark.parametrize(
    ("text", "config", "expected"),
    [
        ("one\ntwo\n one\t\nthree\ntwo", CONFIGS[0], "one\ntwo\nthree"),
        ("One\none\n\n\n", CONFIGS[0], "One\none\n\n\n"),
        ("a\na\nab\nab", CONFIGS[1], "a\na\nab"),
        ("a\nb\n\nc\n\na\nb\n\n\nc", CONFIGS[2], "a\nb\n\nc\n"),
    ],
)
def test_the_first_copy_stays(text: str, config: RepeatedLinesEditor, expected: str) -> None:
    assert edit(config, text_batch([text])).texts.to_pylist() == [expected]


def test_documents_of_mostly_repetition_are_dropped() -> None:
    found = edit(RepeatedLinesEditor(max_cut_fraction=0.5), text_batch(["a\na\na", "a\nb"]))
    [rule] = found.rules
    assert (fails(rule), values(rule)) == ([True, False], [0.8, 0.0])
    assert found.counts["repeated"].tolist() == [2, 0]
    assert found.texts.to_pylist() == ["a", "a\nb"]
