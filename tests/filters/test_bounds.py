"""Bounds on lengths and on ratios of kinds of characters: against plain Python."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reference.filters import reference_kinds
from shardkit.writers.filters.bounds import LengthFilter, RatiosFilter
from support.filter_runs import decide, fails, judge, text_batch, values

TEXT = st.text(
    st.one_of(st.sampled_from("aZ9 \n.,$€\u2028é中٣²½ⅷҺ\u0301\x1c"), st.characters(exclude_categories=["Cs"]))
)
EVERY = "".join(chr(code) for code in range(0x20000) if not 0xD800 <= code < 0xE000)


@settings(max_examples=100, deadline=None)
@given(st.lists(TEXT, max_size=5))
@example(["", " ", "\r\n", EVERY, " " * (1 << 20)])
def test_ratios_are_those_of_plain_python(texts: list[str]) -> None:
    rules = judge(RatiosFilter(), text_batch(texts))
    assert all(fails(rule) is None for rule in rules)
    found = [list(row) for row in zip(*map(values, rules), strict=True)]
    assert found == [list(reference_kinds(text)) for text in texts]


@pytest.mark.parametrize(
    ("text", "config", "reason"),
    [
        ("a.b!", RatiosFilter(max_symbol_ratio=0.5), None),
        ("a.b!?", RatiosFilter(max_symbol_ratio=0.5), "too_many_symbols"),
        ("a1", RatiosFilter(max_digit_ratio=0.4), "too_many_digits"),
        ("aB 12", RatiosFilter(max_uppercase_ratio=0.4), "too_many_capitals"),
        ("a \n", RatiosFilter(max_white_space_ratio=0.5), "too_much_white_space"),
        ("ab 1   2", RatiosFilter(min_alphabetic_ratio=0.5), None),
        ("a 12", RatiosFilter(min_alphabetic_ratio=0.5), "too_few_letters"),
        ("", RatiosFilter(min_alphabetic_ratio=0.5, max_digit_ratio=0.0), "too_few_letters"),
        ("नमस्ते", RatiosFilter(max_symbol_ratio=0.0), None),
    ],
)
def test_bounds_on_ratios_include_their_ends(text: str, config: RatiosFilter, reason: str | None) -> None:
    assert decide(config, [text]) == [reason]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LengthFilter(), [None, None, None]),
        (LengthFilter(min_words=1), ["too_few_words", None, None]),
        (LengthFilter(max_words=2), [None, None, "too_many_words"]),
        (LengthFilter(min_words=0, min_chars=2), ["too_few_characters", None, None]),
        (LengthFilter(max_chars=3), [None, None, "too_many_characters"]),
        (LengthFilter(min_words=4, max_chars=3), ["too_few_words", "too_few_words", "too_few_words"]),
    ],
)
def test_bounds_on_lengths_include_their_ends(config: LengthFilter, expected: list[str | None]) -> None:
    assert decide(config, ["", "é中\u3000", "a b c"]) == expected
