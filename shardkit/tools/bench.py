"""`measure_speed`: how fast a loader delivers a dataset on this machine, against a copy of the same bytes.

Passes are made in turns, so that a neighbour's burst of work hits all alike, and each is told by the median
of its runs. A local dataset has one pass, over files in the page cache (the first run warms it and is not
counted). A remote one has "no cache" (an empty cache folder: everything comes from the store) and "from
cache". The loop takes batches and does nothing with them, so the figures are an upper bound of what training
can be fed with, and the CPU time per token is what the loader takes from it.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.datasets.dataset import open_dataset
from shardkit.loaders.loader import StreamingLoader
from shardkit.loaders.sources import TokenDtype
from shardkit.storage.store import StorageOptions
from shardkit.storage.url import is_remote

__all__ = ["PassSpeed", "Speed", "measure_speed"]

COPY_BYTES = 64 << 20  # far beyond any cache of a processor


@dataclass(frozen=True, slots=True)
class PassSpeed:
    """Medians over the runs of one pass. Waits are of the loop, for one batch; bytes are those delivered."""

    name: str
    runs: int
    batches: int
    samples_per_second: float
    tokens_per_second: float | None
    bytes_per_second: float
    wait_p50_seconds: float
    wait_p99_seconds: float
    first_batch_seconds: float
    cpu_seconds_per_token: float | None
    """Of all threads of this process; None where there are no tokens."""
    copy_ratio: float
    """Bytes per second, to those of a copy in memory: `copy_bytes_per_second`."""
    fetched_bytes: float
    """From the store, in one run."""


@dataclass(frozen=True, slots=True)
class Speed:
    """What was measured, and with what."""

    path: str
    samples: int
    batch_size: int
    seconds: float
    runs: int
    copy_bytes_per_second: float
    passes: tuple[PassSpeed, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


@dataclass(slots=True)
class _Run:
    seconds: float
    cpu_seconds: float
    first_seconds: float
    waits: list[float]
    samples: int
    tokens: int
    bytes: int
    fetched: float
    copy_rate: float


def measure_speed(
    path: str | os.PathLike[str],
    *,
    batch_size: int = 8,
    seconds: float = 3.0,
    runs: int = 5,
    dtype: TokenDtype = "int64",
    seed: int = 17,
    cache_dir: str | os.PathLike[str] | None = None,
    storage: StorageOptions | None = None,
    progress: Callable[[str, int], None] = lambda name, run: None,
) -> Speed:
    """Run every pass `runs` times for up to `seconds` each (a pass without cache: one epoch at most).

    `cache_dir`: where the cache of a remote dataset is made, and removed again; default: the system's
    temporary folder. `progress` hears of each run. Raises ShardError, StoreError; ValueError for settings.
    """
    if runs < 1 or seconds <= 0 or batch_size < 1:
        raise ValueError("runs and batch_size must be at least 1, and seconds above 0")
    with open_dataset(path, storage=storage) as dataset:
        samples = len(dataset)
        length = dataset.sequence_length
    options: dict[str, Any] = {"batch_size": batch_size, "seed": seed, "dtype": dtype, "storage": storage}
    made: dict[str, list[_Run]] = {}
    remote = is_remote(path)
    for run in range(runs + (not remote)):
        with tempfile.TemporaryDirectory(prefix="shardkit-bench-", dir=cache_dir) as folder:
            names = ("no cache", "from cache") if remote else ("files",)
            for name in names:
                progress(name, run)
                cache = {"cache_dir": Path(folder)} if remote else {}
                endless = name != "no cache"
                found = _measure(path, length, seconds, **options, **cache, endless=endless)
                if remote or run:  # the first one of local files warms the page cache
                    made.setdefault(name, []).append(found)
    copy = statistics.median(run.copy_rate for group in made.values() for run in group)
    passes = tuple(_summary(name, group, copy) for name, group in made.items())
    return Speed(os.fspath(path), samples, batch_size, seconds, runs, copy, passes)


def _measure(path: str | os.PathLike[str], length: int | None, seconds: float, **options: Any) -> _Run:
    waits: list[float] = []
    samples = size = 0
    start, cpu = time.perf_counter(), time.process_time()
    with StreamingLoader(path, rank=0, world_size=1, **options) as loader:
        batches: Iterator[dict[str, Any]] = iter(loader)
        while time.perf_counter() - start < seconds or not waits:
            before = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                break
            waits.append(time.perf_counter() - before)
            samples += _rows_of(batch)
            size += _bytes_of(batch)
        ended, cpu_ended = time.perf_counter(), time.process_time()
        store = loader.stats().store
    return _Run(
        seconds=ended - start,
        cpu_seconds=cpu_ended - cpu,
        first_seconds=waits[0],
        waits=waits[1:] or waits,
        samples=samples,
        tokens=samples * (length or 0),
        bytes=size,
        fetched=0.0 if store is None else store.read_bytes,
        copy_rate=_copy_rate(),
    )


def _rows_of(batch: dict[str, Any]) -> int:
    """Samples of a batch."""
    column = batch.get("tokens")
    return len(column if column is not None else next(iter(batch.values())))


def _bytes_of(batch: dict[str, Any]) -> int:
    """Bytes of all tensors, and of byte strings, in a batch."""
    size = 0
    for column in batch.values():
        if hasattr(column, "nbytes"):
            size += int(column.nbytes)
        elif isinstance(column, list):
            size += sum(len(value) for value in column if isinstance(value, bytes | str))
    return size


def _copy_rate() -> float:
    """Bytes per second that one thread copies in memory: the best of three."""
    source, target = np.ones(COPY_BYTES, np.uint8), np.zeros(COPY_BYTES, np.uint8)
    best = 0.0
    for _ in range(3):
        start = time.perf_counter()
        np.copyto(target, source)
        best = max(best, COPY_BYTES / (time.perf_counter() - start))
    return best


def _summary(name: str, runs: list[_Run], copy: float) -> PassSpeed:
    def median(value: Callable[[_Run], float]) -> float:
        return statistics.median(value(run) for run in runs)

    has_tokens = all(run.tokens for run in runs)
    rate = median(lambda run: run.bytes / run.seconds)
    return PassSpeed(
        name,
        len(runs),
        round(median(lambda run: len(run.waits) + 1)),
        median(lambda run: run.samples / run.seconds),
        median(lambda run: run.tokens / run.seconds) if has_tokens else None,
        rate,
        median(lambda run: float(np.percentile(run.waits, 50))),
        median(lambda run: float(np.percentile(run.waits, 99))),
        median(lambda run: run.first_seconds),
        median(lambda run: run.cpu_seconds / run.tokens) if has_tokens else None,
        rate / copy,
        median(lambda run: run.fetched),
    )
