"""Documents that hold text of evaluation sets are found, told and dropped, and no others."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from reference.filters import reference_overlaps
from shardkit.errors import RecipeError
from shardkit.writers.documents import DOCUMENT_SCHEMA, document_ids
from shardkit.writers.filters.decontamination import (
    DecontaminationConfig,
    DecontaminationFilter,
    EvaluationConfig,
    read_items,
)
from shardkit.writers.filters.text_batch import TextBatch
from shardkit.writers.kernels import hash_tables

QUESTION = "A farmer has seventeen sheep, and all but nine of them run away at night: how many are left?"


def judged(
    folder: Path, texts: list[str], items: list[str], **settings: Any
) -> tuple[DecontaminationFilter, TextBatch]:
    (folder / "eval.jsonl").write_text("".join(json.dumps({"text": item}) + "\n" for item in items))
    config = DecontaminationConfig(evaluations=(EvaluationConfig(path="eval.jsonl"),), **settings)
    return DecontaminationFilter(config, folder), TextBatch(pa.array(texts, pa.large_string()))


def dropped(folder: Path, texts: list[str], items: list[str], **settings: Any) -> list[bool]:
    made, batch = judged(folder, texts, items, **settings)
    fails = made.judge(batch)[0].fails
    assert fails is not None
    return [bool(value) for value in fails]


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
    made, _ = judged(tmp_path, [], ["", "no " * 20, QUESTION])
    texts = ["fine", f"É. {QUESTION} End. {QUESTION}"]
    ids = document_ids("in.jsonl", range(2))
    nothing = [None, None]
    columns = [ids, [0, 0], ["in.jsonl"] * 2, [0, 1], texts, nothing, nothing, nothing]
    documents = pa.RecordBatch.from_arrays(
        [pa.array(c, field.type) for c, field in zip(columns, DOCUMENT_SCHEMA, strict=True)],
        schema=DOCUMENT_SCHEMA,
    )
    overlap, item = made.judge(TextBatch(documents.column("text"), columns=documents))
    assert overlap.values is not None
    assert item.values is not None
    assert overlap.values.tolist() == [0, 14]
    assert item.values.tolist() == ["", "eval.jsonl:2"]
    first = {
        "document_id": ids[1].hex(), "file": "in.jsonl", "record": 1, "evaluation": "eval.jsonl", "item": 2,
        "begin": 1, "end": 20, "item_begin": 0, "text": QUESTION.removesuffix("?"),
    }  # fmt: skip
    assert made.take_rows() == [first, first | {"begin": 21, "end": 40}]
    assert made.take_rows() == []


def test_marking_drops_nothing_and_fewer_matches_than_asked_for_are_let_pass(tmp_path: Path) -> None:
    made, batch = judged(tmp_path, [QUESTION], [QUESTION], action="mark")
    overlap, _ = made.judge(batch)
    assert overlap.fails is None
    assert overlap.values is not None
    assert overlap.values.tolist() == [7]
    assert dropped(tmp_path, [QUESTION], [QUESTION], min_matches=7) == [True]
    assert dropped(tmp_path, [QUESTION], [QUESTION], min_matches=8) == [False]


def test_documents_that_were_dropped_before_are_not_looked_at(tmp_path: Path) -> None:
    made, batch = judged(tmp_path, [QUESTION, "x", QUESTION], [QUESTION])
    batch.wanted = np.array([False, True, True])
    overlap, _ = made.judge(batch)
    assert overlap.values is not None
    assert overlap.values.tolist() == [0, 0, 7]


WORDS = st.sampled_from(["a", "B", "b", "é", "e\u0301", "ﬁ", "中", "1", "...", "\r\n", "\u2028", "\u0301"])
TEXTS = st.lists(st.lists(WORDS, max_size=30).map(" ".join), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(TEXTS, TEXTS, st.integers(1, 4), st.integers(1, 3))
def test_overlaps_are_those_of_the_plain_reference(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], items: list[str], ngram: int, least: int
) -> None:
    made, batch = judged(
        tmp_path_factory.getbasetemp(), texts, items, ngram=ngram, min_item_words=least, action="mark"
    )
    overlap, _ = made.judge(batch)
    assert overlap.values is not None
    expected = [reference_overlaps(text, items, ngram=ngram, min_item_words=least) for text in texts]
    assert [value > 0 for value in overlap.values.tolist()] == [bool(found) for found in expected]
    covered: dict[int, set[int]] = {number: set() for number in range(len(texts))}
    for row in made.take_rows():
        covered[row["document"]] |= set(range(row["begin"], row["end"]))
    for number, found in enumerate(expected):
        assert found <= covered[number]


def test_words_confirm_what_hashes_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all hashes equal, only what is really the same is an overlap."""
    made, batch = judged(tmp_path, ["z " * 20, QUESTION], [QUESTION])
    for table in made._tables:
        table.bits[:] = np.uint64(2**64 - 1)
    real = hash_tables.find_matches

    def all_equal(hashes: Any, bits: Any, keys: Any, places: Any) -> Any:
        return (
            np.array([(at, 0) for at in range(len(hashes))])
            if len(hashes)
            else real(hashes, bits, keys, places)
        )

    monkeypatch.setattr(hash_tables, "find_matches", all_equal)
    overlap, _ = made.judge(batch)
    assert overlap.values is not None
    assert overlap.values.tolist() == [0, 1]


def test_items_come_from_fields_lists_lines_and_gzip(tmp_path: Path) -> None:
    record = {"question": QUESTION, "choices": ["nine words that are in a list of choices", 5], "id": 3}
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as file:
        file.write(json.dumps(record).encode() + b"\n\n")
    (tmp_path / "b.txt").write_text("\nEin Satz mit neun Wörtern, die alle hintereinander stehen.\r\n")
    sets = [{"path": "a.jsonl.gz", "fields": ["question", "choices"], "name": "sheep"}, {"path": "b.txt"}]
    config = DecontaminationConfig.model_validate({"evaluations": sets})
    assert config.files() == ("a.jsonl.gz", "b.txt")
    read = read_items(config, tmp_path)
    assert [(item.evaluation, item.record) for item in read] == [("sheep", 0), ("b.txt", 1)]
    assert read[0].text == f"{QUESTION}\nnine words that are in a list of choices"
    batch = TextBatch(
        pa.array([QUESTION, "ein satz MIT neun wörtern die alle hintereinander stehen"], pa.large_string())
    )
    assert DecontaminationFilter(config, tmp_path).judge(batch)[1].values.tolist() == ["sheep:0", "b.txt:1"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b'{"text": "x"}\n{"txt": "y"}\n', "line 2 has no text under text"),
        (b"{", "line 1 is not JSON"),
        (b"\xff\n", "line 1 is not UTF-8"),
        (b"[1]\n", "line 1 has no text"),
        (None, "No such file"),
    ],
)
def test_files_that_cannot_be_read_are_recipe_errors(
    data: bytes | None, problem: str, tmp_path: Path
) -> None:
    if data is not None:
        (tmp_path / "eval.jsonl").write_bytes(data)
    with pytest.raises(RecipeError, match=problem):
        DecontaminationFilter(
            DecontaminationConfig(evaluations=(EvaluationConfig(path="eval.jsonl"),)), tmp_path
        )


def test_two_sets_of_one_name_are_refused() -> None:
    one = EvaluationConfig(path="a.jsonl")
    with pytest.raises(ValidationError, match="same name"):
        DecontaminationConfig(evaluations=(one, one))
