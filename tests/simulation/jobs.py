"""Training jobs on one simulated machine, what befalls them, and what must hold all the same.

A run draws one to three jobs from its seed. Each reads a dataset or a mixture through a cache, which jobs may
share, as ranks in lockstep that save a state now and then. In the first part of a run, ranks are killed and
suspended, the store and the disk fail, clocks jump, and cached files are damaged. A job that lost a rank, or
whose rank got an error that the package documents, begins again from its last state with another number of
ranks and another batch size. Then all faults end, and each job must reach its end without any error.

Checked are: each step has the samples that the order says, with the right tokens; an error has a cause; a
wait has a limit; the cache never takes more than its room; no more requests are open than allowed; a process
that has closed its loader has no file, thread, room, lease or request left; counters agree with the store's.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.cache import folder as cache_folder
from shardkit.cache.fetcher import FetchLimits
from shardkit.cache.shards import CachedShards
from shardkit.cache.subfolder import SUBFOLDER
from shardkit.errors import ShardkitError
from shardkit.loaders import StreamingLoader
from shardkit.loaders import streams as loader_streams
from shardkit.loaders.config import Stream
from shardkit.storage import StorageOptions
from simulation.machine import Disk, Machine
from simulation.scheduler import Condition, Event, Process, Scheduler
from simulation.world import (
    LENGTH,
    URL,
    BrokenPromiseError,
    Bucket,
    Faults,
    Outcome,
    Served,
    dataset_files,
    dataset_rows,
    expected_order,
    running,
)

__all__ = ["simulate"]

DATASETS = ("mds-240-24", "zstd-180-15", "mds-96-6")
MOST_RANKS = MOST_ROWS = 4
MOST_BATCH = MOST_RANKS * MOST_ROWS
MOST_REQUESTS = 4 * StorageOptions().connections
"""Of a process: those that hold its connections, and three for each that have been abandoned."""
STOP_SECONDS = 150.0
"""After `close`: idle threads have ended by then, and reads in flight been abandoned."""


@dataclass(frozen=True)
class JobPlan:
    """What a job reads, and how."""

    name: str
    datasets: tuple[str, ...]
    schedule: tuple[tuple[int, tuple[int, ...]], ...]
    window: int
    samples: int
    cache_dir: Path | None
    cache_bytes: int
    connections: int
    timeout_seconds: float
    prefetch_batches: int
    pause_seconds: float
    """Between two batches, at most."""

    @classmethod
    def drawn(cls, chance: random.Random, name: str, folder: Path, cache_bytes: int) -> JobPlan:
        datasets = tuple(chance.sample(DATASETS, chance.choice((1, 1, 2))))
        samples = chance.choice((60, 150, 300))
        schedule = [(0, tuple(chance.randint(1, 3) for _ in datasets))]
        if len(datasets) > 1 and chance.random() < 0.7:
            schedule.append((chance.randrange(1, samples), tuple(chance.randint(1, 3) for _ in datasets)))
        return cls(
            name=name,
            datasets=datasets,
            schedule=tuple(schedule),
            window=chance.choice((8, 40, 100)),
            samples=samples,
            cache_dir=folder if chance.random() < 0.85 else None,
            cache_bytes=cache_bytes,
            connections=chance.choice((1, 2, 4, 16)),
            timeout_seconds=chance.choice((60.0, 600.0)),
            prefetch_batches=chance.choice((0, 2, 64)),
            pause_seconds=chance.choice((0.0, 0.01, 1.0)),
        )


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
        self.is_calm = False
        self.has_failed_disk = False
        self.is_slow = False
        """Whether something may take as long as a loader waits."""
        self.kills = 0
        self.errors: dict[str, int] = {}

    def count_loads(self) -> Callable[..., Any]:
        """`CachedShards._load` that counts what it returns."""
        load = CachedShards._load

        def counted(shards: CachedShards, number: int, *more: Any) -> Any:
            data = load(shards, number, *more)
            assert self.scheduler.current is not None
            self.loads[self.scheduler.current.process] += 1
            return data

        return counted

    def direct(self) -> None:
        """The main task of the director: start the jobs, cause faults, end the faults, wait for the jobs."""
        ended = []
        for job in self.jobs:
            ended.append(Event())
            self.scheduler.spawn(partial(self._run_job, job, ended[-1]), job.plan.name)
        for _ in range(self.chance.choice((0, 3, 10, 30))):
            self._cause_fault()
            self.scheduler.sleep(self.chance.choice((0.05, 1.0, 10.0)) * self.chance.random())
        self._calm_down()
        for event in ended:
            event.wait()

    def _run_job(self, job: Job, ended: Event) -> None:
        job.run()
        ended.set()

    def _calm_down(self) -> None:
        self.scheduler.note("calm")
        self.bucket.faults = Faults()
        disk = self.machine.disk
        disk.foreign, disk.error_share, disk.sync_seconds = 0, 0.0, 0.0
        for process in self._ranks():
            if process.is_suspended:
                self.scheduler.resume(process)
        self.is_calm = True

    def note_error(self, error: ShardkitError) -> None:
        """A rank's loop got `error`, for which there must be a cause."""
        name = type(error).__name__
        self.scheduler.note(f"error {name}: {error}")
        self.errors[name] = self.errors.get(name, 0) + 1
        has_cause = {
            "DamagedObjectError": self.bucket.corrupted > 0,
            "ShardError": self.bucket.corrupted > 0,
            "ObjectChangedError": self.bucket.replaced > 0,
            "CacheFolderError": self.has_failed_disk,
            "FetchTimeoutError": self.is_slow,
            "LoaderTimeoutError": self.is_slow,
        }
        if not has_cause.get(name, False):
            raise BrokenPromiseError(f"without a cause: {name}: {error}") from error

    def _ranks(self) -> list[Process]:
        return [rank for job in self.jobs for rank in job.ranks if rank.is_alive and not rank.ended.is_set()]

    def _cause_fault(self) -> None:
        chance, disk = self.chance, self.machine.disk
        kind = chance.choice(
            ("kill", "kill", "suspend", "store", "store", "disk", "clock", "damage", "replace", "remove")
        )
        ranks = self._ranks()
        self.scheduler.note(f"fault {kind}")
        if kind == "kill" and ranks:
            self.kills += 1
            self.scheduler.kill_after(chance.choice(ranks), chance.choice((1, 10, 100, 1000)))
        elif kind == "suspend" and ranks:
            process = chance.choice(ranks)
            if not process.is_suspended:
                self.scheduler.suspend(process)
                self.is_slow = True
                seconds = chance.choice((0.1, 5.0, 30.0, 200.0)) * chance.random()
                self.scheduler.spawn(partial(self._resume, process, seconds), "resume")
        elif kind == "store":
            self.bucket.faults = faults = Faults.drawn(chance)
            self.is_slow |= faults.refuse_share + faults.slow_share + faults.break_share > 0
            self.is_slow |= faults.bytes_per_second < 1e5
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
            self.bucket.replace(chance.choice([key for key in self.bucket.objects if ".mds" in key]))
        elif kind == "remove" and chance.random() < 0.3:
            shutil.rmtree(self.cache / SUBFOLDER, ignore_errors=True)
            self.has_failed_disk = True

    def _resume(self, process: Process, seconds: float) -> None:
        self.scheduler.sleep(seconds)
        if process.is_suspended:
            self.scheduler.resume(process)

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


class Job:
    """Ranks in lockstep, begun again from the last state whenever one of them is lost."""

    def __init__(self, world: World, plan: JobPlan) -> None:
        self.world, self.plan = world, plan
        self.ranks: list[Process] = []
        self.state: dict[str, object] | None = None
        self.position = 0
        self.incarnations = 0

    def run(self) -> None:
        chance, scheduler = self.world.chance, self.world.scheduler
        while self.position < self.plan.samples:
            was_calm = self.world.is_calm
            self.incarnations += 1
            world_size, batch_size = chance.randint(1, MOST_RANKS), chance.randint(1, MOST_ROWS)
            scheduler.note(
                f"start {self.plan.name} at {self.position} with {world_size} ranks of {batch_size}"
            )
            run = Incarnation(self, world_size, batch_size)
            self.ranks = [
                scheduler.process(f"{self.plan.name}.{self.incarnations}.{rank}", partial(run.rank, rank))
                for rank in range(world_size)
            ]
            run.wait_for(self.ranks)
            if was_calm and run.errors:
                raise run.errors[0]
            if was_calm and run.lost:
                raise BrokenPromiseError(f"{self.plan.name}: a rank was lost after all faults had ended")


class Incarnation:
    """A job from one start to the next."""

    def __init__(self, job: Job, world_size: int, batch_size: int) -> None:
        self.job, self.world, self.plan = job, job.world, job.plan
        self.world_size, self.batch_size = world_size, batch_size
        self.start, self.start_state = job.position, job.state
        self.errors: list[Exception] = []
        self.lost = False
        self._changed = Condition()
        self._arrived = self._passed = 0
        self._states: list[tuple[int, dict[str, object]]] = []
        self._saves = False
        self._delivered: list[tuple[int, int]] = []  # in this step, by all ranks

    def wait_for(self, ranks: list[Process]) -> None:
        """Until all ranks have ended; as soon as one is lost, the launcher kills the others."""
        scheduler = self.world.scheduler
        pending = list(ranks)
        while pending:
            for process in list(pending):
                if process.ended.wait(0.05):
                    pending.remove(process)
                    if not process.is_alive or self.errors:
                        self.lost = True
            if self.lost and pending:
                scheduler.sleep(self.world.chance.choice((0.0, 1.0, 20.0)))
                for process in pending:
                    if process.is_suspended:
                        scheduler.resume(process)
                    scheduler.kill(process)
                return

    def rank(self, rank: int) -> None:
        """The main task of a rank."""
        try:
            with self._loader(rank) as loader:
                if self.start_state is not None:
                    loader.load_state_dict(self.start_state)
                self._train(rank, loader)
                served = self._served()
            self._check_stopped(rank, loader, served)
        except ShardkitError as error:
            self.world.note_error(error)
            self.errors.append(error)

    def _loader(self, rank: int) -> StreamingLoader:
        plan = self.plan
        options: dict[str, Any] = {"schedule": list(plan.schedule)} if len(plan.datasets) > 1 else {}
        streams = [
            Stream(f"{URL}/{name}", name=str(number), weight=plan.schedule[0][1][number])
            for number, name in enumerate(plan.datasets)
        ]
        return StreamingLoader(
            streams if len(streams) > 1 else f"{URL}/{plan.datasets[0]}",
            batch_size=self.batch_size,
            rank=rank,
            world_size=self.world_size,
            dtype=None,
            return_ids=True,
            tensors="numpy",
            endless=True,
            lanes=2,
            window=plan.window,
            cache_dir=plan.cache_dir,
            cache_bytes=plan.cache_bytes,
            connections=plan.connections,
            timeout_seconds=plan.timeout_seconds,
            prefetch_batches=plan.prefetch_batches,
            **options,
        )

    def _train(self, rank: int, loader: StreamingLoader) -> None:
        scheduler, position = self.world.scheduler, self.start
        batches = iter(loader)
        while position < self.plan.samples:
            began = scheduler.now
            batch = next(batches)
            self._check_wait(scheduler.now - began)
            self._check_batch(rank, position, batch)
            position += self.world_size * self.batch_size
            if loader.position != position:
                raise BrokenPromiseError(f"the position is {loader.position}, not {position}")
            scheduler.note(f"batch {position}")
            self._pass_barrier(position, loader)
            if self.plan.pause_seconds:
                scheduler.sleep(self.plan.pause_seconds * self.world.machine.chance.random())

    def _check_wait(self, seconds: float) -> None:
        longest = self.plan.timeout_seconds + 60.0
        if seconds > longest and self.world.is_calm:
            raise BrokenPromiseError(
                f"a batch was waited for for {seconds:.0f} s, longer than {longest:.0f} s"
            )

    def _check_batch(self, rank: int, position: int, batch: Any) -> None:
        """The tokens are those of the rows that the batch names."""
        rows = batch["sample_id"]
        streams = batch.get("stream_id", np.zeros_like(rows))
        datasets = self.plan.datasets
        expected = np.stack([dataset_rows(datasets[s])[r] for s, r in zip(streams, rows, strict=True)])
        if batch["tokens"].shape != (self.batch_size, LENGTH) or not np.array_equal(
            batch["tokens"], expected
        ):
            raise BrokenPromiseError(f"rank {rank} at {position}: wrong tokens in rows {rows}")
        self._delivered += zip(streams.tolist(), rows.tolist(), strict=True)

    def _check_step(self, position: int) -> None:
        """The ranks have together what the order says, each sample once."""
        plan, size = self.plan, self.world_size * self.batch_size
        streams, rows = expected_order(plan.datasets, plan.schedule, plan.window, plan.samples + MOST_BATCH)
        step = slice(position - size, position)
        expected = sorted(zip(streams[step].tolist(), rows[step].tolist(), strict=True))
        delivered, self._delivered = sorted(self._delivered), []
        if delivered != expected:
            raise BrokenPromiseError(f"{plan.name} before {position}: delivered {delivered}, not {expected}")

    def _pass_barrier(self, position: int, loader: StreamingLoader) -> None:
        """Wait for the other ranks, as training does; save a state now and then."""
        with self._changed:
            self._arrived += 1
            if self._arrived == self.world_size:
                self._check_step(position)
                self._arrived, self._states = 0, []
                self._passed += 1
                self._saves = position >= self.plan.samples or self.world.chance.random() < 0.3
                self._changed.notify_all()
            else:
                passed = self._passed
                self._changed.wait_for(lambda: self._passed > passed)
            if not self._saves:
                return
        state = loader.state_dict()
        with self._changed:
            if any(other != state for _, other in self._states):
                raise BrokenPromiseError("two ranks saved different states at one step")
            self._states.append((position, state))
            if len(self._states) == self.world_size:
                self.job.position, self.job.state = position, state
                self.world.scheduler.note(f"save {self.plan.name} {position}")

    def _served(self) -> Served:
        return replace(self.world.bucket.mine)

    def _check_stopped(self, rank: int, loader: StreamingLoader, served: Served) -> None:
        """A closed loader holds nothing; what it counted is what happened."""
        scheduler = self.world.scheduler
        scheduler.sleep(STOP_SECONDS)
        task = scheduler.current
        assert task is not None
        process = task.process
        where = process.name
        if not self.world.is_calm:
            return
        if served.most_open > MOST_REQUESTS:
            raise BrokenPromiseError(f"{where}: {served.most_open} requests at a time")
        if len(process.tasks) > 1 or process.descriptors:
            names = sorted(other.name for other in process.tasks if other is not task)
            raise BrokenPromiseError(
                f"{where} was closed, but has threads {names}, files {process.descriptors}"
            )
        mine = f"~{process.number}~"
        filling = [
            file.name for file in (self.world.cache / SUBFOLDER).glob("filling/*") if mine in file.name
        ]
        if filling and not self.world.has_failed_disk:  # what cannot be removed is removed later
            raise BrokenPromiseError(f"{where} was closed, but holds room: {filling}")
        snapshots = [
            data.shards.store.metrics.snapshot() for data in loader.datasets if data.shards is not None
        ]
        counts = [data.shards.counts for data in loader.datasets if data.shards is not None]
        loads = sum(count["hits"] + count["misses"] for count in counts)
        if loads != self.world.loads[process]:
            read = self.world.loads[process]
            raise BrokenPromiseError(f"{where}: {loads} hits and misses, {read} shards were read")
        if self.world.bucket.mine.open or any(snapshot.in_flight for snapshot in snapshots):
            raise BrokenPromiseError(f"{where} was closed, but has requests open")
        read = sum(snapshot.bytes_read for snapshot in snapshots)
        if read != self.world.bucket.mine.body_bytes:
            served_bytes = self.world.bucket.mine.body_bytes
            raise BrokenPromiseError(f"{where}: {read:,} bytes counted, {served_bytes:,} served")


def simulate(seed: int, *, watch: Callable[[Scheduler], None] | None = None) -> Outcome:
    """One run of jobs. Raises what went wrong: `BrokenPromiseError`, or an error of the package."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        dir=memory if memory.is_dir() else None, prefix="shardkit-simulation-"
    ) as root:
        world = World(seed, Path(root))
        for job in world.jobs:
            plan = job.plan
            expected_order(plan.datasets, plan.schedule, plan.window, plan.samples + MOST_BATCH)
        with running(
            world.machine,
            world.bucket,
            (CachedShards, "_load", world.count_loads()),
            (loader_streams, "FetchLimits", lambda **_: world.limits),
            (cache_folder, "_numbers", iter(range(sys.maxsize))),
        ):
            if watch is not None:
                watch(world.scheduler)
            world.scheduler.run(world.direct)
    return Outcome.of(
        world.scheduler,
        samples=sum(job.position for job in world.jobs),
        incarnations=sum(job.incarnations for job in world.jobs),
        kills=world.kills,
        errors=world.errors,
    )
