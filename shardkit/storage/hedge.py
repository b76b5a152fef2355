"""Two requests for one answer: when a second is worth sending, and which of them counts.

A read that takes longer to start than almost all the latest ones is likely to have met a slow server or a
dead connection, and the same request again is likely not to. `Hedging` says after how long, and keeps hedges
a small share of all reads. `Race` runs requests on threads: the first good answer wins, an answer that nobody
waits for any more is discarded (a body: closed) by the thread that got it.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from shardkit.storage.errors import StoreError, TransientError
from shardkit.storage.retry import RetryPolicy
from shardkit.storage.workers import Workers

__all__ = ["Hedging", "Race"]

_RECENT = 256  # reads whose latencies count
_REFRESH = 8  # so many new latencies between two looks at the quantile
_BURST = 32.0  # hedges that may be saved up: as many as connections hang at once

T = TypeVar("T")


class Hedging:
    """The latest latencies and the budget, of all threads that use a store."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._lock = threading.Lock()
        self._recent: deque[float] = deque(maxlen=max(_RECENT, policy.hedge_samples))
        self._delay: float | None = None
        self._new = 0
        self._budget = 0.0

    def answered(self, seconds: float) -> None:
        """A read started after that time."""
        with self._lock:
            self._recent.append(seconds)
            self._new += 1
            count = len(self._recent)
            if count < self._policy.hedge_samples or (self._delay is not None and self._new < _REFRESH):
                return
            self._new = 0
            rank = min(count - 1, math.ceil(self._policy.hedge_quantile * count) - 1)
            self._delay = max(self._policy.hedge_delay_seconds, sorted(self._recent)[rank])

    def delay(self) -> float | None:
        """Seconds after which the read that begins now is slow; None if that cannot be said yet."""
        if not self._policy.hedge:
            return None
        with self._lock:
            self._budget = min(_BURST, self._budget + self._policy.hedge_share)
            return self._delay

    def take(self) -> bool:
        """Whether the budget allows for a hedge, which is then taken from it."""
        with self._lock:
            if self._budget < 1:
                return False
            self._budget -= 1
            return True


class Race(Generic[T]):
    """Requests of which one answer is wanted; `discard` gets those that come too late."""

    def __init__(self, workers: Workers, discard: Callable[[T], None]) -> None:
        self._workers = workers
        self._discard = discard
        self._changed = threading.Condition(threading.Lock())
        self._started = self._running = 0
        self._settled = False
        self._values: list[tuple[int, T]] = []
        self._errors: list[BaseException] = []

    def start(self, request: Callable[[], T]) -> None:
        with self._changed:
            number = self._started
            self._started += 1
            self._running += 1
        self._workers.submit(lambda: self._run(number, request))

    def answer(self, seconds: float) -> tuple[int, T] | None:
        """(number of the request, its answer) once there is one; None if there is none within that time.

        Raises a request's error if another try would not help, or if no request is left that might succeed.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            while not self._values:
                lasting = [error for error in self._errors if not isinstance(error, TransientError)]
                if lasting or (self._errors and not self._running):
                    raise (lasting or self._errors)[-1]
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
            self._settled = True
            return self._values.pop(0)

    def settle(self) -> None:
        """No answer is wanted any more."""
        with self._changed:
            self._settled = True
            late, self._values = self._values, []
        for _, value in late:
            self._drop(value)

    def _run(self, number: int, request: Callable[[], T]) -> None:
        if not self._is_wanted():
            return  # it waited for a thread for too long
        try:
            value = request()
        except BaseException as error:  # it is raised where the answer is waited for
            with self._changed:
                self._running -= 1
                self._errors.append(error)
                self._changed.notify()
            return
        with self._changed:
            self._running -= 1
            if self._is_wanted():
                self._values.append((number, value))
                self._changed.notify()
                return
        self._drop(value)

    def _is_wanted(self) -> bool:
        return not self._settled

    def _drop(self, value: T) -> None:
        with suppress(StoreError):
            self._discard(value)
