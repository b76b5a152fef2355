"""What a loader works out when it is made: the same on all ranks and in every run, and fit for its cache."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from shardkit.cache import CacheOptions
from shardkit.cache import shards as options
from shardkit.card import DatasetCard
from shardkit.datasets.dataset import Dataset, open_dataset
from shardkit.datasets.locate import Found, LocalFiles
from shardkit.loaders import StreamingLoader
from shardkit.loaders.config import LoaderConfig, Order, Stream
from shardkit.loaders.defaults import find_eos_id
from shardkit.loaders.shard_uses import warn_of_small_cache
from shardkit.loaders.streams import Streams, open_streams
from shardkit.order.order import OrderSpec
from shardkit.storage.memory import MemoryStore
from shardkit.tools.audit.plan import PlannedRun
from support.loader_data import parts, token_rows, write_card
from support.remote_harness import fresh_url, put_folder, write_hashed

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


# What is shuffled together.


@pytest.mark.parametrize(("shards", "lanes", "window"), [(20, 1, 12_800), (1000, 16, 800), (3200, 64, 400)])
def test_lanes_and_window_follow_from_the_shards_and_samples_alone(
    url: str, shards: int, lanes: int, window: int
) -> None:
    """Not from cache, batch or ranks, of which nothing is known here; nor from the size of a sample."""
    dataset = large(url, 50 * SHARD_BYTES, shards=shards)
    sizes = replace(dataset.stream_sizes("data"), is_shuffled=True)
    assert sizes.shuffle_sizes(None, None) == (lanes, window)
    assert sizes.shuffle_sizes(5, 77) == (5, 77)
    assert sizes.shuffle_sizes(1, None)[1] == max(400, 64 * 200)


@pytest.mark.parametrize(
    ("shards", "window"), [(20, 20 * 200), (1000, 200_000), (1366, 6400), (3200, 3200), (100_000, 400)]
)
def test_windows_of_data_that_was_never_shuffled_span_768_to_1024_shards(
    url: str, shards: int, window: int
) -> None:
    sizes = large(url, 50 * SHARD_BYTES, shards=shards).stream_sizes("data")
    assert sizes.shuffle_sizes(None, None)[1] == window
    assert sizes.shuffle_sizes(5, 77) == (5, 77)


def test_compressed_shards_make_fewer_lanes_wherever_they_are(url: str, tmp_path: Path) -> None:
    write_hashed(tmp_path / "d", "mds_zstd", token_rows(40), parts(40, 4))
    dataset = open_dataset(tmp_path / "d")
    manifest = replace(dataset.manifest, shards=[dataset.manifest.shards[0]] * 512)
    local = Dataset(LocalFiles(Found(tmp_path / "d", manifest)), manifest)
    remote = Dataset(None, manifest, shards=large(url, 1 << 30).shards)
    for made in (local, remote):
        assert made.stream_sizes("data").shuffle_sizes(None, None)[0] == 4


@pytest.mark.parametrize(
    ("capacity", "lanes", "needed"), [(100, 16, "64 MB"), (31, 16, "64 MB"), (31, 64, "256 MB")]
)
def test_a_cache_that_is_too_small_is_warned_of_by_how_much(
    url: str, capacity: int, lanes: int, needed: str
) -> None:
    """A lane's window of two shards, and the two that it begins and ends in."""
    dataset = large(url, capacity * SHARD_BYTES)
    order = OrderSpec(1, lanes, 400)
    if capacity == 100:
        warn_of_small_cache(dataset, order, lanes)  # an error if it warned
        return
    with pytest.warns(RuntimeWarning, match="rows will be read one by one; raise cache_bytes") as caught:
        warn_of_small_cache(dataset, order, lanes)
    assert needed in str(caught[0].message)
    assert f"about {100 - 3100 / (4 * lanes):.0f}% of rows" in str(caught[0].message)


def test_the_warning_points_to_the_line_that_makes_the_loader(url: str) -> None:
    with pytest.warns(RuntimeWarning, match="cache_bytes of 1 B is below") as caught:
        StreamingLoader(url, batch_size=4, cache_bytes=1).close()
    assert caught[0].filename == __file__


def test_a_shared_cache_is_measured_by_the_lanes_of_all_ranks_on_the_machine(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": 1, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    with StreamingLoader(
        url, batch_size=4, cache_dir=tmp_path, cache_bytes=1, order=Order(lanes=16)
    ) as loader:
        with pytest.warns(RuntimeWarning, match="which 8 lanes use at a time"):
            iter(loader)
        assert loader.machine_ranks == (0, 1)


def test_what_is_free_on_a_machine_changes_nothing_but_a_warning(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks on machines with different memory: each row once an epoch."""
    seen: Counter[int] = Counter()
    states = []
    for rank, free in enumerate((1 << 20, 1 << 21, 1 << 30)):
        monkeypatch.setattr(options, "available_bytes", lambda system, free=free: free)
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


@pytest.mark.parametrize("mixed", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_seed_and_data_are_the_order_for_any_batch_ranks_and_cache(
    url: str, tmp_path: Path, mixed: bool
) -> None:
    """The samples up to a position are the same, in several epochs; streams of a mixture have other lanes."""
    write_hashed(tmp_path / "many", "mds", token_rows(5300), parts(5300, 640))
    runs = [(4, 1), (8, 1), (12, 3), (96, 3), (480, 8), (1000, 8), (96, 1), (8, 8)]
    one_by_one = np.empty(0)
    for number, (global_batch, world_size) in enumerate(runs):
        streams = [Stream(tmp_path / "many", weight=2), *([Stream(url)] if mixed else [])]
        config = LoaderConfig(cache_bytes=(1, 1 << 30)[number % 2])
        opened = open_streams(streams, config, 1)
        settings = opened.settings(config, seed=5)
        assert [settings.order_of(n).lanes for n in range(len(streams))] == [16, 1][: len(streams)]
        run = PlannedRun(opened.sizes, settings, batch_size=global_batch // world_size, world_size=world_size)
        steps = [run.steps(1).ravel() for _ in range(6_000 // global_batch)]
        opened.streams.close()
        if not number:
            one_by_one = np.concatenate(steps)
        for at, step in enumerate(steps):
            alike = one_by_one[at * global_batch : (at + 1) * global_batch]
            np.testing.assert_array_equal(np.sort(step), np.sort(alike))


def test_the_id_that_ends_documents_is_the_given_one_or_the_cards(folder: Path, tmp_path: Path) -> None:
    dataset = open_dataset(folder)
    assert find_eos_id(Streams([dataset], ["data"]), LoaderConfig(), "tokens") == 7
    with pytest.warns(RuntimeWarning, match="has eos_id=9: unless documents are far longer"):
        assert find_eos_id(Streams([dataset], ["data"]), LoaderConfig(eos_id=9, labels=True), "tokens") == 9
    for bad in (None, True, "7"):
        dataset.card = DatasetCard({"tokenizer": {"eos_id": bad}})
        with pytest.raises(ValueError, match=r"states none in dataset\.json"):
            find_eos_id(Streams([dataset], ["data"]), LoaderConfig(labels=True), "tokens")
    with pytest.raises(ValueError, match="need a column of tokens of constant length"):
        find_eos_id(Streams([dataset], ["data"]), LoaderConfig(labels=True, eos_id=1), None)
    dataset.card = DatasetCard({"tokenizer": "gpt2"})
    assert find_eos_id(Streams([dataset], ["data"]), LoaderConfig(), "tokens") is None
