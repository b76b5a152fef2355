"""How many requests and open bodies a store has at a time: fewer if it asks for that, more if it copes.

The limit starts at `connections`. It is halved when the store answers 503 (once per cool-down, because all
requests that were sent together fail together); after a cool-down without a 503 it grows by one for as many
successes as it has room for (AIMD, as in TCP). Waiting operations enter in the order of their age, urgent
ones first; a retry keeps its age. An eighth of the limit is kept for urgent requests, so that a small read
for the current batch does not wait for the end of a long body.

Threads that wait for a store, so that its callers need not wait for ever.

A call into a store cannot be interrupted; what can be done is to have another thread make it and to stop
waiting. Threads are reused, end after a few seconds without work or at `close`, and are daemons: one that
hangs in a call holds up neither the process's end nor anything else.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable

from shardkit.storage.forks import remake_after_fork
from shardkit.storage.metrics import StoreMetrics
from shardkit.storage.store import TransientError

__all__ = ["Gate", "Ticket", "Workers"]

_URGENT_PART = 8  # the reciprocal of the share that is for urgent requests only


class Gate:
    """A semaphore with priorities and an adaptive limit, for all threads of a process that use a store."""

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
        self._connections = self.limit = connections
        self._metrics = metrics
        self._cool_down_seconds, self._clock = cool_down_seconds, clock
        self._calm_at = -float("inf")  # the limit may be halved from this time on
        self._successes = 0
        self._numbers = itertools.count()
        self.after_fork()
        metrics.concurrency_limit(connections)
        remake_after_fork(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self.inside: set[Ticket] = set()  # a child holds none of its parent's places
        self._queue: list[Ticket] = []  # a heap

    @property
    def in_use(self) -> int:
        return len(self.inside)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def ticket(self, *, urgent: bool = False) -> Ticket:
        """Return the place of a new operation, behind all of its priority."""
        return Ticket(self, (not urgent, next(self._numbers)))

    def throttled(self) -> None:
        """Halve the limit: the store asked for fewer requests."""
        now = self._clock()
        with self._lock:
            if now >= self._calm_at:
                self._calm_at = now + self._cool_down_seconds
                self._set_limit(max(1, self.limit // 2))

    def succeeded(self) -> None:
        """Count an answer of the store towards a higher limit."""
        now = self._clock()
        with self._lock:
            if now < self._calm_at or self.limit == self._connections:
                return
            self._successes += 1
            if self._successes >= self.limit:
                self._set_limit(self.limit + 1)
                self._admit_waiting()

    def enter(self, ticket: Ticket, seconds: float) -> bool:
        """Let the ticket in, waiting for at most `seconds`; return whether it is in."""
        with self._lock:
            if ticket in self.inside:
                return True
            if self._has_room(ticket):  # room that is kept for urgent ones, if others wait
                self._admit(ticket)
                return True
            if seconds <= 0:
                return False
            ticket.admitted.clear()
            heapq.heappush(self._queue, ticket)
        try:
            ticket.admitted.wait(min(seconds, threading.TIMEOUT_MAX))
        finally:  # also if a signal handler raises
            with self._lock:
                if ticket in self._queue:
                    self._queue.remove(ticket)
                    heapq.heapify(self._queue)
                    self._admit_waiting()
        return ticket in self.inside

    def leave(self, ticket: Ticket) -> None:
        with self._lock:
            if ticket in self.inside:
                self.inside.remove(ticket)
                self._metrics.in_flight(-1)
                self._admit_waiting()

    def _set_limit(self, limit: int) -> None:
        self.limit, self._successes = limit, 0
        self._metrics.concurrency_limit(limit)

    def _has_room(self, ticket: Ticket) -> bool:
        kept = 0 if ticket.urgent else self.limit // _URGENT_PART
        return len(self.inside) < self.limit - kept

    def _admit(self, ticket: Ticket) -> None:
        self.inside.add(ticket)
        self._metrics.in_flight(1)
        ticket.admitted.set()

    def _admit_waiting(self) -> None:
        while self._queue and self._has_room(self._queue[0]):
            self._admit(heapq.heappop(self._queue))


class Ticket:
    """An operation's place in the queue, for all its attempts; used by one thread at a time."""

    def __init__(self, gate: Gate, order: tuple[bool, int]) -> None:
        self._gate, self._order = gate, order
        self.urgent = not order[0]
        self.admitted = threading.Event()

    def __lt__(self, other: Ticket) -> bool:
        return self._order < other._order

    @property
    def inside(self) -> bool:
        return self in self._gate.inside

    def try_enter(self) -> bool:
        """Enter if that takes no waiting; return whether it is in."""
        return self._gate.enter(self, 0.0)

    def enter(self, where: str, seconds: float) -> None:
        """Wait for a free place; TransientError after `seconds`."""
        gate = self._gate
        if not gate.enter(self, seconds):
            problem = (
                f"waited {max(seconds, 0.0):.1f} s for one of {gate.limit} connections, "
                f"{gate.in_use} are in use: close bodies that are no longer read"
            )
            raise TransientError(where, problem)

    def leave(self) -> None:
        """Give the place back, if there is one."""
        self._gate.leave(self)


_IDLE_SECONDS = 5.0  # a thread is cheap to start (50 microseconds), and to keep


class Workers:
    """Runs tasks, at most `most` at once; others wait for a thread.

    A task reports its errors to whoever waits for it. What it raises all the same goes to
    `threading.excepthook`, as of any thread, and the thread runs the next task.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._forget()
        remake_after_fork(self)

    def after_fork(self) -> None:
        self._forget()

    def submit(self, task: Callable[[], None]) -> None:
        with self._changed:
            self._closed = False
            self._tasks.append(task)
            if len(self._tasks) > self._idle and self._threads < self._most:
                thread = threading.Thread(target=self._run, name="shardkit-store", daemon=True)
                thread.start()
                self._threads += 1
            self._changed.notify()

    def close(self) -> None:
        """Let idle threads end, and busy ones as soon as they are done."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _forget(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._tasks: deque[Callable[[], None]] = deque()
        self._threads = self._idle = 0
        self._closed = False

    def _run(self) -> None:
        while (task := self._next()) is not None:
            try:
                task()
            except BaseException as error:  # a thread that ended here would be missing for ever
                failed = (type(error), error, error.__traceback__, threading.current_thread())
                threading.excepthook(threading.ExceptHookArgs(failed))
                del failed
            del task  # or its result would live until the next one

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._tasks or self._closed, _IDLE_SECONDS)
            self._idle -= 1
            if self._tasks:
                return self._tasks.popleft()
            self._threads -= 1
            return None
