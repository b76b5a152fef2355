"""Runs work in a thread: a page waits for it briefly, then shows its progress instead."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Lock, Thread
from typing import Generic, TypeVar

WAIT_SECONDS = 0.3  # time that a page waits before it shows the progress of the work

_Result = TypeVar("_Result")


class Background(Generic[_Result]):
    """Runs `work` once, at the first call of `wait`; `work` receives a function that reports its progress."""

    def __init__(self, work: Callable[[Callable[[float], None]], _Result]) -> None:
        self._work = work
        self._lock, self._ended = Lock(), Event()
        self._thread: Thread | None = None
        self._found: list[_Result] = []
        self._error: Exception | None = None
        self.share = 0.0
        """Share of the work that is done, from 0 to 1."""

    def wait(self, seconds: float | None = WAIT_SECONDS) -> _Result | None:
        """Return the result, or None if it is not ready after `seconds`; raise any exception of the work."""
        with self._lock:
            if self._thread is None:
                self._thread = Thread(target=self._run, name="shardkit-view", daemon=True)
                self._thread.start()
        self._ended.wait(seconds)
        if self._error is not None:
            raise self._error
        return self._found[0] if self._found else None

    def _report(self, share: float) -> None:
        self.share = share

    def _run(self) -> None:
        try:
            self._found.append(self._work(self._report))
        except Exception as error:  # `wait` raises it again
            self._error = error
        finally:
            self._ended.set()
