"""`on_bad_text: replace`: text that UTF-8 cannot hold is repaired, and what was replaced is counted."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardkit.errors import BuildError
from shardkit.formats.mds import MdsWriter
from support.foreign_tars import make_tar
from support.read_inputs import put, read, recipe

BAD = b"caf\xe9 \xf0\x9f\x98 end"
REPAIRED = "caf\ufffd \ufffd end"
GOOD = "gut: é \U0001f600".encode()


def as_parquet(texts: list[bytes]) -> bytes:
    stream = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": pa.array(texts, pa.binary())}), stream)
    return bytes(stream.getvalue())


def as_arrow(texts: list[bytes]) -> bytes:
    table, stream = (
        pa.table({"text": pa.array(texts, pa.binary()).view(pa.string())}),
        pa.BufferOutputStream(),
    )
    with pa.ipc.new_file(stream, table.schema) as writer:
        writer.write_table(table)
    return bytes(stream.getvalue())


def as_wet(texts: list[bytes]) -> bytes:
    head = b"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Length: %d\r\n\r\n"
    return b"".join(gzip.compress(head % len(text) + text + b"\r\n\r\n") for text in texts)


FORMATS: dict[str, Callable[[list[bytes]], bytes]] = {
    "a.jsonl": lambda texts: b"".join(b'{"text": "%s"}\n' % text for text in texts),
    "a.json": lambda texts: b"[%s]" % b",".join(b'{"text": "%s"}' % text for text in texts),
    "a.txt": lambda texts: b"\n".join(texts),
    "a.csv": lambda texts: b"text\n" + b"".join(b'"%s"\n' % text for text in texts),
    "a.parquet": as_parquet,
    "a.arrow": as_arrow,
    "a.warc.wet.gz": as_wet,
    "a.tar": lambda texts: make_tar((f"{i}.text", text) for i, text in enumerate(texts)),
}


SETTINGS: dict[str, dict[str, Any]] = {"a.txt": {"lines": True}, "a.json": {"format": "json"}}


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_that_are_not_utf8_are_replaced_and_counted_in_every_format(tmp_path: Path, name: str) -> None:
    put(tmp_path, name, FORMATS[name]([GOOD, BAD, GOOD]))
    config = SETTINGS.get(name, {})
    table, bad, _ = read(tmp_path, name, **config)
    assert (table.num_rows, [entry["reason"] for entry in bad]) == (2, ["bad_utf8"])
    table, bad, ledger = read(tmp_path, name, on_bad_text="replace", **config)
    assert table["text"].to_pylist() == [GOOD.decode(), REPAIRED, GOOD.decode()]
    assert not bad
    replaced = ledger.dropped["text/replaced"]
    assert (replaced.documents, replaced.bytes) == (0, 4)


def test_values_of_mds_shards_are_repaired_too(tmp_path: Path) -> None:
    with MdsWriter(tmp_path / "mds", columns={"text": "str", "meta": "json"}) as writer:
        for text in ("cafX", "good"):
            writer.write({"text": text, "meta": {"a": "X"}})
    shard = tmp_path / "mds/shard.00000.mds"
    shard.write_bytes(shard.read_bytes().replace(b"X", b"\xe9"))
    table, bad, _ = read(tmp_path, "mds", metadata="meta.a", text="text")
    assert table["text"].to_pylist() == ["good"]
    assert [entry["record"] for entry in bad] == [0]
    table, bad, ledger = read(tmp_path, "mds", metadata="meta.a", on_bad_text="replace")
    assert table["text"].to_pylist() == ["caf\ufffd", "good"]
    assert table["metadata"].to_pylist() == ['{"meta.a":"\ufffd"}'] * 2
    assert ledger.dropped["text/replaced"].bytes == 3


def test_halves_of_surrogate_pairs_in_json_are_replaced_and_what_is_no_json_stays_bad(tmp_path: Path) -> None:
    lines = [
        r'{"text": "\ud83d\ude00 \ud83d and \udc00", "url": "\ud800"}',
        r'{"text": NaN}',
        r'{"text": "a", }',
        '{"text": "' + "[" * 9 + '"}',
        '{"text": "\ud800", "x": '.encode("utf-8", "surrogatepass").decode("latin-1") + "[" * 5000,
        r'{"text": "tab \ud800' + "\t" + '"}',
    ]
    name = put(tmp_path, "a.jsonl", "\n".join(lines).encode("latin-1"))
    table, bad, ledger = read(tmp_path, name, on_bad_text="replace")
    assert table["text"].to_pylist() == ["\U0001f600 \ufffd and \ufffd", "[" * 9]
    assert table["url"].to_pylist() == ["\ufffd", None]
    assert [entry["record"] for entry in bad] == [1, 2, 4, 5]
    assert ledger.dropped["text/replaced"].bytes == 9


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.binary(max_size=20).map(lambda data: data.replace(b"\n", b"").strip()), min_size=1, max_size=5
    )
)
def test_replacing_is_what_python_does_and_the_ledger_adds_up(tmp_path: Path, lines: list[bytes]) -> None:
    lines = [b"no byte order mark", *lines]
    table, bad, ledger = read(
        tmp_path, put(tmp_path, "a.txt", b"\n".join(lines)), lines=True, on_bad_text="replace"
    )
    wanted = [line.decode("utf-8", "replace") for line in lines if line and not line.isspace()]
    assert ([text.encode() for text in table["text"].to_pylist()], bad) == ([w.encode() for w in wanted], [])
    lost = sum(len(line) - len(line.decode("utf-8", "ignore").encode()) for line in lines)
    assert (ledger.dropped["text/replaced"].bytes if lost else 0) == lost


def test_the_default_leaves_recipes_in_cards_as_they_were(tmp_path: Path) -> None:
    plain = recipe(tmp_path, "a.jsonl").content()
    assert not {"on_bad_text", "path_fields"} & plain["inputs"][0].keys()
    changed = recipe(tmp_path, {"path": "a.jsonl", "on_bad_text": "replace"}).content()
    assert changed["inputs"][0].pop("on_bad_text") == "replace"
    assert changed == plain


def mds_of(column: str) -> bytes:
    """A shard of one sample of the text "a" in a column of any name."""
    config = {"column_names": [column], "column_encodings": ["str"], "column_sizes": [None]}
    text = json.dumps(config).encode()
    start = 12 + len(text)
    return struct.pack("<III", 1, start, start + 5) + text + struct.pack("<I", 1) + b"a"


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.mds", mds_of("\ud800"), r"no column 'text'; its columns: \ud800"),
        (
            "a.tar",
            make_tar([("k.\udcff", b"a"), ("k.b\udcfe.txt", b"")]),
            r"its members: b\udcfe.txt, \udcff",
        ),
        ("a.jsonl", b'{"\xf0\x9f\x98\x80": 1}\n', "its fields: \U0001f600"),
        ("a.csv", b"te\xffxt,b\n1,2\n", r"its columns: te\udcffxt, b"),
    ],
)
def test_names_that_are_no_utf8_are_shown_escaped(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    _, bad, _ = read(tmp_path, put(tmp_path, name, data))
    assert words in bad[0]["error"]
    assert bad[0]["error"].encode()
    with pytest.raises(BuildError) as caught:
        read(tmp_path, name, allowed=0)
    assert words in str(caught.value)
    assert str(caught.value).encode()
