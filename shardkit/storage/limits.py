"""Adaptive limits on the number of requests and open bodies of a store.

The limit starts at `connections`. It is halved when the store answers 503 (once per cool-down, because
requests that were sent together fail together). After a cool-down without a 503 it grows by one for every
`limit` successes (AIMD, as in TCP). Waiting operations enter in the order of their age, urgent ones first; a
retry keeps its age. An eighth of the limit is reserved for urgent requests, so that a small read for the
current batch does not wait for the end of a long body.

All reads of a process from one bucket pass one gate, even if they belong to several datasets (`shared_gate`):
the bucket counts their requests together, and its 503 concerns all of them. Code that holds the body of one
object while waiting to write another, such as a copy, must not use shared gates.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from shardkit.storage.metrics import StoreMetrics
from shardkit.storage.threads import remake_after_fork

_URGENT_PART = 8  # 1/8 of the limit is reserved for urgent requests


class Ticket:
    """An operation's place in the queue during all its attempts; used by one thread at a time."""

    def __init__(self, metrics: StoreMetrics, *, urgent: bool, number: int) -> None:
        self.metrics, self.urgent = metrics, urgent
        self._order = (not urgent, number)
        self.admitted = threading.Event()

    def __lt__(self, other: Ticket) -> bool:
        return self._order < other._order


class Gate:
    """A semaphore with priorities and an adaptive limit, shared by all threads that use a store."""

    def __init__(
        self,
        connections: int,
        *,
        cool_down_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if connections < 1:
            raise ValueError(f"connections must be at least 1, not {connections}")
        self._connections = self.limit = connections
        self._cool_down_seconds, self._clock = cool_down_seconds, clock
        self._calm_at = -float("inf")  # end of the cool-down: the limit may be changed after this time
        self._successes = 0
        self._numbers = itertools.count()
        self.after_fork()
        remake_after_fork(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self.inside: set[Ticket] = set()  # admitted tickets; none in a forked child, which has no requests
        self.queue: list[Ticket] = []  # waiting tickets, as a heap

    def ticket(self, metrics: StoreMetrics, *, urgent: bool = False) -> Ticket:
        """Return a ticket behind all earlier ones of its priority; `metrics` counts it while admitted."""
        return Ticket(metrics, urgent=urgent, number=next(self._numbers))

    def enter(self, ticket: Ticket, seconds: float = 0.0) -> bool:
        """Admit the ticket, waiting for at most `seconds`; return whether it is admitted."""
        with self._lock:
            if ticket in self.inside:
                return True
            if self._has_room(ticket):  # urgent tickets may use the reserve and overtake others
                self._admit(ticket)
                return True
            if seconds <= 0:
                return False
            ticket.admitted.clear()
            heapq.heappush(self.queue, ticket)
        try:
            ticket.admitted.wait(min(seconds, threading.TIMEOUT_MAX))
        finally:  # leave the queue even if a signal handler raises
            with self._lock:
                if ticket in self.queue:
                    self.queue.remove(ticket)
                    heapq.heapify(self.queue)
                    self._admit_waiting()
        return ticket in self.inside

    def leave(self, ticket: Ticket) -> None:
        """Give up the place of a ticket if it is admitted, and admit waiting tickets."""
        with self._lock:
            if ticket in self.inside:
                self.inside.remove(ticket)
                ticket.metrics.in_flight(-1, self.limit)
                self._admit_waiting()

    def throttled(self) -> None:
        """Halve the limit, because the store asked for fewer requests."""
        now = self._clock()
        with self._lock:
            if now >= self._calm_at:
                self._calm_at = now + self._cool_down_seconds
                self.limit, self._successes = max(1, self.limit // 2), 0

    def succeeded(self) -> None:
        """Count a successful request; once `limit` requests have succeeded, raise the limit by one."""
        now = self._clock()
        with self._lock:
            if now < self._calm_at or self.limit == self._connections:
                return
            self._successes += 1
            if self._successes >= self.limit:
                self.limit, self._successes = self.limit + 1, 0
                self._admit_waiting()

    def _has_room(self, ticket: Ticket) -> bool:
        kept = 0 if ticket.urgent else self.limit // _URGENT_PART
        return len(self.inside) < self.limit - kept

    def _admit(self, ticket: Ticket) -> None:
        self.inside.add(ticket)
        ticket.metrics.in_flight(1, self.limit)
        ticket.admitted.set()

    def _admit_waiting(self) -> None:
        while self.queue and self._has_room(self.queue[0]):
            self._admit(heapq.heappop(self.queue))


class _SharedGates:
    """The shared gates of a process, each kept as long as a store uses it."""

    def __init__(self) -> None:
        self._gates: WeakValueDictionary[tuple[str, str, int], Gate] = WeakValueDictionary()
        self.after_fork()
        remake_after_fork(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def gate(self, url: str, connections: int) -> Gate:
        origin = urlsplit(url)
        with self._lock:
            return self._gates.setdefault((origin.scheme, origin.netloc, connections), Gate(connections))


_shared = _SharedGates()


def shared_gate(url: str, connections: int) -> Gate:
    """Return the gate of this process for all reads from the bucket or server of `url`."""
    return _shared.gate(url, connections)
