"""Names of tars mean what webdataset and pathlib take them to mean; shards.json leads nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import braceexpand
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from webdataset.shardlists import expand_urls

from shardkit.datasets.dataset import open_dataset
from shardkit.errors import ShardError
from shardkit.formats import tar
from shardkit.formats.tar.find import expand
from shardkit.formats.tar.shard_list import (
    common_folder,
    describe_tar,
    expand_braces,
    fixed_folder,
    fixed_size,
    is_tar_name,
    matches,
    read_list,
    tar_compression,
)
from shardkit.manifest import Column, FileInfo, Manifest, ShardInfo
from shardkit.storage import StorageOptions, open_store
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
    manifest = open_dataset(tmp_path).manifest
    assert manifest == Manifest("tar", tuple(SHARDS))
    assert open_dataset(tmp_path / "shards.json").manifest == manifest
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
    manifest = open_dataset(tmp_path / "train.json").manifest
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
def test_unsound_lists_are_refused(name: str) -> None:
    with pytest.raises(ShardError, match=r"shards\.json"):
        tar.parse_shard_list("shards.json", json.dumps(BAD[name]).encode())


@pytest.mark.parametrize("text", [b"", b"{", b"[" * 100_000, b"\xff"])
def test_lists_that_are_no_json_are_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "shards.json").write_bytes(text)
    with pytest.raises(ShardError, match=r"shards\.json"):
        open_dataset(tmp_path)
    with pytest.raises(ShardError, match="cannot be read"):
        read_list(tmp_path / "other.json")


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
        with pytest.raises(ShardError, match=f"lists tars elsewhere, at {url}: .*--storage follow_urls=true"):
            open_dataset(path)
        with open_dataset(path, storage=StorageOptions(follow_urls=True)) as dataset:
            assert dataset.location == url
            assert [info.stored.basename for info in dataset.manifest.shards] == ["a.tar", "b/c.tar"]
            assert [int(str(sample["__key__"])) for sample in dataset] == [0, 5]


def test_a_list_in_a_bucket_may_name_other_folders_of_that_bucket(tmp_path: Path) -> None:
    bucket = fresh_url()
    tar.write_rows_shard(tmp_path, "made.tar", np.zeros((1, 1), np.uint16), key_start=0)
    open_store(bucket).put("tars/a.tar", tmp_path / "made.tar")
    listing = {"shardlist": [{**GOOD, "url": f"{bucket}/tars/a.tar"}]}
    open_store(bucket).put("lists/shards.json", json.dumps(listing).encode())
    with open_dataset(f"{bucket}/lists") as dataset:
        assert dataset.location == f"{bucket}/tars"


@pytest.mark.parametrize("other", ["a.tar", "s3://bucket/a.tar", "memory://another/a.tar"])
def test_lists_of_several_places_are_refused(tmp_path: Path, other: str) -> None:
    urls = ["memory://one/a.tar", other]
    (tmp_path / "x.json").write_text(json.dumps({"shardlist": [{**GOOD, "url": url} for url in urls]}))
    with pytest.raises(ShardError, match=r"x\.json: lists tars in different places, memory://one/a\.tar and"):
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


# Names.

LISTS = [
    "part-{000..012}.tar", "{a,b}{1..3}", "{10..1}", "{1..10..3}", "{a..e}", "{e..a..2}", "{a,{b,c}d,}x",
    "{01..3}", "{-01..02}", "{x}", "{1..-3}", "plain", "{-5..10..5}", "{a,b{1..2}}", "{}", "{{a,b}}",
    "{1..2}{x",
]  # fmt: skip


@pytest.mark.parametrize("text", LISTS)
def test_brace_lists_name_what_webdataset_takes_them_to_name(text: str) -> None:
    try:
        expected = list(braceexpand.braceexpand(text))
    except ValueError:
        with pytest.raises(ValueError, match="without its"):
            expand_braces(text)
        return
    assert expand_braces(text) == expected
    assert expand([f"{text}::s3://b/{text}"]) == expand_urls(f"{text}::s3://b/{text}")


@settings(max_examples=100, deadline=None)
@given(st.text("ab1.,{}-0", max_size=14))
def test_any_text_is_a_list_or_an_error(text: str) -> None:
    try:
        expected = list(braceexpand.braceexpand(text))
    except (ValueError, MemoryError):
        expected = []
    depths = [text[: at + 1].count("{") - text[: at + 1].count("}") for at in range(len(text))]
    if not expected or min(depths, default=0) < 0:  # webdataset takes "}{" for a name
        with pytest.raises(ValueError, match=r"without its"):
            expand_braces(text)
    elif len(expected) < 1000:
        assert expand_braces(text) == expected


@pytest.mark.parametrize(
    "text",
    ["{0..9999999999}", "{0..99999}{0..99999}", "{a,b}" * 40, "{" * 5000, "{" * 500 + "}" * 500, "}{"],
)
def test_lists_that_name_too_much_or_nothing_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardkit.formats.tar.shard_list.MAX_NAMES", 200_000)
    with pytest.raises(ValueError, match=r"more than|without its|too many braces"):
        expand_braces(text)


def test_patterns_match_what_pathlib_matches(tmp_path: Path) -> None:
    names = ["a.tar", "b.tar", "b[1].tar", "d/a.tar", "d/e/a.tar", "d/e/b.txt", "ab/a.tar"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for pattern in (
        "*.tar",
        "*/a.tar",
        "**/a.tar",
        "d/**/*",
        "?.tar",
        "[ab].tar",
        "b[[]1].tar",
        "**/*.t?[rt]",
        "x*",
    ):
        found = sorted(f.relative_to(tmp_path).as_posix() for f in tmp_path.glob(pattern) if f.is_file())
        assert sorted(name for name in names if matches(name, pattern)) == found, pattern


def test_the_folder_that_names_share_ends_before_the_first_pattern() -> None:
    assert fixed_folder("s3://b/p/a*/c.tar") == "s3://b/p"
    assert fixed_folder("s3://b/p/a.tar") == "s3://b/p"
    assert fixed_folder("a.tar") == fixed_folder("*/a.tar") == ""
    assert common_folder(["s3://b/p/x", "s3://b/p/y/z", "s3://b/p/x"]) == "s3://b/p"
    assert common_folder(["s3://b/part-1", "s3://b/part-2"]) == "s3://b"
    assert common_folder(["s3://a/p", "s3://b/p"]) == "s3:/"


def test_names_say_how_a_tar_is_stored() -> None:
    assert tar_compression("a/b-000.tar") == ("", "a/b-000.tar")
    assert tar_compression("a/b.TGZ") == ("gz", "a/b.tar")
    assert tar_compression("b.tar.gz") == ("gz", "b.tar")
    assert tar_compression("b.tar.zst") == ("zstd", "b.tar")
    assert tar_compression("b.tbz2") == ("bz2", "b.tar")
    for name in ("b.zip", "tar", ".tar", "a/.tar.gz", "b.tar.gz.tmp", "b.tar.tmp", "b.gz"):
        assert not is_tar_name(name)
