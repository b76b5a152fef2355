"""The start of a job at one prefix of a store, on a virtual clock, with the real retry and gate code.

The store answers `requests_per_second` of the prefix and refuses the rest with 503 after `REFUSED_SECONDS`. A
node waits its `start_delay`; its leader gets card and index; then each of its ranks reads its first rows,
twice each, as many as `first_rows` allows; replicas on a node read theirs once between them. A rank's
requests follow one another, although in truth they are side by side: the model is slower than the loader, and
asks for as much. Each process has a gate and a retry policy of its own, as in truth; hedging is off, because
answers come in a constant time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from shardkit.loaders.placement import INDEX_REQUESTS, SINGLE_ROWS, first_rows, start_delay
from shardkit.storage.metrics import StoreMetrics
from shardkit.storage.retry import Call, RetryPolicy, Upstream
from shardkit.storage.store import StoreError, ThrottledError
from support.virtual_time import InlineWorkers, VirtualTime

__all__ = ["Start", "start_job"]

ANSWER_SECONDS, REFUSED_SECONDS = 0.05, 0.06


@dataclass
class Start:
    """What came of it."""

    first_row_seconds: list[float] = field(default_factory=list)  # of each rank that has its rows
    failures: list[str] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)  # of each node, those refused included
    answered: list[int] = field(default_factory=list)  # of each node
    busiest_second: int = 0
    rows: int = 0  # that each rank has


class Prefix:
    """Answers so many requests in each second."""

    def __init__(self, time: VirtualTime, requests_per_second: float) -> None:
        self._time, self._rate = time, requests_per_second
        self._tokens, self._at = 0.0, 0.0
        self.by_second: dict[int, int] = {}

    def get(self) -> bytes:
        now = self._time.now
        self._tokens = min(self._rate, self._tokens + (now - self._at) * self._rate)
        self._at = now
        self.by_second[int(now)] = self.by_second.get(int(now), 0) + 1
        if self._tokens < 1:
            self._time.sleep(REFUSED_SECONDS)
            raise ThrottledError("s3://bucket/prefix", "slow down", status=503)
        self._tokens -= 1
        self._time.sleep(ANSWER_SECONDS)
        return b"row"


def start_job(
    nodes: int,
    ranks: int,
    requests_per_second: float,
    *,
    job_nodes: int | None = None,
    replicas: int = 1,
    spread: bool = True,
    seed: int = 1,
) -> Start:
    """`nodes` of a job of `job_nodes`, with so many ranks each, which have a share of the prefix.

    `replicas`: ranks of a node that read the same. `spread`: as the loader does it; else every node begins at
    once and each rank for itself.
    """
    job_nodes = job_nodes or nodes
    time, found, chance = VirtualTime(), Start(), random.Random(seed)
    prefix = Prefix(time, requests_per_second)
    policy = RetryPolicy(clock=time.clock, sleep=time.sleep, jitter=chance.random, hedge=False)
    rows = min(SINGLE_ROWS, first_rows(ranks, job_nodes) * replicas) if spread else SINGLE_ROWS
    found.rows = rows
    found.requests, found.answered = [0] * nodes, [0] * nodes

    def reads(node: int, count: int) -> None:
        upstream = Upstream(
            "s3://bucket/prefix", policy, StoreMetrics(), 32, has_answered=False, workers=InlineWorkers()
        )

        def request() -> bytes:
            found.requests[node] += 1
            return prefix.get()

        for _ in range(count):
            call = Call(upstream, "get", "s3://bucket/prefix/object", urgent=True)
            try:
                call.answer(request)
                found.answered[node] += 1
            finally:
                call.leave()

    def group(node: int, count: int, size: int) -> None:
        """So many ranks that read together."""
        try:
            reads(node, count)
            found.first_row_seconds += [time.now] * size
        except StoreError as error:
            found.failures += [str(error)] * size

    def leader(node: int) -> None:
        reads(node, INDEX_REQUESTS)
        for _ in range(ranks // replicas):
            time.spawn(0.0, lambda: group(node, 2 * rows, replicas))

    for node in range(nodes):
        if spread:
            time.spawn(start_delay(f"node-{node}", job_nodes), lambda node=node: leader(node))  # type: ignore[misc]
        else:
            for _ in range(ranks):
                time.spawn(0.0, lambda node=node: group(node, INDEX_REQUESTS + 2 * rows, 1))  # type: ignore[misc]
    time.run()
    found.busiest_second = max(prefix.by_second.values())
    return found
