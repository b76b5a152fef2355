"""C4's line rules and the sentences they count: against plain Python and against datatrove's own outcomes."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reference.c4 import reference_c4, reference_sentences
from shardkit.writers.filters.base import first_failing
from shardkit.writers.filters.c4 import C4QualityConfig, C4QualityFilter
from shardkit.writers.filters.text_batch import TextBatch
from shardkit.writers.kernels.sentences import count_sentences, sentence_tables

ROOMY = C4QualityConfig(min_num_sentences=1, min_words_per_line=2, max_word_length=12)
LINES_ONLY = C4QualityConfig(
    min_num_sentences=-1,
    min_words_per_line=-1,
    max_word_length=-1,
    filter_no_terminal_punct=False,
    filter_lorem_ipsum=False,
    filter_curly_bracket=False,
)
PARTS = st.sampled_from(
    [
        *"\n\n\n\r\u2028\x85\u200a\t .?!\"'…{(é中٣ \N{KELVIN SIGN}",
        *(
            "\r\n",
            ".\n",
            "?\n",
            "...",
            " a word",
            " The end.",
            "U.S.",
            "e.g.",
            "NASA.",
            "end.Next",
            "x.Com/A.B",
        ),
        *("[1]", "[٣]", "[edit]", "[citation needed]", "[", "]", "javascript", "JavaScript", "LOREM ipsum"),
        *(
            "lorem",
            " ipsum",
            "terms of use",
            "Privacy Policy",
            "cookie policy",
            "uses cookies",
            "use of cookies",
        ),
        *(
            "use coo\N{KELVIN SIGN}ies",
            "use",
            "cookies",
            "policy",
            "longer-than-twelve",
            "http://a.b/",
            "12.5",
        ),
    ]
)
TEXT = st.lists(st.one_of(PARTS, PARTS, st.characters(exclude_categories=["Cs"])), max_size=40).map("".join)


def edited(texts: list[str], config: C4QualityConfig) -> list[tuple[str | None, str]]:
    """What reference_c4 says of each text, by the kernel; every byte accounted for."""
    # A slice in the middle of an array: kernels must not take offsets to begin at 0.
    batch = TextBatch(pa.array(["before", *texts, "after"], pa.large_string()).slice(1, len(texts)))
    work = C4QualityFilter(config)
    edit = work.edit(batch)
    assert tuple(edit.cut) == work.edits
    assert all((cut >= 0).all() for cut in edit.cut.values())
    after = [len(text.encode()) for text in edit.texts.to_pylist()]
    assert (batch.sizes - sum(edit.cut.values())).tolist() == after
    codes = first_failing(edit.rules, len(texts))
    names = [work.reasons[code - 1] if code else None for code in codes]
    return list(zip(names, edit.texts.to_pylist(), strict=True))


def sentences(text: str) -> int:
    data = np.array(list(text.encode() + b" tail. Not counted."), np.uint8)
    return int(count_sentences(data, 0, len(text.encode()), sentence_tables()))


@settings(max_examples=150, deadline=None)
@given(st.lists(TEXT, max_size=4))
@example(["", " ", "\n", "\r\n\r\n", "a b c.[1]\nd e f [2].\n", "\u2028a b.\x85c d."])
@example(["{ a b.\nlorem ipsum a.", "lorem ipsum a.\n{ a b.", "javascript { a b c.", "{ no end\na b."])
def test_lines_and_reasons_are_those_of_plain_python(texts: list[str]) -> None:
    for config in (ROOMY, LINES_ONLY):
        assert edited(texts, config) == [reference_c4(text, config) for text in texts]


@settings(max_examples=150, deadline=None)
@given(TEXT)
@example("keys\u200a—\u200aa")
@example("One.  Two")
@example("a.\u3000b. ) c... d.” e")
def test_sentences_are_those_of_plain_python(text: str) -> None:
    assert sentences(text) == reference_sentences(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        (" \u2028", 0),
        ("...", 1),
        ("One. Two? Three!", 3),
        ("Mr. Fox met J. Doe in the U.S. at 3 p.m. today.", 1),
        ("He said “Stop.” (Then he left.) And so on...and on... again", 3),
        ("It is 3.14, at example.com/a.B or www.example.org. Is it?", 2),
        ("This joins.Badly", 2),
        ("NASA. Vitamin C. Next", 2),
        ("一。 二。 三", 3),
    ],
)
def test_full_stops_within_words_and_after_abbreviations_end_no_sentence(text: str, count: int) -> None:
    assert (sentences(text), reference_sentences(text)) == (count, count)


def test_a_line_of_a_megabyte_is_one_line() -> None:
    line = "This is a sentence of some words. " * 30_000
    texts = [line.strip(), "x" * (1 << 20) + ".", " " * (1 << 20)]
    assert [reason for reason, _ in edited(texts, C4QualityConfig())] == [None, *["too_few_sentences"] * 2]
    assert sentences(texts[0]) == 30_000


def test_documents_that_are_not_wanted_and_dropped_ones_keep_their_text() -> None:
    batch = TextBatch(pa.array(["gone [1] word\nIt is good.", "x\n", "It is good.\nx"], pa.large_string()))
    batch.wanted = np.array([False, True, True])
    edit = C4QualityFilter(ROOMY).edit(batch)
    assert edit.texts.to_pylist() == ["gone [1] word\nIt is good.", "x\n", "It is good."]
    assert {name: cut.tolist() for name, cut in edit.cut.items() if cut.any()} == {
        "no_terminal_punct": [0, 0, 1],
        "white_space": [0, 0, 1],
    }


@pytest.fixture
def data_folder() -> Path:
    if "SHARDKIT_TEST_DATA" not in os.environ:
        pytest.skip("SHARDKIT_TEST_DATA is not set")
    return Path(os.environ["SHARDKIT_TEST_DATA"]) / "filters"


@pytest.mark.data
def test_outcomes_equal_datatrove_on_its_own_unit_cases(data_folder: Path) -> None:
    cases = [json.loads(line) for line in (data_folder / "datatrove_unit.jsonl").open("rb")]
    cases = [case for case in cases if case["filter"] == "C4QualityFilter"]
    assert len(cases) == 5
    for case in cases:
        [(reason, text)] = edited([case["text"]], C4QualityConfig(**case["params"]))
        assert reason == case["expected_reason"], case["n"]
        assert case["expected_text"] in (None, text)


@pytest.mark.data
def test_outcomes_equal_datatrove_on_every_document(data_folder: Path) -> None:
    # The stock outcomes: C4's words are always of str.split, only its sentences are spaCy's.
    with gzip.open(data_folder / "datatrove_oracle_dev.jsonl.gz") as file:
        documents = [json.loads(line) for line in file]
    expected = [document["outcomes"]["C4QualityFilter"]["reason"] for document in documents]
    found = [reason for reason, _ in edited([document["text"] for document in documents], C4QualityConfig())]
    different = [n for n, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]
    assert not different, [documents[n]["id"] for n in different]
