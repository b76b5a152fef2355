"""What a file is by its first bytes: real files of other formats, and texts that only look like them."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import sqlite3
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import lz4.frame
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from PIL import Image

from shardkit.errors import BuildError
from shardkit.writers.inputs.first_bytes import HEAD_BYTES, look, raise_if_pointer
from support.books import epub
from support.tfrecords import example, record, texts

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 12345\n" % (b"0a" * 32)
ENGLISH = "Call me Ishmael. Some years ago - never mind how long precisely.\n" * 3
RUSSIAN = "Все счастливые семьи похожи друг на друга.\n" * 3
CHINESE = "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。\n寒来暑往，秋收冬藏。" * 3
JAPANESE = "吾輩は猫である。名前はまだ無い。\n\u3000どこで生れたかとんと見当がつかぬ。" * 3


def written(write: Callable[[io.BytesIO], object]) -> bytes:
    stream = io.BytesIO()
    write(stream)
    return stream.getvalue()


def a_tar(stream: io.BytesIO) -> None:
    with tarfile.open(fileobj=stream, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("a.txt"))


def a_zip(stream: io.BytesIO) -> None:
    with zipfile.ZipFile(stream, "w") as file:
        file.writestr("word/document.xml", "x")


def a_database(folder: Path) -> bytes:
    with sqlite3.connect(folder / "a.db") as database:
        database.execute("create table t(a)")
    return (folder / "a.db").read_bytes()


def files(folder: Path) -> dict[str, bytes]:
    table, image = pa.table({"text": ["a"]}), Image.new("RGB", (2, 2))
    return {
        "gzip": gzip.compress(b"x"),
        "zstd": zstandard.compress(b"x"),
        "bz2": bz2.compress(b"x"),
        "xz": lzma.compress(b"x"),
        "lz4": lz4.frame.compress(b"x"),
        "parquet": written(lambda stream: pq.write_table(table, stream)),
        "arrow": written(lambda stream: pa.ipc.new_file(stream, table.schema).write(table)),
        "tar": written(a_tar),
        "zip": written(a_zip),
        "epub": epub({"a.xhtml": "<p>a</p>"}, ["a.xhtml"]),
        "tfrecord": record(example(text=texts(b"a"))),
        "numpy": written(lambda stream: np.save(stream, np.arange(3))),
        "pickle": pickle.dumps({"text": "a"}),
        "sqlite": a_database(folder),
        "png": written(lambda stream: image.save(stream, "PNG")),
        "jpeg": written(lambda stream: image.save(stream, "JPEG")),
        "gif": written(lambda stream: image.save(stream, "GIF")),
        "riff": written(lambda stream: image.save(stream, "WEBP")),
        "pdf": written(lambda stream: image.save(stream, "PDF")),
        "rtf": b"{\\rtf1\\ansi hello}",
        "ole": bytes.fromhex("d0cf11e0a1b11ae1") + bytes(500),
        "hdf5": b"\x89HDF\r\n\x1a\n" + bytes(8),
        "orc": b"ORC\x11\x00\x00\x0a\x12",
        "avro": b"Obj\x01\x04\x14avro.codec\x08null",
        "feather": b"FEA1\0\0\0\0",
        "7z": b"7z\xbc\xaf\x27\x1c\0\x04",
        "lfs": POINTER,
        "warc": b"WARC/1.0\r\nWARC-Type: warcinfo\r\n",
        "html": b"<!-- x --><!DOCTYPE html><title>x</title>",
        "xml": b'<?xml version="1.0"?><feed>',
        "mediawiki": b'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11">',
        "stackexchange": b'\xef\xbb\xbf<?xml version="1.0" encoding="utf-8"?>\r\n<posts>\r\n  <row Id="4"',
        "xml-table": b'<?xml version="1.0" encoding="utf-8"?>\r\n<users>\r\n  <row Id="-1"',
        "json": b'[{"text": "a"}]',
        "jsonl": b'{"text": "a"}\n{"text": "b"}\n',
        "text": b"plain text",
    }


def test_files_are_recognized_by_how_they_begin(tmp_path: Path) -> None:
    found = {kind: look(data[:HEAD_BYTES]).kind for kind, data in files(tmp_path).items()}
    assert found == {kind: kind for kind in found}


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"", "text"),
        (b"\n\n", "text"),
        (b"PAR1 is how Parquet files begin.", "text"),
        (b"ORCHESTRA. A novel", "text"),
        (b"GIF89a is a format of images.", "text"),
        (b"BZh is a family name.", "text"),
        (b"ARROW1 hit the target.", "text"),
        (b"%PDF-1.4 is the version that most printers take.", "text"),
        (b"version https://git-lfs.github.com/spec/v1 is the first line of a pointer.", "text"),
        (b"MZ and others", "text"),
        ("PAR1 für Größen".encode(), "text"),
        (b"see <html> for details", "text"),
        (b"<header>not a page</header>", "text"),
        (b"[1] A footnote", "text"),
        (b"[[link]]", "text"),
        (b"[ { is how an array of JSON begins", "text"),
        (b"{ braces }", "text"),
        (b'{"a": 1, "b": [\n', "jsonl"),
        (b'{"a": 1, "b": [\n{"a": 2}', "jsonl"),  # a cut record, then a whole one
        (b'{"a":\n  1}', "json"),
        (b'{\n  "text": "a"\n}', "json"),
        (b'{\r\n\t"text": "a"\r\n}', "json"),
        (b'{\n"text": "a",\n"b": 1\n}', "json"),
        (b'{"messages": [\n  {"role": "user"}', "json"),
        (b'  \n[\n  {\n "a": 1}]', "json"),
        (b"[]", "text"),
        (POINTER.replace(b"\n", b"\r\n"), "lfs"),
        (POINTER.replace(b"\noid", b"\next-0-foo sha256:00\noid"), "lfs"),
        (POINTER.decode().encode("utf-16"), "lfs"),
        (b"\xef\xbb\xbf" + POINTER, "lfs"),
        (ENGLISH.encode() + b"\0", "text"),
        (b"ab\0cd", "text"),
        (b"\0" * 64, "text"),
    ],
)
def test_what_only_looks_like_something_is_text(head: bytes, kind: str) -> None:
    assert look(head).kind == kind


@pytest.mark.parametrize("text", [ENGLISH, RUSSIAN, CHINESE, JAPANESE], ids=["en", "ru", "zh", "ja"])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_utf16_and_utf32_are_recognized_with_and_without_a_mark(text: str, encoding: str) -> None:
    name = encoding.replace("-le", "le").replace("-be", "be")
    marked = look(("\ufeff" + text).encode(encoding))
    assert (marked.encoding, marked.lacks_mark, marked.kind) == (name, False, "text")
    if name.startswith("utf-16") or text == ENGLISH:
        plain = look(text.encode(encoding))
        assert (plain.encoding, plain.lacks_mark, plain.kind) == (name, True, "text")
    record = look('{"text": "a"}\n'.encode(encoding))
    assert (record.encoding, record.kind) == (name, "jsonl")


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        *((text, "utf-8") for text in (ENGLISH, RUSSIAN, CHINESE, JAPANESE)),
        (RUSSIAN, "cp1251"),
        (RUSSIAN, "koi8-r"),
        (CHINESE, "gbk"),
        (CHINESE, "gb18030"),
        (JAPANESE, "cp932"),
        (JAPANESE, "euc-jp"),
        (JAPANESE, "iso2022_jp"),
        ("Grüße aus Köln. " * 9, "latin-1"),
        ("안녕하세요. 반갑습니다. " * 9, "cp949"),
        ("สวัสดีครับ " * 9, "cp874"),
        ("שלום עולם " * 9, "cp1255"),
    ],
)
def test_other_encodings_are_not_taken_for_utf16(text: str, encoding: str) -> None:
    found = look(text.encode(encoding))
    assert (found.kind, found.lacks_mark) == ("text", False)


@pytest.mark.parametrize(
    "format", ["jsonl", "json", "csv", "text", "html", "warc", "parquet", "mds", "wds", "tfrecord"]
)
def test_every_format_says_what_another_file_is_and_what_to_do(tmp_path: Path, format: str) -> None:
    for kind, data in files(tmp_path).items():
        found = look(data)
        problem = found.problem(format, "inputs[3]")
        reads = {"json": {"json", "jsonl"}, "html": {"html", "xml"}, "wds": {"tar"}}
        if kind == "text" or kind in reads.get(format, {format}):
            assert problem is None, kind
            continue
        assert problem is not None, kind
        assert problem.startswith("it is ")
        assert ";" in problem
        if found.format is not None:
            assert f"inputs[3].format: {found.format}" in problem


MARKUP = {"text", "html", "xml", "xml-table", "mediawiki", "stackexchange", "json", "jsonl", "warc"}


def test_markup_is_text_for_who_says_so(tmp_path: Path) -> None:
    for kind, data in files(tmp_path).items():
        chosen = look(data).problem("text", "inputs[0]", is_chosen=True)
        assert (chosen is None) == (kind in MARKUP), kind


def test_a_pointer_of_git_lfs_is_an_error_that_says_how_to_get_the_file() -> None:
    with pytest.raises(BuildError, match=r"data/a\.parquet: the file is a pointer of Git LFS.*git lfs pull"):
        raise_if_pointer(look(POINTER), "data/a.parquet")
    raise_if_pointer(look(b"text"), "a.txt")
