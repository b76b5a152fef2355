"""Batches ready before they are asked for, without a thread where a thread would only cost.

A source (an iterator) is advanced either by the training loop itself or by one background thread, never by
both at once, and what it yields comes out in its order. The thread runs only when the training loop has
something else to do: when it comes back sooner than `BUSY_SECONDS` there is nothing to overlap with, and two
threads that take turns with Python's lock and each other's caches are slower than one (16 microseconds gather
8 rows; waking a thread costs more). So a loop that only reads runs at full speed on a busy machine too, and a
loop that trains finds its batches ready.

The thread stays within `Limits` (one item is always allowed). An error in it is raised where the item was
due, with the thread's traceback. `close` ends the thread; so do leaving the loop and the interpreter's end.
Nothing here survives a fork: a child must start its own.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from shardkit.errors import ShardkitError

__all__ = ["BUSY_SECONDS", "Limits", "LoaderTimeoutError", "PrefetchThread", "Prefetcher"]

BUSY_SECONDS = 200e-6  # above: the loop does work that a thread can hide behind
_BUSY_TIMES = 2  # in a row: once may be the operating system's doing
_JOIN_SECONDS = 5.0  # how long closing waits for a thread in the middle of a read


class LoaderTimeoutError(ShardkitError, TimeoutError):
    """A batch did not arrive in time; the message says which and what was being read."""


class Item(Protocol):
    """What a prefetcher must know of what it hands out."""

    @property
    def bytes(self) -> int: ...

    @property
    def batch_count(self) -> int: ...


T = TypeVar("T", bound=Item)


@dataclass(frozen=True, slots=True)
class Limits:
    """How far ahead a prefetcher may run (0 batches: no thread), and how long a wait may last."""

    batches: int
    bytes: int
    timeout_seconds: float


class Prefetcher(Generic[T]):
    """Hands out what `source` yields; `describe` says what is being read when a wait gets too long."""

    def __init__(self, source: Iterator[T], limits: Limits, describe: Callable[[], str]) -> None:
        self._source = source
        self._limits = limits
        self._describe = describe
        self._changed = threading.Condition()
        self._ready: deque[T] = deque()
        self._ready_batches = self._ready_bytes = 0
        self._busy = False  # someone is advancing the source
        self._wanted = False  # the thread may advance it
        self._ended = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._returned = time.perf_counter()
        self._busy_times = 0

    def get(self) -> T | None:
        """The next item, or None at the end. Raises what the source raised, or LoaderTimeoutError."""
        if os.getpid() != self._process:
            raise RuntimeError("this iterator belongs to the parent process: call iter(loader) in this one")
        is_busy = time.perf_counter() - self._returned > BUSY_SECONDS
        self._busy_times = self._busy_times + 1 if is_busy else 0
        wanted = self._busy_times >= _BUSY_TIMES and self._limits.batches > 0
        if self._thread is None and not wanted and not self._ended:
            item = self._advance()
        else:
            item = self._get_from_either(wanted)
        self._returned = time.perf_counter()
        return item

    @property
    def ready_batches(self) -> int:
        """Batches that are ready to be handed out."""
        return self._ready_batches

    def fail(self, error: BaseException) -> None:
        """End with `error`: raised by `get`, at once if it waits. From any thread."""
        with self._changed:
            self._ended, self._error = True, error
            self._ready.clear()
            self._ready_batches = self._ready_bytes = 0
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread and forget what is ready. Safe to call twice, and from a forked child."""
        if os.getpid() != self._process:
            return
        with self._changed:
            self._ended = True
            self._ready.clear()
            self._changed.notify_all()
        thread = self._thread
        if thread is not None:
            atexit.unregister(self.close)
            if thread is not threading.current_thread():
                thread.join(_JOIN_SECONDS)
        self._source = iter(())  # whoever holds an iterator of a closed loader holds no shards by it

    def _get_from_either(self, wanted: bool) -> T | None:
        with self._changed:
            self._let_thread_run(wanted)
            item = self._take_ready()
            if item is not None or self._ended:
                return item
            self._busy = True
        try:
            return self._advance()
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _take_ready(self) -> T | None:
        """The next ready item, or None; waits for it while the thread is at work."""
        deadline = time.monotonic() + self._limits.timeout_seconds
        while not self._ready and self._busy and self._error is None:
            left = deadline - time.monotonic()
            if left <= 0:
                seconds = self._limits.timeout_seconds
                raise LoaderTimeoutError(f"no batch within {seconds:g} s: {self._describe()}")
            self._changed.wait(left)
        if self._ready:
            item = self._ready.popleft()
            self._ready_batches -= item.batch_count
            self._ready_bytes -= item.bytes
            self._changed.notify_all()
            return item
        if self._error is not None:
            raise self._error
        return None

    def _advance(self) -> T | None:
        """The source's next item, or None at its end; nobody else can advance it meanwhile."""
        try:
            item = next(self._source, None)
        except BaseException as error:
            # A generator that raised is at its end: asked again, it would pass for a finished epoch.
            self._ended, self._error = True, error
            raise
        if item is None:
            self._ended = True
        return item

    def _let_thread_run(self, wanted: bool) -> None:
        if wanted and not self._wanted:
            self._changed.notify_all()
        self._wanted = wanted
        if wanted and self._thread is None and not self._ended:
            self._thread = PrefetchThread(target=self._run, name="shardkit-prefetch", daemon=True)
            # A daemon, so that it cannot keep the process alive; stopped in order at exit all the same.
            atexit.register(self.close)
            self._thread.start()

    def _has_room(self) -> bool:
        return not self._ready or (
            self._ready_batches < self._limits.batches and self._ready_bytes < self._limits.bytes
        )

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._ended and (self._busy or not self._wanted or not self._has_room()):
                    self._changed.wait()
                if self._ended:
                    return
                self._busy = True
            item = error = None
            try:
                item = next(self._source, None)
            except BaseException as raised:
                error = raised
            with self._changed:
                self._busy = False
                if item is None:
                    self._ended, self._error = True, error
                elif not self._ended:
                    self._ready.append(item)
                    self._ready_batches += item.batch_count
                    self._ready_bytes += item.bytes
                self._changed.notify_all()


class PrefetchThread(threading.Thread):
    """A thread that makes batches in the background: what it does must leave the training loop alone."""
