"""What a loader works out when it is made: the same on all ranks and in every run, and fit for its cache."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from shardkit.cache import contract as options
from shardkit.cache.contract import CacheOptions
from shardkit.card import DatasetCard
from shardkit.datasets.dataset import Dataset, open_dataset
from shardkit.datasets.locate import Found, LocalFiles
from shardkit.loaders import StreamingLoader
from shardkit.loaders.config import LoaderConfig
from shardkit.loaders.defaults import find_eos_id, shuffle_sizes
from shardkit.loaders.plan import BatchPlan
from shardkit.loaders.streams import Streams
from shardkit.storage.memory import MemoryStore
from support.loader_data import parts, token_rows, write_card
from support.remote_harness import fresh_url, put_folder, write_hashed

ROW_BYTES = 16
SHARD_BYTES = 1_000_000  # as far as the index tells


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("setup") / "mds"
    write_hashed(made, "mds", token_rows(4000), parts(4000, 20))
    write_card(made, eos_id=7)
    return made


@pytest.fixture(scope="module")
def url(folder: Path) -> str:
    url = fresh_url()
    put_folder(folder, MemoryStore(url))
    return url


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def large(url: str, capacity: int, shards: int = 1000) -> Dataset:
    """A dataset that is never read, of `shards` shards of a megabyte."""
    dataset = open_dataset(url, cache=CacheOptions(capacity=capacity))
    info = dataset.manifest.shards[0]
    info = replace(info, raw=replace(info.raw, bytes=SHARD_BYTES))
    manifest = replace(dataset.manifest, shards=[info] * shards)
    return Dataset(None, manifest, shards=dataset.shards)


def sizes(dataset: Dataset, *, ranks: int = 1, batch_size: int = 16, **config: Any) -> tuple[int, int]:
    """(lanes, window) of the last rank."""
    plan = BatchPlan(len(dataset), batch_size, ranks - 1, ranks, "carry")
    return shuffle_sizes(dataset, plan, LoaderConfig(**config), ROW_BYTES)


def window_of(budget: int, lanes: int) -> int:
    return budget // (2 * lanes * ROW_BYTES)


# What is shuffled together.


def test_a_given_capacity_holds_two_windows_and_the_shards_at_their_edges(url: str) -> None:
    capacity = 100 * SHARD_BYTES
    lanes, window = sizes(large(url, capacity), cache_bytes=capacity)
    assert lanes == 16
    assert window == window_of(capacity - 2 * 16 * SHARD_BYTES, 16)


@pytest.mark.parametrize("is_shared", [False, True])
def test_one_cache_is_assumed_to_serve_all_lanes_however_ranks_are_spread_over_machines(
    url: str, tmp_path: Path, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    capacity = 100 * SHARD_BYTES
    dataset = large(url, capacity)
    if is_shared:
        shared = open_dataset(url, cache=CacheOptions(folder=tmp_path, capacity=capacity))
        dataset = Dataset(None, dataset.manifest, shards=shared.shards)
    for local_world_size in ("1", "3"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local_world_size)
        assert sizes(dataset, ranks=3, cache_bytes=capacity) == (
            48,
            window_of(48 * SHARD_BYTES, 48),  # half a shard for each window, at least
        )
        assert sizes(dataset, ranks=3, lanes=24, cache_bytes=capacity) == (
            24,
            window_of(capacity - 2 * 24 * SHARD_BYTES, 24),
        )


def test_a_cache_for_the_whole_dataset_and_large_ones_limit_nothing(url: str) -> None:
    small = large(url, 50 * SHARD_BYTES, shards=50)
    assert sizes(small, cache_bytes="50MB") == (16, window_of(4 << 30, 16))
    vast = large(url, 1 << 50)
    assert sizes(vast, cache_bytes=1 << 50) == (16, window_of(4 << 30, 16))


def test_lanes_and_window_may_be_given_instead(url: str) -> None:
    dataset = large(url, 100 * SHARD_BYTES)
    assert sizes(dataset, lanes=5, window=77, cache_bytes="100MB") == (5, 77)


@pytest.mark.parametrize(
    ("capacity", "told", "needed"),
    [
        (31 * SHARD_BYTES, True, "32 MB"),  # two shards for each of 16 lanes
        (100 * SHARD_BYTES, False, "1 GB"),  # all that there is
    ],
)
def test_a_cache_that_is_too_small_is_warned_of_where_the_loader_is_made(
    url: str, capacity: int, told: bool, needed: str
) -> None:
    dataset = large(url, capacity)
    config = {"cache_bytes": capacity} if told else {}
    with pytest.warns(RuntimeWarning, match="rows will be read one by one; give more") as caught:
        _, window = sizes(dataset, **config)
    assert needed in str(caught[0].message)
    if told:
        assert window == window_of(16 * SHARD_BYTES, 16), "a lane's window is half a shard at least"


def test_the_warning_points_to_the_line_that_makes_the_loader(url: str) -> None:
    with pytest.warns(RuntimeWarning, match="cache_bytes of 1 B is below") as caught:
        StreamingLoader(url, batch_size=4, cache_bytes=1).close()
    assert caught[0].filename == __file__


def test_a_shared_cache_is_measured_by_the_lanes_of_all_ranks_on_the_machine(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": 1, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    with StreamingLoader(url, batch_size=4, cache_dir=tmp_path, cache_bytes=1) as loader:
        with pytest.warns(RuntimeWarning, match="what 8 lanes have in use"):
            iter(loader)
        assert loader.machine_ranks == (0, 1)


def test_what_is_free_on_a_machine_changes_nothing_but_a_warning(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks on machines with different memory, sixty-four lanes between three: each row once an epoch."""
    seen: Counter[int] = Counter()
    states = []
    for rank, free in enumerate((1 << 20, 1 << 21, 1 << 30)):
        monkeypatch.setattr(options, "_free_memory", lambda system, free=free: free)
        with StreamingLoader(
            url, batch_size=64, rank=rank, world_size=3, return_ids=True, tail="drop"
        ) as loader:
            assert loader.dataset.shards is not None
            assert loader.dataset.shards.cache.capacity == free // 4 // 3
            for batch in islice(loader, 10):
                seen.update(batch["sample_id"].tolist())
            states.append(loader.state_dict())
    assert states[0] == states[1] == states[2]
    assert len(seen) == 3 * 64 * 10
    assert set(seen.values()) == {1}


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_local_datasets_are_limited_by_memory_only_if_they_are_compressed(
    tmp_path: Path, compression: str | None
) -> None:
    kind = "mds_zstd" if compression else "mds"
    write_hashed(tmp_path / "d", kind, token_rows(40), parts(40, 4))
    dataset = open_dataset(tmp_path / "d")
    if compression:
        info = dataset.manifest.shards[0]
        info = replace(info, raw=replace(info.raw, bytes=100 << 20))
        manifest = replace(dataset.manifest, shards=[info] * 4)
        dataset = Dataset(LocalFiles(Found(tmp_path / "d", manifest)), manifest)
        # Four times 100 MiB for each of four lanes is within 2 GiB, for five it is no longer.
        assert sizes(dataset) == (4, window_of(2 << 30, 4))
        assert sizes(dataset, lanes=16) == (16, window_of(2 << 30, 16))
    else:
        assert sizes(dataset, cache_bytes=1) == (16, window_of(4 << 30, 16))


def test_the_id_that_ends_documents_is_the_given_one_or_the_cards(folder: Path, tmp_path: Path) -> None:
    dataset = open_dataset(folder)
    assert find_eos_id(Streams([dataset], ["data"]), LoaderConfig(), "tokens") == 7
    assert find_eos_id(Streams([dataset], ["data"]), LoaderConfig(eos_id=9, labels=True), "tokens") == 9
    for bad in (None, True, "7"):
        dataset.card = DatasetCard({"tokenizer": {"eos_id": bad}})
        with pytest.raises(ValueError, match=r"states none in dataset\.json"):
            find_eos_id(Streams([dataset], ["data"]), LoaderConfig(labels=True), "tokens")
    with pytest.raises(ValueError, match="need a column of tokens of constant length"):
        find_eos_id(Streams([dataset], ["data"]), LoaderConfig(labels=True, eos_id=1), None)
    dataset.card = DatasetCard({"tokenizer": "gpt2"})
    assert find_eos_id(Streams([dataset], ["data"]), LoaderConfig(), "tokens") is None
