"""Every sample's position lies in an interval of its shard, and no interval is longer than its windows."""

from __future__ import annotations

import time
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.order.order import Order, OrderSpec, rank_slice
from shardkit.order.residency import BatchLanes, ShardUses, lanes_of_ranks, shard_uses
from support.orders import SIZES, order_specs

SPECS = order_specs()
ANY_SIZES = st.lists(st.integers(0, 25), max_size=12)

Interval = tuple[int, int, int]


def intervals_of(uses: ShardUses) -> list[Interval]:
    return list(zip(uses.begin.tolist(), uses.shard.tolist(), uses.end.tolist(), strict=True))


def window_of(order: Order, lane: int, row: int) -> int:
    """The lane's window that holds a row; of one row each with "none", one a lane with "global"."""
    spec = order.spec
    if spec.shuffle == "none":
        return row
    return 0 if spec.shuffle == "global" else (row + spec.window * lane // spec.lanes) // spec.window


def plain_uses(order: Order, epoch: int) -> dict[tuple[int, int], tuple[int, int]]:
    """(lane, shard) -> (begin, end) over the windows that hold a sample of it, position by position."""
    if not order.samples:
        return {}
    located = order.locate((epoch * order.samples, order.samples))
    positions_of: dict[tuple[int, int], list[int]] = defaultdict(list)
    windows_of: dict[tuple[int, int], set[int]] = defaultdict(set)
    for position, lane, shard in zip(
        located.position.tolist(), located.lane.tolist(), located.shard.tolist(), strict=True
    ):
        window = window_of(order, lane, position % order.samples // order.spec.lanes)
        positions_of[lane, window].append(position)
        windows_of[lane, shard].add(window)
    uses = {}
    for (lane, shard), windows in windows_of.items():
        positions = [position for window in windows for position in positions_of[lane, window]]
        uses[lane, shard] = (min(positions), max(positions) + 1)
    return uses


@given(sizes=ANY_SIZES, spec=SPECS, epoch=st.integers(0, 1000))
@settings(max_examples=150, deadline=None)
def test_an_interval_spans_exactly_the_windows_that_hold_samples_of_the_shard(
    sizes: list[int], spec: OrderSpec, epoch: int
) -> None:
    order = Order(sizes, spec)
    expected = [(begin, shard, end) for (_, shard), (begin, end) in plain_uses(order, epoch).items()]
    assert intervals_of(shard_uses(order, epoch)) == sorted(expected)


@given(sizes=SIZES, spec=SPECS, epoch=st.integers(0, 1000))
@settings(max_examples=80, deadline=None)
def test_every_sample_is_delivered_inside_an_interval_of_its_shard(
    sizes: list[int], spec: OrderSpec, epoch: int
) -> None:
    order = Order(sizes, spec)
    uses = shard_uses(order, epoch)
    located = order.locate((epoch * order.samples, order.samples))
    position, shard = located.position[:, np.newaxis], located.shard[:, np.newaxis]
    covered = (uses.shard == shard) & (uses.begin <= position) & (position < uses.end)
    assert covered.any(axis=1).all()
    assert (np.asarray(sizes)[uses.shard] > 0).all()


@given(sizes=ANY_SIZES, spec=SPECS, epoch=st.integers(0, 9), data=st.data())
@settings(max_examples=80, deadline=None)
def test_the_uses_of_some_lanes_are_those_of_the_samples_in_them(
    sizes: list[int], spec: OrderSpec, epoch: int, data: st.DataObject
) -> None:
    order = Order(sizes, spec)
    lanes = sorted(data.draw(st.sets(st.integers(0, spec.lanes - 1))))
    expected = [
        (begin, shard, end)
        for (lane, shard), (begin, end) in plain_uses(order, epoch).items()
        if lane in lanes
    ]
    assert intervals_of(shard_uses(order, epoch, lanes)) == sorted(expected)


@given(
    sizes=SIZES,
    lanes=st.integers(1, 12),
    from_each=st.integers(1, 4),
    window=st.integers(1, 30),
    world=st.integers(1, 12),
    epoch=st.integers(0, 3),
)
@settings(max_examples=120, deadline=None)
def test_a_rank_reads_only_what_its_lanes_use(
    sizes: list[int], lanes: int, from_each: int, window: int, world: int, epoch: int
) -> None:
    order = Order(sizes, OrderSpec(5, lanes, window))
    size = lanes * from_each
    if size % world:
        world = lanes
    first = epoch * order.samples + order.samples % size
    for rank in range(world):
        part = rank_slice(size, rank, world)
        drawn = BatchLanes(order.spec, size).of_part(part)
        uses = intervals_of(shard_uses(order, epoch, drawn))
        read = order.global_batches(first, size, order.samples // size, part=part)
        assert set(read.lane.ravel().tolist()) == (set(drawn) if order.samples >= size else set())
        for position, shard in zip(read.position.ravel().tolist(), read.shard.ravel().tolist(), strict=True):
            assert any(begin <= position < end for begin, used, end in uses if used == shard)


def test_uses_go_on_from_epoch_to_epoch_in_positions_that_never_reset() -> None:
    order = Order([3, 4], OrderSpec(1, 1, 0, "none"))
    assert intervals_of(shard_uses(order, 0)) == [(0, 0, 3), (3, 1, 7)]
    assert intervals_of(shard_uses(order, 5)) == [(35, 0, 38), (38, 1, 42)]
    whole = Order([3, 0, 4], OrderSpec(1, 1, 0, "global"))
    assert intervals_of(shard_uses(whole, 1)) == [(7, 0, 14), (7, 2, 14)]


def test_windows_smaller_than_shards_do_not_multiply_the_intervals() -> None:
    order = Order([1000] * 20, OrderSpec(3, lanes=8, window=2))
    assert len(shard_uses(order, 0)) <= 20 + 8


def test_lanes_of_a_part_follow_the_order_inside_a_batch() -> None:
    first = BatchLanes(OrderSpec(1, 64, 9, version=1), 512)
    assert [first.of_part(rank_slice(512, rank, 8)) for rank in (0, 7)] == [
        list(range(8)),
        list(range(56, 64)),
    ]
    assert BatchLanes(OrderSpec(1, 4, 9, version=1), 25).of_part(slice(0, 5)) == [0]
    bits = BatchLanes(OrderSpec(1, 8, 9), 24)
    assert [bits.of_part(slice(rank * 3, rank * 3 + 3)) for rank in range(8)] == [
        [0], [4], [2], [6], [1], [5], [3], [7]
    ]  # fmt: skip
    assert bits.of_part(slice(2, 4)) == [0, 4]
    assert bits.of_part(slice(None)) == list(range(8))
    assert bits.of_part(slice(6, 6)) == []
    assert lanes_of_ranks(OrderSpec(1, 8, 9), 24, [5, 0], 8) == [0, 5]


@pytest.mark.parametrize(
    ("lanes", "size", "nodes", "most"),
    [
        (2048, 4096, 2048, 1.0), (2048, 8192, 1024, 1.0), (2048, 512, 64, 1.0), (256, 16, 8, 1.0),
        (64, 12, 3, 1.2), (2048, 480, 60, 1.12), (2048, 1000, 125, 1.2), (4096, 3200, 100, 1.05),
    ],
)  # fmt: skip
def test_nodes_keep_to_their_lanes_for_any_batch_and_in_all_epochs(
    lanes: int, size: int, nodes: int, most: float
) -> None:
    """Fewer samples than lanes, more, batches that divide nothing; epochs that begin inside of batches."""
    order = Order([1013] * 307, OrderSpec(3, lanes, 50))
    parts = [rank_slice(size, node, nodes) for node in range(nodes)]
    foreseen = [set(BatchLanes(order.spec, size).of_part(part)) for part in parts[:: max(1, nodes // 4)]]
    assert sum(map(len, foreseen)) <= most * lanes * len(foreseen) / nodes + len(foreseen) * (most > 1)
    count = order.samples // size - 1
    for epoch in (0, 2):
        first = -(-epoch * order.samples // size) * size
        for part, own in zip(parts[:: max(1, nodes // 4)], foreseen, strict=True):
            read = order.global_batches(first, size, min(count, 64), part=part).lane
            assert np.isin(read, sorted(own)).mean() >= (1 if most == 1 else 0.99)


def test_nonsense_is_refused() -> None:
    order = Order([3, 4], OrderSpec(1, 4, 5))
    with pytest.raises(ValueError, match="numbered from 0"):
        shard_uses(order, -1)
    for lanes in (range(5), [2, 1], [1, 1], range(-1, 2)):
        with pytest.raises(ValueError, match="ascend"):
            shard_uses(order, 0, lanes)
    with pytest.raises(ValueError, match="at least 1"):
        BatchLanes(order.spec, 0)
    with pytest.raises(ValueError, match="a run of the batch with step 1"):
        BatchLanes(order.spec, 8).of_part(slice(0, 8, 2))


def test_many_shards_take_a_moment() -> None:
    # 0.1 to 0.25 s on a busy machine; a loop over shards in Python takes several times the bound.
    order = Order(np.full(450_000, 2048), OrderSpec(1, 64, 8192))
    began = time.process_time()
    assert len(shard_uses(order, 0)) >= 450_000
    assert time.process_time() - began < 2
