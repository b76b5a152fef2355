"""Waits grow and are random, an operation ends by its deadline, and few reads, slow ones, are hedged."""

from __future__ import annotations

import dataclasses
import os
import pickle
import random
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.loaders.config import LoaderConfig
from shardkit.storage import StorageOptions
from shardkit.storage.metrics import StoreMetrics
from shardkit.storage.retry import Call, Hedging, RetryPolicy, Upstream, first_good
from shardkit.storage.store import ObjectNotFoundError, StoreError, ThrottledError, TransientError
from support.stores import FakeClock

ERROR = TransientError("s3://b/k", "connection reset", status=500)
TIMEOUT = 60.0


def policy_of(clock: FakeClock, **settings: Any) -> RetryPolicy:
    jitter = random.Random(5).random
    defaults: dict[str, Any] = {"clock": clock, "sleep": clock.sleep, "jitter": jitter}
    return RetryPolicy(**(defaults | settings))


def upstream_of(policy: RetryPolicy, *, has_answered: bool = True) -> Upstream:
    return Upstream("s3://b", policy, StoreMetrics(), 4, has_answered=has_answered)


def exhaust(
    policy: RetryPolicy, error: TransientError = ERROR, *, has_answered: bool = True
) -> TransientError:
    """What becomes of an operation whose every attempt fails, the first of them before."""
    upstream = upstream_of(policy, has_answered=has_answered)
    call = Call(upstream, "open", "s3://b/k")
    call.restart("open", policy.clock(), policy.deadline_seconds, "10 of 20 bytes had arrived")

    def fail() -> None:
        raise error

    with pytest.raises(TransientError) as caught:
        call.answer(fail, failure=error)
    return caught.value


def test_no_attempt_is_made_before_the_time_that_a_throttling_store_names() -> None:
    clock, error = FakeClock(), ThrottledError("s3://b/k", "too many", status=429)
    error.retry_after_seconds = 7.0
    exhaust(policy_of(clock, deadline_seconds=60.0), error)
    assert len(clock.slept) > 4
    assert all(7 <= slept <= 17 for slept in clock.slept)
    clock = FakeClock()
    error.retry_after_seconds = 1e9
    exhaust(policy_of(clock, deadline_seconds=60.0), error)
    assert clock.slept == []  # it would come too late


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
    error = exhaust(policy_of(FakeClock(), deadline_seconds=0.5, jitter=lambda: 1.0))
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
    policy = policy_of(clock, deadline_seconds=seconds, jitter=random.Random(seed).random)
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
    clock = FakeClock()
    upstream = upstream_of(policy_of(clock, report_seconds=5.0))
    for second in range(90):
        clock.sleep(1.0)
        for _ in range(3):
            upstream.retrying("open", ERROR, 1000.0, 90.0 - second)
    upstream.succeeded()
    upstream.succeeded()
    *failing, again = caplog.messages
    assert failing == [
        "s3://b: open has been failing for 5 s, retrying for up to 86 s more: connection reset",
        "s3://b: open has been failing for 65 s, retrying for up to 26 s more: connection reset",
    ], "at most one line a minute"
    assert again == "s3://b: answers again after 90 s"
    found = upstream.metrics.snapshot()
    assert (found.outages, found.retries) == (1, 270)


@pytest.mark.parametrize(
    "settings",
    [
        {"first_contact_seconds": 0.0},
        {"report_seconds": 0.0},
        {"backoff_seconds": 0.0},
        {"longest_backoff_seconds": 0.01},
        {"deadline_seconds": 0.0},
        {"answer_seconds": float("nan")},
        {"hedge_delay_seconds": -1.0},
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


def answered(value: str | StoreError) -> Future[str]:
    future: Future[str] = Future()
    if isinstance(value, StoreError):
        future.set_exception(value)
    else:
        future.set_result(value)
    return future


def test_a_failure_that_may_pass_leaves_it_to_the_other_request() -> None:
    late: Future[str] = Future()
    requests = [late, answered(ERROR)]
    assert first_good(requests, 0.01) is None
    late.set_result("good")
    assert first_good(requests, TIMEOUT) is late


def test_a_failure_that_stays_is_not_made_good_by_the_other_request() -> None:
    with pytest.raises(ObjectNotFoundError):
        first_good([Future(), answered(ObjectNotFoundError("k", "there is no such object"))], TIMEOUT)


def test_when_all_requests_fail_a_failure_is_raised() -> None:
    with pytest.raises(TransientError):
        first_good([answered(ERROR), answered(ThrottledError("k", "slow down"))], TIMEOUT)


class Requests:
    """The n-th request gives `answers[n]` once `released[n]` is set."""

    def __init__(self, *answers: str | StoreError) -> None:
        self.answers = answers
        self.released = [threading.Event() for _ in answers]
        self.started = 0
        self.discarded: list[str] = []
        self.gone = threading.Event()

    def __call__(self) -> str:
        number, self.started = self.started, self.started + 1
        assert self.released[number].wait(TIMEOUT)
        answer = self.answers[number]
        if isinstance(answer, StoreError):
            raise answer
        return answer

    def discard(self, answer: str) -> None:
        self.discarded.append(answer)
        self.gone.set()
        raise StoreError("k", "cannot be closed")  # which harms nobody


@pytest.fixture
def hedging() -> Upstream:
    """A store of which reads are slow after 10 ms, with hedges to spend."""
    upstream = upstream_of(RetryPolicy(hedge_delay_seconds=0.01, hedge_share=1.0, backoff_seconds=0.001))
    for _ in range(20):
        upstream.hedging.answered(0.001)
    return upstream


def test_the_first_answer_wins_and_the_late_one_is_discarded(hedging: Upstream) -> None:
    requests = Requests("slow", "quick")
    requests.released[1].set()
    assert Call(hedging, "open", "k").answer(requests, discard=requests.discard) == "quick"
    assert not requests.discarded
    requests.released[0].set()
    assert requests.gone.wait(TIMEOUT)
    assert requests.discarded == ["slow"]
    found = hedging.metrics.snapshot()
    assert (found.hedges, found.hedges_won, found.in_flight) == (1, 1, 1)


def test_a_hedge_that_fails_leaves_it_to_the_first_request(hedging: Upstream) -> None:
    requests = Requests("slow", ERROR)
    requests.released[1].set()
    threading.Timer(0.05, requests.released[0].set).start()
    assert Call(hedging, "open", "k").answer(requests, discard=requests.discard) == "slow"
    assert (hedging.metrics.snapshot().hedges_won, hedging.metrics.snapshot().retries) == (0, 0)


def test_a_request_that_waited_for_a_thread_until_all_was_over_is_not_sent() -> None:
    upstream = upstream_of(RetryPolicy(answer_seconds=0.01, deadline_seconds=0.2, backoff_seconds=0.001))
    release = threading.Event()
    for _ in range(16):  # as many threads as there may be for four connections
        upstream.workers.submit(lambda: release.wait(TIMEOUT))
    requests = Requests("late")
    with pytest.raises(TransientError, match="no answer within"):
        Call(upstream, "open", "k").answer(requests, discard=requests.discard)
    release.set()
    assert upstream.workers.submit(lambda: "next").result(TIMEOUT) == "next"
    assert requests.started == 0


def hedging_after(latencies: list[float], **settings: Any) -> Hedging:
    hedging = Hedging(RetryPolicy(**settings))
    for seconds in latencies:
        hedging.answered(seconds)
    return hedging


def test_slow_is_slower_than_the_quantile_of_the_latest_reads_and_than_the_minimum() -> None:
    latencies = [number / 100 for number in range(1, 101)]
    assert hedging_after(latencies[4:], hedge_samples=96).delay() == pytest.approx(0.96)
    assert hedging_after([0.001] * 50).delay() == 0.05
    assert hedging_after([0.001] * 50, hedge_delay_seconds=0.0).delay() == 0.001
    assert hedging_after([9.0] * 300 + [0.1] * 256).delay() == 0.1
    assert hedging_after([0.2] * 20).delay() == 0.2


def test_nothing_is_slow_before_there_are_samples_or_if_hedging_is_switched_off() -> None:
    assert hedging_after([0.2] * 19).delay() is None
    assert hedging_after([0.2] * 50, hedge=False).delay() is None


@given(st.lists(st.booleans(), max_size=400), st.floats(0.0, 0.3))
def test_hedges_stay_their_share_of_the_reads(slow: list[bool], share: float) -> None:
    hedging = hedging_after([0.2] * 20, hedge_share=share)
    hedges = 0
    for reads, is_slow in enumerate(slow, 1):
        hedging.delay()
        hedges += is_slow and hedging.take()
        assert hedges <= reads * share + 1e-9


def test_a_saved_up_budget_is_bounded() -> None:
    hedging = hedging_after([0.2] * 20)
    for _ in range(10_000):
        hedging.delay()
    assert sum(hedging.take() for _ in range(1000)) == 32


def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent() -> None:
    upstream = upstream_of(RetryPolicy())
    with upstream._lock, upstream.hedging._lock:
        child = os.fork()
        if not child:
            upstream.retrying("open", ERROR, time.monotonic(), 1.0)
            upstream.hedging.delay()
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
