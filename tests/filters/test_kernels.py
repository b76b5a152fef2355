"""The kernels of the filters against their plain-Python references."""

from __future__ import annotations

import re
import unicodedata
from statistics import median

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reference.c4 import reference_sentences
from reference.filters import (
    as_rows,
    reference_count,
    reference_dolma_statistics,
    reference_line_statistics,
    reference_ngrams,
    reference_repetition,
    reference_word_statistics,
)
from shardkit.kernels import utf8 as characters
from shardkit.writers.filters.batch import TextBatch
from shardkit.writers.kernels.dolma_statistics import LONGEST, dolma_statistics
from shardkit.writers.kernels.lines import ALL_LINES, LINES, PARAGRAPHS, line_repetition
from shardkit.writers.kernels.ngrams import COPIES, EXCESS, TOP, ngram_statistics
from shardkit.writers.kernels.phrases import Phrases, lower
from shardkit.writers.kernels.sentences import count_sentences, sentence_tables
from shardkit.writers.kernels.word_statistics import word_statistics
from support.filter_runs import text_batch
from support.filter_texts import C4_TEXT, DOLMA_TEXT, PHRASES_TEXT, REPEATING_TEXT

STOP_WORDS = ("the", "be", "to", "of", "thé", "…")
REQUIRED = ("the", "be", "of", "é…")
JOBS = [(n, kind) for kind in (TOP, EXCESS, COPIES) for n in (1, 2, 3, 5, 7)]
# Characters that decide something, often; any other character, sometimes.
TELLING = st.sampled_from(
    [
        *" \t\n\r\x0b\x0c\x1c\x1f\x85\xa0\u2028\u3000",
        *".…•-#!?,“",
        *("the", "be", "to", "a", "é", "中", "𝔸", "١", "\u0301", "\r\n"),
    ]
)
TEXT = st.lists(st.one_of(TELLING, st.characters(exclude_categories=["Cs"])), max_size=60).map("".join)


def batch(texts: list[str]) -> TextBatch:
    return text_batch(texts, stop_words=STOP_WORDS)


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


def test_signs_are_all_that_is_neither_a_letter_nor_space() -> None:
    codes, categories = characters.signs()
    every = [code for code in range(0x40000) if not (chr(code).isalpha() or chr(code).isspace())]
    categorized = {code: unicodedata.category(chr(code)) for code in every}
    assert dict(zip(codes.tolist(), categories.tolist(), strict=True)).items() <= categorized.items()
    left_out = set(every) - set(codes.tolist())
    assert {categorized[code] for code in left_out} == {"Cn"}


def test_more_stop_words_than_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="65 stop words"):
        word_statistics(
            np.zeros(1, np.uint8), np.zeros(2, np.int64), np.ones(1, np.bool_), [f"w{i}" for i in range(65)]
        )


def ngrams(texts: list[str], jobs: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    one = text_batch(texts)
    counts = ngram_statistics(one.data, one.offsets, one.wanted, jobs)
    rows = np.stack([counts.first, counts.second], axis=2).transpose(1, 0, 2)
    return [[(int(first), int(second)) for first, second in row] for row in rows]


@settings(max_examples=60, deadline=None)
@given(st.lists(REPEATING_TEXT, max_size=4))
@example(["ab c ab c a bc " * 9, "", " ", "x" * 5000 + " y " + "x" * 5000 + " y", "a " * 400])
@example([" ".join(f"w{i * i % 97}" for i in range(3000))])
def test_ngram_counts_are_those_of_plain_python(texts: list[str]) -> None:
    one = text_batch(texts)
    assert ngrams(texts, JOBS) == [[reference_ngrams(text, *job) for job in JOBS] for text in texts]
    counts = ngram_statistics(one.data, one.offsets, one.wanted, [])
    assert counts.characters.tolist() == [len(text) for text in texts]
    assert counts.word_characters.tolist() == [len("".join(text.split())) for text in texts]


@settings(max_examples=80, deadline=None)
@given(st.lists(REPEATING_TEXT, max_size=4))
@example(
    ["", "\n", "\n\n\n", "a\n", "\na", "\na\n", " a\n\na ", "a\n\n\n\na\n\nb", "x\n" * 100, "a\n\na\n\na"]
)
def test_repeated_lines_are_those_of_plain_python(texts: list[str]) -> None:
    one = text_batch(texts)
    for kind in (LINES, PARAGRAPHS, ALL_LINES):
        counts = line_repetition(one.data, one.offsets, one.wanted, kind)
        found = [tuple(map(int, row)) for row in zip(*counts, strict=True)]
        assert found == [reference_repetition(text, kind) for text in texts]


def test_joined_ngrams_ignore_where_words_end_and_the_others_do_not() -> None:
    [(excess, top, copies)] = ngrams(["ab c a bc"], [(2, EXCESS), (2, TOP), (2, COPIES)])
    assert excess == (3, 0)  # "a bc" is "ab c" again
    assert top == (1, 3)
    assert copies == (0, 8)


def test_a_line_of_a_megabyte_is_counted_like_others() -> None:
    text = " ".join(f"{number % 7_001:x}é" for number in range(200_000))
    assert len(text.encode()) > 1 << 20
    jobs = [(2, TOP), (5, EXCESS), (5, COPIES)]
    assert ngrams(["a", text], jobs)[1] == [reference_ngrams(text, *job) for job in jobs]


@pytest.mark.extended
@settings(max_examples=80, deadline=None)
@given(st.lists(DOLMA_TEXT, max_size=4))
@example(["", "\n", "…", "\n…\n", "*", "-\r\n*\r\n", "é…", "x" * (LONGEST + 9), "a " * 3_000, "   "])
def test_dolma_counts_are_those_of_plain_python(texts: list[str]) -> None:
    batch = text_batch(texts)
    counts = dolma_statistics(batch.data, batch.offsets, batch.wanted, REQUIRED)
    found = [tuple(map(int, row)) for row in zip(*counts, strict=True)]
    assert found == [reference_dolma_statistics(text, REQUIRED) for text in texts]


def test_medians_lie_between_two_words_where_they_must() -> None:
    texts = ["aa bbb", "aa bbb c", "aa bbb cccc dddd"]
    batch = text_batch(texts)
    counts = dolma_statistics(batch.data, batch.offsets, batch.wanted, ())
    assert [value / 2 for value in counts.median_twice] == [median(map(len, text.split())) for text in texts]


@settings(max_examples=300, deadline=None)
@given(st.lists(PHRASES_TEXT.map(lambda text: text[:6]), max_size=5), st.lists(PHRASES_TEXT, max_size=4))
@example(["a", "ab", "s&m", "中", ""], ["a ab a_ ba", "xs&m s&m", "中中", "b" * (1 << 12) + " a", ""])
def test_phrases_are_counted_as_in_plain_python(phrases: list[str], texts: list[str]) -> None:
    lowered = lower(pa.array(["a", *texts], pa.large_string()).slice(1))
    listed = [phrase.lower() for phrase in phrases]
    for separated in (True, False):
        found = Phrases(phrases, separated=separated).count(lowered, np.ones(len(texts), np.bool_))
        expected = [reference_count(listed, text.lower(), separated=separated) for text in texts]
        assert found.tolist() == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(PHRASES_TEXT.filter(bool), min_size=1, max_size=4), PHRASES_TEXT)
def test_a_document_is_bad_where_datatrove_finds_a_word(phrases: list[str], text: str) -> None:
    listed = "|".join(re.escape(phrase.lower()) for phrase in phrases)
    found = re.search(rf"(?:\W|^)({listed})(?:\W|$)", text.lower()) is not None
    assert (reference_count([p.lower() for p in phrases], text.lower()) > 0) == found


def sentences(text: str) -> int:
    data = np.array(list(text.encode() + b" tail. Not counted."), np.uint8)
    return int(count_sentences(data, 0, len(text.encode()), sentence_tables()))


@settings(max_examples=150, deadline=None)
@given(C4_TEXT)
@example("keys\u200a—\u200aa")
@example("One.  Two")
@example("a.\u3000b. ) c... d.” e")
def test_sentences_are_those_of_plain_python(text: str) -> None:
    assert sentences(text) == reference_sentences(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        (" \u2028", 0),
        ("...", 1),
        ("One. Two? Three!", 3),
        ("Mr. Fox met J. Doe in the U.S. at 3 p.m. today.", 1),
        ("He said “Stop.” (Then he left.) And so on...and on... again", 3),
        ("It is 3.14, at example.com/a.B or www.example.org. Is it?", 2),
        ("This joins.Badly", 2),
        ("NASA. Vitamin C. Next", 2),
        ("一。 二。 三", 3),
    ],
)
def test_full_stops_within_words_and_after_abbreviations_end_no_sentence(text: str, count: int) -> None:
    assert (sentences(text), reference_sentences(text)) == (count, count)
