"""Threads that make calls into stores, so that callers can stop waiting; and locks after a fork.

A call into a store cannot be interrupted, but another thread can make it, and the caller can stop waiting for
that thread. `Workers` limits how many calls of one store, or of one kind, run at once. The threads belong to
the process and serve all `Workers`, so their number follows the calls in flight, not the number of stores.
They end after a few seconds without work. They are daemons: one that hangs in a call delays neither the end
of the process nor other calls.

A forked child has no copies of the threads that held locks. Objects with locks and threads register with
`remake_after_fork`, which resets them in the child.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Protocol, TypeVar

T = TypeVar("T")
_IDLE_SECONDS = 5.0  # starting a thread takes 50 microseconds, so keeping idle ones longer gains little


class Remade(Protocol):
    """An object that must reset its state in a forked child."""

    def after_fork(self) -> None: ...


_members: weakref.WeakSet[Remade] = weakref.WeakSet()


def remake_after_fork(member: Remade) -> None:
    """Call `member.after_fork()` at the start of every forked child, as long as `member` exists."""
    _members.add(member)


def _remake_all() -> None:
    for member in list(_members):
        member.after_fork()


os.register_at_fork(after_in_child=_remake_all)


class Submitter(Protocol):
    """An object that runs tasks in threads: `Workers`, or a simulation in tests."""

    def submit(self, task: Callable[[], T]) -> Future[T]: ...


class Threads:
    """Daemon threads that run tasks, one thread per running task; idle threads are reused."""

    def __init__(self, idle_seconds: float | None = None) -> None:
        """`idle_seconds`: time after which an idle thread ends; None: `_IDLE_SECONDS`."""
        self._idle_seconds = idle_seconds
        self.after_fork()
        remake_after_fork(self)

    def after_fork(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._tasks: deque[Callable[[], None]] = deque()
        self._idle = 0

    def run(self, task: Callable[[], None]) -> None:
        """Run `task`, which must not raise, in a thread."""
        with self._changed:
            self._tasks.append(task)
            if len(self._tasks) > self._idle:
                threading.Thread(target=self._work, name="shardkit-store", daemon=True).start()
            self._changed.notify()

    def _work(self) -> None:
        while (task := self._next()) is not None:
            task()
            del task  # otherwise objects that it references would live until the next task

    def _next(self) -> Callable[[], None] | None:
        seconds = _IDLE_SECONDS if self._idle_seconds is None else self._idle_seconds
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._tasks, seconds)
            self._idle -= 1
            return self._tasks.popleft() if self._tasks else None


_threads = Threads()  # shared by all `Workers` of this process


class Workers:
    """Runs tasks in daemon threads, at most `most` at a time; further tasks wait in a queue."""

    def __init__(self, most: int, *, threads: Threads | None = None) -> None:
        """`threads`: the threads to use; by default, those shared by the whole process."""
        self._most, self._threads = most, threads or _threads
        self.after_fork()
        remake_after_fork(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._tasks: deque[Callable[[], None]] = deque()
        self._running = 0

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Run `task` in a thread, when one is free; return its future, which can be canceled until then."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(task())
                except BaseException as error:  # catch all: an escaping error would leave `_running` too high
                    future.set_exception(error)

        with self._lock:
            if self._running == self._most:
                self._tasks.append(run)
                return future
            self._running += 1
        self._threads.run(partial(self._work, run))
        return future

    def _work(self, run: Callable[[], None] | None) -> None:
        """Run a task, then queued tasks until none is left."""
        while run is not None:
            run()
            run = None  # otherwise its result would live until the next task
            with self._lock:
                if self._tasks:
                    run = self._tasks.popleft()
                else:
                    self._running -= 1
