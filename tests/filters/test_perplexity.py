"""Language models of words: unigram log-probabilities from a list, and KenLM."""

from __future__ import annotations

import gzip
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.filters import reference_log_prob
from shardkit.writers.filters.perplexity import PerplexityConfig, UnigramLogProbConfig, read_frequencies
from support.filter_runs import fails, judge, text_batch, values
from support.small_models import ARPA

LIST = "word,count\nthe,60\nof,25\nÉtude,10\nice cream,4\nthe,1\n"


def test_unigram_log_probability_is_datatroves_formula(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text(LIST)
    config = UnigramLogProbConfig(frequencies="list.csv", logprobs_threshold=-2)
    [rule] = judge(config, text_batch(["The, of!", "the zebra", "étude", "", "ice"]), tmp_path)
    expected = [
        (math.log(0.61) + math.log(0.25)) / 2,
        (math.log(0.61) + math.log(1e-9)) / 2,
        math.log(0.1),
        0,
    ]
    assert values(rule) == pytest.approx([*expected, math.log(1e-9)])
    assert fails(rule) == [False, True, True, False, True]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from(["The", "of", "e\u0301tude", "x" * 20, "\r\n", "\u2028", "..", "中"])).map(
            " ".join
        )
    )
)
def test_unigram_values_are_those_of_the_plain_reference(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "list.csv.gz"
    if not path.exists():
        path.write_bytes(gzip.compress(LIST.encode()))
    [rule] = judge(UnigramLogProbConfig(frequencies=path.name), text_batch(texts), path.parent)
    known = read_frequencies(path)
    assert values(rule) == pytest.approx([reference_log_prob(text, known) for text in texts])


def perplexities(
    folder: Path, texts: list[str], **settings: Any
) -> tuple[list[float], list[list[bool] | None]]:
    (folder / "model.arpa").write_text(ARPA)
    low, high = judge(PerplexityConfig(model="model.arpa", **settings), text_batch(texts), folder)
    return values(low), [fails(low), fails(high)]


def test_perplexity_is_over_words_and_line_ends(tmp_path: Path) -> None:
    # <s> the cat </s>: 0.125 + 0.75 + 1; <s> zebra </s>: 0.5 for leaving <s>, 2 + 1.
    cat, zebra = 1.875, 3.5
    texts = ["The cat.", "the cat\n\n zebra", "", " \n...", "zebra"]
    expected = [10 ** (cat / 3), 10 ** ((cat + zebra) / 5), 0, 0, 10 ** (zebra / 2)]
    values, fails = perplexities(tmp_path, texts, max_perplexity=expected[1] + 1e-3, min_perplexity=5)
    assert values == pytest.approx(expected, rel=1e-5)
    assert fails == [[True, False, False, False, False], [False, False, False, False, True]]
    assert perplexities(tmp_path, texts)[1] == [None, None]
    assert perplexities(tmp_path, ["The cat."], words="white_space")[0][0] > 10 ** (cat / 3)
