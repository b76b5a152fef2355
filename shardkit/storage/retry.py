"""How an operation on a store is carried out: attempts in threads, retries, hedged requests, deadlines.

Retries are bounded by time, not by their number, so an outage shorter than `RetryPolicy.deadline_seconds`
costs only time. The exception is a store that has not answered once: failing to reach it (no HTTP status) is
an error after `first_contact_seconds`, because its address is probably wrong. The upper bound of the waits
doubles from `backoff_seconds` to `longest_backoff_seconds`, and each wait is drawn between 0 and it ("full
jitter"), so that the many processes of a job do not all come back at once. The draw leaves the global random
state alone: it belongs to the training.

An attempt waits for its place at the gate and runs in a thread of its own. If it does not answer in time it
is abandoned, because a call into a store cannot be interrupted: the operation ends by its deadline even if
the store never returns. The place is free between two attempts; abandoned requests hold none. There can be
three of them for each connection; after that, attempts wait for a thread until their deadlines.

A read that takes longer to start than almost all of the latest ones has probably met a slow server or a dead
connection, which a second request probably does not. `Hedging` says when to send one, and keeps hedges a
small share of all reads.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from shardkit.storage.limits import Gate, Ticket
from shardkit.storage.metrics import StoreMetrics
from shardkit.storage.store import Body, StoreError, ThrottledError, TransientError
from shardkit.storage.threads import Workers, remake_after_fork

__all__ = ["Calls", "Health", "Hedging", "Operation", "Race", "Retries", "RetryPolicy"]

Operation = Literal["head", "get", "open", "put", "list", "delete"]
T = TypeVar("T")
_logger = logging.getLogger(__name__)
_entropy = random.SystemRandom()
_LEAST_ATTEMPT_SECONDS = 0.05
_REPORT_EVERY_SECONDS = 60.0  # per store, however many operations fail
_THREADS_PER_CONNECTION = 4
_RECENT_READS = 256  # whose latencies count
_HEDGE_BURST = 32.0  # hedges that can be saved up, for connections that hang together


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
    """Only one retry after this time if the store cannot be reached and has never answered."""
    report_seconds: float = 5.0
    """An operation that has failed for this long is reported to the log."""
    answer_seconds: float = 30.0
    """A request without an answer after this time is abandoned and repeated; stores time out earlier."""
    hedge: bool = True
    """Whether to send a second request for a read that is slow to start; the first answer counts."""
    hedge_quantile: float = 0.95
    """A read is slow to start if it is slower than this share of the latest reads …"""
    hedge_samples: int = 20
    """… of which at least this many are needed …"""
    hedge_delay_seconds: float = 0.05
    """… and slower than this."""
    hedge_share: float = 0.05
    """Maximum number of hedges per read, so that a store that is slow for everybody gets no double load."""
    floor_bytes_per_second: float = 100_000.0
    """A body that stays below this rate over the window is closed and opened again."""
    window_seconds: float = 10.0
    """Doubled each time for the same body: a slow network is slow on every connection."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = _jitter
    """Draws from [0, 1); `random.Random(seed).random` makes waits reproducible."""

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
        """Return the time limit of a transfer of `size` bytes."""
        return self.deadline_seconds + size / self.floor_bytes_per_second


class Health:
    """Whether a store answers, as all its operations see it: reports outages, and their end, to the log."""

    def __init__(self, url: str, policy: RetryPolicy, metrics: StoreMetrics, *, has_answered: bool) -> None:
        self.policy, self.metrics = policy, metrics
        self._url = url
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
            _logger.warning("%s: answers again after %.0f s", self._url, self.policy.clock() - since)

    def failed(self, error: StoreError) -> None:
        """A server that refuses a request is there."""
        self.has_answered = self.has_answered or error.status is not None

    def retrying(self, operation: str, error: StoreError, began: float, left_seconds: float) -> None:
        """An operation that began to fail at `began` is retried."""
        now = self.policy.clock()
        with self._lock:
            if now - began < self.policy.report_seconds or now < self._next_report:
                return
            self._next_report = now + _REPORT_EVERY_SECONDS
            is_new = self._down_since is None
            self._down_since = began if self._down_since is None else self._down_since
        if is_new:
            self.metrics.count("outages")
        _logger.warning(
            "%s: %s has been failing for %.0f s, retrying for up to %.0f s more: %s",
            self._url, operation, now - began, left_seconds, error.problem,
        )  # fmt: skip


class Retries:
    """The attempts of one operation ("open", "put", …) on one object."""

    def __init__(
        self,
        health: Health,
        operation: str,
        where: str,
        *,
        seconds: float | None = None,
        began: float | None = None,
    ) -> None:
        self._health, self._policy = health, health.policy
        self._operation = operation
        self.where = where
        self._began = self._policy.clock() if began is None else began
        self._deadline = self._began + (self._policy.deadline_seconds if seconds is None else seconds)
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
        # One failure is no proof: a connection that times out takes all of these seconds.
        is_late = self.failures > 1 and elapsed + delay >= policy.first_contact_seconds
        if is_late and not self._health.has_answered:
            advice = "the store has not answered yet: check its URL, the endpoint and the network"
            raise self._failed(error, arrived, advice) from error
        self._health.retrying(self._operation, error, self._began, left)
        self._health.metrics.count("retries")
        policy.sleep(delay)

    def _failed(self, error: TransientError, arrived: str, advice: str = "") -> TransientError:
        """`error` with what was tried; of the same kind, so that callers can tell throttling apart."""
        kind = ThrottledError if isinstance(error, ThrottledError) else TransientError
        count, seconds = self.failures, self._policy.clock() - self._began
        attempts = f"{count} {'attempt' if count == 1 else 'attempts'} in {seconds:.1f} s"
        problem = f"{self._operation} failed after {attempts}{arrived and f', {arrived}'}: {error.problem}"
        return kind(self.where, problem + (advice and f"; {advice}"), status=error.status)


class Hedging:
    """The latest latencies and the budget for hedges, shared by all threads that use a store."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._lock = threading.Lock()
        self._recent: deque[float] = deque(maxlen=max(_RECENT_READS, policy.hedge_samples))
        self._budget = 0.0

    def answered(self, seconds: float) -> None:
        """Record how long a read took to start."""
        with self._lock:
            self._recent.append(seconds)

    def delay(self) -> float | None:
        """Return after how many seconds the read that begins now is slow; None if unknown."""
        policy = self._policy
        if not policy.hedge:
            return None
        with self._lock:
            self._budget = min(_HEDGE_BURST, self._budget + policy.hedge_share)
            latencies = sorted(self._recent)
        if len(latencies) < policy.hedge_samples:
            return None
        rank = math.ceil(policy.hedge_quantile * len(latencies)) - 1
        return max(policy.hedge_delay_seconds, latencies[rank])

    def take(self) -> bool:
        """Take a hedge from the budget; return whether there was one."""
        with self._lock:
            if self._budget < 1:
                return False
            self._budget -= 1
            return True


class Race(Generic[T]):
    """Requests in threads, for one answer: the first good one. `discard` gets the others."""

    def __init__(self, workers: Workers, discard: Callable[[T], None]) -> None:
        self._workers = workers
        self._discard = discard
        self._requests: list[Future[T]] = []
        self._winner: Future[T] | None = None

    def start(self, request: Callable[[], T]) -> None:
        self._requests.append(self._workers.submit(request))

    def answer(self, seconds: float) -> tuple[int, T] | None:
        """Return (number of the request, its answer), or None if none arrives in time.

        Raises a request's error if another attempt would not help, or if all requests have failed.
        """
        deadline = time.monotonic() + seconds
        while True:
            running = [future for future in self._requests if not future.done()]
            for number, future in enumerate(self._requests):
                if future.done() and future.exception() is None:
                    self._winner = future
                    return number, future.result()
            errors = [future.exception() for future in self._requests if future.done()]
            for error in reversed(errors):
                if error is not None and not (running and isinstance(error, TransientError)):
                    raise error
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            wait(running, min(left, threading.TIMEOUT_MAX), FIRST_COMPLETED)

    def settle(self) -> None:
        """Cancel what has not started and discard other answers, now or when they arrive."""
        for future in self._requests:
            if future is not self._winner and not future.cancel():
                future.add_done_callback(self._drop)

    def _drop(self, future: Future[T]) -> None:
        if future.exception() is None:
            with suppress(StoreError):
                self._discard(future.result())


class Calls:
    """Runs operations; holds what all operations on one store share in a process."""

    def __init__(
        self, url: str, policy: RetryPolicy, metrics: StoreMetrics, connections: int, *, has_answered: bool
    ) -> None:
        self.policy = policy
        self.metrics = metrics
        self.gate = Gate(connections, metrics, clock=policy.clock)
        self.health = Health(url, policy, metrics, has_answered=has_answered)
        self._hedging = Hedging(policy)
        self._workers = Workers(_THREADS_PER_CONNECTION * connections)

    def close(self) -> None:
        self._workers.close()

    def run(
        self,
        operation: Operation,
        where: str,
        request: Callable[[], T],
        *,
        urgent: bool,
        seconds: float | None = None,
    ) -> T:
        """Return the request's answer, after as many attempts as it takes.

        `seconds` is the time limit of the operation, and of each attempt, if it takes long by itself.
        """
        retries = Retries(self.health, operation, where, seconds=seconds)
        ticket = self.gate.ticket(urgent=urgent)
        patience = self.policy.answer_seconds if seconds is None else seconds
        try:
            return self._retry(retries, ticket, lambda: self._attempt(operation, request, retries, patience))
        finally:
            ticket.leave()

    def open(
        self,
        operation: Operation,
        request: Callable[[], Body],
        retries: Retries,
        ticket: Ticket,
        arrived: str = "",
    ) -> Body:
        """Open a body, which keeps its place at the gate with `ticket`; hedged."""
        patience = self.policy.answer_seconds

        def attempt() -> Body:
            hedge = self.gate.ticket(urgent=ticket.urgent)
            return self._attempt(operation, request, retries, patience, discard=_close, hedge=hedge)

        return self._retry(retries, ticket, attempt, arrived)

    def failed(self, error: StoreError) -> None:
        """Count a failure, and send fewer requests if the store asks for that."""
        self.metrics.error(error)
        self.health.failed(error)
        if isinstance(error, ThrottledError):
            self.gate.throttled()

    def _retry(self, retries: Retries, ticket: Ticket, attempt: Callable[[], T], arrived: str = "") -> T:
        """Repeat `attempt`, and stay inside the gate after a success."""
        while True:
            try:
                ticket.enter(retries.where, retries.left_seconds)
                return attempt()
            except TransientError as error:
                failure = error
            except BaseException:
                ticket.leave()
                raise
            ticket.leave()
            retries.wait(failure, arrived)

    def _attempt(
        self,
        operation: Operation,
        request: Callable[[], T],
        retries: Retries,
        patience: float,
        *,
        discard: Callable[[T], None] = lambda answer: None,
        hedge: Ticket | None = None,
    ) -> T:
        """Send the request; with a `hedge`, perhaps a second one while the first is slow."""
        race = Race(self._workers, discard)
        seconds = max(0.0, min(retries.left_seconds, patience))
        delay = None if hedge is None else self._hedging.delay()
        try:
            self._start(race, operation, request)
            if hedge is None or delay is None or delay >= seconds:
                answer = race.answer(seconds)
            else:
                answer = race.answer(delay)
                if answer is None and hedge.try_enter() and self._hedging.take():
                    self.metrics.count("hedges")
                    self._start(race, operation, request)
                answer = answer or race.answer(seconds - delay)
        finally:
            race.settle()
            if hedge is not None:
                hedge.leave()
        if answer is None:
            error = TransientError(retries.where, f"no answer within {seconds:.1f} s")
            self.failed(error)
            raise error
        if answer[0]:
            self.metrics.count("hedges_won")
        return answer[1]

    def _start(self, race: Race[T], operation: Operation, request: Callable[[], T]) -> None:
        is_read = operation in ("get", "open")
        clock = self.policy.clock

        def timed() -> T:
            began = clock()
            try:
                answer = request()
            except StoreError as error:
                self.failed(error)
                raise
            seconds = clock() - began
            self.gate.succeeded()
            self.health.succeeded()
            if is_read:
                self.metrics.first_byte(seconds)
                self._hedging.answered(seconds)
            return answer

        self.metrics.request(operation)
        race.start(timed)


def _close(body: Body) -> None:
    with suppress(StoreError):
        body.close()
