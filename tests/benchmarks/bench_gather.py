"""Batches from a loader against the same rows gathered by hand from a NumPy memory map of the same file.

    python tests/benchmarks/bench_gather.py [--json] [--megabytes 256] [--runs 7] [--shards 1]

Both sides make fresh arrays of the same type from the same rows, in turns, in one process; rows are worked
out beforehand for the hand-written side, by the loader itself on the other. Before the first run the files
are evicted from the page cache and read once in order: how fast cached pages are depends on how they came in.
The ratio is of medians. With several shards the hand-written side reads one file with all rows.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from figures import Heads, benchmark_parser, give, read_once
from shardkit.formats import mds
from shardkit.loaders import StreamingLoader

LENGTH = 4096
HEADS: Heads = {
    "stored": ("stored", ""),
    "dtype": ("batches of", ""),
    "batch": ("batch", "d"),
    "hand_rows_per_s": ("rows/s by hand", ",d"),
    "loader_rows_per_s": ("loader", ",d"),
    "ratio": ("ratio", ".3f"),
}


def write_dataset(folder: Path, stored: str, megabytes: int, shards: int) -> Path:
    """An MDS dataset of random tokens; returns the file that the hand-written side maps."""
    count = (megabytes << 20) // (LENGTH * np.dtype(stored).itemsize) // shards
    generator = np.random.default_rng(0)
    infos = []
    whole = folder / "whole.bin"
    with whole.open("wb") as file:
        for number in range(shards):
            rows = generator.integers(0, 50_000, (count, LENGTH)).astype(stored)
            infos.append(mds.write_rows_shard(folder, f"shard.{number:05d}.mds", rows, size_limit=None))
            file.write(rows.tobytes())
    mds.write_index(folder, infos)
    read_once(*sorted(folder.glob("*.mds")), whole)
    return whole


def by_hand(
    rows: npt.NDArray[np.generic], order: npt.NDArray[np.int64], dtype: str
) -> Iterator[npt.NDArray[np.generic]]:
    """What one would write for this one file and nothing else."""
    if rows.dtype == np.dtype(dtype):
        for wanted in order:
            yield rows[wanted]
    else:
        for wanted in order:
            yield rows[wanted].astype(dtype)


def hand_view(folder: Path, whole: Path, stored: str, shards: int) -> npt.NDArray[np.generic]:
    """The rows of the loader's own file where there is one, of the copy in one file otherwise."""
    count = whole.stat().st_size // (LENGTH * np.dtype(stored).itemsize)
    if shards > 1:
        return np.memmap(whole, stored, "r", shape=(count, LENGTH))
    shard = folder / "shard.00000.mds"
    start = shard.stat().st_size - whole.stat().st_size
    return np.memmap(shard, stored, "r", offset=start, shape=(count, LENGTH))


def seconds(consume: Callable[[], None]) -> float:
    gc.collect()
    start = time.perf_counter()
    consume()
    return time.perf_counter() - start


def make_loader(folder: Path, batch: int, dtype: str, *, return_ids: bool) -> StreamingLoader:
    return StreamingLoader(
        folder, batch_size=batch, dtype=dtype, tail="drop", return_ids=return_ids, rank=0, world_size=1
    )


def measure(
    folder: Path, whole: Path, stored: str, dtype: str, batch: int, args: argparse.Namespace
) -> dict[str, Any]:
    rows = hand_view(folder, whole, stored, args.shards)
    with make_loader(folder, batch, dtype, return_ids=True) as loader:
        order = np.stack([b["sample_id"].numpy() for b in loader])
    with make_loader(folder, batch, dtype, return_ids=False) as loader:
        for wanted, got in zip(order, loader, strict=True):
            assert np.array_equal(rows[wanted].astype(dtype), got["tokens"].numpy())

    def hand() -> None:
        for _ in by_hand(rows, order, dtype):
            pass

    loader = make_loader(folder, batch, dtype, return_ids=False)
    start = loader.state_dict()

    def ours() -> None:
        loader.load_state_dict(start)
        for _ in loader:
            pass

    times: dict[str, list[float]] = {"hand": [], "loader": []}
    hand()
    ours()
    for _ in range(args.runs):
        times["hand"].append(seconds(hand))
        times["loader"].append(seconds(ours))
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "stored": stored,
        "dtype": dtype,
        "batch": batch,
        "hand_rows_per_s": round(order.size / medians["hand"]),
        "loader_rows_per_s": round(order.size / medians["loader"]),
        "ratio": round(medians["hand"] / medians["loader"], 3),
        "ratios": [round(a / b, 3) for a, b in zip(times["hand"], times["loader"], strict=True)],
    }


def main() -> None:
    parser = benchmark_parser(__doc__, runs=7)
    parser.add_argument("--megabytes", type=int, default=256, help="size of each dataset (default: 256)")
    parser.add_argument("--shards", type=int, default=1, help="shards of each dataset (default: 1)")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 64], help="batch sizes (default: 8 64)")
    parser.add_argument("--folder", type=Path, help="where to put the data (default: a temporary folder)")
    args = parser.parse_args()
    results = []
    for stored in ("uint16", "uint32"):
        with tempfile.TemporaryDirectory(dir=args.folder) as name:
            folder = Path(name)
            whole = write_dataset(folder, stored, args.megabytes, args.shards)
            for dtype in (stored, "int64"):
                for batch in args.batches:
                    results.append(measure(folder, whole, stored, dtype, batch, args))
    if args.json:
        print(json.dumps({"length": LENGTH, "shards": args.shards, "results": results}, indent=1))
    else:
        give(args, results, HEADS)


if __name__ == "__main__":
    main()
