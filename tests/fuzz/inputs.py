"""Raw inputs of builds as targets: whatever is read, the ledger adds up, and every document is UTF-8."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import lz4.frame
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from fuzz.engine import Target, mutate
from fuzz.repairs import repaired_tar
from shardkit.errors import ShardError
from shardkit.formats import mds
from support.books import epub, page_of, pdf
from support.dumps import export, page, posts
from support.foreign_tars import make_tar
from support.read_inputs import read
from support.tfrecords import example, floats, ints, record, repaired, texts

__all__ = ["INPUTS", "INPUT_FILES", "changed_footer"]

_LINES = (
    b'{"text": "one", "id": 1, "m": {"a": [1, 2.5, null]}}\n{"text": "zw\xc3\xb6lf", "url": "http://a"}\n\n'
)
_WARC = (
    b"WARC/1.0\r\nWARC-Type: warcinfo\r\nContent-Length: 4\r\n\r\na: b\r\n\r\n"
    b"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: http://a.example/\r\nWARC-Record-ID: <urn:a>\r\n"
    b"Content-Length: %d\r\n\r\n%b\r\n\r\n"
    b"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Length: 5\r\n\r\nplain\r\n\r\n"
)
_WORDS = (
    b"Transfer-Encoding: chunked\r\n",
    b"Content-Encoding: gzip\r\n",
    b"Content-Length: ",
    b"WARC/1.0\r\n",
)
_COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": lambda data: gzip.compress(data, mtime=0),
    "zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "lz4": lz4.frame.compress,
}


def _warc() -> bytes:
    page = gzip.compress(b"<html><body><p>some text</p></body></html>", mtime=0)
    http = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=latin-1\r\nContent-Encoding: gzip\r\n\r\n"
        + page
    )
    return _WARC % (len(http), http)


def _mds(folder: Path) -> bytes:
    columns = {"text": "str", "id": "int", "meta": "json", "tokens": "ndarray:uint16"}
    with mds.MdsWriter(folder, columns=columns) as writer:
        for number in range(5):
            tokens = np.arange(number + 1, dtype=np.uint16)
            writer.write({"text": f"text {number}", "id": number, "meta": {"a": [number]}, "tokens": tokens})
    return (folder / "shard.00000.mds").read_bytes()


def _table_files() -> dict[str, bytes]:
    """Tables of text in several formats, encodings and compressions, by name."""
    texts = [f"text number {number} " * (number % 5 + 1) for number in range(60)]
    columns = {
        "text": texts,
        "id": [None if number % 3 else f"{number}" for number in range(60)],
        "nested": [{"a": number, "b": ["x"] * (number % 3)} for number in range(60)],
        "many": pa.array(texts).dictionary_encode(),
    }
    table = pa.table(columns)
    files: dict[str, bytes] = {}
    for name, options in {
        "plain": {"compression": "none", "use_dictionary": False, "write_page_index": True},
        "snappy": {"compression": "snappy", "data_page_version": "2.0", "write_page_checksum": True},
        "zstd": {"compression": "zstd", "row_group_size": 20},
        "delta": {
            "compression": "lz4",
            "use_dictionary": False,
            "column_encoding": {"text": "DELTA_BYTE_ARRAY", "id": "DELTA_LENGTH_BYTE_ARRAY"},
        },
    }.items():
        out = io.BytesIO()
        pq.write_table(table, out, **options)
        files[f"{name}.parquet"] = out.getvalue()
    for name, compression in (("plain", None), ("zstd", "zstd"), ("lz4", "lz4")):
        sink = io.BytesIO()
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with pa.ipc.new_file(sink, table.schema, options=options) as file:
            file.write_table(table, max_chunksize=20)
        files[f"{name}.arrow"] = sink.getvalue()
    stream = io.BytesIO()
    with pa.ipc.new_stream(stream, table.schema) as written:
        written.write_table(table)
    files["stream.arrows"] = stream.getvalue()
    return files


def changed_footer(data: bytes, rng: random.Random) -> bytes:
    """A Parquet file whose footer is mutated, and its length with it."""
    length = int.from_bytes(data[-8:-4], "little")
    start = len(data) - 8 - length
    if data[-4:] != b"PAR1" or start < 4:
        return data
    footer = bytearray(data[start:-8])
    if rng.random() < 0.4:
        footer = bytearray(mutate(bytes(footer), rng))
    else:
        for _ in range(rng.choice([1, 1, 2, 4])):
            at = rng.randrange(len(footer)) if footer else 0
            footer[at : at + 1] = bytes([rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])])
    return data[:start] + bytes(footer) + len(footer).to_bytes(4, "little") + b"PAR1"


def _read(**config: Any) -> Callable[[Path], object]:
    def read_all(folder: Path) -> None:
        [file] = folder.iterdir()
        limit = 1 << 16
        table, bad, ledger = read(folder, file.name, limit=limit, **config)
        assert table.num_rows == ledger.kept.documents
        if bad:
            raise ShardError(file, bad[0]["error"])

    return read_all


def _tfrecord() -> bytes:
    numbers = {"id": ints(7, -1), "score": floats(0.5), "tags": texts(b"a", b"\xff")}
    return b"".join(record(example(text=texts(b"text %d" % n), **numbers)) for n in range(4))


@cache
def _files() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        shard = _mds(Path(folder))
    tar = make_tar([("a.txt", b"some text"), ("a.json", b'{"b": 1}'), ("b.txt", b"more"), ("b.json", b"[]")])
    return {
        "jsonl": _LINES,
        "json": b"[" + _LINES.replace(b"\n", b",", 1).rstrip() + b"]",
        "xml": export(page(1, "A", "[[b]] {{c}}"), page(2, "B", "text", redirect=True)),
        "Posts.xml": posts([{"Id": 1, "PostTypeId": 1, "Title": "a", "Body": "<p>b</p>"}]),
        "pdf": pdf([page_of("some text"), page_of("more", compress=True)]),
        "epub": epub({"a.xhtml": "<html><body><p>text</p></body></html>"}, ["a.xhtml"]),
        "tfrecord": _tfrecord(),
        "csv": b'text,id\n"a ""b"" c",1\nd,2\n',
        "warc": _warc(),
        "mds": shard,
        "tar": tar,
        **{f"jsonl.{name}": make(_LINES * 20) for name, make in _COMPRESS.items()},
        "warc.gz": gzip.compress(_warc()[:75]) + gzip.compress(_warc()[75:]),
        "tar.zst": _COMPRESS["zst"](tar),
        **_table_files(),
    }


def _input(name: str) -> Target:
    kind = name.rpartition(".")[2] if name.endswith(("parquet", "arrow", "arrows")) else name
    config: dict[str, Any] = {"format": "json"} if name == "json" else {}
    if "tar" in name:
        config = {"text": "txt", "metadata": ["json.b"]}
    if name == "mds":
        config = {"metadata": ["meta.a"]}
    if name == "tfrecord":
        config = {"metadata": ["score", "tags"]}
    return Target(
        f"input={name}",
        {f"a.{kind}": _files()[name]},
        _read(**config),
        tokens=_WORDS if "warc" in name else (),
        repair={"tar": repaired_tar, "tfrecord": repaired}.get(name),
        change=changed_footer if kind == "parquet" else None,
    )


INPUTS: dict[str, Callable[..., Target]] = {"input": _input}
"""Makers of targets by name; "input" takes one of `INPUT_FILES`."""
INPUT_FILES = tuple(_files())
