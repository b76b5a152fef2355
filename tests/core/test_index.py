from __future__ import annotations

from pathlib import Path

import pytest

from shardkit.errors import ShardError
from shardkit.files import publish_bytes
from shardkit.manifest import FileInfo, Manifest, ShardInfo, checked_basename


def shard(name: str, samples: int, digest: str = "aa", bytes: int = 10) -> ShardInfo:
    return ShardInfo(FileInfo(name, bytes, {"xxh64": digest}), samples)


def test_sample_ids_are_running_numbers_over_the_shards() -> None:
    manifest = Manifest("mds", [shard("a", 3), shard("b", 0), shard("c", 4)])
    assert manifest.shard_starts.tolist() == [0, 3, 3, 7]
    assert manifest.samples == 7


def test_an_empty_dataset_has_no_samples() -> None:
    assert Manifest("tar", []).samples == 0


def test_the_fingerprint_changes_with_every_fact_and_with_the_order() -> None:
    one, two = shard("a", 3), shard("b", 4)
    variants = [
        [one, two],
        [two, one],
        [one],
        [shard("a", 4), two],
        [shard("a", 3, digest="ab"), two],
        [shard("a", 3, bytes=11), two],
        [shard("c", 3), two],
    ]
    prints = [Manifest("mds", shards).fingerprint for shards in variants]
    assert len(set(prints)) == len(variants)
    assert Manifest("mds", [one, two]).fingerprint == prints[0]


def test_the_fingerprint_of_a_dataset_is_pinned() -> None:
    assert Manifest("mds", [shard("shard.00000.mds", 3)]).fingerprint == "941d5026ee817a1ccf6262e217b069cb"


def test_compression_does_not_change_what_a_dataset_is() -> None:
    plain = shard("shard.00000.mds", 3)
    zipped = ShardInfo(
        plain.raw, 3, zip=FileInfo("shard.00000.mds.zstd", 5, {"xxh64": "ff"}), compression="zstd"
    )
    assert Manifest("mds", [plain]).fingerprint == Manifest("mds", [zipped]).fingerprint


@pytest.mark.parametrize("name", ["shard.00000.mds", "part_00/shard.00000.mds", "a b.tar", "ünï.mds", "..a"])
def test_names_that_stay_in_the_folder_are_taken(name: str) -> None:
    assert checked_basename(name, "index.json") == name


@pytest.mark.parametrize(
    "name",
    [
        *("../x", "/etc/passwd", "a/../../x", "a\\b", "c:/x", "./x", ".", "a/."),
        *("", "a\0b", "a\nb", "x" * 2000, None, 7, ["a"]),
    ],
)
def test_names_that_could_leave_the_folder_are_refused(name: object) -> None:
    with pytest.raises(ShardError, match=r"index\.json"):
        checked_basename(name, "index.json")


def test_publishing_replaces_a_file_whole_and_leaves_nothing_behind(tmp_path: Path) -> None:
    publish_bytes(tmp_path / "index.json", b"one")
    publish_bytes(tmp_path / "index.json", b"two")
    assert (tmp_path / "index.json").read_bytes() == b"two"
    assert [p.name for p in tmp_path.iterdir()] == ["index.json"]
