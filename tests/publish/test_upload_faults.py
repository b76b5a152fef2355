"""Transfers over a store that fails in every way at once: the same bytes at the end, whatever the seed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from shardkit.errors import ShardError
from shardkit.publish import download, upload
from shardkit.storage.resilient import ResilientStore
from shardkit.storage.retry import RetryPolicy
from shardkit.storage.store import Store
from support.small_build import tree
from support.small_dataset import files_of, make_dataset
from support.stores import FaultRule, FaultyStore, fresh_memory, objects

FAULTS = [
    FaultRule(fault="throttle", probability=0.15),
    FaultRule(fault="error", probability=0.1),
    FaultRule(fault="refuse", probability=0.05),
    FaultRule(fault="lost_ack", operation="put", probability=0.3),
    FaultRule(fault="lost_ack", operation="delete", probability=0.3),
    FaultRule(fault="reset", operation="read", probability=0.2, after_bytes=20),
    FaultRule(fault="truncate", operation="read", probability=0.1, after_bytes=3),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "out"
    make_dataset(folder, shards=9)
    return folder


def unreliable(store: Store, seed: int, rules: list[FaultRule] = FAULTS) -> ResilientStore:
    policy = RetryPolicy(
        backoff_seconds=1e-4,
        longest_backoff_seconds=1e-3,
        hedge=False,
        jitter=random.Random(seed).random,
    )
    return ResilientStore(FaultyStore(store, rules, seed=seed), policy)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(6))
def test_faults_on_the_way_change_no_byte_in_either_direction(made: Path, tmp_path: Path, seed: int) -> None:
    make_dataset(tmp_path / "older", shards=12, first=700)
    memory = fresh_memory()
    upload(tmp_path / "older", unreliable(memory, seed), progress=False)
    report = upload(made, unreliable(memory, seed + 100), replace=True, verify=True, progress=False)
    assert report.deleted == ("shard.00009.mds", "shard.00010.mds", "shard.00011.mds")
    assert objects(memory) == files_of(made)
    download(unreliable(memory, seed + 200), tmp_path / "copy", progress=False)
    assert tree(tmp_path / "copy") == tree(made)


@pytest.mark.parametrize("key", ["index.json", "dataset.json", "shard.00004.mds", "part-00000.parquet"])
def test_a_wrong_byte_anywhere_on_the_way_is_noticed_and_fetched_again(
    made: Path, tmp_path: Path, key: str
) -> None:
    memory = fresh_memory()
    upload(made, memory, progress=False)
    once = FaultRule(fault="corrupt", operation="read", key=key, after_bytes=20, count=1)
    faulty = FaultyStore(memory, [once])
    download(faulty, tmp_path / "copy", progress=False)
    assert len(faulty.log) == 1
    assert tree(tmp_path / "copy") == tree(made)


def test_an_index_that_stays_wrong_is_not_believed(made: Path, tmp_path: Path) -> None:
    memory = fresh_memory()
    upload(made, memory, progress=False)
    always = FaultRule(fault="corrupt", operation="read", key="index.json", after_bytes=20)
    with pytest.raises(ShardError, match=r"index\.json: has xxh3_128 .*, but its .*, after 3 fetches"):
        download(FaultyStore(memory, [always]), tmp_path / "copy", progress=False)
    assert not (tmp_path / "copy").exists()
