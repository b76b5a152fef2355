"""Lists of words: occurrences against plain Python, and what becomes of documents that have them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reference.filters import reference_count
from shardkit.errors import RecipeError
from shardkit.writers.documents import DOCUMENT_SCHEMA, document_ids
from shardkit.writers.filters.text_batch import TextBatch
from shardkit.writers.filters.word_lists import (
    BadWordsConfig,
    BadWordsFilter,
    StopWordsConfig,
    StopWordsFilter,
)
from shardkit.writers.kernels.phrases import Phrases, lower

PARTS = st.sampled_from([*"ab _.&\n\u2028中é\u0301٣", "bad", "a bad", "ÉA", "\r\n", "s&m", "x"])
TEXT = st.lists(PARTS, max_size=25).map("".join)


@settings(max_examples=300, deadline=None)
@given(st.lists(TEXT.map(lambda text: text[:6]), max_size=5), st.lists(TEXT, max_size=4))
@example(["a", "ab", "s&m", "中", ""], ["a ab a_ ba", "xs&m s&m", "中中", "b" * (1 << 12) + " a", ""])
def test_occurrences_are_those_of_plain_python(phrases: list[str], texts: list[str]) -> None:
    lowered = lower(pa.array(["a", *texts], pa.large_string()).slice(1))
    listed = [phrase.lower() for phrase in phrases]
    for separated in (True, False):
        found = Phrases(phrases, separated=separated).count(lowered, np.ones(len(texts), np.bool_))
        expected = [reference_count(listed, text.lower(), separated=separated) for text in texts]
        assert found.tolist() == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(TEXT.filter(bool), min_size=1, max_size=4), TEXT)
def test_a_document_is_bad_where_datatrove_finds_a_word(phrases: list[str], text: str) -> None:
    listed = "|".join(re.escape(phrase.lower()) for phrase in phrases)
    found = re.search(rf"(?:\W|^)({listed})(?:\W|$)", text.lower()) is not None
    assert (reference_count([p.lower() for p in phrases], text.lower()) > 0) == found


def documents(texts: list[str]) -> TextBatch:
    rows = [
        {"document_id": identity, "source": 0, "file": "f", "record": number, "text": text}
        for number, (text, identity) in enumerate(
            zip(texts, document_ids("f", range(len(texts))), strict=True)
        )
    ]
    batch = pa.RecordBatch.from_pylist(rows, schema=DOCUMENT_SCHEMA)
    return TextBatch(batch.column("text"), columns=batch)


def test_a_fraction_of_bad_documents_stays_whatever_the_batch(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_text("# ours\n\nnaughty \nvery bad\n")
    texts = ["A very BAD one", "naughtyness", "good"] * 1000
    config = BadWordsConfig(lists=("bad.txt",), keep_fraction=0.25)
    assert config.files() == ("bad.txt",)
    [rule] = BadWordsFilter(config, tmp_path).judge(documents(texts))
    assert rule.fails is not None
    assert rule.values is not None
    assert rule.values.tolist() == [1, 0, 0] * 1000
    assert 700 < rule.fails.sum() < 800
    [again] = BadWordsFilter(config, tmp_path).judge(documents(texts[:100]))
    assert again.fails is not None
    assert again.fails.tolist() == rule.fails[:100].tolist()
    [all_go] = BadWordsFilter(BadWordsConfig(lists=("bad.txt",)), tmp_path).judge(documents(texts))
    assert all_go.fails is not None
    assert all_go.fails.tolist() == [True, False, False] * 1000


def test_the_stop_words_of_one_language_are_enough(tmp_path: Path) -> None:
    (tmp_path / "de.txt").write_text("der\nund\n")
    config = StopWordsConfig(languages={"en": ("the", "of"), "de": "de.txt"}, min_stop_word_ratio=0.25)
    assert config.files() == ("de.txt",)
    texts = ["The end of it", "Der Hund und der", "the und", "", "of the " + "word " * 9]
    few, part = StopWordsFilter(config, tmp_path).judge(documents(texts))
    assert few.fails is not None
    assert few.values is not None
    assert part.fails is not None
    assert few.values.tolist() == [2, 3, 1, 0, 2]
    assert few.fails.tolist() == [False, False, True, True, False]
    assert part.fails.tolist() == [False, False, False, True, True]


def test_a_list_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"\xe9t\xe9\n")
    for name in ("latin.txt", "none.txt"):
        with pytest.raises(RecipeError, match=name):
            BadWordsFilter(BadWordsConfig(lists=(name,)), tmp_path)


def test_stop_words_may_be_listed_in_the_recipe_itself() -> None:
    config = StopWordsConfig.model_validate({"languages": {"en": ["the", "of"], "de": "de.txt"}})
    assert config.languages == {"en": ("the", "of"), "de": "de.txt"}
    assert config.files() == ("de.txt",)
