"""Processes that share a stage do every task, mostly once, whoever comes, goes or dies.

Claims are leases by each observer's own clock: they save work, and no failure of them stops any.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from shardkit.errors import BuildError
from shardkit.storage.memory import MemoryStore
from shardkit.storage.store import Store
from shardkit.writers.execution import scheduler as module
from shardkit.writers.execution.engine import InlineEngine
from shardkit.writers.execution.scheduler import Claims, OwnQueue, SharedQueue, TaskSlice, take_turn
from shardkit.writers.execution.task import Commit, Task
from shardkit.writers.execution.work import run_task
from shardkit.writers.execution.work_local import LocalWork
from support.stores import FaultRule, FaultyStore, fresh_memory

LEASE = 60.0
RUNS: Counter[str] = Counter()


def note(folder: Path, name: str) -> dict[str, Any]:
    RUNS[name] += 1
    (folder / "file").write_text(name)
    return {}


def make_tasks(count: int) -> list[Task]:
    return [Task("stage", f"t{n}", {}, note, (f"t{n}",), weight=n) for n in range(count)]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    RUNS.clear()
    monkeypatch.setattr(module, "POLL_SECONDS", 0.02)


@pytest.fixture
def work(tmp_path: Path) -> LocalWork:
    return LocalWork(tmp_path)


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


def claims_of(store: Store, name: str, clock: Clock | None = None, lease: float = LEASE) -> Claims:
    """They beat once, as they begin: what beats do later, tests do."""
    return Claims(store, name=name, lease_seconds=lease, beat_seconds=1e6, clock=clock or Clock())


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


def test_one_process_takes_heavy_tasks_first(work: LocalWork) -> None:
    done: list[Commit] = []
    queue = OwnQueue(make_tasks(3), done.append)
    InlineEngine().run(queue, work)
    assert [commit.name for commit in done] == ["t2", "t1", "t0"]


@pytest.mark.parametrize("slice", [(0, 0), (-1, 2), (2, 2)])
def test_a_slice_is_one_of_its_number(slice: tuple[int, int]) -> None:
    with pytest.raises(BuildError, match=r"must be one of 0/n to \(n-1\)/n"):
        TaskSlice(*slice)


def test_every_task_is_in_one_slice_which_is_taken_before_those_of_others(work: LocalWork) -> None:
    tasks = make_tasks(40)
    owners = Counter(n for task in tasks for n in range(3) if TaskSlice(n, 3).rank(task) == 0)
    assert sum(owners.values()) == 40
    assert min(owners.values()) > 4
    done: list[Commit] = []
    with claims_of(fresh_memory(), "one") as claims:
        InlineEngine().run(SharedQueue(tasks, done.append, work, claims, TaskSlice(1, 3)), work)
    ranks = [TaskSlice(1, 3).rank(tasks[int(commit.name[1:])]) for commit in done]
    assert ranks == sorted(ranks)
    assert len(ranks) == 40


def test_several_processes_do_each_task_once_and_hear_of_all(work: LocalWork) -> None:
    tasks, memory = make_tasks(30), fresh_memory()
    heard: list[list[Commit]] = [[] for _ in range(3)]

    def run(number: int) -> None:
        with claims_of(memory, f"session-{number}") as claims:
            InlineEngine().run(SharedQueue(tasks, heard[number].append, work, claims, None), work)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [sorted(commit.name for commit in commits) for commits in heard] == [
        sorted(t.name for t in tasks)
    ] * 3
    assert {task.name: 1 for task in tasks} == RUNS


def test_the_task_of_one_that_was_killed_is_done_after_its_lease(work: LocalWork) -> None:
    tasks, memory, clock = make_tasks(2), fresh_memory(), Clock()
    dead = claims_of(memory, "dead").__enter__()
    assert dead.take(tasks[0].key)
    waits: list[dict[str, int]] = []

    def waiting(holders: Any) -> None:
        waits.append(dict(holders))
        clock.now += 20

    done: list[Commit] = []
    with claims_of(memory, "one", clock) as claims:
        queue = SharedQueue(tasks, done.append, work, claims, None, waiting=waiting, clock=clock)
        InlineEngine().run(queue, work)
    assert [commit.name for commit in done] == ["t1", "t0"]
    assert waits[0] == {"dead": 1}
    assert len(waits) == 3


def test_what_others_finished_is_not_done_again(work: LocalWork) -> None:
    tasks, memory = make_tasks(12), fresh_memory()
    done: list[Commit] = []
    with claims_of(memory, "one") as claims:
        queue = SharedQueue(tasks, done.append, work, claims, None)
        first = queue.take()
        assert first is not None
        for task in tasks:  # by another process, which claimed and let go of it meanwhile
            if task.key != first.key:
                run_task(task, task.digest, work)
        queue.done(run_task(first, first.digest, work))
        assert queue.take() is None
        assert queue.exhausted
    assert len(done) == 12
    assert set(RUNS.values()) == {1}


def test_waiting_ends_after_hours_and_names_who_hangs(work: LocalWork) -> None:
    [task], memory, clock = make_tasks(1), fresh_memory(), Clock()
    with ExitStack() as stack:
        other = stack.enter_context(claims_of(memory, "node7"))
        other.take(task.key)
        claims = stack.enter_context(claims_of(memory, "one", clock, lease=1e9))
        queue = SharedQueue([task], print, work, claims, None, clock=clock)
        assert queue.take() is None
        clock.now += module.WAIT_SECONDS + 1
        with pytest.raises(
            BuildError, match=r"6 hours for others to finish 1 tasks, such as stage/t0 \(claimed by node7"
        ):
            queue.take()


class Counting:
    """Counts requests by what they are."""

    def __init__(self, below: MemoryStore) -> None:
        self._below = below
        self.requests: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        if name in ("get", "put", "list", "delete", "head", "open"):
            self.requests[name] += 1
        return getattr(self._below, name)


def test_claims_cost_two_requests_a_task_and_listings_do_not_grow_with_tasks(work: LocalWork) -> None:
    counting = Counting(fresh_memory())
    with claims_of(counting, "one") as claims:
        InlineEngine().run(SharedQueue(make_tasks(60), lambda commit: None, work, claims, None), work)
    assert counting.requests["put"] == 61
    assert counting.requests["delete"] == 61
    assert counting.requests["list"] < 20  # a look every 15 seconds, and two at the end
    assert counting.requests["get"] == 0


def test_turns_are_taken_one_by_one_and_a_dead_ones_is_taken_over() -> None:
    memory, clock = fresh_memory(), Clock()
    claims_of(memory, "dead").__enter__().take("publish/x")
    waits: list[dict[str, int]] = []

    def sleep(seconds: float) -> None:
        clock.now += 20

    def waiting(holders: Any) -> None:
        waits.append(dict(holders))

    states: list[bool] = []
    with claims_of(memory, "one", clock) as claims:
        for expected in (True, False):
            with take_turn(
                claims, "publish/x", lambda: bool(states), waiting, clock=clock, sleep=sleep
            ) as ours:
                assert ours is expected
                states.append(True)
    assert waits == [{"dead": 1}] * 3


def test_a_turn_is_not_waited_for_for_ever() -> None:
    memory, clock = fresh_memory(), Clock()

    def sleep(seconds: float) -> None:
        clock.now += 3600

    with ExitStack() as stack:
        stack.enter_context(claims_of(memory, "node7")).take("publish/x")
        one = stack.enter_context(claims_of(memory, "one", clock, lease=1e9))
        turn = take_turn(one, "publish/x", lambda: False, lambda holders: None, clock=clock, sleep=sleep)
        with pytest.raises(BuildError, match="24 hours for node7 to publish"):
            turn.__enter__()
