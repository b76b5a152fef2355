"""What many remote streams cost one process: threads, CPU time of a batch, the first batch.

    python tests/benchmarks/bench_streams.py [--streams 1 20 200] [--windows 32 0] [--batches 300] [--json]

Each stream is a dataset of its own, of `SHARDS` shards, behind one cache folder that holds half of them all.
With windows of 32 rows, what is in use fits that half. Window 0 stands for the default, by which all shards
of datasets as small as these are in use all the time: half of all rows are then read one by one.
The store is this process's memory and answers at once: what is counted is the loader's own work, not waiting.
CPU time is the whole process's (planning, fetching, hashing, writing the cache, gathering), divided by the
batches after the first `WARM`, which fill the cache. Threads are counted every 2 ms: the largest
number counts.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from itertools import islice
from pathlib import Path

import numpy as np

from figures import benchmark_parser, give
from shardkit.formats import mds
from shardkit.loaders import Stream, StreamingLoader
from shardkit.loaders.config import Layout, Order
from shardkit.storage.memory import MemoryStore

SHARDS, ROWS, LENGTH = 16, 32, 2048  # shards of 128 KiB
BATCH = 16
WARM = 1200  # batches, during which the cache is filled and almost every shard has been needed once


def write_streams(folder: Path, streams: int) -> list[str]:
    """Datasets in memory, no two shards alike; their URLs."""
    random, urls = np.random.default_rng(3), []
    for stream in range(streams):
        store = MemoryStore(f"memory://bench-streams-{os.getpid()}/{stream}")
        rows = random.integers(0, 50_000, (SHARDS * ROWS, LENGTH), dtype=np.uint16)
        target = folder / str(stream)
        target.mkdir()
        infos = [
            mds.write_rows_shard(
                target, f"shard.{n:05d}.mds", rows[n * ROWS : (n + 1) * ROWS], hashes=["xxh64"]
            )
            for n in range(SHARDS)
        ]
        mds.write_index(target, infos)
        for file in sorted(target.iterdir()):
            store.put(file.name, file)
        urls.append(store.url)
    return urls


def measure(streams: int, window: int, batches: int) -> dict[str, object]:
    """The figures of one loop over so many streams; `window` 0: the default."""
    most, done = 0, threading.Event()

    def count() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, threading.active_count() - 1)  # but for this one

    with tempfile.TemporaryDirectory() as scratch:
        urls = write_streams(Path(scratch), streams)
        whole = streams * SHARDS * ROWS * LENGTH * 2
        counter = threading.Thread(target=count)
        counter.start()
        began = time.perf_counter()
        with StreamingLoader(
            [Stream(url) for url in urls],
            batch_size=BATCH,
            cache_dir=Path(scratch) / "cache",
            cache_bytes=max(whole // 2, 16 << 20),
            order=Order(lanes=2 if window else None, window=window or None),
            endless=True,
            layout=Layout(tensors="numpy"),
            rank=0,
            world_size=1,
        ) as loader:
            opened = time.perf_counter()
            steps = iter(loader)
            next(steps)
            first = time.perf_counter()
            for _ in islice(steps, WARM):
                pass
            began_steady, cpu = time.perf_counter(), time.process_time()
            for _ in islice(steps, batches):
                pass
            seconds, cpu = time.perf_counter() - began_steady, time.process_time() - cpu
        done.set()
        counter.join()
    return {
        "streams": streams,
        "window": window,
        "threads": most,
        "open_seconds": opened - began,
        "first_batch_seconds": first - opened,
        "cpu_ms_a_batch": 1e3 * cpu / batches,
        "wall_ms_a_batch": 1e3 * seconds / batches,
    }


HEADS = {
    "streams": ("streams", ","),
    "window": ("window", ","),
    "threads": ("threads", ","),
    "open_seconds": ("open s", ".2f"),
    "first_batch_seconds": ("first batch s", ".2f"),
    "cpu_ms_a_batch": ("CPU ms/batch", ".2f"),
    "wall_ms_a_batch": ("wall ms/batch", ".2f"),
}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 20, 200])
    parser.add_argument("--windows", type=int, nargs="+", default=[32, 0])
    parser.add_argument("--batches", type=int, default=300)
    arguments = parser.parse_args()
    cases = [(streams, window) for streams in arguments.streams for window in arguments.windows]
    give(arguments, [measure(*case, arguments.batches) for case in cases], HEADS)


if __name__ == "__main__":
    main()
