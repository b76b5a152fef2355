"""One loader of `bench_rows.py`, in a process of its own: `rows_side.py SIDE`.

Each line on stdin is a request, {"place", "columns", "cache", "batch", "environment"}: read all rows of the
files at a place once, shuffled, in batches. The answer has the rows, the seconds, those until the first
batch, with the time to open the files, and those of processor time. Imports nothing but what its side needs,
because a peer lives in an environment without shardkit.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

Request = dict[str, Any]


def shardkit(request: Request) -> Iterator[int]:
    from shardkit.loaders import StreamingLoader

    options: dict[str, Any] = {}
    if request["cache"]:
        from shardkit.loaders.config import grouped

        options = grouped({"cache_dir": request["cache"]})
    suffix = request["files"][0].rpartition(".")[2]
    files = f"{request['place']}/*.{suffix}"
    options |= {"columns": request["columns"], "batch_size": request["batch"], "tail": "drop"}
    with StreamingLoader(files, rank=0, world_size=1, **options) as loader:
        for _ in loader:
            yield request["batch"]


def litdata(request: Request) -> Iterator[int]:
    """Its own loader without workers, which would be processes; it writes its index next to the files."""
    from litdata import StreamingDataLoader, StreamingDataset, index_parquet_dataset
    from litdata.streaming.item_loader import ParquetLoader

    options = {"storage_options": request["storage"]} if "storage" in request else {}
    place, cache = request["place"], request["cache"]
    if cache:
        options |= {"cache_dir": cache}
    index_parquet_dataset(place, **options)
    columns = ParquetLoader(columns=request["columns"])
    dataset = StreamingDataset(place, item_loader=columns, shuffle=True, drop_last=True, **options)
    for batch in StreamingDataLoader(dataset, batch_size=request["batch"], collate_fn=list, drop_last=True):
        yield len(batch)


def datasets(request: Request) -> Iterator[int]:
    """Streaming, with a shuffle buffer of 1,000 rows; NumPy arrays for the tokens."""
    from datasets import load_dataset

    options = {"storage_options": request["storage"]} if "storage" in request else {}
    files = [f"{request['place']}/{name}" for name in request["files"]]
    rows = load_dataset(
        "parquet", data_files=files, split="train", streaming=True, columns=request["columns"], **options
    )
    for batch in rows.shuffle(seed=1, buffer_size=1000).with_format("numpy").iter(request["batch"]):
        yield len(next(iter(batch.values())))


def pyarrow(request: Request) -> Iterator[int]:
    import pyarrow.parquet as pq

    for name in request["files"]:
        file = pq.ParquetFile(f"{request['place']}/{name}")
        for batch in file.iter_batches(request["batch"], columns=request["columns"]):
            yield len(batch.to_pylist())


SIDES: dict[str, Callable[[Request], Iterator[int]]] = {
    "shardkit": shardkit,
    "litdata": litdata,
    "datasets": datasets,
    "pyarrow": pyarrow,
}


def main() -> None:
    side = SIDES[sys.argv[1]]
    for line in sys.stdin:
        request = json.loads(line)
        os.environ.update(request.get("environment", {}))
        began, cpu = time.perf_counter(), time.process_time()
        count, first = 0, 0.0
        with contextlib.redirect_stdout(sys.stderr):  # litdata shows progress on stdout
            for more in side(request):
                first = first or time.perf_counter() - began
                count += more
        seconds = time.perf_counter() - began
        answer = {"rows": count, "seconds": seconds, "first_s": first, "cpu_s": time.process_time() - cpu}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
