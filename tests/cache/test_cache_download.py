"""One shard on its way: the right bytes from any number of parts, or an error that says what was wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardkit.cache.download import DamagedObjectError, Download, MemoryTarget, check_hashes, unpack
from shardkit.formats import mds, tar
from shardkit.hashing import HASH_NAMES, hash_bytes
from shardkit.manifest import FileInfo, ShardInfo
from shardkit.storage.memory import MemoryBody
from shardkit.storage.store import ObjectChangedError, ObjectNotFoundError, Store, TransientError
from support.mds_values import compress
from support.noted_store import NotedStore, SlowBody

KEY = "sub/shard.00000.mds"


def store_of(data: bytes) -> NotedStore:
    """A store with one object."""
    store = NotedStore()
    store.put(KEY, data)
    return store


def content(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


def file_of(data: bytes, *hashes: str) -> FileInfo:
    return FileInfo(KEY, len(data), hash_bytes(data, hashes))


def start(store: Store, file: FileInfo, parts: int = 1, version: str | None = None) -> Download:
    target = MemoryTarget(file.bytes)
    return Download(store, file, target, parts=parts, version=version, min_part_bytes=10, read_bytes=7)


def run(download: Download, threads: int = 1) -> None:
    """Fetch and check it, with the help of other threads."""
    helpers = [threading.Thread(target=download.fetch) for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
    download.fetch()
    try:
        download.check()
    finally:
        for helper in helpers:
            helper.join(60)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    size=st.integers(0, 200),
    parts=st.integers(1, 9),
    threads=st.integers(1, 3),
    hashes=st.lists(st.sampled_from(["xxh64", "sha256", "md5"]), unique=True),
)
@example(0, 1, 1, ["xxh64"])
@example(0, 8, 2, [])
def test_the_bytes_arrive_whole_in_any_number_of_parts(
    size: int, parts: int, threads: int, hashes: list[str]
) -> None:
    data = content(size)
    store = store_of(data)
    download = start(store, file_of(data, *hashes), parts)
    run(download, threads)
    assert download.target.data.tobytes() == data
    assert download.bytes_done == size
    assert len(store.reads) == max(1, min(parts, size // 10))
    ranges = sorted((begin, size if stop is None else stop) for _, begin, stop, _ in store.reads)
    assert [begin for begin, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert ranges[-1][1] == size


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("at", [0, 50, 99])
def test_a_flipped_bit_is_found_by_any_hash(parts: int, at: int) -> None:
    data = content(100)
    wrong = bytearray(data)
    wrong[at] ^= 32
    store = store_of(bytes(wrong))
    for name in ("xxh64", "sha1"):
        download = start(store, file_of(data, name), parts)
        with pytest.raises(DamagedObjectError, match=f"{name} is [0-9a-f]+, the index states") as info:
            run(download, parts)
        assert info.value.file == f"{store.url}/{KEY}"


@pytest.mark.parametrize("parts", [1, 4])
def test_all_hashes_that_are_stated_and_known_must_agree(parts: int) -> None:
    data = content(100)
    file = file_of(data, *sorted(HASH_NAMES))
    right = replace(file, hashes={**{k: v.upper() for k, v in file.hashes.items()}, "unknown": "whatever"})
    download = start(store_of(data), right, parts)
    run(download)
    for name in HASH_NAMES:
        download = start(store_of(data), replace(right, hashes={**right.hashes, name: "0" * 16}), parts)
        with pytest.raises(DamagedObjectError, match=f"{name} is"):
            run(download)


@pytest.mark.parametrize("stated", [0, 99, 101])
@pytest.mark.parametrize("parts", [1, 4])
def test_an_object_of_another_size_is_damaged(stated: int, parts: int) -> None:
    download = start(store_of(content(100)), FileInfo(KEY, stated), parts)
    with pytest.raises(
        DamagedObjectError, match=f"has 100 bytes, the index states {stated}; upload it again"
    ):
        run(download)


def break_body(store: NotedStore, number: int, after: int, error: Exception) -> None:
    """Let the store's n-th body fail after some bytes."""

    def fail() -> None:
        raise error

    store.hand_out = lambda n, body: SlowBody(body, after, fail, step=3) if n == number else body


def act_at_first(store: NotedStore, act: Callable[[], object]) -> None:
    """Do something before the first body is handed out."""

    def hand_out(number: int, body: MemoryBody) -> MemoryBody:
        if number == 0:
            act()
        return body

    store.hand_out = hand_out


def test_a_body_that_ends_early_is_damaged_and_says_where() -> None:
    store = store_of(content(100))
    store.hand_out = lambda number, body: MemoryBody(body.info, memoryview(body.read())[:42])
    download = start(store, FileInfo(KEY, 100))
    with pytest.raises(DamagedObjectError, match="fewer bytes") as info:
        run(download)
    assert info.value.offset == 42
    assert download.bytes_done == 42


@pytest.mark.parametrize("bad", [0, 1, 3])
def test_after_an_error_no_part_is_begun_and_the_error_is_the_stores(bad: int) -> None:
    store = store_of(content(100))
    error = TransientError(f"{store.url}/{KEY}", "connection reset")
    break_body(store, bad, 5, error)
    download = start(store, FileInfo(KEY, 100), parts=4)
    with pytest.raises(TransientError) as info:
        run(download)
    assert info.value is error
    assert len(store.reads) == bad + 1
    assert download.take_part() is None


def test_parts_that_run_stop_soon_after_another_has_failed() -> None:
    store = store_of(content(100))
    download = start(store, FileInfo(KEY, 100), parts=2)
    error = TransientError("elsewhere", "connection reset")
    first, second = download.take_part(), download.take_part()
    assert first is not None
    assert second is not None

    def fail_the_other() -> None:
        break_body(store, 1, 0, error)
        download.fetch_part(second)

    act_at_first(store, fail_the_other)
    download.fetch_part(first)
    assert download.bytes_done == 0
    assert download.error is error


def test_an_object_that_is_missing_or_changed_is_the_stores_error() -> None:
    store = store_of(content(100))
    download = start(store, FileInfo("other", 100))
    with pytest.raises(ObjectNotFoundError):
        run(download)
    old = store.head(KEY).version
    store.put(KEY, content(100))
    download = start(store, FileInfo(KEY, 100), version=old)
    with pytest.raises(ObjectChangedError):
        run(download)


def test_parts_begun_one_after_the_other_are_of_one_version() -> None:
    store = store_of(content(100))
    download = start(store, FileInfo(KEY, 100), parts=4)

    act_at_first(store, lambda: store.put(KEY, bytes(100)))
    with pytest.raises(ObjectChangedError):
        run(download)
    assert len(store.reads) == 2


def test_parts_begun_at_the_same_time_are_of_one_version() -> None:
    store = store_of(content(100))
    download = start(store, FileInfo(KEY, 100), parts=2)
    first, second = download.take_part(), download.take_part()
    assert first is not None
    assert second is not None

    def replace_object() -> None:
        store.put(KEY, bytes(100))
        download.fetch_part(second)

    act_at_first(store, replace_object)
    download.fetch_part(first)
    with pytest.raises((ObjectChangedError, DamagedObjectError)):
        download.check()


# Unpacked.


def compressed_mds(folder: Path, algorithm: str) -> tuple[ShardInfo, bytes, bytes]:
    """(index entry, stored bytes, raw bytes)."""
    rows = np.arange(400, dtype=np.uint16).reshape(20, 20)
    shard = mds.write_rows_shard(folder, "shard.mds", rows, hashes=["xxh64"])
    raw = (folder / "shard.mds").read_bytes()
    stored = compress(algorithm, raw)
    file = FileInfo(f"shard.mds.{algorithm}", len(stored))
    return replace(shard, zip=file, compression=algorithm), stored, raw


def array(data: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(data, dtype=np.uint8)


@pytest.mark.parametrize("algorithm", ["zstd", "gz", "bz2"])
def test_a_compressed_mds_unpacks_to_its_raw_bytes(tmp_path: Path, algorithm: str) -> None:
    info, stored, raw = compressed_mds(tmp_path, algorithm)
    assert unpack("mds", info, array(stored), "there").tobytes() == raw


def test_a_compressed_tar_unpacks_to_its_raw_bytes(tmp_path: Path) -> None:
    rows = np.arange(400, dtype=np.uint16).reshape(20, 20)
    shard = tar.write_rows_shard(tmp_path, "a.tar", rows, key_start=0, hashes=["xxh64"])
    raw = (tmp_path / "a.tar").read_bytes()
    stored = compress("gz", raw)
    info = replace(shard, zip=FileInfo("a.tar.gz", len(stored)), compression="gz")
    assert unpack("tar", info, array(stored), "there").tobytes() == raw
    with pytest.raises(DamagedObjectError, match=r"^there: "):
        unpack("tar", info, array(stored[:-20]), "there")


def test_what_does_not_unpack_to_what_the_index_states_is_damaged(tmp_path: Path) -> None:
    info, stored, _ = compressed_mds(tmp_path, "zstd")
    flipped = bytearray(stored)
    flipped[len(stored) // 2] ^= 255
    wrong: list[tuple[ShardInfo, bytes]] = [
        (info, stored[:-9]),
        (info, b""),
        (info, bytes(flipped)),
        (replace(info, raw=replace(info.raw, bytes=info.raw.bytes - 1)), stored),
        (replace(info, raw=replace(info.raw, hashes={"xxh64": "0" * 16})), stored),
    ]
    for shard, data in wrong:
        with pytest.raises(DamagedObjectError, match=r"^there: "):
            unpack("mds", shard, array(data), "there")


def test_bytes_without_stated_hashes_are_taken_as_they_are() -> None:
    check_hashes("there", FileInfo("a", 3), array(b"abc"))
    check_hashes("there", FileInfo("a", 3, {"unknown": "x"}), array(b"abc"))
    wrong: dict[str, Any] = {"md5": "x"}
    with pytest.raises(
        DamagedObjectError, match=r"^there: md5 is 900150983cd24fb0d6963f7d28e17f72, the index states x"
    ):
        check_hashes("there", FileInfo("a", 3, wrong), array(b"abc"))
