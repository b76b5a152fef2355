"""Claims are leases by each observer's own clock: they save work, and no failure of them stops any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from shardkit.storage.memory import MemoryStore
from shardkit.storage.store import Store
from shardkit.writers.execution.scheduler import Claims
from support.stores import FaultRule, FaultyStore, fresh_memory

LEASE = 60.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def memory() -> MemoryStore:
    return fresh_memory()


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def claims_of(store: Store, name: str, clock: Clock | None = None) -> Claims:
    """They beat once, as they begin: what beats do later, tests do."""
    return Claims(store, name=name, lease_seconds=LEASE, beat_seconds=1e6, clock=clock or Clock())


def keys(store: Store) -> list[str]:
    return [info.key for info in store.list()]


def test_what_one_has_another_does_not_get_until_it_is_released(
    memory: MemoryStore, opened: ExitStack
) -> None:
    one = opened.enter_context(claims_of(memory, "one"))
    two = opened.enter_context(claims_of(memory, "two"))
    assert one.take("stage/a")
    assert not two.take("stage/a"), "taken, though no look was taken at it yet"
    assert two.holder("stage/a") == "another process"
    two.refresh()
    assert two.holder("stage/a") == "one"
    assert two.take("stage/b")
    one.release("stage/a")
    two.refresh()
    assert two.holder("stage/a") is None
    assert two.take("stage/a")


def test_a_session_that_says_nothing_for_a_lease_is_dead_and_leaves_nothing(
    memory: MemoryStore, opened: ExitStack
) -> None:
    clock = Clock()
    claims_of(memory, "dead").__enter__().take("stage/a")  # killed here
    two = opened.enter_context(claims_of(memory, "two", clock))
    two.refresh()
    clock.now += LEASE - 1
    two.refresh()
    assert not two.take("stage/a")
    clock.now += 1
    two.refresh()
    assert keys(memory) == ["sessions/two"]
    assert two.take("stage/a")


def test_a_session_that_goes_on_lives_whatever_its_clock_says(memory: MemoryStore, opened: ExitStack) -> None:
    clock = Clock()
    one = opened.enter_context(claims_of(memory, "one"))  # its clock stands still
    two = opened.enter_context(claims_of(memory, "two", clock))
    one.take("stage/a")
    for number in range(1, 6):
        two.refresh()
        clock.now += LEASE - 1
        one._beat(number)
    two.refresh()
    assert two.holder("stage/a") == "one"


def test_one_that_was_asleep_does_not_let_go_of_what_another_took_over(
    memory: MemoryStore, opened: ExitStack
) -> None:
    clock = Clock()
    one = opened.enter_context(claims_of(memory, "one", clock))
    two = opened.enter_context(claims_of(memory, "two", clock))
    assert one.take("stage/a")
    two.refresh()
    clock.now += LEASE
    two._beat(1)
    two.refresh()
    assert two.take("stage/a")
    one._beat(1)  # it wakes up, beats, and ends its task
    one.release("stage/a")
    assert memory.get("claims/stage/a") == b"two"
    two.release("stage/a")
    assert "claims/stage/a" not in keys(memory)


def test_the_last_one_leaves_nothing_behind(memory: MemoryStore) -> None:
    memory.put("claims/stage/old", b"somebody who was killed long ago")
    with claims_of(memory, "one") as one:
        one.take("stage/a")
        with claims_of(memory, "two") as two:
            two.take("stage/b")
        assert keys(memory) == ["claims/stage/a", "claims/stage/old", "sessions/one"]
    assert keys(memory) == []


@pytest.mark.parametrize("operation", ["put", "list", "get", "delete", "any"])
def test_a_store_that_fails_stops_nobody(memory: MemoryStore, operation: str) -> None:
    claims_of(memory, "dead").__enter__().take("stage/b")
    store = FaultyStore(memory, [FaultRule(fault="deny", operation=operation)])  # type: ignore[arg-type]
    clock = Clock()
    with claims_of(store, "one", clock) as one:
        one.refresh()
        clock.now += LEASE
        one.refresh()
        assert one.take("stage/a")
        assert one.holder("stage/a") is None
        one.release("stage/a")
    assert store.log
