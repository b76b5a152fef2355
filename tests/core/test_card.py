"""Cards: stored bytes are fixed, unknown keys survive, sections name the key that is wrong.

Histograms hold every value, exactly, and those of parts add up to that of the whole.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.card import FILES_NAME, MOST_LISTED, Count, DatasetCard, Histogram, TokenizerFacts, listed_files
from shardkit.errors import ShardError
from shardkit.hashing import hash_bytes

FUNNEL: dict[str, Any] = {
    "read": {"documents": 10, "bytes": 100},
    "kept": {"documents": 6, "bytes": 50},
    "dropped": {
        "empty": {"documents": 1, "bytes": 0},
        "near_duplicate": {"documents": 1, "bytes": 10},
        "length/short": {"documents": 1, "bytes": 20},
    },
    "quarantined": {"bad_json": {"documents": 1, "bytes": 20}},
}
CARD: dict[str, Any] = {
    "zeta": "ключ",  # of a later version
    "fingerprint": "ab",
    "tokens": 75,
    "padding": 25,
    "tokenizer": {"file": "t.json", "digest": "d", "eos": "<|end|>", "eos_id": 0, "later": [1.50]},
    "recipe": {"filters": [{"length": {}}], "tokenizer": {"path": "in/t.json"}},
    "inputs": [{"source": "web", "files": 1, "bytes": 9, "digest": "x", "later": 1, "funnel": FUNNEL}],
    "funnel": FUNNEL,
    "filters": None,
}


def test_a_card_is_stored_as_sorted_json_with_all_that_it_said(tmp_path: Path) -> None:
    file = tmp_path / "dataset.json"
    file.write_bytes(DatasetCard(CARD).to_bytes())
    text = file.read_text(encoding="utf-8")
    assert text.startswith('{\n  "filters": null,\n  "fingerprint": "ab",\n  "funnel": {\n    "dropped": {\n')
    assert text.endswith('  "tokens": 75,\n  "zeta": "ключ"\n}\n')
    found = DatasetCard.read(file)
    assert found is not None
    assert (found.data, found.to_bytes()) == (CARD, file.read_bytes())
    assert DatasetCard.read(tmp_path / "none.json") is None


def test_facts_and_sections_are_typed() -> None:
    card = DatasetCard(CARD)
    assert (card.fingerprint, card.tokens, card.source_labels) == ("ab", 75, ["web"])
    assert card.tokenizer == TokenizerFacts("t.json", "d", "<|end|>", 0, None, "in/t.json")
    assert card.funnel.dropped["near_duplicate"] == Count(1, 10)
    assert (card.inputs[0].tokens, card.inputs[0].languages) == (0, None)  # as in older cards
    assert (card.filters, card.languages()) == (None, {})
    steps = [step.label for step in card.funnel_steps()]
    assert steps == ["read", "bad_json", "length", "near_duplicate", "empty", "kept"]


@pytest.mark.parametrize("harm", [5, "x", None, [], {}, [[]], {"eos_id": "7", "file": 5, "path": {}}])
def test_a_damaged_card_states_no_tokenizer(harm: object) -> None:
    card = DatasetCard(dict.fromkeys(("tokenizer", "recipe", "inputs"), harm))
    assert card.tokenizer == TokenizerFacts()
    assert all(isinstance(label, str) for label in card.source_labels)


@pytest.mark.parametrize(
    ("change", "section", "message"),
    [
        ({"tokens": "75"}, "tokens", "tokens: Input should be a valid integer"),
        ({"funnel": [3]}, "funnel", r"dataset.json: .*funnel: Input should be an object"),
        ({"funnel": FUNNEL | {"kept": {"documents": "6", "bytes": 1}}}, "funnel", "funnel.kept.documents: "),
        ({"funnel": FUNNEL | {"kept": {"documents": True, "bytes": 1}}}, "funnel", "funnel.kept.documents: "),
        ({"inputs": [{"source": "web"}]}, "inputs", "inputs.0.files: Field required"),
        ({"filters": {"rules": 5}}, "filters", "filters.sampled: Field required"),
        ({}, "packing", "has no 'packing', a key that `shardkit build` writes"),
        ({}, "dedup", "has no 'dedup'"),
    ],
)
def test_a_section_that_no_build_wrote_names_its_key(change: Any, section: str, message: str) -> None:
    card = DatasetCard(CARD | change)
    with pytest.raises(ShardError, match=message):
        getattr(card, section)
    assert card.fingerprint == "ab"  # whoever reads another section is not harmed


def test_opening_a_dataset_and_reading_its_tokenizer_does_not_import_pydantic() -> None:
    code = (
        "import sys, shardkit.datasets.dataset, shardkit.card as c; c.DatasetCard({'inputs': []}).tokenizer;"
    )
    subprocess.run([sys.executable, "-c", f"{code} assert 'pydantic' not in sys.modules"], check=True)


@given(st.lists(st.integers(0, 2**40)), st.integers(0, 50))
def test_bins_hold_what_they_say_and_parts_add_up(values: list[int], cut: int) -> None:
    whole = Histogram.of(np.array(values, np.int64))
    assert (whole.count, whole.sum) == (len(values), sum(values))
    for one in whole.bins():
        inside = [value for value in values if one.low <= value <= one.high]
        assert (one.count, one.sum) == (len(inside), sum(inside))
    parts = [Histogram.of(np.array(part, np.int64)) for part in (values[:cut], values[cut:])]
    total = Histogram()
    for part in parts:
        total.add(Histogram.from_dict(json.loads(json.dumps(part.to_dict()))))
    assert total == whole


@pytest.mark.parametrize(
    ("value", "label"),
    [(0, "0"), (1, "1"), (2, "2-3"), (3, "2-3"), (1024, "1,024-2,047"), (1023, "512-1,023")],
)
def test_bins_are_between_powers_of_two(value: int, label: str) -> None:
    [one] = Histogram.of(np.array([value])).bins()
    assert one.label == label


@pytest.mark.parametrize("count", [0, MOST_LISTED, MOST_LISTED + 1, 50_000])
def test_a_card_of_many_files_leaves_their_list_to_another_file(count: int) -> None:
    names = [f"provenance/part-{number:05d}.parquet" for number in range(count)]
    files = {name: {"bytes": 10, "xxh3_128": f"{number:032x}"} for number, name in enumerate(names)}
    listed, table = listed_files(files)
    card = DatasetCard({**CARD, "files": listed})
    assert len(card.to_bytes()) < 200 * MOST_LISTED
    if count <= MOST_LISTED:
        assert (listed, table, card.files_table) == (files, None, None)
        return
    assert table is not None
    assert card.file_names == [FILES_NAME]
    whole = card.with_files(table)
    assert sorted(whole.file_names) == sorted([FILES_NAME, *names])
    assert whole.file(names[-1]).hashes == {"xxh3_128": f"{count - 1:032x}"}
    assert DatasetCard.parse("x", card.to_bytes()).with_files(table) == whole
    for wrong in (table[:-2] + b"x\n", table + b" ", b""):
        with pytest.raises(ShardError, match=r"files\.json: is damaged, or of another dataset"):
            card.with_files(wrong)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (b"{", "cannot be read"),
        (b"[]", "must map names"),
        (b'{"files.json": {}}', "must map names of files that are not in the card"),
    ],
)
def test_a_list_of_files_that_cannot_be_one_is_told(table: bytes, message: str) -> None:
    stated = {"bytes": len(table), **hash_bytes(table, ["xxh3_128"])}
    with pytest.raises(ShardError, match=message):
        DatasetCard({"files": {FILES_NAME: stated}}, "a/dataset.json").with_files(table)
