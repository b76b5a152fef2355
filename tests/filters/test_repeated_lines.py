"""Lines and paragraphs that stood before in their document are cut, byte for byte as in plain Python."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reference.lines import reference_repeated_lines
from shardkit.writers.filters.base import Edit
from shardkit.writers.filters.repeated_lines import RepeatedLinesConfig, RepeatedLinesEditor
from shardkit.writers.filters.text_batch import TextBatch

PARTS = st.sampled_from(
    ["a", "b", "ab", "é", " ", "\n", "\n", "\n\n", "\r\n", "\t", "\u2028", "\u0301", "a\n"]
)
CONFIGS = (
    RepeatedLinesConfig(),
    RepeatedLinesConfig(min_characters=2),
    RepeatedLinesConfig(unit="paragraph"),
)


def edit(texts: list[str], config: RepeatedLinesConfig, wanted: list[bool] | None = None) -> Edit:
    batch = TextBatch(pa.array(["a", *texts], pa.large_string()).slice(1))
    batch.wanted = np.array(wanted or [True] * len(texts), np.bool_)
    return RepeatedLinesEditor(config).edit(batch)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(PARTS, max_size=20).map("".join), max_size=4))
@example(["a\na", "a\na\n", "a\r\na\n a \nb", "a\n\na\n\n\nb\n\na", "x" * (1 << 20) + "\n" + "x" * (1 << 20)])
def test_texts_are_those_of_plain_python_and_every_byte_is_booked(texts: list[str]) -> None:
    for config in CONFIGS:
        found = edit(texts, config)
        expected = [reference_repeated_lines(text, config) for text in texts]
        assert found.texts.to_pylist() == expected
        before, after = ([len(text.encode()) for text in some] for some in (texts, expected))
        assert found.cut["repeated"].tolist() == [b - a for b, a in zip(before, after, strict=True)]


@pytest.mark.parametrize(
    ("text", "config", "expected"),
    [
        ("one\ntwo\n one\t\nthree\ntwo", CONFIGS[0], "one\ntwo\nthree"),
        ("One\none\n\n\n", CONFIGS[0], "One\none\n\n\n"),
        ("a\na\nab\nab", CONFIGS[1], "a\na\nab"),
        ("a\nb\n\nc\n\na\nb\n\n\nc", CONFIGS[2], "a\nb\n\nc\n"),
    ],
)
def test_the_first_copy_stays(text: str, config: RepeatedLinesConfig, expected: str) -> None:
    assert edit([text], config).texts.to_pylist() == [expected]


def test_documents_of_mostly_repetition_are_dropped_and_unwanted_ones_left() -> None:
    found = edit(["a\na\na", "a\nb", "a\na"], RepeatedLinesConfig(max_cut_fraction=0.5), [True, True, False])
    [rule] = found.rules
    assert rule.fails is not None
    assert rule.values is not None
    assert rule.fails.tolist() == [True, False, False]
    assert rule.values.tolist() == [0.8, 0.0, 0.0]
    assert found.counts["repeated"].tolist() == [2, 0, 0]
    assert found.texts.to_pylist() == ["a", "a\nb", "a\na"]
