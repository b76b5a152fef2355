"""Wikipedia's dumps: pages become plain text, everything else is counted, and hostile ones are bounded."""

from __future__ import annotations

import bz2
import json
import random
import time
from pathlib import Path

import pytest

from shardkit.errors import RecipeError
from shardkit.writers.inputs.wikitext import text_of
from support.dumps import export, page
from support.read_inputs import put, read

LEFT_OUT = frozenset({"file", "image", "category", "datei", "kategorie"})
DUMP = export(
    page(1, "Anna & Bea", "'''Anna''' ist [[Bea|eine Frau]].<ref>x</ref>"),
    page(2, "A", "#WEITERLEITUNG [[Anna]]", redirect=True),
    page(3, "Diskussion:Anna", "hello", namespace=1),
    page(4, "Data", "{}", model="json"),
    page(5, "Leer", "{{Vorlage}}"),
    page(6, "Zwei", "the first text", "the second [[Datei:x.jpg|thumb|text]]text\n[[Kategorie:Y]]"),
)


@pytest.mark.parametrize(
    ("wikitext", "text"),
    [
        ("'''A''' is [[b]], [[c|d]] and ''e''s.", "A is b, d and es."),
        ("x{{Infobox|a={{b|[[c]]}}}}y", "xy"),
        ('a<ref name="x">{{cite|b}}</ref> b<ref name=y />.', "a b."),
        ("a\n{| class=x\n|-\n| b || c\n|}\nd", "a\n\nd"),
        ("a\n\n\n== H ==\n\nb\n=== I ===\nc", "a\n\nH\n\nb\n\nI\nc"),
        ("[http://a.org label], [http://b.org], http://c.org", "label, , http://c.org"),
        ("* a\n** b\n# c\n; d : e", "- a\n- b\n- c\n d  e"),
        ("[[File:a.jpg|thumb|A [[b]] c]]text[[Category:X]][[:Category:Y]]", "textCategory:Y"),
        ("[[Datei:a.jpg|mini|A]]text[[Kategorie:X]]", "text"),
        ("a &ndash; b &amp;&nbsp;c &#65;", "a – b &\xa0c A"),
        ("energy <math>E = mc^2</math>, <chem>H2O</chem>", "energy $E = mc^2$, $H2O$"),
        ("__NOTOC__a<!-- b -->c", "ac"),
        ("<nowiki>[[a]]</nowiki> <gallery>\nFile:x.jpg\n</gallery>b", "[[a]] b"),
        ('<syntaxhighlight lang="c">\nif (a)\n    b;\n</syntaxhighlight>', "if (a)\n    b;"),
        ("a<br />b<br>c <div>d '''e'''</div>", "a\nb\nc d e"),
        ("a [1] {b} c | d = e", "a [1] {b} c | d = e"),
    ],
)
def test_wikitext_becomes_text(wikitext: str, text: str) -> None:
    assert text_of(wikitext, LEFT_OUT) == text


HOSTILE = {
    "templates": "{{a|",
    "links in templates": "{{a|[[b|",
    "everything": "{{a|[[b|<ref>''c'''d {|\n|",
    "crossed": "{{a|[[b}}c]]",
    "tables": "{|\n",
    "tags": "<ref>",
    "attributes": "<a b='",
    "external links": "[http://a ",
    "comments": "<!--",
    "quotes": "''a'''b'''''c ",
    "closed": "}}{{a|",
    "brackets": "[",
    "colons": ":",
}


@pytest.mark.parametrize("unit", HOSTILE.values(), ids=HOSTILE)
def test_hostile_wikitext_takes_bounded_time(unit: str) -> None:
    """Without a bound, most of these take hours; the parser cannot be interrupted."""
    for repeats in (300, 3_000):
        start = time.process_time()
        text_of(unit * repeats, LEFT_OUT)
        assert time.process_time() - start < 20
    assert text_of("a" * (1 << 22) + "b", LEFT_OUT) is None


def test_markup_without_an_end_costs_no_page_of_usual_size() -> None:
    text = "[[a]] {{b}} " * 2_000 + "{{c [[d" + " word" * 10_000
    assert (text_of(text, LEFT_OUT) or "").endswith("word")


def test_articles_are_documents_and_other_pages_are_counted(tmp_path: Path) -> None:
    for name, data in (
        ("pages.xml", DUMP),
        ("dewiki-20240101-pages-articles1.xml-p1p6.bz2", bz2.compress(DUMP)),
        ("streams.xml.bz2", bz2.compress(DUMP[:900]) + bz2.compress(DUMP[900:])),
    ):
        put(tmp_path, name, data)
        table, bad, ledger = read(
            tmp_path, name, metadata=["title", "revision", "timestamp", "wiki"], allowed=0
        )
        assert table["text"].to_pylist() == ["Anna ist eine Frau.", "the second text"]
        assert table["record"].to_pylist() == [0, 5]
        assert table["id"].to_pylist() == ["1", "6"]
        assert table["url"].to_pylist() == [
            "https://de.wikipedia.org/wiki/Anna_%26_Bea",
            "https://de.wikipedia.org/wiki/Zwei",
        ]
        assert json.loads(table["metadata"][1].as_py()) == {
            "title": "Zwei",
            "revision": "601",
            "timestamp": "2024-01-02T00:00:00Z",
            "wiki": "dewiki",
        }
        assert not bad
        assert {name: count.documents for name, count in ledger.dropped.items()} == {
            "mediawiki/redirect": 1,
            "mediawiki/namespace": 1,
            "mediawiki/not_wikitext": 1,
            "mediawiki/no_text": 1,
            "mediawiki/markup": 0,
        }
    table, _, _ = read(tmp_path, "pages.xml", namespaces=1)
    assert table["text"].to_pylist() == ["hello"]


@pytest.mark.parametrize("cut", [300, 700, 1500, len(DUMP) - 300, len(DUMP) - 15])
def test_a_truncated_dump_keeps_its_whole_pages(tmp_path: Path, cut: int) -> None:
    put(tmp_path, "a.xml", DUMP[:cut])
    table, (entry,), ledger = read(tmp_path, "a.xml")
    assert (entry["reason"], "truncated" in entry["error"]) == ("damaged_file", True)
    whole = DUMP[:cut].count(b"</page>")
    assert entry["record"] == whole
    assert DUMP[entry["byte_offset"] :].startswith(b"\n  <page>" if 0 < whole < 6 else b"")
    assert ledger.quarantined["damaged_file"].bytes == cut - entry["byte_offset"]
    assert set(table["text"].to_pylist()) <= {"Anna ist eine Frau.", "the second text"}


def test_a_damaged_byte_costs_the_rest_of_the_file(tmp_path: Path) -> None:
    put(tmp_path, "a.xml", DUMP.replace(b"hello", b"he\xffo"))
    table, (entry,), ledger = read(tmp_path, "a.xml")
    assert table.num_rows == 1
    assert (entry["record"], entry["reason"]) == (2, "damaged_file")
    assert "not well-formed" in entry["error"]
    assert ledger.quarantined["damaged_file"].bytes == len(DUMP) - 1 - entry["byte_offset"]


BOMB = b'<!DOCTYPE m [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;">]><mediawiki>&b;</mediawiki>'


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b'<?xml version="1.0"?>' + BOMB, "it is XML"),
        (b"<mediawiki>" + BOMB, "not readable XML"),
        (b"<mediawiki>" + b"<a>" * 10_000, "nested too deeply"),
        (b"<mediawiki><page " + b"a" * (4 << 20), "longer than"),
        (b'<mediawiki><page a="' + b"a" * (4 << 20), "longer than"),
        (b"<mediawiki><!--" + b"a" * (4 << 20), "longer than"),
        (b"<posts><row /></posts>", "inputs[0]"),
        (b"<users><row /></users>", "the texts are in Posts.xml"),
        (b"<feed></feed>", "first element is <feed>"),
        (b"<mediawiki><siteinfo><namespaces>" + b"<namespace/>" * 5_000, "namespaces"),
        (b"", "truncated"),
        (b"some text", "not readable XML"),
        (b"{}", "not readable XML"),
        (b"BZh91AY&SY", "truncated"),
    ],
)
def test_what_is_no_export_is_refused(tmp_path: Path, data: bytes, problem: str) -> None:
    put(tmp_path, "a.xml", data)
    table, (entry,), _ = read(tmp_path, "a.xml")
    assert table.num_rows == 0
    assert problem in entry["error"]


def test_a_page_over_the_limit_costs_itself(tmp_path: Path) -> None:
    put(tmp_path, "a.xml", export(page(1, "A", "word " * 200_000), page(2, "B", "text")))
    table, (entry,), ledger = read(tmp_path, "a.xml", limit=100_000)
    assert table["text"].to_pylist() == ["text"]
    assert (entry["record"], entry["reason"]) == (0, "too_long")
    assert ledger.quarantined["too_long"].bytes == 1_000_000


def test_titles_of_any_length_and_pages_without_fields_are_read(tmp_path: Path) -> None:
    pages = [page(1, "x" * 100_000, "one"), "<page><revision><text>two</text></revision></page>", "<page />"]
    put(tmp_path, "a.xml", export(*pages, page(3, "N", "three", namespace=-1)))
    table, bad, _ = read(tmp_path, "a.xml")
    assert (table["text"].to_pylist(), bad) == (["one", "two"], [])


def test_flipped_bits_never_raise_anything_else(tmp_path: Path) -> None:
    rng = random.Random(0)
    for _ in range(200):
        data = bytearray(DUMP)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        read(tmp_path, put(tmp_path, "a.xml", bytes(data)))


def test_archives_that_are_not_read_say_how_to_unpack_them(tmp_path: Path) -> None:
    put(tmp_path, "enwiki-20240101-pages-meta-history.xml-p1p2.7z", b"7z\xbc\xaf\x27\x1c\0\x04")
    with pytest.raises(RecipeError, match="7z x"):
        read(tmp_path, "enwiki-20240101-pages-meta-history.xml-p1p2.7z")
