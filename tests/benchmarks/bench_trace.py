"""How fast `shardkit trace` looks through provenance tables: a made dataset, each search in its own process.

    python tests/benchmarks/bench_trace.py [--documents 4800000] [--runs 3] [--folder DIR]

Makes a dataset of short documents (about two pieces each) whose tables are written as a build does, and
times searches from the start of the command to its end: seconds, CPU seconds, peak memory.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from figures import Heads, benchmark_parser, give

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from shardkit.formats import mds
from shardkit.hashing import keyed_hashes
from shardkit.tokens.packing import pack_best_fit
from shardkit.writers.rows.documents import document_ids
from shardkit.writers.stages.provenance import write_provenance
from shardkit.writers.stages.tokenize import SPILL_SCHEMA
from support.small_dataset import renumbered

LENGTH = 64
PARTS = 8
SHARDS = 16  # of each part
URL = "https://www.host{}.example.org/articles/2023/{}/some-long-title-of-the-page-{:x}.html"

HEADS: Heads = {
    "search": ("search", ""),
    "seconds": ("seconds", ".2f"),
    "cpu_seconds": ("CPU s", ".2f"),
    "pieces_per_cpu_s": ("pieces / CPU s", ",.0f"),
    "peak_MB": ("peak MB", ",.0f"),
}


def make(folder: Path, documents: int) -> int:
    """Write the dataset; returns its pieces."""
    (folder / "provenance").mkdir(parents=True)
    infos: list[Any] = []
    for part in range(PARTS):
        count = documents // PARTS
        rng = np.random.default_rng(part)
        ids = np.array(document_ids(f"crawl/{part}.jsonl.gz", range(count)), object)
        hashes = keyed_hashes(list(ids), 17, "shuffle")
        order = np.argsort(hashes)
        lengths = rng.lognormal(4.2, 0.8, count).astype(np.int64) + 2
        hosts = rng.integers(0, 200_000, count).tolist()
        columns = {
            "hash": hashes[order],
            "document_id": pa.array(ids[order].tolist(), pa.binary(16)),
            "tokens": lengths,
            "copies": np.ones(count, np.int32),
            "source": np.full(count, part % 3),
            "file": [f"crawl/{part}.jsonl.gz"] * count,
            "record": order.astype(np.int64),
            "id": pa.nulls(count, pa.string()),
            "url": [URL.format(host, part, row) for host, row in zip(hosts, order.tolist(), strict=True)],
            "metadata": pa.nulls(count, pa.string()),
        }
        placement = pack_best_fit(lengths, LENGTH)
        placement = placement.moved(rng.permutation(placement.rows))
        starts = np.array([placement.rows * k // SHARDS for k in range(SHARDS + 1)])
        table = pa.table(columns, schema=SPILL_SCHEMA)
        write_provenance(folder / "made", placement, starts, table, seed=17)
        renumbered(folder / "made", folder / "provenance" / f"part-{part:05d}.parquet", len(infos))
        for low, high in pairwise(starts.tolist()):
            rows = np.zeros((high - low, LENGTH), np.uint16)
            infos.append(mds.write_rows_shard(folder, f"shard.{len(infos):05d}.mds", rows))
    (folder / "made").unlink()
    mds.write_index(folder, infos)
    return sum(pq.read_metadata(path).num_rows for path in (folder / "provenance").iterdir())


def timed(folder: Path, words: list[str]) -> tuple[float, float, int]:
    """(seconds, CPU seconds, peak bytes) of one command."""
    began = time.perf_counter()
    silence = os.open(os.devnull, os.O_WRONLY)
    actions = [(os.POSIX_SPAWN_DUP2, silence, 1), (os.POSIX_SPAWN_DUP2, silence, 2)]
    command = [sys.executable, "-m", "shardkit", "trace", str(folder), *words]
    pid = os.posix_spawn(sys.executable, command, os.environ, file_actions=actions)
    _, _, usage = os.wait4(pid, 0)
    os.close(silence)
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss << 10


def main() -> None:
    """Make, time, print."""
    parser = benchmark_parser(__doc__, runs=3)
    parser.add_argument("--documents", type=int, default=4_800_000)
    parser.add_argument("--folder", type=Path, help="where the dataset is made (default: a temporary folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        folder = Path(place) / "data"
        # In another process: a child's peak memory counts from what its parent had.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            pieces = pool.submit(make, folder, arguments.documents).result()
        size = sum(path.stat().st_size for path in (folder / "provenance").iterdir())
        print(f"{pieces:,} pieces, {size / 1e6:,.0f} MB of tables", file=sys.stderr)
        exact = Path(place) / "exact.txt"
        exact.write_text("".join(URL.format(n, n % PARTS, n) + "\n" for n in range(100_000)))
        sizes = ["--batch-size", "1024", "--loader", "lanes=64", "--loader", "window=4000"]
        searches = {
            "one row": ["--row", "3000"],
            "a step of 1,024 rows": ["--step", "40", "--limit", "0", *sizes],
            "a document id": ["--document", "00" * 16],
            "an exact URL": ["--url", "https://www.host1.example.org/"],
            "100,000 exact URLs": ["--url-list", str(exact)],
            "a prefix": ["--url", "https://www.host777*"],
            "a domain": ["--url", "*.host7777.example.org"],
        }
        rows = []
        for name, words in searches.items():
            runs = [timed(folder, words) for _ in range(arguments.runs)]
            seconds, cpu = (statistics.median(run[n] for run in runs) for n in (0, 1))
            row = {"search": name, "seconds": seconds, "cpu_seconds": cpu}
            row |= {"pieces_per_cpu_s": pieces / cpu, "peak_MB": max(run[2] for run in runs) / 1e6}
            rows.append(row)
    give(arguments, rows, HEADS)


if __name__ == "__main__":
    main()
