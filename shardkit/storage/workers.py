"""Threads that wait for a store, so that its callers need not wait for ever.

A call into a store cannot be interrupted; what can be done is to have another thread make it and to stop
waiting. Threads are reused, end after a few seconds without work or at `close`, and are daemons: one that
hangs in a call holds up neither the process's end nor anything else.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from shardkit.storage.forks import remake_after_fork

__all__ = ["Workers"]

_IDLE_SECONDS = 5.0  # a thread is cheap to start (50 microseconds), and to keep


class Workers:
    """Runs tasks, at most `most` at once; others wait for a thread.

    A task reports its errors to whoever waits for it. What it raises all the same goes to
    `threading.excepthook`, as of any thread, and the thread runs the next task.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._forget()
        remake_after_fork(self)

    def after_fork(self) -> None:
        self._forget()

    def submit(self, task: Callable[[], None]) -> None:
        with self._changed:
            self._closed = False
            self._tasks.append(task)
            if len(self._tasks) > self._idle and self._threads < self._most:
                thread = threading.Thread(target=self._run, name="shardkit-store", daemon=True)
                thread.start()
                self._threads += 1
            self._changed.notify()

    def close(self) -> None:
        """Let idle threads end, and busy ones as soon as they are done."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _forget(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._tasks: deque[Callable[[], None]] = deque()
        self._threads = self._idle = 0
        self._closed = False

    def _run(self) -> None:
        while (task := self._next()) is not None:
            try:
                task()
            except BaseException as error:  # a thread that ended here would be missing for ever
                failed = (type(error), error, error.__traceback__, threading.current_thread())
                threading.excepthook(threading.ExceptHookArgs(failed))
                del failed
            del task  # or its result would live until the next one

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._tasks or self._closed, _IDLE_SECONDS)
            self._idle -= 1
            if self._tasks:
                return self._tasks.popleft()
            self._threads -= 1
            return None
