"""Lists of words: what becomes of documents that have them."""

from __future__ import annotations

from pathlib import Path

from shardkit.writers.filters.word_lists import BadWordsConfig, StopWordsConfig
from support.filter_runs import fails, judge, text_batch, values


def test_a_fraction_of_bad_documents_stays_whatever_the_batch(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_text("# ours\n\nnaughty \nvery bad\n")
    texts = ["A very BAD one", "naughtyness", "good"] * 1000
    config = BadWordsConfig(lists=("bad.txt",), keep_fraction=0.25)
    [rule] = judge(config, text_batch(texts), tmp_path)
    assert values(rule) == [1, 0, 0] * 1000
    found = fails(rule)
    assert found is not None
    assert 700 < sum(found) < 800
    [again] = judge(config, text_batch(texts[:100]), tmp_path)
    assert fails(again) == found[:100]
    [all_go] = judge(BadWordsConfig(lists=("bad.txt",)), text_batch(texts), tmp_path)
    assert fails(all_go) == [True, False, False] * 1000


def test_the_stop_words_of_one_language_are_enough(tmp_path: Path) -> None:
    (tmp_path / "de.txt").write_text("der\nund\n")
    config = StopWordsConfig(languages={"en": ("the", "of"), "de": "de.txt"}, min_stop_word_ratio=0.25)
    texts = ["The end of it", "Der Hund und der", "the und", "", "of the " + "word " * 9]
    few, part = judge(config, text_batch(texts), tmp_path)
    assert values(few) == [2, 3, 1, 0, 2]
    assert fails(few) == [False, False, True, True, False]
    assert fails(part) == [False, False, False, True, True]


def test_stop_words_may_be_listed_in_the_recipe_itself() -> None:
    config = StopWordsConfig.model_validate({"languages": {"en": ["the", "of"], "de": "de.txt"}})
    assert config.languages == {"en": ("the", "of"), "de": "de.txt"}
    assert config.files() == ("de.txt",)
