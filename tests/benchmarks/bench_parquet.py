"""Rows/s of Parquet files that a loader reads in place, shuffled, against pyarrow in the order of the files.

    python tests/benchmarks/bench_parquet.py [--rows 64000] [--runs 5] [--json]

Writes eight zstd files with row groups of 1,000 rows: `input_ids` (512 uint16), `text` (300 words) and two
numbers. Each side reads all rows once, in batches of 64; the plain side is `ParquetFile.iter_batches` and
`to_pylist` without a shuffle. Files are in the page cache.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from figures import benchmark_parser, give, timed
from shardkit.loaders import StreamingLoader

FILES, BATCH, LENGTH = 8, 64, 512
TASKS = {"tokens": ["input_ids"], "text and numbers": ["text", "score", "id"]}


def write(folder: Path, rows: int) -> None:
    noise = np.random.default_rng(1)
    for number in range(FILES):
        ids = noise.integers(0, 50_000, (rows // FILES, LENGTH)).astype(np.uint16)
        table = pa.table(
            {
                "input_ids": pa.FixedSizeListArray.from_arrays(pa.array(ids.ravel()), LENGTH),
                "text": [" ".join(f"w{word}" for word in row) for row in (ids[:, :300] % 5000).tolist()],
                "score": noise.random(len(ids)),
                "id": np.arange(len(ids)) + number * len(ids),
            }
        )
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=1000, compression="zstd")


def shuffled(folder: Path, columns: list[str]) -> int:
    files = f"{folder}/*.parquet"
    with StreamingLoader(
        files, batch_size=BATCH, rank=0, world_size=1, columns=columns, tail="drop"
    ) as loader:
        return BATCH * sum(1 for _ in loader)


def plain(folder: Path, columns: list[str]) -> int:
    count = 0
    for file in sorted(folder.iterdir()):
        for batch in pq.ParquetFile(file).iter_batches(BATCH, columns=columns):
            count += len(batch.to_pylist())
    return count


def main() -> None:
    parser = benchmark_parser(__doc__, runs=5)
    parser.add_argument("--rows", type=int, default=64_000)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write(folder, arguments.rows)
        for task, columns in TASKS.items():
            cases: dict[str, Callable[[], object]] = {
                "shardkit, shuffled": partial(shuffled, folder, columns),
                "pyarrow, in order": partial(plain, folder, columns),
            }
            for work in cases.values():
                work()  # imports, and the page cache
            for side, seconds in timed(cases, arguments.runs).items():
                rates = [arguments.rows / each for each in seconds]
                rows.append({"task": task, "side": side, "rate": statistics.median(rates), "runs": rates})
    heads = {"task": ("columns", ""), "side": ("side", ""), "rate": ("rows/s", ",.0f")}
    give(arguments, rows, heads, title="Parquet files in place", unit="rows/s")


if __name__ == "__main__":
    main()
