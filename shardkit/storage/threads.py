"""Threads that wait for a store, so that its callers need not wait for ever; and what forks make of locks.

A call into a store cannot be interrupted. What can be done is to have another thread make it, and to stop
waiting. `Workers` bounds how many calls of one store, or of one kind, run at once. The threads that make them
belong to the process and serve all `Workers`, so their number follows the calls in flight, not the number of
stores. They end after a few seconds without work, and are daemons: one that hangs in a call holds up neither
the process's end nor anything else.

In a forked child the threads that held locks do not exist: objects with locks and threads register with
`remake_after_fork`, to begin anew there.
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
_IDLE_SECONDS = 5.0  # a thread is cheap to start (50 microseconds), and to keep


class Remade(Protocol):
    """An object whose state is not valid in a forked child."""

    def after_fork(self) -> None: ...


_members: weakref.WeakSet[Remade] = weakref.WeakSet()


def remake_after_fork(member: Remade) -> None:
    """Call `member.after_fork()` at the start of every forked child, as long as `member` lives."""
    _members.add(member)


def _remake_all() -> None:
    for member in list(_members):
        member.after_fork()


os.register_at_fork(after_in_child=_remake_all)


class Submitter(Protocol):
    """What makes requests: `Workers`, or a simulation of them."""

    def submit(self, task: Callable[[], T]) -> Future[T]: ...


class Threads:
    """Daemon threads that run whatever they are given, one for each task that runs; idle ones are reused."""

    def __init__(self, idle_seconds: float | None = None) -> None:
        """`idle_seconds`: how long a thread waits for work before it ends; None: `_IDLE_SECONDS`."""
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
            del task  # or what it holds would live until the next one

    def _next(self) -> Callable[[], None] | None:
        seconds = _IDLE_SECONDS if self._idle_seconds is None else self._idle_seconds
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._tasks, seconds)
            self._idle -= 1
            return self._tasks.popleft() if self._tasks else None


_threads = Threads()  # of this process


class Workers:
    """Runs tasks in daemon threads, at most `most` at once; others wait for their turn."""

    def __init__(self, most: int, *, threads: Threads | None = None) -> None:
        """`threads`: by default those of the process."""
        self._most, self._threads = most, threads or _threads
        self.after_fork()
        remake_after_fork(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._tasks: deque[Callable[[], None]] = deque()
        self._running = 0

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Run `task` in a thread, unless the future is canceled before its turn."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(task())
                except BaseException as error:  # whatever it is: a thread that ended here would be missing
                    future.set_exception(error)

        with self._lock:
            if self._running == self._most:
                self._tasks.append(run)
                return future
            self._running += 1
        self._threads.run(partial(self._work, run))
        return future

    def _work(self, run: Callable[[], None] | None) -> None:
        """Run a task, then those that wait."""
        while run is not None:
            run()
            run = None  # or its result would live until the next one
            with self._lock:
                if self._tasks:
                    run = self._tasks.popleft()
                else:
                    self._running -= 1
