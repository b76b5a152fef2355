"""A loader over row files delivers each row once, reads only wanted columns, and resumes exactly."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader

from shardkit.cli.main import main
from shardkit.errors import ShardkitError
from shardkit.formats import mds
from shardkit.loaders import Stream, StreamingLoader
from shardkit.loaders.config import grouped
from shardkit.loaders.streaming_dataset import StreamingDataset
from shardkit.storage.memory import MemoryStore
from support.hub_environment import hub_server
from support.remote_harness import QUICK, fresh_url, put_folder
from support.resume import assert_equal, assert_exact_resume, run, run_ranks
from support.row_files import KINDS, write_tables
from support.s3_moto import S3Server, s3_server

GROUPS = [[40, 40, 13], [7], [40, 1, 30]]  # rows of the row groups of three files
ROWS = sum(map(sum, GROUPS))
WASTE_BYTES = 200_000  # per row group; of these columns nothing may be read
OPTIONS: dict[str, Any] = {"batch_size": 6, **QUICK}

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*rows cannot be verified:RuntimeWarning", "ignore:cache_bytes of:RuntimeWarning"
)


def group_of(first: int, rows: int) -> pa.Table:
    noise = np.random.default_rng(first)
    numbers = np.arange(first, first + rows)
    ids = (numbers[:, None] * 7 + np.arange(8)).astype(np.uint16)
    return pa.table(
        {
            "number": numbers,
            "text": [f"text {n}" for n in numbers],
            "waste": [noise.bytes(WASTE_BYTES // rows) for _ in numbers],
            "blob": [noise.bytes((3 << 20) // rows) for _ in numbers],
            "input_ids": pa.FixedSizeListArray.from_arrays(pa.array(ids.ravel()), 8),
            "lengths": pa.array([list(range(n % 5)) for n in numbers], pa.list_(pa.int32())),
        }
    )


def write_folder(folder: Path, kind: str) -> Path:
    first = 0
    for number, groups in enumerate(GROUPS):
        tables = []
        for rows in groups:
            tables.append(group_of(first, rows))
            first += rows
        if kind in ("jsonl", "zst"):  # which have no bytes
            tables = [table.drop_columns(["waste", "blob"]) for table in tables]
        write_tables(folder, f"part-{number}", kind, tables)
    return folder


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("parquet"), "parquet")


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("files"), request.param)


@pytest.fixture(scope="module")
def url(folder: Path) -> str:
    store = MemoryStore(fresh_url())
    put_folder(folder, store)
    return store.url


@pytest.fixture(autouse=True)
def indexes(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Indexes of JSON lines are kept in the cache folder of the user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "home"))


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as started:
        yield started


@pytest.mark.parametrize("columns", [None, ["input_ids"], ["text", "number"], ["lengths"]])
def test_an_epoch_delivers_each_row_of_the_files_once(folder: Path, columns: list[str] | None) -> None:
    seen: list[int] = []
    length = 8 if columns is None or "input_ids" in columns else None
    options = grouped(OPTIONS | {"sequence_length": length})
    with StreamingLoader(folder, tail="pad", columns=columns, **options) as loader:
        names = set(loader.dataset.manifest.shards[0].columns)
        for batch in loader:
            ids = batch["sample_id"].tolist()
            for place, number in enumerate(ids):
                if number < 0:
                    continue
                seen.append(number)
                if columns in (None, ["input_ids"]):
                    assert batch["input_ids"][place].tolist() == [(number * 7 + k) % 65_536 for k in range(8)]
                if columns in (None, ["text", "number"]):
                    assert batch["text"][place] == f"text {number}"
                    assert int(batch["number"][place]) == number
                if columns in (None, ["lengths"]):
                    assert batch["lengths"][place].tolist() == list(range(number % 5))
    assert sorted(seen) == list(range(ROWS))
    assert columns is None or {column.name for column in names} == set(columns)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (["blob", "input_ids"], [40, 40, 13, 7, 40, 1, 30]),  # row groups of 3 MB
        (["input_ids"], [93, 7, 71]),  # small ones, joined
    ],
)
def test_the_order_is_that_of_mds_shards_of_the_same_sizes(
    parquet: Path, tmp_path: Path, columns: list[str], expected: list[int]
) -> None:
    with StreamingLoader(parquet, columns=columns, **grouped(OPTIONS)) as loader:
        sizes = loader.dataset.manifest.shard_samples.tolist()
        mine = [batch["sample_id"].tolist() for batch in loader]
    assert sizes == expected
    rows = np.arange(ROWS * 8, dtype=np.uint16).reshape(-1, 8)
    edges = np.cumsum([0, *sizes]).tolist()
    infos = [
        mds.write_rows_shard(tmp_path, f"shard.{n:05d}.mds", rows[low:high])
        for n, (low, high) in enumerate(pairwise(edges))
    ]
    mds.write_index(tmp_path, infos)
    with StreamingLoader(tmp_path, **grouped(OPTIONS)) as loader:
        assert mine == [batch["sample_id"].tolist() for batch in loader]


@pytest.mark.parametrize("cache", ["memory", "tiny"])
def test_remote_files_give_what_local_ones_give(cache: str, parquet: Path, tmp_path: Path) -> None:
    store = MemoryStore(fresh_url())
    put_folder(parquet, store)
    arguments: dict[str, Any] = {} if cache == "memory" else {"cache_dir": tmp_path}
    if cache == "tiny":
        arguments["cache_bytes"] = 9 << 20  # of 21 MB in all, 6 MB the largest
    compare(parquet, f"{store.url}/*.parquet", arguments)
    if cache == "tiny":
        kept = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
        assert kept <= 9 << 20


def compare(folder: Path, url: str, arguments: dict[str, Any]) -> None:
    with (
        StreamingLoader(folder, **grouped(OPTIONS)) as local,
        StreamingLoader(url, **grouped({**OPTIONS, **arguments})) as remote,
    ):
        assert remote.dataset.fingerprint == local.dataset.fingerprint
        steps = run(local, 40)
        for got, expected in zip(run(remote, 40), steps, strict=True):
            assert_equal(got[0], expected[0], "remote")
            assert got[1] == expected[1]
        if arguments:
            assert remote.stats().cache is not None


def test_a_second_run_over_remote_files_fetches_none(folder: Path, url: str, tmp_path: Path) -> None:
    compare(folder, url, {"cache_dir": tmp_path})
    with StreamingLoader(url, **grouped({**OPTIONS, "cache_dir": tmp_path})) as again:
        run(again, 20)
        counts = again.dataset.shards.counters()  # type: ignore[union-attr]
    assert counts["fetched_shards"] == 0


def test_a_run_over_files_resumes_exactly_local_and_remote(folder: Path, url: str) -> None:
    options = grouped(OPTIONS | {"columns": ["input_ids", "text"]})
    assert_exact_resume(lambda: StreamingLoader(folder, **options), steps=16, tail_steps=4)
    assert_exact_resume(lambda: StreamingLoader(url, **options), steps=6, tail_steps=3)


@pytest.mark.sampled(2)
def test_a_run_continues_on_another_number_of_ranks_and_at_another_place(folder: Path, url: str) -> None:
    def maker(place: Path | str) -> Any:
        def make(rank: int, ranks: int) -> StreamingLoader:
            placed: dict[str, Any] = {"rank": rank, "world_size": ranks, "batch_size": 6 // ranks}
            placed |= {"columns": ["input_ids"], "sequence_length": 8}
            return StreamingLoader(place, **grouped(OPTIONS | placed))

        return make

    reference = run_ranks(maker(folder), 1, 20)
    for ranks in (1, 2, 3):
        for stop in (0, 4, 13):
            rest = run_ranks(maker(url), ranks, 19 - stop, reference[stop][1])
            assert rest == reference[stop + 1 :]


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_of_a_dataloader_read_the_same_rows(folder: Path, workers: int) -> None:
    with StreamingLoader(folder, **grouped(OPTIONS | {"columns": ["number"]})) as loader:
        expected = [batch["number"].tolist() for batch in loader]
    dataset = StreamingDataset(folder, **grouped(OPTIONS | {"columns": ["number"]}))
    read = DataLoader(dataset, batch_size=None, num_workers=workers)
    assert [batch["number"].tolist() for batch in read] == expected


def test_a_state_of_other_columns_or_files_is_refused(folder: Path, tmp_path: Path) -> None:
    with StreamingLoader(folder, columns=["text"], **grouped(OPTIONS)) as loader:
        state = run(loader, 2)[-1][1]
    with (
        StreamingLoader(folder, columns=["number"], **grouped(OPTIONS)) as loader,
        pytest.raises(ShardkitError, match="dataset of stream 0: saved"),
    ):
        loader.load_state_dict(state)


def test_a_mixture_has_streams_of_parquet_and_of_other_datasets(
    folder: Path, url: str, tmp_path: Path
) -> None:
    rows = np.arange(240, dtype=np.uint16).reshape(-1, 8)
    columns = {"input_ids": "ndarray:uint16:8"}
    with mds.MdsWriter(tmp_path / "mds", columns=columns) as writer:
        for row in rows:
            writer.write({"input_ids": row})
    streams = [Stream(folder, weight=1), Stream(url, weight=2, name="b"), Stream(tmp_path / "mds", weight=1)]
    options = OPTIONS | {"columns": ["input_ids"], "batch_size": 8, "sequence_length": 8}
    with StreamingLoader(streams, **grouped(options)) as loader:
        batches = [batch for batch, _ in run(loader, 8)]
    assert torch.bincount(torch.cat([batch["stream_id"] for batch in batches])).tolist() == [16, 32, 16]


def test_files_on_s3_take_one_footer_request_each_and_only_wanted_bytes(
    server: S3Server, parquet: Path, tmp_path: Path
) -> None:
    bucket = server.new_bucket()
    for file in parquet.iterdir():
        server.client().upload_file(str(file), bucket, f"data/{file.name}")
    ranges: list[tuple[int, int]] = []
    lock = threading.Lock()

    def watch(environ: Any, start_response: Any, app: Any) -> Any:
        if environ["REQUEST_METHOD"] == "GET" and environ["PATH_INFO"].endswith(".parquet"):
            start, _, stop = environ["HTTP_RANGE"].removeprefix("bytes=").partition("-")
            with lock:
                ranges.append((int(start), int(stop) + 1))
        return app(environ, start_response)

    server.intercept = watch
    try:
        options = grouped(OPTIONS | {"cache_dir": tmp_path / "cache", "columns": ["number", "lengths"]})
        for again in (False, True):
            ranges.clear()
            with (
                StreamingLoader(parquet, columns=["number", "lengths"], **grouped(OPTIONS)) as local,
                StreamingLoader(f"s3://{bucket}/data/*.parquet", **options) as remote,
            ):
                footers = len(ranges)
                assert footers == (0 if again else 3)
                for got, expected in zip(run(remote, 26), run(local, 26), strict=True):
                    assert_equal(got[0], expected[0], "from S3")
            values = ranges[footers:]
            assert bool(values) != again, "a second run reads the shards from the cache"
            assert sum(stop - start for start, stop in values) < 20_000  # of 24 MB
    finally:
        server.intercept = None


def test_an_audit_proves_that_each_row_of_the_files_comes_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(folder), "--resume-at", "3", "--loader", "columns=number,text", "--json"]) == 0
    shards = [shard["shard"] for shard in json.loads(capsys.readouterr().out)["shards"]]
    expected = [f"rows 0 to {sum(rows) - 1}" for rows in GROUPS]
    assert [name.partition(" ")[2] for name in shards] == expected


@pytest.mark.sampled(2)
def test_files_on_the_hub_are_read_at_one_commit(folder: Path, tmp_path: Path) -> None:
    files = {f"data/train-{file.name}": file.read_bytes() for file in sorted(folder.iterdir())}
    suffix = "".join(Path(min(files)).suffixes)
    with hub_server() as hub:
        name = hub.new_repository()
        hub.commit(name, {**files, "README.md": b"# data"})
        options = grouped(OPTIONS | {"columns": ["input_ids", "text"], "cache_dir": tmp_path / "cache"})
        for place in (f"hf://datasets/{name}", f"hf://datasets/{name}/data/train-*{suffix}"):
            with StreamingLoader(place, **options) as loader:
                ids = [number for batch in loader for number in batch["sample_id"].tolist()]
                assert len(loader.dataset) == ROWS
            assert set(ids) == set(range(ROWS))
        hub.commit(name, {f"data/test-0{suffix}": files[f"data/train-part-1{suffix}"]})
        with pytest.raises(ShardkitError, match=r"files of several splits \(train and test\)"):
            StreamingLoader(f"hf://datasets/{name}", **options)
