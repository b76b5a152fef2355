"""What every cache of shards must do, on a disk and in memory."""

from __future__ import annotations

import os
import pickle
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from shardkit.cache.entry import sealed_size
from shardkit.cache.folder import CacheFolder
from shardkit.cache.memory import CacheMemory
from shardkit.cache.protocol import CACHE_COUNTERS, Cache, Contents
from support.cache_entries import RAW, check, content, fill, leased, nobody, oldest, room, used

FORKED_SECONDS = 10


@dataclass
class Kind:
    """A kind of cache: how to make one, and what an entry takes there."""

    make: Callable[[int], Cache]
    cost: Callable[[int], int]

    def room_for(self, entries: int) -> Cache:
        return self.make(entries * self.cost(RAW))


@pytest.fixture(params=["folder", "memory"])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    if request.param == "memory":
        return Kind(CacheMemory, lambda raw_bytes: raw_bytes)
    return Kind(lambda capacity: CacheFolder(tmp_path / "cache", capacity), sealed_size)


def test_what_was_committed_is_found_and_cannot_be_written(kind: Kind) -> None:
    cache = kind.room_for(2)
    assert cache.find("a") is None
    assert not cache.has("a")
    fill(cache, "a")
    found = check(cache, "a")
    assert cache.has("a")
    assert found.dtype == np.uint8
    assert not found.flags.writeable


def test_a_touch_finds_entries_only_and_counts_as_a_use(kind: Kind) -> None:
    cache = kind.room_for(2)
    assert not cache.touch("a")
    slot = room(cache, "a")
    assert not cache.touch("a")
    slot.commit()
    time.sleep(0.05)
    fill(cache, "b")
    assert oldest(cache.contents())[0] == "a"
    assert cache.touch("a")
    slot = room(cache, "c", RAW, oldest)
    assert cache.touch("a")
    assert not cache.touch("b")
    slot.discard()


@pytest.mark.parametrize("size", [0, 1, 4096, 100_003])
def test_entries_have_any_size(kind: Kind, size: int) -> None:
    cache = kind.make(1 << 20)
    fill(cache, "a", size)
    check(cache, "a", size)


def test_an_entry_being_filled_takes_its_room_and_is_not_found(kind: Kind) -> None:
    cache = kind.room_for(2)
    slot = room(cache, "a")
    assert slot.data.shape == (RAW,)
    assert slot.data.flags.writeable
    assert cache.find("a") is None
    assert not cache.has("a")
    held = cache.contents()["a"]
    assert held.filling
    assert held.bytes == kind.cost(RAW)
    slot.commit()
    held = cache.contents()["a"]
    assert not held.filling
    assert held.bytes == kind.cost(RAW)
    assert 0 <= held.used_seconds_ago < 60


def test_entries_are_evicted_in_the_order_named_and_no_more_than_needed(kind: Kind) -> None:
    cache = kind.room_for(4)
    for name in "abcd":
        fill(cache, name)
    room(cache, "e", 2 * RAW - 500, lambda contents: ["missing", "c", "a", "b"]).commit()
    assert cache.contents().keys() == {"b", "d", "e"}
    counters = cache.counters()
    assert counters["evictions"] == 2
    assert counters["evicted_bytes"] == 2 * kind.cost(RAW)
    assert cache.find("c") is None
    assert not cache.has("a")


def test_nothing_is_evicted_while_there_is_room(kind: Kind) -> None:
    cache = kind.room_for(3)
    fill(cache, "a")
    fill(cache, "b")
    assert cache.reserve("c", RAW, oldest) is not None
    assert cache.contents().keys() == {"a", "b", "c"}
    assert cache.counters()["evictions"] == 0


def test_there_is_no_room_without_victims_or_beyond_the_capacity(kind: Kind) -> None:
    cache = kind.room_for(2)
    fill(cache, "a")
    fill(cache, "b")
    assert cache.reserve("c", RAW, nobody) is None
    assert cache.reserve("c", 3 * RAW, oldest) is None
    assert cache.contents().keys() == {"a", "b"}  # not evicted for what would never fit
    fill(cache, "c", RAW)


def test_a_cache_without_capacity_has_no_room_and_no_errors(kind: Kind) -> None:
    cache = kind.make(0)
    assert cache.capacity == 0
    assert cache.reserve("a", RAW, oldest) is None
    assert cache.contents() == {}


def test_what_is_being_filled_is_never_evicted(kind: Kind) -> None:
    cache = kind.room_for(2)
    slots = [cache.reserve(name, RAW, nobody) for name in "ab"]
    assert cache.reserve("c", RAW, lambda contents: [*contents]) is None
    for name, slot in zip("ab", slots, strict=True):
        assert slot is not None
        slot.data[:] = content(name)
        slot.commit()
    assert cache.contents().keys() == {"a", "b"}


def test_the_least_recently_used_entry_looks_the_oldest(kind: Kind) -> None:
    cache = kind.room_for(3)
    for name in "abc":
        fill(cache, name)
    for name in ("b", "c", "a"):
        assert cache.find(name) is not None
    fill(cache, "d")
    assert cache.contents().keys() == {"a", "c", "d"}


def test_a_removed_entry_gives_its_room_back_and_its_bytes_stay_readable(kind: Kind) -> None:
    cache = kind.room_for(2)
    fill(cache, "a")
    data = check(cache, "a")
    for _ in range(2):
        cache.remove("a")
        assert not cache.has("a")
        assert used(cache) == 0
    np.testing.assert_array_equal(data, content("a"))
    cache.remove("unknown")


@pytest.mark.parametrize("damaged", [False, True], ids=["sound", "damaged"])
def test_discarded_room_is_free_again(kind: Kind, damaged: bool) -> None:
    cache = kind.room_for(1)
    for _ in range(3):
        slot = room(cache, "a")
        slot.data[:] = 1
        slot.discard(damaged=damaged)
        slot.discard(damaged=damaged)
        assert cache.contents() == {}
        assert cache.find("a") is None
    fill(cache, "a")


def test_what_is_discarded_after_its_commit_stays(kind: Kind) -> None:
    cache = kind.room_for(1)
    slot = room(cache, "a")
    slot.data[:] = content("a")
    slot.commit()
    slot.discard()
    check(cache, "a")


def test_a_name_filled_a_second_time_is_still_one_entry(kind: Kind) -> None:
    # Happens when the holder of a lease was stopped, and others went on without it.
    cache = kind.room_for(3)
    fill(cache, "a")
    slot = cache.reserve("a", RAW, nobody)
    if slot is not None:
        assert used(cache) == 2 * kind.cost(RAW)
        slot.data[:] = content("a")
        slot.commit()
    assert used(cache) == kind.cost(RAW)
    check(cache, "a")


def test_two_who_fill_one_name_never_exceed_the_capacity(kind: Kind) -> None:
    cache = kind.room_for(2)
    slots = [cache.reserve("a", RAW, nobody) for _ in range(3)]
    taken = [slot for slot in slots if slot is not None]
    assert 1 <= len(taken) <= 2
    assert used(cache) == len(taken) * kind.cost(RAW)
    for slot in taken:
        slot.data[:] = content("a")
        slot.commit()
    assert used(cache) == kind.cost(RAW)


def test_bytes_stay_readable_after_their_entry_was_evicted(kind: Kind) -> None:
    cache = kind.room_for(1)
    fill(cache, "a")
    found = check(cache, "a")
    fill(cache, "b")
    assert cache.find("a") is None
    np.testing.assert_array_equal(found, content("a"))


def test_a_lease_has_one_holder_and_belongs_to_its_name(kind: Kind) -> None:
    cache = kind.make(0)
    lease = leased(cache, "a")
    assert cache.lease("a") is None
    assert cache.lease("a", 0.02) is None
    other = leased(cache, "b")
    lease.release()
    again = leased(cache, "a")
    again.release()
    other.release()


def test_who_waits_for_a_lease_gets_it_when_it_is_released(kind: Kind) -> None:
    cache = kind.make(0)
    lease = leased(cache, "a")
    got: list[bool] = []
    waiting = threading.Thread(target=lambda: got.append(cache.lease("a", 30.0) is not None))
    waiting.start()
    lease.release()
    waiting.join(30.0)
    assert got == [True]


def test_counters_and_limits_are_told(kind: Kind) -> None:
    cache = kind.make(12_345)
    assert cache.is_shared == isinstance(cache, CacheFolder)
    assert cache.capacity == 12_345
    assert cache.counters() == dict.fromkeys(CACHE_COUNTERS, 0)
    assert (cache.free_disk_bytes() is not None) == cache.is_shared


def test_a_pickled_copy_is_a_working_cache_with_the_same_capacity(kind: Kind) -> None:
    cache = kind.room_for(2)
    fill(cache, "a")
    lease = leased(cache, "c")
    copy: Cache = pickle.loads(pickle.dumps(cache))
    assert (copy.lease("c") is None) == cache.is_shared
    lease.release()
    assert copy.capacity == cache.capacity
    assert copy.is_shared == cache.is_shared
    assert copy.has("a") == cache.is_shared
    fill(copy, "b")
    assert cache.has("b") == cache.is_shared


def test_a_forked_child_may_use_the_cache_at_once_whatever_its_parents_threads_did(kind: Kind) -> None:
    cache = kind.room_for(2)
    fill(cache, "a")
    inside, go_on = threading.Event(), threading.Event()

    def busy(contents: Contents) -> list[str]:
        inside.set()
        go_on.wait(30.0)
        return []

    # This thread is in the middle of `reserve`, with whatever that locks, when the process forks.
    thread = threading.Thread(target=cache.reserve, args=("b", 2 * RAW - 500, busy))
    thread.start()
    assert inside.wait(30.0)
    child = os.fork()
    if not child:  # pragma: no cover
        watchdog = threading.Timer(FORKED_SECONDS, os._exit, [3])
        watchdog.start()
        is_right = cache.has("a") == cache.is_shared and (cache.find("a") is not None) == cache.is_shared
        is_right = is_right and ("a" in cache.contents()) == cache.is_shared
        if not cache.is_shared:  # a folder's room is another process's to make, just now
            fill(cache, "c")
        os._exit(0 if is_right else 2)
    status = os.waitpid(child, 0)[1]
    go_on.set()
    thread.join(30.0)
    assert os.waitstatus_to_exitcode(status) == 0
    fill(cache, "c")  # nor did the child keep anything locked


def test_threads_that_fill_and_evict_at_random_never_exceed_the_capacity(kind: Kind) -> None:
    cache = kind.room_for(4)
    names = [f"name{number}" for number in range(12)]
    wrong: list[str] = []
    most = [0]

    def work(seed: int) -> None:
        chance = random.Random(seed)

        def anything(contents: Contents) -> list[str]:
            most.append(sum(held.bytes for held in contents.values()))  # now: nobody else makes room
            return chance.sample([*contents], len(contents))

        for _ in range(60):
            name = chance.choice(names)
            found = cache.find(name)
            if found is not None and not np.array_equal(found, content(name)):
                wrong.append(name)
            lease = cache.lease(name) if found is None else None
            if lease is not None:
                slot = cache.reserve(name, RAW, anything)
                if slot is not None:
                    slot.data[:] = content(name)
                    slot.commit() if chance.random() < 0.8 else slot.discard()
                lease.release()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert wrong == []
    assert max(most) == cache.capacity
    assert cache.counters()["evictions"] > 0
