"""Parquet, Arrow and Feather files: their rows as documents, and what damage costs."""

from __future__ import annotations

import datetime
import decimal
import json
import random
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from shardkit.errors import BuildError
from support.read_inputs import data_folder, put, read

TEXTS = [f"text {i} é\u2028" * (i % 5) for i in range(100)]


FORMATS = pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])


def write(
    folder: Path, columns: dict[str, Any], name: str = "a.parquet", rows: int = 100, **options: Any
) -> str:
    """A file of these columns in row groups, or record batches, of so many rows."""
    table = pa.table(columns)
    if name.endswith(".parquet"):
        pq.write_table(table, folder / name, row_group_size=rows, **options)
    else:
        with pa.ipc.new_file(folder / name, table.schema) as writer:
            writer.write_table(table, rows)
    return name


@FORMATS
def test_columns_inside_structs_are_read_alone(tmp_path: Path, name: str) -> None:
    docs = [{"body": f"b{i}", "n": i, "at": {"url": f"u{i}"}} if i != 3 else None for i in range(9)]
    write(tmp_path, {"doc": docs, "text": ["x"] * 9, "doc.n": list(range(9))}, name)
    table, bad, _ = read(tmp_path, name, text="doc.body", url="doc.at.url", id="doc.n", metadata=["doc.at"])
    assert table["text"].to_pylist() == [f"b{i}" for i in range(9) if i != 3]
    assert table["url"].to_pylist() == [f"u{i}" for i in range(9) if i != 3]
    assert table["id"].to_pylist() == [str(i) for i in range(9) if i != 3]
    assert table["metadata"][0].as_py() == '{"doc.at":{"url":"u0"}}'
    assert [(entry["record"], entry["reason"]) for entry in bad] == [(3, "no_text")]
    _, bad, _ = read(tmp_path, name, text="doc.absent")
    assert "no column 'doc.absent'" in bad[0]["error"]


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.large_binary(),
        pa.dictionary(pa.int32(), pa.string()),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [7, 100])
@FORMATS
def test_text_of_every_string_type_reads_the_same(
    tmp_path: Path, name: str, kind: pa.DataType, rows: int
) -> None:
    column = pa.array(TEXTS) if pa.types.is_dictionary(kind) else pa.array(TEXTS).cast(kind)
    column = column.dictionary_encode() if pa.types.is_dictionary(kind) else column
    write(tmp_path, {"text": column, "id": range(100)}, name, rows)
    table, bad, _ = read(tmp_path, name, split_bytes=1)
    assert not bad
    assert table["text"].to_pylist() == TEXTS
    assert table["id"].to_pylist() == [str(i) for i in range(100)]
    assert table["record"].to_pylist() == list(range(100))


@pytest.mark.parametrize("kind", [pa.binary(), pa.string()])
@FORMATS
def test_rows_without_text_or_with_bad_text_cost_themselves_only(
    tmp_path: Path, name: str, kind: pa.DataType
) -> None:
    texts = pa.array([b"good", None, b"\xff", b"x" * 2000, b"good"]).view(kind)
    write(tmp_path, {"text": texts, "url": ["u"] * 5}, name)
    table, bad, _ = read(tmp_path, name, limit=1024)
    assert table["record"].to_pylist() == [0, 4]
    assert table["url"].to_pylist() == ["u", "u"]
    assert [(b["record"], b["reason"]) for b in bad] == [(1, "no_text"), (2, "bad_utf8"), (3, "too_long")]


def test_other_columns_become_json(tmp_path: Path) -> None:
    name = write(
        tmp_path,
        {
            "text": ["a"],
            "when": [datetime.datetime(2024, 1, 2, 3, 4, 5)],
            "nanos": pa.array([1], pa.timestamp("ns")),
            "tags": [["x", "y"]],
            "other": [1.5],
        },
    )
    table, _, _ = read(tmp_path, name, metadata=["tags", "when", "nanos"])
    assert json.loads(table["metadata"][0].as_py()) == {
        "tags": ["x", "y"],
        "when": "2024-01-02 03:04:05.000000",
        "nanos": "1970-01-01 00:00:00.000000001",
    }


DIGEST = bytes(15) + b"\xc8"
HEX = DIGEST.hex()
UUID = uuid.UUID("12345678-1234-5678-1234-567812345678")
NOT_UTF8 = pa.array([b"\xff", b"ok"]).view(pa.string())


def extension(kind: pa.BaseExtensionType, values: list[Any]) -> pa.Array:
    return pa.ExtensionArray.from_storage(kind, pa.array(values, kind.storage_type))


ODD: dict[str, tuple[pa.Array, list[Any]]] = {
    # the column, and what metadata has of it
    "binary": (pa.array([DIGEST, b"plain \n \xc3\xa9"]), [HEX, "plain \n \u00e9"]),
    "binary with control characters": (pa.array([b"\0a", b""]), ["0061", ""]),
    "binary(16)": (pa.array([DIGEST, None], pa.binary(16)), [HEX, None]),
    "binary(32)": (pa.array([DIGEST * 2, None], pa.binary(32)), [HEX * 2, None]),
    "uuid": (extension(pa.uuid(), [UUID.bytes, None]), [str(UUID), None]),
    "json": (extension(pa.json_(), ['{"a":1}', None]), ['{"a":1}', None]),
    "bool8": (extension(pa.bool8(), [1, 0]), [True, False]),
    "tensor": (extension(pa.fixed_shape_tensor(pa.int32(), [2]), [[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
    "large_binary": (pa.array([DIGEST, b"b"], pa.large_binary()), [HEX, "b"]),
    "binary_view": (pa.array([DIGEST, b"b"], pa.binary_view()), [HEX, "b"]),
    "string_view": (pa.array(["a", None], pa.string_view()), ["a", None]),
    "dictionary of binary": (pa.array([DIGEST, DIGEST]).dictionary_encode(), [HEX, HEX]),
    "list of binary": (pa.array([[DIGEST, b"x"], []]), [[HEX, "x"], []]),
    "struct of binary": (pa.array([{"a": DIGEST}, None]), [{"a": HEX}, None]),
    "map": (pa.array([[("k", b"\xff")], []], pa.map_(pa.string(), pa.binary())), [[["k", "ff"]], []]),
    "large_list": (pa.array([["a"], None], pa.large_list(pa.string())), [["a"], None]),
    "list_view": (pa.array([["a"], None], pa.list_view(pa.string())), [["a"], None]),
    "strings that are none": (NOT_UTF8, [None, "ok"]),
    "strings in lists that are none": (pa.ListArray.from_arrays([0, 1, 2], NOT_UTF8), [None, ["ok"]]),
    "strings in structs that are none": (
        pa.StructArray.from_arrays([NOT_UTF8], ["x"]),
        [None, {"x": "ok"}],
    ),
    "decimal256": (
        pa.array([decimal.Decimal("1" * 50), None], pa.decimal256(60, 2)),
        ["1" * 50 + ".00", None],
    ),
    "duration": (pa.array([5, None], pa.duration("ns")), ["5", None]),
    "time": (pa.array([1001, None], pa.time64("ns")), ["00:00:00.000001001", None]),
    "date": (pa.array([1, None], pa.date32()), ["1970-01-02", None]),
    "a time zone that nobody knows": (pa.array([1, 2], pa.timestamp("us", "Mars/Olympus")), [None, None]),
    "null": (pa.nulls(2), [None, None]),
    "half float": (pa.array(np.array([1.5, np.nan], np.float16)), [1.5, None]),
    "not finite": (pa.array([float("nan"), float("-inf")]), [None, None]),
    "uint64": (pa.array([2**64 - 1, 0], pa.uint64()), [2**64 - 1, 0]),
    # of Arrow only
    "dictionary of strings that are none": (
        pa.DictionaryArray.from_arrays(pa.array([0, 1]), NOT_UTF8),
        [None, "ok"],
    ),
    "interval": (pa.array([pa.MonthDayNano([1, 2, 3]), None]), [mock.ANY, None]),
    "a year beyond all": (pa.array([2**62, None], pa.timestamp("s")), [mock.ANY, None]),
    "union": (
        pa.UnionArray.from_dense(
            pa.array([0, 1], pa.int8()), pa.array([0, 0], pa.int32()), [pa.array([1]), pa.array([DIGEST])]
        ),
        [1, HEX],
    ),
    "runs": (pa.RunEndEncodedArray.from_arrays([2], ["a"]), ["a", "a"]),
}
OF_ARROW = ("dictionary of strings that are none", "interval", "a year beyond all", "union", "runs")


@pytest.mark.sampled(40)
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("on_bad_text", ["quarantine", "replace"])
@FORMATS
def test_columns_of_any_type_are_carried_along_and_cost_no_text(
    tmp_path: Path, name: str, kind: str, on_bad_text: str
) -> None:
    column, wanted = ODD[kind]
    if name == "a.parquet" and kind in OF_ARROW:
        pytest.skip("Parquet has no such type")
    write(tmp_path, {"text": ["one", "two"], "x": column}, name)
    table, bad, _ = read(tmp_path, name, metadata="x", id="x", url="x", on_bad_text=on_bad_text)
    assert (table["text"].to_pylist(), bad) == (["one", "two"], [])
    if not (on_bad_text == "replace" and "that are none" in kind):
        assert [json.loads(held)["x"] for held in table["metadata"].to_pylist()] == wanted
        plain = [number for number, held in enumerate(wanted) if held is None or isinstance(held, str)]
        assert [table["id"][number].as_py() for number in plain] == [wanted[number] for number in plain]


@FORMATS
def test_a_binary_column_named_id_is_read_though_nobody_asked_for_it(tmp_path: Path, name: str) -> None:
    write(tmp_path, {"text": ["a"], "id": pa.array([DIGEST], pa.binary(16))}, name)
    table, _, _ = read(tmp_path, name, allowed=0)
    assert table["id"].to_pylist() == [HEX]
    table, _, _ = read(tmp_path, name, allowed=0, document_id="id")
    assert table["document_id"].to_pylist() == [DIGEST]


@pytest.mark.parametrize(
    "kind", [pa.binary(2), pa.binary_view(), pa.json_(), pa.dictionary(pa.int8(), pa.binary())]
)
def test_text_of_unusual_types_is_read_and_what_is_no_text_names_the_column(
    tmp_path: Path, kind: pa.DataType
) -> None:
    values = [b"ab", b"\xff\xfe"]
    if pa.types.is_dictionary(kind):
        column = pa.array(values).dictionary_encode()
    elif isinstance(kind, pa.BaseExtensionType):
        column, values = extension(kind, ["ab", "cd"]), [b"ab", b"cd"]
    else:
        column = pa.array(values, kind)
    table, bad, _ = read(tmp_path, write(tmp_path, {"text": column}))
    assert table["text"].to_pylist()[0] == "ab"
    assert [entry["error"] for entry in bad] == ["byte 0 of column 'text' is not UTF-8"] * (
        2 - table.num_rows
    )


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"body": ["a", "b"]}, "no column 'text'; its columns: body"),
        ({"text": [1, 2]}, "column 'text' holds int64, not text"),
        ({"text": [["a"], ["b"]]}, "not text"),
    ],
)
@FORMATS
def test_a_file_without_a_text_column_is_refused_with_its_columns(
    tmp_path: Path, name: str, columns: dict[str, Any], words: str
) -> None:
    write(tmp_path, columns, name)
    _, bad, ledger = read(tmp_path, name)
    assert words in bad[0]["error"]
    assert ledger.quarantined["no_column"].documents == 2
    with pytest.raises(BuildError, match=r"no_column: .*; set inputs\[0\].text to the column .* the text$"):
        read(tmp_path, name, allowed=0)


def test_damage_keeps_the_rows_before_it_and_counts_the_others(tmp_path: Path) -> None:
    texts = [f"{i:08d}" * 500 for i in range(100)]
    name = write(tmp_path, {"text": texts}, rows=20, compression="zstd", use_dictionary=False)
    path = tmp_path / name
    data = bytearray(path.read_bytes())
    column = pq.read_metadata(path).row_group(3).column(0)
    at = column.data_page_offset
    data[at : at + 40] = b"\xff" * 40
    path.write_bytes(data)
    table, bad, ledger = read(tmp_path, name)
    assert table["text"].to_pylist() == texts[:60]
    (entry,) = bad
    assert (entry["record"], entry["reason"]) == (60, "damaged_file")
    assert "60 records were read before" in entry["error"]
    assert ledger.read.documents == 100


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_a_page_whose_own_checksum_says_that_it_is_damaged_is_not_read(
    tmp_path: Path, compression: str, version: str
) -> None:
    texts = [f"{i:04d} some document text" for i in range(50)]
    options: dict[str, Any] = {"compression": compression, "data_page_version": version}
    write(tmp_path, {"text": texts}, rows=25, use_dictionary=False, write_page_checksum=True, **options)
    path = tmp_path / "a.parquet"
    data, metadata = bytearray(path.read_bytes()), pq.read_metadata(path)
    table, bad, _ = read(tmp_path, "a.parquet")
    assert (table["text"].to_pylist(), bad) == (texts, [])
    column = metadata.row_group(1).column(0)
    data[column.data_page_offset + column.total_compressed_size - 30] ^= 1
    path.write_bytes(data)
    table, (entry,), _ = read(tmp_path, "a.parquet")
    assert (table["text"].to_pylist(), entry["reason"]) == (texts[:25], "damaged_file")
    if compression == "none":
        assert "CRC checksum verification failed" in entry["error"]


@pytest.mark.parametrize("data", [b"", b"PAR1", b"not parquet at all", b"PAR1" + bytes(40) + b"PAR1"])
def test_something_else_named_parquet_is_refused(tmp_path: Path, data: bytes) -> None:
    table, bad, _ = read(tmp_path, put(tmp_path, "a.parquet", data))
    assert table.num_rows == 0
    assert "not a readable Parquet file" in bad[0]["error"]


@FORMATS
def test_a_file_of_no_rows_is_empty_not_bad(tmp_path: Path, name: str) -> None:
    table, bad, _ = read(tmp_path, write(tmp_path, {"text": pa.array([], pa.string())}, name))
    assert (table.num_rows, bad) == (0, [])


ARROW_TEXTS = [f"text {i} é" for i in range(900)]
TABLE = pa.table(
    {
        "text": ARROW_TEXTS,
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


def feather() -> bytes:
    sink = pa.BufferOutputStream()
    pyarrow.feather.write_feather(TABLE, sink)
    return bytes(sink.getvalue())


FILES = {
    "file.arrow": ipc(pa.ipc.new_file),
    "lz4.ipc": ipc(pa.ipc.new_file, "lz4"),
    "stream.arrows": ipc(pa.ipc.new_stream),
    "zstd.arrow": ipc(pa.ipc.new_stream, "zstd"),
    "two.feather": feather(),
}


@pytest.mark.parametrize("name", FILES)
def test_files_and_streams_are_told_apart_and_read_alike(tmp_path: Path, name: str) -> None:
    put(tmp_path, name, FILES[name])
    table, bad, _ = read(tmp_path, name)
    assert not bad
    assert table["text"].to_pylist() == ARROW_TEXTS
    assert table["id"].to_pylist() == [str(i) for i in range(900)]
    assert table["record"].to_pylist() == list(range(900))


def test_the_first_version_of_feather_says_how_to_convert_it(tmp_path: Path) -> None:
    """It is not read: metadata of it that is damaged ends the process in Arrow."""
    put(tmp_path, "one.feather", b"FEA1" + bytes(4) + b"a row" + bytes(23) + b"FEA1")
    table, (bad,), ledger = read(tmp_path, "one.feather")
    assert table.num_rows == 0
    assert "Feather of version 1" in bad["error"]
    assert "write_feather(read_table(OLD), NEW)" in bad["error"]
    assert ledger.read.bytes == 40


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_anywhere_gives_whole_batches_and_hides_nothing(tmp_path: Path, name: str) -> None:
    data = FILES[name]
    most = 0
    for length in range(1, len(data) - 8, max(len(data) // 40, 1)):
        table, bad, _ = read(tmp_path, put(tmp_path, name, data[:length]))
        assert table["text"].to_pylist() == ARROW_TEXTS[: table.num_rows]
        assert table.num_rows >= most  # more bytes never give less
        most = table.num_rows
        # A stream may end behind any batch: nothing tells that there was more.
        assert bad or (name in ("stream.arrows", "zstd.arrow") and table.num_rows % 200 == 0), length
    assert most >= 600


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FILES)
def test_flipped_bits_never_crash(tmp_path: Path, name: str) -> None:
    rng = random.Random(7)
    for _ in range(40):
        data = bytearray(FILES[name])
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        table, bad, ledger = read(tmp_path, put(tmp_path, name, bytes(data)))
        assert ledger.read.documents >= table.num_rows + len(bad)


BAD_DATA = {  # of Apache's damaged files: texts, unreadable rows and why, in the column named
    ("ARROW-GH-41317.parquet", "string"): (4, 1, "column 'string' is null"),
    ("ARROW-GH-41317.parquet", "binary"): (5, 0, ""),
    ("ARROW-GH-41321.parquet", "large_binary"): (0, 5, "levels do not match num_values"),
    ("ARROW-GH-41321.parquet", "string"): (4, 1, "column 'string' is null"),
    ("ARROW-GH-43605.parquet", "min_fl"): (0, 21186, "holds uint16, not text"),
    ("ARROW-GH-45185.parquet", "x"): (0, 5, "not text"),
    ("ARROW-GH-47662.parquet", "flba_field"): (0, 1000, "Unexpected end of stream"),
    ("ARROW-RS-GH-6229-DICTHEADER.parquet", "name"): (0, 25, "Invalid page header"),
    ("ARROW-RS-GH-6229-LEVELS.parquet", "outer"): (0, 1, "not text"),
    ("PARQUET-1481.parquet", "text"): (0, 1, "not a readable Parquet file"),
}


@pytest.mark.data
def test_damaged_parquet_files_of_apache_give_their_good_rows_or_say_why_not() -> None:
    folder = data_folder() / "parquet/parquet-testing/bad_data"
    assert {name for name, _ in BAD_DATA} >= {path.name for path in folder.glob("*.parquet")}
    for (name, column), (texts, unreadable, words) in BAD_DATA.items():
        table, bad, ledger = read(folder, name, text=column)
        assert (table.num_rows, ledger.read.documents) == (texts, texts + unreadable), name
        assert bool(bad) == bool(unreadable)
        assert all(words in entry["error"] for entry in bad), (name, bad)


@pytest.mark.data
def test_sound_parquet_files_of_apache_read_every_text_column() -> None:
    columns = 0
    for path in sorted((data_folder() / "parquet/parquet-testing/data").glob("*.parquet")):
        try:
            schema, rows = pq.read_schema(path), pq.read_metadata(path).num_rows
        except (pa.ArrowException, OSError):
            continue  # what this Arrow cannot open
        for field in schema:
            if pa.types.is_string(field.type):
                table, bad, _ = read(path.parent, path.name, text=field.name)
                assert not [b for b in bad if b["reason"] == "damaged_file"], (path.name, bad)
                assert table.num_rows + len(bad) == rows
                columns += 1
    assert columns > 20
