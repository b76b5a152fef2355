"""A node's loaders in virtual time: plans that grow, first rows read one by one, batches queued ahead.

All ranks of a node behave alike, so one reader stands for them: its plans are those of all ranks together,
and it waits for what any of them needs. The constants are the loader's own. Planning, opening and gathering
take no time.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

import numpy as np

from shardkit.cache.fetcher import ROW_THREADS, FetchLimits
from shardkit.cache.run import FIRST_ROWS
from shardkit.loaders import config, producer, sources
from shardkit.storage.store import StorageOptions
from support.virtual_run.fetching import NEVER, Fetching
from support.virtual_run.scenario import Demand, NodeUses, Scenario

__all__ = ["Reading"]

_State = Literal["free", "rows", "shards", "queueing"]


class Reading:
    """`batch_at` returns when a step's batch is ready; steps are asked for in order."""

    def __init__(self, scenario: Scenario, demand: Demand, uses: NodeUses, place: int, node: int) -> None:
        """`place` is the node's among those simulated."""
        self._scenario, self._demand, self._uses, self._place = scenario, demand, uses, place
        self.fetching = Fetching(scenario, uses, node)
        self.hits = self.misses = self.row_reads = self.used_rows = 0
        self._read = np.zeros(
            uses.shards, dtype=np.int64
        )  # rows of each shard, in the epoch of the last plan
        self._epoch = 0
        plan_bytes = min(sources.PLAN_BYTES, scenario.cache_bytes // sources.PLANS_IN_CACHE)
        most = min(plan_bytes // scenario.shards.sample_bytes, producer.PLAN_ROWS)
        self._most_rows = max(scenario.batch_size, most)
        delivered = scenario.batch_size * (scenario.delivered_bytes or scenario.shards.sample_bytes)
        self._batch_bytes = delivered
        self._group_steps = max(1, min(scenario.prefetch_bytes, producer.GROUP_BYTES) // delivered)
        self._keeps_open = int(scenario.entry_bytes.sum()) <= scenario.cache_bytes
        self._rows = scenario.batch_size
        self._cold_left = FetchLimits().single_rows
        self._is_following = False
        self._state: _State = "free"
        self._rows_until = 0.0
        self._pending: deque[int] = deque()
        self._open: set[int] = set()
        self._is_waiting = False  # for the first pending shard
        self._planned = self._queued = 0  # steps before these have been planned, and queued
        self._queue: deque[int] = deque()  # for each group of batches, the step after its last
        self._queued_steps = 0
        self._in_hand = 0  # the step after the last one that the loop has
        self._is_awaited = False
        self._has_thread = False
        self._gets = 0

    def batch_at(self, step: int, now: float) -> float:
        """When the batch of `step` is ready if it is asked for at `now`; `now` if it is ready already."""
        if step < self._in_hand:
            self.run_until(now)
            self.fetching.consume(step * self._scenario.global_batch)
            return now
        self.run_until(now)
        self._gets += 1
        # The loader starts its thread once it has seen twice that the loop does other work.
        busy = self._scenario.step_seconds > config.BUSY_SECONDS
        self._has_thread = busy and self._gets > producer.BUSY_TIMES and self._scenario.prefetch_batches > 0
        self._is_awaited = True
        self._proceed()
        while not self._queue:
            event = self._next_event()
            assert event < NEVER, "the reader waits for a shard that nothing fetches"
            self._happen(event)
        self._is_awaited = False
        self.fetching.consume(step * self._scenario.global_batch)
        self._in_hand = self._queue.popleft()
        self._queued_steps -= self._in_hand - step
        ready = max(now, self.fetching.now)
        self._proceed()
        return ready

    @property
    def ahead_bytes(self) -> int:
        """The bytes of cached shards, by their rows, that steps after the planned ones read in two epochs."""
        uses = self._uses
        own, following = uses.own_rows(self._epoch), uses.own_rows(self._epoch + 1)
        later = np.where(own > 0, (1 - self._read / np.maximum(own, 1)).clip(0), following > 0)
        sizes = self._scenario.shards.bytes[uses.numbers] * later
        return int(sizes[self.fetching.cached()].sum())

    def run_until(self, now: float) -> None:
        """Handle all events up to `now`."""
        while (event := self._next_event()) <= now:
            self._happen(event)
        self.fetching.go_to(now)

    def _next_event(self) -> float:
        rows = self._rows_until if self._state == "rows" else NEVER
        return min(rows, self.fetching.next_event())

    def _happen(self, event: float) -> None:
        if self._state == "rows" and self._rows_until <= event:
            self.fetching.go_to(event)
        else:
            self.fetching.step()
        self._proceed()

    def _has_room(self) -> bool:
        if not self._queue:
            return self._is_awaited or self._has_thread
        scenario = self._scenario
        return (
            self._has_thread
            and self._queued_steps < scenario.prefetch_batches
            and self._queued_steps * self._batch_bytes < scenario.prefetch_bytes
        )

    def _proceed(self) -> None:
        """Do everything that can be done now."""
        while True:
            if self._state == "rows":
                if self.fetching.now < self._rows_until:
                    return
                self._follow()
                self._state = "shards"
            if self._state == "shards":
                if not self._all_there():
                    return
                self._state = "queueing"
            if not self._has_room():
                return
            if self._state == "queueing" and self._queued < self._planned:
                end = min(self._queued + self._group_steps, self._planned)
                self._queue.append(end)
                self._queued_steps += end - self._queued
                self._queued = end
            else:
                self._plan()

    def _plan(self) -> None:
        scenario, fetching = self._scenario, self.fetching
        first, batch = self._planned, scenario.global_batch
        position = first * batch
        left = -(-(self._uses.samples - position % self._uses.samples) // batch)
        count = min(left, self._rows // scenario.batch_size, producer.PLAN_POSITIONS // batch)
        self._planned = first + max(1, count)
        if (epoch := position // self._uses.samples) != self._epoch:
            self._epoch, self._read[:] = epoch, 0
        fetching.advance(position)
        numbers, rows = self._demand.rows(self._place, first, self._planned)
        self.used_rows += int(rows.sum())
        shards = self._uses.local(numbers).tolist()
        self._read[shards] += rows
        missing = {
            shard: n for shard, n in zip(shards, rows.tolist(), strict=True) if not fetching.has(shard)
        }
        if missing:
            self._rows = max(self._rows // producer.PLAN_GROWTH, scenario.batch_size)
        else:
            self._rows = min(self._rows * producer.PLAN_GROWTH, self._most_rows)
        self._open &= set(shards) if not self._keeps_open else self._open
        singly = self._read_singly(missing)
        self._pending = deque(shard for shard in shards if shard not in singly and shard not in self._open)
        self._open |= set(shards) - singly
        for shard in self._pending:
            fetching.delivered.discard(shard)
        if not singly:
            self._follow()
        self._state = "rows" if singly else "shards"

    def _read_singly(self, missing: dict[int, int]) -> set[int]:
        """Begin to read rows by ranged requests; return the shards that they are in."""
        scenario = self._scenario
        of_rank = -(-sum(missing.values()) // scenario.gpus_per_node)
        if of_rank > self._cold_left:
            self._cold_left = 0
            wanted = {shard: n for shard, n in missing.items() if shard in self.fetching.bypassing}
        else:
            wanted = missing
            self._cold_left -= of_rank
        if not wanted:
            return set()
        of_rank = -(-sum(wanted.values()) // scenario.gpus_per_node)
        if of_rank > FIRST_ROWS:
            self._follow()
        fetching = self.fetching
        streaming = -(-fetching.streaming // scenario.gpus_per_node)
        threads = max(1, min(ROW_THREADS, StorageOptions().connections - streaming))
        count = sum(wanted.values())
        # Each row by two requests; rounds of as many as all ranks' threads, each as long as its slowest.
        waits = [fetching.request_seconds() for _ in range(2 * count)]
        together = threads * scenario.gpus_per_node
        seconds = sum(max(waits[n : n + together]) for n in range(0, len(waits), together))
        self.row_reads += count
        size = 2 * count * scenario.shards.sample_bytes
        rate = min(
            fetching.total_rate,
            scenario.network.connection_bytes_per_second * together,
        )
        self._rows_until = fetching.now + seconds + size / rate
        return set(wanted)

    def _follow(self) -> None:
        if not self._is_following:
            self._is_following = True
            self.fetching.follow(0)

    def _all_there(self) -> bool:
        fetching = self.fetching
        while self._pending:
            shard = self._pending[0]
            is_there = fetching.has(shard) or shard in fetching.delivered
            if not is_there:
                fetching.demand(shard)
                self._is_waiting = True
                return False
            self.misses += self._is_waiting
            self.hits += not self._is_waiting
            self._is_waiting = False
            fetching.delivered.discard(shard)
            self._pending.popleft()
        return True
