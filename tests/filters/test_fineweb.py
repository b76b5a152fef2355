"""FineWeb's line rules: against datatrove's, in plain Python."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.kernels.utf8 import TERMINAL, characters_with
from shardkit.writers.filters.fineweb import FinewebQualityFilter
from support.filter_runs import decide
from support.filter_texts import WORDED_TEXTS


def fineweb(text: str, config: FinewebQualityFilter) -> str | None:
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


@settings(max_examples=300, deadline=None)
@given(WORDED_TEXTS, st.integers(0, 12), st.booleans())
def test_fineweb_decides_as_datatrove_does(texts: list[str], short: int, exclude: bool) -> None:
    for duplicates in (0.01, 1.0):
        config = FinewebQualityFilter(
            short_line_length=short, line_punct_exclude_zero=exclude, char_duplicates_ratio=duplicates
        )
        assert decide(config, texts) == [fineweb(text, config) for text in texts]


@pytest.mark.parametrize("text", ["", " ", "\n\n", "...", "\u2028"])
def test_texts_without_words_or_lines_divide_by_nothing(text: str) -> None:
    assert decide(FinewebQualityFilter(), [text])[0] in {"empty", "short_line_ratio"}
