"""Plans fetch early what an all-knowing cache fetches on demand, never at the expense of another shard."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reference.belady import min_fetched_bytes
from shardkit.cache.belady import NEVER, Fetch, Future, plan_fetches
from shardkit.order.order import Order, OrderSpec
from shardkit.order.residency import shard_uses
from support.orders import order_specs

EPOCHS = 3

SIZES = st.lists(st.integers(0, 8), min_size=1, max_size=12).filter(any)
ORDERS = st.builds(Order, SIZES, order_specs(st.integers(1, 6), st.integers(1, 12)))


def plain_intervals(
    order: Order, epochs: Collection[int], lanes: range | None = None, lead: int = 0
) -> list[tuple[int, int, int]]:
    """(begin, end, shard), as `shard_uses` states them, begun earlier by `lead`."""
    return [
        (max(0, int(begin) - lead), int(end), int(shard))
        for uses in (shard_uses(order, epoch, lanes) for epoch in epochs)
        for shard, begin, end in zip(uses.shard, uses.begin, uses.end, strict=True)
    ]


def in_use_at(intervals: list[tuple[int, int, int]], position: int) -> set[int]:
    return {shard for begin, end, shard in intervals if begin <= position < end}


def steps_of(order: Order, lead: int = 0, epochs: int = EPOCHS) -> list[set[int]]:
    """What is in use whenever a use begins, in these epochs."""
    intervals = plain_intervals(order, range(epochs + 1), lead=lead)
    begins = sorted({begin for begin, _, _ in intervals if begin < epochs * order.samples})
    return [in_use_at(intervals, begin) for begin in begins]


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
    lead: int = 0
    lanes: range | None = None
    cached: dict[int, int] = field(default_factory=dict)
    fetched_bytes: int = 0
    late: int = 0  # positions at which something in use was not there

    def run(self) -> Driver:
        future = Future(self.order, self.lanes, self.lead)
        intervals = plain_intervals(self.order, range(EPOCHS + 1), self.lanes, self.lead)
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
    lead=st.sampled_from([0, 0, 1, 5, 20]),
)
@settings(max_examples=60, deadline=None)
def test_fetching_early_fetches_exactly_what_the_optimum_does_on_demand(
    order: Order, spare: int, odd: int, at_once: int, limit: int, lead: int
) -> None:
    steps = steps_of(order, lead)
    capacity = 10 * (max(map(len, steps)) + spare) + odd
    sizes = [10] * order.shards
    driver = Driver(order, sizes, capacity, at_once, limit, lead).run()
    assert driver.fetched_bytes == min_fetched_bytes(steps, sizes, capacity)
    assert driver.fetched_bytes <= lru_fetched_bytes(steps, sizes, capacity)
    assert driver.late == 0


@given(order=ORDERS, spare=st.integers(0, 40), at_once=st.integers(1, 4), data=st.data())
@settings(max_examples=60, deadline=None)
def test_shards_of_unequal_sizes_are_there_when_needed_and_fetched_little_oftener(
    order: Order, spare: int, at_once: int, data: st.DataObject
) -> None:
    count = order.shards
    sizes = data.draw(st.lists(st.integers(1, 20), min_size=count, max_size=count))
    steps = steps_of(order)
    capacity = max(sum(sizes[shard] for shard in step) for step in steps) + spare
    driver = Driver(order, sizes, capacity, at_once).run()
    assert driver.late == 0
    # The same rule on demand, which is no optimum here: seldom above 1.2 times, sometimes below.
    assert driver.fetched_bytes <= 2 * min_fetched_bytes(steps, sizes, capacity)


@given(order=ORDERS, share=st.integers(1, 9), at_once=st.integers(1, 4))
# Shards overlap in the third epoch only, which the first plan does not foresee.
@example(order=Order([0, 0, 0, 1, 0, 0, 2], OrderSpec(0, 1, 2)), share=5, at_once=1)
@settings(max_examples=30, deadline=None)
def test_a_cache_below_the_working_set_does_what_it_can_and_never_hangs(
    order: Order, share: int, at_once: int
) -> None:
    sizes = [10] * order.shards
    working_set = max(map(len, steps_of(order, epochs=2)))  # of the epochs that the first plan foresees
    capacity = 10 * working_set * share // 10
    plan = plan_fetches(Future(order), 0, {}, np.array(sizes), capacity, 1000)
    assert any(not fetch.fits for fetch in plan)
    assert all(fetch.evict == () for fetch in plan if not fetch.fits)
    driver = Driver(order, sizes, capacity, at_once).run()
    assert driver.late > 0
    assert (driver.fetched_bytes > 0) == (capacity >= 10)


@given(order=ORDERS, spare=st.integers(0, 3), data=st.data())
@settings(max_examples=30, deadline=None)
def test_some_lanes_find_their_shards_in_time_too(order: Order, spare: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, order.spec.lanes - 1))
    lanes = range(start, data.draw(st.integers(start + 1, order.spec.lanes)))
    intervals = plain_intervals(order, range(EPOCHS + 1), lanes)
    most = max((len(in_use_at(intervals, begin)) for begin, _, _ in intervals), default=0)
    sizes = [10] * order.shards
    driver = Driver(order, sizes, 10 * (most + spare), 2, lanes=lanes).run()
    assert driver.late == 0


@given(
    order=ORDERS, share=st.floats(0, 1), part=st.floats(0, 1.5), capacity=st.integers(0, 200), data=st.data()
)
@settings(max_examples=150, deadline=None)
def test_a_plan_evicts_only_what_nobody_needs_from_the_start_to_the_deadline(
    order: Order, share: float, part: float, capacity: int, data: st.DataObject
) -> None:
    count = order.shards
    sizes = data.draw(st.lists(st.integers(1, 20), min_size=count, max_size=count))
    position = int(part * order.samples)
    in_cache = data.draw(st.permutations(range(count)))[: int(share * count)]
    cached = {shard: sizes[shard] for shard in in_cache}
    plan = plan_fetches(Future(order), position, cached, np.array(sizes), capacity, 6)
    reordered = dict(sorted(cached.items()))
    assert plan == plan_fetches(Future(order), position, reordered, np.array(sizes), capacity, 6)
    epoch = position // order.samples
    uses = [use for use in plain_intervals(order, range(epoch, epoch + 2)) if use[1] > position]
    assert [fetch.deadline for fetch in plan] == sorted(fetch.deadline for fetch in plan)
    held = dict(cached)
    for fetch in plan:
        assert position <= fetch.start <= fetch.deadline
        assert any(
            max(begin, position) == fetch.deadline and shard == fetch.shard for begin, _, shard in uses
        )
        for victim in fetch.evict:
            assert not [use for use in uses if use[2] == victim and use[0] <= fetch.deadline < use[1]]
            assert not [
                use for use in uses if use[2] == victim and use[0] <= fetch.deadline and use[1] > fetch.start
            ]
            del held[victim]
        if fetch.fits:
            assert fetch.shard not in held
            held[fetch.shard] = sizes[fetch.shard]
            assert sum(held.values()) <= capacity


@given(order=ORDERS, data=st.data())
@settings(max_examples=60, deadline=None)
def test_next_use_is_known_for_this_epoch_and_the_next_at_positions_forth_and_back(
    order: Order, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, order.spec.lanes))
    lanes = data.draw(st.sampled_from([None, range(start, order.spec.lanes)]))
    future = Future(order, lanes)
    for position in data.draw(st.lists(st.integers(0, 4 * order.samples), min_size=1, max_size=6)):
        epoch = position // order.samples
        uses = [use for use in plain_intervals(order, range(epoch, epoch + 2), lanes) if use[1] > position]
        expected = [
            min((max(begin, position) for begin, _, used in uses if used == shard), default=NEVER)
            for shard in range(order.shards)
        ]
        assert future.next_use(position, np.arange(order.shards)).tolist() == expected
        upcoming = future.upcoming(position)
        assert sorted(upcoming.begin) == upcoming.begin.tolist()
        assert (upcoming.end > position).all()
        covered = {
            (int(shard), at)
            for shard, begin, end in zip(upcoming.shard, upcoming.begin, upcoming.end, strict=True)
            for at in range(max(begin, position), end)
        }
        assert covered == {
            (shard, at) for begin, end, shard in uses for at in range(max(begin, position), end)
        }


def test_a_fetch_begins_when_its_victim_has_had_its_last_use() -> None:
    order = Order([10, 10, 10], OrderSpec(1, 1, 0, "none"))
    sizes = np.array([5, 5, 5])
    # At 20, shard 0 is needed again at 30 and shard 1 at 40; shard 1 is in use until 20.
    assert plan_fetches(Future(order), 3, {0: 5, 1: 5}, sizes, 10, 1) == [Fetch(2, 20, 20, (1,), True)]
    # Needed 5 earlier, shard 2 finds shard 1 in use; shard 0 has been free since 10.
    early = Future(order, lead=5)
    assert plan_fetches(early, 3, {0: 5, 1: 5}, sizes, 10, 1) == [Fetch(2, 15, 10, (0,), True)]
    assert plan_fetches(early, 12, {0: 5, 1: 5}, sizes, 10, 1) == [Fetch(2, 15, 12, (0,), True)]
    assert plan_fetches(Future(order), 3, {0: 5, 1: 5}, sizes, 15, 1) == [Fetch(2, 20, 3, (), True)]
    assert plan_fetches(Future(order), 3, {0: 5}, sizes, 4, 1) == [Fetch(1, 10, 3, (), False)]
    assert plan_fetches(Future(order), 3, {}, sizes, 10, 0) == []


def test_all_that_is_in_use_and_does_not_fit_is_named_and_leaves_the_limit_to_what_fits() -> None:
    order = Order([1] * 40, OrderSpec(1, 1, 0, "global"))  # all shards are in use in all of an epoch
    sizes = np.arange(40, dtype=np.int64) % 3 + 1
    for held in (0, 8):
        cached = {number: int(sizes[number]) for number in range(held)}
        plan = plan_fetches(Future(order), 0, cached, sizes, 20, 16)
        assert {fetch.shard for fetch in plan} == set(range(40)) - cached.keys()
        used = sum(cached.values()) + sum(int(sizes[fetch.shard]) for fetch in plan if fetch.fits)
        assert used <= 20
        assert not any(sizes[fetch.shard] <= 20 - used for fetch in plan if not fetch.fits)
        assert plan_fetches(Future(order), 0, cached, sizes, 20, 2)[-1].fits


def test_a_shard_that_a_plan_evicts_and_needs_again_is_not_fetched_while_it_is_there() -> None:
    order = Order([2, 3, 6, 6, 6, 2, 8, 5, 8, 8, 6], OrderSpec(877437199690345766, 1, 10))
    Driver(order, [2, 10, 11, 11, 10, 20, 9, 8, 9, 20, 11], 64, at_once=3).run()


def test_a_cache_above_its_capacity_evicts_the_surplus_too() -> None:
    order = Order([10] * 4, OrderSpec(1, 1, 0, "none"))
    plan = plan_fetches(Future(order), 0, {0: 5, 2: 5, 3: 5}, np.full(4, 5), 10, 1)
    assert plan == [Fetch(1, 10, 10, (0, 3), True)]


def test_a_large_victim_that_suffices_alone_spares_the_small_ones() -> None:
    order = Order([10] * 4, OrderSpec(1, 1, 0, "none"))
    sizes = np.array([9, 9, 10, 1])
    # At 10, shard 0 is needed again at 40, shard 3 at 30, shard 2 at 20: 0 alone makes room for 1.
    plan = plan_fetches(Future(order), 0, {0: 9, 2: 10, 3: 1}, sizes, 20, 1)
    assert plan == [Fetch(1, 10, 10, (0,), True)]
    # Position 25: 1 (next at 50) does not suffice for 0, which is due at 40, and 2 (60) does alone.
    plan = plan_fetches(Future(order), 35, {1: 1, 2: 10, 3: 1}, np.array([9, 1, 10, 1]), 12, 1)
    assert plan == [Fetch(0, 40, 35, (2,), True)]


def test_nothing_is_planned_without_samples() -> None:
    for counts in ([], [0, 0]):
        order = Order(counts, OrderSpec(1, 4, 5))
        assert plan_fetches(Future(order), 0, {}, np.ones(len(counts), dtype=np.int64), 10, 5) == []
        assert Future(order).next_use(0, np.arange(len(counts))).tolist() == [NEVER] * len(counts)


def test_nonsense_is_refused() -> None:
    future = Future(Order([3], OrderSpec(1, 1, 1)))
    with pytest.raises(ValueError, match="from 0"):
        future.next_use(-1, [0])
    with pytest.raises(ValueError, match="lead must not be negative"):
        Future(Order([3], OrderSpec(1, 1, 1)), lead=-1)
    with pytest.raises(ValueError, match="must not be negative"):
        plan_fetches(future, 0, {}, np.ones(1, dtype=np.int64), -1, 1)
    with pytest.raises(ValueError, match="step 1 requests more than 9 bytes"):
        min_fetched_bytes([{0}, {0, 1}], [5, 5], 9)


@given(
    requests=st.lists(st.sets(st.integers(0, 4), min_size=1, max_size=2), max_size=7),
    slots=st.integers(2, 3),
)
@settings(max_examples=60, deadline=None)
def test_the_reference_is_the_best_of_all_caches(requests: list[set[int]], slots: int) -> None:
    fewest = {frozenset[int](): 0}  # contents -> fetches until now, over all choices of what to keep
    for requested in requests:
        after: dict[frozenset[int], int] = {}
        for contents, fetches in fewest.items():
            total = fetches + len(requested - contents)
            for kept in range(slots - len(requested) + 1):
                for others in itertools.combinations(sorted(contents - requested), kept):
                    now = frozenset(requested | set(others))
                    after[now] = min(total, after.get(now, total))
        fewest = after
    assert min_fetched_bytes(requests, [7] * 5, 7 * slots + 3) == 7 * min(fewest.values())


def test_a_plan_over_many_shards_takes_milliseconds() -> None:
    order = Order(np.full(450_000, 2048), OrderSpec(1, 64, 8192))
    future, sizes = Future(order), np.full(450_000, 1 << 24)
    position = order.samples // 3
    cached = dict.fromkeys(future.upcoming(position).shard[40:8040].tolist(), 1 << 24)
    began = time.process_time()
    plan = plan_fetches(future, position, cached, sizes, len(cached) << 24, 64)
    assert time.process_time() - began < 0.2  # 6 ms on a busy machine
    assert len(plan) == 64
    assert all(fetch.fits for fetch in plan)
