"""A clock that stops while this process is suspended; all waiting limits use it.

If a process is stopped for minutes (kill -STOP, a frozen container, a debugger), all its deadlines by
`time.monotonic` have passed when it resumes, and a training run would fail although its store answers.
`running_seconds` leaves such times out. While it is in use, a thread reads the clock every second; if two
reads are more than `GAP_SECONDS` apart, the process was suspended in between.

System waits time out by the system's clock, so `wait_until` splits a long wait into short ones and reads this
clock after each.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from shardkit.storage.threads import remake_after_fork

GAP_SECONDS = 5.0  # longer gaps between reads are suspensions; an overloaded machine causes shorter ones
LOOK_SECONDS = 10.0  # longest single wait of `wait_until` between two reads of the clock
_TICK_SECONDS = 1.0
_IDLE_TICKS = 60  # the watching thread ends after this many ticks without other readers of the clock


class RunningClock:
    """Monotonic seconds minus the time in which the process was suspended; call it to read the clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, has_thread: bool = True) -> None:
        """`has_thread`: start a thread that reads the clock every second; otherwise, only calls read it."""
        self._clock, self._has_thread = clock, has_thread
        self._lost = 0.0
        self.after_fork()
        remake_after_fork(self)

    def after_fork(self) -> None:
        """Reset the thread state in a forked child, whose clock continues from the parent's value."""
        self._lock = threading.Lock()
        self._last: float | None = None
        self._ticks = 0
        self._is_watched = False

    def __call__(self) -> float:
        seconds = self._look()
        self._ticks = 0
        if self._has_thread and not self._is_watched:
            self._watch()
        return seconds

    def _look(self) -> float:
        with self._lock:
            now = self._clock()
            if self._last is not None and now - self._last > GAP_SECONDS:
                self._lost += now - self._last
            self._last = now
            return now - self._lost

    def _watch(self) -> None:
        with self._lock:
            if self._is_watched:
                return
            self._is_watched = True
        threading.Thread(target=self._tick, name="suspension-watch", daemon=True).start()

    def _tick(self) -> None:
        while self._ticks < _IDLE_TICKS:
            time.sleep(_TICK_SECONDS)
            self._ticks += 1
            self._look()
        with self._lock:
            self._last = None  # the thread is off, so the gap until the next read is not a suspension
            self._is_watched = False


_clock = RunningClock()


def running_seconds() -> float:
    """Return monotonic seconds, without the time in which this process was suspended."""
    return _clock()


def wait_until(
    wait: Callable[[float], bool], deadline: float, clock: Callable[[], float] = running_seconds
) -> bool:
    """Call `wait(seconds)`, which waits up to `seconds`, until it returns True, and then return True.

    Returns False if `clock` reaches `deadline` first.
    """
    while not wait(max(0.0, min(deadline - clock(), LOOK_SECONDS))):
        if clock() >= deadline:
            return False
    return True
