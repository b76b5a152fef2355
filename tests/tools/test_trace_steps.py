"""Steps and ranks of positions, both ways, as the loader's own plan makes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.loaders.plan import BatchPlan
from shardkit.tools.trace.run import Steps, Tail


@given(
    samples=st.integers(1, 200),
    batch_size=st.integers(1, 12),
    world_size=st.integers(1, 5),
    tail=st.sampled_from(["carry", "drop", "pad"]),
)
def test_steps_are_those_of_a_loader_and_every_position_has_the_step_that_delivers_it(
    samples: int, batch_size: int, world_size: int, tail: Tail
) -> None:
    if tail == "drop" and samples < batch_size * world_size:
        with pytest.raises(ValueError, match="delivers nothing"):
            Steps(samples, batch_size, world_size, tail)
        return
    steps = Steps(samples, batch_size, world_size, tail)
    plan = BatchPlan(samples, batch_size, 0, world_size, tail)
    cursor, delivered = (0, 0), set()
    for step in range(3 * samples // plan.global_batch + 5):
        start = plan.start(cursor[0])
        first, count = steps.span(step)
        assert first == start
        assert count == (min(plan.global_batch, plan.after(start) - start))
        delivered |= set(range(first, first + count))
        assert {steps.step_of(position) for position in range(first, first + count)} == {step}
        parts = [steps.part(rank, count) for rank in range(world_size)]
        expected = [(rank, i) for rank, (low, high) in enumerate(parts) for i in range(high - low)]
        assert [steps.rank_of(index, count) for index in range(count)] == expected
        cursor = plan.advance(cursor, 1)
    for position in range(max(delivered)):
        assert (steps.step_of(position) is None) == (position not in delivered)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_sizes_below_one_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Steps(*sizes)
