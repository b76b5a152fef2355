"""The same small run twice: by the real loader behind a slow store, and simulated.

For tests/cache/test_virtual_run.py and tests/benchmarks/bench_virtual_run.py.
"""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardkit.cache.fetcher import Fetcher
from shardkit.cache.folder import CacheFolder
from shardkit.cache.shards import CachedShards
from shardkit.datasets.dataset import Dataset
from shardkit.datasets.locate import find_remote
from shardkit.loaders import StreamingLoader
from shardkit.loaders.config import Order
from shardkit.storage.memory import MemoryStore
from shardkit.storage.resilient import ResilientStore
from shardkit.storage.retry import RetryPolicy
from support.remote_harness import put_folder, write_hashed
from support.stores import ThrottledStore
from support.virtual_run.run import Outcome, simulate
from support.virtual_run.scenario import Network, Scenario, Shards

__all__ = ["CASES", "Case", "Comparison", "compare", "write_dataset"]

SHARDS, ROWS, LENGTH = 48, 64, 8192  # rows of 16 KiB in shards of 1 MiB
SEEN_SECONDS = 3e-3  # of a wait, below which a busy machine is to blame

_numbers = itertools.count()


@dataclass(frozen=True)
class Case:
    """A network and a cache."""

    name: str
    cache_shards: int
    connection_bytes_per_second: float
    latency_seconds: float
    step_seconds: float
    steps: int = 300
    batch_size: int = 16
    lanes: int = 4
    window: int = 256
    connections: int = 4


CASES = (
    Case("fed", 60, 40e6, 0.01, 0.02),
    Case("half cached, fed", 24, 40e6, 0.01, 0.02),
    Case("half cached, slow connections", 24, 4e6, 0.05, 0.01),
    Case("half cached, long latency", 24, 40e6, 0.3, 0.01),
    Case("hardly cached, starved", 12, 2e6, 0.05, 0.005),
)


@dataclass(frozen=True)
class Comparison:
    """A case's figures, (real, simulated) each. Waits leave the first batch out."""

    case: Case
    fetched_bytes: tuple[int, int]
    row_reads: tuple[int, int]
    hits: tuple[int, int]
    misses: tuple[int, int]
    first_seconds: tuple[float, float]
    wait_seconds: tuple[float, float]
    stalled_steps: tuple[int, int]
    """Steps that waited longer than `SEEN_SECONDS`."""
    seconds: tuple[float, float]

    @property
    def fetched_ratio(self) -> float:
        """Simulated over real."""
        return self.fetched_bytes[1] / self.fetched_bytes[0]


def write_dataset(folder: Path) -> int:
    """The dataset of all cases; the bytes of a shard."""
    # No two shards alike: a cache keeps equal ones once.
    rows = np.random.default_rng(3).integers(0, 50_000, (SHARDS * ROWS, LENGTH), dtype=np.uint16)
    infos = write_hashed(folder, "mds", rows, [(n * ROWS, n * ROWS + ROWS) for n in range(SHARDS)])
    return infos[0].raw.bytes


def compare(case: Case, dataset: Path, scratch: Path) -> Comparison:
    """Run a case both ways."""
    shard_bytes = (dataset / "shard.00000.mds").stat().st_size
    cache_bytes = case.cache_shards * (shard_bytes + 64)
    waits, counters, seconds = _real(case, dataset, scratch, cache_bytes)
    outcome = _simulated(case, shard_bytes, cache_bytes)
    [node] = outcome.nodes
    later, simulated = waits[1:], outcome.waits[1:]
    return Comparison(
        case,
        fetched_bytes=(int(counters["fetched_bytes"]), node.fetched_bytes),
        row_reads=(int(counters["row_reads"]), node.row_reads),
        hits=(int(counters["hits"]), node.hits),
        misses=(int(counters["misses"]), node.misses),
        first_seconds=(float(waits[0]), outcome.first_batch_seconds),
        wait_seconds=(float(later[later > SEEN_SECONDS].sum()), float(simulated[simulated > 1e-9].sum())),
        stalled_steps=(int((later > SEEN_SECONDS).sum()), int((simulated > SEEN_SECONDS).sum())),
        seconds=(seconds, outcome.seconds),
    )


def _real(
    case: Case, dataset: Path, scratch: Path, cache_bytes: int
) -> tuple[npt.NDArray[np.float64], dict[str, float], float]:
    """(wait for each batch, the cache's counters, seconds of the whole run)."""
    below = MemoryStore(f"memory://simulated-{os.getpid()}-{next(_numbers)}")
    put_folder(dataset, below)
    cache = CacheFolder(scratch / f"cache-{next(_numbers)}", cache_bytes)
    slow = ThrottledStore(
        below,
        latency_seconds=case.latency_seconds,
        bytes_per_second=case.connection_bytes_per_second,
    )
    found = find_remote(below)
    shards = CachedShards(
        ResilientStore(slow, RetryPolicy(hedge=False)), found.manifest, cache, Fetcher(case.connections)
    )
    loader = StreamingLoader(
        Dataset(None, found.manifest, shards=shards),
        batch_size=case.batch_size,
        order=Order(lanes=case.lanes, window=case.window),
        rank=0,
        world_size=1,
        endless=True,
    )
    waits = np.zeros(case.steps)
    began = time.perf_counter()
    batches = iter(loader)
    for step in range(case.steps):
        asked = time.perf_counter()
        next(batches)
        waits[step] = time.perf_counter() - asked
        time.sleep(case.step_seconds)
    seconds = time.perf_counter() - began
    counters = shards.counters()
    loader.close()
    return waits, counters, seconds


def _simulated(case: Case, shard_bytes: int, cache_bytes: int) -> Outcome:
    return simulate(
        Scenario(
            shards=Shards(np.full(SHARDS, ROWS), np.full(SHARDS, shard_bytes), 2 * LENGTH),
            delivered_bytes=8 * LENGTH,
            gpus_per_node=1,
            batch_size=case.batch_size,
            lanes=case.lanes,
            window=case.window,
            cache_bytes=cache_bytes,
            connections=case.connections,
            network=Network(
                node_bytes_per_second=1e12,
                connection_bytes_per_second=case.connection_bytes_per_second,
                latency_seconds=case.latency_seconds,
            ),
            step_seconds=case.step_seconds,
            steps=case.steps,
        )
    )
