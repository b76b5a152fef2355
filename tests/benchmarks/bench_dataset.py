"""How fast a loader delivers any dataset on this machine, against a copy of the same bytes.

    python tests/benchmarks/bench_dataset.py [PATH] [--batch-size 8] [--runs 5] [--seconds 3] [--dtype int64]
                                             [--cache-dir FOLDER] [--json] [--save PREFIX]

Passes take turns, so that a burst of other work on the machine affects all of them alike, and the result is
the median of each pass's runs. A local dataset has one pass, over files in the page cache (the first run
warms it and does not count); without PATH, it is 64 MB of random rows. A remote one has "no cache" (an empty
cache folder: everything comes from the store) and "from cache". The loop discards its batches, so the rates
are an upper bound of what training can be fed with, and the CPU time per token is what the loader takes away
from training.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from figures import Heads, benchmark_parser, give, write_tokens
from shardkit.datasets.dataset import open_dataset
from shardkit.loaders.config import TokenDtype, grouped
from shardkit.loaders.loader import StreamingLoader
from shardkit.storage.store import StorageOptions
from shardkit.storage.url import is_remote

__all__ = ["PassSpeed", "Speed", "measure_speed"]

HEADS: Heads = {
    "name": ("pass", ""),
    "tokens_per_second": ("tokens/s", ",.0f"),
    "samples_per_second": ("samples/s", ",.0f"),
    "bytes_per_second": ("bytes/s in batches", ",.0f"),
    "copy_ratio": ("/ memory copy", ".3f"),
    "wait_p50_seconds": ("wait p50 s", ".6f"),
    "wait_p99_seconds": ("wait p99 s", ".6f"),
    "first_batch_seconds": ("first batch s", ".4f"),
    "cpu_seconds_per_token": ("CPU s a token", ".2e"),
    "batches": ("batches", ",d"),
    "fetched_bytes": ("fetched bytes", ",.0f"),
}
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
    temporary folder. `progress` is called before each run. Raises ShardError, StoreError, and ValueError for
    settings.
    """
    if runs < 1 or seconds <= 0 or batch_size < 1:
        raise ValueError("runs and batch_size must be at least 1, and seconds above 0")
    with open_dataset(path, storage=storage) as dataset:
        samples = len(dataset)
        length = dataset.sequence_length
    options: dict[str, Any] = {"batch_size": batch_size, "seed": seed, "dtype": dtype, "storage": storage}
    made: dict[str, list[PassSpeed]] = {}
    copy_rates: list[float] = []
    remote = is_remote(path)
    for run in range(runs + (not remote)):
        with tempfile.TemporaryDirectory(prefix="shardkit-bench-", dir=cache_dir) as folder:
            names = ("no cache", "from cache") if remote else ("files",)
            for name in names:
                progress(name, run)
                cache = {"cache_dir": Path(folder)} if remote else {}
                endless = name != "no cache"
                found = _measure(name, path, length, seconds, **options, **cache, endless=endless)
                if remote or run:  # the first one of local files warms the page cache
                    made.setdefault(name, []).append(found)
                    copy_rates.append(_copy_rate())
    copy = statistics.median(copy_rates)
    passes = tuple(_medians(group, copy) for group in made.values())
    return Speed(os.fspath(path), samples, batch_size, seconds, runs, copy, passes)


def _measure(
    name: str, path: str | os.PathLike[str], length: int | None, seconds: float, **options: Any
) -> PassSpeed:
    """One run of a pass, not yet compared with a copy."""
    waits: list[float] = []
    samples = size = 0
    start, cpu = time.perf_counter(), time.process_time()
    with StreamingLoader(path, rank=0, world_size=1, **grouped(options)) as loader:
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
    tokens, later = samples * (length or 0), waits[1:] or waits
    return PassSpeed(
        name=name,
        runs=1,
        batches=len(waits),
        samples_per_second=samples / (ended - start),
        tokens_per_second=tokens / (ended - start) if tokens else None,
        bytes_per_second=size / (ended - start),
        wait_p50_seconds=float(np.percentile(later, 50)),
        wait_p99_seconds=float(np.percentile(later, 99)),
        first_batch_seconds=waits[0],
        cpu_seconds_per_token=(cpu_ended - cpu) / tokens if tokens else None,
        copy_ratio=0.0,
        fetched_bytes=0.0 if store is None else store.read_bytes,
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


def _medians(runs: list[PassSpeed], copy_rate: float) -> PassSpeed:
    """The median of each figure of a pass."""
    rows = [asdict(run) for run in runs]
    figures = {
        name: statistics.median(row[name] for row in rows)
        for name, value in rows[0].items()
        if isinstance(value, int | float)
    }
    figures |= {"runs": len(runs), "batches": round(figures["batches"])}
    return replace(runs[0], **figures | {"copy_ratio": figures["bytes_per_second"] / copy_rate})


def main() -> None:
    parser = benchmark_parser(__doc__, runs=5)
    parser.add_argument("path", metavar="PATH", nargs="?", help="folder, index file, tar, pattern or URL")
    parser.add_argument("--batch-size", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a run at most (default: %(default)s)")
    parser.add_argument("--dtype", choices=["int64", "int32", "stored"], default="int64")
    parser.add_argument("--cache-dir", help="for the temporary cache of a remote dataset")
    arguments = parser.parse_args()
    names = ("batch_size", "seconds", "runs", "dtype", "cache_dir")
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.path is None:
            write_tokens(Path(scratch), shards=8, rows=1 << 11, length=2048)
        speed = measure_speed(
            arguments.path or scratch,
            **{name: getattr(arguments, name) for name in names},
            progress=lambda name, run: print(f"{name}: run {run + 1}", file=sys.stderr),
        )
    copy = f"a copy in memory moves {speed.copy_bytes_per_second / 1e9:.1f} GB/s"
    title = (
        f"{arguments.path or 'random rows'}: {speed.samples:,} samples, batches of {speed.batch_size}; {copy}"
    )
    give(arguments, [asdict(each) for each in speed.passes], HEADS, title=title)


if __name__ == "__main__":
    main()
