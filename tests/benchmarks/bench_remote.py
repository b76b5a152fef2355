"""Remote datasets from a real S3 server (Ceph RGW) behind a proxy that limits every connection.

    python tests/benchmarks/bench_remote.py first-batch|mixture|cold-epoch|belady [--runs 5] [--json]

first-batch   time from a made loader to its first batch; 64 MiB shards, 50 ms latency, 80 MB/s a connection
mixture       three such datasets mixed 5:3:2, beside MosaicML Streaming: seconds to make a loader and have
              its first batch, and for eight more, on an empty disk; the same again from a state of batch 32
cold-epoch    an epoch with an empty cache against plain boto3 GETs of the same objects by as many threads,
              then the second epoch against the same loader on the local files; and CPU seconds a gigabyte
              without the proxy: of plain GETs, of GETs that hash, write and sync as a cache must, and of the
              epoch, which gathers the rows, too
belady        three epochs with a cache of half the dataset: bytes fetched against Belady's bound for the
              steps that were really made

Needs radosgw (see tests/servers). The two sides of a comparison take turns; ratios are of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
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
from shardkit.loaders import Stream, StreamingLoader
from shardkit.loaders.config import grouped
from shardkit.storage import StorageOptions
from support.peers import import_streaming
from support.s3_rgw import rgw_environment

LENGTH = 4096
BUCKET = "bench"
Figures = dict[str, Any]
BYTES_PER_SECOND = 80e6
LATENCY_SECONDS = 0.05
MIXTURE = {"web": 5, "code": 3, "books": 2}  # prefixes in the bucket, and weights


def write_dataset(folder: Path, shards: int, shard_bytes: int = 64 << 20) -> int:
    """MDS shards of random rows with a hash; returns the bytes of all."""
    rows = shard_bytes // (2 * LENGTH)
    return write_tokens(folder, shards=shards, rows=rows, length=LENGTH, hashes=["xxh64"])


def put_all(folder: Path, endpoint: str, prefix: str = "") -> list[str]:
    """Plain puts of every file; the keys of the shards."""
    client = s3_client(endpoint)
    for file in sorted(folder.iterdir()):
        with file.open("rb") as body:
            client.put_object(Bucket=BUCKET, Key=f"{prefix}/{file.name}".lstrip("/"), Body=body)
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


def loader(
    source: str | Path | list[Stream], endpoint: str, cache: Path | None, **options: Any
) -> StreamingLoader:
    return StreamingLoader(
        source,
        cache_dir=cache,
        storage=StorageOptions(endpoint_url=endpoint, path_style=True),
        dtype="uint16",
        **grouped(options),
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


def mixture(folder: Path, runs: int) -> dict[str, Any]:
    """Cold every time, and each time in a process of its own, whose imports are not counted."""
    slow = Rule(fault="throttle", bytes_per_second=BYTES_PER_SECOND, delay_seconds=LATENCY_SECONDS)
    taken: dict[str, dict[str, list[float]]] = {"shardkit": {}, "mosaicml-streaming": {}}
    write_dataset(folder, 6)
    with servers(slow) as (direct, proxy):
        for prefix in MIXTURE:
            put_all(folder, direct, prefix)
        for run in range(runs):
            for side in in_turns(list(taken), run):
                command = [sys.executable, __file__, "mixture", "--side", side, "--endpoint", proxy]
                done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
                for name, seconds in json.loads(done.stdout.splitlines()[-1]).items():
                    taken[side].setdefault(name, []).append(seconds)
    return {f"{side}: {name}": med(values) for side, found in taken.items() for name, values in found.items()}


def mixture_side(side: str, endpoint: str) -> dict[str, float]:
    """Seconds of one side's cold start, and of its restart from a state on another empty disk."""
    streaming = import_streaming()  # by both, with torch and boto3
    os.environ["S3_ENDPOINT_URL"] = endpoint  # as MosaicML Streaming wants it
    figures: dict[str, float] = {}
    state: Any = None
    for what in ("start", "restart"):
        disk = Path(tempfile.mkdtemp())
        began = time.perf_counter()
        if side == "shardkit":
            mixed = [Stream(f"s3://{BUCKET}/{prefix}", weight) for prefix, weight in MIXTURE.items()]
            ours = loader(mixed, endpoint, disk, batch_size=8, rank=0, world_size=1)
            if state is not None:
                ours.load_state_dict(state)
            batches: Iterator[Any] = iter(ours)
        else:
            streams = [
                streaming.Stream(
                    remote=f"s3://{BUCKET}/{prefix}", local=str(disk / prefix), proportion=w / 10
                )
                for prefix, w in MIXTURE.items()
            ]
            theirs = streaming.StreamingDataset(streams=streams, shuffle=True, batch_size=8)
            if state is not None:
                theirs.load_state_dict(state)
            samples = iter(theirs)
            batches = iter(lambda: [next(samples) for _ in range(8)], None)  # noqa: B023 (not used later)
        next(batches)
        figures[f"{what}, first batch s"] = time.perf_counter() - began
        began = time.perf_counter()
        for _ in range(8):
            next(batches)
        figures[f"{what}, 8 more s"] = time.perf_counter() - began
        for _ in range(32 - 9):
            next(batches)
        state = ours.state_dict() if side == "shardkit" else theirs.state_dict(32 * 8, from_beginning=False)
        if side == "shardkit":
            ours.close()
        shutil.rmtree(disk, ignore_errors=True)
    return figures


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
    last = {f"last run: {name}": fetched_all[-1][name] for name in ("evictions", "row_reads", "bypassed")}
    rounded = [round(ratio, 3) for ratio in ratios]
    return {"dataset_bytes": size, "fetched / bound": med(ratios), "of each run": rounded, **last}


def med(values: list[float]) -> float:
    return statistics.median(values)


def main() -> None:
    parser = benchmark_parser(__doc__, runs=5)
    parser.add_argument("what", choices=("first-batch", "mixture", "cold-epoch", "belady"))
    parser.add_argument("--threads", type=int, default=4, help="connections of both sides (default: 4)")
    parser.add_argument("--shards", type=int, default=12, help="64 MiB shards of cold-epoch (default: 12)")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side is not None:
        print(json.dumps(mixture_side(arguments.side, arguments.endpoint)), flush=True)
        os._exit(0)  # threads of MosaicML Streaming would not end
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "dataset"
        folder.mkdir()
        if arguments.what == "first-batch":
            result = first_batch(folder, arguments.runs)
        elif arguments.what == "mixture":
            result = mixture(folder, arguments.runs)
        elif arguments.what == "cold-epoch":
            result = cold_epoch(folder, arguments.runs, arguments.threads, arguments.shards)
        else:
            result = belady(folder, arguments.runs)
    print_figures(arguments, result)


if __name__ == "__main__":
    main()
