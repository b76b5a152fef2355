"""A secret that opens a store is in no file, log, error or state that a build, an upload or a run leaves."""

from __future__ import annotations

import json
import logging
import os
import secrets
from pathlib import Path

import pytest

import shardkit as sk
from servers.bucket import RgwBucket, s3_client
from servers.rgw import RgwServer
from shardkit.cli.main import main
from shardkit.loaders import StreamingLoader
from shardkit.storage import StorageOptions, StoreError
from support.small_build import RECIPE, make_corpus

pytest_plugins = ["support.s3_rgw"]


@pytest.mark.extended
def test_a_build_an_upload_and_a_run_leave_the_secret_nowhere(
    rgw: RgwServer,
    rgw_bucket: RgwBucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG, logger="shardkit")
    monkeypatch.setenv("AWS_ENDPOINT_URL", rgw_bucket.endpoint_url)
    recipe = make_corpus(
        tmp_path / "corpus", 100, RECIPE.replace("path: out", f"path: {rgw_bucket.url}/built")
    )
    assert main(["build", str(recipe), "--workers", "1", "--timings", str(tmp_path / "times.json")]) == 0
    cache, logs = tmp_path / "cache", tmp_path / "logs"
    with StreamingLoader(
        f"{rgw_bucket.url}/built",
        batch_size=2,
        cache_dir=cache,
        usage_log=logs,
    ) as loader:
        next(iter(loader))
        told = [json.dumps(loader.state_dict()), repr(loader), repr(loader.stats()), str(loader.stats())]
    assert main(["download", f"{rgw_bucket.url}/built", str(tmp_path / "copy")]) == 0
    wrong = secrets.token_hex(16)
    with monkeypatch.context() as changed:
        changed.setenv("AWS_SECRET_ACCESS_KEY", wrong)
        with pytest.raises(StoreError) as refused:
            sk.open(f"{rgw_bucket.url}/built", storage=StorageOptions(retry_seconds=1.0))
        told += [str(refused.value), repr(refused.value), repr(StorageOptions())]
    told += [*capfd.readouterr(), caplog.text]

    client = s3_client(rgw_bucket.endpoint_url)
    names = [entry["Key"] for entry in client.list_objects_v2(Bucket=rgw_bucket.name)["Contents"]]
    stored = {name: client.get_object(Bucket=rgw_bucket.name, Key=name)["Body"].read() for name in names}
    stored |= {str(file): file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    client.close()
    assert {"built/dataset.json", "built/report.html"} <= stored.keys()
    assert any(str(logs) in name for name in stored)
    assert any(str(cache) in name for name in stored)
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == rgw.secret_key
    for secret in (rgw.secret_key, wrong):
        assert not [name for name, content in stored.items() if secret.encode() in content]
        assert not [text for text in told if secret in text]
