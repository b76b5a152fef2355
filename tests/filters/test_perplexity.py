"""Language models of words: unigram log-probabilities from a list, and KenLM."""

from __future__ import annotations

import gzip
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from reference.filters import reference_log_prob
from shardkit.errors import RecipeError
from shardkit.writers.filters.perplexity import (
    PerplexityConfig,
    PerplexityFilter,
    UnigramLogProbConfig,
    UnigramLogProbFilter,
    read_frequencies,
)
from shardkit.writers.filters.text_batch import TextBatch

LIST = "word,count\nthe,60\nof,25\nÉtude,10\nice cream,4\nthe,1\n"
ARPA = """\\data\\
ngram 1=5
ngram 2=2

\\1-grams:
-2.0\t<unk>
0\t<s>\t-0.5
-1.0\t</s>
-0.5\tthe\t-0.25
-1.5\tcat

\\2-grams:
-0.125\t<s> the
-0.75\tthe cat

\\end\\
"""


def batch_of(texts: list[str]) -> TextBatch:
    return TextBatch(pa.array(texts, pa.large_string()))


def test_unigram_log_probability_is_datatroves_formula(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text(LIST)
    made = UnigramLogProbFilter(UnigramLogProbConfig(frequencies="list.csv", logprobs_threshold=-2), tmp_path)
    batch = batch_of(["The, of!", "the zebra", "étude", "", "ice"])
    [rule] = made.judge(batch)
    assert rule.values is not None
    assert rule.fails is not None
    expected = [
        (math.log(0.61) + math.log(0.25)) / 2,
        (math.log(0.61) + math.log(1e-9)) / 2,
        math.log(0.1),
        0,
    ]
    assert rule.values.tolist() == pytest.approx([*expected, math.log(1e-9)])
    assert rule.fails.tolist() == [False, True, True, False, True]
    batch.wanted = np.array([False, True, False, False, False])
    assert made.judge(batch)[0].values.tolist() == pytest.approx([0, expected[1], 0, 0, 0])  # type: ignore[union-attr]


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
    [rule] = UnigramLogProbFilter(UnigramLogProbConfig(frequencies=path.name), path.parent).judge(
        batch_of(texts)
    )
    assert rule.values is not None
    known = read_frequencies(path)
    assert rule.values.tolist() == pytest.approx([reference_log_prob(text, known) for text in texts])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"word,count\n",
        b"word,number\nthe,1\n",
        b"word,count\nthe,-1\n",
        b"word,count\nthe,x\n",
        b"word,count\n\xff,1\n",
    ],
)
def test_lists_that_cannot_be_read_are_recipe_errors(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_bytes(data)
    with pytest.raises(RecipeError, match="unigram_log_prob"):
        UnigramLogProbFilter(UnigramLogProbConfig(frequencies="list.csv"), tmp_path)
    with pytest.raises(RecipeError, match="No such file"):
        UnigramLogProbFilter(UnigramLogProbConfig(frequencies="none.csv"), tmp_path)


def perplexities(
    tmp_path: Path, texts: list[str], **bounds: Any
) -> tuple[list[float], list[list[bool] | None]]:
    pytest.importorskip("kenlm", reason="it is built from source: pip install 'shardkit[perplexity]'")
    (tmp_path / "model.arpa").write_text(ARPA)
    rules = PerplexityFilter(PerplexityConfig(model="model.arpa", **bounds), tmp_path).judge(batch_of(texts))
    assert rules[0].values is not None
    return rules[0].values.tolist(), [None if r.fails is None else r.fails.tolist() for r in rules]


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


def test_models_and_bounds_that_cannot_be_meant_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="nothing would stay"):
        PerplexityConfig(model="x", min_perplexity=3, max_perplexity=2)
    with pytest.raises(RecipeError, match="No such file"):
        PerplexityFilter(PerplexityConfig(model="none"), tmp_path)
    pytest.importorskip("kenlm", reason="it is built from source: pip install 'shardkit[perplexity]'")
    (tmp_path / "model").write_text("not a model")
    with pytest.raises(RecipeError, match="not a KenLM model"):
        PerplexityFilter(PerplexityConfig(model="model"), tmp_path)
