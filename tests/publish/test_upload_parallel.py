"""Many items at a time: each once, all failures told, an interruption heard at once."""

from __future__ import annotations

import threading

import pytest

from shardkit.publish.publication import MAX_ERRORS, run_all
from support.stores import PulledPlugError

WAIT_SECONDS = 30.0  # far above what any test takes


@pytest.mark.parametrize("threads", [1, 3, 50])
def test_every_item_is_handled_once(threads: int) -> None:
    lock, seen = threading.Lock(), []

    def handle(item: int) -> None:
        with lock:
            seen.append(item)

    assert run_all(iter(range(200)), handle, threads) == []
    assert sorted(seen) == list(range(200))


def test_as_many_items_as_threads_are_handled_at_once() -> None:
    meeting = threading.Barrier(4, timeout=WAIT_SECONDS)

    def handle(item: int) -> None:
        meeting.wait()

    assert run_all(range(8), handle, 4) == []


def test_failures_do_not_stop_the_rest_and_are_told_with_their_items() -> None:
    done = []

    def handle(item: int) -> None:
        if item % 3 == 0:
            raise ValueError(item)
        done.append(item)

    errors = run_all(range(12), handle, 2)
    assert sorted(item for item, _ in errors) == [0, 3, 6, 9]
    assert {str(error) for _, error in errors} == {"0", "3", "6", "9"}
    assert len(done) == 8


def test_where_everything_fails_it_ends_soon() -> None:
    def handle(item: int) -> None:
        raise ValueError(item)

    threads = 4
    errors = run_all(range(10_000), handle, threads)
    assert MAX_ERRORS <= len(errors) < MAX_ERRORS + threads


def test_an_interruption_is_raised_without_waiting_for_the_other_threads() -> None:
    release, busy = threading.Event(), threading.Event()

    def handle(item: int) -> None:
        if item == 0:
            busy.set()
            assert release.wait(WAIT_SECONDS)
        else:
            assert busy.wait(WAIT_SECONDS)
            raise PulledPlugError

    try:
        with pytest.raises(PulledPlugError):
            run_all(range(100), handle, 2)
    finally:
        release.set()


def test_what_goes_wrong_with_the_items_themselves_is_raised() -> None:
    def items() -> object:
        yield 1
        raise PulledPlugError

    with pytest.raises(PulledPlugError):
        run_all(items(), lambda item: None, 2)  # type: ignore[arg-type]
