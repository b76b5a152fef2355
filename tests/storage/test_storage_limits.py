"""The gate: never more inside than the limit, oldest first, urgent before, fewer after 503s, then more."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.storage.limits import Gate, Ticket, shared_gate
from shardkit.storage.metrics import StoreMetrics
from shardkit.storage.resilient import connect
from shardkit.storage.store import ThrottledError
from support.stores import FakeClock


def gate_of(connections: int, clock: FakeClock | None = None) -> Gate:
    return Gate(connections, cool_down_seconds=1.0, clock=clock or FakeClock())


def wait_until(condition: Callable[[], bool]) -> None:
    """Bounded: until `condition()` holds."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def enter_in_thread(gate: Gate, ticket: Ticket, entered: list[Ticket]) -> threading.Thread:
    """Start to wait, and return once the ticket stands in the queue."""
    before = len(gate.queue)

    def work() -> None:
        gate.enter(ticket, 10.0)
        entered.append(ticket)

    thread = threading.Thread(target=work)
    thread.start()
    wait_until(lambda: len(gate.queue) == before + 1 or ticket in gate.inside)
    return thread


def test_a_burst_of_throttling_halves_the_limit_once_and_successes_bring_it_back() -> None:
    clock = FakeClock()
    gate = gate_of(32, clock)
    for _ in range(10):
        gate.throttled()
    assert gate.limit == 16, "those sent together fail together"
    for expected in (8, 4, 2, 1, 1):
        clock.sleep(1.0)
        gate.throttled()
        assert gate.limit == expected
    for _ in range(100):
        gate.succeeded()
    assert gate.limit == 1, "not before the store has been calm for a while"
    clock.sleep(1.0)
    successes = 0
    while gate.limit < 32:
        gate.succeeded()
        successes += 1
    assert successes == sum(range(1, 32)), "one more for as many successes as there is room for"
    for _ in range(100):
        gate.succeeded()
    assert gate.limit == 32, "and never above the number of connections"


def test_who_waits_too_long_leaves_the_queue() -> None:
    gate = gate_of(1)
    first, second = gate.ticket(StoreMetrics()), gate.ticket(StoreMetrics())
    assert gate.enter(first, 1.0)
    assert not gate.enter(second, 0.01)
    assert gate.queue == []
    gate.leave(first)
    assert gate.enter(second)
    gate.leave(second)
    gate.leave(second)
    assert not gate.inside, "leaving twice is leaving once"


def test_the_oldest_operation_enters_first_whoever_began_to_wait_first() -> None:
    gate = gate_of(1)
    holder, old, young = gate.ticket(StoreMetrics()), gate.ticket(StoreMetrics()), gate.ticket(StoreMetrics())
    gate.enter(holder, 1.0)
    entered: list[Ticket] = []
    threads = [enter_in_thread(gate, ticket, entered) for ticket in (young, old)]
    gate.leave(holder)
    wait_until(lambda: len(entered) == 1)
    assert entered == [old]
    gate.leave(old)
    for thread in threads:
        thread.join(60)
    assert entered == [old, young]


def test_nobody_passes_those_who_wait_except_the_urgent() -> None:
    gate = gate_of(2)
    holders = [gate.ticket(StoreMetrics()), gate.ticket(StoreMetrics())]
    for holder in holders:
        gate.enter(holder, 1.0)
    entered: list[Ticket] = []
    patient, late, urgent = (
        gate.ticket(StoreMetrics()),
        gate.ticket(StoreMetrics()),
        gate.ticket(StoreMetrics(), urgent=True),
    )
    threads = [enter_in_thread(gate, patient, entered)]
    threads.append(enter_in_thread(gate, urgent, entered))
    gate.leave(holders[0])
    wait_until(lambda: len(entered) == 1)
    assert entered == [urgent]
    assert not gate.enter(late)
    gate.leave(holders[1])
    for thread in threads:
        thread.join(60)
    assert entered == [urgent, patient]


def test_an_eighth_of_the_limit_is_kept_for_the_urgent() -> None:
    gate = gate_of(16)
    bulk = [gate.ticket(StoreMetrics()) for _ in range(16)]
    assert sum(gate.enter(ticket) for ticket in bulk) == 14
    urgent = [gate.ticket(StoreMetrics(), urgent=True) for _ in range(3)]
    assert [gate.enter(ticket) for ticket in urgent] == [True, True, False]
    assert len(gate.inside) == 16


def test_a_lower_limit_holds_for_who_comes_next() -> None:
    clock = FakeClock()
    gate = gate_of(4, clock)
    inside = [gate.ticket(StoreMetrics()) for _ in range(4)]
    assert all(gate.enter(ticket) for ticket in inside)
    gate.throttled()
    late = gate.ticket(StoreMetrics())
    for ticket in inside[:2]:
        gate.leave(ticket)
        assert not gate.enter(late), "two are inside, and two are allowed"
    gate.leave(inside[2])
    assert gate.enter(late)


def test_a_higher_limit_lets_in_who_waits() -> None:
    clock = FakeClock()
    gate = gate_of(2, clock)
    gate.throttled()
    holder, waiter = gate.ticket(StoreMetrics()), gate.ticket(StoreMetrics())
    gate.enter(holder, 1.0)
    entered: list[Ticket] = []
    thread = enter_in_thread(gate, waiter, entered)
    clock.sleep(1.0)
    gate.succeeded()
    thread.join(60)
    assert entered == [waiter]


@given(
    st.lists(st.sampled_from(["enter", "urgent", "leave", "throttle", "succeed", "sleep"]), max_size=80),
    st.integers(1, 20),
)
def test_never_more_are_inside_than_the_limit_was_when_they_entered(
    steps: list[str], connections: int
) -> None:
    clock = FakeClock()
    metrics = StoreMetrics()
    gate = Gate(connections, clock=clock)
    inside: list[Ticket] = []
    for step in steps:
        if step in ("enter", "urgent"):
            ticket = gate.ticket(metrics, urgent=step == "urgent")
            if gate.enter(ticket):
                assert metrics.snapshot().concurrency_limit == gate.limit
                inside.append(ticket)
                assert len(gate.inside) <= gate.limit
            else:
                assert len(gate.inside) >= gate.limit - gate.limit // 8 * (step == "enter")
        elif step == "leave" and inside:
            gate.leave(inside.pop())
        elif step == "throttle":
            gate.throttled()
        elif step == "succeed":
            gate.succeeded()
        else:
            clock.sleep(0.4)
        assert 1 <= gate.limit <= connections
        assert len(gate.inside) == len(inside) == metrics.snapshot().in_flight


def test_many_threads_all_get_through_a_narrow_gate() -> None:
    gate = gate_of(3)
    most = 0
    lock = threading.Lock()

    def work(number: int) -> None:
        nonlocal most
        for _ in range(50):
            ticket = gate.ticket(StoreMetrics(), urgent=number == 0)
            gate.enter(ticket, 30.0)
            with lock:
                most = max(most, len(gate.inside))
            gate.leave(ticket)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (len(gate.inside), len(gate.queue)) == (0, 0)
    assert 1 <= most <= 3


def test_a_forked_child_starts_with_an_empty_gate() -> None:
    gate = gate_of(1)
    ticket = gate.ticket(StoreMetrics())
    gate.enter(ticket, 1.0)
    with gate._lock:
        child = os.fork()
        if not child:
            own = gate.ticket(StoreMetrics())
            entered = gate.enter(own)
            gate.leave(ticket)  # the parent's: frees nothing here
            os._exit(0 if entered and len(gate.inside) == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(gate.inside) == 1


def test_what_a_process_streams_from_a_bucket_passes_one_gate() -> None:
    urls = [f"memory://one-gate/{number}" for number in range(3)]
    first, second = (connect(url, shares_limit=True) for url in urls[:2])
    again = pickle.loads(pickle.dumps(second))
    alone, elsewhere = connect(urls[2]), connect("memory://another-gate/0", shares_limit=True)
    gates = [store._upstream.gate for store in (first, second, again, alone, elsewhere)]
    assert gates[0] is gates[1] is gates[2]
    assert len(set(map(id, gates))) == 3
    first._upstream.failed(ThrottledError(first.url, "slow down", status=503))
    assert [store.metrics.snapshot().concurrency_limit for store in (first, second)] == [16, 32]
    second.put("key", b"bytes")
    assert second.metrics.snapshot().concurrency_limit == 16
    assert second.metrics.snapshot().in_flight == 0


def test_gates_end_with_their_stores() -> None:
    gate = weakref.ref(connect("memory://short/0", shares_limit=True)._upstream.gate)
    gc.collect()
    assert gate() is None


def test_threads_that_open_stores_at_once_share_a_gate() -> None:
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda _: shared_gate("memory://at-once/0", 7), range(200)))
    assert len(set(map(id, found))) == 1


def test_a_gate_without_room_for_one_is_refused() -> None:
    with pytest.raises(ValueError, match="connections"):
        gate_of(0)
