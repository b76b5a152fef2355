"""The gate: never more inside than the limit, oldest first, urgent before, fewer after 503s, then more."""

from __future__ import annotations

import os
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.storage.limits import Gate, Ticket
from shardkit.storage.metrics import StoreMetrics
from shardkit.storage.store import TransientError
from support.scripted_store import FakeClock


def gate_of(connections: int, clock: FakeClock | None = None) -> Gate:
    return Gate(connections, StoreMetrics(), cool_down_seconds=1.0, clock=clock or FakeClock())


def wait_until(condition: object) -> None:
    """Bounded: until `condition()` holds."""
    assert callable(condition)
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def enter_in_thread(gate: Gate, ticket: Ticket, entered: list[Ticket]) -> threading.Thread:
    """Start to wait, and return once the ticket stands in the queue."""
    before = gate.waiting

    def work() -> None:
        ticket.enter("key", 10.0)
        entered.append(ticket)

    thread = threading.Thread(target=work)
    thread.start()
    wait_until(lambda: gate.waiting == before + 1 or ticket.inside)
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


def test_who_waits_too_long_gets_an_error_and_leaves_the_queue() -> None:
    gate = gate_of(1)
    first, second = gate.ticket(), gate.ticket()
    first.enter("key", 1.0)
    with pytest.raises(TransientError, match=r"waited 0\.0 s for one of 1 connections, 1 are in use"):
        second.enter("key", 0.01)
    assert gate.waiting == 0
    first.leave()
    assert second.try_enter()
    second.leave()
    second.leave()
    assert gate.in_use == 0, "leaving twice is leaving once"


def test_the_oldest_operation_enters_first_whoever_began_to_wait_first() -> None:
    gate = gate_of(1)
    holder, old, young = gate.ticket(), gate.ticket(), gate.ticket()
    holder.enter("key", 1.0)
    entered: list[Ticket] = []
    threads = [enter_in_thread(gate, ticket, entered) for ticket in (young, old)]
    holder.leave()
    wait_until(lambda: len(entered) == 1)
    assert entered == [old]
    old.leave()
    for thread in threads:
        thread.join(60)
    assert entered == [old, young]


def test_nobody_passes_those_who_wait_except_the_urgent() -> None:
    gate = gate_of(2)
    holders = [gate.ticket(), gate.ticket()]
    for holder in holders:
        holder.enter("key", 1.0)
    entered: list[Ticket] = []
    patient, late, urgent = gate.ticket(), gate.ticket(), gate.ticket(urgent=True)
    threads = [enter_in_thread(gate, patient, entered)]
    threads.append(enter_in_thread(gate, urgent, entered))
    holders[0].leave()
    wait_until(lambda: len(entered) == 1)
    assert entered == [urgent]
    assert not late.try_enter()
    holders[1].leave()
    for thread in threads:
        thread.join(60)
    assert entered == [urgent, patient]


def test_an_eighth_of_the_limit_is_kept_for_the_urgent() -> None:
    gate = gate_of(16)
    bulk = [gate.ticket() for _ in range(16)]
    assert sum(ticket.try_enter() for ticket in bulk) == 14
    urgent = [gate.ticket(urgent=True) for _ in range(3)]
    assert [ticket.try_enter() for ticket in urgent] == [True, True, False]
    assert gate.in_use == 16


def test_a_lower_limit_holds_for_who_comes_next() -> None:
    clock = FakeClock()
    gate = gate_of(4, clock)
    inside = [gate.ticket() for _ in range(4)]
    assert all(ticket.try_enter() for ticket in inside)
    gate.throttled()
    late = gate.ticket()
    for ticket in inside[:2]:
        ticket.leave()
        assert not late.try_enter(), "two are inside, and two are allowed"
    inside[2].leave()
    assert late.try_enter()


def test_a_higher_limit_lets_in_who_waits() -> None:
    clock = FakeClock()
    gate = gate_of(2, clock)
    gate.throttled()
    holder, waiter = gate.ticket(), gate.ticket()
    holder.enter("key", 1.0)
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
    gate = Gate(connections, metrics, clock=clock)
    inside: list[Ticket] = []
    for step in steps:
        if step in ("enter", "urgent"):
            ticket = gate.ticket(urgent=step == "urgent")
            if ticket.try_enter():
                inside.append(ticket)
                assert gate.in_use <= gate.limit
            else:
                assert gate.in_use >= gate.limit - gate.limit // 8 * (step == "enter")
        elif step == "leave" and inside:
            inside.pop().leave()
        elif step == "throttle":
            gate.throttled()
        elif step == "succeed":
            gate.succeeded()
        else:
            clock.sleep(0.4)
        assert 1 <= gate.limit <= connections
        assert gate.in_use == len(inside) == metrics.snapshot().in_flight
        assert metrics.snapshot().concurrency_limit == gate.limit


def test_many_threads_all_get_through_a_narrow_gate() -> None:
    gate = gate_of(3)
    most = 0
    lock = threading.Lock()

    def work(number: int) -> None:
        nonlocal most
        for _ in range(50):
            ticket = gate.ticket(urgent=number == 0)
            ticket.enter("key", 30.0)
            with lock:
                most = max(most, gate.in_use)
            ticket.leave()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (gate.in_use, gate.waiting) == (0, 0)
    assert 1 <= most <= 3


def test_a_forked_child_starts_with_an_empty_gate() -> None:
    gate = gate_of(1)
    ticket = gate.ticket()
    ticket.enter("key", 1.0)
    with gate._lock:
        child = os.fork()
        if not child:
            own = gate.ticket()
            entered = own.try_enter()
            ticket.leave()  # the parent's: frees nothing here
            os._exit(0 if entered and gate.in_use == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert gate.in_use == 1


def test_a_gate_without_room_for_one_is_refused() -> None:
    with pytest.raises(ValueError, match="connections"):
        gate_of(0)
