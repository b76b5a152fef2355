"""Waits grow and are random, and an operation ends: by its tries, or by its deadline."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_store import FakeClock

from shardkit.storage.errors import ThrottledError, TransientError
from shardkit.storage.metrics import StoreMetrics
from shardkit.storage.retry import Retries, RetryPolicy

ERROR = TransientError("s3://b/k", "connection reset", status=500)


def policy_of(clock: FakeClock, **settings: float) -> RetryPolicy:
    return replace(
        RetryPolicy(clock=clock, sleep=clock.sleep, jitter=random.Random(5).random),
        **settings,  # type: ignore[arg-type]
    )


def exhaust(policy: RetryPolicy, error: TransientError = ERROR) -> TransientError:
    tries = Retries(policy, StoreMetrics(), "open", "s3://b/k")
    for _ in range(1000):
        try:
            tries.wait(error, "10 of 20 bytes had arrived")
        except TransientError as raised:
            return raised
    raise AssertionError("it never gave up")


def test_waits_are_drawn_below_a_doubling_bound() -> None:
    clock = FakeClock()
    exhaust(policy_of(clock, attempts=10, deadline_seconds=1e6))
    bounds = [min(10.0, 0.1 * 2**number) for number in range(9)]
    assert len(clock.slept) == 9, "no wait after the last try"
    assert all(0 <= slept <= bound for slept, bound in zip(clock.slept, bounds, strict=True))
    assert len({slept / bound for slept, bound in zip(clock.slept, bounds, strict=True)}) == 9


def test_a_seed_makes_waits_repeatable_and_the_default_leaves_the_global_state_alone() -> None:
    slept = []
    for _ in range(2):
        clock = FakeClock()
        exhaust(policy_of(clock))
        slept.append(clock.slept)
    assert slept[0] == slept[1]
    state = random.getstate()
    assert 0 <= RetryPolicy().jitter() < 1
    assert random.getstate() == state


def test_the_error_says_what_was_tried_for_how_long_and_what_came() -> None:
    clock = FakeClock()
    error = exhaust(policy_of(clock, attempts=3))
    assert type(error) is TransientError
    assert error.status == 500
    seconds = f"{sum(clock.slept):.1f}"
    assert str(error) == (
        f"s3://b/k: gave up to open after 3 tries over {seconds} s, 10 of 20 bytes had arrived: "
        "connection reset (status 500)"
    )
    assert error.__cause__ is ERROR


def test_throttling_stays_throttling() -> None:
    error = exhaust(policy_of(FakeClock(), attempts=1), ThrottledError("k", "slow down", status=503))
    assert type(error) is ThrottledError
    assert "after 1 try over" in str(error)


@given(st.floats(0.01, 500.0), st.integers(1, 50), st.integers(0, 2**32))
def test_no_operation_outlasts_its_deadline(seconds: float, attempts: int, seed: int) -> None:
    clock = FakeClock()
    policy = replace(policy_of(clock, deadline_seconds=seconds), attempts=attempts)
    policy = replace(policy, jitter=random.Random(seed).random)
    exhaust(policy)
    assert clock.now - 1000.0 <= seconds
    assert len(clock.slept) < attempts


def test_the_defaults_outlast_half_a_minute_of_failures() -> None:
    spans = []
    for seed in range(50):
        clock = FakeClock()
        exhaust(replace(policy_of(clock), jitter=random.Random(seed).random))
        spans.append(sum(clock.slept))
    assert min(spans) > 20
    assert sorted(spans)[25] > 40


def test_retries_are_counted() -> None:
    clock, metrics = FakeClock(), StoreMetrics()
    tries = Retries(policy_of(clock), metrics, "open", "k")
    tries.wait(ERROR)
    tries.wait(ERROR)
    assert metrics.snapshot().retries == 2


@pytest.mark.parametrize(
    "settings",
    [
        {"attempts": 0},
        {"backoff_seconds": 0.0},
        {"longest_backoff_seconds": 0.01},
        {"deadline_seconds": 0.0},
        {"answer_seconds": 0.0},
        {"hedge_quantile": 1.0},
        {"hedge_share": 1.5},
        {"hedge_samples": 0},
        {"floor_bytes_per_second": 0.0},
        {"window_seconds": 0.0},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_without_a_meaning_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        policy_of(FakeClock(), **settings)


def test_a_policy_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(RetryPolicy(attempts=3))) == RetryPolicy(attempts=3)
