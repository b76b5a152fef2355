"""Ratios of kinds of characters, and lines that stood before: against plain Python."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reference.filters import reference_kinds
from shardkit.writers.filters.base import first_failing
from shardkit.writers.filters.bounds import RatiosConfig, RatiosFilter
from shardkit.writers.filters.text_batch import TextBatch

TEXT = st.text(
    st.one_of(st.sampled_from("aZ9 \n.,$€\u2028é中٣²½ⅷҺ\u0301\x1c"), st.characters(exclude_categories=["Cs"]))
)
EVERY = "".join(chr(code) for code in range(0x20000) if not 0xD800 <= code < 0xE000)


@settings(max_examples=100, deadline=None)
@given(st.lists(TEXT, max_size=5))
@example(["", " ", "\r\n", EVERY, " " * (1 << 20)])
def test_ratios_are_those_of_plain_python(texts: list[str]) -> None:
    rules = RatiosFilter(RatiosConfig()).judge(TextBatch(pa.array(["x", *texts], pa.large_string()).slice(1)))
    assert all(rule.fails is None for rule in rules)
    found = np.array([rule.values for rule in rules]).T.tolist()
    assert found == [list(reference_kinds(text)) for text in texts]


@pytest.mark.parametrize(
    ("text", "config", "reason"),
    [
        ("a.b!", RatiosConfig(max_symbol_ratio=0.5), None),
        ("a.b!?", RatiosConfig(max_symbol_ratio=0.5), "too_many_symbols"),
        ("a1", RatiosConfig(max_digit_ratio=0.4), "too_many_digits"),
        ("aB 12", RatiosConfig(max_uppercase_ratio=0.4), "too_many_capitals"),
        ("a \n", RatiosConfig(max_white_space_ratio=0.5), "too_much_white_space"),
        ("ab 1   2", RatiosConfig(min_alphabetic_ratio=0.5), None),
        ("a 12", RatiosConfig(min_alphabetic_ratio=0.5), "too_few_letters"),
        ("", RatiosConfig(min_alphabetic_ratio=0.5, max_digit_ratio=0.0), "too_few_letters"),
        ("नमस्ते", RatiosConfig(max_symbol_ratio=0.0), None),
    ],
)
def test_bounds_include_their_ends(text: str, config: RatiosConfig, reason: str | None) -> None:
    rules = RatiosFilter(config).judge(TextBatch(pa.array([text], pa.large_string())))
    code = int(first_failing(rules, 1)[0])
    assert (RatiosFilter.reasons[code - 1] if code else None) == reason
