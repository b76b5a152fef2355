"""Builds with work folder and output in one bucket: the server copies what is published."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from servers.bucket import RgwBucket
from servers.fault_proxy import FaultProxy, Rule
from shardkit.errors import BuildError
from shardkit.publish.contents import MARKER_NAME
from shardkit.storage.resilient import connect
from shardkit.writers import build
from support.small_build import make_corpus

pytest_plugins = ["support.s3_rgw"]
COPY = {"x-amz-copy-source": "."}
NO_COPY = {"x-amz-copy-source": "^$"}
SHARD = r"/out/shard"
SENT = Rule(fault="status", status=400, method="PUT", path=SHARD, header=NO_COPY)
READ = Rule(fault="status", status=400, method="GET", path=r"/work/pack/.*/part-")
CHANGES = ("output.shard_bytes=4096",)
WAIT_SECONDS = 60.0


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"), 60)


@pytest.fixture(scope="module")
def local(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of the dataset that a build on this machine makes."""
    return local_build(corpus, tmp_path_factory.mktemp("local"))


def local_build(corpus: Path, folder: Path, *changes: str) -> dict[str, bytes]:
    places = [f"work={folder / 'work'}", f"output.path={folder / 'out'}"]
    made = build(corpus, overrides=[*CHANGES, *changes, *places], workers=1, progress=False).output
    assert isinstance(made, Path)
    return {path.relative_to(made).as_posix(): path.read_bytes() for path in made.rglob("*.*")}


@pytest.fixture
def places(
    rgw_bucket: RgwBucket, rgw_proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Settings of a build in the bucket, behind the proxy."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", rgw_proxy.endpoint_url)
    return [f"work={rgw_bucket.url}/work", f"output.path={rgw_bucket.url}/out", f"scratch={tmp_path / 's'}"]


def remote_build(corpus: Path, places: list[str], *changes: str, replace: bool = False) -> None:
    build(corpus, overrides=[*CHANGES, *changes, *places], workers=1, progress=False, replace=replace)


def output_in(bucket: RgwBucket) -> Mapping[str, bytes]:
    store = connect(f"{bucket.url}/out")
    return {info.key: store.get(info.key) for info in store.list()}


def test_the_server_copies_all_shards_and_no_byte_of_them_is_read_or_sent_to_publish_them(
    corpus: Path, local: dict[str, bytes], places: list[str], rgw_bucket: RgwBucket, rgw_proxy: FaultProxy
) -> None:
    rgw_proxy.set_rules(SENT, READ)
    remote_build(corpus, places)
    assert rgw_proxy.hits() == [0, 0]
    rgw_proxy.set_rules()
    assert output_in(rgw_bucket) == local
    assert sum(name.startswith("shard.") for name in local) > 2


@pytest.mark.extended
@pytest.mark.parametrize("status", [501, 403])
def test_a_server_that_refuses_copies_gets_the_bytes(
    corpus: Path,
    local: dict[str, bytes],
    places: list[str],
    rgw_bucket: RgwBucket,
    rgw_proxy: FaultProxy,
    status: int,
) -> None:
    code = "NotImplemented" if status == 501 else "AccessDenied"
    rgw_proxy.set_rules(Rule(fault="status", status=status, code=code, method="PUT", header=COPY))
    remote_build(corpus, places)
    assert rgw_proxy.hits()[0] > 2
    rgw_proxy.set_rules()
    assert output_in(rgw_bucket) == local


@pytest.mark.extended
def test_a_damaged_file_of_the_work_folder_is_not_copied_and_is_made_anew(
    corpus: Path, local: dict[str, bytes], places: list[str], rgw_bucket: RgwBucket, rgw_proxy: FaultProxy
) -> None:
    remote_build(corpus, places)
    work, output = connect(f"{rgw_bucket.url}/work"), connect(f"{rgw_bucket.url}/out")
    name = next(info.key for info in work.list("pack/") if "/part-" in info.key)
    data = bytearray(work.get(name))
    data[len(data) // 2] ^= 1
    work.put(name, bytes(data))
    for info in output.list():
        output.delete(info.key)
    with pytest.raises(BuildError, match=r"run the (same command|build) again"):
        remote_build(corpus, places)
    assert "index.json" not in output_in(rgw_bucket)
    remote_build(corpus, places)
    assert output_in(rgw_bucket) == local


@pytest.mark.extended
def test_a_build_killed_while_the_server_copies_leaves_the_claim_and_the_next_one_completes_it(
    corpus: Path,
    local: dict[str, bytes],
    places: list[str],
    rgw_bucket: RgwBucket,
    rgw_proxy: FaultProxy,
    tmp_path: Path,
) -> None:
    other = local_build(corpus, tmp_path / "other", "seed=9")
    remote_build(corpus, places, "seed=9")
    assert output_in(rgw_bucket) == other
    with pytest.raises(BuildError, match="--replace"):
        remote_build(corpus, places)
    assert output_in(rgw_bucket) == other  # until the new one is complete in the work folder
    rgw_proxy.set_rules(Rule(fault="hang", after_bytes=None, method="PUT", header=COPY, skip=1))
    settings = [word for change in (*CHANGES, *places) for word in ("--set", change)]
    command = ["build", str(corpus), "--quiet", "--workers", "1", "--replace", *settings]
    program = "import sys; from shardkit.cli.main import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen([sys.executable, "-c", program, *command], start_new_session=True)
    end = time.monotonic() + WAIT_SECONDS
    while not rgw_proxy.hits()[0] and time.monotonic() < end and process.poll() is None:
        time.sleep(0.05)
    hits = rgw_proxy.hits()[0]
    process.send_signal(signal.SIGKILL)
    process.wait(WAIT_SECONDS)
    assert hits > 0
    rgw_proxy.set_rules()
    found = output_in(rgw_bucket)
    assert MARKER_NAME in found
    assert "index.json" not in found
    forced = [*places, "scratch=" + str(tmp_path / "again")]
    time.sleep(1.0)
    remote_build(corpus, forced, replace=True)
    assert output_in(rgw_bucket) == local
