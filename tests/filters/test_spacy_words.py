"""Words of spaCy: what SpacyWords looks up is what spaCy makes of the whole text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import RecipeError
from shardkit.kernels.text_arrays import split_chunks
from shardkit.writers.filters import spacy_words as module
from shardkit.writers.filters.config import PROFILES, FilterEntry
from shardkit.writers.filters.spacy_words import PART_CHARACTERS, SpacyWords, spacy_words
from support.filter_runs import text_batch
from support.read_inputs import data_folder, read

spacy = pytest.importorskip("spacy")

# Pieces that special cases are made of, and others: what stands next to what is the question.
PIECES = st.sampled_from(
    [
        *(":", ")", "(", "-", "'", "s", "8", "=", "D", "P", "<", "3", ".", ",", "!", "…", "/", "@", "#"),
        *(
            "hello",
            "John's",
            "can't",
            "St.",
            "e.g.",
            "10a.m.",
            "and/or",
            "http://a.b/c?d",
            "x:)",
            ":)",
            ":))",
        ),
        *("EE.", "UU.", "Ee.", "don\u2019t", "2km", "$5", "\u4f60\u597d", "\U0001f600", "o.O", "(-8", "C++"),
        *(" ", " ", " ", "  ", "\n", "\t", "\u00a0", "\u2028", " \n "),
    ]
)
TEXTS = st.lists(st.lists(PIECES, max_size=12).map("".join), max_size=4)


@cache
def whole(language: str) -> Any:
    return spacy.blank(language).tokenizer


def expected(language: str, text: str) -> list[str]:
    """The words of the whole text, as datatrove takes them: stripped, without empty ones."""
    return [word for word in (token.text.strip() for token in whole(language)(text)) if word]


def split(words: SpacyWords, texts: Sequence[str], wanted: Sequence[bool] | None = None) -> list[list[str]]:
    batch = text_batch(texts)
    chosen = np.ones(len(texts), np.bool_) if wanted is None else np.array(wanted)
    data, offsets = words.split(batch.data, batch.offsets, chosen)
    found = [data[first:stop].tobytes().decode() for first, stop in pairwise(offsets)]
    assert all(text == "" or text.endswith(" ") for text in found)
    return [text.split() for text in found]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("language", ["en", "es", "xx"])
@settings(deadline=None)  # rules are read once
@given(texts=TEXTS)
def test_words_are_those_of_the_whole_text(language: str, texts: list[str]) -> None:
    assert split(spacy_words(language), texts) == [expected(language, text) for text in texts]


@pytest.mark.parametrize(
    ("language", "text", "words"),
    [
        ("en", "hello:) )", ["hello", ":", ")", ")"]),  # a longer case overlaps, and spaCy finds neither
        ("en", "hello:)\n)", ["hello", ":)", ")"]),
        ("en", "hello:)  )", ["hello", ":)", ")"]),
        ("en", "a :) )", ["a", ":)", ")"]),
        ("en", "Isn't it 5km, e.g. here?", ["Is", "n't", "it", "5", "km", ",", "e.g.", "here", "?"]),
        ("es", "en EE. UU. hoy", ["en", "EE. UU.", "hoy"]),  # a case with a space
    ],
)
def test_special_cases_see_their_neighbors(language: str, text: str, words: list[str]) -> None:
    assert expected(language, text) == words
    assert split(spacy_words(language), [text]) == [[part for word in words for part in word.split()]]


@settings(deadline=None)  # rules are read once
@given(texts=TEXTS, wanted=st.lists(st.booleans(), min_size=4, max_size=4))
def test_what_is_not_wanted_is_empty(texts: list[str], wanted: list[bool]) -> None:
    chosen = wanted[: len(texts)]
    found = split(spacy_words("en"), texts, chosen)
    assert found == [expected("en", text) if want else [] for text, want in zip(texts, chosen, strict=True)]


def test_words_do_not_depend_on_what_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"word{number}:) and {number % 7}km, (so {number}:)) )" for number in range(200)]
    together = split(SpacyWords("en"), texts)
    monkeypatch.setattr(module, "_MOST_KNOWN", 10)
    monkeypatch.setattr(module, "_PIECE_BYTES", 100)
    monkeypatch.setattr(module, "_CALL_CHARACTERS", 7)
    forgetful = SpacyWords("en")
    assert split(forgetful, texts) == together == [expected("en", text) for text in texts]
    assert len(forgetful._known) < 30


@settings(deadline=None)  # rules are read once
@given(texts=TEXTS)
def test_chunks_are_those_of_str_split(texts: list[str]) -> None:
    batch = text_batch(texts)
    chunks = split_chunks(batch.data, batch.offsets, np.ones(len(texts), np.bool_))
    found = chunks.texts.to_pylist()
    assert [found[first:stop] for first, stop in pairwise(chunks.firsts)] == [text.split() for text in texts]
    joined = []
    for text in texts:
        at = 0
        for chunk in text.split():
            start = text.index(chunk, at)
            joined.append(at > 0 and text[at:start] == " ")
            at = start + len(chunk)
    assert chunks.joined.tolist() == joined


@pytest.mark.extended
def test_a_long_chunk_is_split_as_it_is_and_cut_only_where_that_takes_long() -> None:
    plain = "data:image/png;base64," + "iVBORw0KGgoAAAANSUhEUgAA" * 4000
    assert split(spacy_words("en"), [plain]) == [expected("en", plain)]
    begin = time.monotonic()
    [words] = split(spacy_words("en"), [":)!" * 20_000])
    assert time.monotonic() - begin < 60  # whole it would take a quarter of an hour
    assert "".join(words) == ":)!" * 20_000
    [cut] = split(spacy_words("en"), ["'s" * 3000])
    assert max(map(len, cut)) <= PART_CHARACTERS


def test_languages_without_rules_are_refused() -> None:
    for language, problem in (("ja", "ja"), ("qq", "qq")):
        with pytest.raises(RecipeError, match=f"words: spacy:{problem}"):
            spacy_words(language)
    with pytest.raises(ValueError, match="words"):
        FilterEntry.model_validate({"gopher_quality": {"words": "spacy"}})


def test_chinese_is_split_by_jieba() -> None:
    pytest.importorskip("jieba")
    text = "\u6211\u4eec\u90fd\u662f\u4e2d\u56fd\u4eba\u6c11\u7684\u670b\u53cb\u3002 Hello, \u4e16\u754c!"
    found = split(spacy_words("zh"), [text, "", text], [True, True, False])
    chinese = spacy.blank("zh", config={"nlp": {"tokenizer": {"segmenter": "jieba"}}})
    words = [token.text for token in chinese(text) if token.text.strip()]
    assert found == [words, [], []]
    assert "\u670b\u53cb" in words


def test_statistics_of_words_change_and_those_of_the_text_do_not() -> None:
    batch = text_batch(["Don't (really) wait... #1, he said: \u2026\n- no!", "", "one two"])
    spaced, split_words = batch.words(("he",)), batch.words(("he",), "spacy:en")
    assert spaced.words.tolist() == [9, 0, 2]
    assert split_words.words.tolist() == [len(expected("en", batch.texts[0].as_py())), 0, 2]
    for name in ("characters", "hashes", "ellipses", "newlines", "lines", "bullet_lines", "ellipsis_lines"):
        assert getattr(spaced, name).tolist() == getattr(split_words, name).tolist()


def test_the_published_profile_differs_in_words_only() -> None:
    ours, published = (
        [step for entry in PROFILES[name] for step in FilterEntry.model_validate(entry).filters()]
        for name in ("fineweb", "fineweb_published")
    )
    assert [name for name, _ in ours] == [name for name, _ in published]
    for (name, spaced), (_, split_words) in zip(ours, published, strict=True):
        others = split_words.model_dump()
        if name in ("gopher_quality", "gopher_repetition", "fineweb_quality"):
            assert others.pop("words") == "spacy:en"
            assert "words" not in spaced.entry(name)[name]  # as in the recipes of older versions
            assert split_words.entry(name)[name]["words"] == "spacy:en"
        assert others.items() <= spaced.model_dump().items()


@pytest.mark.data
def test_words_of_real_documents() -> None:
    table, _, _ = read(data_folder() / "corpus", "multilang-00.jsonl.zst")
    texts = table.column("text").to_pylist()[:400]
    found = split(spacy_words("en"), texts)
    assert not [number for number, text in enumerate(texts) if found[number] != expected("en", text)]


def test_words_differ_by_language() -> None:
    entry = {"gopher_quality": {"words": "spacy:xx"}, "by_language": {"deu": {"words": "whitespace"}}}
    [(name, config)] = FilterEntry.model_validate(entry).filters()
    written = config.entry(name)
    assert written["gopher_quality"]["words"] == "spacy:xx"
    assert written["by_language"] == {"deu": {"words": "whitespace"}}
    [(_, again)] = FilterEntry.model_validate(written).filters()
    assert again == config
