from __future__ import annotations

import sys
import time
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardkit.errors import MissingExtraError, RecipeError
from shardkit.writers.inputs.pages import decode_page, main_text_by
from support.read_inputs import put, read, recipe

PARAGRAPH = "A sentence about tokens that is long enough to be taken for the content of a page. " * 6
OTHER = "Other sentences follow, on the packing of sequences, which a reader wants to keep as well. " * 6
PAGE = (
    f"<html><body><nav><a href=x>Home</a></nav><main><article><h1>Title</h1><p>{PARAGRAPH}</p>"
    f"<script>var x = 1;</script><p>{OTHER}</p></article></main><footer>Imprint</footer></body></html>"
)


@pytest.mark.parametrize("extractor", ["resiliparse", "trafilatura"])
def test_the_main_text_is_what_a_reader_reads(extractor: str) -> None:
    main_text = main_text_by(extractor)
    text = main_text(PAGE)
    assert text is not None
    assert PARAGRAPH.strip() in text
    assert OTHER.strip() in text
    assert "Imprint" not in text
    assert "var x" not in text
    assert main_text("<html><body></body></html>") == ""
    assert main_text("") == ""
    assert main_text(PAGE) == text  # whatever was read before


def test_hostile_nesting_costs_no_time_and_says_so() -> None:
    main_text = main_text_by("resiliparse")
    began = time.process_time()
    assert main_text("<div>" * 1_000_000 + "deep") is None
    assert main_text("<b><i>" * 2_000 + PAGE) is None
    assert time.process_time() - began < 20  # unguarded: hours
    rows = "".join(f"<tr><td>{i}<td><p>{PARAGRAPH}<br><li>x" for i in range(1000))
    assert main_text(f"<article><table>{rows}</table></article>")


def test_bytes_become_text_by_mark_header_meta_and_looks() -> None:
    text = "Grüße aus Köln – „Zitat“ und ein wenig mehr Text, damit es etwas zu raten gibt. " * 4
    assert decode_page(text.encode("cp1252"), "latin1") == text
    assert decode_page(b"\xef\xbb\xbf" + text.encode(), "latin1") == text
    assert decode_page(text.encode("utf-16-be"), "utf-16be") == text
    meta = '<meta charset="windows-1251">привет'
    assert decode_page(meta.encode("cp1251"), None) == meta
    assert decode_page(text.encode(), "x-user-defined") == text
    assert decode_page(b"caf\xe9 \xff", "utf-8") == "caf\ufffd \ufffd"
    assert decode_page(b"", None) == ""


def test_fields_of_jsonl_and_parquet_may_hold_pages(tmp_path: Path) -> None:
    pages = [PAGE, "<p></p>", "<div>" * 3000]
    put(tmp_path, "a.jsonl", b"\n".join(orjson.dumps({"page": {"html": page}}) for page in pages))
    pq.write_table(pa.table({"page": [{"html": page} for page in pages]}), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        table, bad, ledger = read(tmp_path, name, text="page.html", extract="resiliparse")
        assert not bad
        assert table["record"].to_pylist() == [0]
        assert "Imprint" not in table["text"][0].as_py()
        counts = {reason: (count.documents, count.bytes) for reason, count in ledger.dropped.items()}
        markup = len(PAGE) - len(table["text"][0].as_py().encode())
        assert counts == {
            "html/markup": (0, markup),
            "html/no_text": (1, 7),
            "html/unreadable": (1, 15000),
        }
        assert ledger.read.bytes == sum(map(len, pages))


@pytest.mark.parametrize(("extractor", "module"), [("resiliparse", "resiliparse"), ("trafilatura",) * 2])
def test_without_the_package_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, extractor: str, module: str
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"pip install 'shardkit\[html\]'"):
        main_text_by(extractor)


RICH = (
    f"<html><body><nav><ul><li>Menu entry one</ul></nav><main><h1>Title</h1><p>{PARAGRAPH}</p>"
    f"<ul><li>First point of a list. {PARAGRAPH}</li></ul>"
    f'<p>See <a href="http://target.example/">this link</a>. {PARAGRAPH}</p>'
    "<table><tr><td>cell of a table</td></tr></table></main></body></html>"
)


@pytest.mark.parametrize(
    ("options", "present"),
    [
        ({"resiliparse": {}}, {"Menu entry": False, "target.example": False}),
        ({"resiliparse": {"main_content": False}}, {"Menu entry": True, "\u2022 First point": True}),
        ({"resiliparse": {"links": True}}, {"target.example": True}),
        (
            {"resiliparse": {"main_content": False, "list_bullets": False}},
            {"\u2022": False, "First point": True},
        ),
        ({"trafilatura": {}}, {"cell of a table": True, "target.example": False}),
        ({"trafilatura": {"tables": False}}, {"cell of a table": False}),
        ({"trafilatura": {"links": True}}, {"target.example": True}),
    ],
)
def test_options_of_a_library_change_which_parts_of_a_page_are_kept(
    tmp_path: Path, options: dict[str, dict[str, bool]], present: dict[str, bool]
) -> None:
    put(tmp_path, "a.jsonl", orjson.dumps({"text": RICH}))
    table, _, ledger = read(tmp_path, "a.jsonl", extract=options)
    (text,) = table["text"].to_pylist()
    assert {words: words in text for words in present} == present
    assert ledger.read.bytes == len(RICH.encode())
    (library,) = options
    plain, _, _ = read(tmp_path, "a.jsonl", extract=library)
    assert (plain["text"].to_pylist() == [text]) == (options == {library: {}})


@pytest.mark.parametrize(
    "options",
    [{}, {"resiliparse": {}, "trafilatura": {}}, {"trafilatura": {"favour": "recall"}}, {"lxml": {}}, "lxml"],
)
def test_an_extractor_is_one_library_with_options_that_it_has(tmp_path: Path, options: object) -> None:
    with pytest.raises(RecipeError, match=r"inputs\[0\].extract"):
        recipe(tmp_path, {"path": "a.jsonl", "extract": options})
