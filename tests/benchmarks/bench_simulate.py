"""Simulated runs against the real loader, and how fast simulations are.

    python tests/benchmarks/bench_simulate.py compare|speed [--runs 3] [--json]

compare   300 steps of the real loader behind a store with latency and bandwidth per connection (48 shards of
          1 MiB), and the same simulated: bytes of shards fetched, waits, time of the whole run. Medians of
          the real runs; a busy machine makes them slower.
speed     2,048 GPUs for 1,000 steps over 14.8e12 tokens in 882,149 shards: seconds of CPU and peak memory,
          which later rows share with those before
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from figures import benchmark_parser
from shardkit.tools.simulate.run import simulate
from shardkit.tools.simulate.scenario import Scenario, Shards, spread_nodes
from support.simulated_runs import CASES, compare, write_dataset

NODES, SHARDS, SHARD_BYTES, SAMPLE_BYTES = 256, 882_149, 1 << 26, 1 << 14


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


def main() -> None:
    parser = benchmark_parser(__doc__, runs=3)
    parser.add_argument("what", choices=("compare", "speed"))
    arguments = parser.parse_args()
    rows = comparison(arguments.runs) if arguments.what == "compare" else speed(arguments.runs)
    if arguments.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(", ".join(f"{name} {_shown(value)}" for name, value in row.items()))


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        real, simulated = value
        return f"{real:,.6g} real {simulated:,.6g} simulated"
    return str(value)


if __name__ == "__main__":
    main()
