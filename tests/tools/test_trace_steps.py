"""Steps and ranks of positions, both ways, as the loader's own plan makes them."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from shardkit.loaders.plan import BatchPlan
from shardkit.order.run_settings import Tail
from shardkit.tools.trace.run import rank_of, span_at, start_of_step, step_of


@given(
    samples=st.integers(1, 200),
    batch_size=st.integers(1, 12),
    world_size=st.integers(1, 5),
    tail=st.sampled_from(["carry", "drop", "pad"]),
)
def test_steps_are_those_of_a_loader_and_every_position_has_the_step_that_delivers_it(
    samples: int, batch_size: int, world_size: int, tail: Tail
) -> None:
    assume(tail != "drop" or samples >= batch_size * world_size)
    plan = BatchPlan(samples, batch_size, 0, world_size, tail)
    cursor, delivered = (0, 0), set()
    for step in range(3 * samples // plan.global_batch + 5):
        start = plan.start(cursor[0])
        first, count = span_at(plan, start_of_step(plan, step))
        assert first == start
        assert count == (min(plan.global_batch, plan.after(start) - start))
        delivered |= set(range(first, first + count))
        assert {step_of(plan, position) for position in range(first, first + count)} == {step}
        parts = [(count * r // world_size, count * (r + 1) // world_size) for r in range(world_size)]
        expected = [(rank, i) for rank, (low, high) in enumerate(parts) for i in range(high - low)]
        assert [rank_of(plan, index, count) for index in range(count)] == expected
        cursor = plan.advance(cursor, 1)
    for position in range(max(delivered)):
        assert (step_of(plan, position) is None) == (position not in delivered)
