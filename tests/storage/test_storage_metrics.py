"""Counting requests: nothing is lost between threads, quantiles are as good as stated, differences add up."""

from __future__ import annotations

import json
import math
import os
import pickle
import threading

from hypothesis import given
from hypothesis import strategies as st

from shardkit.storage.metrics import MetricsSnapshot, StoreMetrics
from shardkit.storage.store import ObjectNotFoundError, ThrottledError, TransientError


def test_threads_lose_no_counts() -> None:
    metrics = StoreMetrics()

    def work() -> None:
        for _ in range(2000):
            metrics.request("open")
            metrics.count("bytes_read", 10)
            metrics.in_flight(1, 8)
            metrics.first_byte(0.01)
            metrics.in_flight(-1, 8)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = metrics.snapshot()
    assert (found.requests, found.bytes_read, found.in_flight) == ({"open": 8000}, 80_000, 0)
    assert sum(found.first_byte_buckets) == 8000


def test_errors_count_by_kind_and_the_last_status_stays() -> None:
    metrics = StoreMetrics()
    for error in (
        TransientError("a", "b", status=500),
        ThrottledError("a", "b", status=503),
        ThrottledError("a", "b", status=429),
        TransientError("a", "timed out"),
        ObjectNotFoundError("a", "b", status=404),
        TransientError("a", "timed out"),
    ):
        metrics.error(error)
    found = metrics.snapshot()
    assert found.errors == {"TransientError": 3, "ThrottledError": 2, "ObjectNotFoundError": 1}
    assert (found.throttled, found.last_status) == (2, 404)


@given(st.lists(st.floats(1e-4, 999.0), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_a_quantile_is_off_by_less_than_a_tenth(seconds: list[float], quantile: float) -> None:
    metrics = StoreMetrics()
    for value in seconds:
        metrics.first_byte(value)
    exact = sorted(seconds)[max(1, math.ceil(quantile * len(seconds))) - 1]
    found = metrics.snapshot().first_byte_seconds(quantile)
    assert found is not None
    assert abs(found / exact - 1) <= 0.096


def test_latencies_beyond_the_buckets_count_at_their_edges() -> None:
    metrics = StoreMetrics()
    metrics.first_byte(0.0)
    metrics.first_byte(1e9)
    found = metrics.snapshot()
    low, high = found.first_byte_seconds(0.5), found.first_byte_seconds(1.0)
    assert low is not None
    assert high is not None
    assert low < 1e-4
    assert 900 < high < 1300


def test_without_requests_there_is_no_quantile() -> None:
    assert MetricsSnapshot().first_byte_seconds(0.5) is None


def test_an_interval_is_the_difference_of_two_snapshots() -> None:
    metrics = StoreMetrics()
    metrics.request("open")
    metrics.request("head")
    metrics.count("retries", 3)
    metrics.first_byte(5.0)
    metrics.in_flight(2, 8)
    earlier = metrics.snapshot()
    metrics.request("open")
    metrics.count("bytes_read", 7)
    metrics.error(ThrottledError("a", "b", status=503))
    metrics.first_byte(0.01)
    found = metrics.snapshot().minus(earlier)
    assert found.requests == {"open": 1}
    assert (found.retries, found.bytes_read, found.throttled, found.errors) == (
        0,
        7,
        1,
        {"ThrottledError": 1},
    )
    assert (found.in_flight, found.last_status) == (2, 503), "gauges are as they are now"
    p99 = found.first_byte_seconds(0.99)
    assert p99 is not None
    assert p99 < 0.02, "the slow one was before"


def test_a_snapshot_is_plain_data() -> None:
    metrics = StoreMetrics()
    metrics.request("open")
    metrics.first_byte(0.1)
    plain = json.loads(json.dumps(metrics.snapshot().to_dict()))
    assert plain["requests"] == {"open": 1}
    assert 0.09 < plain["first_byte_p50_seconds"] < 0.11


def test_a_pickled_copy_counts_from_zero_on_its_own() -> None:
    metrics = StoreMetrics()
    metrics.request("open")
    copy = pickle.loads(pickle.dumps(metrics))
    copy.request("head")
    assert copy.snapshot().requests == {"head": 1}
    assert metrics.snapshot().requests == {"open": 1}


def test_a_forked_child_can_count_though_a_thread_of_the_parent_was_counting() -> None:
    metrics = StoreMetrics()
    metrics.in_flight(3, 8)
    with metrics._lock:  # what another thread does at that moment
        child = os.fork()
        if not child:
            metrics.request("open")
            os._exit(0 if metrics.snapshot().in_flight == 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert metrics.snapshot().in_flight == 3
