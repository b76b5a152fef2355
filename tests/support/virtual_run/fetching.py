"""A node's fetcher and cache in virtual time: the loader's own plan, a modeled network and store.

The loader's own `Planner` decides what is fetched when and what is evicted for it, and its own `Gate` how
many requests are open at a time. Modeled here are the connections of the node's ranks, the order in which
they take work, ranges of shards that are waited for, room in the cache, and a store that may answer 503.
Checking and writing of what arrives take no time.

`Link` is the network as a fluid: all transfers flow at one rate, the bandwidth divided by their number. Since
the rate is the same for all, one running total (bytes that a flow present since the start would have
received) says when each ends: a flow that joins at total V with b bytes ends at V + b. Each event costs
O(log flows).
"""

from __future__ import annotations

import heapq
import math
import random
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from shardkit.cache.belady import Fetch, Future
from shardkit.cache.download import MIN_PART_BYTES
from shardkit.cache.entry import EntryNames
from shardkit.cache.planner import LEADS_IN_CACHE, LoopPosition, Pace, Planner
from shardkit.cache.protocol import Held
from shardkit.storage.limits import Gate
from shardkit.storage.retry import RetryPolicy
from shardkit.storage.store import StorageOptions
from support.virtual_run.scenario import NodeUses, Scenario

__all__ = ["NEVER", "Fetching", "Link"]

NEVER = float("inf")
_P99 = 2.3263478740408408  # of the normal distribution


class Link:
    """Time goes forward only, by `advance`."""

    def __init__(self, total_bytes_per_second: float, flow_bytes_per_second: float) -> None:
        self._total, self._each = total_bytes_per_second, flow_bytes_per_second
        self._now = 0.0
        self._flowed = 0.0
        self.moved = 0.0
        """Bytes of all flows so far."""
        self._flows: list[tuple[float, int]] = []  # a heap of (total at its end, its number)

    def __len__(self) -> int:
        return len(self._flows)

    @property
    def rate(self) -> float:
        """Bytes a second of each flow."""
        return min(self._each, self._total / max(1, len(self._flows)))

    def advance(self, now: float) -> None:
        assert now >= self._now - 1e-9
        if self._flows:
            each = self.rate * max(0.0, now - self._now)
            self._flowed += each
            self.moved += each * len(self._flows)
        self._now = max(now, self._now)

    def add(self, number: int, count: float) -> None:
        """Begin a transfer of `count` bytes now."""
        heapq.heappush(self._flows, (self._flowed + count, number))

    def next_end(self) -> float:
        """When the next transfer ends if none joins; infinity if there is none."""
        if not self._flows:
            return NEVER
        return self._now + max(0.0, self._flows[0][0] - self._flowed) / self.rate

    def pop(self) -> int:
        """Remove the transfer that ends next, which must be now."""
        end, number = heapq.heappop(self._flows)
        self._flowed = max(self._flowed, end)
        return number


class _Job:
    """A shard that is being fetched, or is to be."""

    def __init__(self, shard: int, *, urgent: bool, victims: Callable[[], Iterable[str]]) -> None:
        self.shard, self.urgent, self.victims = shard, urgent, victims
        self.waiting: list[float] = []  # bytes of parts without a request
        self.begun = NEVER  # when a fetch ahead of its use began
        self.left = 0  # parts that have not arrived
        self.is_kept = False  # the cache has room for it


class _Contents:
    """The cache as the planner sees it."""

    is_shared = True

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: dict[str, Held] = {}
        self.used = 0

    def contents(self) -> Mapping[str, Held]:
        return self.held

    def put(self, name: str, size: int, *, filling: bool) -> None:
        if name not in self.held:
            self.used += size
        self.held[name] = Held(size, 0.0, filling)

    def remove(self, name: str) -> int:
        size = self.held.pop(name).bytes
        self.used -= size
        return size


class Fetching:
    """Shards are numbered as in the node's uses. Time goes forward by `run_until`."""

    def __init__(self, scenario: Scenario, uses: NodeUses, node: int) -> None:
        self._scenario, self._uses, self._node = scenario, uses, node
        self._sizes = scenario.shards.bytes[uses.numbers]
        self._entries = scenario.entry_bytes[uses.numbers]
        self._names = [str(number) for number in range(uses.shards)]
        self._cache = _Contents(scenario.cache_bytes)
        network = scenario.network
        share = network.store_bytes_per_second
        total = network.node_bytes_per_second
        if share is not None:
            total = min(total, share / scenario.nodes)
        self.link = Link(total, network.connection_bytes_per_second)
        self.total_rate = total
        self.now = 0.0
        self.counts: Counter[str] = Counter()
        self.requests = array("d")  # when each was made
        self.moved = array("d")  # seconds, and bytes of shards that had arrived by then, in turn
        self.bypassing: set[int] = set()  # shards for which the cache had no room
        self.prefilled = array(
            "d"
        )  # begin, end and bytes of shards that came before they were needed, in turn
        self.delivered: set[int] = set()  # shards in memory only, for a reader that waits for them
        self._connections = scenario.connections * scenario.gpus_per_node
        self._answered_at = 0.0
        most_requests = StorageOptions().connections * scenario.gpus_per_node
        self._gate = Gate(most_requests, clock=lambda: self._answered_at)
        self._policy = RetryPolicy()
        self._random = random.Random(f"{scenario.seed}:{node}")
        self._planner: Planner | None = None
        self._loop = LoopPosition(0)
        self._active: dict[int, _Job] = {}
        self._demanded: deque[_Job] = deque()
        self._starts: list[tuple[float, int]] = []  # a heap of (first byte comes, transfer)
        self._transfers: dict[int, tuple[_Job, float]] = {}
        self._next_transfer = 0
        self._fetched = np.zeros(uses.shards, dtype=np.bool_)

    @property
    def streaming(self) -> int:
        """Requests that are open."""
        return len(self._transfers)

    @property
    def used_bytes(self) -> int:
        return self._cache.used

    def cached(self) -> list[int]:
        """The shards in the cache."""
        return [int(name) for name, held in self._cache.held.items() if not held.filling]

    def has(self, shard: int) -> bool:
        held = self._cache.held.get(self._names[shard])
        return held is not None and not held.filling

    def follow(self, position: int) -> None:
        """Fetch ahead from a position on."""
        scenario = self._scenario
        samples, whole = self._uses.samples, int(scenario.entry_bytes.sum())
        lead = samples * scenario.cache_bytes // max(1, whole) // LEADS_IN_CACHE
        self._loop = LoopPosition(position)
        self._planner = Planner(
            Future(self._uses, lead=min(lead, samples // 2)),
            EntryNames.of(self._names),
            self._entries,
            samples,
            self._loop,
            pace=replace(self._scenario.pace, debt=Pace.of_rank(self._node).debt),
            clock=lambda: self.now,
        )
        self._work()

    def advance(self, position: int) -> None:
        """The reader has reached a position."""
        self._loop.read = position
        if self._planner is not None and position >= self._planner.wake_at:
            self._work()

    def consume(self, position: int) -> None:
        """The loop has been given everything before a position."""
        self._loop.given = position
        if self._planner is not None and position >= self._planner.resume_at:
            self._work()

    def demand(self, shard: int) -> None:
        """A reader waits for a shard: fetch it before all others."""
        job = self._active.get(shard) or next((j for j in self._demanded if j.shard == shard), None)
        if job is None:
            job = _Job(shard, urgent=True, victims=self._victims_now)
            self._demanded.append(job)
        job.urgent = True
        self._work()

    def next_event(self) -> float:
        """The time of the next event."""
        return min(self._starts[0][0] if self._starts else NEVER, self.link.next_end())

    def step(self) -> None:
        """Advance to the next event and handle it."""
        start, end = self._starts[0][0] if self._starts else NEVER, self.link.next_end()
        self.go_to(min(start, end))
        if start <= end:
            _, number = heapq.heappop(self._starts)
            self.link.add(number, self._transfers[number][1])
        else:
            self._end(self.link.pop())
        self._work()

    def go_to(self, now: float) -> None:
        """Advance to `now`, before which there is no event."""
        self.link.advance(now)
        self.now = max(self.now, now)
        if not self.moved or self.now > self.moved[-2]:
            self.moved.extend((self.now, self.link.moved))

    def request_seconds(self) -> float:
        """How long a request made now waits for its first byte, answers of 503 included."""
        network = self._scenario.network
        seconds, failures = 0.0, 0
        while True:
            self.requests.append(self.now + seconds)
            seconds += self._latency()
            self._answered_at = self.now + seconds
            if not network.throttled_share or self._random.random() >= network.throttled_share:
                self._gate.succeeded()
                return seconds
            failures += 1
            self.counts["throttled"] += 1
            self._gate.throttled()
            backoff = self._policy.backoff_seconds * 2.0 ** min(failures - 1, 60)
            seconds += min(self._policy.longest_backoff_seconds, backoff) * self._random.random()

    def _latency(self) -> float:
        network = self._scenario.network
        if network.latency_p99_seconds is None or not network.latency_seconds:
            return network.latency_seconds
        spread = math.log(network.latency_p99_seconds / network.latency_seconds) / _P99
        return self._random.lognormvariate(math.log(network.latency_seconds), spread)

    def _work(self) -> None:
        """Start requests while threads and the gate allow."""
        while self.streaming < min(self._connections, self._gate.limit):
            job = self._next_job()
            if job is None:
                return
            if job.left == 0 and not self._begin(job):
                continue
            self._transfer(job, job.waiting.pop())

    def _next_job(self) -> _Job | None:
        waiting = [job for job in self._active.values() if job.waiting]
        if waiting:
            return min(waiting, key=lambda job: not job.urgent)
        if self._demanded:
            job = self._demanded.popleft()
            self._active[job.shard] = job
            return job
        planner = self._planner
        while planner is not None:
            fetch = planner.take(self._active)
            if fetch is not None:
                job = _Job(fetch.shard, urgent=False, victims=partial(self._victims_for, fetch))
                if planner.is_ahead(fetch):
                    job.begun = self.now
                self._active[fetch.shard] = job
                return job
            if not planner.is_stale():
                return None
            planner.plan(self._cache, [*self._active])  # type: ignore[arg-type]
            self.bypassing &= planner.unfit
        return None

    def _begin(self, job: _Job) -> bool:
        """Make room for a shard and cut it into parts; return whether it is to be fetched."""
        if self.has(job.shard):
            del self._active[job.shard]
            return False
        job.is_kept = self._reserve(job)
        if not job.is_kept:
            if not job.urgent:
                del self._active[job.shard]
                return False
            self.counts["bypassed"] += 1
            self.bypassing.add(job.shard)
        else:
            self.bypassing.discard(job.shard)
        size = float(self._sizes[job.shard])
        # One thread already has this shard.
        idle = self._connections - self.streaming - 1
        parts = 1 + idle // (1 + len(self._demanded)) if job.urgent else 1
        parts = max(1, min(parts, int(size) // MIN_PART_BYTES))
        job.waiting, job.left = [size / parts] * parts, parts
        return True

    def _transfer(self, job: _Job, size: float) -> None:
        number, self._next_transfer = self._next_transfer, self._next_transfer + 1
        self._transfers[number] = job, size
        heapq.heappush(self._starts, (self.now + self.request_seconds(), number))

    def _end(self, number: int) -> None:
        job, _ = self._transfers.pop(number)
        job.left -= 1
        if job.left or job.waiting:
            return
        shard = job.shard
        del self._active[shard]
        size = int(self._sizes[shard])
        self.counts["fetched_bytes"] += size
        self.counts["refetched_bytes"] += size * bool(self._fetched[shard])
        self._fetched[shard] = True
        if job.begun < NEVER and not job.urgent:
            self.prefilled.extend((job.begun, self.now, float(size)))
        if job.is_kept:
            self._cache.put(self._names[shard], int(self._entries[shard]), filling=False)
        if job.urgent:
            self.delivered.add(shard)

    def _reserve(self, job: _Job) -> bool:
        cache, needed = self._cache, int(self._entries[job.shard])
        if needed > cache.capacity:
            return False
        if cache.used + needed > cache.capacity:
            for victim in job.victims():
                held = cache.held.get(victim)
                if held is not None and not held.filling:
                    self.counts["evicted_bytes"] += cache.remove(victim)
                    self.counts["evictions"] += 1
                if cache.used + needed <= cache.capacity:
                    break
        if cache.used + needed > cache.capacity:
            return False
        cache.put(self._names[job.shard], needed, filling=True)
        return True

    def _victims_for(self, fetch: Fetch) -> Iterable[str]:
        # The plan's own victims come first, and are nearly always enough.
        yield from (self._names[shard] for shard in fetch.evict)
        assert self._planner is not None
        yield from self._planner.victims_for(fetch, self._cache.held)

    def _victims_now(self) -> Iterable[str]:
        held = self._cache.held
        return list(held) if self._planner is None else self._planner.victims_now(held)
