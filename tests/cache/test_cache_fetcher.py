"""Shards as a fetcher brings them: what is waited for first, each once, proved; errors are told and over."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shardkit.cache.download import DamagedObjectError, Download, FetchTimeoutError, Job, Part
from shardkit.cache.fetcher import Fetcher, FetchLimits
from shardkit.cache.folder import CacheFolder
from shardkit.cache.memory import CacheMemory
from shardkit.cache.planner import FetchPlan, LoopPosition
from shardkit.cache.protocol import Cache, CacheFolderError, Contents, Fetchable
from shardkit.cache.shards import CachedShards
from shardkit.datasets.locate import find_remote
from shardkit.formats.compression import decompress
from shardkit.formats.mds import read_index
from shardkit.storage.resilient import ResilientStore
from shardkit.storage.store import StoreError
from support.cache_entries import leased, room
from support.noted_store import NotedStore
from support.remote_harness import (
    SOON_SECONDS,
    fetch_threads,
    in_order,
    kept,
    quick_policy,
    wait_until,
    write_hashed,
)
from support.stores import FaultRule, FaultyStore

SHARDS = 6
ROWS = np.random.default_rng(3).integers(0, 500, (SHARDS * 20, 100)).astype(np.uint16)
Bytes = npt.NDArray[np.uint8]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Shards of 20 rows with hashes, raw and compressed."""
    root = tmp_path_factory.mktemp("fetcher")
    pieces = [(low, low + 20) for low in range(0, len(ROWS), 20)]
    for kind in ("mds", "mds_zstd"):
        write_hashed(root / kind, kind, ROWS, pieces)
    return {kind: root / kind for kind in ("mds", "mds_zstd")}


def doors(folder: Path, *shut: int, after_bytes: int = 0) -> NotedStore:
    """A store of that dataset. Reads of the shards in `shut` wait until they are let through."""
    return NotedStore(folder, holds=lambda read: read.shard in shut, after_bytes=after_bytes)


Open = Callable[..., CachedShards]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens the shards of a dataset in a store; closes them in the end, with every door open."""
    made: list[tuple[CachedShards, NotedStore]] = []

    def shards_of(
        below: NotedStore, cache: Cache | None = None, *rules: FaultRule, connections: int = 4, **limits: Any
    ) -> CachedShards:
        manifest = find_remote(below).manifest
        below.reads.clear()
        store = ResilientStore(FaultyStore(below, rules), quick_policy(), connections=8)
        cache = CacheMemory(1 << 30) if cache is None else cache
        shards = CachedShards(store, manifest, cache, Fetcher(connections, FetchLimits(**limits)))
        made.append((shards, below))
        return shards

    yield shards_of
    for shards, below in made:
        below.let_through()
        shards.close()
        shards.store.close()


def raw_of(folder: Path, number: int) -> bytes:
    """The bytes of a shard, decompressed."""
    info = read_index(folder).shards[number]
    stored = (folder / info.stored.basename).read_bytes()
    if info.compression is None:
        return stored
    return decompress(info.compression, stored, raw_bytes=info.raw.bytes, file="").tobytes()


def load_and_keep(shards: CachedShards, number: int) -> bytes:
    """The bytes of a shard, once its fetch is over: who waits has them before they are durable."""
    data = shards.load(number).tobytes()
    wait_until(lambda: not shards.fetcher._active)
    return data


class Waiters:
    """Threads that ask for shards, and what each was given: bytes or an error."""

    def __init__(self, shards: CachedShards, *numbers: int) -> None:
        self.got: list[Bytes | BaseException] = []
        self.asked = 0
        self._lock = threading.Lock()
        demand = shards.fetcher.demand

        def counted(shards: Fetchable, number: int, plan: FetchPlan | None) -> Job:
            job = demand(shards, number, plan)
            with self._lock:
                self.asked += 1
            return job

        shards.fetcher.demand = counted  # type: ignore[method-assign]
        self._threads = [
            threading.Thread(target=self._load, args=(shards, number), daemon=True) for number in numbers
        ]
        for thread in self._threads:
            thread.start()
        wait_until(lambda: self.asked >= len(numbers))
        shards.fetcher.demand = demand  # type: ignore[method-assign]

    def _load(self, shards: CachedShards, number: int) -> None:
        try:
            found: Bytes | BaseException = shards.load(number)
        except BaseException as error:
            found = error
        with self._lock:
            self.got.append(found)

    def results(self, seconds: float = SOON_SECONDS) -> list[Bytes | BaseException]:
        for thread in self._threads:
            thread.join(seconds)
        assert len(self.got) == len(self._threads)
        return self.got


# What is fetched, and when.


def test_what_is_waited_for_goes_before_what_is_planned(folders: dict[str, Path], opened: Open) -> None:
    store = doors(folders["mds"], 0)
    shards = opened(store, connections=1)
    _plan = shards.fetcher.follow([shards], in_order(shards), LoopPosition(0))
    assert store.reached.wait(SOON_SECONDS)
    waiters = Waiters(shards, 4)
    assert f"{store.url}/shard.00004.mds: 0 of " in shards.progress()
    store.let_through()
    waiters.results()
    wait_until(lambda: kept(shards) == SHARDS)
    assert len(store.shards) == SHARDS == len({*store.shards})
    assert store.shards.index(4) <= 2, "behind what was begun, and what was ready, when it was asked for"


@pytest.mark.parametrize("kind", ["mds", "mds_zstd"])
def test_a_shard_that_many_threads_ask_for_is_fetched_once(
    folders: dict[str, Path], opened: Open, kind: str
) -> None:
    store = doors(folders[kind], 2)
    shards = opened(store)
    waiters = Waiters(shards, *[2] * 8)
    store.let_through()
    for data in waiters.results():
        assert isinstance(data, np.ndarray)
        assert data.tobytes() == raw_of(folders[kind], 2)
        assert not data.flags.writeable
    assert store.shards == [2]
    counters = shards.counters()
    assert (counters["hits"], counters["misses"], counters["fetched_shards"]) == (0, 8, 1)


def test_a_planned_shard_that_someone_comes_to_wait_for_is_not_fetched_again(
    folders: dict[str, Path], opened: Open
) -> None:
    store = doors(folders["mds"], 0)
    shards = opened(store)
    _plan = shards.fetcher.follow([shards], in_order(shards), LoopPosition(0))
    assert store.reached.wait(SOON_SECONDS)
    assert shards.progress() == "", "nobody waits yet"
    waiters = Waiters(shards, 0)
    assert "shard.00000.mds" in shards.progress()
    store.let_through()
    assert isinstance(waiters.results()[0], np.ndarray)
    assert store.shards.count(0) == 1
    assert shards.progress() == ""


def test_idle_threads_share_a_shard_that_is_waited_for(folders: dict[str, Path], opened: Open) -> None:
    store = doors(folders["mds"])
    shards = opened(store, min_part_bytes=100)
    raw = raw_of(folders["mds"], 1)
    assert shards.load(1).tobytes() == raw
    edges = sorted((start, stop) for _, start, stop, _ in store.reads)
    assert len(edges) == 4
    assert [start for start, _ in edges] == [0, *[stop for _, stop in edges[:-1]]]
    assert edges[-1][1] == len(raw)
    store.reads.clear()
    _plan = shards.fetcher.follow([shards], in_order(shards), LoopPosition(0))
    wait_until(lambda: kept(shards) == SHARDS)
    assert len(store.reads) == SHARDS - 1, "those of a plan take one connection each"


def test_a_bad_byte_in_one_of_several_ranges_is_noticed_and_all_are_fetched_again(
    folders: dict[str, Path], opened: Open
) -> None:
    store = doors(folders["mds"])
    rule = FaultRule(fault="corrupt", operation="open", skip=2, count=1)
    shards = opened(store, None, rule, min_part_bytes=100)
    assert shards.load(1).tobytes() == raw_of(folders["mds"], 1)
    assert shards.counters()["damaged"] == 1
    assert sum(start == 0 for _, start, _, _ in store.reads) == 2


# What goes wrong.


@pytest.mark.parametrize("kind", ["mds", "mds_zstd"])
@pytest.mark.parametrize("where", ["memory", "folder"])
def test_an_object_that_is_damaged_is_fetched_three_times_then_named_until_it_is_repaired(
    folders: dict[str, Path], opened: Open, kind: str, where: str, tmp_path: Path
) -> None:
    store = doors(folders[kind])
    cache = CacheFolder(tmp_path, 1 << 20) if where == "folder" else CacheMemory(1 << 20)
    shards = opened(store, cache)
    name = shards.info(3).stored.basename
    good = store.quiet(name)
    store.put(name, good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(DamagedObjectError) as caught:
        shards.load(3)
    assert str(caught.value).startswith(f"{store.url}/{name}: xxh64 is ")
    assert str(caught.value).endswith("; it was fetched 3 times: check the object in the bucket")
    assert store.shards == [3, 3, 3]
    assert cache.contents() == {}
    leased(cache, shards.entry(3)).release()
    counters = shards.counters()
    assert (counters["damaged"], counters["quarantined"], counters["fetched_bytes"]) == (3, 3, 0)
    store.put(name, good)
    assert shards.load(3).tobytes() == raw_of(folders[kind], 3)


def test_an_error_reaches_all_who_wait_and_does_not_poison_the_next_try(
    folders: dict[str, Path], opened: Open
) -> None:
    store = doors(folders["mds"], 1)
    shards = opened(store, None, FaultRule(fault="deny", key="00002", skip=0, count=1), connections=1)
    waiters = Waiters(shards, 1, *[2] * 5)  # one connection: while 1 is fetched, all others come to wait
    store.let_through()
    results = waiters.results()
    errors = [found for found in results if isinstance(found, StoreError)]
    assert len(errors) == 5
    assert {str(error) for error in errors} == {
        f"{store.url}/shard.00002.mds: AccessDenied (injected) (status 403)"
    }
    assert shards.load(2).tobytes() == raw_of(folders["mds"], 2)
    assert shards.counters()["misses"] == 2, "what failed is neither hit nor miss"


def test_a_planned_fetch_that_fails_disturbs_nobody_but_who_needs_it(
    folders: dict[str, Path], opened: Open
) -> None:
    store = doors(folders["mds"])
    shards = opened(store, None, FaultRule(fault="deny", key="00002"))
    _plan = shards.fetcher.follow([shards], in_order(shards), LoopPosition(0))
    wait_until(lambda: kept(shards) == SHARDS - 1)
    with pytest.raises(StoreError, match=r"00002.*AccessDenied"):
        shards.load(2)
    assert all(thread.is_alive() for thread in fetch_threads())


def test_a_cache_folder_that_cannot_be_listed_ends_no_thread(
    folders: dict[str, Path], opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[int] = []

    def fail() -> Contents:
        failed.append(1)
        raise CacheFolderError("the cache folder cannot be used: Input/output error")

    cache = CacheFolder(tmp_path, 1 << 20)
    shards = opened(doors(folders["mds"]), cache)
    monkeypatch.setattr(cache, "contents", fail)
    _plan = shards.fetcher.follow([shards], in_order(shards), LoopPosition(0))
    wait_until(lambda: len(failed) > 0)
    assert shards.load(2).tobytes() == raw_of(folders["mds"], 2)
    assert all(thread.is_alive() for thread in shards.fetcher._threads)


def test_closing_wakes_all_who_wait_at_once_and_the_shards_can_be_used_again(
    folders: dict[str, Path], opened: Open
) -> None:
    store = doors(folders["mds"], 0)
    shards = opened(store, connections=1, join_seconds=0.01)
    waiters = Waiters(shards, 0, 0)
    assert store.reached.wait(SOON_SECONDS)
    others = Waiters(shards, 1)  # 0 is read, 1 is ready
    shards.close()
    for found in (*waiters.results(), *others.results()):
        assert isinstance(found, RuntimeError)
        assert str(found) == "the loader was closed"
    assert shards.progress() == ""
    old = fetch_threads()
    assert shards.load(1).tobytes() == raw_of(folders["mds"], 1)
    store.let_through()
    for thread in old:
        thread.join(SOON_SECONDS)
    assert shards.load(0).tobytes() == raw_of(folders["mds"], 0)
    shards.close()
    wait_until(lambda: not fetch_threads())


def test_closing_twice_or_before_anything_was_read_is_no_error(
    folders: dict[str, Path], opened: Open
) -> None:
    shards = opened(doors(folders["mds"]))
    shards.close()
    shards.close()
    assert not fetch_threads()


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_a_wait_that_is_too_long_says_how_much_came_the_last_status_and_the_disk(
    folders: dict[str, Path], opened: Open, where: str, tmp_path: Path
) -> None:
    store = doors(folders["mds"], 0, after_bytes=700)
    cache = CacheFolder(tmp_path, 1 << 20) if where == "folder" else CacheMemory(1 << 20)
    shards = opened(store, cache, FaultRule(fault="throttle", operation="open", count=1))
    waiters = Waiters(shards, 0)
    assert store.reached.wait(SOON_SECONDS)
    size = len(raw_of(folders["mds"], 0))
    shards.timeout_seconds = 0.05
    with pytest.raises(FetchTimeoutError) as caught:
        shards.load(0)
    disk = r"free disk [\d.]+ \w+" if where == "folder" else "no disk used"
    came = (
        rf"{re.escape(store.url)}/shard\.00000\.mds: 700 of {size:,} bytes received; last status 503; {disk}"
    )
    assert re.fullmatch(f"a shard did not arrive within 0.05 s: {came}", str(caught.value))
    assert re.fullmatch(came, shards.progress())
    store.let_through()
    assert isinstance(waiters.results()[0], np.ndarray)


def test_a_shard_that_comes_damaged_after_the_cache_folder_was_removed_is_fetched_again(
    folders: dict[str, Path], opened: Open, tmp_path: Path
) -> None:
    rule = FaultRule(fault="corrupt", operation="open", key="00003", count=1)
    store = doors(folders["mds"], 3)
    shards = opened(store, CacheFolder(tmp_path, 1 << 20), rule)
    waiters = Waiters(shards, 3)
    assert store.reached.wait(SOON_SECONDS)
    shutil.rmtree(tmp_path / "shardkit-cache-1")
    threads = fetch_threads()
    store.let_through()
    wait_until(lambda: bool(waiters.got) or not all(thread.is_alive() for thread in threads))
    [found] = waiters.results()
    assert isinstance(found, np.ndarray)
    assert found.tobytes() == raw_of(folders["mds"], 3)


def test_closing_between_two_ranges_of_a_shard_gives_lease_and_room_back(
    folders: dict[str, Path], opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two ranges for one thread, as when the other threads have found something else to do.
    monkeypatch.setattr(Fetcher, "_parts", lambda fetcher, job: 2)
    between, closed = threading.Event(), threading.Event()
    fetch_part = Download.fetch_part

    def held(download: Download, part: Part) -> None:
        fetch_part(download, part)
        between.set()
        assert closed.wait(SOON_SECONDS)

    monkeypatch.setattr(Download, "fetch_part", held)
    shards = opened(doors(folders["mds"]), connections=1, min_part_bytes=100, join_seconds=0.01)
    waiters = Waiters(shards, 0)
    assert between.wait(SOON_SECONDS)
    threads = fetch_threads()
    shards.close()
    closed.set()
    assert isinstance(waiters.results()[0], RuntimeError)
    for thread in threads:
        thread.join(SOON_SECONDS)
    assert shards.cache.contents() == {}
    assert shards.cache.lease(shards.entry(0)) is not None


@pytest.mark.parametrize("in_time", [True, False])
def test_closing_in_the_middle_of_a_read_gives_lease_and_room_back(
    folders: dict[str, Path], opened: Open, tmp_path: Path, in_time: bool
) -> None:
    """`in_time`: the read ends while `close` waits for it, not after."""
    store = doors(folders["mds"], 0)
    seconds = SOON_SECONDS if in_time else 0.01
    shards = opened(store, CacheFolder(tmp_path, 1 << 20), connections=2, join_seconds=seconds)
    waiters = Waiters(shards, 0)
    assert store.reached.wait(SOON_SECONDS)
    threads = fetch_threads()

    def read_on() -> None:
        waiters.results()  # `close` wakes who waits for the shard, then joins the threads
        store.let_through()

    if in_time:
        threading.Thread(target=read_on).start()
    shards.close()
    assert any(thread.is_alive() for thread in threads) != in_time
    store.let_through()
    for thread in threads:
        thread.join(SOON_SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    assert shards.cache.contents() == {}
    assert shards.cache.lease(shards.entry(0)) is not None


def test_threads_that_have_nothing_to_do_end_and_others_come_when_needed(
    folders: dict[str, Path], opened: Open
) -> None:
    shards = opened(doors(folders["mds"]), connections=3, idle_seconds=0.02)
    before = fetch_threads()
    for number in (0, 1):
        assert shards.load(number).tobytes() == raw_of(folders["mds"], number)
        wait_until(lambda: set(fetch_threads()) <= set(before))
    _plan = shards.fetcher.follow([shards], in_order(shards), LoopPosition(0))
    wait_until(lambda: len(shards.cache.contents()) == SHARDS)
    wait_until(lambda: set(fetch_threads()) <= set(before))


# Forks, leases, room.


@pytest.mark.parametrize("moment", ["idle", "fetching", "planning"])
def test_a_forked_child_fetches_by_itself_whatever_its_parents_threads_did(
    folders: dict[str, Path], opened: Open, moment: str
) -> None:
    store = doors(folders["mds"], 0)
    size = len(raw_of(folders["mds"], 0))
    shards = opened(store, CacheMemory(5 * size // 2 if moment == "planning" else 1 << 20))
    if moment == "idle":
        store.let_through()
    plan = shards.fetcher.follow([shards], in_order(shards), LoopPosition(0))
    if moment == "idle":
        wait_until(lambda: kept(shards) == SHARDS)
    else:
        assert store.reached.wait(SOON_SECONDS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads: the case in question
        if moment == "planning":
            plan.planner._lock.acquire()  # by a thread of the fetcher, if chance will have it
        child = os.fork()
    if child == 0:
        code = 1
        try:
            store.let_through()
            shards.timeout_seconds = 10.0
            same = [shards.load(n).tobytes() == raw_of(folders["mds"], n) for n in range(SHARDS)]
            code = 0 if all(same) else 2
        finally:
            os._exit(code)
    if moment == "planning":
        plan.planner._lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    store.let_through()
    assert shards.load(0).tobytes() == raw_of(folders["mds"], 0)


def test_what_another_process_fetches_is_left_to_it_until_someone_waits_too_long(
    folders: dict[str, Path], opened: Open
) -> None:
    store = doors(folders["mds"])
    shards = opened(store, lease_seconds=0.05)
    held = leased(shards.cache, shards.entry(1))
    _plan = shards.fetcher.follow([shards], in_order(shards), LoopPosition(0))
    wait_until(lambda: kept(shards) == SHARDS - 1)
    assert 1 not in store.shards
    assert shards.load(1).tobytes() == raw_of(folders["mds"], 1), "whoever holds the lease has been stopped"
    assert store.shards.count(1) == 1
    held.release()


def test_a_process_that_was_stopped_while_it_fetched_many_shards_is_waited_for_once(
    folders: dict[str, Path], opened: Open, tmp_path: Path
) -> None:
    """Before, once for each of its leases: 220 seconds with the defaults."""
    store, seconds = doors(folders["mds"]), 1.0
    shards = opened(store, CacheFolder(tmp_path, 1 << 20), lease_seconds=seconds)
    stopped = CacheFolder(tmp_path, 1 << 20)
    held = [leased(stopped, shards.entry(number)) for number in range(SHARDS)]
    began = time.monotonic()
    for number in range(SHARDS):
        assert load_and_keep(shards, number) == raw_of(folders["mds"], number)
    assert seconds <= time.monotonic() - began < 3 * seconds
    for lease in held:
        lease.release()


def test_what_another_process_has_fetched_meanwhile_is_not_fetched_again(
    folders: dict[str, Path], opened: Open, tmp_path: Path
) -> None:
    store = doors(folders["mds"])
    shards, other = opened(store, CacheFolder(tmp_path, 1 << 20)), CacheFolder(tmp_path, 1 << 20)
    held = leased(other, shards.entry(1))
    waiters = Waiters(shards, 1)
    raw = np.frombuffer(raw_of(folders["mds"], 1), dtype=np.uint8)
    slot = room(other, shards.entry(1), len(raw))
    slot.data[:] = raw
    slot.commit()
    held.release()
    found = waiters.results()[0]
    assert isinstance(found, np.ndarray)
    assert found.tobytes() == raw.tobytes()
    assert store.reads == []
    counters = shards.counters()
    assert (counters["misses"], counters["fetched_shards"]) == (1, 0)


@pytest.mark.parametrize("kind", ["mds", "mds_zstd"])
def test_what_the_cache_has_no_room_for_is_delivered_all_the_same(
    folders: dict[str, Path], opened: Open, kind: str
) -> None:
    cache = CacheMemory(len(raw_of(folders[kind], 0)) * 3 // 2)
    store = doors(folders[kind])
    shards = opened(store, cache)
    taken = room(cache, "of somebody else", cache.capacity - 1)
    for _ in range(2):
        assert load_and_keep(shards, 0) == raw_of(folders[kind], 0)
        assert shards.has_no_room(0)
        assert not shards.is_there(0)
    stored = shards.info(0).stored.bytes
    assert shards.counters().items() >= {
        "hits": 0, "misses": 2, "bypassed": 2, "fetched_shards": 2,
        "fetched_bytes": 2 * stored, "refetched_bytes": stored,
    }.items()  # fmt: skip
    taken.discard()
    load_and_keep(shards, 0)
    assert shards.is_there(0)
    assert not shards.has_no_room(0)
    assert shards.counters()["bypassed"] == 2


@pytest.mark.parametrize("kind", ["mds", "mds_zstd"])
def test_every_load_is_counted_once(folders: dict[str, Path], opened: Open, kind: str) -> None:
    raw = [len(raw_of(folders[kind], number)) for number in range(SHARDS)]
    store = doors(folders[kind])
    shards = opened(store, CacheMemory(max(raw) * 3 // 2))  # room for one
    for number in (0, 0, 1, 1, 1, 0):
        assert load_and_keep(shards, number) == raw_of(folders[kind], number)
    stored = [shards.info(number).stored.bytes for number in range(SHARDS)]
    assert store.shards == [0, 1, 0]
    assert shards.counters() == {
        "hits": 3,
        "misses": 3,
        "fetched_shards": 3,
        "fetched_bytes": 2 * stored[0] + stored[1],
        "refetched_bytes": stored[0],
        "decompressed_bytes": 2 * raw[0] + raw[1] if kind == "mds_zstd" else 0,
        "bypassed": 0,
        "damaged": 0,
        "quarantined": 0,
        "disk_full": 0,
        "locked_out": 0,
        "row_reads": 0,
        "unproved_bytes": 0,
        "evictions": 2,
        "evicted_bytes": raw[0] + raw[1],
        "used_bytes": raw[0],
        "capacity_bytes": max(raw) * 3 // 2,
    }
