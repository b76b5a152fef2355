"""Rows of Arrow files and of JSON lines read in place are those that were written; bad files are named."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import math
import random
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.engine import mutate
from shardkit.cache import CacheOptions
from shardkit.datasets.dataset import Dataset, open_dataset
from shardkit.datasets.locate import Found, LocalFiles
from shardkit.datasets.row_files import find_rows
from shardkit.errors import ShardError, ShardkitError
from shardkit.formats.rows import json_lines
from shardkit.storage.memory import MemoryStore
from support.remote_harness import fresh_url, put_folder
from support.row_files import KINDS, VALUES, as_lines, plain, write_tables


@pytest.fixture(autouse=True)
def indexes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Indexes of JSON lines are kept in the cache folder of the user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def rows_of(dataset: Dataset) -> list[dict[str, Any]]:
    return [{name: plain(value) for name, value in row.items()} for row in dataset]


def rows_at(path: Path | str, **options: Any) -> list[dict[str, Any]]:
    with open_dataset(path, **options) as dataset:
        return rows_of(dataset)


def one_by_one(path: Path) -> Dataset:
    """A dataset in which each group is a shard."""
    found = find_rows(str(path), shard_bytes=1)
    return Dataset(LocalFiles(Found(found.folder, found.manifest, rows=found)), found.manifest, rows=found)


OTHERS: dict[str, Any] = {
    "view": pa.array(["short", "a text of more than twelve bytes", None]).cast(pa.string_view()),
    "map": pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int64())),
    "null": pa.nulls(3),
    "union": pa.UnionArray.from_dense(
        pa.array([0, 1, 0], pa.int8()), pa.array([0, 0, 1], pa.int32()), [pa.array([1, 2]), pa.array(["x"])]
    ),
    "runs": pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), pa.array(["a", "b"])),
    "list_view": pa.array([[1], [2, 3], None], pa.list_view(pa.int64())),
    "tensor": pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int32(), (2, 2)),
        pa.array([[n] * 4 for n in range(3)], pa.list_(pa.int32(), 4)),
    ),
}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    names=st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=6, unique=True),
    count=st.integers(1, 12),
    batch_rows=st.integers(1, 5),
    codec=st.sampled_from([None, "zstd", "lz4"]),
    kind=st.sampled_from(["arrow", "stream"]),
    nulls=st.booleans(),
)
def test_rows_of_arrow_are_those_that_were_written(
    data: st.DataObject,
    names: list[str],
    count: int,
    batch_rows: int,
    codec: str | None,
    kind: str,
    nulls: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("files")
    columns = {}
    for name in names:
        type_, values = VALUES[name]
        drawn = data.draw(st.lists(st.none() | values if nulls else values, min_size=count, max_size=count))
        columns[name] = pa.array(drawn, type_)
    table = pa.table(columns)
    tables = [table.slice(at, batch_rows) for at in range(0, count, batch_rows)]
    if "category" in names:
        tables = [table]  # batches of a stream share a dictionary
    write_tables(folder, "a", kind, tables, compression=codec)
    expected = [{n: plain(v) for n, v in row.items()} for row in table.to_pylist()]
    assert rows_at(folder) == expected
    assert rows_of(one_by_one(folder)) == expected
    chosen = names[:2]
    store = MemoryStore(fresh_url())
    put_folder(folder, store)
    assert rows_at(store.url, columns=chosen) == [
        {n: row[n] for n in names if n in chosen} for row in expected
    ]


@pytest.mark.parametrize("codec", [None, "zstd"])
@pytest.mark.parametrize("kind", ["arrow", "stream"])
def test_every_type_of_arrow_is_read_next_to_any_other(kind: str, codec: str | None, tmp_path: Path) -> None:
    table = pa.table({**OTHERS, "last": [1, 2, 3]})
    file = write_tables(tmp_path, "a", kind, [table, table], compression=codec)
    expected = table.to_pylist()
    assert [row["last"] for row in rows_at(file)] == [1, 2, 3] * 2
    for name in OTHERS:
        found = [row[name] for row in rows_at(file, columns=[name])]
        if name == "tensor":
            assert found[1] == [[1, 1], [1, 1]]
            continue
        assert found == [row[name] for row in expected] * 2


def test_only_wanted_buffers_of_arrow_are_read(tmp_path: Path) -> None:
    noise = np.random.default_rng(5)
    tables = [
        pa.table({"a": noise.integers(0, 9, 4000), "waste": [noise.bytes(400)] * 4000, "b": ["x"] * 4000})
        for _ in range(3)
    ]
    for kind in ("arrow", "stream"):
        write_tables(tmp_path / kind, "a", kind, tables, compression=None)
        with open_dataset(tmp_path / kind, columns=["a", "b"]) as dataset:
            read = int(dataset.manifest.raw_bytes.sum())
        wanted = 3 * 4000 * (8 + 4 + 1)
        assert wanted <= read <= 1.1 * wanted


def test_feather_files_are_read_and_old_ones_named(tmp_path: Path) -> None:
    table = pa.table({"a": range(100), "b": [f"{n}" for n in range(100)]})
    for codec in ("uncompressed", "lz4", "zstd"):
        pyarrow.feather.write_feather(table, str(tmp_path / "a.feather"), compression=codec, chunksize=30)
        assert rows_at(tmp_path / "a.feather") == table.to_pylist()
    (tmp_path / "a.feather").write_bytes(b"FEA1" + bytes(50) + b"FEA1")
    with pytest.raises(ShardError, match=r"a.feather: .*Feather version 1: write it again"):
        open_dataset(tmp_path / "a.feather")


def test_a_folder_that_datasets_saved_is_read_without_its_caches(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", exc_type=ImportError)
    made = datasets.Dataset.from_dict({"input_ids": [[n] * 4 for n in range(2500)], "text": ["x"] * 2500})
    made.save_to_disk(str(tmp_path / "saved"), num_shards=2)
    assert [row["input_ids"] for row in rows_at(tmp_path / "saved")] == made["input_ids"][:]


def test_state_and_cache_files_of_datasets_are_not_rows(tmp_path: Path) -> None:
    table = pa.table({"a": range(2500)})
    tables = [table.slice(at, 1000) for at in range(0, 2500, 1000)]
    write_tables(tmp_path, "data-00000-of-00002", "stream", tables)
    write_tables(tmp_path, "data-00001-of-00002", "stream", tables[:1])
    write_tables(tmp_path, "cache-a1b2c3", "stream", [pa.table({"indices": range(9)})])
    for name in ("state.json", "dataset_info.json"):
        (tmp_path / name).write_text("{}")
    assert [row["a"] for row in rows_at(tmp_path)] == [*range(2500), *range(1000)]


def arrow_file(kind: str, codec: str | None) -> bytes:
    table = pa.table(
        {
            "a": range(120),
            "b": [f"text {n}" for n in range(120)],
            "c": [[1, 2]] * 120,
            "d": pa.array(["q", "r"] * 60).dictionary_encode(),
            "e": [{"x": 1, "y": ["a"]}] * 120,
            "f": pa.array(["a text of more than twelve bytes"] * 120).cast(pa.string_view()),
        }
    )
    out = io.BytesIO()
    write = pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream
    with write(out, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_table(table, max_chunksize=50)
    return out.getvalue()


@pytest.mark.parametrize("codec", [None, "zstd", "lz4"])
@pytest.mark.parametrize("kind", ["arrow", "stream"])
def test_no_damage_of_arrow_ends_the_process(kind: str, codec: str | None, tmp_path: Path) -> None:
    good, draw, read = arrow_file(kind, codec), random.Random(3), 0
    for _ in range(120):
        (tmp_path / "a.arrow").write_bytes(mutate(good, draw))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                rows_at(tmp_path / "a.arrow")
            read += 1
        except ShardkitError:
            pass
    assert read < 120


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda data: b"", "has no rows|it has no schema"),
        (lambda data: b"<html>404</html>", "is no readable Arrow file or stream"),
        (lambda data: data[:-7], "does not end with ARROW1|ends after the file"),
        (lambda data: data[: len(data) // 2], "does not end with ARROW1|ends after the file|not inside"),
    ],
)
@pytest.mark.parametrize("kind", ["arrow", "stream"])
def test_arrow_files_that_are_cut_are_named(
    change: Callable[[bytes], bytes], problem: str, kind: str, tmp_path: Path
) -> None:
    (tmp_path / "a.arrow").write_bytes(change(arrow_file(kind, None)))
    with pytest.raises(ShardError, match=rf"a.arrow: .*({problem})"):
        open_dataset(tmp_path / "a.arrow")


ROWS: list[dict[str, Any]] = [
    {
        "id": n,
        "text": f"text {n} é \u2028 👩‍👧",
        "ids": [*range(n % 5)],
        "score": n / 2 if n % 3 else n,
        "messages": [{"role": "user", "content": "x"}],
    }
    for n in range(3000)
]
LINES = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


def framed(compress: Callable[[bytes], bytes], size: int) -> bytes:
    return b"".join(compress(LINES[at : at + size]) for at in range(0, len(LINES), size))


@pytest.mark.parametrize(
    ("name", "data", "is_one"),
    [
        ("a.jsonl", LINES, False),
        ("a.ndjson", LINES[:-1], False),
        ("a.json", LINES, False),
        ("bom.jsonl", b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n\n \t\n"), False),
        ("a.jsonl.gz", framed(gzip.compress, 10_007), False),
        ("small.json.gz", framed(gzip.compress, 31), False),  # lines that span members
        ("a.jsonl.zst", framed(zstandard.compress, 70_001), False),
        ("padded.jsonl.gz", framed(gzip.compress, 90_001) + bytes(99), False),
        ("one.jsonl.zst", zstandard.compress(LINES), True),
        ("one.jsonl.gz", gzip.compress(LINES), True),
        ("misnamed.jsonl", gzip.compress(LINES), True),  # files are believed by their content
    ],
)
def test_json_lines_are_the_rows_of_blocks(
    name: str, data: bytes, is_one: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", 20_000)
    monkeypatch.setattr(json_lines, "_READ_BYTES", 15_000)
    file = tmp_path / name
    file.write_bytes(data)
    blocks = one_by_one(file)
    assert (len(blocks.manifest.shards) == 1) == is_one
    assert rows_of(blocks) == ROWS
    assert rows_at(file) == ROWS
    assert rows_at(file, columns=["ids", "score"]) == [{"ids": r["ids"], "score": r["score"]} for r in ROWS]
    assert blocks.columns[0].encoding == "int64"
    store = MemoryStore(fresh_url())
    store.put(name, data)
    assert rows_at(f"{store.url}/{name}") == ROWS


BAD_LINES: list[tuple[bytes, str]] = [
    (b'{"a":1}\n{"a":\n', "line 2 is not JSON: unexpected end of data"),
    (b'{"a":1}\n\n[1]\n', r"line 3 is '\[1\]', not a JSON object"),
    (b"null\n", "line 1 is 'null', not a JSON object"),
    (b'[{"a":1},\n{"a":2}]\n', "is one JSON array, not JSON lines"),
    (b'{\n "a":1\n}\n', "line 1 is not JSON: .*; JSON lines have one object a line"),
    (b'{"a":1}\n\0\n', "line 2 is not JSON"),
    (b'{"a":"x\0y"}\n', "line 1 is not JSON: unexpected control character"),
    (b'{"a":NaN}\n', "line 1 is not JSON"),
    (b'{"a":"\xff"}\n', "line 1 is not JSON: str is not valid UTF-8"),
    (b'{"a":"\\ud800"}\n', "line 1 is not JSON: no low surrogate"),
    (b'{"a":1} {"a":2}\n', "line 1 is not JSON"),
    (b'{"a":' + b"[" * 90_000 + b"]" * 90_000 + b"}\n", "line 1 is not JSON: depth limit exceeded"),
    (b'{"a":' + b"[" * 1000 + b"1" * 19 + b"]" * 1000 + b"}\n", "line 1 is nested too deeply"),
    (b'{"a":' + b"[" * 900 + b"]" * 900 + b"}\n", "column 'a' is nested deeper than 64 levels"),
    (b'{"a":1}\n{"a":18446744073709551616}\n', "column 'a' has an integer beyond 64 bits in line 2"),
    (b'{"a":1}\n{"a":{"b":[-9223372036854775809]}}\n', "column 'a' has an integer beyond 64 bits in line 2"),
    (b'{"a":1}\n{"a":"x"}\n', "column 'a' has values of several types"),
    (b'{"a":1.5}\n{"a":9007199254740993}\n', "column 'a' has values of several types"),
    (b'{"a":true}\n{"a":1}\n', "column 'a' has values of several types"),
    (b'{"a":[1,null]}\n', "column 'a' has nulls inside of its lists of integers"),
    (b'{"a":[1,"x"]}\n', "column 'a' has values of several types"),
    (b"", "has no rows"),
    (b" \n\r\n", "has no rows"),
    (b"\xff\xfe{\0", "is UTF-16"),
    (gzip.compress(LINES)[:-30], r"cannot be decompressed \(it is truncated\)"),
    (gzip.compress(LINES) + b"garbage", "cannot be decompressed"),
    (zstandard.compress(LINES)[:-30], r"cannot be decompressed \(it is truncated\)"),
    (bz2.compress(LINES), "line 1 is not JSON"),
]


@pytest.mark.parametrize(("data", "problem"), BAD_LINES)
def test_bad_lines_are_named(data: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(data)
    with pytest.raises(ShardError, match=rf"a.jsonl: {problem}"):
        open_dataset(tmp_path / "a.jsonl")


def test_a_column_that_cannot_be_read_leaves_the_others(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"a":1,"b":1}\n{"a":"x","b":2}\n{"a":99999999999999999999,"b":3}\n')
    assert [row["b"] for row in rows_at(file, columns=["b"])] == [1, 2, 3]
    with pytest.raises(ShardError, match=r"column 'a' .*; select other columns with columns="):
        open_dataset(file, columns=["a"])


def test_values_are_never_changed_and_missing_keys_are_nulls(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_bytes(
        b'{"a":18446744073709551615,"d":"2020-01-01"}\n{"a":1,"a":2,"c":{"x":1}}\n'
    )
    (tmp_path / "2.jsonl").write_bytes(b'{"a":3,"b":[],"c":{"y":"z"}}\n{"a":4,"b":[1]}\n')
    (tmp_path / "3.jsonl").write_bytes(b"")
    assert rows_at(tmp_path) == [
        {"a": 18446744073709551615, "d": "2020-01-01", "c": None, "b": None},
        {"a": 2, "d": None, "c": {"x": 1, "y": None}, "b": None},
        {"a": 3, "d": None, "c": {"x": None, "y": "z"}, "b": []},
        {"a": 4, "d": None, "c": None, "b": [1]},
    ]
    (tmp_path / "4.jsonl").write_bytes(b'{"a":"x"}\n')
    with pytest.raises(ShardError, match=r"4.jsonl: column 'a' is str, but uint64 in .*1.jsonl"):
        open_dataset(tmp_path)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.dictionaries(st.sampled_from("abc"), json_values, max_size=3), min_size=1, max_size=6)
)
def test_any_rows_are_read_as_they_are_or_refused(
    rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("lines") / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        found = rows_at(file)
    except ShardkitError:
        return
    for got, row in zip(found, rows, strict=True):
        assert without_nulls(got) == without_nulls(row)


def without_nulls(value: Any) -> Any:
    """Leave out keys that are null, as a missing one is; a null in a list of floats is NaN."""
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, dict):
        return {name: kept for name, one in value.items() if (kept := without_nulls(one)) is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def test_a_frame_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "MAX_FRAME_BYTES", 100_000)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES))
    with pytest.raises(ShardError, match=r"in one compressed frame, which can only be read as a whole: "):
        open_dataset(tmp_path / "a.jsonl.gz")
    monkeypatch.setattr(json_lines, "MAX_LINE_BYTES", 100_000)
    (tmp_path / "b.jsonl").write_bytes(b'{"a":"' + b"x" * 200_000)
    with pytest.raises(ShardError, match=r"b.jsonl: line 1 is longer than 100,000 bytes"):
        open_dataset(tmp_path / "b.jsonl")


class Reads:
    """Counts the files whose lines are read to index them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: list[str] = []
        lock, read = threading.Lock(), json_lines.JsonLinesFormat.read

        def noted(kind: Any, where: str, *rest: Any) -> bytes:
            with lock:
                self.files.append(Path(where).name)
            return read(kind, where, *rest)

        monkeypatch.setattr(json_lines.JsonLinesFormat, "read", noted)


@pytest.mark.parametrize("place", ["local", "remote", "local with cache"])
def test_json_lines_are_indexed_once(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    for number in range(4):
        write_tables(tmp_path / "in", f"part-{number}", "jsonl", [pa.table({"a": range(number, 50)})])
    where: Path | str = tmp_path / "in"
    if place == "remote":
        store = MemoryStore(fresh_url())
        put_folder(tmp_path / "in", store)
        where = store.url
    options = {} if place == "local" else {"cache": CacheOptions(folder=tmp_path / "cache")}
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(len(rows_at(where, **options)))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [194] * 4
    assert sorted(reads.files) == [f"part-{n}.jsonl" for n in range(4)]
    (tmp_path / "in" / "part-1.jsonl").write_bytes(as_lines(pa.table({"a": range(9)})))
    if place != "remote":
        assert len(rows_at(where, **options)) == 154
        assert reads.files[4:] == ["part-1.jsonl"]


def test_the_fingerprint_is_that_of_all_bytes(tmp_path: Path) -> None:
    file, found = tmp_path / "a.jsonl", []
    for data in (b'{"a":1}\n', b'{"a":2}\n', b'{"a":1}\n'):
        file.write_bytes(data)
        with open_dataset(file) as dataset:
            found.append(dataset.fingerprint)
    assert found[0] == found[2] != found[1]


def test_folders_of_two_formats_are_refused_and_json_files_about_others_ignored(tmp_path: Path) -> None:
    for kind in KINDS[:2]:
        write_tables(tmp_path / "two", "a", kind, [pa.table({"a": [1]})])
    with pytest.raises(ShardError, match="has Parquet and Arrow files: name one kind"):
        open_dataset(tmp_path / "two")
    assert rows_at(f"{tmp_path}/two/*.feather") == [{"a": 1}]
    (tmp_path / "two" / "about.json").write_text("{}")
    (tmp_path / "two" / "a.feather").unlink()
    assert rows_at(tmp_path / "two") == [{"a": 1}]
    spark = tmp_path / "spark"
    spark.mkdir()
    (spark / "part-0000.json").write_bytes(b'{"a":5}\n')
    (spark / "dataset_info.json").write_text("{}")
    assert rows_at(spark) == rows_at(f"{spark}/*.json") == rows_at(spark / "part-0000.json") == [{"a": 5}]


def test_a_list_of_tars_of_any_name_is_no_json_lines(tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text(json.dumps({"wids_version": 1, "shardlist": []}))
    with open_dataset(tmp_path / "train.json") as dataset:
        assert dataset.manifest.format == "tar"
