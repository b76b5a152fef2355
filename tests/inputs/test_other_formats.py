"""Files that are not what their name says: read as what they are, or refused by name; never trained on."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import lz4.frame
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from shardkit.errors import BuildError, RecipeError
from support.foreign_tars import make_tar
from support.read_inputs import put, read, recipe
from support.whatwg import encode

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 12345\n" % (b"0a" * 32)
NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "jsonl": ("a.jsonl", {}),
    "json": ("a.json", {"format": "json"}),
    "csv": ("a.csv", {}),
    "tsv": ("a.tsv", {}),
    "text": ("a.txt", {}),
    "lines": ("a.txt", {"lines": True}),
    "html": ("a.html", {}),
}
TEXTS = ["первый: 天地", "second \U0001f600 line"]


def content(kind: str, texts: list[str]) -> str:
    """A file of a kind that holds the texts, in one document if it is a whole one."""
    return {
        "jsonl": "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts),
        "json": json.dumps([{"text": text} for text in texts], ensure_ascii=False),
        "csv": "text\n" + "".join(f'"{text}"\n' for text in texts),
        "tsv": "text\n" + "".join(f"{text}\n" for text in texts),
        "text": "\n".join(texts),
        "lines": "\n".join(texts),
        "html": f"<html><body><main><p>{'. '.join(texts)}</p></main></body></html>",
    }[kind]


def documents(kind: str, texts: list[str]) -> list[str]:
    whole = {"text": ["\n".join(texts)], "html": [". ".join(texts)]}
    return whole.get(kind, texts)


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_files_with_a_byte_order_mark_are_decoded(
    tmp_path: Path, kind: str, encoding: str, replace: bool
) -> None:
    name, config = NAMES[kind]
    data = ("\ufeff" + content(kind, TEXTS)).encode(encoding)
    settings = config | ({"on_bad_text": "replace"} if replace else {})
    for stored, ending in ((data, ""), (gzip.compress(data), ".gz")):
        table, bad, _ = read(
            tmp_path, put(tmp_path, name + ending, stored), allowed=0, split_bytes=16, **settings
        )
        assert (table["text"].to_pylist(), bad) == (documents(kind, TEXTS), [])


@pytest.mark.parametrize("kind", [kind for kind in NAMES if kind != "html"])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le"])
def test_utf16_without_a_mark_is_refused_and_the_key_is_named(
    tmp_path: Path, kind: str, encoding: str
) -> None:
    label = encoding.replace("-le", "le").replace("-be", "be")
    name, config = NAMES[kind]
    put(tmp_path, name, content(kind, ["plain text of some length, twice"] * 2).encode(encoding))
    for settings in (config, config | {"on_bad_text": "replace"}, config | {"encoding": "windows-1252"}):
        table, (entry,), _ = read(tmp_path, name, split_bytes=16, **settings)
        assert (table.num_rows, entry["reason"]) == (0, "other_format")
        assert label.upper() in entry["error"]
        assert f"inputs[0].encoding: {label}" in entry["error"] or label == "utf-32le"
    if encoding.startswith("utf-16"):
        table, _, _ = read(
            tmp_path,
            name,
            allowed=0,
            split_bytes=16,
            encoding=label,
            **config,
        )
        assert table.num_rows > 0


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize(
    ("encoding", "texts"),
    [
        ("latin1", ["Grüße", "für € und ‚Zitate‘"]),
        ("windows-1251", ["первый", "второй"]),
        ("shift_jis", ["表示ソース", "能①㈱十予"]),  # second bytes that are ASCII backslashes
        ("big5", ["功許蓋", "視野"]),
        ("gb18030", ["天地\U0001f600", "玄黄"]),
        ("euc-kr", ["똠방", "한국어"]),
        ("iso-2022-jp", ["日本語①", "kana"]),
        ("utf-16", ["a\u010ab", "天\u0a0a地"]),  # characters that hold the byte of a newline
    ],
)
def test_text_of_every_kind_is_read_in_the_encoding_that_the_recipe_says(
    tmp_path: Path, kind: str, encoding: str, texts: list[str]
) -> None:
    name, config = NAMES[kind]
    if kind == "html":
        texts = [f"{text} - a line of text that is long enough for the content of a page" for text in texts]
    canonical = {"latin1": "windows-1252", "utf-16": "utf-16le"}.get(encoding, encoding)
    data = encode(content(kind, texts), canonical)
    assert data is not None
    for stored, ending in ((data, ""), (gzip.compress(data), ".gz")):
        put(tmp_path, name + ending, stored)
        table, bad, _ = read(tmp_path, name + ending, allowed=0, split_bytes=8, encoding=encoding, **config)
        assert (table["text"].to_pylist(), bad) == (documents(kind, texts), [])


def test_bytes_that_the_encoding_lacks_cost_their_record_or_are_replaced(tmp_path: Path) -> None:
    put(tmp_path, "a.txt", b"one\n\x81\x20bad\n\x82\xa0\n")
    table, (entry,), _ = read(tmp_path, "a.txt", lines=True, encoding="shift_jis")
    assert (table["text"].to_pylist(), entry["record"], entry["reason"]) == (["one", "あ"], 1, "bad_utf8")
    assert "is not shift_jis" in entry["error"]
    table, bad, ledger = read(tmp_path, "a.txt", lines=True, encoding="shift_jis", on_bad_text="replace")
    assert (table["text"].to_pylist(), bad) == (["one", "\ufffd bad", "あ"], [])
    assert ledger.dropped["text/replaced"].bytes == 1


@pytest.mark.parametrize("label", ["utf8x", "", "iso-2022-kr", "x-user-defined"])
def test_labels_that_are_none_are_refused_with_their_key(tmp_path: Path, label: str) -> None:
    with pytest.raises(RecipeError, match=r"inputs\[0\].encoding"):
        recipe(tmp_path, {"path": "a.txt", "encoding": label})


def test_formats_that_say_their_own_encoding_refuse_the_key(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(RecipeError, match=r"inputs\[0\].encoding: a.parquet is parquet"):
        read(tmp_path, "a.parquet", encoding="latin1")


@pytest.mark.parametrize("kind", [*NAMES, "warc", "parquet", "arrow", "mds", "tar"])
@pytest.mark.parametrize("as_utf16", [False, True])
def test_a_pointer_of_git_lfs_is_always_an_error(tmp_path: Path, kind: str, as_utf16: bool) -> None:
    name, config = NAMES.get(kind, (f"a.{kind}", {}))
    put(tmp_path, name, POINTER.decode().encode("utf-16") if as_utf16 else POINTER)
    for settings in (config, config | {"on_bad_text": "replace"}):
        with pytest.raises(BuildError, match="git lfs pull"):
            read(tmp_path, name, allowed=1.0, split_bytes=32, **settings)


PACKED = {
    "gz": gzip.compress,
    "zst": zstandard.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "lz4": lz4.frame.compress,
}


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("packing", PACKED)
def test_the_signature_of_a_compression_is_believed_and_not_the_name(
    tmp_path: Path, kind: str, packing: str
) -> None:
    name, config = NAMES[kind]
    data = content(kind, TEXTS).encode()
    for ending, stored in (
        ("", PACKED[packing](data)),
        (".gz", PACKED[packing](data)),
        (f".{packing}", data),
    ):
        table, bad, _ = read(
            tmp_path, put(tmp_path, name + ending, stored), allowed=0, split_bytes=16, **config
        )
        assert (table["text"].to_pylist(), table["record"].to_pylist(), bad) == (
            documents(kind, TEXTS),
            list(range(len(documents(kind, TEXTS)))),
            [],
        )


def test_a_compressed_tar_under_a_plain_name_is_read(tmp_path: Path) -> None:
    put(tmp_path, "a.tar", gzip.compress(make_tar([("0.txt", b"one"), ("1.txt", b"two")])))
    table, bad, _ = read(tmp_path, "a.tar", text="txt", allowed=0)
    assert (table["text"].to_pylist(), bad) == (["one", "two"], [])


FOREIGN = {
    "pdf": b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj",
    "zip": b"PK\x03\x04\x14\0word/document.xml",
    "parquet": b"PAR1\x15\x04\x15\x10",
    "arrow": b"ARROW1\0\0\xff\xff\xff\xff",
    "tar": make_tar([("a.txt", b"x")]),
    "ole": bytes.fromhex("d0cf11e0a1b11ae1") + bytes(99),
    "sqlite": b"SQLite format 3\0" + bytes(84),
    "hdf5": b"\x89HDF\r\n\x1a\n\0",
    "numpy": b"\x93NUMPY\x01\0",
    "rtf": b"{\\rtf1\\ansi text}",
    "html": b"<!DOCTYPE html><title>404</title>",
    "xml": b'<?xml version="1.0"?><mediawiki/>',
    "warc": b"WARC/1.0\r\nWARC-Type: warcinfo\r\n\r\n",
}


@pytest.mark.sampled(60)
@pytest.mark.parametrize("settings", [{}, {"on_bad_text": "replace"}], ids=["strict", "replace"])
@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("foreign", FOREIGN)
def test_files_of_other_programs_are_refused_by_name(
    tmp_path: Path, kind: str, foreign: str, settings: dict[str, Any]
) -> None:
    name, config = NAMES[kind]
    if (kind, foreign) in {("html", "html"), ("html", "xml")}:
        return
    for stored, ending in ((FOREIGN[foreign], ""), (gzip.compress(FOREIGN[foreign]), ".gz")):
        table, (entry,), _ = read(tmp_path, put(tmp_path, name + ending, stored), **config, **settings)
        assert (table.num_rows, entry["reason"]) == (0, "other_format")
        assert entry["error"].startswith("it is ")


@pytest.mark.parametrize("text", ['{"text": "a"}\n{"text": "b"}\n', '[{"text": "a"}]', "<html>x</html>"])
def test_markup_under_a_name_of_text_is_text_only_for_who_says_so(tmp_path: Path, text: str) -> None:
    put(tmp_path, "a.txt", text.encode())
    _, (entry,), _ = read(tmp_path, "a.txt")
    assert "set inputs[0].format: text to read it as plain text" in entry["error"]
    table, _, _ = read(tmp_path, "a.txt", format="text", allowed=0)
    assert table["text"].to_pylist() == [text]


def test_an_empty_compressed_file_is_named_as_such(tmp_path: Path) -> None:
    _, (entry,), _ = read(tmp_path, put(tmp_path, "a.jsonl.gz", b""))
    assert "the file is empty: 0 bytes are not a gzip file" in entry["error"]
    table, bad, _ = read(tmp_path, put(tmp_path, "a.jsonl", b""), allowed=0)
    assert (table.num_rows, bad) == (0, [])


@pytest.mark.parametrize("kind", ["jsonl", "json", "lines"])
def test_a_byte_order_mark_in_the_middle_costs_no_record(tmp_path: Path, kind: str) -> None:
    name, config = NAMES[kind]
    part = b"\xef\xbb\xbf" + content(kind, TEXTS).encode().rstrip(b"\n") + b"\n"
    table, bad, _ = read(tmp_path, put(tmp_path, name, part * 3), allowed=0, **config)
    assert (table["text"].to_pylist(), bad) == (TEXTS * 3, [])


PAGE = (
    '<html><head><meta charset="{}"></head>'
    "<body><main><p>Ein Gruß aus Köln an das naïve Café.</p></main></body></html>"
)


@pytest.mark.parametrize("encoding", ["iso-8859-1", "windows-1252", "utf-8", "macintosh"])
def test_pages_in_files_and_in_columns_of_bytes_are_decoded_by_what_they_declare(
    tmp_path: Path, encoding: str
) -> None:
    page = encode(PAGE.format(encoding), {"iso-8859-1": "windows-1252"}.get(encoding, encoding))
    assert page is not None
    put(tmp_path, "a.html", page)
    put(tmp_path, "b.txt", page)
    put(tmp_path, "c.tar", make_tar([("0.html", page)]))
    pq.write_table(pa.table({"text": pa.array([page], pa.binary())}), tmp_path / "d.parquet")
    put(tmp_path, "e.bin", page)
    cases: dict[str, dict[str, Any]] = {
        "a.html": {},
        "b.txt": {"extract": "resiliparse"},
        "c.tar": {"text": "html", "extract": "resiliparse"},
        "d.parquet": {"extract": "resiliparse"},
        "e.bin": {"format": "text", "extract": "resiliparse"},
    }
    for name, config in cases.items():
        table, bad, _ = read(tmp_path, name, allowed=0, **config)
        assert (table["text"].to_pylist(), bad) == (["Ein Gruß aus Köln an das naïve Café."], []), name
