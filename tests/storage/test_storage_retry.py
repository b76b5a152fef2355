"""Waits grow and are random, and an operation ends by its deadline."""

from __future__ import annotations

import dataclasses
import pickle
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.loaders.config import LoaderConfig
from shardkit.storage import StorageOptions
from shardkit.storage.metrics import StoreMetrics
from shardkit.storage.retry import Health, Retries, RetryPolicy
from shardkit.storage.store import ThrottledError, TransientError
from support.scripted_store import FakeClock

ERROR = TransientError("s3://b/k", "connection reset", status=500)


def policy_of(clock: FakeClock, **settings: float) -> RetryPolicy:
    return replace(
        RetryPolicy(clock=clock, sleep=clock.sleep, jitter=random.Random(5).random),
        **settings,  # type: ignore[arg-type]
    )


def attempts(policy: RetryPolicy, *, has_answered: bool = True) -> Retries:
    return Retries(Health("s3://b", policy, StoreMetrics(), has_answered=has_answered), "open", "s3://b/k")


def exhaust(
    policy: RetryPolicy, error: TransientError = ERROR, *, has_answered: bool = True
) -> TransientError:
    tries = attempts(policy, has_answered=has_answered)
    for _ in range(1000):
        try:
            tries.wait(error, "10 of 20 bytes had arrived")
        except TransientError as raised:
            return raised
    raise AssertionError("it never failed")


def test_waits_are_drawn_below_a_doubling_bound() -> None:
    clock = FakeClock()
    exhaust(policy_of(clock, deadline_seconds=60.0))
    bounds = [min(10.0, 0.1 * 2**number) for number in range(len(clock.slept))]
    assert len(bounds) > 9
    assert all(0 <= slept <= bound for slept, bound in zip(clock.slept, bounds, strict=True))
    assert len({slept / bound for slept, bound in zip(clock.slept, bounds, strict=True)}) == len(bounds)


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
    error = exhaust(replace(policy_of(clock, deadline_seconds=0.5), jitter=lambda: 1.0))
    assert type(error) is TransientError
    assert error.status == 500
    assert str(error) == (
        "s3://b/k: open failed after 3 attempts in 0.3 s, 10 of 20 bytes had arrived: "
        "connection reset (status 500)"
    )
    assert error.__cause__ is ERROR


def test_throttling_stays_throttling() -> None:
    policy = policy_of(FakeClock(), deadline_seconds=0.01)
    error = exhaust(policy, ThrottledError("k", "slow down", status=503))
    assert type(error) is ThrottledError
    assert "failed after 1 attempt in 0.0 s" in str(error)


@given(st.floats(0.01, 500.0), st.integers(0, 2**32))
def test_operations_use_their_time_and_not_more(seconds: float, seed: int) -> None:
    clock = FakeClock()
    policy = replace(policy_of(clock, deadline_seconds=seconds), jitter=random.Random(seed).random)
    exhaust(policy)
    assert seconds - policy.longest_backoff_seconds - 0.1 <= clock.now - 1000.0 <= seconds


def test_the_defaults_ride_out_what_loaders_wait_for_a_batch() -> None:
    clock = FakeClock()
    exhaust(policy_of(clock))
    [timeout_seconds] = [
        field.default for field in dataclasses.fields(LoaderConfig) if field.name == "timeout_seconds"
    ]
    assert policy_of(clock).deadline_seconds == StorageOptions().retry_seconds == timeout_seconds
    assert sum(clock.slept) > timeout_seconds - RetryPolicy().longest_backoff_seconds - 1


def test_a_store_that_never_answered_is_given_a_few_seconds_only() -> None:
    clock = FakeClock()
    unreachable = TransientError("s3://b/k", "connection refused")
    error = exhaust(policy_of(clock), unreachable, has_answered=False)
    assert sum(clock.slept) < RetryPolicy().first_contact_seconds
    assert str(error).endswith(
        "connection refused; the store has not answered yet: check its URL, the endpoint and the network"
    )


def test_a_failure_is_reported_after_a_while_for_all_operations_together(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, metrics = FakeClock(), StoreMetrics()
    policy = replace(policy_of(clock, report_seconds=5.0), jitter=lambda: 1.0)
    health = Health("s3://b", policy, metrics, has_answered=True)
    operations = [Retries(health, "open", f"s3://b/{number}") for number in range(3)]
    while clock.now < 1090.0:
        for each in operations:
            each.wait(ERROR)
    health.succeeded()
    health.succeeded()
    *failing, again = caplog.messages
    assert len(failing) == 2, "at most one line a minute"
    assert failing[0].startswith("s3://b: open has been failing for ")
    assert failing[0].endswith(" s more: connection reset")
    assert again.startswith("s3://b: answers again after ")
    assert metrics.snapshot().outages == 1


def test_retries_are_counted() -> None:
    metrics, policy = StoreMetrics(), policy_of(FakeClock())
    tries = Retries(Health("s3://b", policy, metrics, has_answered=True), "open", "k")
    tries.wait(ERROR)
    tries.wait(ERROR)
    assert metrics.snapshot().retries == 2


@pytest.mark.parametrize(
    "settings",
    [
        {"first_contact_seconds": 0.0},
        {"report_seconds": 0.0},
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
    assert pickle.loads(pickle.dumps(RetryPolicy(report_seconds=3))) == RetryPolicy(report_seconds=3)
