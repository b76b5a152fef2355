"""Each stream is delivered in its own order, whatever the others do, and batches never depend on ranks."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.order.exclusions import Exclusions
from shardkit.order.mixture import Mixture, Schedule
from shardkit.order.order import Order, OrderSpec, rank_slice
from shardkit.order.streams import MixedOrder, StreamOrder, stream_seed
from support.orders import FIELDS, lane_key, order_specs, same

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "mixed_order_locations.json"

SPECS = order_specs(lanes=st.sampled_from([1, 2, 3, 8, 64]), window=st.integers(1, 60))


@st.composite
def stream_orders(draw: st.DrawFn) -> StreamOrder:
    sizes = draw(st.lists(st.integers(0, 25), min_size=1, max_size=6).filter(any))
    rows = draw(st.sets(st.integers(0, sum(sizes) - 1), max_size=sum(sizes) - 1))
    return stream_order(sizes, draw(SPECS), draw(st.sampled_from([None, Exclusions.of(rows)])))


@st.composite
def mixed_orders(draw: st.DrawFn) -> MixedOrder:
    """Up to four streams, under weights that change once or never."""
    streams = draw(st.lists(stream_orders(), min_size=1, max_size=4))
    weights = st.tuples(*[st.integers(0, 9) | st.integers(0, 3000)] * len(streams)).filter(any)
    schedule = Schedule.of(draw(weights))
    if draw(st.booleans()):
        schedule = schedule.changed(draw(st.integers(1, 500)), draw(weights))
    return MixedOrder(streams, Mixture(draw(st.integers(0, 2**64 - 1)), schedule), 500)


def stream_order(sizes: list[int], spec: OrderSpec, excluded: Exclusions | None = None) -> StreamOrder:
    kept = sizes if excluded is None else excluded.kept_of_shards(sizes)
    return StreamOrder(Order(kept, spec), excluded, sizes)


# One stream


@given(stream=stream_orders(), first=st.integers(0, 50), data=st.data())
@settings(max_examples=60, deadline=None)
def test_an_epoch_holds_every_kept_row_once_and_no_other(
    stream: StreamOrder, first: int, data: st.DataObject
) -> None:
    located = stream.locate((first * stream.samples, 2 * stream.samples))
    rows = np.arange(stream.dataset_samples)
    if stream.exclusions is not None:
        rows = rows[~stream.exclusions.contains(rows)]
    for epoch in range(2):
        mine = located.take(slice(epoch * stream.samples, (epoch + 1) * stream.samples))
        np.testing.assert_array_equal(np.sort(mine.sample_id), rows)
        assert (mine.epoch == first + epoch).all()
        np.testing.assert_array_equal(stream.positions_of(mine.sample_id, first + epoch), mine.position)
    np.testing.assert_array_equal(stream.shard_starts[located.shard] + located.row, located.sample_id)
    assert (located.row < np.diff(stream.shard_starts)[located.shard]).all()
    assert (located.row >= 0).all()
    start, size = data.draw(st.integers(0, 200)), data.draw(st.sampled_from([1, 12, 24]))
    batches = stream.global_batches(start, size, 4)
    assert same(batches, stream.locate(batches.position))
    assert batches.position.tolist() == [
        stream.global_batch(start + i * size, size).tolist() for i in range(4)
    ]


def test_without_exclusions_a_stream_is_its_order() -> None:
    sizes, spec = [9, 0, 14, 3], OrderSpec(5, 4, 6)
    order, stream = Order(sizes, spec), stream_order(sizes, spec)
    assert same(stream.locate((0, 70)), order.locate((0, 70)))
    for every in (1, 3):
        one, other = (o.global_batches(7, 8, 5, part=slice(2, 6), every=every) for o in (stream, order))
        assert same(one, other)


def test_rows_that_are_left_out_have_no_position() -> None:
    stream = stream_order([5, 5], OrderSpec(1, 2, 3), Exclusions([(3, 7)]))
    assert stream.samples == 6
    assert stream.dataset_samples == 10
    with pytest.raises(IndexError, match="row 4 is excluded"):
        stream.positions_of([2, 4], 0)


def test_an_order_of_other_rows_is_refused() -> None:
    excluded = Exclusions([(3, 7)])
    for sizes in ([5, 5], [3, 2], [2, 4]):  # all rows; too few; as many, elsewhere
        with pytest.raises(ValueError, match=r"not the samples that the shards keep .6 of 10."):
            StreamOrder(Order(sizes, OrderSpec(1, 1, 1)), excluded, [5, 5])


# Many streams


@given(mixed=mixed_orders(), start=st.integers(0, 1500) | st.integers(2**40, 2**41))
@settings(max_examples=40, deadline=None)
def test_a_position_is_its_streams_next_sample(mixed: MixedOrder, start: int) -> None:
    located = mixed.locate((start, 30))
    streams, indices = mixed.mixture.locate(start, 30)
    for i, (number, index) in enumerate(zip(streams.tolist(), indices.tolist(), strict=True)):
        stream = mixed.streams[number]
        alone = stream.locate((index, 1))
        shards = sum(other.shards for other in mixed.streams[:number])
        samples = sum(other.dataset_samples for other in mixed.streams[:number])
        expected = [start + i, index // stream.samples, shards + int(alone.shard[0]), int(alone.row[0])]
        expected += [int(alone.lane[0]), samples + int(alone.sample_id[0])]
        assert [getattr(located, name)[i] for name in FIELDS] == expected


@given(mixed=mixed_orders())
@settings(max_examples=30, deadline=None)
def test_every_epoch_of_every_stream_holds_each_kept_sample_once(mixed: MixedOrder) -> None:
    located = mixed.locate((0, 700))
    for number, stream in enumerate(mixed.streams):
        first, last = mixed.first_shards[number : number + 2]
        mine = located.take(np.flatnonzero((located.shard >= first) & (located.shard < last)))
        ids = mine.sample_id - mixed.first_samples[number]
        whole = len(ids) // stream.samples
        np.testing.assert_array_equal(mine.epoch, np.arange(len(ids)) // stream.samples)
        np.testing.assert_array_equal(ids, stream.locate((0, len(ids))).sample_id)
        for epoch in range(whole):
            part = ids[epoch * stream.samples : (epoch + 1) * stream.samples]
            assert len(np.unique(part)) == stream.samples


@given(mixed=mixed_orders(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_order_and_any_shape_of_positions_gives_the_same(mixed: MixedOrder, data: st.DataObject) -> None:
    whole = mixed.locate((0, 600))
    positions = np.array(data.draw(st.lists(st.integers(0, 599), max_size=40)), dtype=np.int64)
    assert same(mixed.locate(positions), whole.take(positions))
    assert same(mixed.locate(positions.reshape(-1, 1)), whole.take(positions).reshape(-1, 1))
    for position in positions[:3].tolist():
        sample, epoch = int(whole.sample_id[position]), int(whole.epoch[position])
        assert mixed.position_of(sample, epoch) == position


def test_the_result_does_not_change_with_the_callers_array() -> None:
    mixed = mixture_of_two()
    positions = np.arange(10)
    located = mixed.locate(positions)
    positions[:] = 0
    assert located.position.tolist() == list(range(10))


@given(
    mixed=mixed_orders(),
    position=st.integers(0, 1200),
    size=st.integers(0, 70),
    count=st.integers(0, 3),
    every=st.sampled_from([1, 1, 2, 5]),
)
@settings(max_examples=40, deadline=None)
def test_a_global_batch_is_its_positions_sorted_by_lane_over_lanes(
    mixed: MixedOrder, position: int, size: int, count: int, every: int
) -> None:
    batches = mixed.global_batches(position, size, count, every=every)
    assert batches.position.shape == (count, size)
    for i in range(count):
        start = position + i * every * size
        keys = []
        for number, index in zip(*mixed.mixture.locate(start, size), strict=True):
            stream = mixed.streams[number]
            spec = stream.order.spec
            keys.append(lane_key(int(index) % stream.samples % spec.lanes, spec))
        expected = [position for _, position in sorted(zip(keys, range(start, start + size), strict=True))]
        assert batches.position[i].tolist() == expected
        assert mixed.global_batch(start, size).tolist() == expected
    assert same(batches, mixed.locate(batches.position))


@given(mixed=mixed_orders(), position=st.integers(0, 1200), size=st.sampled_from([12, 24]))
@settings(max_examples=20, deadline=None)
def test_ranks_share_a_batch_whose_set_is_the_same_for_every_world_size(
    mixed: MixedOrder, position: int, size: int
) -> None:
    whole = mixed.global_batches(position, size, 3)
    assert np.sort(whole.position, axis=None).tolist() == list(range(position, position + 3 * size))
    for world_size in (2, 3, 12):
        parts = [
            mixed.global_batches(position, size, 3, part=rank_slice(size, rank, world_size))
            for rank in range(world_size)
        ]
        assert {part.position.shape for part in parts} == {(3, size // world_size)}
        assert np.array_equal(np.concatenate([part.sample_id for part in parts], axis=1), whole.sample_id)


@pytest.mark.parametrize("weights", [(1,), (5, 0), (0, 2, 0)])
def test_a_mixture_of_one_stream_is_that_streams_order(weights: tuple[int, ...]) -> None:
    specs = [OrderSpec(stream_seed(3, number), 4, 30) for number in range(len(weights))]
    orders = [stream_order([20, 0, 31], spec, Exclusions([(5, 9)])) for spec in specs]
    mixed = MixedOrder(orders, Mixture(3, Schedule.of(weights)), 100)
    used = weights.index(max(weights))
    one, other = mixed.global_batches(10, 24, 20), orders[used].global_batches(10, 24, 20)
    assert same(one, other, ["position", "epoch", "row", "lane"])
    np.testing.assert_array_equal(one.shard, other.shard + 3 * used)
    np.testing.assert_array_equal(one.sample_id, other.sample_id + 51 * used)


def test_ranks_keep_to_their_part_of_every_streams_lanes() -> None:
    lanes = (8, 8, 16)
    orders = [stream_order([4000] * 4, OrderSpec(n, count, 50)) for n, count in enumerate(lanes)]
    mixed = MixedOrder(orders, Mixture(1, Schedule.of((2, 1, 1))), 1000)
    for rank in range(4):
        part = mixed.global_batches(0, 64, 100, part=rank_slice(64, rank, 4))
        quarter = np.array([0, 2, 1, 3])[part.lane % 4]  # the two last bits, in reverse
        assert (quarter == rank).mean() > 0.9


def test_more_batches_than_are_sorted_at_once_are_those_of_many_calls() -> None:
    orders = [stream_order([999] * 7, OrderSpec(n, 8, 100)) for n in range(3)]
    mixed = MixedOrder(orders, Mixture(1, Schedule.of((5, 3, 1)).changed(50_000, (1, 1, 1))), 1000)
    whole = mixed.global_batches(1234, 600, 120, part=slice(100, 250))
    pieces = [mixed.global_batches(1234 + i * 600, 600, 30, part=slice(100, 250)) for i in range(0, 120, 30)]
    for name in FIELDS:
        joined = np.concatenate([getattr(piece, name) for piece in pieces])
        np.testing.assert_array_equal(getattr(whole, name), joined)


def test_golden_locations_never_change() -> None:
    assert stream_seed(17, 0) == 15319750155211253131
    assert stream_seed(2**64 - 1, 41) == 14818284728268276559
    for case in json.loads(GOLDEN.read_text()):
        version = case.get("version", 1)
        orders = [
            stream_order(
                stream["shard_samples"],
                OrderSpec(
                    stream_seed(case["seed"], number),
                    stream["lanes"],
                    stream["window"],
                    version=version,
                ),
                Exclusions(stream["exclusions"]) if stream["exclusions"] else None,
            )
            for number, stream in enumerate(case["streams"])
        ]
        mixed = MixedOrder(orders, Mixture(case["seed"], Schedule.from_list(case["schedule"]), version), 1000)
        for start, expected in case["locations"]:
            located = mixed.locate((start, len(expected["shard"])))
            for name in ("epoch", "shard", "row", "lane", "sample_id"):
                assert getattr(located, name).tolist() == expected[name], (start, name)
        for start, size, positions in case["batches"]:
            assert mixed.global_batch(start, size).tolist() == positions


# Surface


def mixture_of_two(weights: tuple[int, ...] = (2, 1)) -> MixedOrder:
    orders = [stream_order([30, 20], OrderSpec(n, 4, 10)) for n in range(2)]
    return MixedOrder(orders, Mixture(9, Schedule.of(weights)), 60)


def test_an_order_in_use_can_be_sent_to_another_process() -> None:
    mixed = mixture_of_two()
    located = mixed.locate((0, 500))
    assert same(pickle.loads(pickle.dumps(mixed)).locate((0, 500)), located)


def test_streams_and_seeds_have_seeds_of_their_own() -> None:
    seeds = {stream_seed(seed, number) for seed in (0, 1, 11, 2**64 - 1) for number in (0, 1, 10, 11)}
    assert len(seeds) == 16
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_a_sample_that_is_never_delivered_has_no_position() -> None:
    mixed = mixture_of_two((1, 0))
    assert mixed.position_of(49, 3) in range(150, 200)
    assert mixed.position_of(50, 0) is None
    first = int(mixed.locate((0, 1)).sample_id[0])
    assert mixed.position_of(first, 0) == 0
    assert mixed.position_of(0, 0) in range(50)
    assert mixed.position_of(99, 0) is None
    for sample in (-1, 100):
        with pytest.raises(IndexError, match="sample ids go from 0 to 99"):
            mixed.position_of(sample, 0)


def test_a_mixture_that_cannot_be_is_refused() -> None:
    mixed = mixture_of_two()
    with pytest.raises(ValueError, match="1 streams need as many weights, not 2"):
        MixedOrder(mixed.streams[:1], mixed.mixture, 10)
    for epoch_samples in (0, 2**60 + 1):
        with pytest.raises(ValueError, match="epoch_samples must be from 1"):
            MixedOrder(mixed.streams, mixed.mixture, epoch_samples)
    for epoch_samples in (1, 2**60):
        assert MixedOrder(mixed.streams, mixed.mixture, epoch_samples).samples == epoch_samples
    nothing = stream_order([3], OrderSpec(1, 1, 1), Exclusions([(0, 3)]))
    with pytest.raises(ValueError, match="stream 1 has weight, but no samples"):
        MixedOrder([mixed.streams[0], nothing], mixed.mixture, 10)
    later = Schedule(((0, (1, 0)), (5, (1, 1))))
    with pytest.raises(ValueError, match="stream 1 has weight, but no samples"):
        MixedOrder([mixed.streams[0], nothing], Mixture(1, later), 10)
    assert MixedOrder([mixed.streams[0], nothing], Mixture(1, Schedule.of((1, 0))), 10).locate((0, 9))
    huge = [stream_order([2**59], OrderSpec(1, 1, 1)) for _ in range(3)]
    largest = MixedOrder(huge[:2], Mixture(1, Schedule.of((1, 1))), 10)
    assert largest.first_samples.tolist() == [0, 2**59, 2**60]
    with pytest.raises(ValueError, match="too many for a mixture"):
        MixedOrder(huge, Mixture(1, Schedule.of((1, 1, 1))), 10)


def test_positions_out_of_range_are_refused() -> None:
    mixed = mixture_of_two()
    with pytest.raises(ValueError, match="positions go from 0"):
        mixed.locate((-1, 3))
    with pytest.raises(ValueError, match="positions go from 0"):
        mixed.locate(np.array([3, 2**62]))
    for position, size, count in ((-1, 2, 0), (2**62 - 7, 4, 2), (0, 2**40, 2**40)):
        with pytest.raises(ValueError, match="positions go from 0"):
            mixed.global_batches(position, size, count)
    for size, count in ((-1, 1), (1, -1)):
        with pytest.raises(ValueError, match="must be at least 0, and every at least 1"):
            mixed.global_batches(0, size, count)
    with pytest.raises(TypeError, match="must be integers"):
        mixed.locate(np.array([0.5]))
    assert mixed.global_batches(2**62 - 8, 4, 2).position.max() == 2**62 - 1
    assert mixed.global_batch(2**62 - 4, 4).max() == 2**62 - 1


def test_a_global_batch_of_streams_of_two_lanes_is_sorted_by_lane() -> None:
    orders = [stream_order([30, 20], OrderSpec(n, 2, 10)) for n in range(2)]
    lanes = MixedOrder(orders, Mixture(9, Schedule.of((2, 1))), 60).global_batches(5, 24, 2).lane
    assert (np.diff(lanes, axis=1) >= 0).all()
    assert np.unique(lanes).tolist() == [0, 1]


def test_a_stream_of_one_sample_has_it_in_the_first_lane() -> None:
    spec = OrderSpec(1, 8, 10)
    orders = [stream_order([samples], spec) for samples in (1, 50)]
    batch = MixedOrder(orders, Mixture(9, Schedule.of((1, 1))), 60).global_batches(0, 20, 1)
    keys = [lane_key(lane, spec) for lane in batch.lane[0].tolist()]
    assert keys == sorted(keys)
    assert len(set(keys)) > 4
    assert set(batch.lane[batch.sample_id == 0].tolist()) == {0}


def test_a_global_batch_may_be_empty_and_larger_than_what_is_sorted_at_once() -> None:
    mixed, size = mixture_of_two(), 2**15 + 1
    assert mixed.global_batches(3, 0, 2).position.shape == (2, 0)
    located = mixed.global_batches(3, size, 2)
    assert np.sort(located.position, axis=1).tolist() == [
        list(range(3, 3 + size)),
        list(range(3 + size, 3 + 2 * size)),
    ]
