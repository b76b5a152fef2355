"""A second request: only for who is slow, only for few, and the first good answer counts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.storage.retry import Hedging, Race, RetryPolicy
from shardkit.storage.store import ObjectNotFoundError, StoreError, ThrottledError, TransientError
from shardkit.storage.threads import Workers

TIMEOUT = 60.0


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers(4)
    yield workers
    workers.close()


class Request:
    """Answers `answer`, or raises it, once it is released."""

    def __init__(self, answer: str | BaseException, *, held: bool = False) -> None:
        self.answer = answer
        self.started, self.release = threading.Event(), threading.Event()
        if not held:
            self.release.set()

    def __call__(self) -> str:
        self.started.set()
        assert self.release.wait(TIMEOUT)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


def test_the_first_answer_wins_and_the_late_one_is_discarded(workers: Workers) -> None:
    discarded: list[str] = []
    gone = threading.Event()

    def discard(value: str) -> None:
        discarded.append(value)
        gone.set()

    race = Race[str](workers, discard)
    slow, quick = Request("slow", held=True), Request("quick")
    race.start(slow)
    assert race.answer(0.01) is None
    race.start(quick)
    assert race.answer(TIMEOUT) == (1, "quick")
    race.settle()
    assert not discarded
    slow.release.set()
    assert gone.wait(TIMEOUT)
    assert discarded == ["slow"]


def test_a_failure_that_may_pass_leaves_it_to_the_other_request(workers: Workers) -> None:
    race = Race[str](workers, lambda value: None)
    good = Request("good", held=True)
    race.start(good)
    race.start(Request(TransientError("k", "reset")))
    assert race.answer(0.05) is None
    good.release.set()
    assert race.answer(TIMEOUT) == (0, "good")
    race.settle()


def test_a_failure_that_stays_ends_the_race(workers: Workers) -> None:
    race = Race[str](workers, lambda value: None)
    held = Request("late", held=True)
    race.start(held)
    race.start(Request(ObjectNotFoundError("k", "there is no such object")))
    with pytest.raises(ObjectNotFoundError):
        race.answer(TIMEOUT)
    race.settle()
    held.release.set()


def test_when_all_fail_the_last_failure_is_raised(workers: Workers) -> None:
    race = Race[str](workers, lambda value: None)
    first = Request(TransientError("k", "reset"), held=True)
    second = Request(ThrottledError("k", "slow down"), held=True)
    race.start(first)
    race.start(second)
    first.release.set()
    assert race.answer(0.01) is None
    second.release.set()
    with pytest.raises(ThrottledError):
        race.answer(TIMEOUT)


def test_an_answer_nobody_took_is_discarded_when_the_race_is_settled(workers: Workers) -> None:
    discarded: list[str] = []
    race = Race[str](workers, discarded.append)
    done = threading.Event()
    race.start(Request("unwanted"))
    workers.submit(done.set)
    assert done.wait(TIMEOUT)
    deadline = time.monotonic() + TIMEOUT
    race.settle()
    while discarded != ["unwanted"]:
        assert time.monotonic() < deadline


def test_a_request_that_waited_for_a_thread_until_all_was_over_is_not_sent() -> None:
    workers = Workers(1)
    blocker, late, last = Request("a", held=True), Request("b"), threading.Event()
    race = Race[str](workers, lambda value: None)
    race.start(blocker)
    race.start(late)
    assert race.answer(0.01) is None
    race.settle()
    blocker.release.set()
    workers.submit(last.set)
    assert last.wait(TIMEOUT)
    assert not late.started.is_set()
    workers.close()


def test_a_discarded_answer_that_fails_to_close_harms_nobody(workers: Workers) -> None:
    def refuse(value: str) -> None:
        raise StoreError("k", "cannot be closed")

    race = Race[str](workers, refuse)
    held, done = Request("late", held=True), threading.Event()
    race.start(held)
    race.settle()
    held.release.set()
    workers.submit(done.set)
    assert done.wait(TIMEOUT)


def hedging_after(latencies: list[float], **settings: float) -> Hedging:
    hedging = Hedging(RetryPolicy(**settings))  # type: ignore[arg-type]
    for seconds in latencies:
        hedging.answered(seconds)
    return hedging


def test_nothing_is_slow_before_there_are_samples() -> None:
    assert hedging_after([0.2] * 19).delay() is None
    assert hedging_after([0.2] * 20).delay() == 0.2


def test_slow_is_slower_than_the_quantile_and_than_the_minimum() -> None:
    latencies = [number / 100 for number in range(1, 101)]
    assert hedging_after(latencies[4:], hedge_samples=96).delay() == pytest.approx(0.96)
    assert hedging_after([0.001] * 50).delay() == 0.05
    assert hedging_after([0.001] * 50, hedge_delay_seconds=0.0).delay() == 0.001


def test_only_the_latest_latencies_count() -> None:
    assert hedging_after([9.0] * 300 + [0.1] * 256).delay() == 0.1


def test_hedging_can_be_switched_off() -> None:
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
    taken: Callable[[], bool] = hedging.take
    assert sum(taken() for _ in range(1000)) == 32
