from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webencodings  # type: ignore[import-untyped]
import zstandard

from shardkit.encodings import GUESS
from shardkit.errors import MissingExtraError, RecipeError
from shardkit.writers.inputs.pages import decode_page, main_text_by
from support.read_inputs import data_folder, put, read, recipe
from support.whatwg import ENCODINGS, encode

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


LETTERS = "Grüße, naïve façade – „Zitat“"


@pytest.mark.parametrize(
    ("head", "charset", "encoding"),
    [
        ("", None, "utf-8"),
        ("", "foo-8", "utf-8"),
        ('<meta charset="foo-8">', None, "utf-8"),
        ('<meta charset="utf-16le">', None, "utf-8"),
        ("<meta charset=unicode>", "nonsense", "utf-8"),
        ('<meta charset="iso-8859-1">', "UTF8", "utf-8"),
        ("<meta charset=LATIN1>", None, "windows-1252"),
        ("<meta charset='x-user-defined'>", None, "windows-1252"),
        ("<META  name=x  CharSet = 'us-ascii' />", None, "windows-1252"),
        ('<meta content="text/html; charset=cp1252" http-equiv="Content-Type">', None, "windows-1252"),
        ("<meta http-equiv=content-type content=\"text/html;charset='ascii'\">", None, "windows-1252"),
        ('<meta content="text/html; charset=iso-8859-2">', None, "utf-8"),  # no pragma
        ("<!-- <meta charset=iso-8859-2> -->", None, "utf-8"),
        ("<!--> <meta charset=latin1>", None, "windows-1252"),
        ("<a title='<meta charset=iso-8859-2>'>", None, "utf-8"),
        ("<metadata charset=iso-8859-2>", None, "utf-8"),
        ("<meta charset=foo><meta charset=l1>", None, "windows-1252"),
        ("<?php <meta charset=iso-8859-2> ?><meta charset=l1>", None, "windows-1252"),
        (f"<title>{'x' * 2000}</title><meta charset=latin1>", None, "windows-1252"),
        (f"<script>{'x' * 2000} '<meta charset=koi8-r>'</script>", None, "utf-8"),
        (f"<!-- {'x' * 2000} --></head><body><meta charset=koi8-r>", None, "utf-8"),
        ('<?xml version="1.0" encoding="iso-8859-1"?>', None, "windows-1252"),
        ("<?xml version='1.0' encoding='UTF-16'?>", None, "utf-8"),
        ('<?xml version="1.0" encoding="koi8-r"?><meta charset=latin1>', None, "windows-1252"),
        ("", "utf-16be", "utf-16be"),
    ],
)
def test_a_page_says_its_encoding_as_browsers_read_it(head: str, charset: str | None, encoding: str) -> None:
    page = f"{head}<p>{LETTERS}"
    assert decode_page(encode(page, encoding) or b"", charset) == page
    marked = b"\xef\xbb\xbf" + page.encode()
    assert decode_page(marked, charset) == page  # a byte order mark wins over all


def test_pages_that_browsers_do_not_decode_are_refused() -> None:
    assert decode_page(b"<meta charset=iso-2022-kr>x", None) is None
    assert decode_page(b"x", "hz-gb-2312") is None


def test_undeclared_pages_are_utf8_if_they_can_be_and_are_refused_or_guessed_on_demand() -> None:
    text = PANGRAMS["fr"] * 3
    assert decode_page(text.encode()[:-1] + "é".encode()[:1], None) == text[:-1] + "\ufffd"  # cut short
    assert decode_page(text.encode("cp1252"), None) is None
    assert decode_page(text.encode("cp1252"), None, GUESS) == text
    assert decode_page(text.encode("cp1252"), None, "windows-1252") == text
    assert decode_page(text.encode("cp1252"), "windows-1252", "koi8-r") == text  # the header knows better
    assert decode_page(PANGRAMS["ja"].encode("iso2022_jp", "ignore"), None) is not None
    for encoding in ("utf-16-le", "utf-16-be"):
        assert decode_page(text.encode(encoding), None) == text
    assert (
        decode_page(
            b"Some words in English and then \xb4\xd9\xb8\xa5\xc1\xa6 \xff\xfe\x81 more " * 40, None, GUESS
        )
        is None
    )


def test_hostile_heads_take_linear_time() -> None:
    began = time.process_time()
    for part in (b"<script ", b"<!--", b"<meta a='", b"<meta charset", b"<a =", b"</", b"<?xml encoding "):
        decode_page(part * (1 << 20), None)
    assert time.process_time() - began < 5


PANGRAMS = {
    "fr": "Voix ambiguë d’un cœur qui, au zéphyr, préfère les jattes de kiwis – 5 € l’unité.",
    "ru": "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "el": "Ξεσκεπάζω τὴν ψυχοφθόρα βδελυγμία· ταχίστη αλώπηξ.",
    "he": "דג סקרן שט בים מאוכזב ולפתע מצא לו חברה",
    "tr": "Pijamalı hasta yağız şoföre çabucak güvendi.",
    "pl": "Pchnąć w tę łódź jeża lub ośm skrzyń fig.",
    "th": "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า",
    "zh": "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。",
    "zh-hant": "視野無限廣，窗外有藍天。功許蓋，嘆為觀止。",
    "ja": "いろはにほへと ちりぬるを①㈱髙﨑。色は匂へど散りぬるを、ﾊﾝｶｸ。",
    "ko": "키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다. 똠방각하",
    "en": "The quick brown fox jumps over the lazy dog.",
}
DECLARED: dict[str, Callable[[str], str]] = {
    "header": lambda label: "",
    "meta": lambda label: f'<meta charset="{label}">',
    "pragma": lambda label: f'<meta http-equiv=Content-Type content="text/html; charset={label}">',
    "xml": lambda label: f'<?xml version="1.0" encoding="{label}"?>',
}


def wrong_pages(texts: Iterable[str]) -> tuple[int, list[tuple[str, str, str]]]:
    """How many pages were decoded, each in all encodings that have its characters, and those that differ."""
    labels: dict[str, list[str]] = defaultdict(list)
    for label, name in webencodings.LABELS.items():
        labels[name].append(label)
    count, wrong = 0, []
    for number, text in enumerate(texts):
        for encoding in ENCODINGS:
            wide = encoding.startswith("utf-16")
            label = labels[encoding][number % len(labels[encoding])]
            for how, declare in DECLARED.items():
                page = f"{declare(label)}<title>t</title><p>{text}"
                data = None if wide and how != "header" else encode(page, encoding)
                if data is not None:
                    count += 1
                    if decode_page(data, label if how == "header" else None) != page:
                        wrong.append((text[:40], label, how))
            page = f"<title>t</title><p>{text}"
            data = encode(page, encoding)
            if data is not None:
                count += 1
                found = decode_page(data, None)
                if found != page and (found is not None or encoding == "utf-8"):
                    wrong.append((text[:40], encoding, "undeclared"))
    return count, wrong


@pytest.mark.parametrize("times", [3, pytest.param(18, marks=pytest.mark.extended)])
def test_pages_in_every_encoding_of_the_standard_come_back_equal(times: int) -> None:
    texts = [PANGRAMS[key] for key in sorted(PANGRAMS)]
    count, wrong = wrong_pages(texts * times)  # an encoding has up to 18 labels
    assert count > 280 * times
    assert wrong == []


@pytest.mark.data
@pytest.mark.extended
def test_texts_of_the_corpora_in_every_encoding_come_back_equal() -> None:
    stored = (data_folder() / "corpus/multilang-00.jsonl.zst").read_bytes()
    lines = zstandard.ZstdDecompressor().stream_reader(stored).read().splitlines()
    texts = [json.loads(line)["text"][:2000] for line in lines[::8]]
    texts += pq.read_table(data_folder() / "corpus/html-00.parquet")["text"].to_pylist()[::8]
    count, wrong = wrong_pages(text.replace("charset", "") for text in texts)
    assert count > 5000
    assert wrong == []


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
