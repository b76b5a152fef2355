"""The start of a job at one prefix of a store: virtual time, the real retry and gate code.

    python tests/benchmarks/bench_start.py [--nodes 256 2048] [--ranks 8] [--replicas 1 8] [--rate 5500]

`tests/support/start_model.py` says what is modeled. "spread" is what the loader does. "at once" is what it
would do without delays and leaders, each rank asking for its own index and for 32 rows; it is left out above
256 nodes, where it takes minutes. "replicas" are ranks of a node that read the same, as with TP 8; "rows" is
how many each rank has before whole shards are waited for.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from figures import benchmark_parser, give
from support.start_model import start_job


def measure(nodes: int, ranks: int, replicas: int, rate: float, *, spread: bool) -> dict[str, object]:
    began = time.perf_counter()
    start = start_job(nodes, ranks, rate, replicas=replicas, spread=spread)
    seconds = sorted(start.first_row_seconds)
    return {
        "start": "spread" if spread else "at once",
        "nodes": nodes,
        "ranks": nodes * ranks,
        "replicas": replicas,
        "rows": start.rows,
        "failures": len(start.failures),
        "median_seconds": seconds[len(seconds) // 2],
        "last_seconds": seconds[-1],
        "most_answered": max(start.answered),
        "mean_requests": sum(start.requests) / nodes,
        "busiest_second": start.busiest_second,
        "real_seconds": time.perf_counter() - began,
    }


HEADS = {
    "start": ("start", ""),
    "nodes": ("nodes", ","),
    "ranks": ("ranks", ","),
    "replicas": ("replicas", ""),
    "rows": ("rows", ""),
    "failures": ("failures", ","),
    "median_seconds": ("median s", ".1f"),
    "last_seconds": ("last row s", ".1f"),
    "most_answered": ("answered/node", ","),
    "mean_requests": ("sent/node", ".1f"),
    "busiest_second": ("busiest second", ","),
    "real_seconds": ("took s", ".1f"),
}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rate", type=float, default=5500.0)
    arguments = parser.parse_args()
    logging.disable()  # of each process that is refused for long
    cases = [
        (nodes, replicas, spread)
        for nodes in arguments.nodes
        for spread in (False, True)
        for replicas in (arguments.replicas if spread else [1])
        if spread or nodes <= 256
    ]
    give(
        arguments,
        [
            measure(nodes, arguments.ranks, replicas, arguments.rate, spread=spread)
            for nodes, replicas, spread in cases
        ],
        HEADS,
    )


if __name__ == "__main__":
    main()
