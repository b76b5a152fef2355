"""Texts are read in blocks of 64 bytes: where a block ends, or the data, changes nothing."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from reference.c4 import reference_c4
from reference.filters import (
    as_rows,
    reference_line_statistics,
    reference_ngrams,
    reference_repetition,
    reference_word_statistics,
)
from shardkit.kernels.text_arrays import text_bytes, text_offsets
from shardkit.writers.filters.c4 import C4QualityEditor
from shardkit.writers.kernels.lines import LINES, PARAGRAPHS, line_repetition, line_statistics
from shardkit.writers.kernels.ngrams import COPIES, EXCESS, TOP, ngram_statistics
from shardkit.writers.kernels.word_statistics import word_statistics
from support.filter_runs import decisions, edit, text_batch

STOP_WORDS = ("the", "be", "a", "thé", "the\0", "übermorgenland", "…")
JOBS = [(n, kind) for kind in (TOP, EXCESS, COPIES) for n in (1, 2, 3)]
PIECES = (
    "the be\u2003thé a\u3000the be\x85thé…\n- …… the\0 be\xa0#a ... übermorgenland",
    "中文字\u3000𝔸𝔸 é-é ++ — ١\u2028• x\r\n\r\n\x1c\x1f-.\n\n--",
    "",
    " " * 9,
    "x" * 200,
    "é" * 100 + " " + "—" * 100,
)
C4_PIECES = (
    "Read our cookie policy. Or that Coo\N{KELVIN SIGN}ie Policy, please!\nIt is 1.5 [12] ok [edit]. Mr. Y.",
    "See our terms of use and so on.\u2028Or the Privacy  Policy? Javascript is needed.\rA. B! C? Dd. Ee.",
    "One. Two! Three? Four… Five。 Lorem ipsum is here.",
    "One. Two! Three? Four five six. A { here.",
)


def shifted(piece: str) -> list[str]:
    """The piece after so many bytes of a word, and after so many spaces."""
    return [begin * shift + piece for shift in range(1, 68) for begin in ("a", " ", "é")]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("piece", PIECES, ids=range(len(PIECES)))
@pytest.mark.parametrize("alone", [False, True], ids=["among others", "at the end of the data"])
def test_counts_are_those_of_plain_python_wherever_blocks_end(piece: str, alone: bool) -> None:
    texts = shifted(piece)
    for chosen in [[text] for text in texts] if alone else [texts]:
        array = pa.array(chosen, pa.large_string())
        where = (text_bytes(array), text_offsets(array), np.ones(len(chosen), np.bool_))
        assert as_rows(word_statistics(*where, STOP_WORDS)) == [
            reference_word_statistics(text, STOP_WORDS) for text in chosen
        ]
        assert as_rows(line_statistics(*where, short_line_length=30)) == [
            reference_line_statistics(text, short_line_length=30) for text in chosen
        ]
        for kind in (LINES, PARAGRAPHS):
            found = zip(*line_repetition(*where, kind), strict=True)
            assert list(found) == [reference_repetition(text, kind) for text in chosen]
        counts = ngram_statistics(*where, JOBS)
        for job, (n, kind) in enumerate(JOBS):
            pairs = zip(counts.first[job].tolist(), counts.second[job].tolist(), strict=True)
            assert list(pairs) == [reference_ngrams(text, n, kind) for text in chosen], (n, kind)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("piece", C4_PIECES, ids=range(len(C4_PIECES)))
def test_lines_are_edited_as_by_plain_python_wherever_blocks_end(piece: str) -> None:
    texts = shifted(piece)
    for config in (C4QualityEditor(), C4QualityEditor(filter_no_terminal_punct=False, min_num_sentences=1)):
        for chosen in (texts, *([text] for text in texts)):
            found = edit(config, text_batch(chosen))
            pairs = zip(decisions(found.rules, len(chosen)), found.texts.to_pylist(), strict=True)
            assert list(pairs) == [reference_c4(text, config) for text in chosen]


def test_a_text_that_is_not_wanted_is_not_edited_and_takes_no_room() -> None:
    texts = ["One. Two. Three. Four. Five of six. ", "A line, cut. Two. Three. Four. Five. "]
    found = edit_some(texts, [False, True])
    assert found == ["", texts[1].strip()]


def edit_some(texts: list[str], wanted: list[bool]) -> list[str]:
    edited: list[str] = C4QualityEditor().edit(text_batch(texts, wanted=wanted)).texts.to_pylist()
    return edited
