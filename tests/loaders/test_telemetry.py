"""Counting steps and waits: exact sums, percentiles within a class, stretches that add up."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.loaders.metrics import StoreStats, Telemetry

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


def test_sources_may_lack_names_and_have_others() -> None:
    telemetry = Telemetry(1, sources={"store": lambda: {"requests": 3, "weather": 1}})
    stats = telemetry.stats()
    assert stats.store == StoreStats(requests=3)
    assert stats.cache is None


def test_a_percentile_that_is_not_known_yet_is_none() -> None:
    values = {"first_byte_p50_seconds": None, "first_byte_p99_seconds": 0.2}
    stats = Telemetry(1, sources={"store": lambda: values}).stats()
    assert stats.store == StoreStats(first_byte_p50_seconds=None, first_byte_p99_seconds=0.2)


def test_a_source_of_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown sources stor: known are cache, store"):
        Telemetry(1, sources={"stor": dict})


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


def test_counting_needs_no_torch() -> None:
    code = "import sys, shardkit.loaders.metrics, shardkit.loaders.prometheus; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"
