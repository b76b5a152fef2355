"""Work that a page waits for a little, and that continues in a thread while the page says how far it is."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Lock, Thread
from typing import Generic, TypeVar

WAIT_SECONDS = 1.5  # of a page, before it shows how far the work is

_Result = TypeVar("_Result")


class Background(Generic[_Result]):
    """Runs `work` once, when a page first waits for it; `work` is given a function to report its share."""

    def __init__(self, work: Callable[[Callable[[float], None]], _Result]) -> None:
        self._work = work
        self._lock, self._ended = Lock(), Event()
        self._thread: Thread | None = None
        self._found: list[_Result] = []
        self._error: Exception | None = None
        self.share = 0.0
        """From 0 to 1: how much is done."""

    def wait(self, seconds: float = WAIT_SECONDS) -> _Result | None:
        """The result; None if it is not there after `seconds`. Raises what the work raised."""
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
        except Exception as error:  # raised again by whoever waits
            self._error = error
        finally:
            self._ended.set()
