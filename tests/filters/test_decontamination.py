"""Documents that hold text of evaluation sets are found, told and dropped, and no others."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.filters import reference_overlaps
from shardkit.writers.filters.decontamination import (
    DecontaminationConfig,
    DecontaminationFilter,
    EvaluationConfig,
    read_items,
)
from shardkit.writers.filters.text_batch import TextBatch
from shardkit.writers.kernels import hash_tables
from support.filter_runs import documents, fails, text_batch, values

QUESTION = "A farmer has seventeen sheep, and all but nine of them run away at night: how many are left?"


def made(folder: Path, items: list[str], **settings: Any) -> DecontaminationFilter:
    (folder / "eval.jsonl").write_text("".join(json.dumps({"text": item}) + "\n" for item in items))
    config = DecontaminationConfig(evaluations=(EvaluationConfig(path="eval.jsonl"),), **settings)
    return config.build(folder)


def dropped(folder: Path, texts: list[str], items: list[str], **settings: Any) -> list[bool] | None:
    return fails(made(folder, items, **settings).judge(text_batch(texts))[0])


def test_thirteen_words_in_a_row_are_an_overlap_whatever_their_case_and_punctuation(tmp_path: Path) -> None:
    words = QUESTION.split()
    texts = [
        f"before {' '.join(words[:13]).upper().replace(',', ' -')} after",
        f"before {' '.join(words[:12])} after {' '.join(words[12:])}",
        f"x {QUESTION} y",
        "nothing of it",
        "",
    ]
    assert dropped(tmp_path, texts, ["unrelated " * 20, QUESTION]) == [True, False, True, False, False]
    assert dropped(tmp_path, texts, [QUESTION], ngram=5) == [True, True, True, False, False]


def test_short_items_are_found_as_a_whole_and_shorter_ones_are_left_out(tmp_path: Path) -> None:
    nine, seven = "one two three four five six seven eight nine", "a b c d e f g"
    texts = [f"x {nine}. y", f"x {nine[:-5]}", f"{seven} and {seven}", nine]
    assert dropped(tmp_path, texts, [nine, seven]) == [True, False, False, True]
    assert dropped(tmp_path, texts, [nine, seven], min_item_words=7) == [True, False, True, True]


def test_spans_tell_the_document_the_item_and_where(tmp_path: Path) -> None:
    step = made(tmp_path, ["", "no " * 20, QUESTION])
    batch = documents(["fine", f"É. {QUESTION} End. {QUESTION}"], file="in.jsonl")
    overlap, item = step.judge(TextBatch(batch))
    assert values(overlap) == [0, 14]
    assert values(item) == ["", "eval.jsonl:2"]
    first = {
        "document_id": batch.column("document_id")[1].as_py().hex(), "file": "in.jsonl", "record": 1,
        "evaluation": "eval.jsonl", "item": 2, "begin": 1, "end": 20, "item_begin": 0,
        "text": QUESTION.removesuffix("?"),
    }  # fmt: skip
    assert step.take_rows() == [first, first | {"begin": 21, "end": 40}]
    assert step.take_rows() == []


def test_marking_drops_nothing_and_fewer_matches_than_asked_for_are_let_pass(tmp_path: Path) -> None:
    overlap, _ = made(tmp_path, [QUESTION], action="mark").judge(text_batch([QUESTION]))
    assert (fails(overlap), values(overlap)) == (None, [7])
    assert dropped(tmp_path, [QUESTION], [QUESTION], min_matches=7) == [True]
    assert dropped(tmp_path, [QUESTION], [QUESTION], min_matches=8) == [False]


WORDS = st.sampled_from(["a", "B", "b", "é", "e\u0301", "ﬁ", "中", "1", "...", "\r\n", "\u2028", "\u0301"])
TEXTS = st.lists(st.lists(WORDS, max_size=30).map(" ".join), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(TEXTS, TEXTS, st.integers(1, 4), st.integers(1, 3))
def test_overlaps_are_those_of_the_plain_reference(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], items: list[str], ngram: int, least: int
) -> None:
    folder = tmp_path_factory.getbasetemp()
    step = made(folder, items, ngram=ngram, min_item_words=least, action="mark")
    overlap, _ = step.judge(text_batch(texts))
    expected = [reference_overlaps(text, items, ngram=ngram, min_item_words=least) for text in texts]
    assert [value > 0 for value in values(overlap)] == [bool(found) for found in expected]
    covered: dict[int, set[int]] = {number: set() for number in range(len(texts))}
    for row in step.take_rows():
        covered[row["record"] - 1] |= set(range(row["begin"], row["end"]))
    for number, found in enumerate(expected):
        assert found <= covered[number]


def test_words_confirm_what_hashes_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all hashes equal, only what is really the same is an overlap."""
    step = made(tmp_path, [QUESTION])
    for table in step._tables:
        table.bits[:] = np.uint64(2**64 - 1)
    real = hash_tables.find_matches

    def all_equal(hashes: Any, bits: Any, keys: Any, places: Any) -> Any:
        return (
            np.array([(at, 0) for at in range(len(hashes))])
            if len(hashes)
            else real(hashes, bits, keys, places)
        )

    monkeypatch.setattr(hash_tables, "find_matches", all_equal)
    overlap, _ = step.judge(text_batch(["z " * 20, QUESTION]))
    assert values(overlap) == [0, 1]


def test_items_come_from_fields_lists_lines_and_gzip(tmp_path: Path) -> None:
    record = {"question": QUESTION, "choices": ["nine words that are in a list of choices", 5], "id": 3}
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as file:
        file.write(json.dumps(record).encode() + b"\n\n")
    (tmp_path / "b.txt").write_text("\nEin Satz mit neun Wörtern, die alle hintereinander stehen.\r\n")
    sets = [{"path": "a.jsonl.gz", "fields": ["question", "choices"], "name": "sheep"}, {"path": "b.txt"}]
    config = DecontaminationConfig.model_validate({"evaluations": sets})
    read = read_items(config, tmp_path)
    assert [(item.evaluation, item.record) for item in read] == [("sheep", 0), ("b.txt", 1)]
    assert read[0].text == f"{QUESTION}\nnine words that are in a list of choices"
    batch = text_batch([QUESTION, "ein satz MIT neun wörtern die alle hintereinander stehen"])
    assert values(config.build(tmp_path).judge(batch)[1]) == ["sheep:0", "b.txt:1"]
