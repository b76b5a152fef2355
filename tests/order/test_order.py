"""Every epoch is exact, every position reversible, and the order depends on nothing but its spec."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import pickle
import threading
from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.permutation import permute_one
from shardkit.errors import StateError
from shardkit.order.order import (
    Lanes,
    Order,
    OrderSpec,
    Shuffle,
    default_lanes,
    default_window,
    lane_keys,
    rank_slice,
)
from shardkit.order.permutation import mix64
from support.orders import SIZES, lane_key, order_specs, same

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "order_locations.json"
GOLDEN_RATIO = 0x9E3779B97F4A7C15

Ints = npt.NDArray[np.int64]

SPECS = order_specs()


# The plan in plain Python: lists, cut and dealt out as the design says it


def key_of(spec: OrderSpec, epoch: int, purpose: str) -> bytes:
    text = f"{spec.seed}:{epoch}:{purpose}".encode()
    return hashlib.blake2b(text, digest_size=8, person=b"shardkit.order.1").digest()


def mixed(word: int) -> int:
    return int(mix64(np.array(word % 2**64, dtype=np.uint64)))


def plain_shards(sizes: list[int], spec: OrderSpec, epoch: int) -> list[int]:
    digest = hashlib.blake2b(key_of(spec, epoch, "shards"), digest_size=8, person=b"shardkit.perm.1").digest()
    shards = [permute_one(i, len(sizes), int.from_bytes(digest, "little")) for i in range(len(sizes))]
    if spec.version < 3 or not sum(sizes):
        return shards
    # The stratum of a shard is the lane that would hold its middle; lane l has stratum l * step + turn.
    lane_of_place = [
        lane
        for lane in range(spec.lanes)
        for _ in range(sum(sizes) // spec.lanes + (lane < sum(sizes) % spec.lanes))
    ]
    starts = [0, *itertools.accumulate(sizes)]
    step = max(1, spec.lanes * 40503 // 65536)
    while math.gcd(step, spec.lanes) > 1:
        step += 1
    turn = int.from_bytes(key_of(spec, epoch, "strata"), "little")
    strata = [lane_of_place[min(starts[shard] + sizes[shard] // 2, sum(sizes) - 1)] for shard in shards]
    return [
        shard
        for lane in range(spec.lanes)
        for shard, stratum in zip(shards, strata, strict=True)
        if stratum == (lane * step + turn) % spec.lanes
    ]


def plain_windows(spec: OrderSpec, lane: int, span: list[int]) -> list[list[int]]:
    if spec.shuffle == "global":
        return [span]
    first = spec.window - spec.window * lane // spec.lanes
    windows, rest = [span[:first]], span[first:]
    while rest:
        windows.append(rest[: spec.window])
        rest = rest[spec.window :]
    return windows


def plain_epoch(sizes: list[int], spec: OrderSpec, epoch: int) -> list[tuple[int, int]]:
    """[(lane, sample id)] of an epoch's positions."""
    ids = iter(range(sum(sizes)))
    shards = [list(itertools.islice(ids, size)) for size in sizes]
    if spec.shuffle == "none":
        return [(0, sample) for shard in shards for sample in shard]
    if spec.shuffle == "window":
        shards = [shards[number] for number in plain_shards(sizes, spec, epoch)]
    span = iter([sample for shard in shards for sample in shard])
    window_key = int.from_bytes(key_of(spec, epoch, "windows"), "little")
    lanes = []
    for lane in range(spec.lanes):
        length = sum(sizes) // spec.lanes + (lane < sum(sizes) % spec.lanes)
        lane_key = mixed(window_key + (lane + 1) * GOLDEN_RATIO)
        shuffled = []
        for number, window in enumerate(plain_windows(spec, lane, list(itertools.islice(span, length)))):
            key = mixed(lane_key + (number + 1) * GOLDEN_RATIO)
            shuffled += [window[permute_one(i, len(window), key)] for i in range(len(window))]
        lanes.append(shuffled)
    return [
        (lane, shuffled[row])
        for row in range(len(lanes[0]))
        for lane, shuffled in enumerate(lanes)
        if row < len(shuffled)
    ]


@given(sizes=SIZES, spec=SPECS, epoch=st.integers(0, 1000))
@settings(max_examples=80, deadline=None)
def test_the_plan_agrees_with_plain_python(sizes: list[int], spec: OrderSpec, epoch: int) -> None:
    order = Order(sizes, spec)
    located = order.locate((epoch * order.samples, order.samples))
    expected = plain_epoch(sizes, spec, epoch)
    assert located.lane.tolist() == [lane for lane, _ in expected]
    assert located.sample_id.tolist() == [sample for _, sample in expected]
    starts = np.cumsum([0, *sizes])
    np.testing.assert_array_equal(starts[located.shard] + located.row, located.sample_id)
    assert (located.row < np.array(sizes)[located.shard]).all()
    assert (located.epoch == epoch).all()


# Exactly once, and back


@given(sizes=SIZES, spec=SPECS, first=st.integers(0, 2**40))
@settings(max_examples=150, deadline=None)
def test_every_epoch_holds_every_sample_exactly_once(sizes: list[int], spec: OrderSpec, first: int) -> None:
    order = Order(np.array(sizes, dtype=np.int32), spec)
    located = order.locate((first * order.samples, 3 * order.samples))
    for epoch in range(3):
        mine = located.take(slice(epoch * order.samples, (epoch + 1) * order.samples))
        np.testing.assert_array_equal(np.sort(mine.sample_id), np.arange(order.samples))
        assert (mine.epoch == first + epoch).all()


@given(sizes=SIZES, spec=SPECS, epoch=st.integers(0, 2**30), data=st.data())
@settings(max_examples=150, deadline=None)
def test_positions_of_inverts_locate(
    sizes: list[int], spec: OrderSpec, epoch: int, data: st.DataObject
) -> None:
    order = Order(sizes, spec)
    samples = np.array(data.draw(st.lists(st.integers(0, order.samples - 1), max_size=30)), dtype=np.int64)
    positions = order.positions_of(samples, epoch)
    assert (positions // order.samples == epoch).all()
    np.testing.assert_array_equal(order.locate(positions).sample_id, samples)


@pytest.mark.parametrize("shuffle", ["window", "global", "none"])
def test_a_large_plan_is_exact_in_all_its_chunks(shuffle: Shuffle) -> None:
    sizes = np.arange(1000) % 401
    order = Order(sizes, OrderSpec(seed=5, lanes=24, window=3000, shuffle=shuffle))
    located = order.locate((order.samples, order.samples))
    np.testing.assert_array_equal(np.sort(located.sample_id), np.arange(order.samples))
    np.testing.assert_array_equal(order.positions_of(located.sample_id, 1), located.position)


def test_a_plan_of_more_samples_than_32_bits_is_exact_both_ways() -> None:
    order = Order(np.full(450_000, 8209, dtype=np.int32), OrderSpec(seed=1, lanes=60, window=9000))
    rng = np.random.default_rng(3)
    positions = rng.integers(0, 3 * order.samples, 3000)
    located = order.locate(positions)
    back = np.concatenate([order.positions_of(located.sample_id[located.epoch == e], e) for e in range(3)])
    np.testing.assert_array_equal(np.sort(back), np.sort(positions))


# Nothing else matters


@given(sizes=SIZES, spec=SPECS, start=st.integers(0, 500), data=st.data())
@settings(max_examples=80, deadline=None)
def test_any_chunking_and_any_shape_gives_the_same(
    sizes: list[int], spec: OrderSpec, start: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, 300))
    whole = Order(sizes, spec).locate((start, count))
    other = Order(sizes, spec)
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=5)))
    for low, high in itertools.pairwise([0, *cuts, count]):
        assert same(other.locate((start + low, high - low)), whole.take(slice(low, high)))
    shuffled = np.random.default_rng(0).permutation(count)
    assert same(other.locate(start + shuffled), whole.take(shuffled))
    assert same(other.locate(whole.position.reshape(count, 1)), whole.reshape(count, 1))


def test_the_result_does_not_change_with_the_callers_array() -> None:
    positions = np.arange(10)
    located = Order([10], OrderSpec(1, 2, 4)).locate(positions)
    positions[:] = 0
    assert located.position.tolist() == list(range(10))


@given(sizes=SIZES, seeds=st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=2, unique=True))
@settings(max_examples=40, deadline=None)
def test_seeds_and_epochs_have_orders_of_their_own(sizes: list[int], seeds: list[int]) -> None:
    sizes = [size + 20 for size in sizes]
    for shuffle in ("window", "global"):
        one, other = (Order(sizes, OrderSpec(seed, 4, 50, shuffle)) for seed in seeds)
        n = one.samples
        orders = [one.locate((0, n)), one.locate((n, n)), one.locate((2 * n, n)), other.locate((0, n))]
        for a, b in itertools.combinations(orders, 2):
            assert (a.sample_id != b.sample_id).any()


def test_the_keys_of_lanes_which_all_orders_share_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        lane_keys(4)[0] = 1


def test_threads_may_share_an_order() -> None:
    order = Order([50] * 40, OrderSpec(seed=9, lanes=8, window=100))
    expected = [Order([50] * 40, order.spec).locate((e * order.samples, 500)) for e in range(6)]
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(60):
            epoch = (turn * 5 + number) % 6
            if not same(order.locate((epoch * order.samples, 500)), expected[epoch]):
                wrong.append(epoch)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_order_in_use_can_be_sent_to_another_process() -> None:
    order = Order([50] * 40, OrderSpec(seed=9, lanes=8, window=100))
    located = order.locate((0, 5000))
    assert same(pickle.loads(pickle.dumps(order)).locate((0, 5000)), located)


def test_no_more_than_two_epochs_are_kept() -> None:
    order = Order([3, 4], OrderSpec(seed=9, lanes=2, window=2))
    eight, nine = order.epoch(8), order.epoch(9)
    assert order.epoch(8) is eight
    assert order.epoch(9) is nine
    order.locate((0, 7))
    assert order.epoch(9) is nine
    assert order.epoch(8) is not eight


def test_golden_locations_never_change() -> None:
    for case in json.loads(GOLDEN.read_text()):
        repeats, spec = case["repeat_shards"], OrderSpec.from_dict(case["spec"])
        order = Order(np.array(case["shard_samples"] * repeats), spec)
        located = order.locate(np.array(case["positions"]))
        for name in ("epoch", "shard", "row", "lane", "sample_id"):
            assert getattr(located, name).tolist() == case[name], (spec, name)
        for start, size, positions in case["batches"]:
            assert order.global_batch(start, size).tolist() == positions, spec


# Lanes


@given(samples=st.integers(0, 300), lanes=st.integers(1, 40), window=st.integers(0, 80))
@settings(max_examples=200, deadline=None)
def test_windows_tile_each_lane(samples: int, lanes: int, window: int) -> None:
    geometry = Lanes(samples, lanes, window)
    assert geometry.lengths.sum() == samples
    assert geometry.lengths.max() - geometry.lengths.min() <= 1
    for lane in range(lanes):
        rows = np.arange(geometry.lengths[lane])
        numbers = geometry.windows(np.full_like(rows, lane), rows)
        firsts, sizes = geometry.bounds(np.full_like(rows, lane), numbers)
        for number in np.unique(numbers):
            inside = rows[numbers == number]
            assert set(firsts[numbers == number]) == {inside[0]}
            assert set(sizes[numbers == number]) == {len(inside)}
        if not window:
            assert len(np.unique(numbers)) <= 1
        if window and len(rows) > window:
            assert np.bincount(numbers)[0] == window - window * lane // lanes
            assert set(np.bincount(numbers)[1:-1]) <= {window}


@given(samples=st.integers(1, 300), lanes=st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_a_place_is_found_in_its_lane(samples: int, lanes: int) -> None:
    geometry = Lanes(samples, lanes, 5)
    expected = [(lane, row) for lane in range(lanes) for row in range(geometry.lengths[lane])]
    found, rows = geometry.find(np.arange(samples))
    assert list(zip(found.tolist(), rows.tolist(), strict=True)) == expected


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 12])
def test_rank_slices_are_equal_parts_in_order(world_size: int) -> None:
    taken = [i for rank in range(world_size) for i in range(12)[rank_slice(12, rank, world_size)]]
    assert taken == list(range(12))


@pytest.mark.parametrize(("size", "rank", "world_size"), [(12, 0, 5), (12, 4, 4), (12, -1, 4), (12, 0, 0)])
def test_unequal_parts_and_unknown_ranks_are_refused(size: int, rank: int, world_size: int) -> None:
    with pytest.raises(ValueError):
        rank_slice(size, rank, world_size)


@pytest.mark.parametrize(
    ("shards", "lanes", "of_compressed"),
    [
        (0, 1, 1), (1, 1, 1), (63, 1, 1), (64, 2, 1), (1_600, 32, 8), (15_625, 256, 64), (65_536, 2048, 512),
        (450_000, 2048, 2048), (900_000, 4096, 4096), (1 << 24, 1 << 16, 1 << 16),
    ],
)  # fmt: skip
def test_default_lanes_grow_with_the_shards_alone(shards: int, lanes: int, of_compressed: int) -> None:
    assert default_lanes(shards) == lanes
    assert default_lanes(shards, compressed=True) == of_compressed


@pytest.mark.parametrize(
    ("samples", "shards", "window"),
    [
        (4_000, 20, 12_800),  # more than there are: one window
        (160 * 4096, 160, 16 * 4096),  # four lanes: 64 shards together
        (1_600 * 4096, 1_600, 2 * 4096),
        (450_000 * 8192 - 1, 450_000, 2 * 8192),
        (1, 0, 64),
        (0, 0, 1),
    ],
)
def test_a_default_window_holds_two_shards_or_all_windows_64(samples: int, shards: int, window: int) -> None:
    assert default_window(samples, shards, default_lanes(shards)) == window


def test_defaults_refuse_nonsense() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        default_lanes(-1)
    for samples, shards, lanes in ((0, 1, 0), (0, -1, 1), (-1, 1, 1)):
        with pytest.raises(ValueError, match="must be at least 0, and lanes at least 1"):
            default_window(samples, shards, lanes)


# Batches


@given(
    sizes=SIZES,
    spec=SPECS,
    position=st.integers(0, 700),
    size=st.integers(0, 90),
    count=st.integers(0, 5),
    every=st.sampled_from([1, 1, 2, 100]),
)
@settings(max_examples=120, deadline=None)
def test_a_global_batch_is_its_positions_sorted_by_lane(
    sizes: list[int], spec: OrderSpec, position: int, size: int, count: int, every: int
) -> None:
    order = Order(sizes, spec)
    blocks = order.global_batches(position, size, count, every=every)
    assert blocks.position.shape == (count, size)
    for i in range(count):
        start = position + i * size * every
        expected = sorted(
            range(start, start + size), key=lambda p: lane_key(p % order.samples % spec.lanes, spec)
        )
        assert order.global_batch(start, size).tolist() == expected
        assert blocks.position[i].tolist() == expected
    assert same(blocks, order.locate(blocks.position))


@given(
    sizes=SIZES,
    spec=SPECS,
    position=st.integers(0, 400),
    size=st.sampled_from([12, 24, 60]),
    count=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_ranks_share_a_batch_whose_set_is_the_same_for_every_world_size(
    sizes: list[int], spec: OrderSpec, position: int, size: int, count: int
) -> None:
    order = Order(sizes, spec)
    whole = order.global_batches(position, size, count)
    for world_size in (1, 2, 3, 4, 6, 12):
        parts = [
            order.global_batches(position, size, count, part=rank_slice(size, rank, world_size))
            for rank in range(world_size)
        ]
        assert {part.position.shape for part in parts} == {(count, size // world_size)}
        assert np.array_equal(np.concatenate([part.sample_id for part in parts], axis=1), whole.sample_id)


@pytest.mark.parametrize(("lanes", "world_size"), [(8, 2), (8, 4), (8, 8), (4, 8)])
def test_ranks_have_lanes_of_their_own_where_they_divide(lanes: int, world_size: int) -> None:
    order = Order([100] * 8, OrderSpec(seed=1, lanes=lanes, window=20))
    for rank in range(world_size):
        part = order.global_batches(0, 32, 20, part=rank_slice(32, rank, world_size))
        assert len(np.unique(part.lane)) == max(1, lanes // world_size)


# Working set and quality


@given(sizes=SIZES, lanes=st.integers(1, 12), window=st.integers(1, 60), seed=st.integers(0, 99))
@settings(max_examples=80, deadline=None)
def test_a_window_stays_in_the_shards_under_it(sizes: list[int], lanes: int, window: int, seed: int) -> None:
    order = Order(sizes, OrderSpec(seed, lanes, window))
    located = order.locate((0, order.samples))
    shard_order = plain_shards(sizes, order.spec, 0)
    span = [shard for shard in shard_order for _ in range(sizes[shard])]
    for lane in range(lanes):
        of_lane = located.shard[located.lane == lane]
        mine, span = span[: len(of_lane)], span[len(of_lane) :]
        edges = [0, *range(window - window * lane // lanes, len(mine), window), len(mine)]
        for low, high in itertools.pairwise(edges):
            assert sorted(mine[low:high]) == sorted(of_lane[low:high])


def test_lanes_enter_their_windows_one_after_another() -> None:
    lanes, window = 16, 400
    order = Order([1000] * 100, OrderSpec(seed=4, lanes=lanes, window=window))
    rows, geometry = np.arange(order.samples // lanes), order.geometry
    numbers = np.stack([geometry.windows(np.full_like(rows, lane), rows) for lane in range(lanes)])
    changes = np.diff(numbers, axis=1).sum(axis=0)
    assert changes.max() == 1
    assert set(np.diff(np.flatnonzero(changes))) == {window // lanes}


def test_samples_of_a_shard_are_not_clumped_in_their_window() -> None:
    lanes, window, size = 16, 4000, 500
    order = Order([size] * 800, OrderSpec(seed=12, lanes=lanes, window=window))
    located = order.locate((0, order.samples))
    same_shard = expected = variance = 0.0
    for lane in range(lanes):
        shards = located.shard[located.lane == lane]
        edges = [0, *range(window - window * lane // lanes, len(shards), window), len(shards)]
        for low, high in itertools.pairwise(edges):
            counts = np.unique(shards[low:high], return_counts=True)[1]
            n = high - low
            chance = float((counts * (counts - 1)).sum()) / (n * (n - 1)) if n > 1 else 0.0
            same_shard += int((shards[low : high - 1] == shards[low + 1 : high]).sum())
            expected += chance * (n - 1)
            variance += chance * (1 - chance) * (n - 1)
    assert abs(same_shard - expected) < 4.5 * math.sqrt(variance)


def test_each_sample_of_a_global_shuffle_goes_anywhere() -> None:
    order = Order([1000] * 64, OrderSpec(seed=2, lanes=1, window=1, shuffle="global"))
    located = order.locate((0, order.samples))
    by_quarter = np.histogram2d(located.position, located.shard, bins=(16, 64))[0].ravel()
    expected = order.samples / by_quarter.size
    chi_square = ((by_quarter - expected) ** 2 / expected).sum()
    degrees = 15 * 63
    assert abs(chi_square - degrees) < 4.5 * math.sqrt(2 * degrees)


def test_without_shuffle_the_order_is_the_datasets() -> None:
    located = Order([3, 0, 4], OrderSpec(1, 8, 8, "none")).locate((0, 14))
    assert located.sample_id.tolist() == [*range(7), *range(7)]
    assert located.shard.tolist() == [0, 0, 0, 2, 2, 2, 2] * 2
    assert located.epoch.tolist() == [0] * 7 + [1] * 7


@pytest.mark.parametrize(("shards", "rows", "distinct"), [(468_750, 8192, 2600), (55_000, 4096, 1600)])
def test_a_batch_draws_on_thousands_of_shards_by_default(shards: int, rows: int, distinct: int) -> None:
    """60 TB in shards of 128 MiB, and 3.7 TB in shards of 64 MiB, of samples of 16 KiB: never shuffled.

    The least is at the start of an epoch, where half of a window is in use on average; later a fifth more.
    """
    lanes = default_lanes(shards)
    spec = OrderSpec(17, lanes, default_window(shards * rows, shards, lanes))
    order, size = Order(np.full(shards, rows), spec), 4096
    for position in range(0, order.samples, order.samples // 5):
        _, counts = np.unique(order.locate((position, size)).shard, return_counts=True)
        assert len(counts) >= distinct
        pairs = int((counts * (counts - 1) // 2).sum())
        assert pairs <= 85 * size * (size - 1) / 2 / shards  # as many times those of a true shuffle


# Surface


def test_a_spec_survives_json_and_normalises_what_has_no_meaning() -> None:
    spec = OrderSpec(seed=2**64 - 1, lanes=64, window=8192)
    assert OrderSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert OrderSpec(1, 64, 8192, "global") == OrderSpec(1, 3, 7, "global")
    normal = OrderSpec(1, 64, 8192, "none")
    assert (normal.lanes, normal.window) == (1, 0)
    assert OrderSpec.from_dict(normal.to_dict()) == normal


@pytest.mark.parametrize(
    "change",
    [
        {"version": 4},
        {"version": True},
        {"lanes": 0},
        {"lanes": "8"},
        {"seed": True},
        {"shuffle": "some"},
        {"extra": 1},
    ],
)  # fmt: skip
def test_a_spec_from_elsewhere_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(StateError):
        OrderSpec.from_dict(OrderSpec(1, 8, 100).to_dict() | change)
    with pytest.raises(StateError):
        OrderSpec.from_dict(["not", "a", "dict"])


@pytest.mark.parametrize(
    ("seed", "lanes", "window"),
    [(-1, 1, 1), (2**64, 1, 1), (1, 0, 1), (1, 1, 0), (1, 2**16 + 1, 1), (1, 1, 2**44 + 1)],
)
def test_a_spec_has_limits(seed: int, lanes: int, window: int) -> None:
    with pytest.raises(ValueError, match="must be between"):
        OrderSpec(seed, lanes, window)
    for shuffle in get_args(Shuffle)[1:]:  # which have neither lanes nor windows
        if 0 <= seed < 2**64:
            assert OrderSpec(seed, lanes, window, shuffle).seed == seed
        else:
            with pytest.raises(ValueError, match="seed must be between"):
                OrderSpec(seed, lanes, window, shuffle)


def test_extreme_specs_within_the_limits_work() -> None:
    order = Order([7, 5], OrderSpec(2**64 - 1, 2**16, 2**44))
    located = order.locate((0, 12))
    assert sorted(located.sample_id.tolist()) == list(range(12))
    assert located.lane.tolist() == list(range(12))
    order = Order([2**59, 2**59], OrderSpec(0, 2**16, 2**44))
    positions = np.array([0, 1, 2**60 - 1, 2**60, 3 * 2**60 - 1])
    located = order.locate(positions)
    back = [order.positions_of(located.sample_id[i], int(located.epoch[i])) for i in range(5)]
    assert [int(p) for p in back] == positions.tolist()


def test_damaged_sizes_are_refused() -> None:
    spec = OrderSpec(1, 2, 3)
    for sizes in ([-1], [[1]], [1.5], [2**60, 2**60], [2**62, 2**62]):
        with pytest.raises(ValueError):
            Order(np.array(sizes), spec)
    with pytest.raises(ValueError, match="shard 1 has -2 samples"):
        Order([5, -2, 3], spec)
    with pytest.raises(ValueError, match="shards are too many"):
        Order(np.broadcast_to(np.int8(0), 2**31), spec)


def test_positions_out_of_range_are_refused() -> None:
    order = Order([4, 4], OrderSpec(1, 2, 3))
    with pytest.raises(ValueError, match="positions go from 0"):
        order.locate((-1, 3))
    with pytest.raises(ValueError, match="positions go from 0"):
        order.locate(np.array([2**62]))
    with pytest.raises(ValueError, match="positions go from 0"):
        order.global_batch(2**62 - 1, 2)
    with pytest.raises(ValueError, match="positions go from 0"):
        order.locate((5, -1))
    last = order.global_batches(2**62 - 6, 2, 2, every=2).position  # up to the last one
    assert np.sort(last).tolist() == [[2**62 - 6, 2**62 - 5], [2**62 - 2, 2**62 - 1]]
    with pytest.raises(ValueError, match="positions go from 0"):
        order.global_batches(2**62 - 5, 2, 2, every=2)
    for size, count, every in ((-1, 2, 1), (4, -1, 1), (4, 2, 0)):
        with pytest.raises(ValueError, match="must be at least 0, and every at least 1"):
            order.global_batches(0, size, count, every=every)
    with pytest.raises(IndexError, match="sample ids go from 0 to 7"):
        order.positions_of([8], 0)
    with pytest.raises(IndexError, match="sample ids go from 0 to 7, not -1 to 3"):
        order.positions_of([3, -1], 0)
    with pytest.raises(IndexError, match="sample ids go from 0 to 7, not 3 to 8"):
        order.positions_of([3, 8], 0)
    with pytest.raises(TypeError, match="must be integers"):
        order.locate(np.array([0.5]))


def test_a_dataset_without_samples_has_no_positions() -> None:
    for sizes in ([], [0, 0]):
        order = Order(sizes, OrderSpec(1, 2, 3))
        assert order.samples == 0
        assert order.locate((0, 0)).shard.shape == (0,)
        assert order.positions_of([], 5).shape == (0,)
        with pytest.raises(ValueError, match="no samples"):
            order.locate((0, 1))
        with pytest.raises(ValueError, match="positions go from 0"):
            order.positions_of([], -1)


def test_small_sizes_are_not_summed_in_their_own_width() -> None:
    for dtype in (np.uint8, np.int16, np.uint64):
        assert Order(np.full(1000, 200, dtype=dtype), OrderSpec(1, 2, 3)).samples == 200_000


def test_what_an_order_remembers_of_windows_and_how_it_searches_many_shards_changes_nothing() -> None:
    sizes = np.arange(40_000) % 3
    spec = OrderSpec(5, 256, 40)
    order = Order(sizes, spec)
    for position in (0, 3000, 0, 20_000, 9_000, order.samples - 3000, order.samples, 100):
        found = order.global_batches(position, 2048, 2)
        for start in (0, 1):
            for low in range(0, 2048, 512):  # so few that they are searched for as they come
                part = slice(low, low + 512)
                plain = Order(sizes, spec).locate(order.global_batch(position + 2048 * start, 2048)[part])
                assert np.array_equal(found.sample_id[start, part], plain.sample_id)
                assert np.array_equal(found.shard[start, part], plain.shard)
                assert np.array_equal(found.row[start, part], plain.row)
    ids = order.locate((0, order.samples)).sample_id
    assert np.array_equal(np.sort(ids), np.arange(order.samples))
    assert np.array_equal(order.positions_of(ids, 0), np.arange(order.samples))
