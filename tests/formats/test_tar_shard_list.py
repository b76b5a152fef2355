"""shards.json carries the manifest both ways, for us and for wids, and does not lead out of its folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shardkit.datasets.dataset import open_dataset
from shardkit.errors import ShardError
from shardkit.formats import tar
from shardkit.formats.tar.shard_list import describe_tar, fixed_size
from shardkit.manifest import Column, FileInfo, Manifest, ShardInfo
from shardkit.storage import open_store
from support.remote_harness import fresh_url

SHARDS = [
    ShardInfo(
        FileInfo("shard-00000.tar", 10_240, {"md5": "0" * 32, "xxh64": "1" * 16}),
        3,
        (Column("tokens.npy", "ndarray:uint16:8", 16), Column("json", "json")),
    ),
    describe_tar("sub/b.tar.gz", stored_bytes=99, raw_bytes=20_480, samples=2, hashes={"xxh64": "2" * 16}),
]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    tar.write_shard_list(tmp_path, SHARDS)
    manifest = tar.read_shard_list(tmp_path)
    assert manifest == Manifest("tar", tuple(SHARDS))
    assert tar.read_shard_list(tmp_path / "shards.json") == manifest
    assert manifest.fingerprint == Manifest("tar", SHARDS).fingerprint
    assert [p.name for p in tmp_path.iterdir()] == ["shards.json"]


def test_the_list_holds_what_wids_asks_for(tmp_path: Path) -> None:
    tar.write_shard_list(tmp_path, SHARDS)
    listing = json.loads((tmp_path / "shards.json").read_text())
    assert (listing["__kind__"], listing["wids_version"]) == ("wids-shard-index-v1", 1)
    assert listing["name"] == f"shardkit-{Manifest('tar', SHARDS).fingerprint}"
    wanted = ("url", "nsamples", "filesize", "md5sum")
    assert [listing["shardlist"][0][k] for k in wanted] == ["shard-00000.tar", 3, 10_240, "0" * 32]
    assert "md5sum" not in listing["shardlist"][1]


def test_lists_made_by_wids_index_are_read(tmp_path: Path) -> None:
    info = tar.write_rows_shard(
        tmp_path, "a.tar", np.ones((4, 8), dtype=np.uint16), key_start=0, hashes=["md5"]
    )
    entry = {"url": "a.tar", "md5sum": info.raw.hashes["md5"], "nsamples": 4, "filesize": info.raw.bytes}
    (tmp_path / "train.json").write_text(json.dumps({"wids_version": 1, "shardlist": [entry, {**entry}]}))
    manifest = tar.read_shard_list(tmp_path / "train.json")
    assert manifest.samples == 8
    assert manifest.shards[0].raw == info.raw
    assert len(tar.open_shard(tmp_path, manifest.shards[0], verify=True)) == 4


GOOD = {"url": "a.tar", "nsamples": 1, "filesize": 10_240}
BAD: dict[str, object] = {
    "no object": [],
    "no list": {"shardlist": {}},
    "counts of another tool": {"000000": {"num_samples": 47}},
    "a dataset elsewhere": {"shardlist": [GOOD], "datasets": [{"source_url": "other.json"}]},
    "datasets that are no list": {"shardlist": [GOOD], "datasets": 7},
    "a base outside": {"shardlist": [GOOD], "base": "../x"},
    "a base that is no text": {"shardlist": [GOOD], "base": ["s3://b"]},
    "another version": {"shardlist": [GOOD], "wids_version": 2},
    "an entry that is no object": {"shardlist": ["a.tar"]},
    "a name outside": {"shardlist": [{**GOOD, "url": "../a.tar"}]},
    "an absolute name": {"shardlist": [{**GOOD, "url": "/etc/a.tar"}]},
    "a remote name": {"shardlist": [{**GOOD, "url": "https://example.org/a.tar"}]},
    "a name that is no tar's": {"shardlist": [{**GOOD, "url": "a.mds"}]},
    "no name": {"shardlist": [{"nsamples": 1}]},
    "no count": {"shardlist": [{"url": "a.tar"}]},
    "a negative count": {"shardlist": [{**GOOD, "nsamples": -1}]},
    "a count that is true": {"shardlist": [{**GOOD, "nsamples": True}]},
    "a count that is no integer": {"shardlist": [{**GOOD, "nsamples": 1.5}]},
    "a huge size": {"shardlist": [{**GOOD, "filesize": 1 << 60}]},
    "hashes that are no table": {"shardlist": [{**GOOD, "hashes": ["xxh64"]}]},
    "columns that are no strings": {"shardlist": [{**GOOD, "columns": {"a": 1}}]},
}


@pytest.mark.parametrize("name", BAD)
def test_unsound_lists_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "shards.json").write_text(json.dumps(BAD[name]))
    with pytest.raises(ShardError, match=r"shards\.json"):
        tar.read_shard_list(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\udcff"])
def test_lists_that_are_no_json_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "shards.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ShardError, match=r"shards\.json"):
        tar.read_shard_list(tmp_path)
    with pytest.raises(ShardError, match="cannot be read"):
        tar.read_shard_list(tmp_path / "other.json")


WHOLE = {
    "whole URLs": {"shardlist": [{**GOOD, "url": "{url}/a.tar"}, {**GOOD, "url": "{url}/b/c.tar"}]},
    "a base": {"shardlist": [GOOD, {**GOOD, "url": "b/c.tar"}], "base": "{url}/"},
    "datasets": {
        "shardlist": [],
        "datasets": [
            {"name": "x", "base": "{url}", "shardlist": [GOOD]},
            {"name": "y", "shardlist": [{**GOOD, "url": "{url}/b/c.tar"}]},
        ],
    },
}


@pytest.mark.parametrize("place", ["local", "remote"])
@pytest.mark.parametrize("name", WHOLE)
def test_lists_of_others_may_say_where_their_tars_are(tmp_path: Path, name: str, place: str) -> None:
    url, elsewhere = fresh_url(), fresh_url()
    text = json.dumps(WHOLE[name]).replace("{url}", url)
    for key, start in (("a.tar", 0), ("b/c.tar", 5)):
        rows = np.arange(start, start + 1, dtype=np.uint16).reshape(1, 1)
        tar.write_rows_shard(tmp_path, "made.tar", rows, key_start=start)
        open_store(url).put(key, tmp_path / "made.tar")
    list_store = open_store(elsewhere if place == "remote" else tmp_path)
    for file in ("train.json", "shards.json"):
        list_store.put(file, text.encode())
    for path in (list_store.url, f"{list_store.url}/train.json"):
        with open_dataset(path) as dataset:
            assert dataset.location == url
            assert [info.stored.basename for info in dataset.manifest.shards] == ["a.tar", "b/c.tar"]
            assert [int(str(sample["__key__"])) for sample in dataset] == [0, 5]


@pytest.mark.parametrize("other", ["a.tar", "s3://bucket/a.tar", "memory://another/a.tar"])
def test_lists_of_several_places_are_refused(tmp_path: Path, other: str) -> None:
    urls = ["memory://one/a.tar", other]
    (tmp_path / "x.json").write_text(json.dumps({"shardlist": [{**GOOD, "url": url} for url in urls]}))
    with pytest.raises(ShardError, match=r"x\.json: lists tars of different places, memory://one/a\.tar and"):
        open_dataset(tmp_path / "x.json")


def test_row_sizes_follow_from_encodings() -> None:
    encodings = [
        "ndarray:uint16:8",
        "ndarray:float32:2,3",
        "ndarray:int64:",
        "ndarray:int64",
        "str",
        "ndarray:x:2",
    ]
    assert [fixed_size(e) for e in encodings] == [16, 24, 8, None, None, None]
    with pytest.raises(ValueError, match="not named like a tar"):
        describe_tar("a.zip")
