"""dolma's variants of Gopher's rules: against dolma's, in plain Python."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.filters import reference_ngrams, reference_repetition
from shardkit.writers.filters.dolma import DolmaQualityFilter, DolmaRepetitionFilter
from shardkit.writers.kernels.lines import ALL_LINES
from shardkit.writers.kernels.ngrams import COPIES, TOP
from support.filter_runs import decide
from support.filter_texts import DOLMA_TEXT


def repetition(text: str, config: DolmaRepetitionFilter) -> str | None:
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
@given(st.lists(DOLMA_TEXT.filter(str.split), max_size=4))
def test_repetition_decides_as_dolma_does(texts: list[str]) -> None:
    lenient = DolmaRepetitionFilter(
        max_duplicate_line_fraction=None,
        most_common_ngrams=((1, 0.6),),
        duplicate_ngrams=((2, 0.7), (3, 0.1)),
    )
    for config in (DolmaRepetitionFilter(), lenient):
        assert decide(config, texts) == [repetition(text, config) for text in texts]


GOOD = "Once there was a time to be glad, and with it came that of the old house by the sea. " * 5


@pytest.mark.sampled(3)
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
    assert decide(DolmaQualityFilter(), [text]) == [reason]
