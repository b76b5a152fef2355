"""One process at a time drives a build in a store, whoever comes, goes or dies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from shardkit.errors import BuildError
from shardkit.storage.local import LocalStore
from shardkit.storage.store import Store
from shardkit.writers.execution.lease import DriverLease
from support.stores import FaultRule, FaultyStore, WrappedStore, fresh_memory

SECONDS = 60.0
NEVER = 1e6  # heartbeats come from the tests
T = TypeVar("T")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return fresh_memory() if request.param == "memory" else LocalStore(tmp_path)


def lease_of(store: Store, name: str, clock: Clock | None = None, beat_seconds: float = NEVER) -> DriverLease:
    clock = clock or Clock()
    return DriverLease(
        store,
        name=name,
        lease_seconds=SECONDS,
        beat_seconds=beat_seconds,
        clock=clock,
        sleep=clock.sleep,
    )


def keys(store: Store) -> list[str]:
    return [info.key for info in store.list()]


def test_one_process_has_the_lease_until_it_ends(store: Store) -> None:
    one, two = lease_of(store, "one"), lease_of(store, "two")
    assert one.try_acquire()
    assert not two.try_acquire()
    assert two.holder() == "one"
    one.close()
    assert two.try_acquire()
    two.close()
    assert keys(store) == []


def test_a_second_driver_is_refused_with_the_name_of_the_first(store: Store) -> None:
    one, clock = lease_of(store, "node7-4711"), Clock()
    one.acquire()

    def sleep(seconds: float) -> None:
        clock.now += seconds
        one.renew()

    two = DriverLease(store, name="two", clock=clock, sleep=sleep)
    with (
        pytest.warns(RuntimeWarning, match="node7-4711 holds the lease"),
        pytest.raises(
            BuildError, match=r"node7-4711 runs a build in this work folder; its lease expires 60 s after"
        ),
    ):
        two.acquire()
    assert clock.now - 1000.0 < SECONDS
    one.close()


def test_the_lease_of_a_dead_driver_expires(store: Store) -> None:
    lease_of(store, "dead").acquire()  # killed here
    clock = Clock()
    two = lease_of(store, "two", clock, 10.0)
    with pytest.warns(RuntimeWarning, match="waiting up to 60 s"):
        two.acquire()
    assert SECONDS <= clock.now - 1000.0 < SECONDS + 10
    assert keys(store) == ["lease/00000002"]
    two.close()


class SlowBeats(WrappedStore):
    """`below`, where every write but the first waits."""

    def __init__(self, below: Store) -> None:
        super().__init__(below)
        self.puts, self.is_waiting, self.goes_on = 0, threading.Event(), threading.Event()

    def request(self, operation: str, key: str, action: Callable[[], T]) -> T:
        self.puts += operation == "put"
        if operation == "put" and self.puts > 1:
            self.is_waiting.set()
            assert self.goes_on.wait(30)
        return action()


def test_a_beat_that_is_written_after_the_end_leaves_no_lease() -> None:
    memory, others = fresh_memory(), threading.enumerate()
    slow = SlowBeats(memory)
    lease = lease_of(slow, "one", beat_seconds=0.02)
    lease.acquire()
    assert slow.is_waiting.wait(30)
    [beating] = [thread for thread in threading.enumerate() if thread not in others]
    lease.close()
    assert keys(memory) == []
    slow.goes_on.set()
    beating.join(30)
    assert keys(memory) == []


def test_a_beat_that_is_written_after_a_takeover_leaves_no_lease(store: Store) -> None:
    one, clock = lease_of(store, "one"), Clock()
    one.acquire()
    late = store.get("lease/00000001")
    two = lease_of(store, "two", clock, 10.0)
    with pytest.warns(RuntimeWarning, match="waiting up to 60 s"):
        two.acquire()
    store.put("lease/00000001", late)  # the process was suspended in the middle of this
    one.renew()
    assert one.was_lost
    assert keys(store) == ["lease/00000002"]
    one.close()
    two.close()


def test_a_driver_that_goes_on_keeps_the_lease_whatever_its_clock_says(store: Store) -> None:
    clock = Clock()
    one, two = lease_of(store, "one"), lease_of(store, "two", clock)  # the first one's clock stands still
    one.acquire()
    for _ in range(5):
        assert not two.try_acquire()
        clock.now += SECONDS - 1
        one.renew()
    assert not two.try_acquire()
    one.check()
    one.close()


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("third", [False, True])
def test_a_driver_that_was_suspended_finds_that_it_was_replaced(
    store: Store, *, ended: bool, third: bool
) -> None:
    clock = Clock()
    one, two = lease_of(store, "one"), lease_of(store, "two", clock)
    one.acquire()
    assert not two.try_acquire()
    clock.now += SECONDS
    assert two.try_acquire()
    if ended:
        two.close()
        if third:
            lease_of(store, "three").acquire()  # has the first one's epoch
    one.renew()
    assert not one.held
    with pytest.raises(BuildError, match="another driver has taken over this work folder"):
        one.check()
    before = keys(store)
    one.close()
    assert keys(store) == before, "it removed what is not its own"


def test_of_many_that_see_a_lease_expire_one_takes_it(store: Store) -> None:
    lease_of(store, "dead").acquire()
    clock = Clock()
    others = [lease_of(store, f"other-{n}", clock) for n in range(8)]
    for other in others:
        assert not other.try_acquire()
    clock.now += SECONDS
    threads = [threading.Thread(target=other.try_acquire) for other in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(other.held for other in others) == 1
    [holder] = [other for other in others if other.held]
    holder.renew()
    assert holder.held


def test_a_heartbeat_whose_answer_is_lost_loses_no_lease() -> None:
    memory = fresh_memory()
    store = FaultyStore(memory, [FaultRule(fault="lost_ack", operation="put", skip=1, count=1)])
    lease = lease_of(store, "one", beat_seconds=0.01)
    lease.acquire()
    deadline = time.monotonic() + 30
    while not (store.log and int(memory.get("lease/00000001").split()[-1]) >= 5):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lease.check()
    assert lease.held
    lease.close()
