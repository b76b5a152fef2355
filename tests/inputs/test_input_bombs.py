"""Raw inputs whose records become enormous: quarantined or a clear error, within `memory` and 300 MB.

Each is read in a process of its own, as a build's worker does, whose peak is measured.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lz4.frame
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.bombs import gzip_of, measure, tar_header, tar_of, zstd_of

MEMORY = 512 << 20
SLACK = 300 << 20
GIB = 1 << 30
MAX_RECORD = "more than max_record_bytes 67,108,864"


def _warc(content_encoding: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Encoding: {content_encoding}\r\n\r\n"
    http = head.encode() + body
    record = (
        "WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: http://a.example/\r\n"
        f"Content-Length: {len(http)}\r\n\r\n"
    )
    return record.encode() + http + b"\r\n\r\n"


def _mds_offsets() -> bytes:
    """A shard of one sample of almost 4 GiB."""
    config = (
        b'{"column_encodings": ["str"], "column_names": ["text"], "column_sizes": [null], "hashes": [],'
        b' "compression": null, "format": "mds", "size_limit": null, "version": 2}'
    )
    size = (1 << 32) - 10_000
    head = 4 * 3 + len(config)
    start = struct.pack("<III", 1, head, head + 4 + size) + config + struct.pack("<I", size)
    return zstd_of([start, (b"a", size)])


def _parquet(table: pa.Table, **options: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out, **options)
    return out.getvalue()


def _dictionary() -> bytes:
    """100,000 rows of the same text of 1 MB."""
    text = pa.array(["a" * 1_000_000])
    rows = pa.DictionaryArray.from_arrays(pa.array(np.zeros(100_000, np.int32)), text)
    return _parquet(pa.table({"text": rows}), compression="zstd", dictionary_pagesize_limit=1 << 30)


def _large_page() -> bytes:
    """A page of 600 MB."""
    table = pa.table({"text": ["a" * 600_000_000]})
    options = {"use_dictionary": False, "data_page_size": 1 << 30, "write_statistics": False}
    return _parquet(table, compression="zstd", compression_level=1, **options)


def _arrow_buffer() -> bytes:
    sink = io.BytesIO()
    table = pa.table({"text": pa.array(["a" * 1_500_000_000])})
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    return sink.getvalue()


BOMBS: dict[str, tuple[str, Callable[[], bytes], str, dict[str, Any]]] = {
    "zstd line": ("a.jsonl.zst", lambda: zstd_of([(b"a", 3 * GIB)]), MAX_RECORD, {}),
    "zstd blank lines": ("a.jsonl.zst", lambda: zstd_of([(b"\n", 20 << 20)]), "0 documents; nothing", {}),
    "gzip line": ("a.jsonl.gz", lambda: gzip_of(b"a" * 1024, 3 * GIB), MAX_RECORD, {}),
    "bz2 line": ("a.txt.bz2", lambda: bz2.compress(bytes(1 << 27)), MAX_RECORD, {"lines": True}),
    "xz line": ("a.csv.xz", lambda: lzma.compress(b"text\n" + b"a" * (1 << 27), preset=0), "row", {}),
    "lz4 line": ("a.jsonl.lz4", lambda: lz4.frame.compress(bytes(1 << 30)), MAX_RECORD, {}),
    "zstd text": ("a.txt.zst", lambda: zstd_of([(b"a", 3 * GIB)]), MAX_RECORD, {}),
    "JSON lists": (
        "a.jsonl",
        lambda: b'{"text": "a", "b": [' + b"[]," * 20_000_000 + b"0]}\n",
        "raise `memory`",
        {},
    ),
    "tar of zstd": (
        "a.tar.zst",
        lambda: zstd_of([tar_header("a.txt", 3 * GIB), (b"a", 3 * GIB), bytes(1024)]),
        MAX_RECORD,
        {"text": "txt"},
    ),
    "tar of gzip": (
        "a.tar",
        lambda: tar_of(
            {f"a.{name}.gz": gzip_of(b"a" * 1024, 60 << 20) for name in ("txt", "url", "id", "m")}
        ),
        "after 67,108,864 bytes of other values, more than max_record_bytes",
        {"text": "txt.gz", "url": "url.gz", "id": "id.gz", "metadata": ["m.gz"]},
    ),
    "MDS": ("a.mds.zst", _mds_offsets, MAX_RECORD, {}),
    "WARC gzip": ("a.warc", lambda: _warc("gzip", gzip_of(b"<html>" * 171, 1 << 30)), "0 documents", {}),
    "WARC zstd": ("a.warc", lambda: _warc("zstd", zstd_of([(b"a", 3 * GIB)])), "0 documents", {}),
    "WARC twice": (
        "a.warc",
        lambda: _warc("gzip, gzip", gzip.compress(gzip_of(b"<html>" * 171, 4 * GIB))),
        "0 documents",
        {},
    ),
    "Parquet dictionary": ("a.parquet", _dictionary, "raise `memory`", {}),
    "Parquet page": ("a.parquet", _large_page, "raise `memory`", {}),
    "Arrow buffer": ("a.arrow", _arrow_buffer, "raise `memory`", {}),
}


IN_DEFAULT_RUN = {"tar of zstd", "MDS", "Parquet dictionary", "WARC zstd"}
each_bomb = pytest.mark.parametrize(
    "name",
    [name if name in IN_DEFAULT_RUN else pytest.param(name, marks=pytest.mark.extended) for name in BOMBS],
)


@pytest.mark.sampled(1)
@each_bomb
def test_inputs_that_grow_stay_within_memory(tmp_path: Path, name: str) -> None:
    file, make, words, settings = BOMBS[name]
    data = make()
    assert len(data) < MEMORY // 8
    (tmp_path / file).write_bytes(data)
    found = measure("input", tmp_path / file, MEMORY, **settings)
    assert words in found.outcome
    assert found.peak <= MEMORY + SLACK
