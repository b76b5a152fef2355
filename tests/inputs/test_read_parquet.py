from __future__ import annotations

import datetime
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardkit.errors import BuildError
from shardkit.writers.documents import DOCUMENT_SCHEMA
from shardkit.writers.inputs.readers import read_split
from shardkit.writers.inputs.scan import scan_inputs
from shardkit.writers.ledger import Count, Ledger, Quarantine
from shardkit.writers.recipe import recipe_from_mapping

TEXTS = [f"text {i} é\u2028" * (i % 5) for i in range(100)]


def read(
    path: Path, *, allowed: float = 1.0, split_bytes: int = 1 << 26, limit: int = 1 << 26, **config: Any
) -> tuple[pa.Table, list[dict[str, Any]], Ledger]:
    data = {
        "inputs": [{"path": path.name, **config}],
        "tokenizer": {"path": "t.json", "eos": "</s>"},
        "output": {"path": "out"},
        "max_record_bytes": limit,
    }
    recipe = recipe_from_mapping(data, folder=path.parent)
    ledger = Ledger()
    batches: list[pa.RecordBatch] = []
    with tempfile.NamedTemporaryFile() as file:
        with Quarantine(Path(file.name), max_bad_fraction=allowed) as quarantine:
            for split in scan_inputs(recipe, split_bytes=split_bytes):
                batches += read_split(split, recipe.inputs[0], ledger, quarantine, max_record_bytes=limit)
        entries = [json.loads(line) for line in file]
    table = pa.Table.from_batches(batches, DOCUMENT_SCHEMA)
    table.validate(full=True)
    texts = table["text"].to_pylist()
    ledger.kept += Count(len(texts), sum(len(text.encode()) for text in texts))
    ledger.check(path.name)
    return table, entries, ledger


def write(folder: Path, columns: dict[str, Any], **options: Any) -> Path:
    path = folder / "a.parquet"
    pq.write_table(pa.table(columns), path, **options)
    return path


def test_columns_inside_structs_are_read_alone(tmp_path: Path) -> None:
    docs = [{"body": f"b{i}", "n": i, "at": {"url": f"u{i}"}} if i != 3 else None for i in range(9)]
    path = write(tmp_path, {"doc": docs, "text": ["x"] * 9, "doc.n": list(range(9))})
    table, bad, _ = read(path, text="doc.body", url="doc.at.url", id="doc.n", metadata=["doc.at"])
    assert table["text"].to_pylist() == [f"b{i}" for i in range(9) if i != 3]
    assert table["url"].to_pylist() == [f"u{i}" for i in range(9) if i != 3]
    assert table["id"].to_pylist() == [str(i) for i in range(9) if i != 3]
    assert table["metadata"][0].as_py() == '{"doc.at":{"url":"u0"}}'
    assert [(entry["record"], entry["reason"]) for entry in bad] == [(3, "no_text")]
    _, bad, _ = read(path, text="doc.absent")
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
@pytest.mark.parametrize("row_group_size", [7, 100])
def test_text_of_every_string_type_reads_the_same(
    tmp_path: Path, kind: pa.DataType, row_group_size: int
) -> None:
    column = pa.array(TEXTS) if pa.types.is_dictionary(kind) else pa.array(TEXTS).cast(kind)
    column = column.dictionary_encode() if pa.types.is_dictionary(kind) else column
    path = write(tmp_path, {"text": column, "id": range(100)}, row_group_size=row_group_size)
    table, bad, _ = read(path, split_bytes=1)
    assert not bad
    assert table["text"].to_pylist() == TEXTS
    assert table["id"].to_pylist() == [str(i) for i in range(100)]
    assert table["record"].to_pylist() == list(range(100))


def test_rows_without_text_or_with_bad_text_cost_themselves_only(tmp_path: Path) -> None:
    texts = pa.array([b"good", None, b"\xff", b"x" * 2000, b"good"])
    table, bad, _ = read(write(tmp_path, {"text": texts, "url": ["u"] * 5}), limit=1024)
    assert table["record"].to_pylist() == [0, 4]
    assert table["url"].to_pylist() == ["u", "u"]
    assert [(b["record"], b["reason"]) for b in bad] == [(1, "no_text"), (2, "bad_utf8"), (3, "too_long")]


def test_other_columns_become_json(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {
            "text": ["a"],
            "when": [datetime.datetime(2024, 1, 2, 3, 4, 5)],
            "nanos": pa.array([1], pa.timestamp("ns")),
            "tags": [["x", "y"]],
            "other": [1.5],
        },
    )
    table, _, _ = read(path, metadata=["tags", "when", "nanos"])
    assert json.loads(table["metadata"][0].as_py()) == {
        "tags": ["x", "y"],
        "when": "2024-01-02 03:04:05.000000",
        "nanos": "1970-01-01 00:00:00.000000001",
    }


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"body": ["a", "b"]}, "no column 'text'; its columns: body"),
        ({"text": [1, 2]}, "column 'text' holds int64, not text"),
        ({"text": [["a"], ["b"]]}, "not text"),
    ],
)
def test_a_file_without_a_text_column_is_refused_with_its_columns(
    tmp_path: Path, columns: dict[str, Any], words: str
) -> None:
    path = write(tmp_path, columns)
    _, bad, ledger = read(path)
    assert words in bad[0]["error"]
    assert ledger.quarantined["no_column"].documents == 2
    with pytest.raises(BuildError, match=r"no_column: .*; set inputs\[0\].text to the column .* the text$"):
        read(path, allowed=0)


def test_damage_keeps_the_rows_before_it_and_counts_the_others(tmp_path: Path) -> None:
    texts = [f"{i:08d}" * 500 for i in range(100)]
    path = write(tmp_path, {"text": texts}, row_group_size=20, compression="zstd", use_dictionary=False)
    data = bytearray(path.read_bytes())
    column = pq.read_metadata(path).row_group(3).column(0)
    at = column.data_page_offset
    data[at : at + 40] = b"\xff" * 40
    path.write_bytes(data)
    table, bad, ledger = read(path)
    assert table["text"].to_pylist() == texts[:60]
    (entry,) = bad
    assert (entry["record"], entry["reason"]) == (60, "damaged_file")
    assert "60 records were read before" in entry["error"]
    assert ledger.read.documents == 100


@pytest.mark.parametrize("data", [b"", b"PAR1", b"not parquet at all", b"PAR1" + bytes(40) + b"PAR1"])
def test_something_else_named_parquet_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(data)
    table, bad, _ = read(path)
    assert table.num_rows == 0
    assert "not a readable Parquet file" in bad[0]["error"]


def test_a_file_of_no_rows_is_empty_not_bad(tmp_path: Path) -> None:
    table, bad, _ = read(write(tmp_path, {"text": pa.array([], pa.string())}))
    assert (table.num_rows, bad) == (0, [])


@pytest.fixture
def data_folder() -> Path:
    if "SHARDKIT_TEST_DATA" not in os.environ:
        pytest.skip("SHARDKIT_TEST_DATA is not set")
    return Path(os.environ["SHARDKIT_TEST_DATA"])


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
def test_damaged_parquet_files_of_apache_give_their_good_rows_or_say_why_not(data_folder: Path) -> None:
    folder = data_folder / "parquet/parquet-testing/bad_data"
    assert {name for name, _ in BAD_DATA} >= {path.name for path in folder.glob("*.parquet")}
    for (name, column), (texts, unreadable, words) in BAD_DATA.items():
        table, bad, ledger = read(folder / name, text=column)
        assert (table.num_rows, ledger.read.documents) == (texts, texts + unreadable), name
        assert bool(bad) == bool(unreadable)
        assert all(words in entry["error"] for entry in bad), (name, bad)


@pytest.mark.data
def test_sound_parquet_files_of_apache_read_every_text_column(data_folder: Path) -> None:
    columns = 0
    for path in sorted((data_folder / "parquet/parquet-testing/data").glob("*.parquet")):
        try:
            schema, rows = pq.read_schema(path), pq.read_metadata(path).num_rows
        except (pa.ArrowException, OSError):
            continue  # what this Arrow cannot open
        for field in schema:
            if pa.types.is_string(field.type):
                table, bad, _ = read(path, text=field.name)
                assert not [b for b in bad if b["reason"] == "damaged_file"], (path.name, bad)
                assert table.num_rows + len(bad) == rows
                columns += 1
    assert columns > 20
