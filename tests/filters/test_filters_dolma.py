"""dolma's variants of Gopher's rules: the kernel against its reference, the decisions against the rules."""

from __future__ import annotations

from statistics import median

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reference.filters import reference_dolma_statistics, reference_ngrams, reference_repetition
from shardkit.writers.filters.base import FilterSettings
from shardkit.writers.filters.chain import FilterChain
from shardkit.writers.filters.dolma import DolmaQualityConfig, DolmaRepetitionConfig
from shardkit.writers.filters.text_batch import TextBatch
from shardkit.writers.kernels.dolma_statistics import LONGEST, dolma_statistics
from shardkit.writers.kernels.lines import ALL_LINES
from shardkit.writers.kernels.ngrams import COPIES, TOP

REQUIRED = ("the", "be", "of", "é…")
PARTS = [*" \n\t\r…#*-1", "the", "be", "of", "é", "\u3000", "\u2028", "\x85", "word", "longer-word", "\u0301"]
TEXT = st.one_of(st.lists(st.sampled_from(PARTS), max_size=60).map("".join), st.text(max_size=20))


def reasons(config: FilterSettings, texts: list[str]) -> list[str | None]:
    chain = FilterChain([("x", config)])
    codes = chain.codes(pa.array(texts, pa.large_string()))
    return [chain.reasons[code - 1].removeprefix("x/") if code else None for code in codes]


@pytest.mark.extended
@settings(max_examples=80, deadline=None)
@given(st.lists(TEXT, max_size=4))
@example(["", "\n", "…", "\n…\n", "*", "-\r\n*\r\n", "é…", "x" * (LONGEST + 9), "a " * 3_000, "   "])
def test_counts_are_those_of_plain_python(texts: list[str]) -> None:
    batch = TextBatch(pa.array(texts, pa.large_string()))
    counts = dolma_statistics(batch.data, batch.offsets, batch.wanted, REQUIRED)
    found = [tuple(map(int, row)) for row in zip(*counts, strict=True)]
    assert found == [reference_dolma_statistics(text, REQUIRED) for text in texts]


def repetition(text: str, config: DolmaRepetitionConfig) -> str | None:
    """dolma's rules in plain Python, for texts with a word."""
    characters = len("".join(text.split()))
    lines, repeated, in_lines = reference_repetition(text, ALL_LINES)
    rules = [
        ("duplicate_lines", repeated / lines, config.max_duplicate_line_fraction),
        (
            "characters_in_duplicate_lines",
            in_lines / characters,
            config.max_duplicate_line_character_fraction,
        ),
    ]
    for n, most in config.most_common_ngrams:
        times, size = reference_ngrams(text, n, TOP)
        rules.append((f"characters_in_most_common_{n}grams", times * size / characters, most))
    for n, most in config.duplicate_ngrams:
        copied, total = reference_ngrams(text, n, COPIES)
        rules.append((f"characters_in_duplicate_{n}grams", copied / max(total, 1), most))
    return next((name for name, value, bound in rules if bound is not None and value > bound), None)


@pytest.mark.extended
@settings(max_examples=60, deadline=None)
@given(st.lists(TEXT.filter(str.split), max_size=4))
def test_repetition_decides_as_dolma_does(texts: list[str]) -> None:
    lenient = DolmaRepetitionConfig(
        max_duplicate_line_fraction=None,
        most_common_ngrams=((1, 0.6),),
        duplicate_ngrams=((2, 0.7), (3, 0.1)),
    )
    for config in (DolmaRepetitionConfig(), lenient):
        assert reasons(config, texts) == [repetition(text, config) for text in texts]


GOOD = "Once there was a time to be glad, and with it came that of the old house by the sea. " * 5


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (GOOD, None),
        ("the of " * 20, "word_count_below"),
        ("the of " * 50_001, "word_count_above"),
        ("a be I " * 50, "median_word_length_below"),
        ("incomprehensibilities the incomprehensible " * 50, "median_word_length_above"),
        (GOOD + " #x yy…" * 20, "symbol_to_word_ratio"),
        (GOOD + " 1234" * 60, "words_with_alpha_character"),
        (
            "one of these has no required words " + "some words here mean little " * 20,
            "required_word_count",
        ),
        ("\n".join("*oh " + word for word in GOOD.split()), "lines_starting_with_bullet_point"),
        (GOOD + "\na…\nb…", "lines_ending_with_ellipsis"),
    ],
)
def test_each_quality_rule_has_a_text_that_only_it_rejects(text: str, reason: str | None) -> None:
    assert reasons(DolmaQualityConfig(), [text]) == [reason]


def test_medians_lie_between_two_words_where_they_must() -> None:
    texts = ["aa bbb", "aa bbb c", "aa bbb cccc dddd"]
    batch = TextBatch(pa.array(texts, pa.large_string()))
    counts = dolma_statistics(batch.data, batch.offsets, batch.wanted, ())
    assert [value / 2 for value in counts.median_twice] == [median(map(len, text.split())) for text in texts]
