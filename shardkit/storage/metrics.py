"""Counts of requests to a store and of their results, over all threads of a process.

Counting takes one lock and about a microsecond. Times to the first byte are counted in fixed buckets, each
1.2 times as wide as the one before. So a quantile from 0.1 ms to 1,000 s is off by at most 9.6 %, in constant
memory; times outside this range are reported as its nearest end. Snapshots are plain data; the difference of
two snapshots counts the interval between them. A pickled copy of the counts starts from zero; a copy in a
forked process keeps them, with no requests in flight.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from shardkit.storage.store import StoreError, ThrottledError
from shardkit.storage.threads import remake_after_fork

Event = Literal[
    "bytes_read", "bytes_written", "retries", "outages", "hedges", "hedges_won",
    "resumed_bodies", "slow_bodies",
]  # fmt: skip
_RATIO = 1.2  # upper edge / lower edge of a bucket, whose geometric mean is off by at most sqrt(1.2)
_FIRST_EDGE_SECONDS = 1e-4
_LAST_EDGE_SECONDS = 1e3
_BUCKETS = 2 + math.ceil(math.log(_LAST_EDGE_SECONDS / _FIRST_EDGE_SECONDS, _RATIO))
_PER_LOG = 1 / math.log(_RATIO)


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsSnapshot:
    """All counts at one moment, or the counts of an interval (`minus`)."""

    requests: Mapping[str, int] = field(default_factory=dict)
    """Number of requests that were sent to the store, per operation; includes retries and hedges."""
    errors: Mapping[str, int] = field(default_factory=dict)
    """Number of failed requests and bodies, per class name of the error."""
    bytes_read: int = 0
    bytes_written: int = 0
    retries: int = 0
    outages: int = 0
    """Number of times that requests failed for longer than `RetryPolicy.report_seconds`."""
    throttled: int = 0
    hedges: int = 0
    hedges_won: int = 0
    resumed_bodies: int = 0
    slow_bodies: int = 0
    in_flight: int = 0
    """Current number of requests and open bodies."""
    concurrency_limit: int = 0
    """Current limit on the number of requests and open bodies."""
    last_status: int | None = None
    """HTTP status of the latest error that had one."""
    first_byte_buckets: tuple[int, ...] = (0,) * _BUCKETS

    def first_byte_seconds(self, quantile: float) -> float | None:
        """Return a quantile of the times to the first byte (+-9.6 %); None if there were no requests."""
        wanted = max(1, math.ceil(quantile * sum(self.first_byte_buckets)))
        seen = 0
        for index, count in enumerate(self.first_byte_buckets):
            seen += count
            if seen >= wanted:
                return float(_FIRST_EDGE_SECONDS * _RATIO ** (index - 0.5))
        return None

    def minus(self, earlier: MetricsSnapshot) -> MetricsSnapshot:
        """Return the counts since `earlier`; gauges and the last status keep their current values."""
        counts: dict[str, Any] = {
            name: getattr(self, name) - getattr(earlier, name) for name in (*get_args(Event), "throttled")
        }
        return replace(
            self,
            requests=_difference(self.requests, earlier.requests),
            errors=_difference(self.errors, earlier.errors),
            first_byte_buckets=tuple(
                now - then
                for now, then in zip(self.first_byte_buckets, earlier.first_byte_buckets, strict=True)
            ),
            **counts,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return data for JSON, with two quantiles (p50, p99) instead of the buckets."""
        plain = asdict(self)
        del plain["first_byte_buckets"]
        plain["first_byte_p50_seconds"] = self.first_byte_seconds(0.5)
        plain["first_byte_p99_seconds"] = self.first_byte_seconds(0.99)
        return plain


class StoreMetrics:
    """The counts of one or several stores; `concurrency_limit` is the limit that one of them set last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._events: Counter[str] = Counter()
        self._in_flight = self._limit = self._throttled = 0
        self._last_status: int | None = None
        self._buckets = [0] * _BUCKETS
        remake_after_fork(self)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), ())

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._in_flight = 0

    def request(self, operation: str) -> None:
        """Count a request that is sent."""
        with self._lock:
            self._requests[operation] += 1

    def first_byte(self, seconds: float) -> None:
        """Record the seconds from the sending of a request to the first byte of its answer."""
        with self._lock:
            self._buckets[_bucket(seconds)] += 1

    def error(self, error: StoreError) -> None:
        """Count a request or a body that failed."""
        with self._lock:
            self._errors[type(error).__name__] += 1
            self._throttled += isinstance(error, ThrottledError)
            if error.status is not None:
                self._last_status = error.status

    def count(self, event: Event, amount: int = 1) -> None:
        with self._lock:
            self._events[event] += amount

    def in_flight(self, change: int, limit: int) -> None:
        """Add `change` to the requests in flight, and record the current concurrency limit."""
        with self._lock:
            self._in_flight += change
            self._limit = limit

    def snapshot(self) -> MetricsSnapshot:
        with self._lock:
            return MetricsSnapshot(
                requests=dict(self._requests),
                errors=dict(self._errors),
                throttled=self._throttled,
                in_flight=self._in_flight,
                concurrency_limit=self._limit,
                last_status=self._last_status,
                first_byte_buckets=tuple(self._buckets),
                **self._events,
            )


def _bucket(seconds: float) -> int:
    """Return the index of a time's bucket: 0 below the first edge, `_BUCKETS` - 1 from the last edge on."""
    if seconds < _FIRST_EDGE_SECONDS:
        return 0
    return min(_BUCKETS - 1, 1 + int(math.log(seconds / _FIRST_EDGE_SECONDS) * _PER_LOG))


def _difference(now: Mapping[str, int], then: Mapping[str, int]) -> dict[str, int]:
    return {name: count - then.get(name, 0) for name, count in now.items() if count != then.get(name, 0)}
