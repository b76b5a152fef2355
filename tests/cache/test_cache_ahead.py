"""Shards that are prepared before a connection is free: a few, in plan order, given up for urgent ones."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkit.cache.download import Job
from shardkit.cache.entry import sealed_size
from shardkit.cache.fetcher import AHEAD, Fetcher, FetchLimits
from shardkit.cache.folder import CacheFolder
from shardkit.cache.memory import CacheMemory
from shardkit.cache.planner import LoopPosition
from shardkit.cache.protocol import Cache, Contents
from shardkit.cache.shards import CachedShards
from shardkit.formats.mds import read_index
from shardkit.storage.store import Store
from support.cache_entries import leased, room, used
from support.noted_store import NotedStore
from support.remote_harness import (
    SOON_SECONDS,
    Remote,
    advance,
    fetch_threads,
    in_order,
    kept,
    wait_until,
    write_hashed,
)
from support.stores import FaultRule, FaultyStore

SHARDS, CONNECTIONS = 12, 2
ROWS = np.random.default_rng(7).integers(0, 500, (SHARDS * 20, 100)).astype(np.uint16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 20 rows."""
    folder = tmp_path_factory.mktemp("ahead") / "data"
    write_hashed(folder, "mds", ROWS, [(low, low + 20) for low in range(0, len(ROWS), 20)])
    return folder


@pytest.fixture
def raw(folder: Path) -> list[bytes]:
    """The bytes of each shard."""
    return [(folder / info.stored.basename).read_bytes() for info in read_index(folder).shards]


class SlowCache(CacheFolder):
    """Makes room as slowly as a test says."""

    pause: Callable[[str], None] = staticmethod(lambda name: None)

    def reserve(self, name: str, raw_bytes: int, victims: Callable[[Contents], Iterable[str]]) -> Any:
        self.pause(name)
        return super().reserve(name, raw_bytes, victims)


Open = Callable[..., CachedShards]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens the shards of a store; closes them in the end, with every door open."""
    made: list[tuple[Remote, NotedStore]] = []

    def shards_of(
        below: NotedStore,
        cache: Cache | None = None,
        connections: int = CONNECTIONS,
        around: Callable[[Store], Store] | None = None,
        **limits: Any,
    ) -> CachedShards:
        remote = Remote.open(
            below, cache, connections=connections, limits=FetchLimits(**limits), around=around
        )
        below.reads.clear()
        made.append((remote, below))
        return remote.shards

    yield shards_of
    for remote, below in made:
        below.let_through()
        remote.dataset.close()


def all_held(folder: Path) -> NotedStore:
    """A store whose shards do not come before they are let through."""
    return NotedStore(folder, holds=lambda read: read.shard is not None)


def filling(cache: Cache) -> int:
    return sum(held.filling for held in cache.contents().values())


def is_settled(cache: Cache) -> bool:
    return not filling(cache)


def begun(shards: CachedShards) -> None:
    """Wait until all connections are used and as many shards as may be are ready."""
    fetcher = shards.fetcher
    wait_until(lambda: fetcher._streaming == fetcher.connections and len(fetcher._ready) == AHEAD)


def load_soon(shards: CachedShards, number: int) -> threading.Thread:
    """A thread that waits for a shard, which has been asked for when this returns."""
    thread = threading.Thread(target=shards.load, args=(number,), daemon=True)
    thread.start()
    fetcher = shards.fetcher
    wait_until(lambda: any(job.urgent and job.number == number for job in _known(fetcher)))
    return thread


def _known(fetcher: Fetcher) -> list[Job]:
    with fetcher._changed:
        return [*fetcher._active.values(), *fetcher._demanded]


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_a_few_shards_have_lease_and_room_before_a_connection_is_free(
    folder: Path, opened: Open, tmp_path: Path, where: str
) -> None:
    store = all_held(folder)
    shards = opened(store, CacheFolder(tmp_path, 1 << 20) if where == "folder" else CacheMemory(1 << 20))
    _plan = shards.fetcher.follow([shards], in_order(shards), LoopPosition(0))
    begun(shards)
    time.sleep(0.02)
    assert filling(shards.cache) == CONNECTIONS + AHEAD
    assert all(shards.cache.lease(shards.entry(number)) is None for number in range(CONNECTIONS + AHEAD))
    assert len(store.reads) == CONNECTIONS
    store.let_through()
    wait_until(lambda: kept(shards) == SHARDS)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("connections", [1, 2, 5])
@pytest.mark.parametrize("seed", range(3))
def test_shards_are_prepared_in_plan_order_and_no_ready_shard_is_overtaken(
    folder: Path, opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connections: int, seed: int
) -> None:
    chance = random.Random(seed)
    begun: list[int] = []
    started: list[tuple[int, list[int]]] = []  # each with those that were ready
    begin, next_ready = Fetcher._begin, Fetcher._next_ready

    def noted_begin(fetcher: Fetcher, job: Job) -> Callable[[], None]:
        begun.append(job.number)
        assert len(begun) - len(started) <= connections + AHEAD
        return begin(fetcher, job)

    def noted_start(fetcher: Fetcher) -> Callable[[], None] | None:
        ready = [job.number for job in fetcher._ready]
        task = next_ready(fetcher)
        started.extend((number, ready) for number in {*ready} - {job.number for job in fetcher._ready})
        return task

    monkeypatch.setattr(Fetcher, "_begin", noted_begin)
    monkeypatch.setattr(Fetcher, "_next_ready", noted_start)
    cache = SlowCache(tmp_path, 1 << 20)
    cache.pause = lambda name: time.sleep(chance.choice([0.0, 0.0, 0.01]))
    slow = FaultRule(fault="late", operation="open", probability=0.5, seconds=0.02)
    around = partial(FaultyStore, rules=[slow], seed=seed)
    shards = opened(NotedStore(folder), cache, connections, around)
    _plan = shards.fetcher.follow([shards], in_order(shards), LoopPosition(0))
    wait_until(lambda: kept(shards) == SHARDS)
    assert begun == list(range(SHARDS))
    assert all(number == min(ready) for number, ready in started)
    assert sorted(number for number, _ in started) == begun


def test_a_ready_shard_that_someone_comes_to_wait_for_starts_next_and_is_not_prepared_again(
    folder: Path, opened: Open, raw: list[bytes]
) -> None:
    store = all_held(folder)
    shards = opened(store, connections=1)
    _plan = shards.fetcher.follow([shards], in_order(shards), LoopPosition(0))
    begun(shards)
    last = max(job.number for job in shards.fetcher._ready)
    waiting = load_soon(shards, last)
    store.let_through()
    waiting.join(SOON_SECONDS)
    wait_until(lambda: kept(shards) == SHARDS)
    assert store.shards[1] == last
    assert len(store.reads) == SHARDS


def test_a_ready_shard_gives_up_its_room_for_one_that_is_waited_for(
    folder: Path, opened: Open, tmp_path: Path, raw: list[bytes]
) -> None:
    store = all_held(folder)
    shards = opened(store, CacheFolder(tmp_path, (1 + AHEAD) * sealed_size(len(raw[0])) + 50), 1)
    _plan = shards.fetcher.follow([shards], in_order(shards), LoopPosition(0))
    begun(shards)
    far = SHARDS - 1
    waiting = load_soon(shards, far)
    wait_until(lambda: any(job.number == far for job in list(shards.fetcher._ready)))
    assert not shards.has_no_room(far)
    assert used(shards.cache) <= shards.cache.capacity
    store.let_through()
    waiting.join(SOON_SECONDS)
    wait_until(lambda: not shards.fetcher._active)
    assert store.shards[1] == far
    assert shards.counters()["bypassed"] == 0


def test_closing_gives_back_the_lease_and_room_of_ready_shards_and_of_those_being_prepared(
    folder: Path, opened: Open, tmp_path: Path
) -> None:
    store, go_on, prepared = all_held(folder), threading.Event(), []
    cache = SlowCache(tmp_path, 1 << 20)

    def pause(name: str) -> None:
        prepared.append(name)
        if len(prepared) == CONNECTIONS + AHEAD:
            assert go_on.wait(SOON_SECONDS)

    cache.pause = pause
    shards = opened(store, cache, join_seconds=0.01)
    _plan = shards.fetcher.follow([shards], in_order(shards), LoopPosition(0))
    wait_until(lambda: len(prepared) == CONNECTIONS + AHEAD and len(shards.fetcher._ready) == AHEAD - 1)
    wait_until(lambda: len(store.reads) == CONNECTIONS)
    threads = fetch_threads()
    shards.close()
    assert filling(cache) == CONNECTIONS, "only those that are read: of ready ones it is free at once"
    go_on.set()
    store.let_through()
    for thread in threads:
        thread.join(SOON_SECONDS)
    assert cache.contents() == {}
    for number in range(SHARDS):
        leased(cache, shards.entry(number)).release()


def test_a_ready_shard_that_another_process_has_brought_meanwhile_is_not_fetched(
    folder: Path, opened: Open, tmp_path: Path, raw: list[bytes]
) -> None:
    store = all_held(folder)
    shards, other = opened(store, CacheFolder(tmp_path, 1 << 20), 1), CacheFolder(tmp_path, 1 << 20)
    _plan = shards.fetcher.follow([shards], in_order(shards), LoopPosition(0))
    begun(shards)
    number = shards.fetcher._ready[0].number
    slot = room(other, shards.entry(number), len(raw[number]))  # as after waiting for the lease in vain
    slot.data[:] = np.frombuffer(raw[number], dtype=np.uint8)
    slot.commit()
    store.let_through()
    wait_until(lambda: kept(shards) == SHARDS)
    assert number not in store.shards
    assert shards.load(number).tobytes() == raw[number]
    wait_until(lambda: not shards.fetcher._active)
    assert used(shards.cache) == SHARDS * sealed_size(len(raw[0]))


def test_preparing_that_hangs_holds_up_no_other_shard(folder: Path, opened: Open, tmp_path: Path) -> None:
    store, go_on = NotedStore(folder), threading.Event()
    cache = SlowCache(tmp_path, 1 << 20)
    shards = opened(store, cache)
    hanging = shards.entry(1)
    cache.pause = lambda name: assert_set(go_on) if name == hanging else None
    _plan = shards.fetcher.follow([shards], in_order(shards), LoopPosition(0))
    wait_until(lambda: kept(shards) == SHARDS - 1)
    go_on.set()
    wait_until(lambda: kept(shards) == SHARDS)


def assert_set(event: threading.Event) -> None:
    assert event.wait(SOON_SECONDS)


def test_idle_connections_take_over_half_of_a_planned_shard_that_someone_comes_to_wait_for(
    folder: Path, opened: Open, raw: list[bytes]
) -> None:
    store = NotedStore(folder, holds=lambda read: read.shard is not None and read.start == 0, after_bytes=200)
    shards = opened(store, connections=3, min_part_bytes=100, read_bytes=50)
    fetcher = shards.fetcher
    job = Job(shards, 4, urgent=False, victims=lambda contents: contents)
    with fetcher._changed:  # as a plan would begin it
        fetcher._start_threads()
        task = fetcher._begin(job)
    threading.Thread(target=task, daemon=True).start()
    assert store.reached.wait(SOON_SECONDS)
    time.sleep(0.02)
    assert len(store.reads) == 1, "nobody waits yet"
    waiting = load_soon(shards, 4)
    wait_until(lambda: len(store.reads) >= 3)
    store.let_through()
    waiting.join(SOON_SECONDS)
    assert job.data is not None
    assert job.data.tobytes() == raw[4]
    assert all(stop is None or start > 0 for _, start, stop, _ in store.reads)


class Budget:
    """A thread that looks how full a cache is, all the time."""

    def __init__(self, cache: Cache) -> None:
        self.most = 0
        self._cache, self._ended = cache, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.001):
            self.most = max(self.most, used(self._cache))

    def end(self) -> None:
        self._ended.set()
        self._thread.join(SOON_SECONDS)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.extended) for n in range(2, 10))])
@pytest.mark.parametrize("where", ["memory", "folder"])
def test_random_loads_besides_plans_in_small_caches_of_several_users_hang_never_and_are_right(
    folder: Path, opened: Open, tmp_path: Path, raw: list[bytes], where: str, seed: int
) -> None:
    chance = random.Random(seed)
    size = sealed_size(len(raw[0]))
    capacity = chance.choice([1, 2, 3, 5]) * size + 50
    faults = [
        FaultRule(fault="late", operation="open", probability=0.2, seconds=0.01),
        FaultRule(fault="corrupt", operation="open", probability=0.1, after_bytes=100, count=2),
        FaultRule(fault="reset", operation="open", probability=0.1, after_bytes=500),
    ]
    users = []
    for user in range(2):
        cache = SlowCache(tmp_path, capacity) if where == "folder" else CacheMemory(capacity)
        if isinstance(cache, SlowCache):
            cache.pause = lambda name: time.sleep(chance.choice([0.0, 0.0, 0.005]))
        shards = opened(
            NotedStore(folder),
            cache,
            chance.choice([1, 2, 4]),
            lambda below, user=user: FaultyStore(below, faults, seed=seed + user),
            min_part_bytes=300,
            read_bytes=100,
            lease_seconds=0.5,
        )
        users.append(shards)
    budgets = [Budget(shards.cache) for shards in users]

    def read(shards: CachedShards, numbers: list[int]) -> list[int]:
        plan = shards.fetcher.follow([shards], in_order(shards), LoopPosition(0))
        wrong = []
        for place, number in enumerate(numbers):
            if shards.load(number, SOON_SECONDS, plan).tobytes() != raw[number]:
                wrong.append(number)
            advance(plan, shards, min(place * 20, len(ROWS)))
        shards.fetcher.drop(plan)
        return wrong

    readers = [
        (shards, [chance.randrange(SHARDS) for _ in range(30)] if aside else list(range(SHARDS)))
        for shards in users
        for aside in (False, True)
    ]
    with ThreadPoolExecutor(len(readers)) as pool:
        wrong = list(pool.map(lambda reader: read(*reader), readers))
    assert wrong == [[]] * len(readers), f"seed {seed}"
    for shards, budget in zip(users, budgets, strict=True):
        shards.close()
        wait_until(partial(is_settled, shards.cache))
        budget.end()
        assert 0 < budget.most <= capacity
    if where == "folder":
        assert not list(tmp_path.glob("*/leases/*"))
