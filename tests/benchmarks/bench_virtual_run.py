"""Simulated runs against the real loader, and how fast simulations are.

    python tests/benchmarks/bench_virtual_run.py compare|speed|nodes|shuffle [--runs 3] [--json]

compare   300 steps of the real loader behind a store with latency and bandwidth per connection (48 shards of
          1 MiB), and the same simulated: bytes of shards fetched, waits, time of the whole run. Medians of
          the real runs; a busy machine makes them slower.
speed     2,048 GPUs for 1,000 steps over 14.8e12 tokens in 882,149 shards: seconds of CPU and peak memory,
          which later rows share with those before
nodes     what nodes of runs of 4 to 2,048 read of the store for each byte that they use, with the default
          lanes and window and a cache of 100 GB a node: rows of 16 KiB, shards of 128 MiB (60 TB, 1 TB) and
          of 64 MiB, 10 Gbit/s a node, 50 ms a request, steps of a second, two nodes simulated
shuffle   batches of 4,096 of data that was never shuffled: distinct shards, pairs of samples of one shard
          against those of a true shuffle, and what all nodes have in use; beside streaming's py1e with 64
          canonical nodes and its default block, run by the library itself over a part of each node's span
"""

from __future__ import annotations

import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from figures import benchmark_parser, give
from shardkit.order.order import Order, OrderSpec, default_lanes, default_window
from support.peers import import_streaming
from support.virtual_run.real import CASES, compare, write_dataset
from support.virtual_run.run import simulate
from support.virtual_run.scenario import Scenario, Shards, spread_nodes

NODES, SHARDS, SHARD_BYTES, SAMPLE_BYTES = 256, 882_149, 1 << 26, 1 << 14
BATCH, NODES_OF_PY1E, PY1E_BLOCK = 4096, 64, 1 << 18
PART_SHARDS = 192  # of a canonical node: far more than a block spans


def comparison(runs: int) -> list[dict[str, Any]]:
    """Both sides of every case."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        write_dataset(Path(scratch) / "data")
        for case in CASES:
            found = [compare(case, Path(scratch) / "data", Path(scratch)) for _ in range(runs)]
            row: dict[str, Any] = {"case": case.name}
            for name in ("fetched_bytes", "row_reads", "first_seconds", "wait_seconds", "seconds"):
                both = [getattr(one, name) for one in found]
                row[name] = (statistics.median(real for real, _ in both), both[0][1])
            rows.append(row)
    return rows


def speed(runs: int) -> list[dict[str, Any]]:
    """Some nodes of a large run, and all of them."""
    samples = np.full(SHARDS, SHARD_BYTES // SAMPLE_BYTES, dtype=np.int64)
    sizes = np.full(SHARDS, SHARD_BYTES, dtype=np.int64)
    rows = []
    for simulated, cache_bytes in ((8, 100_000_000_000), (8, 500_000_000_000), (NODES, 20_000_000_000)):
        run = Scenario(
            shards=Shards(samples, sizes, SAMPLE_BYTES),
            delivered_bytes=2 * SAMPLE_BYTES,
            nodes=NODES,
            cache_bytes=cache_bytes,
            simulated=spread_nodes(NODES, simulated),
        )
        seconds = []
        for _ in range(runs):
            began = time.process_time()
            simulate(run)
            seconds.append(time.process_time() - began)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        rows.append(
            {
                "nodes_simulated": simulated,
                "cache_bytes": cache_bytes,
                "cpu_seconds": round(statistics.median(seconds), 1),
                "peak_rss_bytes": peak,
            }
        )
    return rows


def amplification(_: int) -> list[dict[str, Any]]:
    """Bytes read for each byte used; in these steps nodes pass 1 to 3 % of their part of 60 TB."""
    rows = []
    for shards, shard_bytes, nodes, gpus, steps in (
        (450_000, 1 << 27, 64, 8, 200_000),
        (450_000, 1 << 27, 100, 8, 200_000),
        (450_000, 1 << 27, 256, 8, 200_000),
        (450_000, 1 << 27, 1024, 8, 200_000),
        (450_000, 1 << 27, 2048, 2, 200_000),
        (900_000, 1 << 26, 2048, 8, 200_000),
        (7_500, 1 << 27, 16, 8, 200_000),
        (7_500, 1 << 27, 128, 8, 50_000),
        (1_600, 1 << 26, 4, 8, 100_000),
    ):
        sizes = np.full(shards, shard_bytes, dtype=np.int64)
        run = Scenario(
            shards=Shards(sizes // SAMPLE_BYTES, sizes, SAMPLE_BYTES),
            nodes=nodes,
            gpus_per_node=gpus,
            batch_size=1,
            cache_bytes=100_000_000_000,
            steps=steps,
            simulated=spread_nodes(nodes, 2),
        )
        found = simulate(run).to_dict()
        rows.append(
            {
                "shards": shards,
                "nodes": nodes,
                "sequences_a_node": gpus,
                "lanes": run.lanes,
                "window": run.window,
            }
            | {"read_per_byte_used": round(found["read_amplification"], 3)}
            | {"used_gb_a_node": round(found["used_bytes_per_node"] / 1e9, 1)}
        )
    return rows


def diversity(runs: int) -> list[dict[str, Any]]:
    """Ours and py1e's batches, of `runs` places in an epoch each."""
    rows = []
    for shards, shard_samples in ((468_750, 8192), (55_000, 4096), (7_500, 8192)):
        lanes = default_lanes(shards)
        window = default_window(shards * shard_samples, shards, lanes)
        order = Order(np.full(shards, shard_samples), OrderSpec(17, lanes, window))
        places = np.linspace(0, order.samples - BATCH, runs + 2).astype(np.int64)[1:-1].tolist()
        ours = [order.locate((place, BATCH)).shard for place in places]
        in_use = lanes * (window / shard_samples + 1)
        rows.append({"shards": shards, "order": f"{lanes} lanes, window {window:,}"})
        rows[-1] |= _diversity(ours, shards) | {"shards_in_use": round(in_use)}
        # A canonical node has shards of its own: 64 parts of the span, of which each gives a 64th of a batch.
        parts = [
            _py1e_shards(shard_samples, seed, runs) + seed * PART_SHARDS for seed in range(NODES_OF_PY1E)
        ]
        rows.append({"shards": shards, "order": f"py1e, {NODES_OF_PY1E} canonical nodes"})
        theirs = [np.concatenate([part[run] for part in parts]) for run in range(runs)]
        block = NODES_OF_PY1E * (PY1E_BLOCK / shard_samples + 1)
        rows[-1] |= _diversity(theirs, shards) | {"shards_in_use": round(block)}
    return rows


def _py1e_shards(shard_samples: int, seed: int, runs: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """int64[runs, samples]: the shards of what a canonical node gives to each of some batches."""
    import_streaming()
    from streaming.base.shuffle.py1e import get_shuffle_py1e

    ids = get_shuffle_py1e(np.full(PART_SHARDS, shard_samples), 1, seed, 0, PY1E_BLOCK)
    each = BATCH // NODES_OF_PY1E
    middle = PART_SHARDS * shard_samples // 2
    found: np.ndarray[Any, np.dtype[np.int64]] = ids[middle : middle + runs * each] // shard_samples
    return found.reshape(runs, each)


def _diversity(batches: list[Any], shards: int) -> dict[str, Any]:
    counts = [np.unique(batch, return_counts=True)[1] for batch in batches]
    pairs = sum(int((each * (each - 1) // 2).sum()) for each in counts) / len(batches)
    return {
        "distinct_shards": round(statistics.mean(map(len, counts))),
        "pairs_against_true_shuffle": round(pairs / (BATCH * (BATCH - 1) / 2 / shards), 1),
    }


def main() -> None:
    parser = benchmark_parser(__doc__, runs=3)
    parts = {"compare": comparison, "speed": speed, "nodes": amplification, "shuffle": diversity}
    parser.add_argument("what", choices=parts)
    arguments = parser.parse_args()
    rows = parts[arguments.what](arguments.runs)
    heads = {name: (name.replace("_", " "), "") for name in rows[0]}
    shown = [{name: _shown(value) for name, value in row.items()} for row in rows]
    give(arguments, shown, heads, title=f"Simulations: {arguments.what}")


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        real, simulated = value
        return f"{real:,.6g} real, {simulated:,.6g} simulated"
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    main()
