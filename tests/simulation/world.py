"""The world of a simulation: datasets in a bucket that is slow, refuses, breaks off, corrupts and lies.

`Bucket` is the store of all processes; each has a `SimulatedStore` of its own below the resilient layer. What
a request meets is drawn from the seed by `Faults`, which the director of a run turns up and off.
"""

from __future__ import annotations

import gc
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol
from unittest.mock import patch

from shardkit.storage import resilient
from shardkit.storage.store import (
    BaseBody,
    BaseStore,
    ObjectExistsError,
    ObjectInfo,
    ObjectNotFoundError,
    StorageOptions,
    Store,
    StoreError,
    ThrottledError,
    TransientError,
    checked_range,
    open_source,
)
from simulation.datasets import is_shard
from simulation.machine import Machine, installed, running_on
from simulation.scheduler import Process, Scheduler

__all__ = [
    "URL",
    "BrokenPromiseError",
    "Bucket",
    "Faults",
    "Outcome",
    "Served",
    "folder_in_memory",
    "run_world",
]

URL = "memory://bucket"
LINE_SHARE = 0.02
_THREADED = (
    "cache/",
    "storage/",
    "publish/",
    "execution/",
    "locks.py",
    "loader.py",
    "producer.py",
    "streams.py",
)


class BrokenPromiseError(AssertionError):
    """The package did not do what it promises."""


@dataclass(frozen=True)
class Outcome:
    """What a run did."""

    seed: int
    steps: int
    switches: int
    virtual_seconds: float
    samples: int
    incarnations: int
    kills: int
    errors: Mapping[str, int]
    digest: int


class SimulatedWorld(Protocol):
    """What a run is about: a machine, a bucket, and who uses them."""

    scheduler: Scheduler
    machine: Machine
    bucket: Bucket
    kills: int
    errors: dict[str, int]

    @property
    def samples(self) -> int: ...
    @property
    def starts(self) -> int: ...
    def direct(self) -> None:
        """The main task of the run's director, with which it ends."""


@dataclass
class Faults:
    """How a store behaves; shares are of requests, or of bodies."""

    latency_seconds: float = 0.02
    slow_share: float = 0.0
    """Of requests, which take up to `slow_seconds`."""
    slow_seconds: float = 5.0
    refuse_share: float = 0.0
    """Of requests: 503, 500, or no connection."""
    break_share: float = 0.0
    """Of bodies, at some byte: an error, an early end, or silence and an error."""
    corrupt_share: float = 0.0
    """Of bodies, in which one byte is another."""
    bytes_per_second: float = 1e6

    @classmethod
    def drawn(cls, chance: random.Random) -> Faults:
        def share(most: float) -> float:
            return chance.choice((0.0, most / 10, most))

        return cls(
            latency_seconds=chance.choice((0.0, 0.005, 0.05, 0.5)),
            slow_share=share(0.2),
            slow_seconds=chance.choice((1.0, 5.0, 40.0)),
            refuse_share=1.0 if chance.random() < 0.15 else share(0.3),
            break_share=share(0.3),
            corrupt_share=share(0.2),
            bytes_per_second=chance.choice((2e3, 1e5, 1e7)),
        )


@dataclass
class Served:
    """What a process has asked for, and been given."""

    requests: int = 0
    body_bytes: int = 0
    shard_bytes: Counter[str] = field(default_factory=Counter)
    open: int = 0
    most_open: int = 0


class Bucket:
    """Objects, and how requests for them go."""

    def __init__(self, scheduler: Scheduler, chance: random.Random) -> None:
        self.scheduler, self.chance = scheduler, chance
        self.faults = Faults()
        self.objects: dict[str, tuple[ObjectInfo, bytes]] = {}
        self.served: dict[Process, Served] = {}
        self.versions = 0
        self.on_write: Callable[[str], None] = lambda name: None
        """Called after each write, with the object's name."""
        self.corrupted = self.replaced = 0
        """Bodies, and objects."""

    def put_folder(self, name: str, folder: Path) -> None:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                key, data = f"{name}/{file.relative_to(folder)}", file.read_bytes()
                self.objects[key] = ObjectInfo(key, len(data), f"v1-{len(data)}"), data

    def open_store(self, url: str, options: StorageOptions | None = None) -> Store:
        """As `shardkit.storage.url.open_store`."""
        assert str(url).startswith(URL), url
        return SimulatedStore(self, str(url))

    def replace(self, key: str) -> None:
        """Put an object again: the same bytes, another version."""
        info, data = self.objects[key]
        self.objects[key] = replace(info, version=f"{info.version}+"), data
        self.replaced += 1

    @property
    def mine(self) -> Served:
        """Of the running process."""
        assert self.scheduler.current is not None
        return self.served.setdefault(self.scheduler.current.process, Served())


class SimulatedStore(BaseStore):
    """The bucket as one process sees it; every request is a step, and takes time."""

    def __init__(self, bucket: Bucket, url: str) -> None:
        self._bucket, self._url = bucket, url.rstrip("/")
        self._prefix = self._url.removeprefix(URL).strip("/")

    @property
    def url(self) -> str:
        return self._url

    def head(self, key: str) -> ObjectInfo:
        self._request("head", key)
        return self._found(key)[0]

    def open(
        self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None
    ) -> SimulatedBody:
        served = self._bucket.mine
        served.open += 1
        served.most_open = max(served.most_open, served.open)
        try:
            self._request("open", f"{key} {start}-{stop}")
            info, data = self._found(key)
            start, stop = checked_range(self.where(key), info, start, stop, version)
            return SimulatedBody(self._bucket, info, data[start:stop], served)
        except BaseException:
            served.open -= 1
            raise

    def put(
        self,
        key: str,
        data: bytes | Path,
        *,
        if_absent: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        with open_source(self.where(key), data) as source:
            content = source.read()
        self._request("put", key)
        bucket, name = self._bucket, f"{self._prefix}/{key}"
        if if_absent and name in bucket.objects:
            raise ObjectExistsError(self.where(key), "already exists", status=412)
        bucket.versions += 1
        info = ObjectInfo(name, len(content), f"v{bucket.versions}", dict(metadata or {}))
        bucket.objects[name] = info, content
        bucket.on_write(name)
        self._answer(key)
        return replace(info, key=key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self._request("list", prefix)
        before = f"{self._prefix}/"
        for name, (info, _) in sorted(self._bucket.objects.items()):
            if name.startswith(before + prefix):
                yield ObjectInfo(name.removeprefix(before), info.bytes, info.version)

    def delete(self, key: str) -> None:
        self._request("delete", key)
        name = f"{self._prefix}/{key}"
        self._bucket.objects.pop(name, None)
        self._bucket.on_write(name)
        self._answer(key)

    def _found(self, key: str) -> tuple[ObjectInfo, bytes]:
        found = self._bucket.objects.get(f"{self._prefix}/{key}")
        if found is None:
            raise ObjectNotFoundError(self.where(key), "there is no such object", status=404)
        return replace(found[0], key=key), found[1]

    def _answer(self, key: str) -> None:
        """The way back of an answer to a write, which may be slow or lost."""
        bucket, faults, chance = self._bucket, self._bucket.faults, self._bucket.chance
        bucket.scheduler.step()
        if chance.random() < faults.slow_share:
            bucket.scheduler.sleep(faults.slow_seconds * chance.random())
        if chance.random() < faults.refuse_share:
            raise TransientError(self.where(key), "the answer was lost (simulated)")

    def _request(self, operation: str, key: str) -> None:
        bucket, faults, chance = self._bucket, self._bucket.faults, self._bucket.chance
        bucket.mine.requests += 1
        scheduler = bucket.scheduler
        scheduler.note(f"{operation} {self._prefix}/{key}")
        scheduler.step()
        seconds = faults.latency_seconds * chance.random()
        if chance.random() < faults.slow_share:
            seconds += faults.slow_seconds * chance.random()
        if seconds:
            scheduler.sleep(seconds)
        if chance.random() < faults.refuse_share:
            raise self._refusal(key, chance.randrange(4))

    def _refusal(self, key: str, kind: int) -> StoreError:
        if kind <= 1:
            error = ThrottledError(self.where(key), "SlowDown (simulated)", status=503)
            error.retry_after_seconds = 1.0 if kind else None
            return error
        if kind == 2:
            return TransientError(self.where(key), "InternalError (simulated)", status=500)
        return TransientError(self.where(key), "connection refused (simulated)")


class SimulatedBody(BaseBody):
    """The bytes of one answer; what goes wrong with them was drawn when it began."""

    def __init__(self, bucket: Bucket, info: ObjectInfo, data: bytes, served: Served) -> None:
        self.info = info
        self._bucket, self._served, self._is_open = bucket, served, True
        faults, chance = bucket.faults, bucket.chance
        self._break_at: int | None = None
        if data and chance.random() < faults.break_share:
            self._break_at, self._kind = chance.randrange(len(data)), chance.randrange(3)
        # Shards only: nothing proves an index, whose other bytes may be another order.
        if data and is_shard(info.key) and chance.random() < faults.corrupt_share:
            bucket.corrupted += 1
            place = chance.randrange(len(data))
            data = data[:place] + bytes([data[place] ^ chance.randrange(1, 256)]) + data[place + 1 :]
            bucket.scheduler.note(f"corrupt {info.key} at {place}")
        self._data, self._at = data, 0

    def readinto(self, buffer: memoryview, /) -> int:
        if not self._is_open:
            raise ValueError("read of a closed body")
        scheduler = self._bucket.scheduler
        scheduler.step()
        stop = len(self._data) if self._break_at is None else self._break_at
        count = min(len(buffer), stop - self._at)
        if not count and self._break_at is not None:
            if self._kind == 0:
                return 0
            if self._kind == 1:
                scheduler.sleep(60.0 * self._bucket.chance.random())
            raise TransientError(self.info.key, "connection reset (simulated)")
        if count > 1 and self._bucket.chance.random() < 0.3:
            count = self._bucket.chance.randrange(1, count)
        if count:
            scheduler.sleep(count / self._bucket.faults.bytes_per_second)
        buffer[:count] = self._data[self._at : self._at + count]
        self._at += count
        self._served.body_bytes += count
        return count

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def close(self) -> None:
        self._served.open -= self._is_open
        self._is_open = False


@cache
def _has_threads(file: str) -> bool:
    """Whether several threads run what is in a file."""
    return "/shardkit/" in file and any(f"/{part}" in file for part in _THREADED)


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """A temporary folder, in memory if the system has one there."""
    memory = Path("/dev/shm")
    parent = memory if memory.is_dir() else None
    with TemporaryDirectory(dir=parent, prefix="shardkit-simulation-") as root:
        yield Path(root)


def run_world(
    world: SimulatedWorld,
    *seen: tuple[Any, str, object],
    watch: Callable[[Scheduler], None] | None,
    lines: bool,
) -> Outcome:
    """A run of a world to its end. `seen`: what its tasks see in place of the package's own objects.

    `watch`: gets the scheduler before the first step. `lines`: as for `_running`.
    """
    scheduler = world.scheduler
    with _running(world.machine, world.bucket, *seen, lines=lines):
        if watch is not None:
            watch(scheduler)
        scheduler.run(world.direct)
    return Outcome(
        seed=scheduler.seed,
        steps=scheduler.steps,
        switches=scheduler.switches,
        virtual_seconds=scheduler.now,
        samples=world.samples,
        incarnations=world.starts,
        kills=world.kills,
        errors=world.errors,
        digest=scheduler.digest,
    )


@contextmanager
def _running(
    machine: Machine, bucket: Bucket, *more: tuple[Any, str, object], lines: bool = False
) -> Iterator[None]:
    """In the block, the scheduler's tasks run on `machine` and reach `bucket`; `more`: what else they see.

    `lines`: tasks may be interrupted between any two lines of the package's code that several threads run.
    """
    was_collecting = gc.isenabled()
    gc.disable()  # or its moments would differ from run to run
    gc.freeze()
    try:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            # Generators of processes that were killed.
            stack.enter_context(patch.object(sys, "unraisablehook", lambda error: None))
            stack.enter_context(installed())
            stack.enter_context(patch.object(resilient, "open_store", bucket.open_store))
            for holder, name, value in more:
                stack.enter_context(patch.object(holder, name, value))
            stack.enter_context(running_on(machine))
            if lines:
                machine.scheduler.interrupt_lines(_has_threads, LINE_SHARE)
            try:
                yield
            finally:
                gc.collect()
    finally:
        gc.unfreeze()
        if was_collecting:
            gc.enable()
