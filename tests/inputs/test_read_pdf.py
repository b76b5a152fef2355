"""PDF files: their text layer is the document; scanned, encrypted and damaged ones are told apart."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from shardkit.errors import BuildError
from shardkit.writers import build
from support.bombs import measure
from support.books import page_of, pdf, stream_of
from support.read_inputs import put, read
from support.small_build import make_corpus

PAGES = [page_of("Hello world, a hyphen-", "ated word.", "Next line"), page_of("page two", compress=True)]
TEXT = "Hello world, a hyphenated word.\nNext line\n\npage two"
DRAWING = stream_of(b"0 0 m 10 10 l S")
ENCRYPTED = b"/Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O (%b) /U (%b) >> /ID [(a) (a)]" % (
    b"x" * 32,
    b"y" * 32,
)


def test_the_text_of_all_pages_is_a_document(tmp_path: Path) -> None:
    for name, data in (("a.pdf", pdf(PAGES)), ("a.PDF.gz", gzip.compress(pdf(PAGES)))):
        put(tmp_path, name, data)
        table, bad, _ = read(tmp_path, name, metadata=["title", "author", "pages"], allowed=0)
        assert (table["text"].to_pylist(), bad) == ([TEXT], [])
        found = json.loads(table["metadata"][0].as_py())
        assert found == {"title": "A title", "author": "Somebody", "pages": 2}


def test_pdfs_that_have_no_text_to_read_are_dropped_by_reason(tmp_path: Path) -> None:
    for data, reason in ((pdf([DRAWING]), "pdf/needs_ocr"), (pdf(PAGES, trailer=ENCRYPTED), "pdf/encrypted")):
        table, bad, ledger = read(tmp_path, put(tmp_path, "a.pdf", data), allowed=0)
        assert (table.num_rows, bad) == (0, [])
        assert ledger.dropped[reason].documents == 1
        assert ledger.dropped[reason].bytes == len(data)


@pytest.mark.parametrize(
    ("data", "reason", "words"),
    [
        (b"%PDF-1.4\n" + b"garbage" * 100, "damaged_file", "PDFium cannot read it"),
        (b"", "damaged_file", "PDFium cannot read it"),
        (b"some text", "damaged_file", "PDFium cannot read it"),
        (b"PK\x03\x04" + bytes(30), "other_format", "zip"),
        (pdf([page_of(*["a line of text"] * 40)] * 200), "too_long", "max_record_bytes"),
    ],
)
def test_what_cannot_be_read_is_quarantined(tmp_path: Path, data: bytes, reason: str, words: str) -> None:
    table, (entry,), _ = read(tmp_path, put(tmp_path, "a.pdf", data), limit=100_000)
    assert (table.num_rows, entry["reason"]) == (0, reason)
    assert words in entry["error"]


def test_truncated_and_flipped_files_never_raise_anything_else(tmp_path: Path) -> None:
    rng, whole = random.Random(0), pdf(PAGES * 3)
    for number in range(200):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 5)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        kept = bytes(data if number % 2 else data[: rng.randrange(len(data))])
        read(tmp_path, put(tmp_path, "a.pdf", kept))


def test_pdfs_under_other_names_are_refused_with_the_format_to_set(tmp_path: Path) -> None:
    _, (entry,), _ = read(tmp_path, put(tmp_path, "a.txt", pdf(PAGES)))
    assert "inputs[0].format: pdf" in entry["error"]


RECIPE = """\
inputs: [{path: "*.pdf", metadata: [title]}]
tokenizer: {path: tokenizer.json, eos: "<|endoftext|>"}
pack: {sequence_length: 64}
output: {path: out}
"""


@pytest.mark.extended
def test_a_pdf_that_grows_past_the_memory_costs_itself(tmp_path: Path) -> None:
    """PDFium ends its process when it gets no memory: the split breaks its reader, and others go on."""
    recipe = make_corpus(tmp_path, 20, RECIPE)
    bomb = pdf([stream_of(b"(a) Tj " + b" " * (900 << 20), compress=True)])
    assert len(bomb) < 2 << 20
    (tmp_path / "bomb.pdf").write_bytes(bomb)
    (tmp_path / "good.pdf").write_bytes(pdf(PAGES * 20))
    with pytest.raises(BuildError, match=r"bomb\.pdf"):
        build(recipe, workers=1, overrides=["memory=600MB"], progress=False)
    overrides = ["memory=600MB", "max_failed_splits=1", "output.path=other"]
    result = build(recipe, workers=1, overrides=overrides, progress=False)
    assert "bomb.pdf" in (result.output / "quarantine.jsonl").read_text()
    found = measure("input", tmp_path / "good.pdf", 600 << 20)
    assert found.outcome == "1 documents; nothing quarantined"
