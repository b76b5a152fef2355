"""Batches of every rank, planned without any file."""

from __future__ import annotations

from typing import get_args

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardkit.order.batches import BatchPlan, StepSizes
from shardkit.order.order import Order, OrderSpec
from shardkit.order.run_settings import Tail

TAILS = get_args(Tail)


def make_order(samples: int, lanes: int = 4, window: int = 16) -> Order:
    shards = np.full(max(1, samples // 7), 7)
    shards[-1] += samples - shards.sum()
    return Order(shards, OrderSpec(seed=3, lanes=lanes, window=window))


def epoch_ids(plan: BatchPlan, order: Order, position: int = 0) -> tuple[npt.NDArray[np.int64], int]:
    """(sample ids (batches, batch size) of the epoch from `position` on, the position after it)."""
    steps = plan.steps(order, position, plan.batches_left(position))
    assert (
        steps.sample_id.shape == steps.shard.shape == steps.row.shape == (len(steps.after), plan.batch_size)
    )
    return steps.sample_id, steps.after[-1]


sizes = st.tuples(
    st.integers(1, 60), st.integers(1, 9), st.integers(1, 5), st.sampled_from(TAILS), st.integers(1, 9)
)


@given(sizes)
def test_steps_name_the_position_of_each_sample(case: tuple[int, int, int, Tail, int]) -> None:
    samples, batch_size, ranks, tail, lanes = case
    if tail == "drop" and samples < batch_size * ranks:
        return
    order, found = make_order(samples, lanes), []
    for rank in range(ranks):
        plan = BatchPlan(samples, batch_size, rank, ranks, tail)
        steps = plan.steps(order, samples, plan.batches_left(samples))  # of the second epoch
        is_real = steps.sample_id >= 0
        located = order.locate(steps.position[is_real])
        assert (located.sample_id == steps.sample_id[is_real]).all()
        assert (steps.position[~is_real] == -1).all()
        found += steps.position[is_real].tolist()
    assert sorted(found) == list(range(samples, samples + len(found)))


@given(sizes)
def test_an_epoch_delivers_every_sample_once_over_all_ranks(case: tuple[int, int, int, Tail, int]) -> None:
    samples, batch_size, ranks, tail, lanes = case
    if tail == "drop" and samples < batch_size * ranks:
        return
    order = make_order(samples, lanes)
    plans = [BatchPlan(samples, batch_size, rank, ranks, tail) for rank in range(ranks)]
    ids, ends = zip(*(epoch_ids(plan, order) for plan in plans), strict=True)
    assert len(set(ends)) == 1, "all ranks must agree on the next position"
    assert len({part.shape for part in ids}) == 1, "all ranks must have equally many batches"
    everything = np.concatenate([part.ravel() for part in ids])
    real = everything[everything >= 0]
    if tail == "pad":
        assert sorted(real) == list(range(samples))
        assert ends[0] == samples
    elif tail == "drop":
        whole = samples // (batch_size * ranks) * batch_size * ranks
        assert len(set(real.tolist())) == len(real) == whole
        assert ends[0] == samples
    else:
        counts = np.bincount(real, minlength=samples)
        assert counts.min() >= 1
        assert len(real) == ends[0] == -(-samples // (batch_size * ranks)) * batch_size * ranks


@given(sizes, st.integers(0, 3))
def test_the_set_of_a_batch_does_not_depend_on_the_number_of_ranks(
    case: tuple[int, int, int, Tail, int], start: int
) -> None:
    samples, batch_size, ranks, tail, lanes = case
    if tail == "drop" and samples < batch_size * ranks:
        return
    order = make_order(samples, lanes)
    alone = BatchPlan(samples, batch_size * ranks, 0, 1, tail)
    expected, _ = epoch_ids(alone, order, start)
    parts = [
        epoch_ids(BatchPlan(samples, batch_size, rank, ranks, tail), order, start)[0] for rank in range(ranks)
    ]
    for got, whole in zip(np.concatenate(parts, axis=1), expected, strict=True):
        assert sorted(got) == sorted(whole)
        if (whole >= 0).all():
            assert got.tolist() == whole.tolist(), "ranks take consecutive parts"


@given(sizes, st.integers(0, 200))
def test_counting_and_stepping_agree_at_any_position(
    case: tuple[int, int, int, Tail, int], position: int
) -> None:
    samples, batch_size, ranks, tail, _ = case
    if tail == "drop" and samples < batch_size * ranks:
        return
    plan = BatchPlan(samples, batch_size, 0, ranks, tail)
    left, epoch, walked = plan.batches_left(position), plan.epoch(position), plan.start(position)
    for _ in range(left):
        assert plan.epoch(walked) == epoch
        walked = plan.after(walked)
    assert plan.epoch(walked) > epoch


def test_planning_in_pieces_gives_the_same_batches() -> None:
    order, plan = make_order(53), BatchPlan(53, 2, 1, 3, "pad")
    whole = plan.steps(order, 0, 9)
    position, pieces = 0, []
    for count in (1, 3, 4, 1):
        piece = plan.steps(order, position, count)
        pieces.append(piece.sample_id)
        position = piece.after[-1]
    assert np.array_equal(np.concatenate(pieces), whole.sample_id)
    assert position == whole.after[-1] == 53


def test_padding_is_spread_evenly_so_that_no_rank_gets_none_but_padding() -> None:
    order = make_order(53)
    last = [BatchPlan(53, 4, rank, 4, "pad").steps(order, 48, 1).sample_id[0] for rank in range(4)]
    assert [int((ids >= 0).sum()) for ids in last] == [1, 1, 1, 2]
    assert all((ids[1 if r < 3 else 2 :] == -1).all() for r, ids in enumerate(last))


def test_a_batch_larger_than_the_epoch_carries_over_several() -> None:
    ids, end = epoch_ids(BatchPlan(5, 12, 0, 1, "carry"), make_order(5, lanes=1))
    assert end == 12
    assert np.bincount(ids.ravel()).tolist() in ([2, 2, 3, 2, 3], *_two_of_three())


def _two_of_three() -> list[list[int]]:
    return [[2 + (i in (a, b)) for i in range(5)] for a in range(5) for b in range(a)]


def test_drop_refuses_a_batch_that_no_epoch_could_fill() -> None:
    with pytest.raises(ValueError, match="would deliver nothing"):
        BatchPlan(7, 2, 0, 4, "drop")


@pytest.mark.parametrize("size", [0, -1, 1.5, True, 1 << 30])
def test_a_bad_batch_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="batch_size"):
        BatchPlan(7, size, 0, 1, "carry")


def plain_steps(changes: list[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """(start, end) of all steps up to `end`: each takes the latest size whose position it has reached."""
    steps, start = [], 0
    while start < end:
        size = [size for position, size in changes if position <= start][-1]
        steps.append((start, start + size))
        start += size
    return steps


changes = st.dictionaries(st.integers(1, 90), st.integers(1, 17), max_size=5).flatmap(
    lambda later: st.integers(1, 17).map(lambda first: [(0, first), *sorted(later.items())])
)


@given(changes)
def test_each_position_is_in_the_step_that_stepping_from_the_start_finds(
    changes: list[tuple[int, int]],
) -> None:
    sizes, steps = StepSizes.of(changes), plain_steps(changes, 150)
    assert StepSizes.from_list(sizes.to_list()) == sizes
    for start, end in steps:
        later = {b - a for a, b in steps if a >= end} | {changes[-1][1]}
        for position in range(start, end):
            assert sizes.step_at(position) == (start, end)
            assert set(sizes.sizes_from(position)) == {end - position} | later


@given(changes, st.integers(0, 100), st.integers(1, 17))
def test_a_changed_size_holds_from_the_next_step_on(
    changes: list[tuple[int, int]], position: int, size: int
) -> None:
    before = StepSizes.of(changes)
    changed = before.changed(position, size)
    assert changed.agrees_before(before, position)
    steps = plain_steps(changes, position)
    edge = steps[-1][1] if steps else 0
    expected = [*steps, *((edge + n * size, edge + (n + 1) * size) for n in range(4))]
    assert [changed.step_at(start) for start, _ in expected] == expected


@pytest.mark.parametrize("sizes", [0, -4, [], [(5, 4)], [(0, 4), (0, 5)], [(0, 4), (9, 5), (8, 5)], [(0, 0)]])
def test_sizes_of_no_steps_are_refused(sizes: int | list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="global_batch"):
        StepSizes.of(sizes)


@given(
    samples=st.integers(1, 200),
    batch_size=st.integers(1, 12),
    world_size=st.integers(1, 5),
    tail=st.sampled_from(["carry", "drop", "pad"]),
)
def test_batches_are_counted_as_they_come_and_every_position_has_the_one_that_delivers_it(
    samples: int, batch_size: int, world_size: int, tail: Tail
) -> None:
    assume(tail != "drop" or samples >= batch_size * world_size)
    plan = BatchPlan(samples, batch_size, 0, world_size, tail)
    cursor, delivered = (0, 0), set()
    for step in range(1, 3 * samples // plan.global_batch + 6):
        start = plan.start(cursor[0])
        first, count = plan.span_at(plan.start_of_step(step))
        assert first == start
        assert count == (min(plan.global_batch, plan.after(start) - start))
        delivered |= set(range(first, first + count))
        assert {plan.step_of(position) for position in range(first, first + count)} == {step}
        parts = [(count * r // world_size, count * (r + 1) // world_size) for r in range(world_size)]
        expected = [(rank, i) for rank, (low, high) in enumerate(parts) for i in range(high - low)]
        assert [plan.rank_of(index, count) for index in range(count)] == expected
        cursor = plan.advance(cursor, 1)
    for position in range(max(delivered)):
        assert (plan.step_of(position) is None) == (position not in delivered)
