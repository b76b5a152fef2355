"""The cache in memory: exact under threads, empty in children and copies, nothing kept that is not needed."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from types import TracebackType

import pytest

from shardkit.cache.memory import CacheMemory
from support.cache_entries import RAW, check, content, fill, leased, nobody, room


class LockThatIsLostAtOnce:
    """A lock; when it is first released, `then` happens, as if another thread had it next."""

    def __init__(self, then: Callable[[], object]) -> None:
        self._lock = threading.Lock()
        self._then = [then]

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
        if self._then:
            self._then.pop()()


def test_room_is_counted_and_taken_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CacheMemory(RAW)
    slots: list[object] = []
    lock = LockThatIsLostAtOnce(lambda: slots.append(cache.reserve("b", RAW, nobody)))
    monkeypatch.setattr(cache, "_lock", lock)
    slots.append(cache.reserve("a", RAW, nobody))
    assert sum(slot is not None for slot in slots) == 1
    assert sum(held.bytes for held in cache.contents().values()) == RAW


def test_a_name_that_is_there_or_being_filled_is_not_filled_again_and_costs_no_other_its_place() -> None:
    cache = CacheMemory(2 * RAW)
    fill(cache, "a")
    fill(cache, "b")
    assert cache.reserve("a", RAW, lambda contents: ["b"]) is None
    assert cache.contents().keys() == {"a", "b"}


def test_memory_is_given_back_when_an_entry_is_evicted_and_nobody_reads_it() -> None:
    cache = CacheMemory(RAW)
    fill(cache, "a")
    found = cache.find("a")
    assert found is not None
    reference = weakref.ref(found)
    fill(cache, "b")
    assert reference() is not None
    del found
    assert reference() is None


def test_a_forked_child_starts_empty_and_its_parent_keeps_all() -> None:
    cache = CacheMemory(2 * RAW)
    fill(cache, "a")
    being_filled, lease = room(cache, "b"), leased(cache, "b")
    child = os.fork()
    if not child:  # pragma: no cover
        is_empty = cache.contents() == {} and cache.find("a") is None and cache.lease("b") is not None
        is_empty = is_empty and cache.reserve("b", 2 * RAW, nobody) is not None
        os._exit(0 if is_empty else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    being_filled.data[:] = content("b")
    being_filled.commit()
    lease.release()
    for name in "ab":
        check(cache, name)
