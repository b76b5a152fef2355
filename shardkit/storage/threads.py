"""Threads that wait for a store, so that its callers need not wait for ever; and what forks make of locks.

A call into a store cannot be interrupted. What can be done is to have another thread make it, and to stop
waiting. `Workers` reuses threads, ends them after a few seconds without work or at `close`, and starts them
as daemons: one that hangs in a call holds up neither the process's end nor anything else.

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
from typing import Protocol, TypeVar

__all__ = ["Workers", "remake_after_fork"]

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


class Workers:
    """Runs tasks in daemon threads, at most `most` at once; others wait for a thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.after_fork()
        remake_after_fork(self)

    def after_fork(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._tasks: deque[Callable[[], None]] = deque()
        self._threads = self._idle = 0
        self._closed = False

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Run `task` in a thread, unless the future is canceled before one is free."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(task())
                except BaseException as error:  # whatever it is: a thread that ended here would be missing
                    future.set_exception(error)

        with self._changed:
            self._closed = False
            self._tasks.append(run)
            if len(self._tasks) > self._idle and self._threads < self._most:
                thread = threading.Thread(target=self._work, name="shardkit-store", daemon=True)
                thread.start()
                self._threads += 1
            self._changed.notify()
        return future

    def close(self) -> None:
        """Let idle threads end, and busy ones as soon as they are done."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while (run := self._next()) is not None:
            run()
            del run  # or its result would live until the next one

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._tasks or self._closed, _IDLE_SECONDS)
            self._idle -= 1
            if self._tasks:
                return self._tasks.popleft()
            self._threads -= 1
            return None
