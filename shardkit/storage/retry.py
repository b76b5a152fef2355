"""When to retry, how long to wait first, and when to fail: a policy, and the attempts of one operation.

Retries are bounded by time, not by their number, so an outage shorter than `deadline_seconds` costs only
time. The exception is a store that has not answered once: failing to reach it (no HTTP status) is an error
after `first_contact_seconds`, because its address is probably wrong.

The upper bound of the waits doubles from `backoff_seconds` to `longest_backoff_seconds`, and each wait is
drawn between 0 and it ("full jitter"), so that the many processes of a job do not all come back at once. The
draw leaves the global random state alone: it belongs to the training.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from shardkit.storage.errors import StoreError, ThrottledError, TransientError
from shardkit.storage.forks import remake_after_fork
from shardkit.storage.metrics import StoreMetrics

__all__ = ["Health", "Retries", "RetryPolicy"]

_logger = logging.getLogger(__name__)
_REPORT_EVERY_SECONDS = 60.0  # per store, however many operations fail
_entropy = random.SystemRandom()


def _jitter() -> float:
    return _entropy.random()


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """The defaults ride out ten minutes, as long as loaders wait for a batch by default."""

    backoff_seconds: float = 0.1
    """Longest wait before the second attempt."""
    longest_backoff_seconds: float = 10.0
    deadline_seconds: float = 600.0
    """Longest time without a result or a byte. A transfer has bytes / floor_bytes_per_second more in all."""
    first_contact_seconds: float = 5.0
    """No retries after this time if the store cannot be reached and has never answered."""
    report_seconds: float = 5.0
    """An operation that has failed for this long is reported to the log."""
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
        if self.hedge_samples < 1:
            raise ValueError("hedge_samples must be at least 1")
        if not (self.first_contact_seconds > 0 and self.report_seconds > 0):
            raise ValueError("first_contact_seconds and report_seconds must be above 0")
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


_LEAST_ATTEMPT_SECONDS = 0.05


class Health:
    """Whether a store answers, as all its operations see it: reports outages, and their end, to the log."""

    def __init__(self, url: str, policy: RetryPolicy, metrics: StoreMetrics, *, has_answered: bool) -> None:
        self._url, self._policy, self._metrics = url, policy, metrics
        self.has_answered = has_answered
        self._lock = threading.Lock()
        self._down_since: float | None = None
        self._next_report = -float("inf")
        remake_after_fork(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def succeeded(self) -> None:
        self.has_answered = True
        if self._down_since is None:  # read without the lock: this runs for every request
            return
        with self._lock:
            since, self._down_since = self._down_since, None
        if since is not None:
            _logger.warning("%s: answers again after %.0f s", self._url, self._policy.clock() - since)

    def failed(self, error: StoreError) -> None:
        """A server that refuses a request is there."""
        self.has_answered = self.has_answered or error.status is not None

    def retrying(self, operation: str, error: StoreError, began: float, left_seconds: float) -> None:
        """An operation that began to fail at `began` is retried."""
        now = self._policy.clock()
        with self._lock:
            if now - began < self._policy.report_seconds or now < self._next_report:
                return
            self._next_report = now + _REPORT_EVERY_SECONDS
            is_new = self._down_since is None
            self._down_since = began if self._down_since is None else self._down_since
        if is_new:
            self._metrics.count("outages")
        _logger.warning(
            "%s: %s has been failing for %.0f s, retrying for up to %.0f s more: %s",
            self._url, operation, now - began, left_seconds, error.problem,
        )  # fmt: skip


class Retries:
    """The attempts of one operation ("open", "put", …) on one object."""

    def __init__(
        self,
        policy: RetryPolicy,
        metrics: StoreMetrics,
        health: Health,
        operation: str,
        where: str,
        *,
        seconds: float | None = None,
        began: float | None = None,
    ) -> None:
        self._policy, self._metrics, self._health = policy, metrics, health
        self._operation = operation
        self.where = where
        self._began = policy.clock() if began is None else began
        self._deadline = self._began + (policy.deadline_seconds if seconds is None else seconds)
        self.failures = 0

    @property
    def left_seconds(self) -> float:
        return self._deadline - self._policy.clock()

    def wait(self, error: TransientError, arrived: str = "") -> None:
        """Sleep before the next attempt, or raise if there is no time for one.

        `arrived` says how many bytes came before the failure.
        """
        policy = self._policy
        self.failures += 1
        longest = min(
            policy.longest_backoff_seconds, policy.backoff_seconds * 2.0 ** min(self.failures - 1, 60)
        )
        delay = longest * policy.jitter()
        left = self.left_seconds
        # An attempt without time left would only replace the error by its own timeout.
        if delay + _LEAST_ATTEMPT_SECONDS >= left:
            raise self._failed(error, arrived) from error
        elapsed = policy.clock() - self._began
        if not self._health.has_answered and elapsed + delay >= policy.first_contact_seconds:
            advice = "the store has not answered yet: check its URL, the endpoint and the network"
            raise self._failed(error, arrived, advice) from error
        self._health.retrying(self._operation, error, self._began, left)
        self._metrics.count("retries")
        policy.sleep(delay)

    def _failed(self, error: TransientError, arrived: str, advice: str = "") -> TransientError:
        """`error` with what was tried; of the same kind, so that callers can tell throttling apart."""
        kind = ThrottledError if isinstance(error, ThrottledError) else TransientError
        count, seconds = self.failures, self._policy.clock() - self._began
        attempts = f"{count} {'attempt' if count == 1 else 'attempts'} in {seconds:.1f} s"
        problem = f"{self._operation} failed after {attempts}{arrived and f', {arrived}'}: {error.problem}"
        return kind(self.where, problem + (advice and f"; {advice}"), status=error.status)
