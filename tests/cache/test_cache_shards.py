"""The shards of a remote dataset through a cache: their names, what is fetched ahead, copies, and counts."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkit.cache import CacheOptions
from shardkit.cache.entry import entry_name
from shardkit.cache.memory import CacheMemory
from shardkit.cache.planner import LoopPosition
from shardkit.cache.run import CacheRun, PlanRequest
from shardkit.cache.shards import CachedShards, CacheReader
from shardkit.datasets.dataset import open_dataset
from shardkit.loaders.metrics import CacheStats
from shardkit.storage.memory import MemoryStore
from shardkit.storage.store import ObjectChangedError, ObjectInfo
from support.ended_threads import ended_threads
from support.noted_store import NotedStore
from support.remote_harness import (
    SOON_SECONDS,
    Remote,
    advance,
    fetch_threads,
    fresh_url,
    in_order,
    kept,
    make_remote_kind,
    put_folder,
    wait_until,
)

SHARDS = 5
FOREIGN = ["mds_foreign", "mds_zstd_foreign", "tar_foreign"]
KINDS = ["mds", "mds_zstd", "tar", *FOREIGN]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("shards")
    return {kind: make_remote_kind(root / kind, kind, shards=SHARDS) for kind in KINDS}


@pytest.fixture(autouse=True)
def _closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test has opened is closed at its end, and its threads are gone."""
    made: list[CachedShards] = []
    init = CachedShards.__init__

    def noted(self: CachedShards, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        made.append(self)

    monkeypatch.setattr(CachedShards, "__init__", noted)
    with ended_threads():
        yield
        for shards in made:
            shards.close()


def opened(store: NotedStore, cache: Any = None) -> CachedShards:
    shards = Remote.open(store, cache).shards
    store.reads.clear()
    store.heads.clear()
    return shards


def remote_shards(url: str, cache: CacheOptions | None = None) -> CachedShards:
    """As anyone opens them."""
    shards = open_dataset(url, cache=cache).shards
    assert shards is not None
    return shards


def largest_of(store: MemoryStore) -> int:
    """Bytes of its largest shard."""
    return max(info.bytes for info in store.list() if "000" in info.key)


def names_of(shards: CachedShards) -> list[str]:
    return [shards.info(number).stored.basename for number in range(SHARDS)]


# Names.


@pytest.mark.parametrize("kind", ["mds", "mds_zstd", "tar"])
def test_with_hashes_the_index_names_every_entry(folders: dict[str, Path], kind: str) -> None:
    store = NotedStore(folders[kind])
    shards = opened(store)
    entries = [shards.entry(number) for number in range(SHARDS)]
    assert entries == [entry_name(shards.info(number), "elsewhere") for number in range(SHARDS)]
    assert [shards.is_there(number) for number in range(SHARDS)] == [False] * SHARDS
    assert shards.version(0) is None
    assert shards.where(3) == f"{store.url}/{names_of(shards)[3]}"
    assert not store.reads, "what an index says is not asked for"
    assert not store.heads


@pytest.mark.parametrize("kind", FOREIGN)
def test_without_hashes_an_entry_is_named_after_its_object_which_is_asked_once(
    folders: dict[str, Path], kind: str
) -> None:
    store = NotedStore(folders[kind])
    shards = opened(store)
    for _ in range(2):
        for number, name in enumerate(names_of(shards)):
            info = MemoryStore(store.url).head(name)
            assert shards.stored_file(number).bytes == info.bytes
            assert shards.entry(number) == entry_name(shards.info(number), store.url, info.version)
            assert shards.version(number) == info.version
    assert store.heads == names_of(shards)
    assert store.reads == []
    assert len({shards.entry(number) for number in range(SHARDS)}) == SHARDS


def test_threads_that_ask_at_once_while_an_object_is_replaced_go_on_with_one_version(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = NotedStore(folders["mds_foreign"])
    shards = opened(store)
    name = names_of(shards)[0]
    data, together = store.get(name), threading.Barrier(2)

    # One thread sees the version before, the other the one after, before either goes on.
    answers = iter([store.head(name), store.put(name, data)])

    def head(key: str) -> ObjectInfo:
        info = next(answers)
        together.wait(SOON_SECONDS)
        return info

    monkeypatch.setattr(store, "head", head)
    entries: list[str] = []
    threads = [threading.Thread(target=lambda: entries.append(shards.entry(0))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_SECONDS)
    assert len(entries) == 2
    assert len(set(entries)) == 1
    if shards.version(0) == store._find(name)[0].version:
        assert shards.load(0).tobytes() == data
    else:
        with pytest.raises(ObjectChangedError, match=name):
            shards.load(0)
    shards.close()


# Fetched ahead.


@pytest.mark.parametrize("kind", KINDS)
def test_all_is_fetched_ahead_where_there_is_room_and_each_shard_once(
    folders: dict[str, Path], kind: str
) -> None:
    store = NotedStore(folders[kind])
    shards = opened(store)
    plan = shards.fetcher.follow([shards], in_order(shards), LoopPosition(0))
    wait_until(lambda: kept(shards) == SHARDS)
    for position in range(0, 120, 7):  # into the third epoch
        advance(plan, shards, position)
    for number in range(SHARDS):
        assert shards.is_there(number)
        shards.load(number)
    shards.close()
    assert sorted(read.key for read in store.reads) == names_of(shards)
    counters = shards.counters()
    assert (counters["hits"], counters["misses"], counters["fetched_shards"]) == (SHARDS, 0, SHARDS)


@pytest.mark.parametrize("kind", ["mds", "tar_foreign"])
def test_a_small_cache_follows_the_training_loop(folders: dict[str, Path], kind: str) -> None:
    """With room for two shards: the next one comes while one is read, and none is fetched in vain."""
    store = NotedStore(folders[kind])
    largest = largest_of(store)
    shards = opened(store, CacheMemory(2 * largest + 200))
    if kind == "tar_foreign":  # their sizes are not in the index: they are planned with when they are known
        for number in range(SHARDS):
            shards.entry(number)
    order = in_order(shards)
    plan = shards.fetcher.follow([shards], order, LoopPosition(0))
    starts = shards._manifest.shard_starts
    for epoch in range(2):
        for number in range(SHARDS):
            advance(plan, shards, epoch * order.samples + int(starts[number]))
            wait_until(lambda number=number: shards.is_there(number))  # type: ignore[misc]
            shards.load(number)
    counters = shards.counters()
    shards.close()
    assert counters["bypassed"] == counters["misses"] == 0
    assert counters["hits"] == 2 * SHARDS
    opens = [read.key for read in store.reads]
    # Two are on their way at once, so neighbours may be asked for in either order; of the second epoch what
    # is left of the first need not come again. None comes twice in the first one, nor before there is room.
    order_asked = [opens.index(name) for name in names_of(shards)]
    assert sorted(order_asked) == list(range(SHARDS))
    assert all(abs(place - number) <= 1 for number, place in enumerate(order_asked))
    assert len(opens) <= 2 * SHARDS


def test_a_plan_begins_where_the_run_is(folders: dict[str, Path]) -> None:
    store = NotedStore(folders["mds"])
    shards = opened(store, CacheMemory(largest_of(store) + 100))
    begin = int(shards._manifest.shard_starts[3])
    _plan = shards.fetcher.follow([shards], in_order(shards), LoopPosition(begin))
    wait_until(lambda: shards.is_there(3))
    shards.close()
    assert [read.key for read in store.reads] == [names_of(shards)[3]]


def test_two_readers_in_a_small_cache_have_what_each_needs_next(folders: dict[str, Path]) -> None:
    """One follows the order, one begins three shards later; there is room for two shards of each."""
    store = NotedStore(folders["mds"])
    largest = largest_of(store)
    capacity = 4 * largest + 400
    shards = opened(store, CacheMemory(capacity))
    order, starts = in_order(shards), shards._manifest.shard_starts
    laps = [[(number + offset) % SHARDS for number in range(SHARDS)] for offset in (0, 3)]
    places = [[int(starts[number]) + (number < lap[0]) * order.samples for number in lap] for lap in laps]
    plans = [shards.fetcher.follow([shards], order, LoopPosition(place[0])) for place in places]
    for step in range(SHARDS):
        for plan, lap, place in zip(plans, laps, places, strict=True):
            advance(plan, shards, place[step])
            wait_until(lambda number=lap[step]: shards.is_there(number))  # type: ignore[misc]
            shards.load(lap[step])
        assert sum(held.bytes for held in shards.cache.contents().values()) <= capacity
    counters = shards.counters()
    assert counters["misses"] == counters["bypassed"] == 0
    assert counters["hits"] == 2 * SHARDS


def test_a_plan_ends_with_its_reader(folders: dict[str, Path]) -> None:
    shards = opened(NotedStore(folders["mds"]))
    first, second = CacheRun([CacheReader(shards)]), CacheRun([CacheReader(shards)])
    for run in (first, second):
        run.start([PlanRequest([shards], in_order(shards), None)], 0)
        run.fetch_ahead()
    assert len(shards.fetcher.plans()) == 2
    first.close()
    assert len(shards.fetcher.plans()) == 1
    wait_until(lambda: kept(shards) == SHARDS)
    del run, second
    wait_until(lambda: not shards.fetcher.plans())


# Copies, ends, counts.


@pytest.mark.parametrize("kind", ["mds", "tar_foreign"])
@pytest.mark.parametrize("where", ["memory", "folder"])
def test_a_pickled_copy_works_by_itself(
    folders: dict[str, Path], kind: str, where: str, tmp_path: Path
) -> None:
    store = MemoryStore(fresh_url())
    put_folder(folders[kind], store)
    cache = CacheOptions(folder=tmp_path if where == "folder" else None, capacity=1 << 20)
    shards = remote_shards(store.url, cache)
    _plan = shards.fetcher.follow([shards], in_order(shards), LoopPosition(0))
    expected = [shards.load(number).tobytes() for number in range(SHARDS)]
    text = pickle.dumps(shards)
    shards.close()
    wait_until(lambda: not fetch_threads())
    copy = pickle.loads(text)
    assert not fetch_threads()
    assert [copy.entry(number) for number in range(SHARDS)] == [shards.entry(n) for n in range(SHARDS)]
    assert [copy.load(number).tobytes() for number in range(SHARDS)] == expected
    counters = copy.counters()
    copy.close()
    found = SHARDS if where == "folder" else 0
    assert (counters["hits"], counters["misses"]) == (found, SHARDS - found)


def test_a_copy_reads_the_versions_that_were_known_and_no_others(folders: dict[str, Path]) -> None:
    store = MemoryStore(fresh_url())
    put_folder(folders["mds_foreign"], store)
    shards = remote_shards(store.url)
    known, other = names_of(shards)[:2]
    before = shards.entry(0)
    changed = {name: store.get(name)[:-1] + b"x" for name in (known, other)}
    for name, data in changed.items():
        store.put(name, data)
    copy = pickle.loads(pickle.dumps(shards))
    assert copy.entry(0) == before
    with pytest.raises(ObjectChangedError, match=known):
        copy.load(0)
    assert copy.load(1).tobytes() == changed[other]


def test_closed_shards_have_no_threads_and_may_be_used_again(folders: dict[str, Path]) -> None:
    shards = opened(NotedStore(folders["mds"]))
    for _ in range(2):
        _plan = shards.fetcher.follow([shards], in_order(shards), LoopPosition(0))
        wait_until(lambda: kept(shards) == SHARDS)
        assert fetch_threads()
        shards.close()
        assert not fetch_threads()
    assert shards.progress() == ""


def test_the_counters_are_all_that_statistics_know_and_three_more(folders: dict[str, Path]) -> None:
    store = NotedStore(folders["mds"])
    shards = opened(store, CacheMemory(1 << 20))
    known = {field.name for field in fields(CacheStats)}
    assert shards.counters().keys() == known | {"fetched_shards", "evicted_bytes", "damaged"}
    assert {name for name, value in shards.counters().items() if value} == {"capacity_bytes"}
    rows = np.array([1, 2])
    fetched = shards.rows.read({0: rows})
    assert shards.counters()["row_reads"] == 2
    shards.load(0)
    shards.close()
    assert fetched[0].rows is rows
    counters = shards.counters()
    assert counters["used_bytes"] == shards.info(0).raw.bytes
    assert counters["capacity_bytes"] == 1 << 20
