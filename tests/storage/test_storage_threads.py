"""Threads that wait for a store: shared, reused, bounded, gone when idle; what a fork remakes, there only."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from functools import partial

from shardkit.storage.threads import Threads, Workers, remake_after_fork

TIMEOUT = 60


def names(workers: Workers, count: int) -> list[threading.Thread]:
    """The threads of `count` tasks run one after the other."""
    found = []
    for _ in range(count):
        done = threading.Event()

        def task(done: threading.Event = done) -> None:
            found.append(threading.current_thread())
            done.set()

        workers.submit(task)
        assert done.wait(TIMEOUT)
    return found


def test_threads_are_reused_by_all_workers_of_the_process_and_end_when_idle() -> None:
    shared = Threads(idle_seconds=0.05)
    many = [Workers(4, threads=shared) for _ in range(50)]
    threads = {thread for workers in many for thread in names(workers, 3)}
    assert len(threads) <= 8, "a thread may not be back when the next task comes"
    for thread in threads:
        thread.join(TIMEOUT)
        assert not thread.is_alive()
    assert len(names(many[0], 2)) == 2, "and they may be used again"


def test_at_most_so_many_tasks_run_and_the_others_wait_for_a_thread() -> None:
    workers = Workers(3)
    release, done = threading.Event(), threading.Semaphore(0)
    running: list[int] = []

    def task() -> None:
        running.append(1)
        release.wait(TIMEOUT)
        done.release()

    for _ in range(8):
        workers.submit(task)
    assert workers._running == 3
    assert len(running) <= 3
    release.set()
    for _ in range(8):
        assert done.acquire(timeout=TIMEOUT)
    assert len(running) == 8


def test_a_forked_child_starts_threads_of_its_own() -> None:
    workers = Workers(1)
    release = threading.Event()
    workers.submit(lambda: (release.wait(TIMEOUT), None)[1])
    with workers._lock:
        child = os.fork()
        if not child:
            done = threading.Event()
            workers.submit(done.set)
            os._exit(0 if done.wait(TIMEOUT) else 1)
    release.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_task_that_raises_costs_no_thread_and_its_error_is_reported() -> None:
    workers = Workers(2)

    def fail(number: int) -> None:
        raise ValueError(number)

    failed = [workers.submit(partial(fail, number)) for number in range(20)]
    assert len(names(workers, 5)) == 5, "other tasks still run"
    errors = [future.exception(TIMEOUT) for future in failed]
    assert [error.args[0] for error in errors if error] == list(range(20))


def test_a_task_that_is_canceled_before_it_has_a_thread_never_runs() -> None:
    workers = Workers(1)
    release, ran = threading.Event(), threading.Event()
    first = workers.submit(lambda: release.wait(TIMEOUT))
    waiting = workers.submit(ran.set)
    assert waiting.cancel()
    release.set()
    assert first.result(TIMEOUT)
    assert workers.submit(lambda: "next").result(TIMEOUT) == "next"
    assert not ran.is_set()


class Remade:
    def __init__(self) -> None:
        self.process = os.getpid()

    def after_fork(self) -> None:
        self.process = os.getpid()


def test_a_child_remakes_what_lives_and_the_parent_nothing() -> None:
    remade = Remade()
    remake_after_fork(remade)
    child = os.fork()
    if not child:
        os._exit(0 if remade.process == os.getpid() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert remade.process == os.getpid()


def test_being_remade_keeps_nothing_alive() -> None:
    remade = Remade()
    remake_after_fork(remade)
    reference = weakref.ref(remade)
    del remade
    gc.collect()
    assert reference() is None
