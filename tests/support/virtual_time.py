"""Threads on a virtual clock: one runs at a time, and time passes only while all of them sleep."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["InlineWorkers", "VirtualTime"]

T = TypeVar("T")
_STACK_BYTES = 256 << 10


class VirtualTime:
    """`run` starts what was `spawn`ed, and returns when all of it has ended."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._waiting: list[tuple[float, int, Callable[[], object]]] = []
        self._done = threading.Event()
        self._error: BaseException | None = None

    def clock(self) -> float:
        return self.now

    def spawn(self, seconds: float, action: Callable[[], None]) -> None:
        """Run `action` in a thread of its own, so many seconds from now."""
        thread = threading.Thread(target=self._run, args=(action,), daemon=True)
        self._push(seconds, thread.start)

    def sleep(self, seconds: float) -> None:
        """Let others run for so long."""
        lock = threading.Lock()
        lock.acquire()
        self._push(seconds, lock.release)
        self._next()
        lock.acquire()

    def run(self) -> None:
        """Let everything run; raises the first error."""
        before = threading.stack_size(_STACK_BYTES)
        try:
            self._next()
            self._done.wait()
        finally:
            threading.stack_size(before)
        if self._error is not None:
            raise self._error

    def _push(self, seconds: float, go_on: Callable[[], object]) -> None:
        heapq.heappush(self._waiting, (self.now + seconds, next(self._order), go_on))

    def _next(self) -> None:
        if not self._waiting or self._error is not None:
            self._done.set()
            return
        self.now, _, go_on = heapq.heappop(self._waiting)
        go_on()

    def _run(self, action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:
            self._error = self._error or error
        self._next()


class InlineWorkers:
    """Runs a task in the thread that submits it: virtual requests take virtual time."""

    def submit(self, task: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(task())
        except BaseException as error:
            future.set_exception(error)
        return future
