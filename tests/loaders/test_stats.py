"""What the one line says, for figures of every kind."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardkit.loaders.metrics import CacheStats, LoaderStats, StoreStats, verdict

TRAINING = LoaderStats(steps=1000, seconds=100.0)
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


@pytest.mark.parametrize(
    ("stats", "line"),
    [
        (LoaderStats(), "no steps yet"),
        (TRAINING, "fed: 0.0 % of steps waited"),
        (
            LoaderStats(steps=1000, seconds=100.0, slow_steps=1, slow_wait_seconds=0.5, wait_seconds=0.5),
            "fed: 0.1 % of steps waited",
        ),
        (
            # Every step waits half a millisecond: not felt.
            LoaderStats(steps=1000, seconds=1.0, wait_seconds=0.5),
            "fed: 0.0 % of steps waited",
        ),
    ],
    ids=["nothing yet", "no waits", "one short wait", "waits below the threshold"],
)
def test_a_run_that_hardly_waits_is_fed(stats: LoaderStats, line: str) -> None:
    assert stats.verdict == line


def test_the_wait_for_the_first_batch_does_not_make_a_run_input_bound() -> None:
    cold = LoaderStats(
        steps=20,
        seconds=12.0,
        first_wait_seconds=10.0,
        wait_seconds=10.0,
        slow_steps=1,
        slow_wait_seconds=10.0,
    )
    assert cold.verdict == "fed: 0.0 % of steps waited"


def test_a_slow_step_after_a_slow_first_one_does() -> None:
    stats = LoaderStats(
        steps=20,
        seconds=12.0,
        first_wait_seconds=10.0,
        wait_seconds=11.0,
        slow_steps=2,
        slow_wait_seconds=11.0,
    )
    assert stats.verdict.startswith("input-bound: 5.0 % of steps waited, 50.0 % of the time; ")


def test_few_long_waits_are_input_bound_as_many_short_ones_are() -> None:
    stats = LoaderStats(steps=1000, seconds=100.0, slow_steps=3, slow_wait_seconds=40.0, wait_seconds=40.0)
    assert stats.verdict.startswith("input-bound: 0.3 % of steps waited, 40.0 % of the time; ")


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
            "the cache of 500 GB is too small (50.0 % of the bytes fetched had been evicted before they were "
            "needed): raise cache_bytes",
        ),
        (
            waiting(CacheStats(misses=20, bypassed=5, capacity_bytes=1e9), StoreStats(**CALM)),
            "the cache of 1 GB is too small (5 shards found no room): raise cache_bytes",
        ),
        (
            waiting(CacheStats(misses=9), StoreStats(**CALM, throttled=12)),
            "the store throttles (12 answers 503 to 500 requests): lower connections, use more prefixes or "
            "raise cache_bytes",
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
            "decompression (60 MB/s) is too slow here: give it more CPU cores or store shards uncompressed",
        ),
        (
            waiting(steps=1_000_000, slow_steps=4000, wait_seconds=99.0, slow_wait_seconds=30.0),
            "the loop does nothing but read: this is as fast as batches are made here",
        ),
        (
            waiting(),
            "batches are made too slowly on this machine: look for busy CPU cores or a slow local disk",
        ),
    ],
    ids=[
        "refetched, though throttled too",
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


@pytest.mark.parametrize("slow", [{}, {"slow_steps": 340, "slow_wait_seconds": 30.0}])
def test_damaged_shards_are_named_whatever_the_verdict(slow: dict[str, Any]) -> None:
    stats = LoaderStats(steps=1000, seconds=100.0, cache=CacheStats(quarantined=2), **slow)
    assert "; 2 damaged shards" in stats.verdict


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
