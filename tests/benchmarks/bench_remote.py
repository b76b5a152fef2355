"""Remote datasets from a real S3 server (Ceph RGW) behind a proxy that limits every connection.

    python tests/benchmarks/bench_remote.py first-batch|cold-epoch|belady [--runs 5] [--json]

first-batch   time from a made loader to its first batch; 64 MiB shards, 50 ms latency, 80 MB/s a connection
cold-epoch    an epoch with an empty cache against plain boto3 GETs of the same objects by as many threads,
              then the second epoch against the same loader on the local files; and CPU seconds a gigabyte
              without the proxy: of plain GETs, of GETs that hash, write and sync as a cache must, and of the
              epoch, which gathers the rows, too
belady        three epochs with a cache of half the dataset: bytes fetched against Belady's bound for the
              steps that were really made

Needs radosgw (see tests/servers). The two sides of a comparison take turns; ratios are of medians.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from figures import benchmark_parser, in_turns, print_figures, write_tokens
from reference.belady import min_fetched_bytes
from servers.bucket import s3_client
from servers.ceph import STORE_GIB
from servers.fault_proxy import FaultProxy
from servers.faults import Rule
from servers.rgw import RgwServer
from shardkit.loaders import StreamingLoader
from shardkit.storage import StorageOptions
from support.s3_rgw import rgw_environment

LENGTH = 4096
BUCKET = "bench"
Figures = dict[str, Any]
BYTES_PER_SECOND = 80e6
LATENCY_SECONDS = 0.05


def write_dataset(folder: Path, shards: int, shard_bytes: int = 64 << 20) -> int:
    """MDS shards of random rows with a hash; returns the bytes of all."""
    rows = shard_bytes // (2 * LENGTH)
    return write_tokens(folder, shards=shards, rows=rows, length=LENGTH, hashes=["xxh64"])


def put_all(folder: Path, endpoint: str) -> list[str]:
    """Plain puts of every file; the keys of the shards."""
    client = s3_client(endpoint)
    for file in sorted(folder.iterdir()):
        with file.open("rb") as body:
            client.put_object(Bucket=BUCKET, Key=file.name, Body=body)
    return sorted(file.name for file in folder.glob("*.mds"))


def plain_gets(endpoint: str, keys: list[str], threads: int, keep: Path | None = None) -> float:
    """Seconds for boto3 to read all objects; with `keep`, to hash, write and sync them there, too."""
    client = s3_client(endpoint)

    def read(key: str) -> None:
        body = client.get_object(Bucket=BUCKET, Key=key)["Body"]
        if keep is None:
            while body.read(1 << 20):
                pass
            return
        hasher = xxhash.xxh64()
        with (keep / key).open("wb", buffering=0) as file:
            while piece := body.read(1 << 18):
                hasher.update(piece)
                file.write(piece)
            os.fsync(file.fileno())

    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, keys))
    return time.perf_counter() - start


def cpu_costs(folder: Path, endpoint: str, keys: list[str], runs: int, options: dict[str, Any]) -> Figures:
    """CPU seconds of this process for each gigabyte of the objects, and their medians."""
    size = sum((folder / key).stat().st_size for key in keys)
    taken: dict[str, list[float]] = {"plain GETs": [], "GETs, hashed and written": [], "cold epoch": []}
    for run in range(runs):
        for name in in_turns(list(taken), run):
            cache = Path(tempfile.mkdtemp(dir=folder.parent))
            stream = loader(f"s3://{BUCKET}", endpoint, cache, **options)
            os.sync()
            start = time.process_time()
            if name == "cold epoch":
                epoch_seconds(stream)
            else:
                keep = None if name == "plain GETs" else cache
                plain_gets(endpoint, keys, options["connections"], keep)
            taken[name].append((time.process_time() - start) * 1e9 / size)
            stream.close()
            shutil.rmtree(cache)
    return {f"{name}, CPU s a GB": med(values) for name, values in taken.items()}


def loader(source: str | Path, endpoint: str, cache: Path | None, **options: Any) -> StreamingLoader:
    return StreamingLoader(
        source,
        cache_dir=cache,
        storage=StorageOptions(endpoint_url=endpoint, path_style=True),
        dtype="uint16",
        **options,
    )


def epoch_seconds(stream: StreamingLoader) -> float:
    start = time.perf_counter()
    for batch in stream:
        del batch
    return time.perf_counter() - start


@contextmanager
def gateway(store_gib: int = STORE_GIB) -> Iterator[RgwServer]:
    """A server with an empty bucket, and its credentials in the environment."""
    with RgwServer(store_gib=store_gib) as server, rgw_environment(server):
        s3_client(server.endpoint_url).create_bucket(Bucket=BUCKET)
        yield server


@contextmanager
def servers(*rules: Rule) -> Iterator[tuple[str, str]]:
    """(endpoint of the server, endpoint of a proxy before it)."""
    with gateway() as server, FaultProxy(server.endpoint_url) as proxy:
        proxy.set_rules(*rules)
        yield server.endpoint_url, proxy.endpoint_url


def first_batch(folder: Path, runs: int) -> dict[str, Any]:
    """Cold every time: a fresh cache folder."""
    write_dataset(folder, 8)
    slow = Rule(fault="throttle", bytes_per_second=BYTES_PER_SECOND, delay_seconds=LATENCY_SECONDS)
    opened, seconds, later = [], [], []
    with servers(slow) as (direct, proxy):
        put_all(folder, direct)
        for _ in range(runs):
            cache = Path(tempfile.mkdtemp())
            start = time.perf_counter()
            stream = loader(f"s3://{BUCKET}", proxy, cache, batch_size=8)
            opened.append(time.perf_counter() - start)
            start = time.perf_counter()
            batches = iter(stream)
            next(batches)
            seconds.append(time.perf_counter() - start)
            start = time.perf_counter()
            for _ in range(8):
                next(batches)
            later.append(time.perf_counter() - start)
            stream.close()
            shutil.rmtree(cache)
    return {"construction_s": med(opened), "first_batch_s": med(seconds), "next_8_batches_s": med(later)}


def cold_epoch(folder: Path, runs: int, threads: int, shards: int) -> dict[str, Any]:
    size = write_dataset(folder, shards)
    cold, plain, warm, local = [], [], [], []
    slow = Rule(fault="throttle", bytes_per_second=BYTES_PER_SECOND)
    options: dict[str, Any] = {"batch_size": 64, "lanes": 4, "window": 8192, "connections": threads}
    with servers(slow) as (direct, proxy):
        keys = put_all(folder, direct)
        reference = loader(folder, proxy, None, batch_size=64, lanes=4, window=8192)
        epoch_seconds(reference)
        for _ in range(runs):
            os.sync()  # what earlier runs and the server still have to write is not this one's
            plain.append(plain_gets(proxy, keys, threads))
            cache = Path(tempfile.mkdtemp(dir=folder.parent))
            stream = loader(f"s3://{BUCKET}", proxy, cache, **options)
            cold.append(epoch_seconds(stream))
            for _ in range(3):
                warm.append(epoch_seconds(stream))
                local.append(epoch_seconds(reference))
            stream.close()
            shutil.rmtree(cache)
        costs = cpu_costs(folder, direct, keys, runs, options)
    rate = {name: size / med(values) / 1e6 for name, values in (("cold", cold), ("plain", plain))}
    return {
        "bytes": size,
        "threads": threads,
        "cold_MB_s": rate["cold"],
        "plain_MB_s": rate["plain"],
        "cold_ratio": med(plain) / med(cold),
        "warm_ratio": med(local) / med(warm),
        "warm_GB_s": size / med(warm) / 1e9,
        **costs,
    }


def belady(folder: Path, runs: int) -> dict[str, Any]:
    """Bytes fetched against the bound for the very steps that the loader made."""
    size = write_dataset(folder, 48, 1 << 20)
    ratios, fetched_all = [], []
    slow = Rule(fault="throttle", bytes_per_second=BYTES_PER_SECOND)
    with servers(slow) as (direct, proxy):
        put_all(folder, direct)
        for run in range(runs):
            cache = Path(tempfile.mkdtemp())
            options: dict[str, Any] = {
                "batch_size": 16,
                "lanes": 4,
                "window": 256,
                "seed": run,
                "return_ids": True,
            }
            stream = loader(f"s3://{BUCKET}", proxy, cache, cache_bytes=size // 2, **options)
            requests = []
            for _ in range(3):
                for batch in stream:
                    ids = batch["sample_id"].numpy()
                    starts = stream.dataset.manifest.shard_starts
                    requests.append(set((np.searchsorted(starts, ids, side="right") - 1).tolist()))
                    time.sleep(0.002)  # a step of training
            assert stream.dataset.shards is not None
            counters = stream.dataset.shards.counters()
            sizes = [info.raw.bytes for info in stream.dataset.manifest.shards]
            bound = min_fetched_bytes(requests, sizes, size // 2)
            ratios.append(counters["fetched_bytes"] / bound)
            fetched_all.append(counters)
            stream.close()
            shutil.rmtree(cache)
    return {"dataset_bytes": size, "bound_ratios": ratios, "median": med(ratios), "last": fetched_all[-1]}


def med(values: list[float]) -> float:
    return statistics.median(values)


def main() -> None:
    parser = benchmark_parser(__doc__, runs=5)
    parser.add_argument("what", choices=("first-batch", "cold-epoch", "belady"))
    parser.add_argument("--threads", type=int, default=4, help="connections of both sides (default: 4)")
    parser.add_argument("--shards", type=int, default=12, help="64 MiB shards of cold-epoch (default: 12)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "dataset"
        folder.mkdir()
        if arguments.what == "first-batch":
            result = first_batch(folder, arguments.runs)
        elif arguments.what == "cold-epoch":
            result = cold_epoch(folder, arguments.runs, arguments.threads, arguments.shards)
        else:
            result = belady(folder, arguments.runs)
    print_figures(arguments, result)


if __name__ == "__main__":
    main()
