"""Documents that hold text of evaluation sets are found, told and dropped, and no others."""

from __future__ import annotations

import gzip
import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from reference.filters import reference_overlaps
from shardkit.writers import build
from shardkit.writers.filters.batch import TextBatch
from shardkit.writers.filters.decontamination import (
    CutConfig,
    DecontaminationConfig,
    DecontaminationEditor,
    DecontaminationFilter,
    Overlap,
    cut_out,
    read_items,
)
from shardkit.writers.filters.evaluations import EvaluationConfig
from shardkit.writers.kernels import hash_tables
from support.filter_runs import decisions, documents, fails, judge, text_batch, values
from support.small_build import make_corpus

QUESTION = "A farmer has seventeen sheep, and all but nine of them run away at night: how many are left?"


def made(folder: Path, items: list[str], **settings: Any) -> DecontaminationFilter:
    (folder / "eval.jsonl").write_text("".join(json.dumps({"text": item}) + "\n" for item in items))
    config = DecontaminationConfig(evaluations=(EvaluationConfig(path="eval.jsonl"),), **settings)
    found = config.build(folder)
    assert isinstance(found, DecontaminationFilter)
    return found


def editor(folder: Path, items: list[str], cut: dict[str, Any], **settings: Any) -> DecontaminationEditor:
    (folder / "eval.jsonl").write_text("".join(json.dumps({"text": item}) + "\n" for item in items))
    config = DecontaminationConfig(
        evaluations=(EvaluationConfig(path="eval.jsonl"),), cut=CutConfig(**cut), **settings
    )
    made = config.build(folder)
    assert isinstance(made, DecontaminationEditor)
    return made


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
    assert values(judge(config, batch, tmp_path)[1]) == ["sheep:0", "b.txt:1"]


def test_an_overlap_goes_with_its_margins_as_for_gpt_3(tmp_path: Path) -> None:
    before, after = "before it, " * 60, "after it, " * 60
    texts = [f"{before}{QUESTION}{after}", "nothing of it", f"{'short. ' * 20}{QUESTION}", QUESTION * 2, ""]
    step = editor(tmp_path, [QUESTION], {})
    batch = text_batch(texts)
    made = step.edit(batch)
    kept = [before[: len(before) - 200], after[200 - 1 :]]  # the question mark is no part of a word
    assert made.texts.to_pylist() == ["\n\n".join(kept), *texts[1:]]
    assert decisions(made.rules, 5) == [None, None, "nothing_left", "nothing_left", None]
    sizes = [len(text.encode()) for text in made.texts.to_pylist()]
    assert (batch.sizes - made.cut["overlap"]).tolist() == sizes
    assert [row["item"] for row in step.take_rows()] == [0] * 4
    assert step.take_rows() == []
    many = f"{'piece of it, ' * 60}{QUESTION}" * 11
    assert decisions(step.edit(text_batch([many])).rules, 1) == ["too_many_pieces"]


WORDS = st.sampled_from(["one", "TWO", "three,", "fo\u0301ur", "\u4e94", "-", "  ", "six"])


@settings(max_examples=60, deadline=None)
@given(st.lists(WORDS, max_size=40), st.integers(0, 6), st.integers(1, 8))
def test_what_is_left_is_what_a_plain_reference_leaves(words: list[str], margin: int, least: int) -> None:
    text = unicodedata.normalize("NFC", " ".join(words))
    item = ["two", "three"]
    found = [match.span() for match in re.finditer(r"\w+", text)]
    names = [text[begin:end].lower() for begin, end in found]
    gone = [False] * len(text)
    cuts = []
    for at in range(len(names) - 1):
        if names[at : at + 2] == item:
            begin, end = found[at][0] - margin, found[at + 1][1] + margin
            cuts.append((max(0, begin), end))
            gone[max(0, begin) : end] = [True] * (min(end, len(text)) - max(0, begin))
    expected, piece = [], ""
    for character, is_gone in zip([*text, ""], [*gone, True], strict=True):
        if is_gone and piece:
            expected.append(piece)
        piece = "" if is_gone else piece + character
    expected = [each for each in expected if len(each) >= least]
    overlaps = [Overlap("e", 0, at, at + 2, 0) for at in range(len(names) - 1) if names[at : at + 2] == item]
    cut = CutConfig(margin=margin, min_piece=least)
    assert cut_out(" ".join(words), overlaps, cut) == ("\n\n".join(expected), len(expected))


def test_cutting_and_marking_exclude_each_other() -> None:
    evaluations = (EvaluationConfig(path="e"),)
    with pytest.raises(ValidationError, match="no effect with `action: mark`"):
        DecontaminationConfig(evaluations=evaluations, cut=CutConfig(), action="mark")
    assert "cut" not in DecontaminationConfig(evaluations=evaluations).model_dump(mode="json")


def test_a_build_cuts_overlaps_and_books_their_bytes(tmp_path: Path, inline_builds: None) -> None:
    recipe = make_corpus(tmp_path, 80)
    (tmp_path / "eval.jsonl").write_text(json.dumps({"text": QUESTION}) + "\n")
    texts = [f"page {number}. {'Some text before it. ' * 30}{QUESTION}" for number in range(3)]
    (tmp_path / "plain-0.jsonl").write_text(
        "".join(json.dumps({"text": text, "number": 1}) + "\n" for text in texts)
    )
    cut = {"decontamination": {"evaluations": [{"path": "eval.jsonl"}], "cut": {}}}
    overrides = [f"filters={json.dumps([cut])}", "output.format=jsonl"]
    made = build(recipe, overrides=overrides, workers=1, progress=False).open()
    left = [str(row["text"]) for row in made if str(row["text"]).startswith("page ")]
    assert sorted(left) == sorted(text[: text.index(QUESTION) - 200] for text in texts)
    assert made.card is not None
    assert made.card.filters is not None
    [edit] = made.card.filters.cut
    assert (edit.edit, edit.bytes) == ("decontamination/overlap", 3 * (200 + len(QUESTION)))
    assert len((made.path / "decontamination.jsonl").read_text().splitlines()) == 3
