"""Steps and waits are counted exactly, and one line says what the figures mean."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.cache.shards import CachedShards
from shardkit.datasets.dataset import open_dataset
from shardkit.loaders.metrics import CacheStats, LoaderStats, StoreStats, Telemetry, verdict
from shardkit.storage.memory import MemoryStore
from support.loader_data import parts, token_rows
from support.remote_harness import fresh_url, put_folder, write_hashed

WAITS = st.floats(0.0, 5000.0) | st.floats(0.0, 1e-3)
CLASS = 2 ** (1 / 8)


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def hand_over(telemetry: Telemetry, count: int, wait: float, depth: int) -> None:
    """`count` batches that came out of one wait."""
    telemetry.step(wait, depth)
    for _ in range(count - 1):
        telemetry.more()


@given(st.lists(st.tuples(st.integers(1, 64), WAITS, st.integers(0, 64)), min_size=1, max_size=60))
def test_sums_are_exact_and_percentiles_within_a_class(entries: list[tuple[int, float, int]]) -> None:
    telemetry = Telemetry(8)
    for count, wait, depth in entries:
        hand_over(telemetry, count, wait, depth)
    stats = telemetry.stats()
    waits = np.sort([wait for _, wait, _ in entries] + [0.0] * sum(count - 1 for count, _, _ in entries))
    assert (stats.steps, stats.samples) == (len(waits), 8 * len(waits))
    assert stats.wait_seconds == pytest.approx(waits.sum())
    assert stats.slow_steps == int((waits > 1e-3).sum())
    assert stats.slow_wait_seconds == pytest.approx(waits[waits > 1e-3].sum())
    assert (stats.wait_last_seconds, stats.first_wait_seconds) == (entries[-1][1], entries[0][1])
    assert stats.queue_depth == entries[-1][2]
    assert stats.queue_depth_mean == pytest.approx(np.mean([depth for _, _, depth in entries]))
    for part, found in ((0.5, stats.wait_p50_seconds), (0.99, stats.wait_p99_seconds)):
        exact = waits[int(np.ceil(part * len(waits))) - 1]
        exact = 0.0 if exact <= 1e-6 else exact
        assert exact <= found * (1 + 1e-9) or found == stats.wait_max_seconds
        assert found <= exact * CLASS * (1 + 1e-9) or exact > 4000
    assert stats.wait_max_seconds == (waits[-1] if waits[-1] > 1e-6 else 0.0)


def test_time_runs_from_the_moment_the_first_batch_was_asked_for() -> None:
    clock = Clock()
    telemetry = Telemetry(1, clock=clock)
    clock.now += 600.0  # the model is being built
    assert telemetry.stats().seconds == 0.0
    clock.now += 3.0
    telemetry.step(3.0)
    clock.now += 1.0
    assert telemetry.stats().seconds == 4.0


def remote(folder: Path) -> CachedShards:
    """A dataset in a store that has answered all that opening it needs."""
    store = MemoryStore(fresh_url())
    put_folder(folder, store)
    shards = open_dataset(store.url).shards
    assert shards is not None
    return shards


def test_the_figures_of_cache_and_store_are_those_of_all_remote_datasets_together(tmp_path: Path) -> None:
    infos = write_hashed(tmp_path / "data", "mds", token_rows(40), parts(40, 4))
    assert (Telemetry(1).stats().cache, Telemetry(1).stats().store) == (None, None)
    each = [remote(tmp_path / "data") for _ in range(2)]
    telemetry = Telemetry(1, shards=each)
    before = telemetry.stats()
    sizes = [infos[number].stored.bytes for number in (0, 2)]
    for shards, number in zip(each, (0, 2), strict=True):
        shards.load(number)
    stats = telemetry.stats()
    assert before.cache is not None
    assert before.store is not None
    assert stats.cache is not None
    assert stats.store is not None
    assert stats.store.requests == before.store.requests + 2
    assert stats.store.read_bytes == before.store.read_bytes + sum(sizes)
    assert stats.store.errors == before.store.errors > 0  # other kinds of index, and cards, are not there
    assert stats.store.first_byte_p99_seconds is not None
    assert (stats.cache.misses, stats.cache.fetched_bytes, stats.cache.used_bytes) == (
        2,
        sum(sizes),
        sum(sizes),
    )
    assert stats.cache.capacity_bytes == sum(shards.cache.capacity for shards in each)
    for shards in each:
        shards.close()


def test_the_threshold_decides_what_is_slow() -> None:
    telemetry = Telemetry(1, slow_step_seconds=0.5)
    for wait in (0.4, 0.5, 0.6):
        telemetry.step(wait)
    stats = telemetry.stats()
    assert (stats.slow_steps, stats.slow_step_seconds) == (1, 0.5)


def test_another_thread_may_ask_at_any_time() -> None:
    telemetry, done, seen = Telemetry(1), threading.Event(), []

    def ask() -> None:
        while not done.is_set():
            seen.append(telemetry.stats())

    asking = threading.Thread(target=ask)
    asking.start()
    while len(seen) < 20:
        hand_over(telemetry, 2, 0.002, 1)
    done.set()
    asking.join(10)
    steps = [stats.steps for stats in seen]
    assert steps == sorted(steps)
    assert all(stats.wait_p50_seconds >= 0 and stats.wait_max_seconds <= 0.002 * CLASS for stats in seen)


def test_a_step_costs_microseconds_at_most() -> None:
    # Half of one on a quiet machine; the bound leaves room for a busy one and fails for anything clumsy.
    telemetry, best = Telemetry(8), 1.0
    for _ in range(5):
        start = time.thread_time()
        for _ in range(10_000):
            telemetry.step(3e-5, 4)
        best = min(best, (time.thread_time() - start) / 10_000)
    assert best < 3e-6


# The verdict, for figures of every kind.

# 340 of 1,000 steps waited 30 s of 100 s
WAITING: dict[str, Any] = {
    "steps": 1000,
    "samples": 8000,
    "seconds": 100.0,
    "wait_seconds": 30.0,
    "slow_steps": 340,
    "slow_wait_seconds": 30.0,
}
CALM = {"requests": 500.0, "read_bytes": 4e9, "first_byte_p99_seconds": 0.1}


def waiting(cache: CacheStats | None = None, store: StoreStats | None = None, **other: float) -> LoaderStats:
    return LoaderStats(**(WAITING | other), cache=cache, store=store)


def slow(steps: int, seconds: float, slow_steps: int, lost: float, *, first: float = 0.0) -> LoaderStats:
    """A run that lost some seconds in slow steps, `first` of them in its first one."""
    return LoaderStats(
        steps=steps,
        seconds=seconds,
        first_wait_seconds=first,
        wait_seconds=lost,
        slow_steps=slow_steps,
        slow_wait_seconds=lost,
    )


@pytest.mark.parametrize(
    ("stats", "line"),
    [
        pytest.param(LoaderStats(), "no steps yet", id="nothing yet"),
        pytest.param(slow(1000, 100.0, 0, 0.0), "fed: 0.0% of steps waited", id="no waits"),
        pytest.param(slow(1000, 100.0, 1, 0.5), "fed: 0.1% of steps waited", id="one short wait"),
        pytest.param(
            LoaderStats(steps=1000, seconds=1.0, wait_seconds=0.5),
            "fed: 0.0% of steps waited",
            id="every step waits less than the threshold",
        ),
        pytest.param(slow(20, 12.0, 1, 10.0, first=10.0), "fed: 0.0% of steps waited", id="a cold start"),
        pytest.param(
            slow(20, 12.0, 2, 11.0, first=10.0),
            "input-bound: 5.0% of steps waited, 50.0% of the time",
            id="a slow step after a cold start",
        ),
        pytest.param(
            slow(1000, 100.0, 3, 40.0),
            "input-bound: 0.3% of steps waited, 40.0% of the time",
            id="few long waits",
        ),
    ],
)
def test_a_run_is_fed_unless_time_is_lost_in_slow_steps(stats: LoaderStats, line: str) -> None:
    assert stats.verdict.partition("; ")[0] == line


@pytest.mark.parametrize(
    ("stats", "cause"),
    [
        (
            waiting(
                CacheStats(
                    misses=9, fetched_bytes=4e9, refetched_bytes=2e9, evictions=70, capacity_bytes=5e11
                ),
                StoreStats(**CALM, throttled=400),
            ),
            "the cache of 500 GB is too small (50.0% of the bytes fetched had been evicted before they were "
            "needed): raise cache_bytes",
        ),
        (
            waiting(CacheStats(misses=9, disk_full=9, fetched_bytes=4e9, refetched_bytes=2e9)),
            "the cache's disk is full, so shards are read into memory: free disk space or change cache_dir",
        ),
        (
            waiting(CacheStats(misses=9, locked_out=9, fetched_bytes=4e9, refetched_bytes=2e9)),
            "a stopped process holds the lock of the cache: continue it or end it",
        ),
        (
            waiting(CacheStats(misses=20, bypassed=5, capacity_bytes=1e9), StoreStats(**CALM)),
            "the cache of 1 GB is too small (5 shards did not fit): raise cache_bytes",
        ),
        (
            waiting(CacheStats(misses=9), StoreStats(**CALM, throttled=12)),
            "the store throttles (12 of 500 requests were answered 503): lower connections, use more "
            "prefixes or raise cache_bytes",
        ),
        (
            waiting(CacheStats(misses=9), StoreStats(**CALM, throttled=1, retries=50, errors=48)),
            "the store fails (50 retries, 48 errors, 500 requests): check the network and the endpoint",
        ),
        (
            waiting(CacheStats(misses=9), StoreStats(**(CALM | {"first_byte_p99_seconds": 2.1}))),
            "the store is slow (GET p99 2.1 s): raise connections or cache_bytes",
        ),
        (
            waiting(
                CacheStats(misses=0, row_reads=7), StoreStats(**(CALM | {"first_byte_p99_seconds": 0.6}))
            ),
            "the store is slow (GET p99 600 ms): raise connections or cache_bytes",
        ),
        (
            waiting(CacheStats(misses=9), StoreStats(**CALM)),
            "the store delivers 40 MB/s, less than is used: raise connections or cache_bytes",
        ),
        (
            waiting(None, StoreStats(**CALM)),
            "the store delivers 40 MB/s, less than is used: raise connections or cache_bytes",
        ),
        (
            # The store is slow, but nothing was missing when it was needed.
            waiting(
                CacheStats(hits=900, decompressed_bytes=6e9),
                StoreStats(**(CALM | {"first_byte_p99_seconds": 2.1})),
            ),
            "decompression (60 MB/s) is too slow: give this process more CPU cores, or build uncompressed "
            "shards",
        ),
        (
            waiting(steps=1_000_000, slow_steps=4000, wait_seconds=99.0, slow_wait_seconds=30.0),
            "the loop only reads, so this is the maximum rate at which this machine makes batches",
        ),
        (
            waiting(),
            "this machine makes batches too slowly: look for busy CPU cores or a slow local disk",
        ),
    ],
    ids=[
        "refetched, though throttled too",
        "full disk",
        "stopped process",
        "bypassed",
        "throttled",
        "failing",
        "slow first bytes",
        "slow first bytes of rows",
        "bandwidth",
        "no cache",
        "decompression",
        "a loop that only reads",
        "processor",
    ],
)
def test_an_input_bound_run_is_told_the_likeliest_cause(stats: LoaderStats, cause: str) -> None:
    assert verdict(stats).partition("of the time; ")[2] == cause


@pytest.mark.parametrize("stats", [slow(1000, 100.0, 0, 0.0), slow(1000, 100.0, 340, 30.0)])
def test_damaged_shards_are_named_whatever_the_verdict(stats: LoaderStats) -> None:
    assert "; 2 damaged shards" in replace(stats, cache=CacheStats(quarantined=2)).verdict


def test_shares_and_rates_follow_from_the_figures() -> None:
    stats = waiting()
    assert (stats.samples_per_second, stats.slow_steps_share, stats.waited_share) == (80.0, 0.34, 0.3)
    assert (LoaderStats().samples_per_second, LoaderStats().slow_steps_share) == (0.0, 0.0)


def test_the_dictionary_is_plain_data_and_complete() -> None:
    stats = waiting(CacheStats(hits=3), StoreStats(requests=4))
    plain = json.loads(json.dumps(stats.to_dict()))
    assert plain["cache"]["hits"] == 3
    assert plain["store"] == {
        "requests": 4,
        "read_bytes": 0,
        "retries": 0,
        "outages": 0,
        "throttled": 0,
        "hedges": 0,
        "resumed_bodies": 0,
        "errors": 0,
        "first_byte_p50_seconds": None,
        "first_byte_p99_seconds": None,
    }
    assert plain["samples_per_second"] == 80.0
    assert plain["verdict"] == stats.verdict
    assert LoaderStats().to_dict()["cache"] is None
