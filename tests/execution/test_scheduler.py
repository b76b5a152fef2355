"""Queues hand out each task once; one process at a time drives a build, whoever comes, goes or dies."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from shardkit.errors import BuildError
from shardkit.storage.local import LocalStore
from shardkit.storage.memory import MemoryStore
from shardkit.storage.store import Store
from shardkit.writers.execution.engine import InlineEngine
from shardkit.writers.execution.scheduler import (
    DriverLease,
    OwnQueue,
    SharingTimes,
    SliceQueue,
    Stragglers,
    TaskSlice,
)
from shardkit.writers.execution.task import Commit, Task
from shardkit.writers.execution.work import run_task
from shardkit.writers.execution.work_local import LocalWork
from support.stores import FaultRule, FaultyStore, WrappedStore, fresh_memory

SECONDS = 60.0
TIMES = SharingTimes(lease_seconds=SECONDS, beat_seconds=1e6)  # heartbeats come from the tests
QUICK = SharingTimes(poll_seconds=0.01, longest_poll_seconds=0.01, scavenge_seconds=1e6, beat_seconds=1e6)
RUNS: Counter[str] = Counter()
T = TypeVar("T")


def note(folder: Path, name: str) -> dict[str, Any]:
    RUNS[name] += 1
    (folder / "file").write_text(name)
    return {}


def make_tasks(count: int) -> list[Task]:
    return [Task("stage", f"t{n}", {}, note, (f"t{n}",), weight=n) for n in range(count)]


@pytest.fixture(autouse=True)
def _no_runs() -> None:
    RUNS.clear()


@pytest.fixture
def work(tmp_path: Path) -> LocalWork:
    return LocalWork(tmp_path)


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


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def lease_of(store: Store, name: str, clock: Clock | None = None, times: SharingTimes = TIMES) -> DriverLease:
    clock = clock or Clock()
    return DriverLease(store, name=name, times=times, clock=clock, sleep=clock.sleep)


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

    times = replace(TIMES, beat_seconds=10.0)
    two = DriverLease(store, name="two", times=times, clock=clock, sleep=sleep)
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
    two = lease_of(store, "two", clock, replace(TIMES, beat_seconds=10.0))
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
    lease = lease_of(slow, "one", times=replace(TIMES, beat_seconds=0.02))
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
    two = lease_of(store, "two", clock, replace(TIMES, beat_seconds=10.0))
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
    lease = lease_of(store, "one", times=replace(TIMES, beat_seconds=0.01))
    lease.acquire()
    deadline = time.monotonic() + 30
    while not (store.log and int(memory.get("lease/00000001").split()[-1]) >= 5):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lease.check()
    assert lease.held
    lease.close()


def test_one_process_takes_heavy_tasks_first(work: LocalWork) -> None:
    done: list[Commit] = []
    InlineEngine().run(OwnQueue(make_tasks(3), done.append), work)
    assert [commit.name for commit in done] == ["t2", "t1", "t0"]


@pytest.mark.parametrize("slice", [(0, 0), (-1, 2), (2, 2)])
def test_a_slice_is_one_of_its_number(slice: tuple[int, int]) -> None:
    with pytest.raises(BuildError, match=r"must be one of 0/n to \(n-1\)/n"):
        TaskSlice(*slice)


def test_every_task_is_in_one_slice() -> None:
    owners = Counter(n for task in make_tasks(40) for n in range(3) if TaskSlice(n, 3).owns(task))
    assert sum(owners.values()) == 40
    assert min(owners.values()) > 4


def run_slice(
    work: LocalWork,
    tasks: list[Task],
    lease: DriverLease,
    slice: TaskSlice,
    absent: set[int] | None = None,
    **options: Any,
) -> list[Commit]:
    done: list[Commit] = []
    absent = set() if absent is None else absent
    InlineEngine().run(SliceQueue(tasks, done.append, work, None, lease, slice, absent, **options), work)
    return done


def test_slices_do_each_task_once_and_hear_of_all(work: LocalWork) -> None:
    tasks, memory = make_tasks(30), fresh_memory()
    heard: dict[int, list[Commit]] = {}

    def run(number: int) -> None:
        lease = lease_of(memory, f"slice-{number}", times=QUICK)
        heard[number] = run_slice(work, tasks, lease, TaskSlice(number, 3))

    threads = [threading.Thread(target=run, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for commits in heard.values():
        assert sorted(commit.name for commit in commits) == sorted(task.name for task in tasks)
    assert {task.name: 1 for task in tasks} == RUNS


@pytest.mark.parametrize("driver_lives", [True, False])
def test_tasks_of_a_slice_that_never_comes_are_done_once_nothing_moves(
    work: LocalWork, *, driver_lives: bool
) -> None:
    """By the driver: another slice that drives the build is left to do it, a dead one is replaced."""
    tasks, memory, clock, slice = make_tasks(12), fresh_memory(), Clock(), TaskSlice(1, 2)
    other = lease_of(memory, "other", times=QUICK)
    assert other.try_acquire()
    lease = lease_of(memory, "one", clock, replace(QUICK, scavenge_seconds=900.0))
    waits: list[str] = []
    missing = [task for task in tasks if not slice.owns(task)]

    def waiting(text: str) -> None:
        waits.append(text)
        clock.now += 30
        if driver_lives:
            other.renew()
            if len(waits) == 60:
                for task in missing:
                    run_task(task, task.digest, work)

    done = run_slice(work, tasks, lease, slice, waiting=waiting, clock=clock)
    assert sorted(commit.name for commit in done) == sorted(task.name for task in tasks)
    assert set(RUNS.values()) == {1}
    assert waits[0] == f"{len(missing)} tasks of other slices"
    assert clock.now - 1000.0 >= (1800 if driver_lives else 900)
    assert lease.held is not driver_lives
    if not driver_lives:  # the lightest ones first, should their slice live after all
        assert [commit.name for commit in done[-len(missing) :]] == [task.name for task in missing]


def test_what_a_slice_finishes_late_is_not_done_again_by_the_driver(work: LocalWork) -> None:
    tasks, clock, slice = make_tasks(12), Clock(), TaskSlice(0, 2)
    lease = lease_of(fresh_memory(), "one", clock, replace(QUICK, scavenge_seconds=900.0))
    missing = [task for task in tasks if not slice.owns(task)]
    late = iter(sorted(missing, key=lambda task: -task.weight)[:2])

    def waiting(text: str) -> None:
        clock.now += 500
        for task in [*late]:
            run_task(task, task.digest, work)

    done = run_slice(work, tasks, lease, slice, waiting=waiting, clock=clock)
    assert len(done) == 12
    assert set(RUNS.values()) == {1}


def test_a_store_that_fails_stops_no_slice(work: LocalWork) -> None:
    store = FaultyStore(MemoryStore("memory://no-lease"), [FaultRule(fault="deny")])
    tasks, slice = make_tasks(6), TaskSlice(0, 2)

    def waiting(text: str) -> None:
        for task in tasks:
            run_task(task, task.digest, work)

    lease = lease_of(store, "one", times=QUICK)
    assert len(run_slice(work, tasks, lease, slice, waiting=waiting)) == 6
    assert store.log


def test_a_slice_that_never_comes_is_waited_for_once_and_counted_in_when_it_comes(work: LocalWork) -> None:
    clock, slice, absent = Clock(), TaskSlice(0, 2), set[int]()
    lease = lease_of(fresh_memory(), "one", clock, replace(QUICK, scavenge_seconds=900.0))

    def waiting(text: str) -> None:
        clock.now += 500

    for stage, seconds in (("first", 1000), ("second", 0)):
        start = clock.now
        tasks = [replace(task, stage=stage) for task in make_tasks(12)]
        assert len(run_slice(work, tasks, lease, slice, absent, waiting=waiting, clock=clock)) == 12
        assert clock.now - start == seconds
        assert absent == {1}
    tasks = [replace(task, stage="third") for task in make_tasks(12)]
    queue = SliceQueue(tasks, lambda commit: None, work, None, lease, slice, absent, clock=clock)
    for task in tasks:
        run_task(task, task.digest, work)
    InlineEngine().run(queue, work)
    assert absent == set()


def test_a_straggler_takes_three_times_the_median_of_its_stage_and_a_minute() -> None:
    stragglers = Stragglers()
    assert stragglers.limit_seconds("pack") == math.inf  # nothing to compare with
    for seconds in (10.0, 30.0, 500.0):
        stragglers.finished("pack", seconds)
        stragglers.finished("clean", seconds / 10)
    assert stragglers.limit_seconds("pack") == 90.0
    assert stragglers.limit_seconds("clean") == 60.0
    for _ in range(2000):
        stragglers.finished("pack", 100.0)  # of old tasks, nothing is left
    assert stragglers.limit_seconds("pack") == 300.0
