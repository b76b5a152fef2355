"""Plans as a fetcher takes them: soonest first, never too early, never in circles, never what is in use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.cache.belady import Fetch, Future
from shardkit.cache.entry import EntryNames
from shardkit.cache.memory import CacheMemory
from shardkit.cache.planner import IDLE_SECONDS, REST_SECONDS, LoopPosition, Pace, Planner
from shardkit.cache.protocol import Contents, Held
from shardkit.order.order import Order, OrderSpec
from shardkit.order.residency import shard_uses
from support.cache_entries import room

SIZE = 100
SAMPLES = 10  # of a shard


class Clock:
    """Seconds pass when a test says so."""

    now = 50.0

    def __call__(self) -> float:
        return self.now


class Shelf(CacheMemory):
    """A cache whose contents a test states."""

    def __init__(self, capacity: int, **held: Held) -> None:
        super().__init__(capacity)
        self.held = dict(held)
        self.fails = False

    def contents(self) -> Contents:
        if self.fails:
            raise OSError("the disk is gone")
        return self.held or super().contents()


def make_order(shards: int, spec: OrderSpec | None = None) -> Order:
    return Order(np.full(shards, SAMPLES), spec or OrderSpec(1, 1, 0, "none"))


def make_planner(shards: int = 6, position: int = 0, clock: Clock | None = None) -> Planner:
    """Of shards that are read one after the other: shard n at positions from 10 n to 10 n + 9."""
    return planner_of(make_order(shards), position, clock)


def planner_of(order: Order, position: int = 0, clock: Clock | None = None) -> Planner:
    count = order.samples // SAMPLES
    sizes = np.full(count, SIZE, dtype=np.int64)
    names = [name_of(number) for number in range(count)]
    return Planner(
        Future(order),
        EntryNames.of(names),
        sizes,
        order.samples,
        LoopPosition(position),
        clock=clock or Clock(),
    )


def name_of(number: int) -> str:
    return f"entry{number}"


def number_of(name: str) -> int:
    return int(name.removeprefix("entry"))


def fill(cache: CacheMemory, *numbers: int) -> None:
    for number in numbers:
        room(cache, name_of(number), SIZE).commit()


def advance(planner: Planner, position: int) -> bool:
    """Move a loop that has read everything before `position`; whether there may be something to do."""
    planner.loop.read = position
    return position >= planner.wake_at


def give(planner: Planner, position: int) -> bool:
    """Give a loop everything before `position`; whether there may be something to do."""
    planner.loop.given = position
    return position >= planner.resume_at


def take_all(planner: Planner) -> list[int]:
    taken = []
    while (fetch := planner.take(())) is not None:
        taken.append(fetch.shard)
    return taken


def settle(planner: Planner, cache: CacheMemory, arrives: Callable[[Fetch], bool]) -> tuple[int, list[int]]:
    """What a fetcher does while the loop stands still: (plans made, shards tried) until it rests."""
    plans, tried = 0, []
    for _ in range(1000):
        fetch = planner.take(())
        if fetch is not None:
            tried.append(fetch.shard)
            if arrives(fetch):
                slot = cache.reserve(name_of(fetch.shard), SIZE, partial(planner.victims_for, fetch))
                if slot is not None:
                    slot.commit()
        elif planner.is_stale():
            plans += 1
            planner.plan(cache, ())
        else:
            return plans, tried
    raise AssertionError(f"it goes in circles: {plans} plans, {len(tried)} fetches")


def test_what_is_needed_first_is_fetched_first_and_nothing_before_its_room_is_free() -> None:
    planner, cache = make_planner(), CacheMemory(2 * SIZE)
    fetched = []
    for position in range(60):
        advance(planner, position)
        _, tried = settle(planner, cache, lambda fetch: True)
        fetched += [(position, shard) for shard in tried]
    # 1 makes room for 2, not 0, which the next epoch needs sooner.
    assert fetched == [(0, 0), (0, 1), (20, 2), (30, 3), (40, 4), (50, 5)]


def test_a_shard_that_is_being_fetched_is_not_taken_again() -> None:
    planner = make_planner()
    planner.plan(CacheMemory(10 * SIZE), [0])
    assert planner.take({1, 2}) == Fetch(3, 30, 0, (), True)
    planner.plan(CacheMemory(10 * SIZE), [0, 3])
    assert take_all(planner) == [1, 2, 4, 5]


@pytest.mark.parametrize("capacity", [0, SIZE // 2, SIZE, 3 * SIZE, 100 * SIZE])
@pytest.mark.parametrize("arrives", [True, False])
def test_a_loop_that_stands_still_is_planned_for_a_few_times_only(capacity: int, arrives: bool) -> None:
    planner, cache = make_planner(), CacheMemory(capacity)
    plans, tried = settle(planner, cache, lambda fetch: arrives)
    assert plans <= 2
    assert len(tried) == len(set(tried)) == min(capacity // SIZE, 6)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data(), capacity=st.integers(0, 9), shuffle=st.sampled_from(["none", "window", "global"]))
def test_whatever_arrives_and_whatever_does_not_no_shard_is_tried_twice_in_a_row(
    data: st.DataObject, capacity: int, shuffle: str
) -> None:
    spec = OrderSpec(3, 2, 7, shuffle)  # type: ignore[arg-type]
    planner, cache = planner_of(make_order(8, spec)), CacheMemory(capacity * SIZE)
    lucky = data.draw(st.lists(st.booleans(), min_size=8, max_size=8))
    for position in range(0, 160, data.draw(st.integers(4, 40))):
        advance(planner, position)
        plans, tried = settle(planner, cache, lambda fetch: lucky[fetch.shard])
        assert plans <= 9
        unlucky = [shard for shard in tried if not lucky[shard]]
        assert len(unlucky) == len(set(unlucky))


def test_a_fetch_that_came_to_nothing_is_tried_again_after_a_rest() -> None:
    clock = Clock()
    planner, cache = make_planner(clock=clock), CacheMemory(6 * SIZE)
    assert settle(planner, cache, lambda fetch: fetch.shard != 2)[1] == [0, 1, 2, 3, 4, 5]
    advance(planner, 5)
    assert settle(planner, cache, lambda fetch: True)[1] == []
    clock.now += REST_SECONDS + 0.1
    advance(planner, 10)
    assert settle(planner, cache, lambda fetch: True)[1] == [2]


def test_a_fetch_that_goes_on_for_long_and_then_fails_has_its_rest_too() -> None:
    planner, cache = make_planner(), CacheMemory(6 * SIZE)
    fill(cache, 0, 1, 2, 3, 4)
    planner.plan(cache, ())
    assert take_all(planner) == [5]
    planner.plan(cache, [5])
    assert take_all(planner) == []
    planner.plan(cache, ())  # it is neither on its way any more nor here
    assert take_all(planner) == []


def test_a_cache_that_cannot_be_listed_is_not_asked_again_before_the_loop_moves_on() -> None:
    planner, cache = make_planner(), Shelf(6 * SIZE)
    cache.fails = True
    with pytest.raises(OSError, match="the disk is gone"):
        planner.plan(cache, ())
    assert not planner.is_stale()
    cache.fails = False
    assert advance(planner, 1)
    assert settle(planner, cache, lambda fetch: True)[1] == [0, 1, 2, 3, 4, 5]


def test_the_fetcher_is_woken_for_the_next_fetch_and_not_at_every_step() -> None:
    planner, cache = make_planner(200), CacheMemory(2 * SIZE)
    settle(planner, cache, lambda fetch: True)
    woken = [position for position in range(1, 2000) if wake(planner, cache, position)]
    assert woken[:3] == [20, 30, 40]
    assert len(woken) <= 200
    planner, cache = make_planner(200), CacheMemory(200 * SIZE)
    for _ in range(5):  # 64 are planned at a time
        settle(planner, cache, lambda fetch: True)
    assert len([position for position in range(1, 2000) if wake(planner, cache, position)]) <= 64


def wake(planner: Planner, cache: CacheMemory, position: int) -> bool:
    if not advance(planner, position):
        return False
    settle(planner, cache, lambda fetch: True)
    return True


def test_what_others_use_takes_room_and_what_they_left_does_not() -> None:
    planner = make_planner()
    planner.plan(Shelf(4 * SIZE, theirs=Held(3 * SIZE, IDLE_SECONDS - 1)), ())
    assert take_all(planner) == [0]
    planner = make_planner()
    planner.plan(Shelf(4 * SIZE, theirs=Held(3 * SIZE, IDLE_SECONDS + 1)), ())
    assert take_all(planner) == [0, 1, 2, 3]


def test_what_others_use_may_exceed_the_capacity() -> None:
    planner = make_planner()
    planner.plan(Shelf(SIZE, theirs=Held(3 * SIZE, 0.0)), ())
    assert take_all(planner) == []
    assert planner.unfit >= {0}


def test_what_others_left_goes_first_that_of_long_ago_before_all_and_what_they_use_never() -> None:
    planner = make_planner()
    held = {
        "new": Held(SIZE, 1.0),
        "old": Held(SIZE, IDLE_SECONDS + 1),
        "older": Held(SIZE, IDLE_SECONDS + 9),
        name_of(0): Held(SIZE, 1e6),  # in use: when it was last opened says nothing about that
        name_of(4): Held(SIZE, 0.0),
    }
    assert list(planner.victims_now(held)) == ["older", "old", name_of(4)]
    fetch = Fetch(2, 20, 10, (0,), True)
    assert list(planner.victims_for(fetch, held)) == ["older", "old", name_of(0), name_of(4)]


def spans(order: Order) -> list[tuple[int, int, int]]:
    """(shard, begin, end) of all uses of two epochs."""
    return [
        (int(shard), int(begin), int(end))
        for epoch in (0, 1)
        for uses in [shard_uses(order, epoch)]
        for shard, begin, end in zip(uses.shard, uses.begin, uses.end, strict=True)
    ]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lanes=st.integers(1, 4),
    window=st.integers(1, 30),
    position=st.integers(0, 79),
    held=st.sets(st.integers(0, 7)),
    deadline=st.integers(0, 30),
)
def test_a_shard_that_is_in_use_is_never_named_as_a_victim(
    lanes: int, window: int, position: int, held: set[int], deadline: int
) -> None:
    order = make_order(8, OrderSpec(2, lanes, window, "window"))
    planner = planner_of(order, position)
    contents = {name_of(number): Held(SIZE, 0.0) for number in held}

    def next_use(number: int, after: int) -> int:
        uses = [max(begin, position) for shard, begin, end in spans(order) if shard == number and end > after]
        return min(uses, default=1 << 40)

    for victims, free_after in (
        (planner.victims_now(contents), position),
        (
            planner.victims_for(Fetch(0, position + deadline, position, (), True), contents),
            position + deadline,
        ),
    ):
        numbers = [number_of(name) for name in victims]
        assert set(numbers) == {number for number in held if next_use(number, position) > free_after}
        far = [next_use(number, position) for number in numbers]
        assert far == sorted(far, reverse=True), "what is needed last must go first"


def test_a_name_that_is_learned_later_is_an_entry_of_ones_own() -> None:
    order = make_order(4)
    sizes = np.zeros(4, dtype=np.int64)
    planner = Planner(
        Future(order), EntryNames.of([""] * 4), sizes, order.samples, LoopPosition(0), clock=Clock()
    )
    contents = {name_of(number): Held(SIZE, 0.0) for number in (1, 3)}
    assert list(planner.victims_now(contents)) == []
    for number in range(4):
        planner.set_entry(number, name_of(number), SIZE)
    assert list(planner.victims_now(contents)) == [name_of(3), name_of(1)]
    planner.plan(Shelf(3 * SIZE, **contents), ())
    assert take_all(planner) == [0]  # the other one waits for room
    assert sizes.tolist() == [0, 0, 0, 0], "the caller's array is its own"


def test_shards_for_which_there_is_no_room_are_told() -> None:
    order = make_order(4, OrderSpec(1, 4, 0, "global"))  # all are in use all the time
    planner = planner_of(order)
    planner.plan(CacheMemory(2 * SIZE), ())
    fitting = take_all(planner)
    assert len(fitting) == 2
    assert planner.unfit == {0, 1, 2, 3} - set(fitting)
    planner.plan(CacheMemory(4 * SIZE), ())
    assert planner.unfit == frozenset()


def paced(pace: Pace, clock: Clock, shards: int = 100) -> tuple[Planner, Shelf, int]:
    """A planner that has planned at position 0, an empty cache for all shards, and their size."""
    size = 64 << 20
    sizes = np.full(shards, size, dtype=np.int64)
    names = [name_of(number) for number in range(shards)]
    order = make_order(shards)
    planner = Planner(
        Future(order), EntryNames.of(names), sizes, order.samples, LoopPosition(0), pace=pace, clock=clock
    )
    return planner, Shelf(shards * size), size


def taken_until_held_back(planner: Planner, shelf: Shelf, size: int) -> int:
    """How many fetches begin now; each is in the cache at once."""
    count = 0
    while True:
        if planner.is_stale():
            planner.plan(shelf, [])
        if (fetch := planner.take([])) is None:
            return count
        shelf.held[name_of(fetch.shard)] = Held(size, 0.0, False)
        count += 1


@pytest.mark.parametrize("sharers", [1, 3])
def test_a_cache_is_filled_a_few_times_as_fast_as_the_loop_consumes(sharers: int) -> None:
    clock = Clock()
    planner, shelf, size = paced(Pace(factor=3, horizon_seconds=0, sharers=sharers, debt=0.5), clock)
    assert taken_until_held_back(planner, shelf, size) == 1, "the shard in use"
    taken = wakes = 0
    for position in range(1, 200):
        clock.now += 1
        if give(planner, position):
            wakes += 1
            taken += taken_until_held_back(planner, shelf, size)
        assert -1 <= 3 * position / SAMPLES / sharers - taken <= 1.6
    assert wakes <= taken + 1


def test_what_is_needed_within_the_horizon_is_fetched_at_once() -> None:
    clock = Clock()
    planner, shelf, size = paced(Pace(factor=0.001, horizon_seconds=60), clock)
    taken = taken_until_held_back(planner, shelf, size)
    for position in range(1, 300):
        clock.now += 0.5
        if give(planner, position):
            taken += taken_until_held_back(planner, shelf, size)
        if position > 1:
            assert (position + 120) // SAMPLES <= taken <= (position + 120) // SAMPLES + 3


def test_shards_of_a_few_megabytes_are_not_held_back() -> None:
    order = make_order(20)
    sizes, names = np.full(20, 1 << 16, dtype=np.int64), [name_of(number) for number in range(20)]
    planner = Planner(
        Future(order),
        EntryNames.of(names),
        sizes,
        order.samples,
        LoopPosition(0),
        pace=Pace.of_rank(3, sharers=8),
    )
    assert taken_until_held_back(planner, Shelf(1 << 30), 1 << 16) == 20
