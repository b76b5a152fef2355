"""The background thread: order, errors, limits, waits, ends."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

import numpy as np
import pytest

from shardkit.loaders.config import BUSY_SECONDS
from shardkit.loaders.producer import Group, LoaderTimeoutError, Prefetcher


class Limits(NamedTuple):
    batches: int
    bytes: int
    timeout_seconds: float


LIMITS = Limits(batches=4, bytes=1 << 20, timeout_seconds=30)
SLOW = 20 * BUSY_SECONDS


def group(number: int) -> Group:
    """One batch of 100 bytes, which is its number."""
    return Group({}, [{"number": number}], [(number + 1, number + 1)], np.array([[number]]), bytes=100)


def numbers(count: int) -> Iterator[Group]:
    return map(group, range(count))


def number_of(found: Group) -> int:
    return int(found.batches[0]["number"])


def prefetch(source: Iterator[Group], limits: Limits = LIMITS) -> Prefetcher:
    return Prefetcher(
        source,
        lambda: "rank 3, reading shard.00007.mds",
        most_batches=limits.batches,
        most_bytes=limits.bytes,
        timeout_seconds=limits.timeout_seconds,
    )


def drain(prefetcher: Prefetcher, pause: float = 0.0) -> list[int]:
    found = []
    while (item := prefetcher.get()) is not None:
        found.append(number_of(item))
        if pause:
            time.sleep(pause)
    return found


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "shardkit-prefetch"]


@pytest.mark.parametrize("pause", [0.0, SLOW])
def test_items_come_in_their_order_whoever_made_them(pause: float) -> None:
    prefetcher = prefetch(numbers(60))
    assert drain(prefetcher, pause) == list(range(60))
    assert prefetcher.get() is None
    prefetcher.close()


def test_a_loop_that_changes_its_pace_still_gets_every_item_once() -> None:
    prefetcher, found = prefetch(numbers(200)), []
    while (item := prefetcher.get()) is not None:
        found.append(number_of(item))
        time.sleep(SLOW if number_of(item) % 20 < 8 else 0)
    prefetcher.close()
    assert found == list(range(200))


def test_a_loop_with_work_of_its_own_finds_its_items_made_by_the_thread() -> None:
    makers = []

    def source() -> Iterator[Group]:
        for number in range(20):
            makers.append(threading.current_thread().name)
            yield group(number)

    prefetcher = prefetch(source())
    drain(prefetcher, SLOW)
    prefetcher.close()
    assert makers[0] == "MainThread", "the first item needs no thread"
    assert makers.count("shardkit-prefetch") >= 10


def test_without_prefetching_there_is_no_thread() -> None:
    prefetcher = prefetch(numbers(6), Limits(batches=0, bytes=0, timeout_seconds=1))
    assert drain(prefetcher, SLOW) == list(range(6))
    assert not threads()


@pytest.mark.parametrize(("limits", "most"), [(Limits(3, 1 << 20, 30), 3), (Limits(50, 250, 30), 3)])
def test_the_thread_stays_within_its_limits(limits: Limits, most: int) -> None:
    made = 0

    def source() -> Iterator[Group]:
        nonlocal made
        for number in range(100):
            made += 1
            yield group(number)

    with closing(prefetch(source(), limits)) as prefetcher:
        for taken in range(1, 8):
            assert prefetcher.get() is not None
            time.sleep(0.02)
            assert made <= taken + most
        deadline = time.monotonic() + 20
        while made < 7 + most - 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert 7 + most - 1 <= made <= 7 + most, "it runs ahead as far as it may"


@pytest.mark.parametrize("pause", [0.0, SLOW])
def test_an_error_comes_where_its_item_was_due_with_its_own_traceback(pause: float) -> None:
    def source() -> Iterator[Group]:
        yield from numbers(5)
        broken_on_purpose()

    def broken_on_purpose() -> None:
        raise OSError("disk on fire")

    prefetcher = prefetch(source())
    for number in range(5):
        assert (item := prefetcher.get()) is not None
        assert number_of(item) == number
        time.sleep(pause)
    with pytest.raises(OSError, match="disk on fire") as caught:
        prefetcher.get()
    assert "broken_on_purpose" in "".join(traceback.format_exception(caught.value))
    with pytest.raises(OSError, match="disk on fire"):
        prefetcher.get()  # never a silent end
    prefetcher.close()


def test_a_wait_that_is_too_long_says_what_it_waited_for() -> None:
    release = threading.Event()

    def source() -> Iterator[Group]:
        yield from numbers(4)
        if threading.current_thread().name == "shardkit-prefetch":
            release.wait(20)
        yield group(4)

    prefetcher = prefetch(source(), Limits(4, 1 << 20, timeout_seconds=0.2))
    with pytest.raises(
        LoaderTimeoutError, match=r"no batch within 0\.2 s: rank 3, reading shard\.00007\.mds"
    ):
        drain(prefetcher, SLOW)
    release.set()
    prefetcher.close()
    assert not threads()


def test_closing_ends_the_thread_at_once_and_twice_is_harmless() -> None:
    prefetcher = prefetch(numbers(10_000))
    for _ in range(5):
        prefetcher.get()
        time.sleep(SLOW)
    assert threads()
    prefetcher.close()
    prefetcher.close()
    assert not threads()
    assert prefetcher.get() is None


def test_a_forked_child_is_told_to_begin_anew_and_cannot_hang() -> None:
    prefetcher = prefetch(numbers(1000))
    for _ in range(4):
        prefetcher.get()
        time.sleep(SLOW)
    child = os.fork()
    if child == 0:
        try:
            prefetcher.get()
        except RuntimeError as error:
            prefetcher.close()
            os._exit(42 if "parent process" in str(error) else 1)
        os._exit(2)
    deadline = time.monotonic() + 20
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    prefetcher.close()
    assert os.waitstatus_to_exitcode(done[1]) == 42
