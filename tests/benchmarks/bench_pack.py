"""Packing rates on one core: `python tests/benchmarks/bench_pack.py [--documents 300000] [--json]`.

Lengths are log-normal, like web text (median about 550 tokens). "kernel" is placement alone, "sorted" adds
the shuffle of rows and the sort of pieces, "fill" copies the tokens into rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from figures import Heads, benchmark_parser, give, timed
from shardkit.tokens.packing import Placement, fill_rows, pack_best_fit, pack_concat

HEADS: Heads = {
    "length": ("sequence length", ",d"),
    "strategy": ("strategy", ""),
    "kernel": ("kernel, M documents/s", ".1f"),
    "sorted": ("sorted, M documents/s", ".1f"),
    "fill": ("fill, GB/s", ".2f"),
    "padding": ("padding", ".3%"),
    "cut": ("documents cut needlessly", ".1%"),
}


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


def measure(count: int) -> list[dict[str, Any]]:
    """A row for each sequence length and strategy."""
    lengths = np.random.default_rng(0).lognormal(6.3, 1.1, count).astype(np.int64) + 2
    rows = []
    for size in (2048, 8192, 32_768):
        for pack in (pack_best_fit, pack_concat):
            kernel = best_of(lambda p=pack, n=size: p(lengths, n))  # type: ignore[misc]
            placement = pack(lengths, size)
            shuffled = np.random.default_rng(1).permutation(placement.rows)
            moved = best_of(lambda p=placement, s=shuffled: p.moved(s))  # type: ignore[misc]
            cut = (np.bincount(placement.document) > 1) & (lengths <= size)
            rows.append(
                {
                    "length": size,
                    "strategy": pack.__name__.removeprefix("pack_"),
                    "kernel": count / kernel / 1e6,
                    "sorted": count / (kernel + moved) / 1e6,
                    "padding": placement.padding / lengths.sum(),
                    "cut": cut.mean(),
                    "fill": fill_rate(lengths, placement.moved(shuffled)) / 1e9,
                }
            )
    return rows


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--documents", type=int, default=300_000, help="default: %(default)s")
    arguments = parser.parse_args()
    give(arguments, measure(arguments.documents), HEADS, title="Packing on one core")


if __name__ == "__main__":
    main()
