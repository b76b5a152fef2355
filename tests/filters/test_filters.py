"""The decisions of the filters: against datatrove's rules in plain Python."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.writers.filters.base import FilterSettings
from shardkit.writers.filters.bounds import LengthConfig
from shardkit.writers.filters.chain import FilterChain
from shardkit.writers.filters.fineweb import FinewebQualityConfig
from shardkit.writers.filters.gopher import GopherQualityConfig
from shardkit.writers.kernels.utf8 import PUNCTUATION, TERMINAL, characters_with

ROOMY = GopherQualityConfig(min_doc_words=3, min_stop_words=1, min_avg_word_length=2)
GOOD = (
    "It was the best of times, it was the worst of times, it was the age of wisdom and that of folly.\n"
    "We had everything before us, we had nothing before us, we were all going direct to Heaven.\n"
    "In short, the period was so far like the present period that people have to be told so with force."
)


def reasons(config: FilterSettings, texts: list[str]) -> list[str | None]:
    """Reason or None of each text under one filter."""
    chain = FilterChain([("x", config)])
    codes = chain.codes(pa.array(texts, pa.large_string()))
    return [chain.reasons[code - 1].removeprefix("x/") if code else None for code in codes]


def gopher(text: str, config: GopherQualityConfig) -> str | None:
    """datatrove's rules, one line each, for texts with at least one word."""
    words, lines = text.split(), text.splitlines()
    punctuation = characters_with(PUNCTUATION)
    plain = [word for word in words if any(character not in punctuation for character in word)]
    mean = sum(map(len, plain)) / len(plain) if plain else float("nan")
    bullets = sum(line.lstrip().startswith(("•", "-")) for line in lines)
    ends = sum(line.rstrip().endswith(("...", "…")) for line in lines)
    letters = sum(any(map(str.isalpha, word)) for word in words)
    rules: list[tuple[str, object, Callable[[float], bool]]] = [
        ("gopher_short_doc", config.min_doc_words, lambda bound: len(plain) < bound),
        ("gopher_long_doc", config.max_doc_words, lambda bound: len(plain) > bound),
        ("gopher_below_avg_threshold", config.min_avg_word_length, lambda bound: mean < bound),
        ("gopher_above_avg_threshold", config.max_avg_word_length, lambda bound: mean > bound),
        ("gopher_too_many_hashes", config.max_symbol_word_ratio, lambda b: text.count("#") / len(words) > b),
        (
            "gopher_too_many_ellipsis",
            config.max_symbol_word_ratio,
            lambda bound: (text.count("...") + text.count("…")) / len(words) > bound,
        ),
        ("gopher_too_many_bullets", config.max_bullet_lines_ratio, lambda b: bullets / len(lines) > b),
        ("gopher_too_many_end_ellipsis", config.max_ellipsis_lines_ratio, lambda b: ends / len(lines) > b),
        (
            "gopher_below_alpha_threshold",
            config.max_non_alpha_words_ratio,
            lambda b: letters / len(words) < b,
        ),
        (
            "gopher_enough_stop_words",
            config.min_stop_words,
            lambda bound: len(set(config.stop_words) & set(words)) < bound,
        ),
    ]
    return next((name for name, bound, fails in rules if bound and fails(float(str(bound)))), None)


def fineweb(text: str, config: FinewebQualityConfig) -> str | None:
    """datatrove's rules in plain Python."""
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        return "empty"
    ratio = sum(line[-1] in characters_with(TERMINAL) for line in lines) / len(lines)
    if ratio < config.line_punct_thr and not (ratio == 0 and config.line_punct_exclude_zero):
        return "line_punct_ratio"
    if sum(len(line) <= config.short_line_length for line in lines) / len(lines) > config.short_line_thr:
        return "short_line_ratio"
    repeated = sum(len(line) for at, line in enumerate(lines) if line in lines[:at])
    if repeated / len(text.replace("\n", "")) > config.char_duplicates_ratio:
        return "char_dup_ratio"
    return "list_ratio" if text.count("\n") / len(text.split()) > config.new_line_ratio else None


PARTS = st.sampled_from(
    [
        "the ",
        "and ",
        "word ",
        "longerword ",
        "# ",
        "... ",
        "…\n",
        "...\n",
        "• ",
        "- ",
        "\n",
        ". ",
        ".\n",
        "12 ",
        "é",
        "!?\n",
    ]
)
TEXTS = st.lists(st.lists(PARTS, min_size=1, max_size=30).map("".join), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_gopher_decides_as_datatrove_does(texts: list[str]) -> None:
    worded = [text for text in texts if text.split()]
    for config in (
        ROOMY,
        GopherQualityConfig(min_doc_words=None, min_avg_word_length=0, min_stop_words=None),
    ):
        assert reasons(config, worded) == [gopher(text, config) for text in worded]


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.integers(0, 12), st.booleans())
def test_fineweb_decides_as_datatrove_does(texts: list[str], short: int, exclude: bool) -> None:
    for duplicates in (0.01, 1.0):
        config = FinewebQualityConfig(
            short_line_length=short, line_punct_exclude_zero=exclude, char_duplicates_ratio=duplicates
        )
        assert reasons(config, texts) == [fineweb(text, config) for text in texts]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (GOOD, None),
        ("", "gopher_short_doc"),
        ("the of " * 20, "gopher_short_doc"),
        ("the of " * 50_001, "gopher_long_doc"),
        ("a be " * 50, "gopher_below_avg_threshold"),
        ("incomprehensibilities the of " * 50, None),
        ("incomprehensibilities the " * 50, "gopher_above_avg_threshold"),
        (GOOD + " #" * 20, "gopher_too_many_hashes"),
        (GOOD + " ..." * 20, "gopher_too_many_ellipsis"),
        ("\n".join("- " + word for word in GOOD.split()), "gopher_too_many_bullets"),
        (GOOD.replace(".", "…"), "gopher_too_many_end_ellipsis"),
        (GOOD + " 1234" * 60, "gopher_below_alpha_threshold"),
        ("some words here that mean little " * 10, "gopher_enough_stop_words"),
    ],
)
def test_each_gopher_rule_has_a_text_that_only_it_rejects(text: str, reason: str | None) -> None:
    assert reasons(GopherQualityConfig(), [text]) == [reason]


@pytest.mark.parametrize("text", ["", " ", "\n\n", "...", "\u2028"])
def test_texts_without_words_or_lines_divide_by_nothing(text: str) -> None:
    bare = GopherQualityConfig(min_doc_words=None, min_stop_words=None)
    assert reasons(bare, [text])[0] in {"gopher_below_alpha_threshold", "gopher_too_many_ellipsis"}
    assert reasons(FinewebQualityConfig(), [text])[0] in {"empty", "short_line_ratio"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LengthConfig(), [None, None, None]),
        (LengthConfig(min_words=1), ["too_few_words", None, None]),
        (LengthConfig(max_words=2), [None, None, "too_many_words"]),
        (LengthConfig(min_words=0, min_chars=2), ["too_few_characters", None, None]),
        (LengthConfig(max_chars=3), [None, None, "too_many_characters"]),
        (LengthConfig(min_words=4, max_chars=3), ["too_few_words", "too_few_words", "too_few_words"]),
    ],
)
def test_length_bounds_include_their_ends(config: LengthConfig, expected: list[str | None]) -> None:
    assert reasons(config, ["", "é中\u3000", "a b c"]) == expected


def test_the_first_failing_filter_of_the_chain_is_the_reason() -> None:
    chain = FilterChain(
        [
            ("length", LengthConfig(min_words=2)),
            ("gopher_quality", ROOMY),
            ("fineweb_quality", FinewebQualityConfig()),
            ("length", LengthConfig(max_words=30)),
        ]
    )
    texts = [
        "one",
        "two words",
        "the words without an end",
        GOOD,
        "The end is near, dear friends of the house.",
        "",
    ]
    codes = chain.codes(pa.array(texts, pa.large_string()))
    assert [chain.reasons[code - 1] if code else None for code in codes] == [
        "length/too_few_words",
        "gopher_quality/gopher_short_doc",
        "fineweb_quality/line_punct_ratio",
        "length/too_many_words",
        None,
        "length/too_few_words",
    ]


def test_no_filters_keep_everything() -> None:
    assert FilterChain([]).codes(pa.array(["", "x"], pa.large_string())).tolist() == [0, 0]
