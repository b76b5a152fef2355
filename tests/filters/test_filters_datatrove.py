"""The filters against what datatrove itself decided: its own unit cases, and 1,400 documents. None differs.

Words are those of `str.split` on both sides. C4's filters ask for sentences at most, so datatrove's stock
outcomes are taken for them.
"""

from __future__ import annotations

import gzip
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from shardkit.writers.filters.chain import FilterChain
from shardkit.writers.filters.config import FilterEntry

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
    ("outcomes", "C4ParagraphFilter", {}),
    ("outcomes", "C4QualityFilter", {}),
]


@pytest.fixture
def folder() -> Path:
    if "SHARDKIT_TEST_DATA" not in os.environ:
        pytest.skip("SHARDKIT_TEST_DATA is not set")
    return Path(os.environ["SHARDKIT_TEST_DATA"]) / "filters"


@cache
def documents(folder: Path) -> list[dict[str, Any]]:
    with gzip.open(folder / "datatrove_oracle_dev.jsonl.gz") as file:
        return [json.loads(line) for line in file]


def outcomes(name: str, settings: dict[str, Any], texts: list[str]) -> list[str | None]:
    """Reason or None of each text under one filter."""
    chain = FilterChain(FilterEntry.model_validate({name: settings}).filters())
    codes = chain.codes(pa.array(texts, pa.large_string()))
    return [chain.reasons[code - 1].removeprefix(f"{name}/") if code else None for code in codes]


@pytest.mark.data
def test_outcomes_are_datatroves_on_its_own_unit_cases(folder: Path) -> None:
    cases = [json.loads(line) for line in (folder / "datatrove_unit.jsonl").open("rb")]
    assert {case["filter"] for case in cases} == set(FILTERS)
    for case in cases:
        expected = case["expected_reason"]
        found = outcomes(FILTERS[case["filter"]], case["params"], [case["text"]])
        assert found == [RENAMED.get(expected, expected)], case["n"]


@pytest.mark.data
@pytest.mark.parametrize(("source", "key", "settings"), DOCUMENTS)
def test_outcomes_are_datatroves_on_real_documents(
    folder: Path, source: str, key: str, settings: dict[str, Any]
) -> None:
    reasons = [document[source][key]["reason"] for document in documents(folder)]
    expected = [RENAMED.get(reason, reason) for reason in reasons]
    assert None in expected
    assert any(expected)
    found = outcomes(FILTERS[key.partition("/")[0]], settings, [one["text"] for one in documents(folder)])
    differing = {
        document["id"]: f"{ours}, datatrove: {theirs}"
        for document, ours, theirs in zip(documents(folder), found, expected, strict=True)
        if ours != theirs
    }
    assert not differing
