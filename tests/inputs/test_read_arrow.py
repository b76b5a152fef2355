from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pytest

from support.read_inputs import put, read

TEXTS = [f"text {i} é" for i in range(900)]
TABLE = pa.table(
    {
        "text": TEXTS,
        "id": list(range(900)),
        "meta": [{"url": f"u{i}", "body": f"b{i}"} if i % 7 else None for i in range(900)],
        "kind": pa.array(["a", "b", "c"] * 300).dictionary_encode(),
    }
)


def ipc(opener: Callable[..., Any], compression: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    with opener(sink, TABLE.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        for batch in TABLE.to_batches(200):
            writer.write_batch(batch)
    return bytes(sink.getvalue())


def feather(version: int) -> bytes:
    sink = pa.BufferOutputStream()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        table = TABLE.select(["text", "id"]) if version == 1 else TABLE
        pyarrow.feather.write_feather(table, sink, version=version)
    return bytes(sink.getvalue())


FILES = {
    "file.arrow": ipc(pa.ipc.new_file),
    "lz4.ipc": ipc(pa.ipc.new_file, "lz4"),
    "stream.arrows": ipc(pa.ipc.new_stream),
    "zstd.arrow": ipc(pa.ipc.new_stream, "zstd"),
    "one.feather": feather(1),
    "two.feather": feather(2),
}


@pytest.mark.parametrize("name", FILES)
def test_files_and_streams_are_told_apart_and_read_alike(tmp_path: Path, name: str) -> None:
    put(tmp_path, name, FILES[name])
    table, bad, _ = read(tmp_path, name)
    assert not bad
    assert table["text"].to_pylist() == TEXTS
    assert table["id"].to_pylist() == [str(i) for i in range(900)]
    assert table["record"].to_pylist() == list(range(900))


def test_fields_inside_structs_and_dictionaries_are_found(tmp_path: Path) -> None:
    put(tmp_path, "a.arrow", FILES["file.arrow"])
    table, bad, _ = read(tmp_path, "a.arrow", text="meta.body", url="meta.url", metadata=["kind"])
    assert table["text"].to_pylist() == [f"b{i}" for i in range(900) if i % 7]
    assert table["url"].to_pylist() == [f"u{i}" for i in range(900) if i % 7]
    assert table["metadata"].to_pylist()[:2] == ['{"kind":"b"}', '{"kind":"c"}']
    assert {entry["reason"] for entry in bad} == {"no_text"}
    assert len(bad) == 129


@pytest.mark.parametrize(
    ("config", "words"),
    [({"text": "body"}, "no column 'body'; its columns: text"), ({"text": "id"}, "holds int64, not text")],
)
def test_a_file_without_the_column_is_refused_whole(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    table, bad, ledger = read(tmp_path, put(tmp_path, "a.arrow", FILES["file.arrow"]), **config)
    assert table.num_rows == 0
    assert words in bad[0]["error"]
    assert ledger.quarantined["no_column"].documents == 900


@pytest.mark.parametrize("name", [name for name in FILES if name != "one.feather"])
def test_a_file_cut_anywhere_gives_whole_batches_and_hides_nothing(tmp_path: Path, name: str) -> None:
    data = FILES[name]
    most = 0
    for length in range(1, len(data) - 8, max(len(data) // 40, 1)):
        table, bad, _ = read(tmp_path, put(tmp_path, name, data[:length]))
        assert table["text"].to_pylist() == TEXTS[: table.num_rows]
        assert table.num_rows >= most  # more bytes never give less
        most = table.num_rows
        # A stream may end behind any batch: nothing tells that there was more.
        assert bad or (name in ("stream.arrows", "zstd.arrow") and table.num_rows % 200 == 0), length
    assert most >= 600


@pytest.mark.parametrize("name", FILES)
def test_flipped_bits_never_crash(tmp_path: Path, name: str) -> None:
    rng = random.Random(7)
    for _ in range(40):
        data = bytearray(FILES[name])
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        table, bad, ledger = read(tmp_path, put(tmp_path, name, bytes(data)))
        assert ledger.read.documents >= table.num_rows + len(bad)


def test_text_that_is_not_utf8_costs_its_row(tmp_path: Path) -> None:
    raw = pa.array([b"good", b"\xff", b"fine"], pa.binary()).view(pa.string())
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, pa.schema({"text": pa.string()})) as writer:
        writer.write_batch(pa.record_batch({"text": raw}))
    table, bad, _ = read(tmp_path, put(tmp_path, "a.arrow", bytes(sink.getvalue())))
    assert table["text"].to_pylist() == ["good", "fine"]
    assert [(entry["record"], entry["reason"]) for entry in bad] == [(1, "bad_utf8")]
