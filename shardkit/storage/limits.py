"""How many requests and open bodies a store has at a time: fewer if it asks for that, more if it copes.

The limit starts at `connections`. It is halved when the store answers 503 (once per cool-down, because all
requests that were sent together fail together); after a cool-down without a 503 it grows by one for as many
successes as it has room for (AIMD, as in TCP). Waiting operations enter in the order of their age, urgent
ones first; a retry keeps its age. An eighth of the limit is kept for urgent requests, so that a small read
for the current batch does not wait for the end of a long body.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable

from shardkit.storage.forks import remake_after_fork
from shardkit.storage.metrics import StoreMetrics
from shardkit.storage.store import TransientError

__all__ = ["Gate", "Ticket"]

_URGENT_PART = 8  # the reciprocal of the share that is for urgent requests only


class Gate:
    """Hands out tickets; shared by all threads of a process that use a store."""

    def __init__(
        self,
        connections: int,
        metrics: StoreMetrics,
        *,
        cool_down_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if connections < 1:
            raise ValueError(f"connections must be at least 1, not {connections}")
        self._connections = self._limit = connections
        self._metrics = metrics
        self._cool_down_seconds = cool_down_seconds
        self._clock = clock
        self._calm_at = -float("inf")  # the limit may be halved from this time on
        self._successes = 0
        self._tickets = 0
        self._reset()
        self._generation = 0
        metrics.concurrency_limit(connections)
        remake_after_fork(self)

    @property
    def limit(self) -> int:
        return self._limit

    @property
    def in_use(self) -> int:
        return self._in_use

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def ticket(self, *, urgent: bool = False) -> Ticket:
        """Return the place of a new operation, behind all of its priority."""
        with self._lock:
            self._tickets += 1
            return Ticket(self, (not urgent, self._tickets))

    def throttled(self) -> None:
        """Halve the limit: the store asked for fewer requests."""
        now = self._clock()
        with self._lock:
            if now >= self._calm_at:
                self._calm_at = now + self._cool_down_seconds
                self._limit = max(1, self._limit // 2)
                self._successes = 0
                self._metrics.concurrency_limit(self._limit)

    def succeeded(self) -> None:
        """Count an answer of the store towards a higher limit."""
        now = self._clock()
        with self._lock:
            if now < self._calm_at:
                return
            self._successes += 1
            if self._successes >= self._limit:
                self._successes = 0
                if self._limit < self._connections:
                    self._limit += 1
                    self._metrics.concurrency_limit(self._limit)
                    self._admit()

    def after_fork(self) -> None:
        self._reset()
        self._generation += 1  # what the parent holds is the parent's

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._in_use = 0
        self._waiting: list[Ticket] = []  # a heap

    def _has_room(self, ticket: Ticket) -> bool:
        kept = 0 if ticket.urgent else self._limit // _URGENT_PART
        return self._in_use < self._limit - kept

    def _enter(self, ticket: Ticket) -> None:
        self._in_use += 1
        ticket.generation = self._generation
        ticket.inside = True
        self._metrics.in_flight(1)

    def _admit(self) -> None:
        while self._waiting and self._has_room(self._waiting[0]):
            ticket = heapq.heappop(self._waiting)
            self._enter(ticket)
            ticket.admitted.set()

    def take(self, ticket: Ticket, seconds: float) -> bool:
        """Let the ticket in, waiting for at most `seconds`; return whether it is in."""
        with self._lock:
            if self._has_room(ticket):  # room that is kept for urgent ones, if others wait
                self._enter(ticket)
                return True
            if seconds <= 0:
                return False
            ticket.admitted.clear()
            heapq.heappush(self._waiting, ticket)
        try:
            ticket.admitted.wait(min(seconds, threading.TIMEOUT_MAX))
        finally:  # also if a signal handler raises
            with self._lock:
                if not ticket.inside:
                    self._waiting.remove(ticket)
                    heapq.heapify(self._waiting)
                    self._admit()
        return ticket.inside

    def leave(self, ticket: Ticket) -> None:
        with self._lock:
            if not ticket.inside or ticket.generation != self._generation:
                return
            ticket.inside = False
            self._in_use -= 1
            self._metrics.in_flight(-1)
            self._admit()


class Ticket:
    """An operation's place in the queue, for all its attempts; used by one thread at a time."""

    def __init__(self, gate: Gate, order: tuple[bool, int]) -> None:
        self._gate = gate
        self._order = order
        self.urgent = not order[0]
        self.admitted = threading.Event()
        self.inside = False
        self.generation = 0

    def __lt__(self, other: Ticket) -> bool:
        return self._order < other._order

    def try_enter(self) -> bool:
        """Enter if that takes no waiting; return whether it is in."""
        return self.inside or self._gate.take(self, 0.0)

    def enter(self, where: str, seconds: float) -> None:
        """Wait for a free place; TransientError after `seconds`."""
        if not self.inside and not self._gate.take(self, seconds):
            gate = self._gate
            problem = (
                f"waited {max(seconds, 0.0):.1f} s for one of {gate.limit} connections, "
                f"{gate.in_use} are in use: close bodies that are no longer read"
            )
            raise TransientError(where, problem)

    def leave(self) -> None:
        """Give the place back, if there is one."""
        self._gate.leave(self)
