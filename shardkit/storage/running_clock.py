"""Seconds in which this process could run: the clock of all limits on waiting.

A process that is stopped for minutes (kill -STOP, a frozen container, a debugger) has waited for nobody
meanwhile. By `time.monotonic` all its deadlines have passed when it wakes, and a training run would end for a
store that answers. `running_seconds` leaves such times out. While it is in use, a thread looks at the clock
every second; if two looks are more than `GAP_SECONDS` apart, nothing of this process has run in between.

Waiting by it: a wait of the system ends by the system's clock, so a long one is made of short ones, with a
look after each (`wait_until`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from shardkit.storage.threads import remake_after_fork

GAP_SECONDS = 5.0  # far longer than a thread waits for its turn, on an overloaded machine, too
LOOK_SECONDS = 10.0  # at least so often, whoever waits looks
_TICK_SECONDS = 1.0
_IDLE_TICKS = 60  # without a look of others, the thread ends


class RunningClock:
    """Monotonic seconds without those in which the process was suspended; call it to look."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, has_thread: bool = True) -> None:
        """`has_thread`: whether a thread looks every second; otherwise gaps between calls count."""
        self._clock, self._has_thread = clock, has_thread
        self._lost = 0.0
        self.after_fork()
        remake_after_fork(self)

    def after_fork(self) -> None:
        """A child has no thread; its clock goes on from where its parent's was."""
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
            self._last = None  # what comes now is no suspension: nobody waited
            self._is_watched = False


_clock = RunningClock()


def running_seconds() -> float:
    """Seconds of this process's `RunningClock`."""
    return _clock()


def wait_until(
    wait: Callable[[float], bool], deadline: float, clock: Callable[[], float] = running_seconds
) -> bool:
    """Whether `wait`, which is given seconds, says that it is done before `deadline` of the clock."""
    while not wait(max(0.0, min(deadline - clock(), LOOK_SECONDS))):
        if clock() >= deadline:
            return False
    return True
