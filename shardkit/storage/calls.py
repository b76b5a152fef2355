"""How one operation on a store is carried out: gate, thread, hedge, deadline, and tries.

A try waits for its place at the gate, runs on a thread of its own, and is left to itself when it does not
answer in time: the operation ends by its deadline even if the store never returns. A place is given up while
an operation waits between two tries. Requests that were left to themselves hold no place; there can be three
for each connection, after which new ones wait for a thread, and so run into their own deadlines.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Literal, TypeVar

from shardkit.storage.errors import StoreError, ThrottledError, TransientError
from shardkit.storage.gate import Gate, Ticket
from shardkit.storage.hedge import Hedging, Race
from shardkit.storage.metrics import StoreMetrics
from shardkit.storage.retry import Health, Retries, RetryPolicy
from shardkit.storage.store import Body
from shardkit.storage.workers import Workers

__all__ = ["Calls", "Operation"]

Operation = Literal["head", "get", "open", "put", "list", "delete"]
_THREADS_PER_CONNECTION = 4

T = TypeVar("T")


class Calls:
    """What all operations on one store share, in one process."""

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
        """The request's answer, in as many tries as it takes.

        With `seconds` the operation, and so each try, has that much time: for what is long by itself.
        """
        tries = self.retries(operation, where, seconds=seconds)
        ticket = self.gate.ticket(urgent=urgent)
        while True:
            try:
                ticket.enter(where, tries.left_seconds)
                return self._try(operation, request, tries, patience=seconds)
            except TransientError as error:
                failure = error
            finally:
                ticket.leave()
            tries.wait(failure)

    def open(
        self,
        operation: Operation,
        request: Callable[[], Body],
        tries: Retries,
        ticket: Ticket,
        arrived: str = "",
    ) -> Body:
        """A body, whose place at the gate is kept with `ticket`; hedged."""
        while True:
            try:
                ticket.enter(tries.where, tries.left_seconds)
                return self._try(operation, request, tries, discard=_close, ticket=ticket)
            except TransientError as error:
                ticket.leave()
                failure = error
            except BaseException:
                ticket.leave()
                raise
            tries.wait(failure, arrived)

    def retries(
        self, operation: str, where: str, *, seconds: float | None = None, began: float | None = None
    ) -> Retries:
        """The attempts of an operation that begins now, or began then."""
        health = self.health
        return Retries(self.policy, self.metrics, health, operation, where, seconds=seconds, began=began)

    def failed(self, error: StoreError) -> None:
        """Count a failure, and mind what it asks for."""
        self.metrics.error(error)
        self.health.failed(error)
        if isinstance(error, ThrottledError):
            self.gate.throttled()

    def _try(
        self,
        operation: Operation,
        request: Callable[[], T],
        tries: Retries,
        *,
        patience: float | None = None,
        discard: Callable[[T], None] | None = None,
        ticket: Ticket | None = None,
    ) -> T:
        """One try; with a `ticket` (of a read) a second request may follow the first."""
        race = Race(self._workers, discard or _forget)
        second = None if ticket is None else self.gate.ticket(urgent=ticket.urgent)
        seconds = max(
            0.0, min(tries.left_seconds, self.policy.answer_seconds if patience is None else patience)
        )
        try:
            answer = None
            self._start(race, operation, request)
            delay = None if second is None else self._hedging.delay()
            if second is not None and delay is not None and delay < seconds:
                answer = race.answer(delay)
                if answer is None and second.try_enter() and self._hedging.take():
                    self.metrics.count("hedges")
                    self._start(race, operation, request)
                answer = answer or race.answer(seconds - delay)
            else:
                answer = race.answer(seconds)
        finally:
            race.settle()
            if second is not None:
                second.leave()
        if answer is None:
            error = TransientError(tries.where, f"no answer within {seconds:.1f} s")
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


def _forget(answer: object) -> None:
    """Nothing to let go of."""


def _close(body: Body) -> None:
    with suppress(StoreError):
        body.close()
