"""Indexes in the cache folder: one process of a node fetches them, however many open the dataset at once."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest

from shardkit.cache import CacheOptions
from shardkit.cache.indexes import NodeIndexes
from shardkit.cache.shards import SharedCache
from shardkit.datasets.locate import find_remote
from shardkit.errors import ShardError
from shardkit.formats.mds.index import TABLE_SHARDS
from shardkit.formats.mds.index import index_bytes as mds_index_bytes
from shardkit.manifest import Column, FileInfo, ShardInfo
from shardkit.storage.memory import MemoryStore
from support.json_trees import variants
from support.noted_store import NotedStore
from support.remote_harness import SOON_SECONDS, fresh_url, make_remote_kind, put_folder


def indexes(folder: Path, clock: list[float], *, trust_seconds: float = 60.0) -> NodeIndexes:
    return NodeIndexes(folder, trust_seconds=trust_seconds, wait_seconds=SOON_SECONDS, clock=lambda: clock[0])


def test_of_processes_that_open_at_once_one_asks_the_store(tmp_path: Path) -> None:
    store = NotedStore(make_remote_kind(tmp_path / "data", "mds"))
    found: list[str] = []

    def open_it() -> None:
        found.append(find_remote(store, indexes=indexes(tmp_path / "cache", [5.0])).manifest.fingerprint)

    threads = [threading.Thread(target=open_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_SECONDS)
    assert len(found) == 8
    assert len(set(found)) == 1
    keys = [read.key for read in store.reads]
    assert len(keys) == len(set(keys)) <= 3


def test_a_process_alone_and_one_that_comes_later_see_what_was_replaced(tmp_path: Path) -> None:
    store = MemoryStore(fresh_url())
    put_folder(make_remote_kind(tmp_path / "one", "mds"), store)
    clock = [5.0]
    first = find_remote(store, indexes=indexes(tmp_path, clock)).manifest.fingerprint
    put_folder(make_remote_kind(tmp_path / "two", "mds", samples=20), store)
    assert find_remote(store, indexes=indexes(tmp_path, clock)).manifest.fingerprint == first
    alone = find_remote(store, indexes=indexes(tmp_path, clock, trust_seconds=0.0)).manifest
    assert alone.samples == 20
    put_folder(make_remote_kind(tmp_path / "three", "mds", samples=30), store)
    clock[0] += 61
    assert find_remote(store, indexes=indexes(tmp_path, clock)).manifest.samples == 30


@pytest.mark.parametrize("call", ["mkdir", "open"])
def test_a_disk_without_room_keeps_no_index_and_the_dataset_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store = NotedStore(make_remote_kind(tmp_path / "data", "mds"))
    (tmp_path / "cache").mkdir()

    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    expected = find_remote(store).manifest
    store.reads.clear()
    monkeypatch.setattr(Path, call, full)
    assert find_remote(store, indexes=indexes(tmp_path / "cache", [5.0])).manifest == expected
    assert len({read.key for read in store.reads}) == len(store.reads), "fetched once"


def test_a_file_that_was_damaged_since_it_was_fetched_is_fetched_again(tmp_path: Path) -> None:
    store = NotedStore(make_remote_kind(tmp_path / "data", "mds"))
    clock = [5.0]
    first = find_remote(store, indexes=indexes(tmp_path, clock)).manifest.fingerprint
    asked = len(store.reads)
    assert find_remote(store, indexes=indexes(tmp_path, clock)).manifest.fingerprint == first
    assert len(store.reads) == asked
    [kept] = tmp_path.rglob("shardkit-cache-1/indexes/*/index.json")
    text = kept.read_bytes()
    for damaged in (text[:-1], text.replace(b"shard.00001", b"shard.00002"), b"\xff" + text[1:]):
        kept.write_bytes(damaged)
        assert find_remote(store, indexes=indexes(tmp_path, clock)).manifest.fingerprint == first
        assert kept.read_bytes() == text


def test_the_leaders_error_is_its_own_and_the_next_one_leads(tmp_path: Path) -> None:
    calls: list[int] = []

    def fail() -> Mapping[str, bytes | None]:
        calls.append(1)
        raise RuntimeError("the store is down")

    node = indexes(tmp_path, [5.0])
    with pytest.raises(RuntimeError):
        node.objects("s3://b", ["index.json"], fail)
    for fetch in (lambda: {"index.json": b"text"}, fail):
        found = node.objects("s3://b", ["index.json"], fetch)["index.json"]
        assert isinstance(found, Path)
        assert found.read_bytes() == b"text"
    assert node.objects("s3://c", ["index.json"], lambda: {"index.json": None}) == {"index.json": None}
    assert calls == [1]


def test_an_index_that_came_damaged_is_fetched_again_by_the_next_process(tmp_path: Path) -> None:
    store = MemoryStore(fresh_url())
    put_folder(make_remote_kind(tmp_path / "data", "mds"), store)
    text = store.get("index.json")
    store.put("index.json", b"\xff" + text[1:])  # as if a byte had changed on its way
    with pytest.raises(ShardError, match="not JSON"):
        find_remote(store, indexes=indexes(tmp_path, [5.0]))
    store.put("index.json", text)
    assert find_remote(store, indexes=indexes(tmp_path, [5.0])).manifest.samples > 0


def test_a_large_index_is_parsed_once_and_loaded_from_its_table_after_that(tmp_path: Path) -> None:
    columns = (Column("tokens", "ndarray:uint16:8", 16),)
    shards = [
        ShardInfo(FileInfo(f"shard.{n:05}.mds", 1000, {"xxh64": f"{n:016x}"}), 50, columns)
        for n in range(TABLE_SHARDS)
    ]
    text = mds_index_bytes(shards)
    node = indexes(tmp_path, [5.0])
    file = node.objects("s3://b", ["index.json"], lambda: {"index.json": text})["index.json"]
    assert isinstance(file, Path)
    parsed = node.index(file, "s3://b/index.json")
    [table] = tmp_path.rglob("index.bin")
    loaded = node.index(file, "s3://b/index.json")
    assert list(loaded.shards) == list(parsed.shards) == shards
    assert loaded.fingerprint == parsed.fingerprint
    table.write_bytes(table.read_bytes()[:-50])
    assert node.index(file, "s3://b/index.json").fingerprint == parsed.fingerprint


def test_only_processes_that_share_a_machine_trust_each_other(tmp_path: Path) -> None:
    assert SharedCache(CacheOptions()).indexes() is None
    for processes, trusted in ((1, False), (8, True)):
        node = SharedCache(CacheOptions(folder=tmp_path / str(processes), processes=processes)).indexes()
        assert node is not None
        for text in (b"one", b"two"):
            fetch = partial(dict[str, bytes | None], {"index.json": text})
            found = node.objects("s3://b", ["index.json"], fetch)["index.json"]
        assert isinstance(found, Path)
        assert found.read_bytes() == (b"one" if trusted else b"two")


def test_crafted_notes_of_what_was_checked_are_not_believed(tmp_path: Path) -> None:
    store = NotedStore(make_remote_kind(tmp_path / "data", "mds"))
    first = find_remote(store, indexes=indexes(tmp_path, [5.0])).manifest.fingerprint
    [note] = tmp_path.rglob("checked")
    good = json.loads(note.read_bytes())
    for crafted in variants(good):
        try:
            note.write_text(json.dumps(crafted))
        except (ValueError, RecursionError):
            continue
        assert find_remote(store, indexes=indexes(tmp_path, [5.0])).manifest.fingerprint == first
    note.write_text("[" * 100_000)
    assert find_remote(store, indexes=indexes(tmp_path, [5.0])).manifest.fingerprint == first
