"""The filters against what datatrove itself decided: its own unit cases, and 1,400 documents. None differs.

Words are those of `str.split` on both sides, or those of spaCy, as datatrove is released. C4's filters ask
for sentences at most.
"""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shardkit.writers.filters.base import Editor
from shardkit.writers.filters.config import FilterEntry
from support.filter_runs import decisions, edit, judge, text_batch
from support.read_inputs import data_folder

FILTERS = {  # datatrove's class: our name
    "GopherRepetitionFilter": "gopher_repetition",
    "GopherQualityFilter": "gopher_quality",
    "FineWebQualityFilter": "fineweb_quality",
    "C4ParagraphFilter": "c4_paragraph",
    "C4QualityFilter": "c4_quality",
}
RENAMED = {"< 3 paragraphs": "too_few_paragraphs"}
DOCUMENTS = [  # outcomes, their key, our settings
    ("outcomes_ws", "GopherRepetitionFilter", {}),
    ("outcomes_ws", "GopherQualityFilter", {}),
    ("outcomes_ws", "GopherQualityFilter/no_alpha", {"max_non_alpha_words_ratio": None}),
    ("outcomes_ws", "FineWebQualityFilter", {}),
    *(
        ("outcomes", name, {"words": "spacy:en"})
        for name in ("GopherRepetitionFilter", "GopherQualityFilter", "FineWebQualityFilter")
    ),
    ("outcomes", "C4ParagraphFilter", {}),
    ("outcomes", "C4QualityFilter", {}),
]


@pytest.fixture
def folder() -> Path:
    return data_folder() / "filters"


@cache
def documents(folder: Path) -> list[dict[str, Any]]:
    with gzip.open(folder / "datatrove_oracle_dev.jsonl.gz") as file:
        return [json.loads(line) for line in file]


def outcomes(name: str, settings: dict[str, Any], texts: list[str]) -> tuple[list[str | None], list[str]]:
    """The reason, or None, and the text of each document after one filter."""
    [(_, made)] = FilterEntry.model_validate({name: settings}).filters()
    batch = text_batch(texts)
    if not isinstance(made, Editor):
        return decisions(judge(made, batch), len(texts)), texts
    edited = edit(made, batch)
    return decisions(edited.rules, len(texts)), edited.texts.to_pylist()


@pytest.mark.data
def test_outcomes_are_datatroves_on_its_own_unit_cases(folder: Path) -> None:
    cases = [json.loads(line) for line in (folder / "datatrove_unit.jsonl").open("rb")]
    assert {case["filter"] for case in cases} == set(FILTERS)
    for case in cases:
        expected = case["expected_reason"]
        [reason], [text] = outcomes(FILTERS[case["filter"]], case["params"], [case["text"]])
        assert reason == RENAMED.get(expected, expected), case["n"]
        assert case.get("expected_text") in (None, text), case["n"]


@pytest.mark.data
@pytest.mark.parametrize(("source", "key", "settings"), DOCUMENTS)
def test_outcomes_are_datatroves_on_real_documents(
    folder: Path, source: str, key: str, settings: dict[str, Any]
) -> None:
    reasons = [document[source][key]["reason"] for document in documents(folder)]
    expected = [RENAMED.get(reason, reason) for reason in reasons]
    assert None in expected
    assert any(expected)
    found, _ = outcomes(FILTERS[key.partition("/")[0]], settings, [one["text"] for one in documents(folder)])
    differing = {
        document["id"]: f"{ours}, datatrove: {theirs}"
        for document, ours, theirs in zip(documents(folder), found, expected, strict=True)
        if ours != theirs
    }
    assert not differing
