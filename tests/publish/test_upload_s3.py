"""Uploads to S3 servers: killed processes, the real server's conditions and parts, and the whole command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from servers.bucket import RgwBucket, s3_client
from shardkit import open_dataset
from shardkit.cli.main import main
from shardkit.datasets.verify import verify
from shardkit.formats import mds
from shardkit.publish import download, upload
from shardkit.publish.contents import MARKER_NAME
from shardkit.storage.s3 import S3Store
from shardkit.storage.s3_upload import PART_BYTES
from shardkit.storage.store import StorageOptions
from support.killing_server import run_and_kill
from support.s3_moto import S3Server, s3_server
from support.small_build import tree
from support.small_dataset import files_of, make_dataset

pytest_plugins = ["support.s3_rgw"]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture
def bucket(server: S3Server) -> str:
    server.intercept = None
    return server.new_bucket()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "out"
    make_dataset(folder)
    return folder


def bytes_in(client: Any, bucket: str, prefix: str = "") -> dict[str, bytes]:
    """{key: content}, seen by boto3."""
    keys = [
        entry["Key"] for entry in client.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])
    ]
    return {
        key.removeprefix(prefix): client.get_object(Bucket=bucket, Key=key)["Body"].read() for key in keys
    }


def upload_command(source: Path, url: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "shardkit", "upload", str(source), url, "--quiet", *options]


def start_upload(source: Path, url: str, *options: str) -> subprocess.Popen[bytes]:
    command = upload_command(source, url, *options)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def puts_of(server: S3Server, bucket: str) -> list[str]:
    return [line.split(f"/{bucket}/", 1)[1] for line in server.requests if line.startswith(f"PUT /{bucket}/")]


def test_the_command_sends_fetches_and_tells(
    server: S3Server, bucket: str, made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    url = f"s3://{bucket}/some/prefix"
    storage = ["--endpoint-url", server.endpoint_url, "--storage", "region=us-east-1"]
    assert main(["upload", str(made), url, "--dry-run", *storage]) == 0
    out, err = capfd.readouterr()
    assert "would be sent: shard.00004.mds" in out
    assert err == ""
    assert bytes_in(server.client(), bucket) == {}
    assert main(["upload", str(made), url, "--verify", "--json", *storage]) == 0
    report = json.loads(capfd.readouterr().out)
    assert (report["files"], len(report["sent"]), report["verified"]) == (8, 8, True)
    assert bytes_in(server.client(), bucket, "some/prefix/") == files_of(made)
    server.requests.clear()
    assert main(["upload", str(made), url, *storage]) == 0
    assert "is up to date" in capfd.readouterr().out
    assert not puts_of(server, bucket)
    heads = [line for line in server.requests if line.startswith("HEAD")]
    assert len(heads) <= 8 + 5, "one for each file, and a few for marker, card and indexes"
    assert main(["download", url, str(tmp_path / "copy"), *storage]) == 0
    assert tree(tmp_path / "copy") == tree(made)
    assert verify(tmp_path / "copy").ok


def test_a_new_target_is_not_asked_about_every_object(server: S3Server, bucket: str, made: Path) -> None:
    server.requests.clear()
    upload(made, f"s3://{bucket}/new", progress=False)
    heads = [line for line in server.requests if line.startswith("HEAD") and line.endswith(".mds")]
    assert heads == []


def test_a_bucket_that_is_not_there_is_one_clear_error(
    server: S3Server, made: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["upload", str(made), "s3://no-such-bucket/x", "--quiet"]) == 1
    err = capfd.readouterr().err
    assert err.startswith("shardkit: error: s3://no-such-bucket/x")
    assert "bucket" in err
    assert err.count("\n") == 1


# The marker, eight files, the index: killed when a request arrives, and when its answer is about to leave.
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("fatal", "late"),
    [
        (6, False),
        (10, True),
        *(pytest.param(*point, marks=pytest.mark.extended) for point in ((1, False), (10, False), (2, True))),
    ],
    ids=str,
)
def test_a_process_that_is_killed_leaves_no_false_index_and_the_same_command_sends_the_rest(
    server: S3Server, bucket: str, made: Path, fatal: int, late: bool
) -> None:
    expected = files_of(made)
    run_and_kill(server, upload_command(made, f"s3://{bucket}/data", "--threads", "2"), fatal, late=late)
    before = bytes_in(server.client(), bucket, "data/")
    assert ("index.json" in before) == (late and fatal == 10)
    assert len(before) == (fatal if late else fatal - 1)
    server.requests.clear()
    assert main(["upload", str(made), f"s3://{bucket}/data", "--quiet"]) == 0
    assert bytes_in(server.client(), bucket, "data/") == expected
    missing = expected.keys() - before.keys()
    marker = {MARKER_NAME} - before.keys()
    assert sorted(puts_of(server, bucket)) == sorted(f"data/{name}" for name in missing | marker)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of more than one part each, and small ones."""
    folder = tmp_path_factory.mktemp("large")
    rows = np.arange((2 * PART_BYTES + 5000) // 2, dtype=np.uint32)[: 4096 * 2048].reshape(-1, 2048)
    shards = [
        mds.write_rows_shard(folder, "shard.00000.mds", rows.astype(np.uint32), hashes=["xxh64"]),
        mds.write_rows_shard(folder, "shard.00001.mds", rows[::-1].copy(), hashes=["xxh64"]),
        mds.write_rows_shard(folder, "shard.00002.mds", rows[:3].copy(), hashes=["xxh64"]),
    ]
    assert shards[0].stored.bytes > PART_BYTES
    mds.write_index(folder, shards)
    return folder


@pytest.mark.extended
def test_a_real_server_keeps_large_shards_and_their_hashes(
    rgw_bucket: RgwBucket, large: Path, tmp_path: Path
) -> None:
    storage = StorageOptions(endpoint_url=rgw_bucket.endpoint_url)
    url = f"{rgw_bucket.url}/large"
    assert upload(large, url, storage=storage, verify=True, progress=False).verified
    assert upload(large, url, storage=storage, progress=False).up_to_date
    with open_dataset(large) as dataset:
        assert (
            download(url, tmp_path / "copy", storage=storage, progress=False).fingerprint
            == dataset.fingerprint
        )
    assert tree(tmp_path / "copy") == tree(large)


@pytest.mark.extended
def test_a_killed_upload_of_large_shards_to_a_real_server_goes_on(rgw_bucket: RgwBucket, large: Path) -> None:
    storage = StorageOptions(endpoint_url=rgw_bucket.endpoint_url)
    url = f"{rgw_bucket.url}/killed"
    client = s3_client(rgw_bucket.endpoint_url)
    os.environ["AWS_ENDPOINT_URL"] = rgw_bucket.endpoint_url
    try:
        process = start_upload(large, url, "--threads", "1")
    finally:
        del os.environ["AWS_ENDPOINT_URL"]
    store = S3Store(url, storage)
    while process.poll() is None and not any(info.key.endswith(".mds") for info in store.list()):
        pass  # each look takes the server a while
    process.kill()
    process.communicate(timeout=60)
    before = {info.key for info in store.list()} - {MARKER_NAME, "index.json"}
    assert before
    report = upload(large, url, storage=storage, progress=False)
    assert set(report.sent) == {f"shard.0000{n}.mds" for n in range(3)} - before
    assert bytes_in(client, rgw_bucket.name, "killed/") == files_of(large)


@pytest.mark.extended
def test_of_two_processes_with_different_datasets_one_wins_on_a_real_server(
    rgw_bucket: RgwBucket, made: Path, tmp_path: Path
) -> None:
    make_dataset(tmp_path / "other", shards=7, first=900)
    url = f"{rgw_bucket.url}/contested"
    options = ["--endpoint-url", rgw_bucket.endpoint_url]
    both = [start_upload(folder, url, *options) for folder in (made, tmp_path / "other")]
    errors = [process.communicate(timeout=120)[1].decode() for process in both]
    assert sorted(process.returncode for process in both) == [0, 1], errors
    winner = [made, tmp_path / "other"][[process.returncode for process in both].index(0)]
    client = s3_client(rgw_bucket.endpoint_url)
    assert bytes_in(client, rgw_bucket.name, "contested/") == files_of(winner)


@pytest.mark.usefixtures("default_sigint")
def test_ctrl_c_ends_an_upload_at_once_even_if_the_server_hangs(
    server: S3Server, bucket: str, made: Path
) -> None:
    hanging, release = threading.Event(), threading.Event()

    def hang(
        environ: dict[str, Any], start_response: Callable[..., Any], app: Callable[..., Iterable[bytes]]
    ) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] == "PUT" and environ["PATH_INFO"].endswith(".mds"):
            hanging.set()
            release.wait(300)
        return app(environ, start_response)

    server.intercept = hang
    process = start_upload(made, f"s3://{bucket}/data")
    try:
        assert hanging.wait(120)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=100)  # the store itself would try for two minutes
    finally:
        release.set()
        server.intercept = None
        process.kill()
        process.wait(60)
    assert process.returncode == 130
    assert err.decode() == "shardkit: interrupted; run the same command again to continue\n"
