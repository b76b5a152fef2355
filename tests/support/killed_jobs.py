"""Jobs that share a cache folder while their ranks are killed with -9 at random, and what became of it all.

`KilledJobs` runs two jobs of two ranks over one remote dataset, whose tokens follow from the sample id, with
a cache for about half of it. Each rank checks every token of every batch, and keeps a journal: the batch's
sample ids, and its state every few batches. A killed rank starts again from the last state in its journal.
Afterwards the journals must be what ranks that were never killed would have read, and the folder in order.

Ranks are forked from a server process that has torch loaded already: a restart takes milliseconds.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import random
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.cache.folder import SUBFOLDER, CacheFolder
from shardkit.loaders import StreamingLoader
from shardkit.loaders.config import grouped
from shardkit.storage.s3 import S3Store
from shardkit.storage.store import StorageOptions
from support.loader_data import parts
from support.remote_harness import put_folder, write_hashed
from support.resume import batches

__all__ = ["KilledJobs", "Outcome", "Sizes"]

RANKS = 2  # of each job
SEEDS = (11, 22)  # of the jobs
BATCH = 4
TIMEOUT_SECONDS = 20.0  # of a rank's wait for a batch: after that it is a hang
_STATE_EVERY = 3  # batches between two states in a journal
# Only what is found without the tests' folder on the path, of which the server of processes does not know.
_PRELOADED = [
    "torch",
    "boto3",
    "shardkit.loaders",
    "shardkit.cache.shards",
    "shardkit.cache.folder",
    "shardkit.storage.s3",
]
_START_SECONDS = 60.0  # for the server of processes to load torch on a busy machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Of the dataset; `cache_share` of it fits into the cache."""

    samples: int = 768
    shards: int = 32
    length: int = 256
    cache_share: float = 0.5
    compressed: bool = False

    @property
    def cache_bytes(self) -> int:
        return int(self.samples * self.length * 2 * self.cache_share)


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What was seen."""

    kills: int = 0
    batches: int = 0
    longest_wait_seconds: float = 0.0
    slowest_restart_seconds: float = 0.0
    """From a kill to the killed rank's next batch."""
    most_cache_bytes: int = 0
    abandoned_files: int = 0
    """In the folder when all had ended; the next process that opens it must remove them."""
    leftover_files: int = 0
    """Of those, what is still there once another process has opened the folder."""
    wrong: list[str] = field(default_factory=list)


def tokens_of(ids: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.uint16]:
    """uint16[len(ids), length]: what the samples hold."""
    return ((ids[:, None] * 7919 + np.arange(length) * 31 + 1) % 65521).astype(np.uint16)


class KilledJobs:
    """The jobs, as a context manager; `kill_one` and `run` from the process that started them."""

    def __init__(self, folder: Path, url: str, *, seed: int, sizes: Sizes | None = None) -> None:
        self._folder, self._url, self._sizes = folder, url, sizes or Sizes()
        self._random = random.Random(seed)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)
        self._ranks: dict[tuple[int, int], ForkServerProcess] = {}
        self._ended = threading.Event()
        self.outcome = Outcome()

    def __enter__(self) -> KilledJobs:
        sizes = self._sizes
        rows = tokens_of(np.arange(sizes.samples), sizes.length)
        kind = "mds_zstd" if sizes.compressed else "mds"
        write_hashed(self._folder / "data", kind, rows, parts(sizes.samples, sizes.shards))
        put_folder(self._folder / "data", S3Store(self._url, StorageOptions()))
        for job in range(len(SEEDS)):
            for rank in range(RANKS):
                self._start(job, rank)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for process in self._ranks.values():
            process.kill()
            process.join(10)

    def run(self, kills: int, *, least_batches: int = 10) -> Outcome:
        """Kill and restart so often, let every rank read some more, stop, and look at everything."""
        for place in self._ranks:
            self._await_batches(place, 1, _START_SECONDS)
        watcher = threading.Thread(target=self._watch_budget, daemon=True)
        watcher.start()
        for _ in range(kills):
            time.sleep(self._random.uniform(0.0, 0.5))  # the random moment
            self.kill_one()
        for place in self._ranks:
            self._await_batches(place, self._count(place) + least_batches, TIMEOUT_SECONDS)
        (self._folder / "stop").touch()
        for place, process in self._ranks.items():
            process.join(2 * TIMEOUT_SECONDS)
            if process.exitcode != 0:
                self.outcome.wrong.append(f"{place} ended with {process.exitcode}: {self._error(place)}")
        self._ended.set()
        watcher.join(10)
        self._check_journals()
        self._check_folder()
        return self.outcome

    def kill_one(self) -> None:
        """Kill a random rank and start it again at once."""
        place = self._random.choice(sorted(self._ranks))
        process = self._ranks[place]
        began = time.monotonic()
        process.kill()
        process.join(10)
        assert process.exitcode is not None, f"{place} outlived kill -9"
        if process.exitcode != -9:
            self.outcome.wrong.append(f"{place} ended with {process.exitcode}: {self._error(place)}")
            return
        self.outcome.kills += 1
        before = self._count(place)
        self._start(*place)
        if self._random.random() < 0.5:  # or the next kill may strike while this one is starting
            self._await_batches(place, before + 1, TIMEOUT_SECONDS)
            took = time.monotonic() - began
            self.outcome.slowest_restart_seconds = max(self.outcome.slowest_restart_seconds, took)

    def _start(self, job: int, rank: int) -> None:
        # The server of processes may be older than the S3 server that the environment leads to.
        environment = {
            name: value for name, value in os.environ.items() if name.startswith(("AWS_", "NO_PROXY"))
        }
        arguments = (str(self._folder), self._url, job, rank, self._sizes, environment)
        process = self._context.Process(target=run_rank, args=arguments, daemon=True)
        process.start()
        self._ranks[job, rank] = process

    def _await_batches(self, place: tuple[int, int], count: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds + TIMEOUT_SECONDS
        process = self._ranks[place]
        while self._count(place) < count:
            if process.exitcode is not None:
                raise AssertionError(f"{place} ended with {process.exitcode}: {self._error(place)}")
            if time.monotonic() > deadline:
                raise AssertionError(f"{place} hangs after {self._count(place)} batches")
            process.join(0.02)

    def _count(self, place: tuple[int, int]) -> int:
        return sum("ids" in entry for entry in read_journal(journal_of(self._folder, *place)))

    def _error(self, place: tuple[int, int]) -> str:
        file = journal_of(self._folder, *place).with_suffix(".error")
        return file.read_text() if file.exists() else "no error was written"

    def _watch_budget(self) -> None:
        while not self._ended.wait(0.01):
            held = used_bytes(self._folder / "cache")
            self.outcome.most_cache_bytes = max(self.outcome.most_cache_bytes, held)

    def _check_journals(self) -> None:
        for place in self._ranks:
            entries = [entry for entry in read_journal(journal_of(self._folder, *place)) if "ids" in entry]
            self.outcome.batches += len(entries)
            waits = [self.outcome.longest_wait_seconds, *(entry["wait_seconds"] for entry in entries)]
            self.outcome.longest_wait_seconds = max(waits)
            with make_loader(str(self._folder / "data"), *place) as loader:
                expected: list[list[int]] = []
                reading = batches(loader)
                for entry in entries:
                    while len(expected) <= entry["step"]:
                        expected.append(next(reading)["sample_id"].tolist())
                    if entry["ids"] != expected[entry["step"]]:
                        self.outcome.wrong.append(f"{place}: {entry}, expected {expected[entry['step']]}")

    def _check_folder(self) -> None:
        root = self._folder / "cache" / SUBFOLDER
        self.outcome.abandoned_files = len(list((root / "filling").iterdir()))
        cache = CacheFolder(self._folder / "cache", self._sizes.cache_bytes)
        self.outcome.leftover_files = len(list((root / "filling").iterdir()))
        self.outcome.most_cache_bytes = max(self.outcome.most_cache_bytes, used_bytes(self._folder / "cache"))
        for file in sorted((root / "shards").iterdir()):
            if cache.find(file.name) is None:
                self.outcome.wrong.append(f"{file} is damaged")
        if damaged := sorted((root / "damaged").iterdir()):
            self.outcome.wrong.append(f"quarantined: {damaged}")


def used_bytes(cache: Path) -> int:
    """Sum the bytes of entries and of those being filled, while nobody can begin another."""
    root = cache / SUBFOLDER
    with _held(root / "lock"):
        # In this order, so that what is renamed meanwhile is never counted twice.
        return sum(_size(file) for name in ("shards", "filling") for file in sorted((root / name).iterdir()))


@contextmanager
def _held(file: Path) -> Iterator[None]:
    with file.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def journal_of(folder: Path, job: int, rank: int) -> Path:
    return folder / f"job-{job}-rank-{rank}.jsonl"


def read_journal(file: Path) -> list[dict[str, Any]]:
    """Whole lines only: the last may have been cut by a kill."""
    if not file.exists():
        return []
    entries = []
    for line in file.read_bytes().split(b"\n"):
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue
    return entries


def make_loader(where: str, job: int, rank: int, **arguments: Any) -> StreamingLoader:
    return StreamingLoader(
        where,
        batch_size=BATCH,
        seed=SEEDS[job],
        rank=rank,
        world_size=RANKS,
        return_ids=True,
        **grouped({"lanes": 4, "window": 24, "timeout_seconds": TIMEOUT_SECONDS, **arguments}),
    )


def run_rank(
    folder_name: str, url: str, job: int, rank: int, sizes: Sizes, environment: dict[str, str]
) -> None:
    """A rank's process: read, check and write down batches until there is a file called "stop"."""
    folder = Path(folder_name)
    os.environ.update(environment, LOCAL_WORLD_SIZE=str(RANKS))
    warnings.simplefilter("ignore")
    journal = journal_of(folder, job, rank)
    try:
        states = [entry["state"] for entry in read_journal(journal) if "state" in entry]
        with make_loader(
            url,
            job,
            rank,
            cache_dir=folder / "cache",
            cache_bytes=sizes.cache_bytes,
            connections=4,
        ) as loader:
            if states:
                loader.load_state_dict(states[-1])
            follow(loader, journal, folder / "stop", sizes)
    except BaseException:
        journal.with_suffix(".error").write_text(traceback.format_exc())
        raise


def follow(loader: StreamingLoader, journal: Path, stop: Path, sizes: Sizes) -> None:
    step = loader.position // (BATCH * RANKS)
    with journal.open("ab", buffering=0) as sink:  # one write for each entry
        sink.write(b"\n")  # ends a line that a kill has cut
        began = time.perf_counter()
        for batch in batches(loader):
            waited = time.perf_counter() - began
            ids = batch["sample_id"].numpy()
            if not np.array_equal(batch["tokens"].numpy(), tokens_of(ids, sizes.length)):
                raise AssertionError(f"step {step}: wrong tokens for samples {ids.tolist()}")
            entry: dict[str, Any] = {"step": step, "ids": ids.tolist(), "wait_seconds": round(waited, 4)}
            if step % _STATE_EVERY == 0:
                entry["state"] = loader.state_dict()
            sink.write(json.dumps(entry).encode() + b"\n")
            if stop.exists():
                return
            step += 1
            began = time.perf_counter()
