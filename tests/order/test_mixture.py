"""Proportions are exact, every stream is delivered in its own order, and the past never changes."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import StateError
from shardkit.order.mixture import Mixture, Schedule
from shardkit.order.order import MAX_POSITION
from shardkit.order.permutation import mix64
from spec import arithmetic

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "mixture_locations.json"
GOLDEN_RATIO = 0x9E3779B97F4A7C15

Weights = tuple[int, ...]
Located = tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]

SEEDS = st.integers(0, 2**64 - 1)


def weights_of(streams: int) -> st.SearchStrategy[Weights]:
    weight = st.sampled_from([0, 1]) | st.integers(0, 12) | st.integers(0, 700) | st.integers(0, 2**28)
    return st.tuples(*[weight] * streams).filter(any)


@st.composite
def schedules(draw: st.DrawFn, streams: int | None = None) -> Schedule:
    """Up to four segments of up to 1,500 positions."""
    streams = streams or draw(st.integers(1, 6))
    starts = list(itertools.accumulate(draw(st.lists(st.integers(1, 1500), max_size=3)), initial=0))
    return Schedule(tuple((start, draw(weights_of(streams))) for start in starts))


# Versions 1 and 2 in plain Python: one block at a time, counted one by one


def mixed(word: int) -> int:
    return int(mix64(np.array(word % 2**64, dtype=np.uint64)))


def plain_shares(weights: Weights, count: int) -> list[int]:
    """What each stream has of the first `count` positions of a segment, by nested floors."""
    shares, upper = [0] * len(weights), count
    for stream in range(len(weights) - 1, -1, -1):
        sums = sum(weights[:stream]), sum(weights[: stream + 1])
        lower = upper * sums[0] // sums[1] if sums[1] else 0
        shares[stream], upper = upper - lower, lower
    return shares


def plain_edges(weights: Weights, number: int) -> tuple[int, int]:
    """Where block `number` of a segment begins and ends."""
    blocks = -(-sum(weights) // 1024)
    return number * sum(weights) // blocks, (number + 1) * sum(weights) // blocks


def plain_block(seed: int, weights: Weights, start: int, number: int) -> list[int]:
    """The stream of each position of block `number` of a segment."""
    first, last = plain_edges(weights, number)
    before, after = plain_shares(weights, first), plain_shares(weights, last)
    streams = [stream for stream in range(len(weights)) for _ in range(after[stream] - before[stream])]
    digest = hashlib.blake2b(f"{seed}:mixture".encode(), digest_size=8, person=b"shardkit.mix.1").digest()
    key = mixed(int.from_bytes(digest, "little") + (start + first + 1) * GOLDEN_RATIO)
    hashes = [mixed(key + (slot + 1) * GOLDEN_RATIO) for slot in range(last - first)]
    slots = sorted(range(last - first), key=lambda slot: (hashes[slot] >> 10, slot))
    return [stream for _, stream in sorted(zip(slots, streams, strict=True))]


def plain_streams(seed: int, schedule: Schedule, count: int) -> list[int]:
    """The stream of each of the first `count` positions."""
    streams: list[int] = []
    starts = [start for start, _ in schedule.segments]
    for (start, weights), end in zip(schedule.segments, [*starts[1:], count], strict=True):
        for number in itertools.count():
            if len(streams) >= min(end, count):
                break
            streams += plain_block(seed, weights, start, number)
        del streams[min(end, count) :]
    return streams


def plain_indices(streams: list[int]) -> list[int]:
    seen: Counter[int] = Counter()
    indices = []
    for stream in streams:
        indices.append(seen[stream])
        seen[stream] += 1
    return indices


def same(one: Located, other: Located) -> bool:
    return np.array_equal(one[0], other[0]) and np.array_equal(one[1], other[1])


@given(seed=SEEDS, schedule=schedules(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_streams_and_indices_agree_with_plain_python(
    seed: int, schedule: Schedule, data: st.DataObject
) -> None:
    count = schedule.segments[-1][0] + data.draw(st.integers(1, 1500))
    streams = plain_streams(seed, schedule, count)
    indices = plain_indices(streams)
    mixture = Mixture(seed, schedule, 2)
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, count)] * 2)))
    for start, end in ((0, count), (first, last)):
        stream, index = mixture.locate(start, end - start)
        assert stream.tolist() == streams[start:end]
        assert index.tolist() == indices[start:end]
    for position in (0, first, last, count, *(start for start, _ in schedule.segments)):
        seen = Counter(streams[:position])
        assert mixture.counts(position).tolist() == [seen[number] for number in range(schedule.streams)]


@given(
    seed=SEEDS,
    weights=st.integers(1, 5).flatmap(weights_of),
    near=st.sampled_from([2**31, 2**40, 2**61, 2**62 - 2**20]),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_positions_far_away_are_as_exact(seed: int, weights: Weights, near: int, data: st.DataObject) -> None:
    schedule = Schedule.of(weights)
    reduced, mixture = schedule.weights_at(0), Mixture(seed, schedule, 2)
    number = (near + data.draw(st.integers(0, 2**19))) * -(-sum(reduced) // 1024) // sum(reduced)
    first, last = plain_edges(reduced, number)[0], plain_edges(reduced, number + 1)[1]
    stream, index = mixture.locate(first, last - first)
    streams = [s for block in (number, number + 1) for s in plain_block(seed, reduced, 0, block)]
    assert stream.tolist() == streams
    before = plain_shares(reduced, first)
    assert mixture.counts(first).tolist() == before
    assert index.tolist() == [before[s] + i for s, i in zip(streams, plain_indices(streams), strict=True)]
    place = data.draw(st.integers(0, last - first - 1))
    assert mixture.position_of(int(stream[place]), int(index[place])) == first + place


def test_golden_locations_never_change() -> None:
    for case in json.loads(GOLDEN.read_text()):
        mixture = Mixture(case["seed"], Schedule.from_list(case["schedule"]), case.get("version", 2))
        for start, streams, indices in case["locations"]:
            stream, index = mixture.locate(start, len(streams))
            assert stream.tolist() == streams, (case["schedule"], start)
            assert index.tolist() == indices, (case["schedule"], start)


# Version 3: spread evenly


@given(
    seed=SEEDS,
    schedule=schedules(),
    near=st.sampled_from([0, 0, 4000, 2**31, 2**61]),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_spread_streams_agree_with_plain_python(
    seed: int, schedule: Schedule, near: int, data: st.DataObject
) -> None:
    plain, mixture = arithmetic.Mixture(seed, schedule.to_list()), Mixture(seed, schedule)  # type: ignore[arg-type]
    start, count = near + data.draw(st.integers(0, 3000)), data.draw(st.integers(1, 200))
    expected = [plain.locate(start + n) for n in range(count)]
    stream, index = mixture.locate(start, count)
    assert list(zip(stream.tolist(), index.tolist(), strict=True)) == expected
    scattered = start + np.random.default_rng(0).permutation(count)
    found = mixture.locate_at(scattered)
    assert [each.tolist() for each in found] == [each[scattered - start].tolist() for each in (stream, index)]
    before, after = mixture.counts(start), mixture.counts(start + count)
    assert (after - before).tolist() == np.bincount(stream, minlength=schedule.streams).tolist()
    for place in data.draw(st.lists(st.integers(0, count - 1), max_size=3)):
        assert mixture.position_of(*expected[place]) == start + place


SKEWED: list[Weights] = [(37, 21, 42), (1, 1), (7, 2, 1), (90, 5, 3, 2), (1, 4000), (1,) * 1000]
SKEWED += [(3000, *(1,) * 1000), (1, 2, 3, 5, 8, 13, 21, 34)]


@pytest.mark.parametrize("weights", SKEWED, ids=lambda weights: f"{len(weights)}-{sum(weights)}")
def test_a_count_is_never_off_by_a_sample(weights: Weights) -> None:
    assert deviation(weights, 3 * sum(weights)) < 1


@given(weights=st.lists(st.integers(1, 300) | st.just(1), min_size=1, max_size=12).map(tuple))
@settings(max_examples=60, deadline=None)
def test_a_count_is_never_off_by_a_sample_for_any_weights_of_a_short_period(weights: Weights) -> None:
    assert deviation(weights, 2 * sum(weights)) < 1


FINE: list[Weights] = [(371_234, 212_345, 416_421), (10**6 - 1, 1), (5,) * 999 + (6,)]
FINE += [(1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 5000)]


@pytest.mark.parametrize("weights", FINE, ids=lambda weights: f"{len(weights)}-{sum(weights)}")
def test_a_count_is_off_by_less_than_the_bound_in_long_periods(weights: Weights) -> None:
    assert deviation(weights, min(sum(weights), 60_000)) < (1 if len(weights) in (2, 3, 1000) else 1.7)


def deviation(weights: Weights, positions: int) -> float:
    """By how many samples a count is off from its exact share, at most, at the first positions."""
    stream, _ = Mixture(7, Schedule.of(weights)).locate(0, positions)
    total, worst = sum(weights), 0
    for number in sorted(range(len(weights)), key=lambda each: -weights[each])[:40]:
        counts, places = np.cumsum(stream == number), np.arange(1, positions + 1)
        worst = max(worst, int(np.abs(counts * total - places * weights[number]).max()))
    return worst / total


# Proportions


@pytest.mark.parametrize("weights", [(1,), (1, 1), (7, 3), (0, 5, 3), (1, 0, 1, 4), (512, 511), (1, 1023)])
def test_proportions_are_exact_in_every_block(weights: Weights) -> None:
    size, blocks = sum(weights), 200
    stream, _ = Mixture(3, Schedule.of(weights)).locate(5 * size, blocks * size)
    counts = [np.bincount(block, minlength=len(weights)).tolist() for block in stream.reshape(blocks, size)]
    assert counts == [list(weights)] * blocks


@given(weights=st.integers(1, 6).flatmap(weights_of), period=st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_proportions_are_exact_at_every_multiple_of_the_weights_sum(weights: Weights, period: int) -> None:
    schedule = Schedule.of(weights)
    reduced = schedule.weights_at(0)
    counts = Mixture(1, schedule).counts(period * sum(reduced))
    assert counts.tolist() == [period * weight for weight in reduced]


@given(
    weights=st.integers(1, 6).flatmap(weights_of), block=st.integers(0, 2**45), within=st.integers(0, 1023)
)
@settings(max_examples=60, deadline=None)
def test_counts_never_leave_their_exact_shares(weights: Weights, block: int, within: int) -> None:
    schedule = Schedule.of(weights)
    reduced, mixture = schedule.weights_at(0), Mixture(1, schedule, 2)
    total, streams = sum(reduced), len(reduced)
    edge, end = plain_edges(reduced, block)
    for count, weight in zip(mixture.counts(edge).tolist(), reduced, strict=True):
        assert abs(count * total - edge * weight) < streams * total
    # Inside a block of M, c samples in random slots stray from the line by at most c * (M - c) / M <= M / 4.
    position = edge + within % (end - edge)
    for count, weight in zip(mixture.counts(position).tolist(), reduced, strict=True):
        assert abs(count * total - position * weight) < (streams + 1 + (end - edge) / 4) * total


def test_the_slots_of_a_block_are_equally_likely_and_independent() -> None:
    blocks, size = 40_000, 8
    stream, _ = Mixture(11, Schedule.of((1, 7)), 2).locate(0, blocks * size)
    slots = np.flatnonzero(stream == 0) % size
    pairs = np.bincount(slots[:-1] * size + slots[1:], minlength=size * size)
    expected = (blocks - 1) / size**2
    chi_square, degrees = ((pairs - expected) ** 2 / expected).sum(), size**2 - 1
    assert abs(chi_square - degrees) < 4.5 * math.sqrt(2 * degrees)


def test_a_rare_stream_comes_anywhere_in_the_longest_block() -> None:
    stream, _ = Mixture(2, Schedule.of((1, 1023)), 2).locate(0, 1024 * 1600)
    slots = np.flatnonzero(stream == 0) % 1024
    by_sixteenth = np.bincount(slots // 64, minlength=16)
    chi_square = ((by_sixteenth - 100) ** 2 / 100).sum()
    assert abs(chi_square - 15) < 4.5 * math.sqrt(2 * 15)


def test_blocks_are_shuffled_in_ways_of_their_own() -> None:
    stream, _ = Mixture(2, Schedule.of((1, 1, 2, 2)), 2).locate(0, 12_000)
    ways = {tuple(block) for block in stream.reshape(2000, 6).tolist()}
    assert len(ways) == 180  # 6! / 2! / 2!; one of them is missed in 2,000 draws once in 370 times


def test_seeds_have_mixtures_of_their_own() -> None:
    one, other = (Mixture(seed, Schedule.of((2, 3))).locate(0, 1000)[0] for seed in (1, 2))
    assert 300 < (one != other).sum() < 700


# A schedule may change


@given(
    seed=SEEDS,
    pair=st.integers(1, 4).flatmap(lambda n: st.tuples(schedules(streams=n), weights_of(n))),
    start=st.integers(0, 4000),
)
@settings(max_examples=50, deadline=None)
def test_a_change_leaves_all_before_it_as_it_was(
    seed: int, pair: tuple[Schedule, Weights], start: int
) -> None:
    schedule, weights = pair
    changed = schedule.changed(start, weights)
    assert changed.agrees_before(schedule, start)
    assert changed.weights_at(start) == changed.weights_at(2**61) == Schedule.of(weights).weights_at(0)
    before, after = Mixture(seed, schedule), Mixture(seed, changed)
    assert same(before.locate(0, start), after.locate(0, start))
    counts = before.counts(start)
    np.testing.assert_array_equal(after.counts(start), counts)
    stream, index = after.locate(start, 3000)
    for number in range(schedule.streams):
        mine = index[stream == number]
        np.testing.assert_array_equal(mine, counts[number] + np.arange(len(mine)))


@given(seed=SEEDS, schedule=schedules(), more=st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_a_stream_that_is_added_changes_nothing_until_it_has_weight(
    seed: int, schedule: Schedule, more: int
) -> None:
    padded = schedule.padded(schedule.streams + more)
    assert padded.agrees_before(schedule, MAX_POSITION)
    assert schedule.agrees_before(padded, MAX_POSITION)
    assert same(Mixture(seed, schedule).locate(0, 5000), Mixture(seed, padded).locate(0, 5000))


# Nothing else matters


@given(seed=SEEDS, schedule=schedules(), data=st.data())
@settings(max_examples=30, deadline=None)
def test_positions_may_be_asked_for_in_any_order(seed: int, schedule: Schedule, data: st.DataObject) -> None:
    mixture = Mixture(seed, schedule)
    stream, index = mixture.locate(0, 6000)
    positions = np.array(data.draw(st.lists(st.integers(0, 5999), max_size=60)), dtype=np.int64)
    streams, indices = mixture.locate_at(positions)
    np.testing.assert_array_equal(streams, stream[positions])
    np.testing.assert_array_equal(indices, index[positions])


@pytest.mark.parametrize("weights", [(1,), (2, 3), (600, 500, 3), (5000, 3)])
def test_many_positions_are_those_of_many_calls(weights: Weights) -> None:
    mixture = Mixture(5, Schedule.of(weights).changed(33_333, weights[::-1]))
    whole = mixture.locate(777, 70_000)
    edges = [0, 1, 1000, 30_000, 50_001, 70_000]
    pieces = [mixture.locate(777 + low, high - low) for low, high in itertools.pairwise(edges)]
    scattered = np.random.default_rng(0).permutation(70_000)
    each = mixture.locate_at(777 + scattered)
    for column in (0, 1):
        joined = np.concatenate([piece[column] for piece in pieces])
        np.testing.assert_array_equal(whole[column], joined)
        np.testing.assert_array_equal(whole[column][scattered], each[column])


@given(seed=SEEDS, schedule=schedules(), position=st.integers(0, 6000) | st.integers(0, 2**62 - 1))
@settings(max_examples=60, deadline=None)
def test_position_of_inverts_locate(seed: int, schedule: Schedule, position: int) -> None:
    mixture = Mixture(seed, schedule)
    stream, index = mixture.locate(position, 1)
    assert mixture.position_of(int(stream[0]), int(index[0])) == position


def test_a_sample_that_is_never_delivered_has_no_position() -> None:
    mixture = Mixture(1, Schedule.of((1, 1, 0)).changed(100, (1, 0, 0)))
    assert mixture.position_of(1, 49) in (98, 99)
    assert mixture.position_of(1, 50) is None
    assert mixture.position_of(2, 0) is None
    assert mixture.position_of(0, 50) == 100
    assert mixture.position_of(0, 2**62 - 51) == 2**62 - 1
    assert mixture.position_of(0, 2**62 - 50) is None
    assert Mixture(1, Schedule.of((1, 2))).position_of(0, 2**62) is None


def test_the_last_samples_are_those_before_the_last_position() -> None:
    mixture = Mixture(1, Schedule.of((1, 2)))  # 2**62 is no multiple of 3
    for stream, count in enumerate(mixture.counts(2**62).tolist()):
        assert mixture.position_of(stream, count - 1) in range(2**62 - 4, 2**62)
        assert mixture.position_of(stream, count) is None


# Surface


def test_schedules_that_mean_the_same_are_equal() -> None:
    assert Schedule.of((7, 3)) == Schedule.of((0.7, 0.3)) == Schedule.of((70, 30)) == Schedule(((0, (7, 3)),))
    assert Schedule.of((0.1, 0.2, 0.7)).weights_at(5) == (1, 2, 7)
    assert Schedule.of((1, 0.5, 1e-3)).weights_at(0) == (1000, 500, 1)
    assert Schedule.of((10**12, 10**12)).weights_at(0) == (1, 1)
    assert Schedule(((0, (1, 2)), (50, (2, 4)), (60, (1, 1)))) == Schedule(((0, (1, 2)), (60, (1, 1))))
    assert Schedule.of((1, 2)).changed(50, (0.5, 1)) == Schedule.of((1, 2))
    assert Schedule.of((1, 2)).changed(0, (2, 1)) == Schedule.of((2, 1))
    assert Schedule.of((1, 2)).changed(9, (2, 1)).changed(5, (1, 1)).segments == ((0, (1, 2)), (5, (1, 1)))


def test_the_weights_of_a_position_are_those_of_its_segment() -> None:
    schedule = Schedule(((0, (1, 2)), (10, (1, 0)), (30, (3, 4))))
    assert [schedule.weights_at(position) for position in (0, 9, 10, 29, 30, 2**62)] == [
        (1, 2), (1, 2), (1, 0), (1, 0), (3, 4), (3, 4)
    ]  # fmt: skip


def test_schedules_agree_before_the_first_difference() -> None:
    schedule = Schedule.of((1, 2)).changed(10, (1, 1)).changed(20, (5, 1))
    for other, until in (
        (schedule.changed(15, (1, 2)), 15),
        (schedule.changed(20, (1, 2)), 20),
        (Schedule.of((1, 2)), 10),
        (Schedule.of((2, 1)), 0),
        (schedule.padded(3).changed(17, (1, 2, 3)), 17),
    ):
        for position in (0, until):
            assert schedule.agrees_before(other, position)
            assert other.agrees_before(schedule, position)
        for position in (until + 1, 100):
            assert not schedule.agrees_before(other, position)
            assert not other.agrees_before(schedule, position)


@given(schedule=schedules())
@settings(max_examples=50, deadline=None)
def test_a_schedule_survives_json(schedule: Schedule) -> None:
    assert Schedule.from_list(json.loads(json.dumps(schedule.to_list()))) == schedule


@pytest.mark.parametrize(
    "data",
    [None, {}, [], [[0]], [0, [1]], [[0, 1]], [[0, []]], [[0, [0]]], [[0, [1.0]]], [["0", [1]]], [[1, [1]]],
     [[0, [1]], [0, [2]]], [[0, [1, 1]], [5, [1]]], [[0, [-1, 2]]], [[0, [True]]], [[0, [1], 2]],
     [[0, [1]], 5], [[0, [1, 1]], [2**62, [1, 2]]]],
)  # fmt: skip
def test_a_schedule_from_elsewhere_is_refused(data: object) -> None:
    with pytest.raises(StateError, match="schedule"):
        Schedule.from_list(data)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((), "1 to 4,096 streams"),
        ((0, 0), "at least one weight"),
        ((1, -1), ">= 0, not -1"),
        ((1, -0.5), ">= 0, not -0.5"),
        ((1, float("nan")), ">= 0, not nan"),
        ((1, float("inf")), ">= 0, not inf"),
        ((1, True), "numbers, not True"),
        ((1, "2"), "numbers, not '2'"),
        ((2**31, 1), "too fine"),
        ((1e-300, 1), "too fine"),
    ],
)
def test_weights_that_are_none_are_refused(weights: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule.of(weights)
    with pytest.raises(ValueError):
        Schedule.of((1,)).changed(5, weights)


@pytest.mark.parametrize(
    ("weights", "whole"),
    [
        ((1 / 6, 1 / 3, 1 / 2), (1, 2, 3)),
        ((2 / 7, 5 / 7), (2, 5)),
        ((Fraction(1, 3), 2), (1, 6)),
        ((0.333333, 0.666667), (333333, 666667)),
        ((np.float64(0.25), np.int64(1)), (1, 4)),
        # As written, though other fractions with smaller denominators are the same floats.
        ((0.123456789, 0.876543211), (123456789, 876543211)),
        # What a float without few digits counts as is part of the order.
        ((math.pi / 10, 1), (56642635, 180299107)),
        ((math.pi, math.e, math.sqrt(2)), (463736403, 401250696, 208754725)),
    ],
)
def test_fractions_are_taken_as_they_are_meant(weights: tuple[Any, ...], whole: tuple[int, ...]) -> None:
    assert Schedule.of(weights).weights_at(0) == whole


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20))
def test_weights_that_no_whole_numbers_express_are_rounded_by_less_than_stated(weights: list[float]) -> None:
    whole, total = Schedule.of(weights).weights_at(0), sum(map(Fraction, weights))
    assert all(type(each) is int and each > 0 for each in whole)
    for weight, found in zip(weights, whole, strict=True):
        assert abs(Fraction(found, sum(whole)) - Fraction(weight) / total) < len(weights) / 2**30


def test_the_finest_weights_are_exact_to_the_last_sample() -> None:
    mixture = Mixture(1, Schedule.of((1, 2**31 - 1)))
    assert mixture.counts(2**62).tolist() == [2**31, 2**62 - 2**31]
    assert mixture.counts(2**62 - 2**31).tolist() == [2**31 - 1, (2**31 - 1) ** 2]
    position = mixture.position_of(0, 2**31 - 1)
    assert position is not None
    assert mixture.counts(position)[0] == 2**31 - 1
    assert mixture.counts(position + 1)[0] == 2**31


def test_what_is_out_of_range_is_refused() -> None:
    schedule = Schedule.of((1, 2))
    mixture = Mixture(1, schedule)
    for start, count in ((-1, 2), (0, -1), (2**62, 1), (2**62 - 1, 2)):
        with pytest.raises(ValueError, match="positions go from 0"):
            mixture.locate(start, count)
    first, last = 0, 2**62 - 1
    streams, indices = mixture.locate_at(np.array([last, first]))
    for place, position in enumerate((last, first)):
        own_stream, own_index = mixture.locate(position, 1)
        assert (streams[place], indices[place]) == (own_stream[0], own_index[0])
    for position in (-1, 2**62 + 1):
        with pytest.raises(ValueError, match="positions go from 0"):
            mixture.counts(position)
        with pytest.raises(ValueError, match="positions go from 0"):
            schedule.weights_at(position)
        with pytest.raises(ValueError, match="positions go from 0"):
            mixture.locate_at(np.array([0, position]))
    with pytest.raises(ValueError, match="positions go from 0"):
        mixture.locate_at(np.array([2**62]))
    for stream, index in ((-1, 0), (2, 0), (0, -1)):
        with pytest.raises(IndexError, match=f"no sample {index} of stream {stream} of 2"):
            mixture.position_of(stream, index)
    with pytest.raises(ValueError, match="has 2 streams already"):
        schedule.padded(1)
    with pytest.raises(ValueError, match="2 weights, the first 1"):
        Schedule(((0, (1,)), (5, (1, 2))))
    for seed in (-1, 2**64, True, 1.5):
        with pytest.raises(ValueError, match="seed must be"):
            Mixture(seed, schedule)  # type: ignore[arg-type]


def test_mixtures_of_thousands_of_streams_are_exact() -> None:
    weights = np.arange(4096) % 3
    stream, index = Mixture(8, Schedule.of(weights.tolist())).locate(0, int(weights.sum()))
    np.testing.assert_array_equal(np.bincount(stream, minlength=4096), weights)
    assert index.max() == 1
