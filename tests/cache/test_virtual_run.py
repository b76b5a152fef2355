"""Runs in virtual time: what they read is what loaders read, and time obeys the network.

A busy machine makes a real run slower, never faster: its waits bound those of the simulated one from above
only. tests/benchmarks/bench_virtual_run.py shows both sides.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.belady import min_fetched_bytes
from shardkit.cache.entry import sealed_size
from shardkit.cache.planner import Pace
from shardkit.order.order import Order, OrderSpec
from shardkit.order.residency import shard_uses
from support.virtual_run.fetching import Link
from support.virtual_run.real import CASES, Case, compare, write_dataset
from support.virtual_run.run import Outcome, simulate
from support.virtual_run.scenario import (
    AllUses,
    Demand,
    Network,
    NodeUses,
    Scenario,
    Shards,
)

ROWS, SAMPLE_BYTES = 32, 1000
SHARD_BYTES = ROWS * SAMPLE_BYTES


def scenario(**changes: Any) -> Scenario:
    shards = changes.pop("shards", 24)
    settings: dict[str, Any] = {
        "shards": Shards(np.full(shards, ROWS), np.full(shards, SHARD_BYTES), SAMPLE_BYTES),
        "gpus_per_node": 2,
        "batch_size": 4,
        "lanes": 4,
        "window": 24,
        "cache_bytes": 1 << 40,
        "steps": 60,
        "step_seconds": 0.01,
        "network": Network(node_bytes_per_second=1e9, connection_bytes_per_second=1e9, latency_seconds=0.001),
    }
    return Scenario(**(settings | changes))


@given(
    st.integers(1, 40),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 8),
    st.integers(1, 50),
    st.integers(0, 2**32),
)
@settings(max_examples=8, deadline=None)
def test_nodes_read_what_the_order_says_and_foresee_it(
    shards: int, nodes: int, batch: int, lanes: int, window: int, seed: int
) -> None:
    run = scenario(
        shards=shards, nodes=nodes, batch_size=batch, lanes=lanes, window=window, seed=seed, gpus_per_node=1
    )
    order = run.order()
    demand, every = Demand(run, order), AllUses(order)
    size = run.global_batch
    steps = 2 * order.samples // size + 1  # beyond an epoch
    chosen = (nodes - 1,) if nodes > 1 else ()
    some = Demand(replace(run, simulated=chosen), order) if chosen else demand
    for node in range(nodes):
        part = run.part(node)
        for first, stop in [(0, 1), (1, min(4, steps)), (steps - 1, steps)]:
            if first >= stop:
                continue
            plain: dict[int, int] = {}
            for step in range(first, stop):
                for shard in order.locate(order.global_batch(step * size, size)[part]).shard.tolist():
                    plain[shard] = plain.get(shard, 0) + 1
            found, rows = demand.rows(node, first, stop)
            assert dict(zip(found.tolist(), rows.tolist(), strict=True)) == plain
            if node in chosen:
                assert [a.tolist() for a in some.rows(0, first, stop)] == [found.tolist(), rows.tolist()]
        uses = NodeUses(every, run.lanes_of(node), last_epoch=2)
        for epoch in (0, 2):
            expected = shard_uses(order, epoch, run.lanes_of(node))
            own = uses.uses(epoch)
            assert uses.numbers[own.shard].tolist() == expected.shard.tolist()
            assert (own.begin.tolist(), own.end.tolist()) == (expected.begin.tolist(), expected.end.tolist())


def test_a_node_s_own_numbers_name_the_shards_of_its_lanes() -> None:
    order = Order(np.full(64, ROWS), OrderSpec(3, 8, 16))
    every = AllUses(order)
    for lanes in (range(2), range(5, 6)):
        uses = NodeUses(every, lanes, last_epoch=0)
        assert uses.shards < 64
        for epoch in (0, 1):
            expected = shard_uses(order, epoch, lanes)
            own = uses.uses(epoch)
            assert uses.numbers[own.shard].tolist() == expected.shard.tolist()
            assert own.begin.tolist() == expected.begin.tolist()
        assert uses.local(uses.numbers).tolist() == list(range(uses.shards))


def test_a_link_shares_its_bandwidth_among_flows_up_to_what_each_may_take() -> None:
    link = Link(100.0, 40.0)
    link.add(1, 80.0)
    assert link.next_end() == 2.0  # alone at 40
    link.advance(1.0)
    link.add(2, 100.0)
    link.add(3, 10.0)
    link.add(4, 1000.0)  # four at 25
    assert link.next_end() == pytest.approx(1.4)
    link.advance(1.4)
    assert link.pop() == 3
    assert link.rate == pytest.approx(100 / 3)
    assert link.next_end() == pytest.approx(1.4 + 30 / (100 / 3))
    assert link.moved == pytest.approx(40 + 0.4 * 100)


def test_a_dataset_that_fits_is_fetched_once_however_often_it_is_passed() -> None:
    run = scenario(steps=400)  # four epochs of 96 steps and more
    outcome = simulate(run)
    [node] = outcome.nodes
    assert node.fetched_bytes == int(run.shards.bytes.sum())
    assert (node.refetched_bytes, node.evictions, node.bypassed) == (0, 0, 0)
    assert node.used_bytes >= 400 * 8 * SAMPLE_BYTES
    assert outcome.waits[50:].max() == 0
    assert outcome.seconds == pytest.approx(outcome.waits.sum() + 400 * 0.01)


def test_the_same_scenario_gives_the_same_outcome_and_chance_has_a_seed() -> None:
    network = Network(latency_p99_seconds=0.2, throttled_share=0.2)
    run = scenario(network=network, cache_bytes=8 * SHARD_BYTES)
    figures = simulate(run).to_dict()
    assert simulate(run).to_dict() == figures
    assert simulate(replace(run, seed=18)).to_dict() != figures


def test_a_network_too_slow_takes_as_long_as_the_bytes_need() -> None:
    # 8 rows a step of 1,000 bytes: 8 KB in 10 ms is 800 KB/s, and the link has 200.
    network = Network(node_bytes_per_second=2e5, connection_bytes_per_second=1e9, latency_seconds=0)
    run = scenario(steps=200, network=network)
    outcome = simulate(run)
    figures = outcome.to_dict()
    [node] = outcome.nodes
    assert outcome.seconds >= node.fetched_bytes / 2e5 * 0.99
    alone = 24 * SHARD_BYTES / 2e5
    assert alone <= outcome.seconds <= alone + 200 * 0.01 + 0.1
    assert figures["stalled_steps"] > 5
    assert figures["stall_seconds"] == pytest.approx(outcome.waits[1:].sum(), rel=0.01)


@pytest.mark.parametrize("cached", [8, 16])
def test_a_small_cache_fetches_about_as_little_as_an_all_knowing_one(cached: int) -> None:
    run = scenario(steps=288, cache_bytes=cached * sealed_size(SHARD_BYTES), step_seconds=0.1)
    [node] = simulate(run).nodes
    order = run.order()
    steps = [set(order.locate(order.global_batch(step * 8, 8)).shard.tolist()) for step in range(run.steps)]
    bound = min_fetched_bytes(steps, run.shards.bytes.tolist(), cached * SHARD_BYTES)
    assert bound * 0.99 <= node.fetched_bytes + node.row_reads * SAMPLE_BYTES * ROWS
    assert node.fetched_bytes <= 1.35 * bound


def test_a_cache_without_room_reads_rows_singly_and_never_holds_more_than_it_may() -> None:
    run = scenario(cache_bytes=3 * sealed_size(SHARD_BYTES), steps=120)
    [node] = simulate(run).nodes
    assert node.cached_bytes <= run.cache_bytes
    assert node.bypassed > 0
    assert node.row_reads > 32


def test_nodes_that_share_lanes_fetch_the_same_shards() -> None:
    def reads(lanes: int) -> float:
        run = scenario(
            shards=1024, nodes=4, gpus_per_node=1, batch_size=8, lanes=lanes, window=64, steps=50,
            cache_bytes=100 * SHARD_BYTES,
        )  # fmt: skip
        return float(simulate(run).to_dict()["read_amplification"])

    assert reads(4) < 1.7
    assert 3.0 < reads(1) < 6.0  # four nodes read the lane


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("nodes", "gpus", "steps", "most"),
    [(256, 8, 100_000, 1.1), (2048, 2, 10_000, 2.0)],
)
def test_nodes_of_a_large_run_read_little_more_than_they_use(
    nodes: int, gpus: int, steps: int, most: float
) -> None:
    """60 TB in 450,000 shards, one sequence for each rank."""
    sizes = np.full(450_000, 1 << 27, dtype=np.int64)
    run = Scenario(
        shards=Shards(sizes >> 14, sizes, 1 << 14),
        nodes=nodes,
        gpus_per_node=gpus,
        batch_size=1,
        cache_bytes=100_000_000_000,
        steps=steps,
        simulated=(nodes // 2,),
    )
    assert 0.95 <= simulate(run).to_dict()["read_amplification"] <= most


def test_sampled_nodes_do_as_they_do_among_all() -> None:
    run = scenario(shards=128, nodes=8, gpus_per_node=1, batch_size=8, lanes=8, window=64, steps=100)
    # No latency and ample bandwidth: nobody waits, so nobody's time depends on others.
    run = replace(run, network=Network(node_bytes_per_second=1e15, connection_bytes_per_second=1e15,
                                       latency_seconds=0))  # fmt: skip
    everybody = simulate(run)
    some = simulate(replace(run, simulated=(2, 5)))
    assert [n.fetched_bytes for n in some.nodes] == [everybody.nodes[n].fetched_bytes for n in (2, 5)]
    assert [n.hits + n.misses for n in some.nodes] == [
        everybody.nodes[n].hits + everybody.nodes[n].misses for n in (2, 5)
    ]
    assert some.to_dict()["requests"] == pytest.approx(everybody.to_dict()["requests"], rel=0.2)


def test_a_store_that_says_503_costs_retries_and_time() -> None:
    slow = Network(throttled_share=0.5, latency_seconds=0.05)
    outcome = simulate(scenario(network=slow))
    calm = simulate(scenario(network=replace(slow, throttled_share=0.0)))
    assert outcome.to_dict()["throttled_per_node"] > 0.5 * calm.to_dict()["requests"]
    assert outcome.to_dict()["requests"] > calm.to_dict()["requests"]
    assert outcome.waits.sum() > calm.waits.sum()
    assert outcome.nodes[0].fetched_bytes == calm.nodes[0].fetched_bytes


def test_the_first_batch_takes_one_request_and_not_a_shard() -> None:
    network = Network(latency_seconds=0.05, connection_bytes_per_second=1000.0 * SAMPLE_BYTES)
    outcome: Outcome = simulate(scenario(network=network))
    assert 0.05 <= outcome.first_batch_seconds < 0.06


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": 0}, "nodes must be at least 1"),
        ({"simulated": (1,)}, "numbered from 0 to 0"),
        ({"cache_bytes": -1}, "must not be negative"),
        ({"shards": 0}, "a dataset needs samples"),
    ],
)
def test_scenarios_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scenario(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"node_bytes_per_second": 0.0}, {"latency_seconds": -1.0}, {"throttled_share": 0.95},
        {"latency_seconds": 0.1, "latency_p99_seconds": 0.05}, {"store_bytes_per_second": 0.0},
    ],
)  # fmt: skip
def test_networks_that_cannot_be_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"bandwidths|99th percentile|share of throttled"):
        Network(**changes)


def test_lanes_and_window_are_the_loaders_defaults_for_these_shards() -> None:
    sizes, row_bytes = np.full(10_000, 1 << 26), 1 << 14
    run = scenario(nodes=8, gpus_per_node=8, batch_size=8)
    run = replace(run, shards=Shards(sizes // row_bytes, sizes, row_bytes), lanes=0, window=0)
    assert (run.lanes, run.window) == (256, 8192)
    given = replace(run, lanes=0, window=9)
    assert (given.lanes, given.window) == (256, 9)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("simulated") / "data"
    write_dataset(folder)
    return folder


@pytest.mark.extended
@pytest.mark.parametrize("case", CASES[:4], ids=lambda case: case.name)
def test_a_simulated_run_fetches_and_waits_as_the_real_one(case: Case, dataset: Path, tmp_path: Path) -> None:
    found = compare(case, dataset, tmp_path)
    assert found.fetched_ratio == pytest.approx(1, abs=0.1)
    assert abs(found.row_reads[0] - found.row_reads[1]) <= 32
    assert found.first_seconds[0] >= 0.9 * found.first_seconds[1]
    assert found.seconds[0] >= 0.9 * found.seconds[1]


def test_caches_fill_at_a_few_times_what_the_run_uses_and_the_first_batches_do_not_wait() -> None:
    """Summed over the nodes, second by second: what a store has to give when all of them start together."""
    sizes = np.full(4000, 16 << 20, dtype=np.int64)
    run = Scenario(
        shards=Shards(sizes >> 14, sizes, 1 << 14),
        nodes=16,
        gpus_per_node=1,
        batch_size=64,
        cache_bytes=10**10,
        steps=180,
        step_seconds=1.0,
        network=Network(node_bytes_per_second=2.5e9),
    )
    paced, free = simulate(run), simulate(replace(run, pace=Pace(factor=1000.0)))
    peaks = [outcome.to_dict()["peak_prefill_per_byte_used"] for outcome in (paced, free)]
    assert 0 < peaks[0] <= 5
    assert peaks[1] > 2 * peaks[0], "it is the pace that holds it back"
    assert paced.first_batch_seconds < 1.0
    assert paced.waits[1:].max() == 0.0
