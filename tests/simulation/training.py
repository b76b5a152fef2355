"""Training jobs on one simulated machine, what befalls them, and what must hold all the same.

A run draws one to three jobs from its seed. Each reads a dataset or a mixture through a cache, which jobs may
share, as ranks in lockstep that save a state now and then: with any tail, over several epochs, balanced or
not, each rank as one process or as several replicas. In the first part of a run, ranks are killed and
suspended, the store and the disk fail, clocks jump, and cached files are damaged. A job that lost a rank, or
whose rank got an error that the package documents, begins again from its last state with another number of
ranks and another batch size. Then all faults end, and each job must reach its end without any error.

Checked are: each rank gets the rows that the specification says, in their order, with the right tokens, and
all of them once; an epoch has its batches; an error has a cause; a wait has a limit, also while things fail;
the cache never takes more than its room; no more requests are open than allowed; a process that has closed
its loader has no file, thread, room, lease or request left; counters agree with the store's.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from shardkit.cache import folder as cache_folder
from shardkit.cache.fetcher import FetchLimits
from shardkit.cache.folder import LOCK_SECONDS, SUBFOLDER
from shardkit.cache.shards import CachedShards
from shardkit.errors import ShardkitError
from shardkit.loaders import streams as loader_streams
from shardkit.storage.running_clock import GAP_SECONDS, LOOK_SECONDS
from simulation.datasets import DATASETS, dataset_files, is_shard
from simulation.jobs import Job, JobPlan
from simulation.machine import Disk, Machine
from simulation.scheduler import Event, Process, Scheduler, Task
from simulation.world import (
    BrokenPromiseError,
    Bucket,
    Faults,
    Outcome,
    folder_in_memory,
    run_world,
)

__all__ = ["simulate"]

FAULTS = ("kill", "suspend", "store", "disk", "clock", "damage", "replace", "remove")
SHORT_SECONDS = 0.1
HELD_SECONDS = FetchLimits().lease_seconds + LOCK_SECONDS
"""The lease of a shard that another process fetches, and the folder's lock.

Whoever holds one for longer has been stopped; both are free at once when their holder dies."""
STEPS = (1, 10, 100, 1000)
"""Of a process, until something befalls it: in the middle of whatever it does."""


class World:
    """One run: its jobs, its machine and its faults."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.scheduler = Scheduler(seed)
        self.chance = random.Random(f"{seed} world")
        cache_bytes = self.chance.choice((1_500, 4_000, 12_000, 100_000))
        disk = Disk(folder, total=self.chance.choice((30_000, 400_000)))
        self.machine = Machine(self.scheduler, disk, random.Random(f"{seed} machine"))
        self.machine.after_call = self._check_room
        self.bucket = Bucket(self.scheduler, random.Random(f"{seed} store"))
        self.cache = folder / "cache"
        self.cache.mkdir()
        for name in DATASETS:
            self.bucket.put_folder(name, dataset_files(name))
        self.cache_bytes = cache_bytes
        count = self.chance.choice((1, 1, 2, 3))
        self.jobs = [
            Job(self, JobPlan.drawn(self.chance, f"job{n}", self.cache, cache_bytes)) for n in range(count)
        ]
        self.limits = FetchLimits(
            min_part_bytes=self.chance.choice((64, 256, 1 << 20)),
            read_bytes=self.chance.choice((32, 256, 1 << 18)),
            single_rows=self.chance.choice((0, 4, 32)),
        )
        self.loads: Counter[Process] = Counter()
        """Shards read."""
        self.waits: Counter[Task] = Counter()
        """For shards, of each thread."""
        self.is_calm = False
        self._kinds = self.chance.sample(FAULTS, self.chance.randint(1, len(FAULTS)))  # that this run has
        self.has_failed_disk = False
        self.is_slow = self.has_suspended = self.has_outage = False
        """Whether store or disk may have taken as long as a loader waits; whether ranks were suspended; and
        whether the store was down for minutes, which may be longer than it is tried.
        """
        self.kills = 0
        self.errors: dict[str, int] = {}

    @property
    def samples(self) -> int:
        """Delivered by all jobs."""
        return sum(job.position for job in self.jobs)

    @property
    def starts(self) -> int:
        """Of jobs, each of which may have several."""
        return sum(job.incarnations for job in self.jobs)

    def count_loads(self) -> Callable[..., Any]:
        """`CachedShards._load` that counts what it returns."""
        load = CachedShards._load

        def counted(shards: CachedShards, number: int, timeout_seconds: float, *more: Any) -> Any:
            task, began = self.scheduler.current, self.scheduler.now
            assert task is not None
            try:
                data = load(shards, number, timeout_seconds, *more)
            finally:
                self.waits[task] += self.scheduler.now - began > SHORT_SECONDS
                self.check_wait("a shard", began, self.longest_wait(timeout_seconds))
            self.loads[task.process] += 1
            return data

        return counted

    def direct(self) -> None:
        """The main task of the director: start the jobs, cause faults, end the faults, wait for the jobs."""
        ended = []
        for job in self.jobs:
            ended.append(Event())
            self.scheduler.spawn(partial(self._run_job, job, ended[-1]), job.plan.name)
        pause = self.chance.choice((0.05, 1.0, 10.0, 60.0))
        for _ in range(self.chance.choice((0, 3, 10, 30))):
            self._cause_fault()
            self.scheduler.sleep(pause * self.chance.random())
        self._calm_down()
        for event in ended:
            event.wait()

    def _run_job(self, job: Job, ended: Event) -> None:
        job.run()
        ended.set()

    def _calm_down(self) -> None:
        self.scheduler.note("calm")
        self.scheduler.spare()
        self.bucket.faults = Faults()
        disk = self.machine.disk
        disk.foreign, disk.error_share, disk.sync_seconds = 0, 0.0, 0.0
        for process in self._ranks():
            self.scheduler.resume(process)
        self.is_calm = True

    @property
    def longest_calm_wait(self) -> float | None:
        """For a batch, while nothing has taken as long as a loader waits."""
        return None if self.is_slow or self.has_suspended else HELD_SECONDS

    def longest_wait(self, timeout_seconds: float) -> float:
        """For one shard, or the rows of a batch (`CachedShards._load`, `CacheRun.first_rows`).

        The store's retries last as long as the loader's timeout, so they add nothing.
        """
        longest = timeout_seconds
        if not self.is_slow:
            # The store answers: only what suspended processes hold is waited for. Of a damaged entry that is
            # its lease, then the folder's lock (`CacheFolder._quarantine`); of rows, what a replica claimed.
            longest = min(longest, HELD_SECONDS + FetchLimits().peer_seconds)
        # The deadline is looked at before an entry is, which may be damaged, and now and then (`wait_until`).
        return longest + 2 * LOCK_SECONDS + LOOK_SECONDS

    def check_wait(self, what: str, began: float, longest: float) -> None:
        """The running task has waited since `began`, no longer than it may; suspensions do not count."""
        task = self.scheduler.current
        if task is None or not task.process.is_alive:
            return
        seconds, suspensions = task.process.ran(began, self.scheduler.now)
        longest += suspensions * GAP_SECONDS  # up to which the running clock sees none
        if seconds > longest:
            raise BrokenPromiseError(f"{what} was waited for for {seconds:.1f} s, not {longest:.1f} s")

    def note_error(self, error: ShardkitError) -> None:
        """A rank's loop got `error`, for which there must be a cause."""
        name = type(error).__name__
        # Without the folder's name, which is another one in each run.
        self.scheduler.note(f"error {name}: {error}".replace(str(self.cache), "the cache"))
        self.errors[name] = self.errors.get(name, 0) + 1
        has_cause = {
            "DamagedObjectError": self.bucket.corrupted > 0,
            "ShardError": self.bucket.corrupted > 0,
            "ObjectChangedError": self.bucket.replaced > 0,
            "CacheFolderError": self.has_failed_disk,
            "FetchTimeoutError": self.is_slow or self.has_suspended,
            "LoaderTimeoutError": self.is_slow or self.has_suspended,
            "TransientError": self.has_outage,
            "ThrottledError": self.has_outage,
        }
        if not has_cause.get(name, False):
            raise BrokenPromiseError(f"without a cause: {name}: {error}") from error

    def _ranks(self) -> list[Process]:
        return [rank for job in self.jobs for rank in job.ranks if rank.is_alive and not rank.ended.is_set()]

    def _cause_fault(self) -> None:
        chance, disk = self.chance, self.machine.disk
        kind = chance.choice(self._kinds)
        ranks = self._ranks()
        self.scheduler.note(f"fault {kind}")
        if kind == "kill" and ranks:
            self.kills += 1
            self.scheduler.after_steps(chance.choice(ranks), chance.choice(STEPS), self.scheduler.kill)
        elif kind == "suspend" and ranks:
            self.has_suspended = True
            seconds = chance.choice((0.1, 5.0, 30.0, 200.0)) * chance.random()
            suspend = partial(self.scheduler.suspend, seconds=seconds)
            self.scheduler.after_steps(chance.choice(ranks), chance.choice(STEPS), suspend)
        elif kind == "store":
            self.bucket.faults = faults = Faults.drawn(chance)
            self.is_slow |= faults.refuse_share + faults.slow_share + faults.break_share > 0
            self.is_slow |= faults.bytes_per_second < 1e5
            if faults.refuse_share == 1:
                self.has_outage = True
                self.scheduler.sleep(400 * chance.random())
        elif kind == "disk":
            disk.foreign = chance.choice((0, 0, disk.total // 2, disk.total))
            disk.error_share = chance.choice((0.0, 0.0, 0.05))
            disk.sync_seconds = chance.choice((0.0, 0.5, 20.0))
            self.has_failed_disk |= disk.error_share > 0
            self.is_slow |= disk.sync_seconds > 1
        elif kind == "clock":
            self.machine.clock_shift += chance.choice((-3600.0, -10.0, 10.0, 3600.0))
        elif kind == "damage":
            self._damage_entry()
        elif kind == "replace":
            self.bucket.replace(chance.choice(list(filter(is_shard, self.bucket.objects))))
        elif kind == "remove":
            shutil.rmtree(self.cache / SUBFOLDER, ignore_errors=True)
            self.has_failed_disk = True

    def _damage_entry(self) -> None:
        """Change a byte of a cached file, or cut it."""
        entries = sorted((self.cache / SUBFOLDER / "shards").glob("*"))
        if not entries:
            return
        file = self.chance.choice(entries)
        data = bytearray(file.read_bytes())
        if not data:
            return
        place = self.chance.randrange(len(data))
        if self.chance.random() < 0.5:
            data[place] ^= 0xFF
        else:
            data = data[:place]
        # In a new file: processes that have mapped the old one keep what they have proved.
        replacement = file.with_name("replacement")
        replacement.write_bytes(data)
        os.rename(replacement, file)  # noqa: PTH104 (a call that the simulated disk does not fail)

    def _check_room(self, call: str) -> None:
        """The cache takes no more room than it may."""
        if call not in ("posix_fallocate", "rename"):
            return
        root = self.cache / SUBFOLDER
        sizes = [
            size
            for folder in ("shards", "filling")
            for name, size in self.machine.disk.sizes(root / folder).items()
            if not name.startswith("ledger~")  # while it is written anew
        ]
        if sum(sizes) > self.cache_bytes:
            raise BrokenPromiseError(f"the cache takes {sum(sizes):,} bytes of {self.cache_bytes:,}")


def simulate(seed: int, *, watch: Callable[[Scheduler], None] | None = None, lines: bool = False) -> Outcome:
    """One run of jobs. Raises what went wrong: `BrokenPromiseError`, or an error of the package."""
    with folder_in_memory() as folder:
        world = World(seed, folder)
        seen = (
            (CachedShards, "_load", world.count_loads()),
            (loader_streams, "FetchLimits", lambda **_: world.limits),
            (cache_folder, "_numbers", iter(range(sys.maxsize))),
        )
        return run_world(world, *seen, watch=watch, lines=lines)
