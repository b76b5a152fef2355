"""Plans fetch early what an all-knowing cache fetches on demand, never at the expense of another shard."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.cache.belady import Fetch, Future, min_fetched_bytes, plan_fetches
from shardkit.order import Order, OrderSpec
from shardkit.uses import shard_uses

EPOCHS = 3

ORDERS = st.builds(
    lambda counts, seed, lanes, window, shuffle: Order(counts, OrderSpec(seed, lanes, window, shuffle)),
    st.lists(st.integers(0, 8), min_size=1, max_size=12).filter(any),
    st.integers(0, 2**64 - 1),
    st.integers(1, 6),
    st.integers(1, 12),
    st.sampled_from(["window", "window", "window", "none", "global"]),
)


def shard_count(order: Order) -> int:
    return len(order._starts) - 1


def plain_intervals(
    order: Order, epochs: Collection[int], lanes: range | None = None
) -> list[tuple[int, int, int]]:
    """(begin, end, shard), as `shard_uses` states them."""
    return [
        (int(begin), int(end), int(shard))
        for uses in (shard_uses(order, epoch, lanes) for epoch in epochs)
        for shard, begin, end in zip(uses.shard, uses.begin, uses.end, strict=True)
    ]


def in_use_at(intervals: list[tuple[int, int, int]], position: int) -> set[int]:
    return {shard for begin, end, shard in intervals if begin <= position < end}


def steps_of(order: Order) -> list[set[int]]:
    """What is in use whenever a use begins, in all epochs."""
    intervals = plain_intervals(order, range(EPOCHS))
    return [in_use_at(intervals, begin) for begin in sorted({begin for begin, _, _ in intervals})]


def lru_fetched_bytes(requests: Sequence[Collection[int]], sizes: Sequence[int], capacity: int) -> int:
    last: dict[int, int] = {}
    fetched = 0
    for step, requested in enumerate(requests):
        for shard in sorted(requested):
            fetched += 0 if shard in last else sizes[shard]
            last[shard] = step
        while sum(sizes[shard] for shard in last) > capacity:
            del last[min(set(last) - set(requested), key=lambda shard: (last[shard], shard))]
    return fetched


@dataclass
class Driver:
    """A cache that does what plans say as early as they allow, while a loop goes through the epochs."""

    order: Order
    sizes: list[int]
    capacity: int
    at_once: int
    limit: int = 8
    lanes: range | None = None
    cached: dict[int, int] = field(default_factory=dict)
    fetched_bytes: int = 0
    late: int = 0  # positions at which something in use was not there

    def run(self) -> Driver:
        future = Future(self.order, self.lanes)
        intervals = plain_intervals(self.order, range(EPOCHS), self.lanes)
        for position in range(EPOCHS * self.order.samples):
            in_use = in_use_at(intervals, position)
            begun = 0
            for _ in range(4 * len(self.sizes)):
                plan = plan_fetches(
                    future, position, self.cached, np.array(self.sizes), self.capacity, self.limit
                )
                ready = [fetch for fetch in plan if fetch.fits and fetch.start <= position]
                missing = in_use - set(self.cached)
                if not ready or (begun >= self.at_once and not missing):
                    break
                for fetch in ready[: self.at_once]:
                    self.fetch(fetch, in_use)
                    begun += 1
            else:
                pytest.fail(f"fetching at position {position} does not end")
            self.late += bool(in_use - set(self.cached))
        return self

    def fetch(self, fetch: Fetch, in_use: set[int]) -> None:
        assert fetch.shard not in self.cached
        for victim in fetch.evict:
            assert victim not in in_use
            del self.cached[victim]
        self.cached[fetch.shard] = self.sizes[fetch.shard]
        assert sum(self.cached.values()) <= self.capacity
        if fetch.deadline < EPOCHS * self.order.samples:
            self.fetched_bytes += self.sizes[fetch.shard]


@given(
    order=ORDERS,
    spare=st.integers(0, 6),
    odd=st.integers(0, 9),
    at_once=st.integers(1, 4),
    limit=st.integers(1, 8),
)
@settings(max_examples=60, deadline=None)
def test_fetching_early_fetches_exactly_what_the_optimum_does_on_demand(
    order: Order, spare: int, odd: int, at_once: int, limit: int
) -> None:
    steps = steps_of(order)
    capacity = 10 * (max(map(len, steps)) + spare) + odd
    sizes = [10] * shard_count(order)
    driver = Driver(order, sizes, capacity, at_once, limit).run()
    assert driver.fetched_bytes == min_fetched_bytes(steps, sizes, capacity)
    assert driver.fetched_bytes <= lru_fetched_bytes(steps, sizes, capacity)
    assert driver.late == 0


@given(order=ORDERS, spare=st.integers(0, 40), at_once=st.integers(1, 4), data=st.data())
@settings(max_examples=60, deadline=None)
def test_shards_of_unequal_sizes_are_there_when_needed_and_fetched_little_oftener(
    order: Order, spare: int, at_once: int, data: st.DataObject
) -> None:
    count = shard_count(order)
    sizes = data.draw(st.lists(st.integers(1, 20), min_size=count, max_size=count))
    steps = steps_of(order)
    capacity = max(sum(sizes[shard] for shard in step) for step in steps) + spare
    driver = Driver(order, sizes, capacity, at_once).run()
    assert driver.late == 0
    # The same rule on demand, which is no optimum here: seldom above 1.2 times, sometimes below.
    assert driver.fetched_bytes <= 2 * min_fetched_bytes(steps, sizes, capacity)
