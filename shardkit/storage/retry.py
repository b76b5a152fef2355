"""When to try again, how long to wait first, and when to give up: plain numbers, and one operation's count.

Waits double from `backoff_seconds` up to `longest_backoff_seconds`, and each is drawn between 0 and that
("full jitter"), so that the many processes of a job do not come back all at once. The draw takes nothing from
the global random state, which belongs to the training.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from shardkit.storage.errors import ThrottledError, TransientError
from shardkit.storage.metrics import StoreMetrics

__all__ = ["Retries", "RetryPolicy"]

_entropy = random.SystemRandom()


def _jitter() -> float:
    return _entropy.random()


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """The defaults outlast a minute of failures, and let no operation go on for ever."""

    attempts: int = 16
    """Tries in a row that bring nothing; a byte that arrives starts the count again."""
    backoff_seconds: float = 0.1
    """Longest wait before the second try."""
    longest_backoff_seconds: float = 10.0
    deadline_seconds: float = 120.0
    """Longest time without a result or a byte. A transfer has bytes / floor_bytes_per_second more in all."""
    answer_seconds: float = 30.0
    """A request without an answer for so long is left to itself and tried again; stores time out earlier."""
    hedge: bool = True
    """Whether a read that is slow to start is asked for a second time; the first answer counts."""
    hedge_quantile: float = 0.95
    """Slow to start: slower than this share of the latest reads …"""
    hedge_samples: int = 20
    """… of which so many are needed …"""
    hedge_delay_seconds: float = 0.05
    """… and slower than this in any case."""
    hedge_share: float = 0.05
    """Most hedges per read, so that a store that is slow for all is not asked twice by all."""
    floor_bytes_per_second: float = 100_000.0
    """A body that stays below this over the window is cut and opened again."""
    window_seconds: float = 10.0
    """Doubled for a body each time it is cut: a slow network is slow on every connection."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = _jitter
    """Draws from [0, 1); `random.Random(seed).random` makes waits repeatable."""

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.hedge_samples < 1:
            raise ValueError("attempts and hedge_samples must be at least 1")
        if not (0 < self.backoff_seconds <= self.longest_backoff_seconds):
            raise ValueError("backoff_seconds must be above 0 and at most longest_backoff_seconds")
        if not (self.deadline_seconds > 0 and self.answer_seconds > 0 and self.hedge_delay_seconds >= 0):
            raise ValueError("deadline_seconds and answer_seconds must be above 0")
        if not (self.floor_bytes_per_second > 0 and self.window_seconds > 0):
            raise ValueError("floor_bytes_per_second and window_seconds must be above 0")
        if not (0 < self.hedge_quantile < 1 and 0 <= self.hedge_share <= 1):
            raise ValueError("hedge_quantile must be between 0 and 1, hedge_share from 0 to 1")

    def transfer_seconds(self, size: int) -> float:
        """How long moving `size` bytes may take in all."""
        return self.deadline_seconds + size / self.floor_bytes_per_second


_LEAST_TRY_SECONDS = 0.05


class Retries:
    """The tries of one operation: what it is ("open", "put", …), on which object, since when."""

    def __init__(
        self,
        policy: RetryPolicy,
        metrics: StoreMetrics,
        operation: str,
        where: str,
        *,
        seconds: float | None = None,
        began: float | None = None,
    ) -> None:
        self._policy = policy
        self._metrics = metrics
        self._operation = operation
        self.where = where
        self._began = policy.clock() if began is None else began
        self._deadline = self._began + (policy.deadline_seconds if seconds is None else seconds)
        self.failures = 0

    @property
    def left_seconds(self) -> float:
        return self._deadline - self._policy.clock()

    def wait(self, error: TransientError, arrived: str = "") -> None:
        """Sleep before the next try, or raise if there may be none; `arrived`: what came before it failed."""
        policy = self._policy
        self.failures += 1
        longest = min(
            policy.longest_backoff_seconds, policy.backoff_seconds * 2.0 ** min(self.failures - 1, 60)
        )
        delay = longest * policy.jitter()
        # A try that has no time left would only hide behind its own timeout what the others met.
        if self.failures >= policy.attempts or delay + _LEAST_TRY_SECONDS >= self.left_seconds:
            raise self.gave_up(error, arrived) from error
        self._metrics.count("retries")
        policy.sleep(delay)

    def gave_up(self, error: TransientError, arrived: str = "") -> TransientError:
        """`error` with what was tried; of the same kind, so that whoever catches it can tell."""
        kind = ThrottledError if isinstance(error, ThrottledError) else TransientError
        seconds = self._policy.clock() - self._began
        tries = f"{self.failures} {'try' if self.failures == 1 else 'tries'} over {seconds:.1f} s"
        problem = f"gave up to {self._operation} after {tries}{arrived and f', {arrived}'}: {error.problem}"
        return kind(self.where, problem, status=error.status)
