"""EPUB books: chapters in the order of reading, encrypted ones dropped, zip bombs bounded."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from support.books import epub
from support.read_inputs import put, read

CHAPTERS = {
    "b.xhtml": "<html><head><title>x</title></head><body><h1>Two</h1><p>the &amp; end</p></body></html>",
    "a one.xhtml": '<?xml version="1.0"?><html><body class="c"><h1>One</h1><p>Größe</p></body></html>',
    "nav.xhtml": "<html><body>contents</body></html>",
}
ORDER = ["a one.xhtml", "b.xhtml"]
HIDDEN = (
    '<encryption xmlns="urn:oasis:names:tc:opendocument:xmlns:container">'
    '<EncryptedData xmlns="http://www.w3.org/2001/04/xmlenc#"><CipherData>'
    '<CipherReference URI="%s"/></CipherData></EncryptedData></encryption>'
)
OPF = "OEBPS/content.opf"


def test_a_book_is_a_document_of_its_chapters_in_order(tmp_path: Path) -> None:
    put(tmp_path, "a.epub", epub(CHAPTERS, ORDER))
    names = ["title", "author", "language", "identifier", "chapters"]
    table, bad, _ = read(tmp_path, "a.epub", metadata=names, allowed=0)
    assert (table["text"].to_pylist(), bad) == (["One\n\nGröße\n\nTwo\n\nthe & end"], [])
    assert json.loads(table["metadata"][0].as_py()) == {
        "title": "A book",
        "author": "Somebody",
        "language": "en",
        "identifier": "urn:isbn:123",
        "chapters": 2,
    }


def test_encrypted_chapters_drop_a_book_and_encrypted_fonts_do_not(tmp_path: Path) -> None:
    for name, documents in (("OEBPS/a%20one.xhtml", 0), ("OEBPS/fonts/x.otf", 1)):
        more = {"META-INF/encryption.xml": (HIDDEN % name).encode()}
        table, bad, ledger = read(tmp_path, put(tmp_path, "a.epub", epub(CHAPTERS, ORDER, more)), allowed=0)
        assert (table.num_rows, bad) == (documents, [])
        assert ("epub/encrypted" in ledger.dropped) == (documents == 0)


@pytest.mark.parametrize(
    ("data", "reason", "words"),
    [
        (epub(CHAPTERS, ORDER)[:-30], "damaged_file", "zip"),
        (epub(CHAPTERS, []), "damaged_file", "no order of chapters"),
        (epub(CHAPTERS, ORDER, {OPF: b"<package>"}), "damaged_file", "not readable XML"),
        (epub(CHAPTERS, ORDER, {OPF: b"<!DOCTYPE a [<!ENTITY b 'c'>]><a/>"}), "damaged_file", "entities"),
        (epub(CHAPTERS, ORDER, {"META-INF/container.xml": b"<a/>"}), "damaged_file", "no package"),
        (epub(CHAPTERS, ORDER, {OPF: b" " * (17 << 20)}), "damaged_file", "more than"),
        (epub(CHAPTERS | {"b.xhtml": "a" * 200_000}, ORDER), "too_long", "max_record_bytes"),
        (b"", "damaged_file", "zip"),
        (b"%PDF-1.4\n", "other_format", "a PDF document"),
        (b"PK\x05\x06" + bytes(18), "damaged_file", "container.xml is missing"),
    ],
)
def test_what_is_no_whole_book_is_quarantined(tmp_path: Path, data: bytes, reason: str, words: str) -> None:
    table, (entry,), _ = read(tmp_path, put(tmp_path, "a.epub", data), limit=100_000)
    assert (table.num_rows, entry["reason"]) == (0, reason)
    assert words in entry["error"]


def test_truncated_and_flipped_books_never_raise_anything_else(tmp_path: Path) -> None:
    rng, whole = random.Random(0), epub(CHAPTERS, ORDER)
    for number in range(300):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 5)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        kept = bytes(data if number % 3 else data[: rng.randrange(len(data))])
        read(tmp_path, put(tmp_path, "a.epub", kept))


def test_books_under_other_names_are_refused_with_the_format_to_set(tmp_path: Path) -> None:
    _, (entry,), _ = read(tmp_path, put(tmp_path, "a.txt", epub(CHAPTERS, ORDER)))
    assert "inputs[0].format: epub" in entry["error"]
