"""The audit of plans: whole for any sizes, ranks, tails and restarts; it catches a plan that is broken."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardkit.loaders import Stream
from shardkit.order.exclusions import Exclusions
from shardkit.tools.audit.plan import Leg, PlannedRun, legs_of_resumes
from shardkit.tools.audit.sums import SampleHash, Tally
from support.audit_runs import RemappedOrder, index_only, kinds, plan_report

Ints = npt.NDArray[np.int64]
SIZES = [100, 37, 0, 150, 213]
SAMPLES = sum(SIZES)

runs = st.fixed_dictionaries(
    {
        "batch_sizes": st.lists(st.integers(1, 9), min_size=1, max_size=3),
        "world_sizes": st.lists(st.integers(1, 5), min_size=1, max_size=3),
        "tail": st.sampled_from(["carry", "drop", "pad"]),
        "shuffle": st.sampled_from(["window", "window", "global", "none"]),
        "epochs": st.integers(1, 3),
        "resumes": st.lists(st.integers(1, 40), max_size=3),
        "workers": st.integers(0, 3),
        "seed": st.integers(0, 2**64 - 1),
        "lanes": st.integers(1, 12) | st.sampled_from([32, 64, 100]),
        "window": st.integers(1, 60),
    }
)


@settings(deadline=None, max_examples=40)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=8), run=runs)
def test_any_plan_delivers_each_sample_once(sizes: list[int], run: dict[str, Any]) -> None:
    sizes[0] += 45  # "drop" needs a global batch
    report = plan_report(index_only(sizes), **run)
    assert report.ok, [str(finding) for finding in report.findings.kept]
    samples, epochs = sum(sizes), run["epochs"]
    for walk in report.walks:
        assert walk.epochs_proved >= epochs
        assert walk.samples + walk.dropped == walk.end >= epochs * samples
        # "drop" may drop more when a larger global batch takes over, and then needs one more step.
        if run["tail"] == "pad" or (run["tail"] == "drop" and walk.runs == 1):
            assert walk.end == epochs * samples
        assert bool(walk.padding) <= (run["tail"] == "pad")
        assert bool(walk.dropped) <= (run["tail"] == "drop")


@settings(deadline=None, max_examples=8)
@given(
    sizes=st.lists(st.integers(9, 40), min_size=2, max_size=4),
    weights=st.lists(st.integers(1, 5), min_size=4, max_size=4),
    run=runs,
    left_out=st.sets(st.integers(0, 2)),
)
def test_any_mixture_delivers_each_streams_samples_once_an_epoch_of_its_own(
    sizes: list[int], weights: list[int], run: dict[str, Any], left_out: set[int]
) -> None:
    sizes[0] += 45
    streams = [
        Stream(
            index_only([size // 2, size - size // 2]),
            weight,
            name=f"s{n}",
            exclude=left_out if not n else None,
        )
        for n, (size, weight) in enumerate(zip(sizes, weights, strict=False))
    ]
    schedule = [(0, weights[: len(sizes)]), (53, weights[: len(sizes)][::-1])]
    report = plan_report(streams, **run, epoch_samples=sum(sizes), schedule=schedule)
    assert report.ok, [str(finding) for finding in report.findings.kept]


def test_steps_hold_the_same_samples_for_all_world_sizes_of_one_global_batch() -> None:
    report = plan_report(
        index_only(SIZES), batch_sizes=(24, 12, 8, 3, 1), world_sizes=(1, 2, 3, 8, 24), resumes=[7, 30]
    )
    assert report.ok
    assert len({walk.digest for walk in report.walks}) == 1
    assert [walk.runs for walk in report.walks] == [1, 1, 1, 1, 1, 3]


def test_legs_of_a_resumed_walk_take_turns() -> None:
    legs = [Leg(4, 1), Leg(2, 2)]
    assert legs_of_resumes(legs, [9, 5, 9]) == [Leg(4, 1, 5), Leg(2, 2, 9), Leg(4, 1)]


def test_tallies_tell_multisets_apart_and_do_not_depend_on_order() -> None:
    hashing = SampleHash(bytes(24))
    rng = np.random.default_rng(3)
    ids = rng.permutation(5000)

    def tally(*parts: Ints) -> Tally:
        found = Tally()
        for part in parts:
            found.add(part, hashing(part))
        return found

    whole = tally(np.arange(5000))
    assert tally(ids[:777], ids[777:]) == whole
    wrong = ids.copy()
    wrong[[1, 2]] = wrong[1] + 1, wrong[2] - 1  # with the same count and sum
    assert tally(wrong).ids == whole.ids
    assert tally(wrong) != whole
    low, high = hashing(np.arange(1 << 16))
    assert len(set(low.tolist())) == len(set(high.tolist())) == 1 << 16
    for word in (low, high):  # each bit is set in about half of the hashes
        bits = np.unpackbits(word.view(np.uint8)).reshape(-1, 64).mean(axis=0)
        assert abs(bits - 0.5).max() < 0.02


def spoiled(remap: Any) -> Any:
    """Breaks the order of a planned run."""

    def broken(run: PlannedRun) -> None:
        run._arrangement.order = RemappedOrder(run._arrangement.order, remap)  # type: ignore[assignment]

    return broken


@settings(deadline=None, max_examples=25)
@given(
    place=st.integers(0, 2 * SAMPLES - 1),
    other=st.integers(0, SAMPLES - 1),
    world_size=st.integers(1, 4),
    tail=st.sampled_from(["carry", "pad"]),
)
@example(place=500, other=1, world_size=2, tail="carry")  # in the step that has samples of two epochs
def test_one_wrong_sample_anywhere_is_found_and_named(
    place: int, other: int, world_size: int, tail: str
) -> None:
    epoch = place // SAMPLES
    taken = epoch * SAMPLES + other
    truth: dict[int, int] = {}

    def remap(positions: Ints) -> Ints:
        return np.where(positions == place, taken, positions)

    def broken(run: PlannedRun) -> None:
        found = run._arrangement.order.locate(np.array([place, taken]))
        truth.update(enumerate(found.sample_id.tolist()))
        spoiled(remap)(run)

    report = plan_report(
        index_only(SIZES), world_sizes=[world_size], tail=tail, window=20, lanes=4, broken=broken
    )
    if place == taken:
        assert report.ok
        return
    found = {finding.kind: finding for finding in report.findings.kept}
    assert {"lost", "repeated", "epoch"} <= set(found)
    assert (found["lost"].sample, found["lost"].epoch, found["lost"].position) == (truth[0], epoch, place)
    assert (found["repeated"].sample, found["repeated"].epoch) == (truth[1], epoch)
    if tail == "carry":
        assert found["lost"].step == place // (4 * world_size) + 1


def test_a_rank_that_is_a_step_behind_is_named() -> None:
    def broken(run: PlannedRun) -> None:
        inner = run._of_rank

        def late(plan: Any, count: int) -> Ints:
            ids = inner(plan, count)
            return np.concatenate([ids[:3], ids[2:-1]]) if plan.rank == 1 else ids

        run._of_rank = late  # type: ignore[method-assign]

    report = plan_report(index_only(SIZES), world_sizes=[2], epochs=1, broken=broken)
    first = next(finding for finding in report.findings.kept if finding.kind == "part")
    assert (first.rank, first.step, first.problem) == (1, 4, "received the part of rank 1 at step 3")


def test_a_restart_at_a_wrong_position_is_found() -> None:
    def broken(run: PlannedRun) -> None:
        inner = run.restart

        def restart(batch_size: int, world_size: int) -> None:
            inner(batch_size, world_size)
            run._cursor = (run._cursor[0] + 8, run._cursor[1] + 1)

        run.restart = restart  # type: ignore[method-assign]

    report = plan_report(index_only(SIZES), world_sizes=[2, 1], resumes=[10], epochs=1, broken=broken)
    problems = {finding.kind: finding.problem for finding in report.findings.kept}
    assert "continues at position" in problems["steps"]
    lost = [(f.step, f.position) for f in report.findings.kept if f.kind == "lost"]
    assert lost == [(11 + n // 4, 80 + n) for n in range(8)]


def test_all_wrong_shards_are_counted_and_the_first_are_listed() -> None:
    def first_one(positions: Ints) -> Ints:
        return positions // 1200 * 1200

    report = plan_report(index_only([1] * 1200), world_sizes=[1], epochs=1, broken=spoiled(first_one))
    assert report.findings.counts["shard"] == report.shard_count == 1200
    assert [use.shard for use in report.shards] == [f"shard.{n:05d}.mds" for n in range(1000)]
    assert sum(finding.kind == "shard" for finding in report.findings.kept) == 100


def test_exclusions_that_are_not_kept_are_found() -> None:
    dataset = index_only(SIZES)
    report = plan_report([Stream(dataset, exclude=[(5, 9), 300])], epochs=1)
    assert report.ok
    assert report.walks[0].end == 496  # whole steps of 4
    assert report.walks[0].epochs_proved == 1

    def broken(run: PlannedRun) -> None:
        order = run._arrangement.order
        order.exclusions = Exclusions.of([(15, 19), 310])  # type: ignore[union-attr]

    report = plan_report([Stream(dataset, exclude=[(5, 9), 300])], world_sizes=[1], epochs=1, broken=broken)
    assert {"excluded", "lost", "epoch"} <= kinds(report)
    lost = {finding.sample for finding in report.findings.kept if finding.kind == "lost"}
    assert lost == {15, 16, 17, 18, 310}


@pytest.mark.extended
def test_memory_does_not_grow_with_samples() -> None:
    import tracemalloc

    peaks = []
    for samples in (300_000, 1_200_000):
        dataset = index_only([samples // 50] * 50)
        plan_report(dataset, batch_sizes=[8], world_sizes=[4], epochs=1)
        tracemalloc.start()
        assert plan_report(dataset, batch_sizes=[8], world_sizes=[4], epochs=1).ok
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] * 1.1
