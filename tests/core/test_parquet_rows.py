"""The rows of Parquet files read in place are pyarrow's; hostile, odd and unlike files are named."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.engine import mutate
from shardkit.cache import CacheOptions
from shardkit.datasets.dataset import Dataset, open_dataset
from shardkit.datasets.locate import Found, LocalFiles
from shardkit.datasets.row_files import FileRows, find_rows
from shardkit.errors import ShardError, ShardkitError
from shardkit.formats import mds
from shardkit.formats.rows.parquet import ParquetFooter, as_file, footer_bytes
from shardkit.formats.tokens import pieces_of
from shardkit.order.arrangement import StreamSizes
from shardkit.storage.memory import MemoryStore
from shardkit.storage.store import ObjectChangedError
from support.noted_store import Read
from support.remote_harness import fresh_url, put_folder
from support.row_files import VALUES, plain


def rows_of(dataset: Dataset) -> list[dict[str, Any]]:
    return [{name: plain(value) for name, value in row.items()} for row in dataset]


def expected_of(tables: Sequence[pa.Table]) -> list[dict[str, Any]]:
    return [{n: plain(v) for n, v in row.items()} for table in tables for row in table.to_pylist()]


def write(folder: Path, tables: Sequence[pa.Table], **options: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, table in enumerate(tables):
        pq.write_table(table, folder / f"part-{number:03d}.parquet", **options)


def dataset_of(found: FileRows) -> Dataset:
    files = LocalFiles(Found(found.folder, found.manifest, rows=found))
    return Dataset(files, found.manifest, rows=found)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    names=st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=6, unique=True),
    counts=st.lists(st.integers(0, 12), min_size=1, max_size=3).filter(any),
    group_rows=st.integers(1, 5),
    codec=st.sampled_from(["none", "snappy", "gzip", "zstd", "lz4", "brotli"]),
    nulls=st.booleans(),
    options=st.fixed_dictionaries(
        {
            "use_dictionary": st.booleans(),
            "data_page_version": st.sampled_from(["1.0", "2.0"]),
            "write_page_index": st.booleans(),
            "write_statistics": st.booleans(),
        }
    ),
)
def test_rows_are_those_that_pyarrow_reads(
    data: st.DataObject,
    names: list[str],
    counts: list[int],
    group_rows: int,
    codec: str,
    nulls: bool,
    options: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("files")
    tables = []
    for count in counts:
        columns = {}
        for name in names:
            kind, values = VALUES[name]
            can_lack = nulls and options["write_statistics"]
            drawn = data.draw(
                st.lists(st.none() | values if can_lack else values, min_size=count, max_size=count)
            )
            columns[name] = pa.array(drawn, kind)
        tables.append(pa.table(columns))
    write(folder, tables, row_group_size=group_rows, compression=codec, **options)
    read = [pq.read_table(file) for file in sorted(folder.iterdir())]
    with open_dataset(folder) as dataset:
        assert len(dataset) == sum(counts)
        assert rows_of(dataset) == expected_of(read)
    store = MemoryStore(fresh_url())
    put_folder(folder, store)
    chosen = names[:2]
    with open_dataset(f"{store.url}/*.parquet", columns=chosen) as dataset:
        assert rows_of(dataset) == expected_of(
            [table.select([n for n in names if n in chosen]) for table in read]
        )
    one_by_one = dataset_of(find_rows(str(folder), shard_bytes=1))
    assert one_by_one.manifest.shard_samples.max() <= group_rows
    assert rows_of(one_by_one) == expected_of(read)


def table_of(rows: int, first: int = 0) -> pa.Table:
    numbers = np.arange(first, first + rows)
    ids = pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(numbers, 4).astype(np.uint16)), 4)
    return pa.table({"id": numbers, "text": [f"text {n}" for n in numbers], "input_ids": ids})


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Read]:
    """The reads of memory stores, in order."""
    found: list[Read] = []
    opened = MemoryStore.open

    def noted(
        self: MemoryStore, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None
    ) -> Any:
        found.append(Read(key, start, stop, version))
        return opened(self, key, start, stop, version=version)

    monkeypatch.setattr(MemoryStore, "open", noted)
    return found


def test_only_wanted_columns_are_read_and_one_request_reads_a_footer(
    tmp_path: Path, reads: list[Read]
) -> None:
    noise = np.random.default_rng(5)
    tables = [
        pa.table(
            {
                "a": noise.integers(0, 1 << 60, 4000),
                "waste": [noise.bytes(400) for _ in range(4000)],
                "b": noise.integers(0, 1 << 60, 4000),
            }
        )
        for _ in range(3)
    ]
    write(tmp_path, tables, row_group_size=1000, compression="none", use_dictionary=False)
    store = MemoryStore(fresh_url())
    put_folder(tmp_path, store)
    with open_dataset(f"{store.url}/*.parquet", columns=["b", "a"]) as dataset:
        footers = len(reads)
        assert footers == 3
        assert all(read.start > 0 for read in reads)
        for row in (0, 5999, 11_999):
            number, place = divmod(row, 4000)
            assert dataset[row] == {name: tables[number][name][place].as_py() for name in ("a", "b")}
    read = sum(read.stop - read.start for read in reads[footers:] if read.stop is not None)
    wanted = 2 * 8 * 12_000
    assert wanted <= read <= 1.1 * wanted


def test_a_second_start_reads_no_footer(tmp_path: Path, reads: list[Read]) -> None:
    write(tmp_path / "in", [table_of(50, 50 * n) for n in range(4)])
    store = MemoryStore(fresh_url())
    put_folder(tmp_path / "in", store)
    options = CacheOptions(folder=tmp_path / "cache")
    fingerprints = []
    for expected in (4, 0):
        reads.clear()
        with open_dataset(f"{store.url}/*.parquet", cache=options) as dataset:
            fingerprints.append(dataset.fingerprint)
            assert len(dataset) == 200
        assert len(reads) == expected
    kept = sorted((tmp_path / "cache" / "shardkit-cache-1" / "rows").glob("[0-9a-f]*[0-9a-f]"))
    assert len(kept) == 4
    for file in kept:
        file.write_bytes(b"damaged" + file.read_bytes()[7:])
    store.put("part-003.parquet", (tmp_path / "in" / "part-000.parquet").read_bytes())
    reads.clear()
    with open_dataset(f"{store.url}/*.parquet", cache=options) as dataset:
        assert dataset.fingerprint not in fingerprints
    assert len(reads) == 4
    assert fingerprints[0] == fingerprints[1]


def test_large_footers_take_two_requests(tmp_path: Path, reads: list[Read]) -> None:
    columns = {f"column {n}": pa.array(np.arange(40)) for n in range(60)}
    write(tmp_path, [pa.table(columns)], row_group_size=2)
    store = MemoryStore(fresh_url())
    put_folder(tmp_path, store)
    with open_dataset(store.url) as dataset:
        assert dataset[39]["column 7"] == 39
    footers = [read for read in reads if read.key.endswith(".parquet")][:2]
    assert footers[1].stop == footers[0].start


def test_the_fingerprint_is_that_of_copies_and_not_of_other_data(tmp_path: Path) -> None:
    def fingerprint(where: Path | str, **options: Any) -> str:
        with open_dataset(where, **options) as dataset:
            return dataset.fingerprint

    write(tmp_path / "a", [table_of(50), table_of(50, 50)])
    store = MemoryStore(fresh_url())
    put_folder(tmp_path / "a", store)
    first = fingerprint(tmp_path / "a")
    assert first == fingerprint(store.url) == fingerprint(f"{tmp_path}/a/*.parquet")
    os.utime(tmp_path / "a" / "part-000.parquet", (1, 1))
    assert fingerprint(tmp_path / "a") == first
    others = [fingerprint(tmp_path / "a", columns=["text"]), fingerprint(tmp_path / "a", columns=["id"])]
    assert fingerprint(tmp_path / "a", columns=["text", "id"]) == fingerprint(
        tmp_path / "a", columns=["id", "text"]
    )
    write(tmp_path / "a", [table_of(50), table_of(50, 51)])
    others.append(fingerprint(tmp_path / "a"))
    assert len({first, *others}) == 4


def test_a_file_that_is_replaced_while_it_is_open_is_noticed(tmp_path: Path) -> None:
    write(tmp_path / "a", [table_of(50), table_of(50, 50)])
    store = MemoryStore(fresh_url())
    put_folder(tmp_path / "a", store)
    local, remote = open_dataset(tmp_path / "a"), open_dataset(store.url)
    assert local[0]["id"] == remote[0]["id"] == 0
    pq.write_table(table_of(50, 90), tmp_path / "new")
    os.utime(tmp_path / "new", (1, 1))
    (tmp_path / "new").rename(tmp_path / "a" / "part-001.parquet")
    store.put("part-001.parquet", (tmp_path / "a" / "part-001.parquet").read_bytes())
    with pytest.raises(ShardError, match=r"part-001.parquet: was replaced after its dataset was opened"):
        local[99]
    with pytest.raises(ObjectChangedError):
        remote[99]


def test_files_are_found_as_writers_leave_them(tmp_path: Path) -> None:
    for number, name in enumerate(["lang=de/x-0.parquet", "lang=en/x-1.parquet"]):
        (tmp_path / name).parent.mkdir(parents=True)
        pq.write_table(table_of(3, 3 * number), tmp_path / name)
    for name in ("_metadata", "_common_metadata", "_temporary/0.parquet", ".hidden/a.parquet", ".x.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"not Parquet")
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / "README.md").touch()
    store = MemoryStore(fresh_url())
    put_folder(tmp_path, store)
    for place in (tmp_path, store.url, f"{tmp_path}/*/*.parquet", f"{store.url}/**/*.parquet"):
        with open_dataset(place) as dataset:
            assert [row["id"] for row in dataset] == list(range(6))
    spark = tmp_path / "spark.parquet"
    write(spark, [table_of(5)])
    put_folder(tmp_path, store)
    for place in (spark, f"{store.url}/spark.parquet"):
        with open_dataset(place) as dataset:
            assert len(dataset) == 5
    literal = tmp_path / "a[1].parquet"
    pq.write_table(table_of(2), literal)
    with open_dataset(literal) as dataset:
        assert len(dataset) == 2
    with pytest.raises(ShardError, match="holds no Parquet, Arrow or JSON lines files"):
        open_dataset(tmp_path / "missing.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ShardError, match=r"holds no dataset: .*\*.parquet"):
        open_dataset(tmp_path / "empty")


def test_brace_lists_and_lists_of_paths_are_read_in_their_order(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"d{number}").mkdir()
        pq.write_table(table_of(2, 2 * number), tmp_path / f"d{number}" / f"x{number}.parquet")
    store = MemoryStore(fresh_url())
    put_folder(tmp_path, store)
    fingerprints = []
    for place in (str(tmp_path), store.url):
        paths = [f"{place}/d2/x2.parquet", f"{place}/d0/*.parquet"]
        with open_dataset(paths) as dataset:
            assert [row["id"] for row in dataset] == [4, 5, 0, 1]
            fingerprints.append(dataset.fingerprint)
        with open_dataset(f"{place}/d{{0..1}}/x*.parquet") as dataset:
            assert [row["id"] for row in dataset] == [0, 1, 2, 3]
        with pytest.raises(ShardError, match=r"repeats .*x0.parquet, which an earlier path names"):
            open_dataset([*paths, f"{place}/d0/x0.parquet"])
        with pytest.raises(ShardError, match=r"x9.parquet: holds no Parquet, Arrow or JSON lines files"):
            open_dataset([*paths, f"{place}/d0/x9.parquet"])
    assert fingerprints[0] == fingerprints[1]
    with pytest.raises(ShardError, match="is local but others are remote"):
        open_dataset([f"{store.url}/d0/x0.parquet", f"{tmp_path}/d0/x0.parquet"])
    with pytest.raises(ShardError, match="are in different stores"):
        open_dataset([f"{store.url}/d0/x0.parquet", f"{fresh_url()}/d0/x0.parquet"])


def test_processes_that_start_together_read_each_footer_once(tmp_path: Path, reads: list[Read]) -> None:
    write(tmp_path / "in", [table_of(50, 50 * n) for n in range(4)])
    store = MemoryStore(fresh_url())
    put_folder(tmp_path / "in", store)
    found: list[str] = []

    def start() -> None:
        with open_dataset(f"{store.url}/*.parquet", cache=CacheOptions(folder=tmp_path / "cache")) as dataset:
            found.append(dataset.fingerprint)

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 6
    assert len(set(found)) == 1
    assert sorted(read.key for read in reads) == [f"part-{n:03d}.parquet" for n in range(4)]


def test_windows_of_decoded_rows_fit_in_memory() -> None:
    def sizes(decoded_bytes: int, shards: int = 1000) -> tuple[int, int]:
        samples = np.full(shards, 100)
        return StreamSizes("", "", samples, 0, True, decoded_bytes=decoded_bytes).shuffle_sizes(None, None)

    lanes, usual = sizes(0)
    assert sizes(1000 << 10) == (lanes, usual)  # a mebibyte in all
    spanned = sizes(1000 * (64 << 20))[1] * lanes / 100  # of 64 MiB each
    assert 2 * lanes <= spanned <= max(2 * lanes, 17)
    assert sizes(1000 << 40)[1] == 2 * 100
    assert sizes(3 << 40, 3) == (1, 200)


def test_splits_are_not_mixed(tmp_path: Path) -> None:
    for name in ("data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pq.write_table(table_of(3), tmp_path / name)
    with pytest.raises(ShardError, match=r"files of several splits \(train and test\): name one"):
        open_dataset(tmp_path)
    with open_dataset(f"{tmp_path}/data/train-*.parquet") as dataset:
        assert len(dataset) == 3


def test_constant_lists_are_rows_of_tokens(tmp_path: Path) -> None:
    ids = [[n, n + 1, n + 2] for n in range(90)]
    write(tmp_path / "a", [pa.table({"input_ids": ids, "attention_mask": [[1] * 3] * 90, "n": range(90)})])
    with open_dataset(tmp_path / "a", sequence_length=3) as dataset:
        assert (dataset.sequence_length, dataset.token_column) == (3, "input_ids")
        rows = dataset.shard(0).fixed_rows("input_ids")
        assert rows is not None
        assert rows.tolist() == ids
        assert not rows.flags.writeable
        assert "each of 3 tokens (int64)" in str(dataset)
    with open_dataset(tmp_path / "a") as dataset:
        assert dataset.sequence_length is None
    with open_dataset(tmp_path / "a", sequence_length=4) as dataset:
        problem = r"part-000.parquet: row 0: column 'input_ids' has 3 values, not sequence_length=4"
        with pytest.raises(ShardError, match=problem):
            dataset[1]
    with pytest.raises(ShardError, match="token_dtype and per_file apply to flat files"):
        open_dataset(tmp_path / "a", sequence_length=3, token_dtype="uint16")
    write(tmp_path / "b", [table_of(5)])
    with pytest.raises(ShardError, match="has rows of 4, not of 5 tokens"):
        open_dataset(tmp_path / "b", sequence_length=5)
    with pytest.raises(ShardError, match="has no column of lists of integers"):
        open_dataset(tmp_path / "b", sequence_length=5, columns=["id"])


def test_tensors_and_hugging_face_images_are_decoded(tmp_path: Path) -> None:
    from PIL import Image

    def png(color: int) -> bytes:
        file = io.BytesIO()
        Image.new("RGB", (3, 2), (color, 0, 0)).save(file, "PNG")
        return file.getvalue()

    images = [{"bytes": png(n), "path": f"{n}.png"} for n in range(3)] + [None, {"bytes": None, "path": "x"}]
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    kind = pa.fixed_shape_tensor(pa.int32(), (2, 2))
    tensor = pa.ExtensionArray.from_storage(
        kind, pa.array([[n] * 4 for n in range(5)], pa.list_(pa.int32(), 4))
    )
    table = pa.table({"image": pa.array(images, struct), "tensor": tensor, "label": range(5)})
    features = {"info": {"features": {"image": {"_type": "Image"}, "label": {"_type": "Value"}}}}
    table = table.replace_schema_metadata({"huggingface": json.dumps(features)})
    write(tmp_path, [table])
    with open_dataset(tmp_path) as dataset:
        row: Any = dataset[2]
        assert row["image"].getpixel((0, 0)) == (2, 0, 0)
        assert row["tensor"].tolist() == [[2, 2], [2, 2]]
        assert dataset[3]["image"] is None
        with pytest.raises(ShardError, match=r"row 4: column 'image' names the image file 'x'"):
            dataset[4]
    for decode in (False, "basic"):
        with open_dataset(tmp_path, decode=decode) as dataset:
            assert dataset[2]["image"] == images[2]
    with open_dataset(tmp_path, decode="rgb8", columns=["image"]) as dataset:
        row = dataset[1]
        assert row["image"].shape == (2, 3, 3)


GOOD = io.BytesIO()
pq.write_table(table_of(200), GOOD, row_group_size=50)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "is not a Parquet file"),
        (b"PAR1", "is not a Parquet file"),
        (b"<html>404</html>", "is not a Parquet file"),
        (GOOD.getvalue()[:-5], "is not a Parquet file, or its writer did not finish"),
        (GOOD.getvalue()[:-4] + b"PARE", "is encrypted"),
        (GOOD.getvalue()[:-8] + b"\xff\xff\xff\x7fPAR1", "states a footer of 2,147,483,647 bytes"),
        (b"PAR1" + GOOD.getvalue()[2000:], "is not inside the file"),
        (b"PAR1" + bytes(100) + b"\x64\0\0\0PAR1", "has a footer that cannot be read"),
    ],
)
def test_hostile_files_are_refused_with_what_is_wrong(data: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(ShardError, match=rf"a.parquet: .*{problem}"):
        open_dataset(tmp_path / "a.parquet")


def test_damage_is_an_error_with_file_and_row_groups(tmp_path: Path) -> None:
    data = bytearray(GOOD.getvalue())
    data[4:40] = os.urandom(36)
    (tmp_path / "a.parquet").write_bytes(data)
    with (
        open_dataset(tmp_path / "a.parquet") as dataset,
        pytest.raises(
            ShardError, match=r"a.parquet: row groups 0 to 3 cannot be read: .*; fetch the file again"
        ),
    ):
        dataset[0]


def test_no_damage_ends_the_process_or_leaves_shardkits_errors(tmp_path: Path) -> None:
    draw = random.Random(3)
    read = 0
    for _ in range(400):
        (tmp_path / "a.parquet").write_bytes(mutate(GOOD.getvalue(), draw))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with open_dataset(tmp_path / "a.parquet") as dataset:
                    rows_of(dataset)
            read += 1
        except ShardkitError:
            pass
    assert read < 400


def test_unlike_files_are_both_named(tmp_path: Path) -> None:
    write(tmp_path / "types", [pa.table({"a": [1]}), pa.table({"a": ["x"]})])
    with pytest.raises(
        ShardError, match=r"part-001.parquet: column 'a' is str, but int64 in .*part-000.parquet"
    ):
        open_dataset(tmp_path / "types")
    write(tmp_path / "less", [pa.table({"a": [1], "b": [2]}), pa.table({"a": [3]})])
    with pytest.raises(
        ShardError, match=r"part-001.parquet: has no column 'b', which .*part-000.parquet has"
    ):
        open_dataset(tmp_path / "less")
    with open_dataset(tmp_path / "less", columns=["a"]) as dataset:
        assert [row["a"] for row in dataset] == [1, 3]
    write(tmp_path / "more", [pa.table({"a": [1]}), pa.table({"b": [4], "a": [3]})])
    with pytest.raises(
        ShardError, match=r"part-001.parquet: has a column 'b', which .*part-000.parquet lacks"
    ):
        open_dataset(tmp_path / "more")
    with pytest.raises(ValueError, match="has no column 'c'; it has a"):
        open_dataset(tmp_path / "more", columns=["c"])
    with pytest.raises(ValueError, match="columns must be a list"):
        open_dataset(tmp_path / "more", columns="a")
    write(
        tmp_path / "order",
        [pa.table({"a": [1], "b": [2]}), pa.table({"b": [4], "a": pa.nulls(1, pa.int64())})],
    )
    with open_dataset(tmp_path / "order") as dataset:
        assert rows_of(dataset) == [{"a": 1, "b": 2}, {"a": None, "b": 4}]
    write(tmp_path / "twice", [pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])])
    with pytest.raises(ShardError, match="two columns are called 'a'"):
        open_dataset(tmp_path / "twice")
    write(tmp_path / "empty", [table_of(0), table_of(0)])
    with pytest.raises(ShardError, match="has no rows"):
        open_dataset(tmp_path / "empty")


def test_a_dataset_of_text_stays_what_it_is(tmp_path: Path) -> None:
    write(tmp_path, [table_of(5)])
    size = (tmp_path / "part-000.parquet").stat().st_size
    listed = {"name": "part-000.parquet", "documents": 5, "bytes": size, "hashes": {}}
    index = {"version": 1, "format": "parquet", "columns": {"text": "str"}, "files": [listed]}
    (tmp_path / "documents.json").write_text(json.dumps(index))
    with open_dataset(tmp_path) as dataset:
        assert dataset.manifest.format == "parquet"
    with open_dataset(tmp_path / "part-000.parquet") as dataset:
        assert dataset.manifest.format == "row_files"


def test_a_dataset_is_used_as_any_other(tmp_path: Path) -> None:
    write(tmp_path, [table_of(40), table_of(41, 40)])
    with open_dataset(tmp_path) as dataset:
        assert dataset[3:6].to_numpy()["id"].tolist() == [3, 4, 5]
        assert dataset[-1]["id"] == 80
        assert dataset[10:12].to_arrow(["text"])["text"].to_pylist() == ["text 10", "text 11"]
        name = dataset.manifest.shards[1].raw.basename
        [piece] = pieces_of(name)
        whole = (tmp_path / "part-001.parquet").read_bytes()
        assert dataset.store.get(name) == whole[piece.start : piece.stop]
        copy = pickle.loads(pickle.dumps(dataset))
        assert rows_of(copy) == rows_of(dataset)
        assert sum(dataset.shard(n).resident_bytes for n in range(2)) > 81 * 16  # type: ignore[attr-defined]


def test_columns_select_what_rows_of_other_formats_have(tmp_path: Path) -> None:
    with mds.MdsWriter(tmp_path / "mds", columns={"a": "int", "b": "str"}) as writer:
        for number in range(3):
            writer.write({"a": number, "b": str(number)})
    with open_dataset(tmp_path / "mds", columns=["b"]) as dataset:
        assert rows_of(dataset) == [{"b": "0"}, {"b": "1"}, {"b": "2"}]
        assert dataset[1] == {"b": "1"}
        assert dataset[:].to_numpy().keys() == {"b"}
        assert dataset[:].to_numpy(["a"])["a"].tolist() == [0, 1, 2]


def test_a_footer_of_some_row_groups_reads_these(tmp_path: Path) -> None:
    data = GOOD.getvalue()
    size = footer_bytes("x", data[-100:], len(data))
    footer = ParquetFooter("x", data[-8 - size : -8], len(data))
    assert [group.rows for group in footer.groups] == [50] * 4
    metadata = pq.read_metadata(as_file(footer.of_groups(1, 3)))
    read = pq.ParquetFile(io.BytesIO(data), metadata=metadata).read_row_groups([0, 1])
    assert read["id"].to_pylist() == list(range(50, 150))
