"""How an operation on a store is carried out: `Call` has its attempts, `Upstream` what all calls share.

An attempt waits for its place at the gate (`shardkit.storage.limits`), then sends its request in a thread of
its own. If it does not answer in time it is abandoned, because a call into a store cannot be interrupted: the
operation ends by its deadline even if the store never returns. The place is free between two attempts;
abandoned requests hold none. There can be three of them for each connection; after that, attempts wait for a
thread until their deadlines.

Retries are bounded by time, not by their number, so an outage shorter than `RetryPolicy.deadline_seconds`
costs only time. For a store that has not answered once, `first_contact_seconds` count instead: its address
may be wrong, so what fails is logged at once, and commands for people give up soon. A job waits: its store
may be restarting like the job itself. The upper bound of the waits
doubles from `backoff_seconds` to `longest_backoff_seconds`, and each wait is drawn between 0 and it ("full
jitter"), so that the many processes of a job do not all come back at once. The draw leaves the global random
state alone: it belongs to the training.

A read that takes longer to start than almost all of the latest ones has probably met a slow server or a dead
connection, which a second request probably does not: it is hedged. Hedges stay a small share of all reads.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, as_completed, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

from shardkit.errors import without_password
from shardkit.storage.limits import Gate
from shardkit.storage.metrics import StoreMetrics
from shardkit.storage.running_clock import running_seconds
from shardkit.storage.store import StorageOptions, StoreError, ThrottledError, TransientError
from shardkit.storage.threads import Submitter, Workers, remake_after_fork

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
    """An operation that has failed for this long is reported; at once if there was no answer yet."""
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
    clock: Callable[[], float] = running_seconds
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = _jitter
    """Draws from [0, 1); `random.Random(seed).random` makes waits reproducible."""

    def __post_init__(self) -> None:
        for name in (
            "backoff_seconds", "deadline_seconds", "first_contact_seconds", "report_seconds",
            "answer_seconds", "floor_bytes_per_second", "window_seconds",
        ):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0")
        if not self.longest_backoff_seconds >= self.backoff_seconds:
            raise ValueError("longest_backoff_seconds must be at least backoff_seconds")
        if not (self.hedge_samples >= 1 and self.hedge_delay_seconds >= 0):
            raise ValueError("hedge_samples must be at least 1, hedge_delay_seconds at least 0")
        if not (0 < self.hedge_quantile < 1 and 0 <= self.hedge_share <= 1):
            raise ValueError("hedge_quantile must be between 0 and 1, hedge_share from 0 to 1")

    @classmethod
    def of(cls, options: StorageOptions) -> RetryPolicy:
        """Return the policy of a user's options."""
        return cls(
            deadline_seconds=options.retry_seconds, first_contact_seconds=options.first_contact_seconds
        )

    def transfer_seconds(self, size: int) -> float:
        """Return the time limit of a transfer of `size` bytes."""
        return self.deadline_seconds + size / self.floor_bytes_per_second


class Hedging:
    """The latest latencies and the budget for hedges, shared by all threads that use a store."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._recent: deque[float] = deque(maxlen=max(_RECENT_READS, policy.hedge_samples))
        self._budget = 0.0
        self.after_fork()
        remake_after_fork(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

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


class Upstream:
    """A store as all operations of this process see it: its limit, its latencies, and whether it answers.

    Reports outages, and their end, to the log.
    """

    def __init__(
        self,
        url: str,
        policy: RetryPolicy,
        metrics: StoreMetrics,
        connections: int,
        *,
        has_answered: bool,
        gate: Gate | None = None,
        workers: Submitter | None = None,
    ) -> None:
        """`gate`: by default one of its own for so many connections; `workers` make requests: threads."""
        self.policy, self.metrics = policy, metrics
        self.gate = gate or Gate(connections, clock=policy.clock)
        metrics.in_flight(0, self.gate.limit)
        self.hedging = Hedging(policy)
        self.has_answered = has_answered
        self.workers = workers or Workers(_THREADS_PER_CONNECTION * connections)
        self._url = without_password(url)
        self._down_since: float | None = None
        self._next_report = -float("inf")
        self.after_fork()
        remake_after_fork(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def send(self, operation: Operation, request: Callable[[], T]) -> Future[T]:
        """Make a request in a thread, and learn from how it ends."""
        self.metrics.request(operation)

        def timed() -> T:
            began = self.policy.clock()
            try:
                answer = request()
            except StoreError as error:
                self.failed(error)
                raise
            seconds = self.policy.clock() - began
            self.succeeded()
            if operation in ("get", "open"):
                self.metrics.first_byte(seconds)
                self.hedging.answered(seconds)
            return answer

        return self.workers.submit(timed)

    def succeeded(self) -> None:
        self.gate.succeeded()
        self.has_answered = True
        if self._down_since is None:  # read without the lock: this runs for every request
            return
        with self._lock:
            since, self._down_since = self._down_since, None
        if since is not None:
            _logger.warning("%s: answers again after %.0f s", self._url, self.policy.clock() - since)

    def failed(self, error: StoreError) -> None:
        """Count a failure, and send fewer requests if the store asks for that."""
        self.metrics.error(error)
        self.has_answered = self.has_answered or error.status is not None  # who refuses a request is there
        if isinstance(error, ThrottledError):
            self.gate.throttled()
            self.metrics.in_flight(0, self.gate.limit)

    def retrying(self, operation: str, error: StoreError, began: float, left_seconds: float) -> None:
        """An operation that began to fail at `began` is retried."""
        self.metrics.count("retries")
        advice = ""
        now = self.policy.clock()
        with self._lock:
            is_early = self.has_answered and now - began < self.policy.report_seconds
            if is_early or now < self._next_report:
                return
            self._next_report = now + _REPORT_EVERY_SECONDS
            is_new = self._down_since is None
            self._down_since = began if self._down_since is None else self._down_since
        if is_new:
            self.metrics.count("outages")
        if not self.has_answered:
            left_seconds = min(left_seconds, self.policy.first_contact_seconds - (now - began))
            advice = "; it has not answered yet: check its URL, the endpoint and the network"
        _logger.warning(
            "%s: %s has been failing for %.0f s, retrying for up to %.0f s more: %s%s",
            self._url, operation, now - began, left_seconds, error.problem, advice,
        )  # fmt: skip


class Call:
    """One operation ("open", "put", …) on one object: its place at the gate, its deadline, its attempts."""

    def __init__(
        self,
        upstream: Upstream,
        operation: Operation,
        where: str,
        *,
        urgent: bool = False,
        seconds: float | None = None,
    ) -> None:
        """`seconds` is the time limit of the operation, and of each attempt, if it takes long by itself."""
        policy = upstream.policy
        self.upstream, self.where = upstream, where
        self._operation = operation
        self._ticket = upstream.gate.ticket(upstream.metrics, urgent=urgent)
        self._attempt_seconds = policy.answer_seconds if seconds is None else seconds
        self.restart(operation, policy.clock(), policy.deadline_seconds if seconds is None else seconds)

    def restart(self, name: str, began: float, seconds: float, progress: str = "") -> None:
        """Begin the retries anew, with `seconds` from `began` on; errors say `name` and `progress`."""
        self._name, self._began, self._progress = name, began, progress
        self._deadline = began + seconds
        self._failures = 0

    def answer(
        self,
        request: Callable[[], T],
        *,
        failure: TransientError | None = None,
        discard: Callable[[T], None] | None = None,
    ) -> T:
        """Return the request's answer, after as many attempts as it takes, and keep the place at the gate.

        `failure` is that of an attempt before. With `discard`, which gets answers that come too late, the
        request is hedged.
        """
        gate = self.upstream.gate
        while True:
            if failure is not None:
                self._back_off(failure)
            seconds = max(0.0, self._left_seconds)
            try:
                if not gate.enter(self._ticket, seconds):
                    raise TransientError(
                        self.where,
                        f"waited {seconds:.1f} s for one of {gate.limit} connections, "
                        f"{len(gate.inside)} are in use: close bodies that are no longer read",
                    )
                return self._attempt(request, discard)
            except TransientError as error:
                failure = error
                self.leave()
            except BaseException:
                self.leave()
                raise

    def leave(self) -> None:
        """Give back the place at the gate, if there is one."""
        self.upstream.gate.leave(self._ticket)

    @property
    def _left_seconds(self) -> float:
        return self._deadline - self.upstream.policy.clock()

    def _attempt(self, request: Callable[[], T], discard: Callable[[T], None] | None) -> T:
        """Send the request, and perhaps again while it is slow; the first good answer counts."""
        upstream, gate = self.upstream, self.upstream.gate
        left = limit = max(0.0, min(self._left_seconds, self._attempt_seconds, threading.TIMEOUT_MAX))
        slow_seconds = None if discard is None else upstream.hedging.delay()
        second = gate.ticket(upstream.metrics, urgent=self._ticket.urgent)
        sent = [upstream.send(self._operation, request)]
        winner: Future[T] | None = None
        try:
            if slow_seconds is not None and slow_seconds < limit:
                left -= slow_seconds
                if wait(sent, slow_seconds).not_done and gate.enter(second) and upstream.hedging.take():
                    upstream.metrics.count("hedges")
                    sent.append(upstream.send(self._operation, request))
            winner = first_good(sent, left)
        finally:
            gate.leave(second)
            for future in sent:
                if future is not winner and not future.cancel() and discard is not None:
                    future.add_done_callback(lambda late: _drop(late, discard))
        if winner is None:
            error = TransientError(self.where, f"no answer within {limit:.1f} s")
            upstream.failed(error)
            raise error
        if winner is not sent[0]:
            upstream.metrics.count("hedges_won")
        return winner.result()

    def _back_off(self, error: TransientError) -> None:
        """Sleep before the next attempt, or raise if there is no time for one."""
        policy = self.upstream.policy
        self._failures += 1
        doubled = policy.backoff_seconds * 2.0 ** min(self._failures - 1, 60)
        delay = min(policy.longest_backoff_seconds, doubled) * policy.jitter()
        if isinstance(error, ThrottledError) and error.retry_after_seconds is not None:
            delay += error.retry_after_seconds  # with the jitter, as all processes are told the same
        left = self._left_seconds
        # An attempt without time left would only replace the error by its own timeout.
        if delay + _LEAST_ATTEMPT_SECONDS >= left:
            raise self._failed(error) from error
        elapsed = policy.clock() - self._began
        # One failure is no proof: a connection that times out takes all of these seconds.
        is_late = self._failures > 1 and elapsed + delay >= policy.first_contact_seconds
        if is_late and not self.upstream.has_answered:
            advice = "; the store has not answered yet: check its URL, the endpoint and the network"
            raise self._failed(error, advice) from error
        self.upstream.retrying(self._name, error, self._began, left)
        policy.sleep(delay)

    def _failed(self, error: TransientError, advice: str = "") -> TransientError:
        """`error` with what was tried; of the same kind, so that callers can tell throttling apart."""
        kind = ThrottledError if isinstance(error, ThrottledError) else TransientError
        count, seconds = self._failures, self.upstream.policy.clock() - self._began
        attempts = f"{count} {'attempt' if count == 1 else 'attempts'} in {seconds:.1f} s"
        progress = f", {self._progress}" if self._progress else ""
        problem = f"{self._name} failed after {attempts}{progress}: {error.problem}{advice}"
        return kind(self.where, problem, status=error.status)


def first_good(requests: Sequence[Future[T]], seconds: float) -> Future[T] | None:
    """Return the first request that is answered, or None if none is in time.

    Raises a request's error if another attempt would not help, or if all requests have failed.
    """
    failure: BaseException | None = None
    try:
        for future in as_completed(requests, seconds):
            failure = future.exception()
            if failure is None:
                return future
            if not isinstance(failure, TransientError):
                break
    except TimeoutError:
        return None
    assert failure is not None
    raise failure


def _drop(late: Future[T], discard: Callable[[T], None]) -> None:
    if late.exception() is None:
        with suppress(StoreError):
            discard(late.result())
