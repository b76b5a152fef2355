"""A loader over flat token files gives the rows of their converted copy, and resumes exactly."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkit.cli.main import main
from shardkit.loaders import Stream, StreamingLoader
from shardkit.loaders.config import grouped
from shardkit.storage.memory import MemoryStore
from support.remote_harness import QUICK, fresh_url, put_folder
from support.resume import assert_equal, assert_exact_resume, run
from support.s3_moto import S3Server, s3_server

COUNTS = [170, 3, 64, 200]  # rows of 8 in four files, with rows across their ends
ROWS = sum(COUNTS) // 8
OPTIONS: dict[str, Any] = {"sequence_length": 8, "token_dtype": "uint16", "batch_size": 4, **QUICK}

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*fill no row of.*:RuntimeWarning", "ignore:cache_bytes of:RuntimeWarning"
)


@pytest.fixture(scope="module")
def tokens() -> Any:
    return np.random.default_rng(7).integers(0, 60_000, sum(COUNTS)).astype("<u2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokens: Any) -> Path:
    made = tmp_path_factory.mktemp("files")
    for number, part in enumerate(np.split(tokens, np.cumsum(COUNTS)[:-1])):
        part.tofile(made / f"part-{number}.npy")
    return made


@pytest.fixture(scope="module")
def url(folder: Path) -> str:
    store = MemoryStore(fresh_url())
    put_folder(folder, store)
    return store.url


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as started:
        yield started


def test_an_epoch_delivers_each_row_of_the_files_once(folder: Path, tokens: Any) -> None:
    expected = tokens[: ROWS * 8].reshape(-1, 8)
    with StreamingLoader(folder, tail="pad", **grouped({"tensors": "numpy", **OPTIONS})) as loader:
        seen = []
        for batch in loader:
            real = batch["sample_id"] >= 0
            assert np.array_equal(batch["tokens"][real], expected[batch["sample_id"][real]])
            seen += batch["sample_id"][real].tolist()
    assert sorted(seen) == list(range(ROWS))


@pytest.mark.parametrize("cache", ["memory", "folder", "tiny"])
def test_remote_files_give_what_local_ones_give(cache: str, folder: Path, url: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {} if cache == "memory" else {"cache_dir": tmp_path}
    if cache == "tiny":
        arguments["cache_bytes"] = 600  # of 874 in all, 400 the largest
    with (
        StreamingLoader(folder, **grouped(OPTIONS)) as local,
        StreamingLoader(url, **grouped({**OPTIONS, **arguments})) as remote,
    ):
        assert remote.dataset.fingerprint == local.dataset.fingerprint
        steps = run(local, 30)
        for got, expected in zip(run(remote, 30), steps, strict=True):
            assert_equal(got[0], expected[0], "remote")
            assert got[1] == expected[1]


def test_a_run_over_files_resumes_exactly_local_and_remote(folder: Path, url: str) -> None:
    assert_exact_resume(lambda: StreamingLoader(folder, **grouped(OPTIONS)), steps=16, tail_steps=4)
    assert_exact_resume(lambda: StreamingLoader(url, **grouped(OPTIONS)), steps=4, tail_steps=3)


def test_a_run_over_files_continues_on_another_number_of_ranks(folder: Path) -> None:
    def make(rank: int, ranks: int) -> StreamingLoader:
        placed = {"rank": rank, "world_size": ranks, "batch_size": 4 // ranks, "tensors": "numpy"}
        return StreamingLoader(folder, **grouped(OPTIONS | placed))

    with make(0, 1) as loader:
        reference = run(loader, 12)
    state = reference[4][1]
    found = []
    for rank in range(2):
        with make(rank, 2) as loader:
            loader.load_state_dict(state)
            found.append([batch for batch, _ in run(loader, 7)])
    for step, (expected, _) in enumerate(reference[5:]):
        both = np.concatenate([found[rank][step]["tokens"] for rank in range(2)])
        assert np.array_equal(both, expected["tokens"])


@pytest.mark.extended
def test_files_on_s3_are_read_by_ranges_and_cached(server: S3Server, folder: Path, tmp_path: Path) -> None:
    bucket = server.new_bucket()
    for file in folder.iterdir():
        server.client().upload_file(str(file), bucket, f"tokens/{file.name}")
    ranges: list[str] = []
    lock = threading.Lock()

    def watch(environ: Any, start_response: Any, app: Any) -> Any:
        if environ["REQUEST_METHOD"] == "GET" and environ["PATH_INFO"].endswith(".npy"):
            with lock:
                ranges.append(environ.get("HTTP_RANGE", "all of it"))
        return app(environ, start_response)

    server.intercept = watch
    try:
        options = OPTIONS | {"cache_dir": tmp_path / "cache"}
        for again in (False, True):
            with (
                StreamingLoader(folder, **grouped(OPTIONS)) as local,
                StreamingLoader(f"s3://{bucket}/tokens", **grouped(options)) as remote,
            ):
                opened = len(ranges)
                for got, expected in zip(run(remote, 14), run(local, 14), strict=True):
                    assert_equal(got[0], expected[0], "from S3")
                row: Any = remote.dataset[21]["tokens"]
                copy: Any = pickle.loads(pickle.dumps(remote.dataset))
                assert np.array_equal(copy[21]["tokens"], row)
            assert "all of it" not in ranges
            assert again == (len(ranges) == opened), "a second run reads the shards from the cache"
    finally:
        server.intercept = None


def test_a_mixture_has_streams_of_files_and_of_other_datasets(folder: Path, url: str, tmp_path: Path) -> None:
    from shardkit.formats import mds

    rows = np.arange(240, dtype=np.uint16).reshape(-1, 8)
    mds.write_index(tmp_path, [mds.write_rows_shard(tmp_path, "shard.00000.mds", rows)])
    streams = [Stream(folder, weight=1), Stream(url, weight=2, name="b"), Stream(tmp_path, weight=1)]
    with StreamingLoader(streams, **grouped(OPTIONS)) as loader:
        batches = run(loader, 8)
    assert sum(np.asarray(batch["stream_id"]).size for batch, _ in batches) == 32
    with pytest.raises(ValueError, match="token_dtype and per_file apply to flat files"):
        StreamingLoader(tmp_path, batch_size=1, token_dtype="uint16")


def test_documents_in_files_are_found_by_the_id_that_ends_them(tmp_path: Path) -> None:
    np.array([5, 6, 0, 7, 0, 8, 9, 4] * 4, "<u2").tofile(tmp_path / "a.bin")
    options: dict[str, Any] = OPTIONS | {"eos_id": 0, "position_ids": True, "batch_size": 1}
    with StreamingLoader(tmp_path / "a.bin", **grouped(options)) as loader:
        batch = next(iter(loader))
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    with pytest.raises(ValueError, match="give eos_id=…"):
        StreamingLoader(tmp_path / "a.bin", **grouped(options | {"eos_id": None}))


def test_an_audit_proves_that_each_row_of_the_files_comes_once(folder: Path) -> None:
    options = ["--loader", "sequence_length=8", "--loader", "token_dtype=uint16", "--resume-at", "3"]
    assert main(["audit", str(folder), *options]) == 0
