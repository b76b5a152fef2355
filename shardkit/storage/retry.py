"""How an operation on a store is carried out: a `Call` makes its attempts; `Upstream` is shared by all calls.

An attempt waits for its place at the gate (`shardkit.storage.limits`), then sends its request in a separate
thread. If the request is not answered in time, it is abandoned, because a call into a store cannot be
interrupted: the operation ends by its deadline even if the store never returns. The place at the gate is free
between two attempts, and abandoned requests hold none. Up to three abandoned requests per connection can
exist; after that, attempts wait for a free thread until their deadlines.

Retries are limited by time, not by number, so an outage shorter than `RetryPolicy.deadline_seconds` only
causes a delay. For a store that has never answered, `first_contact_seconds` applies instead: its address may
be wrong, so failures are logged at once, and interactive commands give up soon. A job waits longer, because
its store may be restarting together with the job. The upper bound of the waits doubles from `backoff_seconds`
to `longest_backoff_seconds`, and each wait is random between 0 and that bound ("full jitter"), so that the
many processes of a job do not all retry at the same moment. The random number does not come from the global
random state, which belongs to the training.

A read that takes longer to start than almost all recent reads has probably met a slow server or a dead
connection, and a second request is likely to avoid both: the read is hedged. Hedges stay a small share of all
reads.
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
_LEAST_ATTEMPT_SECONDS = 0.05  # no attempt is started with less time left before the deadline
_REPORT_EVERY_SECONDS = 60.0  # shortest time between two warnings per store, however many operations fail
_THREADS_PER_CONNECTION = 4  # one for the current request and three for abandoned ones
_RECENT_READS = 256  # number of reads whose latencies are kept
_HEDGE_BURST = 32.0  # maximum number of hedges to save up, for connections that all hang at once


def _jitter() -> float:
    return _entropy.random()


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """When to retry, hedge and give up. By default, outages of up to ten minutes cause no error."""

    backoff_seconds: float = 0.1
    """Longest wait before the second attempt, in seconds."""
    longest_backoff_seconds: float = 10.0
    deadline_seconds: float = 600.0
    """Longest time without a result or new bytes, in seconds; a transfer of n bytes may take
    n / floor_bytes_per_second longer."""
    first_contact_seconds: float = 5.0
    """Time after which an operation fails if the store has never answered, but not before two attempts."""
    report_seconds: float = 5.0
    """Time for which an operation must fail before it is logged; 0 if the store has never answered."""
    answer_seconds: float = 30.0
    """Time after which an unanswered request is abandoned and repeated; the stores' own timeouts are
    shorter."""
    hedge: bool = True
    """Whether to send a second request for a read that is slow to start; the first answer is used."""
    hedge_quantile: float = 0.95
    """A read is slow to start if it takes longer than this quantile of recent reads."""
    hedge_samples: int = 20
    """Minimum number of recent reads that hedging requires."""
    hedge_delay_seconds: float = 0.05
    """Shortest time after which a read is hedged, in seconds."""
    hedge_share: float = 0.05
    """Maximum ratio of hedges to reads, so that a store that is slow for all reads gets no double load."""
    floor_bytes_per_second: float = 100_000.0
    """Minimum rate of a body, averaged over a window; a slower body is closed and opened again."""
    window_seconds: float = 10.0
    """Length of the window over which a body's rate is measured; doubled whenever the body is opened again,
    because a slow network slows all connections."""
    clock: Callable[[], float] = running_seconds
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = _jitter
    """Returns random numbers from [0, 1); `random.Random(seed).random` makes waits reproducible."""

    def __post_init__(self) -> None:
        for name in (
            "backoff_seconds", "deadline_seconds", "first_contact_seconds", "report_seconds",
            "answer_seconds", "floor_bytes_per_second", "window_seconds",
        ):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be greater than 0")
        if not self.longest_backoff_seconds >= self.backoff_seconds:
            raise ValueError("longest_backoff_seconds must be at least backoff_seconds")
        if not (self.hedge_samples >= 1 and self.hedge_delay_seconds >= 0):
            raise ValueError("hedge_samples must be at least 1, hedge_delay_seconds at least 0")
        if not (0 < self.hedge_quantile < 1 and 0 <= self.hedge_share <= 1):
            raise ValueError("hedge_quantile must be between 0 and 1, hedge_share from 0 to 1")

    @classmethod
    def of(cls, options: StorageOptions) -> RetryPolicy:
        """Return the default policy with the retry times of the user's options."""
        return cls(
            deadline_seconds=options.retry_seconds, first_contact_seconds=options.first_contact_seconds
        )

    def transfer_seconds(self, size: int) -> float:
        """Return the time limit of a transfer of `size` bytes."""
        return self.deadline_seconds + size / self.floor_bytes_per_second


class Hedging:
    """Recent latencies and the budget for hedges of a store, shared by all threads that use it."""

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
        """Return the seconds after which to hedge a read that starts now, or None for no hedge."""
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
        """Take one hedge from the budget; return False if the budget is used up."""
        with self._lock:
            if self._budget < 1:
                return False
            self._budget -= 1
            return True


class Upstream:
    """State that all operations on a store share in this process: limit, latencies, and whether it answers.

    Logs outages and their ends.
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
        """`gate` limits the requests (default: a new gate for `connections`); `workers` runs them."""
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
        """Run a request in a thread, and record its result and latency."""
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
        if self._down_since is None:  # fast path without the lock, because this runs for every request
            return
        with self._lock:
            since, self._down_since = self._down_since, None
        if since is not None:
            _logger.warning("%s: answers again after %.0f s", self._url, self.policy.clock() - since)

    def failed(self, error: StoreError) -> None:
        """Count a failure, and lower the limit if the store asks for fewer requests."""
        self.metrics.error(error)
        self.has_answered = self.has_answered or error.status is not None  # a refusal is an answer, too
        if isinstance(error, ThrottledError):
            self.gate.throttled()
            self.metrics.in_flight(0, self.gate.limit)

    def retrying(self, operation: str, error: StoreError, began: float, left_seconds: float) -> None:
        """Count a retry of an operation that has failed since `began`; log an outage if it lasts."""
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
    """One operation ("open", "put", …) on one object: its ticket at the gate, deadline and attempts."""

    def __init__(
        self,
        upstream: Upstream,
        operation: Operation,
        where: str,
        *,
        urgent: bool = False,
        seconds: float | None = None,
    ) -> None:
        """`seconds`: time limit of the operation and of each attempt; None: the limits of the policy."""
        policy = upstream.policy
        self.upstream, self.where = upstream, where
        self._operation = operation
        self._ticket = upstream.gate.ticket(upstream.metrics, urgent=urgent)
        self._attempt_seconds = policy.answer_seconds if seconds is None else seconds
        self.restart(operation, policy.clock(), policy.deadline_seconds if seconds is None else seconds)

    def restart(self, name: str, began: float, seconds: float, progress: str = "") -> None:
        """Count failures from 0; set the deadline `seconds` after `began`, and the texts that errors show."""
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
        """Make attempts until `request` succeeds, and return its answer; keep the place at the gate.

        `failure`: the error of an earlier attempt; if given, back off before the first attempt. If `discard`
        is given, slow requests are hedged, and `discard` is called with each answer that comes too late.
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
        """Give up the place at the gate, if this call has one."""
        self.upstream.gate.leave(self._ticket)

    @property
    def _left_seconds(self) -> float:
        return self._deadline - self.upstream.policy.clock()

    def _attempt(self, request: Callable[[], T], discard: Callable[[T], None] | None) -> T:
        """Send the request, and again if it is slow and may be hedged; return the first good answer."""
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
            delay += error.retry_after_seconds  # keep the jitter, because all processes get the same number
        left = self._left_seconds
        # Without enough time, another attempt would only replace this error by a less helpful timeout.
        if delay + _LEAST_ATTEMPT_SECONDS >= left:
            raise self._failed(error) from error
        elapsed = policy.clock() - self._began
        # Require two failures: a single connection timeout can take all of first_contact_seconds.
        is_late = self._failures > 1 and elapsed + delay >= policy.first_contact_seconds
        if is_late and not self.upstream.has_answered:
            advice = "; the store has not answered yet: check its URL, the endpoint and the network"
            raise self._failed(error, advice) from error
        self.upstream.retrying(self._name, error, self._began, left)
        policy.sleep(delay)

    def _failed(self, error: TransientError, advice: str = "") -> TransientError:
        """Return `error` with the number of attempts in its message; ThrottledErrors keep their class."""
        kind = ThrottledError if isinstance(error, ThrottledError) else TransientError
        count, seconds = self._failures, self.upstream.policy.clock() - self._began
        attempts = f"{count} {'attempt' if count == 1 else 'attempts'} in {seconds:.1f} s"
        progress = f", {self._progress}" if self._progress else ""
        problem = f"{self._name} failed after {attempts}{progress}: {error.problem}{advice}"
        return kind(self.where, problem, status=error.status)


def first_good(requests: Sequence[Future[T]], seconds: float) -> Future[T] | None:
    """Return the first request that succeeds, or None if none does within `seconds`.

    Raises a request's error if a retry would not help, or if all requests have failed.
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
