"""CPU time for a row, on one core: the loader against the same rows gathered by hand from a memory map.

    python tests/benchmarks/bench_gather.py [--json] [--megabytes 256] [--runs 7] [--shards 4] [--busy all]

The process is pinned to one core, and what counts is the CPU time of all its threads: what a batch takes from
the training that runs beside it. All sides deliver the same types from the same rows of 4,096 tokens, in
turns; which rows is worked out beforehand for the hand-written sides, by the loader itself on the others.

    hand     a fresh array a batch from one file: rows[wanted], and .astype
    reused   the same by hand into arrays that every batch overwrites, which no loader may do
    loader   batches made on request, as for a loop that only reads; `tar`: the same rows in tars
    thread   batches made by the background thread, as in training: the loop computes between batches. What
             it computes is timed alone and subtracted; `hand+` is the hand-written side in the same loop

Ratios are of medians, hand / side; those of `thread` are to `hand+`. `busy`: which other cores compute, too:
"none", "other" (all but this process's), "all". Files are evicted from the page cache and read once in order
before the first run: how fast cached pages are depends on how they came in.
"""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from figures import Heads, benchmark_parser, give, in_turns, read_once
from shardkit.formats import mds, tar
from shardkit.loaders import StreamingLoader

LENGTH = 4096
WORK_SECONDS = 8e-6  # between batches, for each of their rows: more than the loader takes to make them
BURN = "import numpy as np\na = np.ones((256, 256), np.float32)\nwhile True: a @ a"
SIDES = ("hand", "reused", "loader", "tar", "hand+", "thread")
HEADS: Heads = {
    "busy": ("busy", ""),
    "stored": ("stored", ""),
    "dtype": ("batches of", ""),
    "batch": ("batch", "d"),
    **{side: (f"{side} us", ".2f") for side in SIDES},
    **{f"{side}_ratio": (f"{side} ratio", ".2f") for side in ("loader", "tar", "thread")},
}

Rows = npt.NDArray[np.generic]
Order = npt.NDArray[np.int64]


def write_datasets(folder: Path, stored: str, megabytes: int, shards: int) -> Rows:
    """The same random rows as MDS, as tars and in one plain file; returns a map of that."""
    count = (megabytes << 20) // (LENGTH * np.dtype(stored).itemsize) // shards
    generator = np.random.default_rng(0)
    infos: dict[str, list[Any]] = {"mds": [], "tar": []}
    for kind in infos:
        (folder / kind).mkdir()
    whole = folder / "whole.bin"
    with whole.open("wb") as file:
        for number in range(shards):
            # The last shard is shorter, as those of real datasets.
            rows = generator.integers(0, 50_000, (count - (number == shards - 1), LENGTH)).astype(stored)
            infos["mds"].append(
                mds.write_rows_shard(folder / "mds", f"shard.{number:05d}.mds", rows, size_limit=None)
            )
            infos["tar"].append(
                tar.write_rows_shard(folder / "tar", f"s-{number:05d}.tar", rows, key_start=number * count)
            )
            file.write(rows.tobytes())
    mds.write_index(folder / "mds", infos["mds"])
    tar.write_shard_list(folder / "tar", infos["tar"])
    read_once(*sorted(file for file in folder.rglob("*") if file.is_file()))
    return np.memmap(whole, stored, "r").reshape(-1, LENGTH)


def by_hand(rows: Rows, order: Order, dtype: str) -> Iterator[Rows]:
    """What one would write for this one file and nothing else."""
    for wanted in order:
        yield rows[wanted] if rows.dtype == np.dtype(dtype) else rows[wanted].astype(dtype)


def by_hand_reused(rows: Rows, order: Order, dtype: str) -> Iterator[Rows]:
    whole = rows.view(f"V{rows.strides[0]}").reshape(-1)
    stored, batch = np.empty((order.shape[1], LENGTH), rows.dtype), np.empty((order.shape[1], LENGTH), dtype)
    is_copied = rows.dtype == batch.dtype
    target = (batch if is_copied else stored).view(whole.dtype).reshape(-1)
    for wanted in order:
        whole.take(wanted, out=target, mode="clip")
        if not is_copied:
            batch[...] = stored
        yield batch


def make_loader(folder: Path, batch: int, dtype: str, *, return_ids: bool = False) -> StreamingLoader:
    return StreamingLoader(
        folder, batch_size=batch, dtype=dtype, tail="drop", return_ids=return_ids, rank=0, world_size=1
    )


def restarted(loader: StreamingLoader) -> Callable[[], StreamingLoader]:
    start = loader.state_dict()

    def epoch() -> StreamingLoader:
        loader.load_state_dict(start)
        return loader

    return epoch


def computation(seconds: float) -> Callable[[], None]:
    """A product of matrices that takes about so long."""
    matrix = np.ones((64, 64), np.float32)
    product = np.empty_like(matrix)

    def multiply(times: int) -> None:
        for _ in range(times):
            np.matmul(matrix, matrix, out=product)

    multiply(1000)
    start = time.thread_time()
    multiply(1000)
    times = max(1, round(seconds / (time.thread_time() - start) * 1000))
    return lambda: multiply(times)


def cpu_seconds(batches: Iterable[Any], work: Callable[[], None] | None) -> float:
    """CPU time of all threads for one epoch."""
    start = time.process_time()
    for _ in batches:
        if work is not None:
            work()
    return time.process_time() - start


def measure(folder: Path, rows: Rows, dtype: str, batch: int, runs: int) -> dict[str, Any]:
    with make_loader(folder / "mds", batch, dtype, return_ids=True) as loader:
        order = np.stack([b["sample_id"].numpy() for b in loader])
    loaders = {kind: make_loader(folder / kind, batch, dtype) for kind in ("mds", "tar")}
    for loader in loaders.values():
        for wanted, got in zip(order, restarted(loader)(), strict=True):
            assert np.array_equal(rows[wanted].astype(dtype), got["tokens"].numpy())
    work = computation(WORK_SECONDS * batch)
    epochs = {kind: restarted(loader) for kind, loader in loaders.items()}
    sides: dict[str, tuple[Callable[[], Iterable[Any]], Callable[[], None] | None]] = {
        "hand": (lambda: by_hand(rows, order, dtype), None),
        "reused": (lambda: by_hand_reused(rows, order, dtype), None),
        "loader": (epochs["mds"], None),
        "tar": (epochs["tar"], None),
        "work": (lambda: order, work),
        "hand+": (lambda: by_hand(rows, order, dtype), work),
        "thread": (epochs["mds"], work),
    }
    micros: dict[str, list[float]] = {name: [] for name in sides}
    for run in range(runs + 1):
        for name in in_turns(list(sides), run):
            gc.collect()
            epoch, between = sides[name]
            seconds = cpu_seconds(epoch(), between)
            if run:
                micros[name].append(1e6 * seconds / order.size)
    for loader in loaders.values():
        loader.close()
    medians = {name: statistics.median(values) for name, values in micros.items()}
    for name in ("hand+", "thread"):
        medians[name] -= medians["work"]
    return {
        **medians,
        **{f"{name}_ratio": medians["hand"] / medians[name] for name in ("loader", "tar")},
        "thread_ratio": medians["hand+"] / medians["thread"],
        "runs": micros,
    }


@contextmanager
def busy_cores(cores: Iterable[int]) -> Iterator[None]:
    """Processes that compute on these cores meanwhile."""
    burning = []
    for core in cores:
        burning.append(subprocess.Popen([sys.executable, "-c", BURN]))
        os.sched_setaffinity(burning[-1].pid, {core})
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()


def main() -> None:
    parser = benchmark_parser(__doc__, runs=7)
    parser.add_argument("--megabytes", type=int, default=256, help="size of each dataset (default: 256)")
    parser.add_argument("--shards", type=int, default=4, help="shards of each dataset (default: 4)")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 64], help="batch sizes (default: 8 64)")
    parser.add_argument(
        "--busy", nargs="+", choices=("none", "other", "all"), default=["none", "other", "all"]
    )
    parser.add_argument("--folder", type=Path, help="where to put the data (default: a temporary folder)")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])
    results = []
    for stored in ("uint16", "uint32"):
        with tempfile.TemporaryDirectory(dir=args.folder) as name:
            rows = write_datasets(Path(name), stored, args.megabytes, args.shards)
            for busy in args.busy:
                with busy_cores({"none": [], "other": cores[1:], "all": cores}[busy]):
                    for dtype in (stored, "int64"):
                        for batch in args.batches:
                            cell = {"busy": busy, "stored": stored, "dtype": dtype, "batch": batch}
                            results.append(cell | measure(Path(name), rows, dtype, batch, args.runs))
    give(args, results, HEADS, title="Gathering rows of 4,096 tokens on one core")


if __name__ == "__main__":
    main()
