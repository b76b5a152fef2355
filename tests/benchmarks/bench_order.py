"""What the order costs at scale: a plan over 450,000 shards and 3.7 billion samples.

    python tests/benchmarks/bench_order.py [--shards 450000] [--runs 7] [--json]

Times are medians of wall-clock runs on one thread, memory is the growth of the peak resident size in a fresh
process that does nothing else. Read figures of one run only against each other.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable

import numpy as np

from figures import benchmark_parser, peak_rss_bytes, print_figures, timed
from shardkit.order.order import Order, OrderSpec, rank_slice
from shardkit.order.permutation import Domains, Permutation, mix64, permute

SAMPLES_PER_SHARD = 8222
LANES, WINDOW = 2048, 2 * SAMPLES_PER_SHARD


def shard_samples(shards: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    sizes = np.full(shards, SAMPLES_PER_SHARD, dtype=np.int32)
    sizes[::7] -= 100
    return sizes


def grow(shards: int) -> int:
    """Bytes by which this process's peak grows by opening a plan and using two epochs of it."""
    sizes = shard_samples(shards)
    before = peak_rss_bytes()
    order = Order(sizes, OrderSpec(17, LANES, WINDOW))
    order.locate((order.samples - 2048, 4096))
    order.global_batches(order.samples, 4096, 16)
    return peak_rss_bytes() - before


def power_of_four(size: int) -> Domains:
    """The usual cycle-walking domain, to compare with the one that shardkit uses."""
    half = np.array(((size - 1).bit_length() + 1) // 2, dtype=np.uint64)
    return Domains(
        np.array(size, dtype=np.uint64), mix64(half), np.array(1 << int(half), dtype=np.uint64), half
    )


def measure(shards: int, runs: int) -> dict[str, float]:
    sizes = shard_samples(shards)
    windowed = Order(sizes, OrderSpec(17, LANES, WINDOW))
    whole = Order(sizes, OrderSpec(17, LANES, WINDOW, "global"))
    middle = windowed.samples // 3
    anywhere = np.random.default_rng(0).integers(0, windowed.samples, 65_536)
    windowed.locate((middle, 1))
    whole.locate((middle, 1))
    permutation, run_of = Permutation(100_003, 17), np.arange(65_536)
    words, usual = run_of.astype(np.uint64), power_of_four(100_003)

    def first_batch() -> object:
        return Order(sizes, OrderSpec(17, LANES, WINDOW)).global_batches(middle, 4096, 1)

    cases: dict[str, tuple[Callable[[], object], int]] = {
        "open_and_first_batch_ms": (first_batch, 0),
        "batch_of_512_ms": (lambda: windowed.global_batches(middle, 512, 1), 0),
        "batch_of_4096_ms": (lambda: windowed.global_batches(middle, 4096, 1), 0),
        "batch_of_4096_one_rank_of_8_ms": (
            lambda: windowed.global_batches(middle, 4096, 1, part=rank_slice(4096, 3, 8)),
            0,
        ),
        "locate_65536_ns_per_position": (lambda: windowed.locate((middle, 65_536)), 65_536),
        "batches_128x512_ns_per_position": (lambda: windowed.global_batches(middle, 512, 128), 65_536),
        "global_65536_ns_per_position": (lambda: whole.locate((middle, 65_536)), 65_536),
        "random_65536_ns_per_position": (lambda: windowed.locate(anywhere), 65_536),
        "inverse_65536_ns_per_position": (lambda: windowed.positions_of(anywhere, 0), 65_536),
        "permutation_65536_ns_per_element": (lambda: permutation(run_of), 65_536),
        "over_a_power_of_four_ns_per_element": (lambda: permute(words, usual), 65_536),
    }
    figures: dict[str, float] = {"shards": shards, "samples": windowed.samples}
    for name, (work, positions) in cases.items():
        work()
        seconds = statistics.median(timed({name: work}, runs)[name])
        figures[name] = round(seconds * 1e9 / positions if positions else seconds * 1e3, 3)
    child = [sys.executable, __file__, "--shards", str(shards), "--child"]
    peaks = [
        int(subprocess.run(child, check=True, capture_output=True, text=True).stdout) for _ in range(runs)
    ]
    figures["peak_growth_mb"] = round(statistics.median(peaks) / 1e6, 1)
    return figures


def main() -> None:
    parser = benchmark_parser(__doc__, runs=7)
    parser.add_argument("--shards", type=int, default=450_000, help="number of shards (default: 450,000)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(grow(arguments.shards))
        return
    print_figures(arguments, measure(arguments.shards, arguments.runs))


if __name__ == "__main__":
    main()
