"""Inputs in a real S3 server behind a network that fails: all documents once, or an error that says where."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from servers.bucket import RgwBucket
from servers.fault_proxy import FaultProxy, Rule
from shardkit.errors import BuildError
from shardkit.storage import StorageOptions
from shardkit.storage.s3 import S3Store
from shardkit.writers.inputs.readers import read_split
from shardkit.writers.inputs.scan import scan_inputs
from shardkit.writers.recipe.recipe import Recipe
from shardkit.writers.rows.ledger import Count, Ledger, Quarantine
from support.read_inputs import recipe

pytest_plugins = ["support.s3_rgw"]
pytestmark = pytest.mark.extended  # moto is the quick server; the real one is for CI

DOCUMENTS = 32_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files of 24 MiB and more as stored: read-ahead does not hold them whole."""
    folder = tmp_path_factory.mktemp("data")
    numbers = random.Random(3)
    texts = [numbers.randbytes(800).hex() for _ in range(DOCUMENTS)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.jsonl.zst").write_bytes(zstandard.compress(lines))
    pq.write_table(pa.table({"text": texts}), folder / "c.parquet", row_group_size=500)
    return folder


def digest(built: Recipe, storage: StorageOptions | None = None) -> tuple[str, Count]:
    """What all documents and their ids hash to, and how many were read."""
    ledger, state = Ledger(), hashlib.sha256()
    for split in scan_inputs(built, storage):
        for batch in read_split(split, built.inputs[0], ledger, Quarantine()):
            for name in ("document_id", "text"):
                state.update(b"\n".join(str(value).encode() for value in batch.column(name).to_pylist()))
    return state.hexdigest(), ledger.read


def put(bucket: RgwBucket, folder: Path) -> None:
    store = S3Store(bucket.url, StorageOptions(endpoint_url=bucket.endpoint_url))
    for file in folder.iterdir():
        store.put(f"data/{file.name}", file)


def test_documents_are_those_of_the_local_files_whatever_the_network_does(
    rgw_bucket: RgwBucket, rgw_proxy: FaultProxy, folder: Path
) -> None:
    put(rgw_bucket, folder)
    local = digest(recipe(folder, "*"))
    assert local[1].documents == 3 * DOCUMENTS
    rules = [
        Rule(fault="status", probability=0.1),
        Rule(fault="reset", method="GET", after_bytes=300_000, probability=0.3),
        Rule(fault="truncate", method="GET", after_bytes=700_000, probability=0.3),
        Rule(fault="hang", method="GET", after_bytes=100_000, probability=0.1, hang_seconds=3),
    ]
    rgw_proxy.set_rules(*rules)
    storage = StorageOptions(endpoint_url=rgw_proxy.endpoint_url, read_timeout_seconds=0.7)
    remote = recipe(folder, {"path": f"{rgw_bucket.url}/data/*", "base": f"{rgw_bucket.url}/data"})
    assert digest(remote, storage) == local
    assert sum(rgw_proxy.hits()) >= 5, "the network did not fail"


@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl.zst", "c.parquet"])
def test_an_object_that_is_replaced_while_it_is_read_stops_the_build(
    rgw_bucket: RgwBucket, folder: Path, name: str
) -> None:
    put(rgw_bucket, folder)
    built = recipe(folder, f"{rgw_bucket.url}/data/{name}")
    storage = StorageOptions(endpoint_url=rgw_bucket.endpoint_url)
    (split,) = scan_inputs(built, storage)
    batches = read_split(split, built.inputs[0], Ledger(), Quarantine(max_bad_fraction=1.0))
    next(batches)
    S3Store(rgw_bucket.url, storage).put(f"data/{name}", (folder / name).read_bytes()[::-1])
    with pytest.raises(BuildError, match=rf"data/{name}: cannot be read: the object changed"):
        list(batches)
