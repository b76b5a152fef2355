"""Repeated lines and n-grams: the kernels against their references, and the decisions against the rules."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reference.filters import reference_ngrams, reference_repetition
from shardkit.writers.filters.chain import FilterChain
from shardkit.writers.filters.config import FilterEntry
from shardkit.writers.filters.gopher import GopherRepetitionConfig, GopherRepetitionFilter
from shardkit.writers.filters.text_batch import TextBatch
from shardkit.writers.kernels.lines import ALL_LINES, LINES, PARAGRAPHS, line_repetition
from shardkit.writers.kernels.ngrams import COPIES, EXCESS, TOP, ngram_statistics

JOBS = [(n, kind) for kind in (TOP, EXCESS, COPIES) for n in (1, 2, 3, 5, 7)]
# Few words, some of which are others' ends: "ab c" and "a bc" are the same when joined.
WORDS = ["a", "b", "ab", "bc", "c", "é", "中", "\u0301", "longer-than-eight", "x" * 20]
SPACES = [" ", "\n", "\n\n", "\r\n", "\u2028", "\x85", "\xa0", "\u3000", "  ", "\n \n", "\t", "\x1c"]
TEXT = st.one_of(
    st.lists(st.sampled_from(WORDS + SPACES), max_size=80).map("".join),
    st.lists(st.sampled_from(["a ", "b ", "c\n", "ab "]), max_size=120).map("".join),
    st.text(max_size=30),
)


def batch(texts: list[str]) -> TextBatch:
    return TextBatch(pa.array(texts, pa.large_string()))


def ngrams(texts: list[str], jobs: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    one = batch(texts)
    counts = ngram_statistics(one.data, one.offsets, one.wanted, jobs)
    rows = np.stack([counts.first, counts.second], axis=2).transpose(1, 0, 2)
    return [[(int(first), int(second)) for first, second in row] for row in rows]


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXT, max_size=4))
@example(["ab c ab c a bc " * 9, "", " ", "x" * 5000 + " y " + "x" * 5000 + " y", "a " * 400])
@example([" ".join(f"w{i * i % 97}" for i in range(3000))])
def test_ngram_counts_are_those_of_plain_python(texts: list[str]) -> None:
    one = batch(texts)
    assert ngrams(texts, JOBS) == [[reference_ngrams(text, *job) for job in JOBS] for text in texts]
    counts = ngram_statistics(one.data, one.offsets, one.wanted, [])
    assert counts.characters.tolist() == [len(text) for text in texts]
    assert counts.word_characters.tolist() == [len("".join(text.split())) for text in texts]


@settings(max_examples=80, deadline=None)
@given(st.lists(TEXT, max_size=4))
@example(
    ["", "\n", "\n\n\n", "a\n", "\na", "\na\n", " a\n\na ", "a\n\n\n\na\n\nb", "x\n" * 100, "a\n\na\n\na"]
)
def test_line_counts_are_those_of_plain_python(texts: list[str]) -> None:
    one = batch(texts)
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


def test_unwanted_documents_are_not_counted() -> None:
    one = batch(["a a a a", "b b b b"])
    one.wanted[0] = False
    counts = ngram_statistics(one.data, one.offsets, one.wanted, [(2, TOP)])
    assert counts.characters.tolist() == [0, 7]
    assert counts.first.tolist() == [[0, 3]]
    assert line_repetition(one.data, one.offsets, one.wanted, LINES).elements.tolist() == [0, 1]


def datatrove(text: str, config: GopherRepetitionConfig) -> str | None:
    """datatrove's rules in plain Python."""
    if not text:
        return "empty"
    for name, elements in (
        ("para", re.split("\n{2,}", text.strip())),
        ("line", re.split("\n+", text)),
    ):
        repeated = [element for at, element in enumerate(elements) if element in elements[:at]]
        of_elements, of_characters = (
            getattr(config, f"dup_{name}_frac"),
            getattr(config, f"dup_{name}_char_frac"),
        )
        if of_elements and len(repeated) / len(elements) > of_elements:
            return f"dup_{name}_frac"
        if of_characters and sum(map(len, repeated)) / len(text) > of_characters:
            return f"dup_{name}_char_frac"
    words = text.split()
    for n, most in config.top_n_grams:
        grams = Counter(" ".join(words[at : at + n]) for at in range(len(words) - n + 1))
        if grams:
            gram, times = grams.most_common(1)[0]
            if len(gram) * times / len(text) > most:
                return f"top_{n}_gram"
    for n, most in config.dup_n_grams:
        if reference_ngrams(text, n, EXCESS)[0] / len(text) > most:
            return f"duplicated_{n}_n_grams"
    return None


def reasons(config: GopherRepetitionConfig, texts: list[str]) -> list[str | None]:
    chain = FilterChain([("x", config)])
    codes = chain.codes(pa.array(texts, pa.large_string()))
    return [chain.reasons[code - 1].removeprefix("x/") if code else None for code in codes]


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXT, max_size=4))
@example(["I am Frank, I am Frank, I am Frank", "\n", " \n \n ", "a\n\na", "one two"])
def test_repetition_decides_as_datatrove_does(texts: list[str]) -> None:
    lenient = GopherRepetitionConfig(
        dup_line_frac=None,
        dup_para_frac=0,
        top_n_grams=((1, 0.5), (3, 0.4)),
        dup_n_grams=((2, 0.3), (4, 0.2)),
    )
    for config in (GopherRepetitionConfig(), lenient):
        assert reasons(config, texts) == [datatrove(text, config) for text in texts]


def test_values_are_what_was_judged() -> None:
    entry = FilterEntry.model_validate({"gopher_repetition": {"top_n_grams": [[2, 0.5]], "dup_n_grams": []}})
    [(_, config)] = entry.filters()
    assert isinstance(config, GopherRepetitionConfig)
    rules = GopherRepetitionFilter(config).judge(batch(["ab c ab c ab c\nd\nd"]))
    values = {rule.name: rule.values.tolist() for rule in rules if rule.values is not None}
    assert values == {
        "empty": [18],
        "dup_para_frac": [0],
        "dup_para_char_frac": [0],
        "dup_line_frac": [1 / 3],
        "dup_line_char_frac": [1 / 18],
        "top_2_gram": [3 * len("ab c") / 18],
    }


@pytest.mark.parametrize("bad", [[[0, 0.2]], [[2, 1.5]], [[2]], [["2", 0.2]], [[2.5, 0.2]]])
def test_bounds_that_mean_nothing_are_refused(bad: object) -> None:
    with pytest.raises(ValueError, match="top_n_grams"):
        FilterEntry.model_validate({"gopher_repetition": {"top_n_grams": bad}})
