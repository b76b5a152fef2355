"""Rows read one by one: enough of them to start at once, few enough to leave the rest to whole shards."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkit.cache.fetcher import FetchLimits
from shardkit.cache.folder import SUBFOLDER, CacheFolder
from shardkit.cache.memory import CacheMemory
from shardkit.cache.planner import PLANNED, LoopPosition, Planner
from shardkit.cache.rows import NodeRows
from shardkit.cache.run import FIRST_ROWS
from shardkit.cache.shards import CacheReader
from shardkit.loaders import StreamingLoader
from shardkit.loaders.producer import LoaderTimeoutError
from shardkit.locks import FileLock
from shardkit.order.order import Order, OrderSpec
from support.cache_entries import leased
from support.noted_store import NotedStore, Read
from support.remote_harness import (
    SOON_SECONDS,
    Remote,
    make_remote_kind,
    put_folder,
    wait_until,
)

SHARDS = 5
SAMPLES = 53

pytestmark = pytest.mark.filterwarnings("ignore:cache_bytes of:RuntimeWarning")


def whole(read: Read) -> bool:
    """Whether a read is of a whole shard."""
    return read.shard is not None and read.stop is None


def row(read: Read) -> bool:
    """Whether a read is of a row."""
    return read.stop is not None and read.shard is not None


Open = Callable[..., tuple[NotedStore, Remote]]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    made: list[tuple[NotedStore, Remote]] = []

    def of(kind: str = "mds", cache: Any = None, single_rows: int = 32) -> tuple[NotedStore, Remote]:
        store = NotedStore(make_remote_kind(tmp_path / kind, kind, samples=SAMPLES, shards=SHARDS))
        limits = FetchLimits(single_rows=single_rows)
        remote = Remote.open(store, cache, connections=8, limits=limits)
        store.reads.clear()
        made.append((store, remote))
        return store, remote

    yield of
    for store, remote in made:
        store.let_through()
        remote.dataset.close()


def loader_of(remote: Remote, **arguments: Any) -> StreamingLoader:
    return remote.loader(**({"shuffle": "none", "prefetch_batches": 0} | arguments))


def ids(loader: StreamingLoader, batches: int) -> list[int]:
    return [i for batch in islice(loader, batches) for i in batch["sample_id"].tolist()]


def row_reads(remote: Remote) -> float:
    return remote.shards.counters()["row_reads"]


@pytest.mark.parametrize("kind", ["mds", "tar"])
def test_the_first_batches_wait_for_no_whole_shard_and_are_followed_by_no_more_rows_than_allowed(
    opened: Open, kind: str
) -> None:
    store, remote = opened(kind, single_rows=8)
    store.holds = whole
    with loader_of(remote, timeout_seconds=0.5) as loader:
        batches = iter(loader)
        assert [next(batches)["sample_id"].tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert row_reads(remote) == 8
        assert sum(map(row, store.reads)) == 8
        with pytest.raises(LoaderTimeoutError, match=r"step 2 .*0 of [\d,]+ bytes received") as caught:
            next(batches)
        assert remote.dataset.where(0) in str(caught.value)
        assert row_reads(remote) == 8
        store.let_through()


def test_each_start_has_its_own_first_rows(opened: Open) -> None:
    store, remote = opened(single_rows=4)
    store.holds = whole
    with loader_of(remote) as loader:
        got = [ids(loader, 1) for _ in range(3)]  # left after one batch, begun anew
        state = loader.state_dict()
        loader.load_state_dict(state)
        got.append(ids(loader, 1))
        store.let_through()
    assert got == [list(range(first, first + 4)) for first in (0, 4, 8, 12)]
    assert row_reads(remote) == 16


REPLICAS = 8


@pytest.fixture
def replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Remote]]]:
    """The processes of a node that read the same, with one store, which notes what all of them ask for."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, f"{REPLICAS}")
    monkeypatch.setenv("RANK", "0")
    made: list[Remote] = []
    stores: list[NotedStore] = []

    def of(store: NotedStore, kind: str = "mds", capacity: int = 1 << 24, **limits: Any) -> list[Remote]:
        put_folder(make_remote_kind(tmp_path / kind, kind, samples=SAMPLES, shards=SHARDS), store)
        for _ in range(REPLICAS):
            cache = CacheFolder(tmp_path / "cache", capacity)
            made.append(
                Remote.open(store, cache, connections=8, limits=FetchLimits(join_seconds=0.01, **limits))
            )
        store.reads.clear()
        stores.append(store)
        return made

    yield of
    for store in stores:
        store.let_through()
    for remote in made:
        remote.dataset.close()


def shared_rows(remote: Remote) -> int:
    return sum(name.startswith("row-") for name in remote.shards.cache.contents())


def first_batches(remotes: list[Remote], batches: int) -> list[list[int]]:
    """The samples that each replica gets first, all of them at the same time."""
    with ThreadPoolExecutor(len(remotes)) as pool, ExitStack() as stack:
        loaders = [stack.enter_context(loader_of(remote)) for remote in remotes]
        return list(pool.map(lambda loader: ids(loader, batches), loaders))


@pytest.mark.parametrize("kind", ["mds", "tar"])
def test_replicas_on_a_node_read_each_row_once_between_them(
    replicas: Callable[..., list[Remote]], kind: str
) -> None:
    store = NotedStore(holds=whole)
    remotes = replicas(store, kind, single_rows=2)
    assert first_batches(remotes, 2) == [list(range(8))] * REPLICAS
    assert sum(map(row, store.reads)) == 8, "and as many more rows"
    assert sum(map(row_reads, remotes)) == 8 * REPLICAS
    assert shared_rows(remotes[0]) == 0, "they end with the loaders that wrote them"


def test_shared_rows_leave_the_cache_when_their_shards_have_come(
    replicas: Callable[..., list[Remote]],
) -> None:
    store = NotedStore(holds=whole)
    first, second, *_ = replicas(store)
    with loader_of(first) as loader:
        batches = iter(loader)
        next(batches)
        assert shared_rows(second) == 4
        store.let_through()
        deadline = time.monotonic() + 30
        while not all(map(first.shards.is_there, range(SHARDS))) and time.monotonic() < deadline:
            time.sleep(0.01)
        got = [i for batch in islice(batches, SAMPLES // 4 - 1) for i in batch["sample_id"].tolist()]
        assert got == list(range(4, SAMPLES - 1))
        assert shared_rows(second) == 0


@pytest.mark.parametrize("problem", ["a peer that is stopped", "a damaged entry", "no room"])
def test_a_replica_that_gets_no_row_from_another_reads_it_itself(
    replicas: Callable[..., list[Remote]], tmp_path: Path, problem: str
) -> None:
    store = NotedStore(holds=whole)
    capacity = 40 if problem == "no room" else 1 << 24
    first, second, *_ = replicas(store, capacity=capacity, peer_seconds=0.2)
    with loader_of(first) as loader, ExitStack() as stack:
        next(iter(loader))
        entries = list((tmp_path / "cache").rglob("row-*"))
        assert len(entries) == (0 if problem == "no room" else 4)
        for file in entries:
            if problem == "a damaged entry":
                file.write_bytes(file.read_bytes()[::-1])
            else:
                first.shards.cache.remove(file.name)
                stack.callback(leased(second.shards.cache, f"read-{file.name}").release)
        store.reads.clear()
        began = time.monotonic()
        assert first_batches([second], 1) == [[0, 1, 2, 3]]
        assert sum(map(row, store.reads)) == 4
        assert (time.monotonic() - began > 0.2) == (problem == "a peer that is stopped")


def test_a_row_of_another_version_than_those_before_is_asked_for_again(
    replicas: Callable[..., list[Remote]],
) -> None:
    store = NotedStore(holds=whole)
    first, second, *_ = replicas(store)
    rows = {0: np.array([0])}
    second.shards.rows.read(rows)
    version = "of other data"
    node = NodeRows(first.shards.cache, first.shards.entry)
    layout = first.shards.rows.layout(0)
    assert layout is not None
    node.put((0, 0), b"x" * layout.size, version)
    assert node.find((0, 0), layout.size) == (b"x" * layout.size, version)
    with second.shards.rows.begin(rows, shared=True) as requests:
        found = second.shards.rows.finish(requests, time.monotonic() + SOON_SECONDS)
    assert found[0].data.tobytes() != b"x" * found[0].data.size
    assert sum(map(row, store.reads)) == 2


def test_few_rows_go_before_all_whole_shards(opened: Open) -> None:
    store, remote = opened()
    with loader_of(remote) as loader:
        ids(loader, 1)
        wait_until(lambda: sum(map(whole, store.reads)) == SHARDS)
    first = store.reads[:5]  # the rows and what proves them, by several threads
    assert sum(map(row, first)) == 4
    assert [read.key for read in first if not row(read)] == ["blocks.bin"]


def test_beside_many_rows_whole_shards_come_already(opened: Open) -> None:
    store, remote = opened()
    store.holds = row
    got: list[int] = []
    with loader_of(remote, batch_size=FIRST_ROWS + 1) as loader:
        thread = threading.Thread(target=lambda: got.extend(ids(loader, 1)))
        thread.start()
        wait_until(lambda: len(remote.shards.cache.contents()) == SHARDS)
        store.let_through()
        thread.join(SOON_SECONDS)
    assert got == list(range(FIRST_ROWS + 1))
    assert row_reads(remote) == FIRST_ROWS + 1


def test_a_plan_of_more_rows_than_allowed_waits_for_its_shards(opened: Open) -> None:
    store, remote = opened()
    with loader_of(remote, batch_size=33) as loader:
        assert ids(loader, 1) == list(range(33))
    assert not any(map(row, store.reads))


@pytest.mark.parametrize("kind", ["mds_zstd", "tar_foreign", "columns"])
def test_rows_whose_place_no_index_tells_are_not_read_singly(opened: Open, kind: str) -> None:
    store, remote = opened(kind)
    with loader_of(remote) as loader:
        assert ids(loader, 3) == list(range(12))
    assert not any(map(row, store.reads))


def test_shards_that_are_here_are_not_read_by_rows(opened: Open) -> None:
    store, remote = opened()
    for number in range(SHARDS):
        remote.shards.load(number)
    store.reads.clear()
    with loader_of(remote) as loader:
        assert len(ids(loader, 14)) == SAMPLES + 3  # carried into the next epoch
    assert store.reads == []


def test_without_room_each_shard_is_fetched_whole_once_and_read_by_rows_from_then_on(opened: Open) -> None:
    store, remote = opened(cache=CacheMemory(1))
    with loader_of(remote, endless=True) as loader:
        rows = ids(loader, 200)
    assert sorted(rows[:SAMPLES]) == list(range(SAMPLES))
    counters = remote.shards.counters()
    assert counters["bypassed"] == sum(map(whole, store.reads)) == SHARDS
    assert counters["row_reads"] >= len(rows) - SHARDS * (SAMPLES // SHARDS + 2)


def test_in_half_a_cache_every_shard_without_room_is_read_by_rows_however_many_they_are(
    tmp_path: Path,
) -> None:
    """More of them than a plan has fetches: what one plan learned the next one must not forget."""
    shards, samples = 3 * PLANNED, 6 * PLANNED
    folder = make_remote_kind(tmp_path / "mds", "mds", samples=samples, shards=shards)
    store = NotedStore(folder)
    size = max(file.stat().st_size for file in folder.glob("*.mds*"))
    remote = Remote.open(store, CacheMemory(size * shards // 2), connections=4)
    with (
        closing(remote.dataset),
        loader_of(remote, shuffle="global", endless=True, batch_size=16) as loader,
    ):
        batches = iter(loader)
        for _ in range(3 * samples // 16):
            next(batches)
        store.reads.clear()
        for _ in range(samples // 16):
            next(batches)
        assert sum(map(row, store.reads)) > samples // 4, "each by one request"
        assert sum(map(whole, store.reads)) < shards // 16


@pytest.mark.parametrize("kind", ["mds", "mds_zstd"])
@pytest.mark.parametrize("fault", ["full disk", "stopped process"])
def test_a_cache_folder_that_takes_nothing_costs_no_traffic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, fault: str
) -> None:
    """Each shard came again for each group of batches, 7 times its bytes here."""
    store = NotedStore(make_remote_kind(tmp_path / kind, kind, samples=SAMPLES, shards=SHARDS))
    remote = Remote.open(
        store, CacheFolder(tmp_path / "cache", lock_seconds=0.05, spare_bytes=1 << 24), connections=8
    )

    def full(descriptor: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    lock = FileLock(tmp_path / "cache" / SUBFOLDER / "lock")
    if fault == "full disk":
        monkeypatch.setattr(os, "posix_fallocate", full)
    else:
        assert lock.acquire()
    with ExitStack() as stack:
        stack.callback(lock.release)
        stack.enter_context(closing(remote.dataset))
        loader = stack.enter_context(remote.loader(endless=True))
        assert {*ids(loader, 3 * SAMPLES // 4)} == {*range(SAMPLES)}
        counts = remote.shards.counters()
    assert sum(map(whole, store.reads)) == SHARDS
    assert counts["disk_full" if fault == "full disk" else "locked_out"] >= SHARDS
    assert counts["bypassed"] == 0


def test_what_one_cache_has_no_room_for_together_does_not_stay_open(opened: Open) -> None:
    _, second = opened("tar")
    numbers = frozenset(range(SHARDS))
    _, first = opened(cache=CacheMemory(sum(map(second.shards.known_size, numbers))))
    for number in numbers:
        first.dataset.shard(number)
    assert first.shards.still_open(numbers) == numbers
    order = Order([10] * (2 * SHARDS), OrderSpec(1, 1, 1, "none"))
    plan = first.shards.fetcher.follow([first.shards, second.shards], order, LoopPosition(0))
    reader = CacheReader(first.shards)
    reader.plan = plan
    first.shards.readers.add(reader)
    assert first.shards.still_open(numbers) == frozenset()
    reader.using = frozenset({2})
    assert first.shards.still_open(numbers) == {2}


def test_a_plan_made_while_a_shard_comes_does_not_forget_that_it_has_no_room(opened: Open) -> None:
    store, remote = opened(cache=CacheMemory(1))
    fetcher = remote.shards.fetcher
    store.holds = whole
    with loader_of(remote, endless=True) as loader:
        reader = threading.Thread(target=ids, args=(loader, 40))
        reader.start()
        wait_until(lambda: any(map(whole, store.reads)))
        [number] = [job.number for job in list(fetcher._active.values()) if job.urgent]
        (plan,) = fetcher.plans()
        fetcher._plan(plan, object())
        assert remote.shards.has_no_room(number)
        store.let_through()
        reader.join(SOON_SECONDS)
    assert not reader.is_alive()


@pytest.mark.parametrize("room", ["for all", "for one", "for none", "for what others fetch"])
def test_a_loop_that_stands_still_is_planned_for_a_few_times_only(
    opened: Open, room: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[int] = []
    plan = Planner.plan

    def counted(planner: Planner, *arguments: Any) -> None:
        plans.append(planner.loop.read)
        plan(planner, *arguments)

    monkeypatch.setattr(Planner, "plan", counted)
    _, remote = opened(cache=CacheMemory({"for one": 700, "for none": 1}.get(room, 1 << 20)))
    leases = [leased(remote.shards.cache, remote.shards.entry(number)) for number in (3, 4)]
    if room != "for what others fetch":
        for lease in leases:
            lease.release()
    with loader_of(remote) as loader:
        assert ids(loader, 2) == list(range(8))
        wait_until(lambda: bool(plans))
        time.sleep(0.2)  # a loop that spins would plan hundreds of times
        assert len(plans) <= 3 * SHARDS


# Several loaders over one open dataset.


def test_an_evaluation_in_mid_epoch_leaves_the_training_loaders_plan_at_work(opened: Open) -> None:
    store, remote = opened()
    store.holds = whole
    with loader_of(remote) as training:
        iter_training = iter(training)
        first = next(iter_training)["sample_id"].tolist()
        with loader_of(remote, seed=5, shuffle="window") as evaluation:
            assert len(ids(evaluation, 1)) == 4
        store.let_through()
        # Nobody asks for these shards: only the plan of the training loader knows that it will.
        wait_until(lambda: all(map(remote.shards.is_there, range(SHARDS))))
        rest = [i for batch in islice(iter_training, SAMPLES // 4 - 1) for i in batch["sample_id"].tolist()]
    assert first + rest == list(range(SAMPLES // 4 * 4))
    assert remote.shards.counters()["misses"] == 0


def test_loaders_over_one_dataset_wait_as_long_as_each_was_told(
    opened: Open,
) -> None:
    store, remote = opened(single_rows=0)
    store.holds = whole
    with (
        loader_of(remote, timeout_seconds=0.3) as hasty,
        loader_of(remote, timeout_seconds=SOON_SECONDS) as patient,
    ):
        got: list[list[int]] = []
        began = time.monotonic()
        waiting = threading.Thread(target=lambda: got.append(ids(patient, 1)), daemon=True)
        batches = iter(hasty)
        waiting.start()
        wait_until(lambda: "shard" in remote.shards.progress())
        with pytest.raises(LoaderTimeoutError, match=r"did not arrive within 0\.3 s"):
            next(batches)
        assert time.monotonic() - began < SOON_SECONDS / 2
        assert waiting.is_alive()
        store.let_through()
        waiting.join(SOON_SECONDS)
    assert got == [[0, 1, 2, 3]]
