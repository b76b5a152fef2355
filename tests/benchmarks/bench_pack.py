"""Packing rates on one core: `python tests/benchmarks/bench_pack.py [documents]`.

Lengths are log-normal, like web text (median about 550 tokens). "kernel" is placement alone, "sorted" adds
the shuffle of rows and the sort of pieces, "fill" copies the tokens into rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

from figures import timed
from shardkit.writers.stages.packing import Placement, fill_rows, pack_best_fit, pack_concat


def best_of(function: Callable[[], object], runs: int = 5) -> float:
    """Seconds of the fastest of `runs` calls, after one to compile."""
    function()
    return min(timed({"": function}, runs)[""])


def fill_rate(lengths: np.ndarray[tuple[int], np.dtype[np.int64]], placement: Placement) -> float:
    """Bytes a second of filling all rows with uint16 tokens, shard by shard of 64 MiB."""
    tokens = np.arange(lengths.sum()).astype(np.uint16)
    starts = np.cumsum(lengths) - lengths
    sources = starts[placement.document] + placement.start
    rows = np.empty((placement.rows, placement.sequence_length), np.uint16)
    seconds = best_of(
        lambda: fill_rows(tokens, sources, placement.length, placement.row, placement.column, rows, 0), 3
    )
    return rows.nbytes / seconds


def main() -> None:
    """Print one line a sequence length and strategy."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 300_000
    lengths = np.random.default_rng(0).lognormal(6.3, 1.1, count).astype(np.int64) + 2
    for size in (2048, 8192, 32_768):
        for pack in (pack_best_fit, pack_concat):
            kernel = best_of(lambda p=pack, n=size: p(lengths, n))  # type: ignore[misc]
            placement = pack(lengths, size)
            shuffled = np.random.default_rng(1).permutation(placement.rows)
            moved = best_of(lambda p=placement, s=shuffled: p.moved(s))  # type: ignore[misc]
            cut = (np.bincount(placement.document) > 1) & (lengths <= size)
            print(
                f"L={size:6,} {pack.__name__:14} kernel {count / kernel / 1e6:6.1f} M documents/s, "
                f"sorted {count / (kernel + moved) / 1e6:5.1f} M/s, padding "
                f"{placement.padding / lengths.sum():.4%}, cut needlessly {cut.mean():.2%}, "
                f"fill {fill_rate(lengths, placement.moved(shuffled)) / 1e9:.2f} GB/s"
            )


if __name__ == "__main__":
    main()
