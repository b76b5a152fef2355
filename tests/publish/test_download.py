"""Downloads: the same files in a folder, each hashed on its way, whatever interrupts them."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from shardkit import open_dataset
from shardkit.datasets.verify import verify
from shardkit.errors import ShardError
from shardkit.formats import tar
from shardkit.publish import TransferError, TransferReport, download, upload
from shardkit.publish.contents import LOCK_NAME, MARKER_NAME, MAX_TRIES
from shardkit.storage.memory import MemoryStore
from shardkit.storage.store import Store, StoreError
from shardkit.tools.row_costs import make_row_costs
from support.small_build import tree
from support.small_dataset import make_dataset
from support.stores import FaultRule, FaultyStore, PulledPlugError, WatchedStore, fresh_memory, objects


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "out"
    make_dataset(folder)
    return folder


@pytest.fixture(scope="module")
def remote(made: Path) -> MemoryStore:
    """The dataset in a store; tests leave it as it is."""
    memory = fresh_memory()
    upload(made, memory, progress=False)
    return memory


def fetch(
    source: Store | str | Path,
    folder: Path,
    *,
    replace: bool = False,
    dry_run: bool = False,
    threads: int = 3,
) -> TransferReport:
    return download(source, folder, threads=threads, replace=replace, dry_run=dry_run, progress=False)


def test_the_folder_holds_the_same_files_and_nothing_else(
    made: Path, remote: MemoryStore, tmp_path: Path
) -> None:
    folder = tmp_path / "some" / "copy"
    report = fetch(remote, folder)
    assert tree(folder) == tree(made)
    assert verify(folder).ok
    assert report.fingerprint == open_dataset(made).fingerprint
    assert set(report.sent) == tree(made).keys() - {"index.json"}
    assert fetch(remote.url, folder).up_to_date


def test_tables_of_row_costs_travel_with_their_dataset_and_no_others(made: Path, tmp_path: Path) -> None:
    folder, bucket, copy = tmp_path / "own", fresh_memory(), tmp_path / "copy"
    shutil.copytree(made, folder)
    upload(folder, bucket, progress=False)
    (folder / f"row-costs.{'0' * 64}.eos0.npy").write_bytes(b"of another dataset")
    make_row_costs(folder, eos_id=0, progress=False)
    [table] = [name for name in tree(folder) if open_dataset(folder).fingerprint in name]
    report = upload(folder, bucket, progress=False)
    assert (report.sent, report.left_count) == ((table,), 1), "what was made later goes alone"
    assert upload(folder, bucket, progress=False).up_to_date
    assert fetch(bucket, copy).left == ()
    assert (copy / table).read_bytes() == (folder / table).read_bytes()
    assert tree(copy).keys() == {*tree(made), table}
    bucket.put(table, b"damaged on its way", metadata=bucket.head(table).metadata)
    with pytest.raises(TransferError, match=table):
        fetch(bucket, tmp_path / "second")
    assert not (tmp_path / "second" / "index.json").exists()


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_a_download_killed_at_any_operation_goes_on_with_what_is_missing(
    made: Path, remote: MemoryStore, tmp_path: Path, late: bool
) -> None:
    for limit in range(1, 100):
        folder = tmp_path / str(limit)
        try:
            fetch(WatchedStore(remote, limit=limit, late=late), folder, threads=1)
            killed = False
        except PulledPlugError:
            killed = True
            assert not (folder / "index.json").exists()
        before = tree(folder).keys() - {MARKER_NAME} if folder.exists() else set()
        report = fetch(remote, folder)
        assert tree(folder) == tree(made)
        assert set(report.sent) == tree(made).keys() - before - {"index.json"}
        if not killed:
            break
    assert limit > 10


@pytest.mark.parametrize("times", [1, MAX_TRIES - 1, MAX_TRIES])
def test_bytes_that_arrive_wrong_are_fetched_again_and_never_kept(
    made: Path, remote: MemoryStore, tmp_path: Path, times: int
) -> None:
    rule = FaultRule(fault="corrupt", operation="read", key="shard.00002.mds", after_bytes=99, count=times)
    flipping = FaultyStore(remote, [rule])
    if times == MAX_TRIES:
        with pytest.raises(
            TransferError, match=r"shard\.00002\.mds: has .*, expected xxh64 .* fetched 3 times"
        ):
            fetch(flipping, tmp_path / "copy")
        names = tree(tmp_path / "copy").keys()
        assert names == tree(made).keys() - {"index.json", "shard.00002.mds"} | {MARKER_NAME}
    fetch(flipping, tmp_path / "copy")  # the last time it is right
    assert tree(tmp_path / "copy") == tree(made)


def test_damage_in_the_folder_is_made_good_and_only_that_is_fetched(
    made: Path, remote: MemoryStore, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    fetch(remote, folder)
    shard = folder / "shard.00001.mds"
    shard.write_bytes(bytes(shard.stat().st_size))
    (folder / "report.html").unlink()
    assert fetch(remote, folder, dry_run=True).sent == ("report.html", "shard.00001.mds")
    assert fetch(remote, folder).sent == ("report.html", "shard.00001.mds")
    assert tree(folder) == tree(made)


def test_a_folder_with_another_dataset_or_other_files_is_refused(
    made: Path, remote: MemoryStore, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    make_dataset(other, shards=7, first=900)
    before = tree(other)
    with pytest.raises(StoreError, match="holds another dataset; use --replace"):
        fetch(remote, other)
    assert tree(other) == before
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "report.html").write_text("my report")
    for _ in range(2):
        with pytest.raises(StoreError, match="exists with other content; use --replace"):
            fetch(remote, folder)
        assert {name: (folder / name).read_text() for name in tree(folder)} == {"report.html": "my report"}
    report = fetch(remote, other, replace=True)
    assert report.deleted == ("shard.00005.mds", "shard.00006.mds")
    assert tree(other) == tree(made)


def test_a_dry_run_makes_no_folder(made: Path, remote: MemoryStore, tmp_path: Path) -> None:
    report = fetch(remote, tmp_path / "copy", dry_run=True)
    assert set(report.sent) == tree(made).keys() - {"index.json"}
    assert not (tmp_path / "copy").exists()


def test_datasets_without_any_stated_hash_are_held_to_what_was_uploaded(tmp_path: Path) -> None:
    folder = tmp_path / "tars"
    folder.mkdir()
    rows = np.arange(64, dtype=np.uint16).reshape(-1, 4)
    shard = tar.write_rows_shard(folder, "a.tar", rows, key_start=0, hashes=[])
    tar.write_shard_list(folder, [shard])
    memory = fresh_memory()
    upload(folder, memory, progress=False)
    fetch(memory, tmp_path / "copy")
    assert tree(tmp_path / "copy") == tree(folder)
    assert fetch(memory, tmp_path / "copy").up_to_date
    data = memory.get("a.tar")
    memory.put("a.tar", data[:-1] + b"\1", metadata=memory.head("a.tar").metadata)
    with pytest.raises(TransferError, match="expected xxh3_128"):
        fetch(memory, tmp_path / "fresh")


def test_an_incomplete_dataset_is_refused_before_anything_is_fetched(made: Path, tmp_path: Path) -> None:
    memory = fresh_memory()
    upload(made, memory, progress=False)
    memory.delete("shard.00003.mds")
    with pytest.raises(ShardError, match=r"is incomplete: shard\.00003\.mds is missing"):
        fetch(memory, tmp_path / "copy")
    memory.delete("index.json")
    with pytest.raises(ShardError, match="holds no complete dataset"):
        fetch(memory, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    assert objects(memory)


def test_two_downloads_into_one_folder_do_not_mix(remote: MemoryStore, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    descriptor = os.open(tmp_path / "copy" / LOCK_NAME, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match="another process is writing a dataset"):
            fetch(remote, tmp_path / "copy")
    finally:
        os.close(descriptor)
    fetch(remote, tmp_path / "copy")


def test_a_full_disk_is_said_before_anything_is_fetched(
    remote: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20))
    with pytest.raises(StoreError, match=r"the files need 1\.79 KB, but the disk has only 67\.1 MB free"):
        fetch(remote, tmp_path / "copy")


def test_a_target_that_is_no_folder_is_refused(remote: MemoryStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="is not a folder"):
        fetch(remote, tmp_path / "file")
    with pytest.raises(StoreError, match="fills a local folder"):
        download(remote, "memory://elsewhere")
