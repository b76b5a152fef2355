"""A loader over a remote dataset gives what a loader over the same local dataset gives."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from shardkit.cache.download import DamagedObjectError
from shardkit.cache.fetcher import FetchLimits
from shardkit.cache.folder import CacheFolder
from shardkit.cache.memory import CacheMemory
from shardkit.datasets.dataset import open_dataset
from shardkit.errors import ShardError
from shardkit.loaders import Stream, StreamingLoader
from shardkit.loaders.config import Layout, grouped
from shardkit.storage.memory import MemoryStore
from shardkit.storage.retry import RetryPolicy
from shardkit.storage.s3 import S3Store
from shardkit.storage.store import ObjectChangedError, ObjectNotFoundError, StorageOptions, Store
from support.default_cases import cases
from support.remote_harness import (
    QUICK,
    REMOTE_KINDS,
    Remote,
    fresh_url,
    make_remote_kind,
    put_folder,
    quick_policy,
    tree_digest,
)
from support.resume import assert_equal, assert_exact_resume, assert_exact_resume_in_new_process, batches, run
from support.s3_moto import s3_server
from support.stores import BodyFault, FaultRule, FaultyStore, ThrottledStore

SAMPLES = 53
CACHES = ["memory", "memory_tiny", "folder", "folder_tiny", "folder_nothing"]
EPOCH = -(-SAMPLES // 4)  # batches of 4
NO_ROWS = FetchLimits(single_rows=0)

Datasets = dict[str, tuple[Path, str]]

pytestmark = pytest.mark.filterwarnings("ignore:cache_bytes of:RuntimeWarning")


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Datasets:
    """(folder, URL) of each kind: the same dataset."""
    root = tmp_path_factory.mktemp("datasets")
    made = {}
    for kind in REMOTE_KINDS:
        folder, url = make_remote_kind(root / kind, kind), fresh_url()
        put_folder(folder, MemoryStore(url))
        made[kind] = folder, url
    return made


def cache_arguments(cache: str, folder: Path, dataset: Path) -> dict[str, Any]:
    """Arguments of a loader; "tiny" has room for the largest shard and not for two."""
    arguments: dict[str, Any] = {}
    if cache.startswith("folder"):
        arguments["cache_dir"] = folder / "cache"
    if cache.endswith("_tiny"):
        with open_dataset(dataset) as opened:
            largest = max(max(info.raw.bytes, info.stored.bytes) for info in opened.manifest.shards)
        arguments["cache_bytes"] = largest * 3 // 2 + 64
    if cache.endswith("_nothing"):
        arguments["cache_bytes"] = 1
    return arguments


def make(where: Path | str, **arguments: Any) -> StreamingLoader:
    return StreamingLoader(where, **grouped({"batch_size": 4} | dict(QUICK) | arguments))


def assert_same_run(local: StreamingLoader, remote: StreamingLoader, steps: int) -> None:
    with local, remote:
        for step, (expected, got) in enumerate(zip(run(local, steps), run(remote, steps), strict=True)):
            assert_equal(got[0], expected[0], f"batch {step}")
            assert got[1] == expected[1], f"state {step}"


@pytest.mark.sampled(5)
@pytest.mark.parametrize("cache", cases(CACHES, ["memory_tiny", "folder", "folder_nothing"]))
@pytest.mark.parametrize("kind", REMOTE_KINDS)
def test_batches_are_those_of_the_local_dataset(
    datasets: Datasets, kind: str, cache: str, tmp_path: Path
) -> None:
    """Three epochs, so that what was evicted is needed again."""
    folder, url = datasets[kind]
    arguments = cache_arguments(cache, tmp_path, folder)
    assert_same_run(make(folder), make(url, **arguments), 3 * EPOCH)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "arguments",
    [
        {"shuffle": "global"},
        {"shuffle": "none", "tail": "drop"},
        {"tail": "pad", "batch_size": 5},
        {"dtype": None, "prefetch_batches": 0},
        {"endless": True, "labels": True, "document_ids": True, "eos_id": 0},
    ],
    ids=lambda arguments: "-".join(map(str, arguments)),
)
@pytest.mark.parametrize("cache", ["memory", "folder_tiny"])
def test_any_shuffle_tail_and_extra_comes_out_the_same(
    datasets: Datasets, cache: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    folder, url = datasets["mds"]
    caching = cache_arguments(cache, tmp_path, folder)
    assert_same_run(make(folder, **arguments), make(url, **arguments, **caching), 2 * EPOCH)


def test_chosen_columns_come_out_the_same(datasets: Datasets) -> None:
    folder, url = datasets["columns"]
    for columns in (["tokens", "text"], ["image", "label"]):
        assert_same_run(make(folder, columns=columns), make(url, columns=columns), EPOCH)


@pytest.mark.parametrize("kind", ["mds", "mds_zstd", "tar", "tar_foreign"])
def test_shards_that_come_in_several_ranges_are_the_same(datasets: Datasets, kind: str) -> None:
    folder, url = datasets[kind]
    limits = FetchLimits(min_part_bytes=64, read_bytes=50, single_rows=0)
    remote = Remote.open(MemoryStore(url), connections=8, limits=limits)
    assert_same_run(make(folder), remote.loader(), EPOCH)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("most", [0, 5, 1 << 30])
@pytest.mark.parametrize("kind", ["mds", "mds_foreign", "tar", "tar_masked"])
def test_rows_that_were_fetched_one_by_one_are_the_same(datasets: Datasets, kind: str, most: int) -> None:
    folder, url = datasets[kind]
    remote = Remote.open(MemoryStore(url), limits=FetchLimits(single_rows=most))
    assert_same_run(make(folder), remote.loader(), 2 * EPOCH)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cache", ["memory", "folder_tiny"])
@pytest.mark.parametrize("kind", cases(REMOTE_KINDS, ["mds_zstd", "tar", "columns"]))
def test_a_run_resumed_at_any_step_goes_on_exactly(
    datasets: Datasets, kind: str, cache: str, tmp_path: Path
) -> None:
    folder, url = datasets[kind]
    arguments = cache_arguments(cache, tmp_path, folder)
    assert_exact_resume(partial(make, url, batch_size=9, **arguments), steps=9, tail_steps=3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("cache", ["folder", "folder_tiny"])
@pytest.mark.parametrize("kind", ["mds", "tar_foreign"])
def test_ranks_that_share_a_cache_folder_deliver_what_one_local_rank_does(
    datasets: Datasets, kind: str, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank on a thread of its own, as if in its own process: they share the folder and nothing else."""
    folder, url = datasets[kind]
    world_size = 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(world_size))
    arguments = cache_arguments(cache, tmp_path, folder)
    got: dict[int, list[list[int]]] = {}
    fetched: dict[int, float] = {}

    def read(rank: int) -> None:
        with make(url, batch_size=2, rank=rank, world_size=world_size, **arguments) as loader:
            got[rank] = sample_ids(loader, 12)
            assert loader.dataset.shards is not None
            fetched[rank] = loader.dataset.shards.counters()["fetched_shards"]

    threads = [threading.Thread(target=read, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(got) == list(range(world_size))
    with make(folder, batch_size=8) as loader:
        expected = sample_ids(loader, 12)
    steps = [[i for rank in range(world_size) for i in got[rank][step]] for step in range(12)]
    assert [sorted(ids) for ids in steps] == [sorted(ids) for ids in expected]
    if cache == "folder":
        assert sum(fetched.values()) == 5, "with room for all, each shard is fetched by one of them"


@pytest.fixture(scope="module")
def bucket_url(datasets: Datasets) -> Iterator[str]:
    """The "mds" dataset on an S3 server, which the environment leads to."""
    with s3_server() as server:
        url = f"s3://{server.new_bucket()}/some/prefix"
        put_folder(datasets["mds"][0], S3Store(url, StorageOptions()))
        yield url


@pytest.mark.extended
def test_a_dataset_on_s3_gives_the_same_batches_in_this_process_and_in_new_ones(
    datasets: Datasets, bucket_url: str, tmp_path: Path
) -> None:
    folder = datasets["mds"][0]
    arguments = {"cache_dir": str(tmp_path / "cache"), "cache_bytes": "2KB"}
    assert_same_run(make(folder), make(bucket_url, **arguments), 3 * EPOCH)
    loading = {"dataset": bucket_url, "batch_size": 4} | dict(QUICK) | arguments
    assert_exact_resume_in_new_process(loading, tmp_path, steps=10, at=[4])


def test_a_local_dataset_is_read_in_place_whatever_cache_is_given(datasets: Datasets, tmp_path: Path) -> None:
    folder = datasets["mds"][0]
    before = tree_digest(folder)
    cache = tmp_path / "cache"
    for where in (folder, f"file://{folder}"):
        with make(where, cache_dir=cache, cache_bytes="1KB") as loader:
            assert len(run(loader, 2 * EPOCH)) == 2 * EPOCH
    assert tree_digest(folder) == before
    assert not cache.exists()


def remote_of(datasets: Datasets, kind: str, *rules: FaultRule, **how: Any) -> Remote:
    """A dataset whose store has faults once the dataset is open."""
    return Remote.open(
        MemoryStore(datasets[kind][1]), around=partial(FaultyStore, rules=rules, seed=7), **how
    )


def sample_ids(loader: StreamingLoader, steps: int) -> list[list[int]]:
    return [batch["sample_id"].tolist() for batch in islice(batches(loader), steps)]


def body(fault: BodyFault, **how: Any) -> list[FaultRule]:
    return [FaultRule(fault=fault, operation="open", **how)]


# name: (what is put around the store, least values of the store's counters)
FAULTS: dict[str, tuple[Callable[[Store], Store] | list[FaultRule], dict[str, int]]] = {
    "latency": (partial(ThrottledStore, latency_seconds=0.005, bytes_per_second=200_000), {}),
    "burst_of_503": ([FaultRule(fault="throttle", count=6)], {"throttled": 6, "retries": 6}),
    "every_other_500": ([FaultRule(fault="error", probability=0.5)], {"retries": 2}),
    "refused": ([FaultRule(fault="refuse", count=5)], {"retries": 5}),
    "reset": (body("reset", after_bytes=100, count=3), {"resumed_bodies": 3}),
    "truncated": (body("truncate", after_bytes=50, count=3), {"resumed_bodies": 3}),
    "hang": ([FaultRule(fault="hang", count=3, seconds=0.2)], {"retries": 3}),
    "hang_for_good": ([FaultRule(fault="hang", count=3)], {"retries": 3}),
    "stall": (body("stall", after_bytes=10, count=3, seconds=0.2), {"resumed_bodies": 3}),
    "trickle": (body("trickle", after_bytes=100, count=2, seconds=0.02), {"slow_bodies": 2}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", cases(["mds", "mds_zstd", "tar_foreign"], ["mds_zstd"]))
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_store_change_nothing_but_the_counters(
    datasets: Datasets, kind: str, fault: str
) -> None:
    how, least = FAULTS[fault]
    around = partial(FaultyStore, rules=how, seed=7) if isinstance(how, list) else how
    waits = 0.3 if fault in ("hang", "hang_for_good", "stall") else 10.0
    policy = quick_policy(answer_seconds=waits, floor_bytes_per_second=1000.0, window_seconds=0.1)
    with make(datasets[kind][0]) as local:
        expected = sample_ids(local, 2 * EPOCH)
    below = MemoryStore(datasets[kind][1])
    remote = Remote.open(below, policy=policy, limits=NO_ROWS, around=around)
    with remote.loader(timeout_seconds=20.0) as loader:
        assert sample_ids(loader, 2 * EPOCH) == expected
        counters = remote.shards.counters()
    assert counters["fetched_shards"] == 5
    assert counters["damaged"] == counters["refetched_bytes"] == counters["bypassed"] == 0
    snapshot = remote.store.metrics.snapshot()
    for name, count in least.items():
        assert getattr(snapshot, name) >= count, f"{name}: {snapshot.to_dict()}"


def test_faults_at_the_rows_of_the_first_batches_change_nothing(datasets: Datasets) -> None:
    """In three shards a byte of a row is flipped once; other reads fail: rows are read until two agree."""
    faults = [
        *(FaultRule(fault="corrupt", key=f"0000{shard}", count=1, after_bytes=3) for shard in range(3)),
        FaultRule(fault="error", operation="open", probability=0.3),
    ]
    with make(datasets["mds"][0]) as local:
        expected = sample_ids(local, EPOCH)
    below = FaultyStore(MemoryStore(datasets["mds"][1]), faults, seed=3)
    limits = FetchLimits(single_rows=1 << 30)
    remote = Remote.open(MemoryStore(datasets["mds"][1]), limits=limits, around=lambda store: below)
    with remote.loader(timeout_seconds=20.0) as loader:
        assert sample_ids(loader, EPOCH) == expected
        assert remote.shards.counters()["row_reads"] > 0
    assert sum(event.fault == "corrupt" for event in below.log) == 3


@pytest.mark.parametrize("cache", ["memory", "folder"])
@pytest.mark.parametrize("kind", ["mds", "mds_zstd", "tar"])
def test_a_shard_that_arrives_damaged_is_set_aside_and_fetched_again(
    datasets: Datasets, kind: str, cache: str, tmp_path: Path
) -> None:
    folder, url = datasets[kind]
    rule = FaultRule(fault="corrupt", operation="open", key="00002", after_bytes=170, count=2)
    held = CacheFolder(tmp_path, None) if cache == "folder" else None
    remote = Remote.open(MemoryStore(url), held, limits=NO_ROWS, around=partial(FaultyStore, rules=[rule]))
    with make(folder) as local:
        expected = sample_ids(local, 2 * EPOCH)
    with remote.loader() as loader:
        assert sample_ids(loader, 2 * EPOCH) == expected
    counters = remote.shards.counters()
    assert counters["damaged"] == 2
    assert counters["fetched_shards"] == 5
    if cache == "folder" and kind != "mds_zstd":
        assert len(list((tmp_path / "shardkit-cache-1" / "damaged").iterdir())) == 2
    assert remote.shards.cache.contents().keys() == {remote.shards.entry(number) for number in range(5)}


@pytest.mark.parametrize("kind", ["mds", "mds_zstd", "tar"])
def test_an_object_that_is_damaged_in_the_bucket_stops_the_run_and_is_named(
    datasets: Datasets, kind: str, tmp_path: Path
) -> None:
    rule = FaultRule(fault="corrupt", operation="open", key="00002", after_bytes=170)
    remote = remote_of(datasets, kind, rule, cache=CacheFolder(tmp_path, None), limits=NO_ROWS)
    name = remote.dataset.manifest.shards[2].stored.basename
    with remote.loader() as loader, pytest.raises(DamagedObjectError) as caught:
        sample_ids(loader, 2 * EPOCH)
    assert f"{remote.store.url}/{name}" in str(caught.value)
    assert "fetched 3 times: check the object in the bucket" in str(caught.value)
    assert not (tmp_path / "shardkit-cache-1" / "shards" / remote.shards.entry(2)).exists()


def test_a_missing_object_stops_the_run_and_is_named(datasets: Datasets) -> None:
    for kind in ("mds", "mds_zstd", "tar", "mds_foreign"):
        store = copy_of(datasets, kind)
        remote = Remote.open(store)
        name = remote.dataset.manifest.shards[3].stored.basename
        store.delete(name)
        with remote.loader() as loader, pytest.raises(ObjectNotFoundError, match=re.escape(name)):
            sample_ids(loader, EPOCH)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        # Which comes first depends on whether the shard is fetched whole or by rows.
        ("mds", (ShardError, ObjectChangedError)),
        ("tar", (ShardError, ObjectChangedError)),
        ("mds_foreign", ObjectChangedError),
    ],
)
def test_an_object_that_is_replaced_during_the_run_is_never_delivered(
    datasets: Datasets, kind: str, error: Any
) -> None:
    """By one of the same size: hashes tell, and where there are none the version that was seen first."""
    folder = datasets[kind][0]
    with make(folder) as local:
        expected = [batch["tokens"].tolist() for batch in islice(batches(local), 2 * EPOCH)]
    store = copy_of(datasets, kind)
    # Room for one shard and no more, so that the second epoch has to fetch again.
    largest = max(info.raw.bytes for info in Remote.open(store).dataset.manifest.shards)
    remote = Remote.open(store, CacheMemory(largest * 3 // 2), limits=NO_ROWS)
    got = []
    with pytest.raises(error, match=r"0000\d"), remote.loader() as loader:  # noqa: PT012
        for batch in islice(batches(loader), 2 * EPOCH):
            got.append(batch["tokens"].tolist())
            if len(got) == EPOCH:
                for info in remote.dataset.manifest.shards:
                    content = bytearray(store.get(info.stored.basename))
                    content[-40:] = bytes(40)
                    content[600:640] = bytes(40)
                    store.put(info.stored.basename, bytes(content[: info.stored.bytes]))
    assert len(got) >= EPOCH
    assert got == expected[: len(got)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["mds", "mds_zstd", "mds_foreign", "tar_foreign"])
def test_an_entry_that_was_damaged_between_two_runs_is_fetched_again(
    datasets: Datasets, kind: str, tmp_path: Path
) -> None:
    folder, url = datasets[kind]
    for number, damage in enumerate([b"flip", b"cut", b"longer", b"empty", b"swap"]):
        cache = tmp_path / str(number)
        with make(url, cache_dir=cache) as loader:
            run(loader, 2 * EPOCH)
        entries = sorted((cache / "shardkit-cache-1" / "shards").iterdir())
        assert len(entries) == 5
        data = entries[1].read_bytes()
        changed = {
            b"flip": data[:100] + bytes([data[100] ^ 1]) + data[101:],
            b"cut": data[:-1],
            b"longer": data + b"x",
            b"empty": b"",
            b"swap": entries[2].read_bytes(),
        }[damage]
        entries[1].write_bytes(changed)
        remote = make(url, cache_dir=cache)
        shards = remote.dataset.shards
        assert shards is not None
        assert_same_run(make(folder), remote, 2 * EPOCH)
        counters = shards.counters()
        assert counters["fetched_shards"] == 1, damage
        assert len(list((cache / "shardkit-cache-1" / "damaged").iterdir())) == 1, damage


@pytest.mark.extended
@pytest.mark.parametrize("rows", [0, 128])
@pytest.mark.parametrize("operation", ["open", "any"])
def test_a_store_that_hangs_ends_in_an_error_that_says_all_within_the_timeout(
    datasets: Datasets, operation: Any, rows: int, tmp_path: Path
) -> None:
    below = FaultyStore(
        MemoryStore(datasets["mds"][1]), [FaultRule(fault="hang", operation=operation, seconds=600.0)]
    )
    remote = Remote.open(
        MemoryStore(datasets["mds"][1]),
        CacheFolder(tmp_path, None),
        policy=RetryPolicy(deadline_seconds=300.0),
        limits=FetchLimits(single_rows=rows),
        around=lambda store: below,
    )
    began = time.monotonic()
    try:
        with pytest.raises(TimeoutError) as caught, remote.loader(timeout_seconds=1.0) as loader:
            sample_ids(loader, 3 * EPOCH)
        assert time.monotonic() - began < 100  # far below the store's deadline
        for part in (r"rank 0", r"step \d", r"shard\.\d+\.mds", r"0 of [\d,]+ bytes", "status", "free disk"):
            assert re.search(part, str(caught.value)), f"{part} is not in {caught.value}"
    finally:
        below.release()


def copy_of(datasets: Datasets, kind: str) -> MemoryStore:
    """A dataset's store that a test may change."""
    store = MemoryStore(fresh_url())
    put_folder(datasets[kind][0], store)
    return store


def test_many_streams_share_one_set_of_threads_and_one_plan_for_their_cache(tmp_path: Path) -> None:
    urls = []
    for stream in range(40):
        folder = make_remote_kind(tmp_path / str(stream), "mds", samples=24, shards=3)
        store = MemoryStore(fresh_url())
        put_folder(folder, store)
        urls.append(store.url)
    before = threading.active_count()
    with StreamingLoader(
        [Stream(url) for url in urls],
        batch_size=8,
        cache_dir=tmp_path / "cache",
        rank=0,
        world_size=1,
        layout=Layout(tensors="numpy"),
        return_ids=True,
    ) as loader:
        found = [
            list(zip(batch["stream_id"].tolist(), batch["sample_id"].tolist(), strict=True))
            for batch in loader
        ]
        fetchers = {id(shards.fetcher) for shards in loader._opened.streams.remote}
        assert threading.active_count() - before < 64
        assert len(fetchers) == 1
        assert len(loader._opened.streams.remote[0].fetcher.plans()) == 1
    assert sorted(pair for batch in found for pair in batch) == [(s, n) for s in range(40) for n in range(24)]
