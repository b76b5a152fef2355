"""Headers read while a tar streams by tell what the whole tar tells; long payloads are passed over."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.cache import CacheOptions
from shardkit.cache.folder import SUBFOLDER
from shardkit.datasets import tar_scan as skim
from shardkit.datasets.dataset import open_dataset
from shardkit.errors import ShardError
from shardkit.formats import tar
from shardkit.formats.tar.find import unscanned
from shardkit.formats.tar.members import Scanned, TarIndex
from shardkit.manifest import ShardInfo
from shardkit.storage import open_store
from shardkit.storage.memory import MemoryStore
from shardkit.storage.resilient import ResilientStore
from shardkit.storage.store import ObjectChangedError, Store
from support.foreign_tars import PARTS, assert_same_index, make_tar, put_tars, samples, tar_bytes, tars
from support.remote_harness import fresh_url


def skimmed(data: bytes, name: str = "a.tar", **sizes: Any) -> tuple[Scanned, TarIndex] | None:
    store = MemoryStore(fresh_url())
    info = store.put(name, data)
    return skim.skim_tar(store, unscanned([info]).shards[0], info.version, **sizes)


def assert_same(data: bytes, **sizes: Any) -> None:
    """As the whole tar's index, or the same error."""
    info = unscanned([MemoryStore(fresh_url()).put("a.tar", data)]).shards[0]
    error: ShardError | None = None
    try:
        shard = tar.shard_from_raw("a.tar", info, np.frombuffer(data, dtype=np.uint8))
    except ShardError as found_whole:
        error = found_whole
    if error is not None:
        with pytest.raises(ShardError) as caught:
            skimmed(data, **sizes)
        assert (caught.value.problem, caught.value.offset) == (error.problem, error.offset)
        return
    found = skimmed(data, **sizes)
    assert found is not None
    assert found[0] == Scanned(len(shard), len(data), shard.columns)
    assert_same_index(found[1], shard.index)


@pytest.mark.parametrize(("skip", "piece"), [(8 << 20, 1 << 17), (0, 512), (0, 100), (700, 1000), (5000, 64)])
def test_what_is_skimmed_is_what_the_whole_tar_tells(skip: int, piece: int) -> None:
    sizes = {"skip_bytes": skip, "piece_bytes": piece}
    for part in PARTS:
        assert_same(tar_bytes(*part), **sizes)
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        names = ("folder/" * 30 + "a.b.txt", "é" * 80 + ".txt", "x.jpg", "none")
        assert_same(make_tar([(name, bytes(5 * len(name))) for name in names], form), **sizes)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_tars_are_refused_for_the_same_reason(data: st.DataObject) -> None:
    raw = bytearray(tar_bytes(8, 12))
    for _ in range(data.draw(st.integers(0, 2))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    assert_same(bytes(raw[: data.draw(st.sampled_from([len(raw), data.draw(st.integers(1, len(raw)))]))]))


def test_only_headers_of_long_members_are_read() -> None:
    stream = io.BytesIO()
    with webdataset.TarWriter(stream) as writer:
        for number in range(3):
            writer.write({"__key__": f"{number}", "mp4": bytes(skim.SKIP_BYTES + 1_000_000), "json": {}})
    url = fresh_url()
    info = open_store(url).put("a.tar", stream.getvalue())
    store = ResilientStore(open_store(url))
    found = skim.skim_tar(store, unscanned([info]).shards[0], info.version)
    assert found is not None
    assert found[0].samples == 3
    assert store.metrics.snapshot().bytes_read < info.bytes // 20


def test_tars_of_arrays_and_compressed_ones_have_to_be_read_whole() -> None:
    stream = io.BytesIO()
    with webdataset.TarWriter(stream) as writer:
        writer.write({"__key__": "a", "json": {}, "x.npy": np.zeros(3)})
    assert skimmed(stream.getvalue()) is None
    assert skimmed(gzip.compress(tar_bytes(0, 7)), "a.tgz") is None


def test_an_object_that_was_replaced_is_not_skimmed() -> None:
    store = MemoryStore(fresh_url())
    first = store.put("a.tar", tar_bytes(0, 7))
    store.put("a.tar", tar_bytes(0, 7))
    with pytest.raises(ObjectChangedError):
        skim.skim_tar(store, unscanned([first]).shards[0], first.version)


@pytest.mark.parametrize("room", [0, 2])
def test_tars_that_the_cache_has_no_room_for_are_skimmed(
    tmp_path: Path, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = put_tars()
    names: list[str] = []
    real = skim.skim_tar

    def counted(store: Store, info: ShardInfo, version: str) -> tuple[Scanned, TarIndex] | None:
        names.append(info.raw.basename)
        return real(store, info, version)

    monkeypatch.setattr(skim, "skim_tar", counted)
    capacity = sum(len(data) for data in [*tars().values()][:room])
    options = CacheOptions(folder=tmp_path, capacity=capacity + 100 * room, connections=4)
    for _ in range(2):
        with open_dataset(url, cache=options) as dataset:
            assert len(dataset) == 23
            held = sorted((tmp_path / SUBFOLDER / "shards").iterdir())
            assert len(held) == room
    assert sorted(names) == [*tars()][room:]
    with open_dataset(url, cache=options) as dataset:
        assert samples(dataset) == list(range(23))
