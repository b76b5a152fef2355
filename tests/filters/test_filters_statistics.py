"""The kernels of the filters against their plain-Python references."""

from __future__ import annotations

import unicodedata

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reference.filters import as_rows, reference_line_statistics, reference_word_statistics
from shardkit.writers.filters.text_batch import TextBatch
from shardkit.writers.kernels import utf8 as characters
from shardkit.writers.kernels.word_statistics import word_statistics

STOP_WORDS = ("the", "be", "to", "of", "thé", "…")
# Characters that decide something, often; any other character, sometimes.
TELLING = st.sampled_from(
    [
        *" \t\n\r\x0b\x0c\x1c\x1f\x85\xa0\u2028\u3000",
        *".…•-#!?,“",
        "the",
        "be",
        "to",
        "a",
        "é",
        "中",
        "𝔸",
        "١",
        "\u0301",
        "\r\n",
    ]
)
TEXT = st.lists(st.one_of(TELLING, st.characters(exclude_categories=["Cs"])), max_size=60).map("".join)


def batch(texts: list[str]) -> TextBatch:
    return TextBatch(pa.array(texts, pa.large_string()), stop_words=STOP_WORDS)


@settings(max_examples=400, deadline=None)
@given(st.lists(TEXT, max_size=5))
@example(
    ["...", ". ..", "....... …", "x...\n", "..\u2028.", "-\r\n•\r-", "\r\r\n\n", "the the THE", "\n", " "]
)
def test_word_counts_are_those_of_plain_python(texts: list[str]) -> None:
    expected = [reference_word_statistics(text, STOP_WORDS) for text in texts]
    assert as_rows(batch(texts).words()) == expected


@settings(max_examples=400, deadline=None)
@given(st.lists(TEXT, max_size=5), st.integers(0, 9))
@example(["a\na\nab\na", "ab\nb\nab", "a\n\na\n", "ab\na", "x\n" * 3000, "\n\n", "é.\né.\ne."], 1)
def test_line_counts_are_those_of_plain_python(texts: list[str], short: int) -> None:
    expected = [reference_line_statistics(text, short_line_length=short) for text in texts]
    assert as_rows(batch(texts).lines(short)) == expected


def test_every_character_counts_as_in_plain_python() -> None:
    every = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    texts = ["".join(every[start : start + 997]) for start in range(0, len(every), 997)]
    words = [f"x{character}" for character in every[:0x3000]]
    for chosen in (texts, words, every[:0x3000]):
        one = batch(chosen)
        assert as_rows(one.words()) == [reference_word_statistics(text, STOP_WORDS) for text in chosen]
        assert as_rows(one.lines(2)) == [
            reference_line_statistics(text, short_line_length=2) for text in chosen
        ]


def test_flags_are_those_of_str_for_every_code_point() -> None:
    flags = characters.character_flags()
    for code in range(0x110000):
        character = chr(code)
        assert bool(flags[code] & characters.SPACE) == character.isspace(), hex(code)
        assert bool(flags[code] & characters.ALPHA) == character.isalpha(), hex(code)
    ends = {chr(code) for code in range(0x110000) if len(f"a{chr(code)}b".splitlines()) > 1}
    assert characters.characters_with(characters.LINE_END) == ends
    assert characters.characters_with(characters.TERMINAL) < characters.characters_with(
        characters.PUNCTUATION
    )
    assert len(characters.characters_with(characters.TERMINAL)) == 159
    assert len(characters.characters_with(characters.PUNCTUATION)) == 281
    assert not any(
        unicodedata.category(c).startswith("L")
        for c in characters.characters_with(characters.TERMINAL) - {"꓿"}
    )


def test_slices_of_an_array_count_their_own_texts_only() -> None:
    texts = pa.array(["one two", "three", "four five six", ""], pa.large_string())
    assert TextBatch(texts.slice(1, 2)).words().words.tolist() == [1, 3]
    assert TextBatch(texts.slice(3)).words().characters.tolist() == [0]
    assert TextBatch(texts.slice(0, 0)).words().words.tolist() == []


def test_unwanted_documents_are_not_counted() -> None:
    one = batch(["a b", "c d e", "f"])
    one.wanted[1] = False
    assert one.words().words.tolist() == [2, 0, 1]


def test_more_stop_words_than_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="65 stop words"):
        word_statistics(
            np.zeros(1, np.uint8), np.zeros(2, np.int64), np.ones(1, np.bool_), [f"w{i}" for i in range(65)]
        )
