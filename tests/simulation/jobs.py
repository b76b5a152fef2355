"""The training jobs of a simulation: ranks in lockstep, and what is checked of each step and each end."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkit.cache.subfolder import SUBFOLDER
from shardkit.errors import ShardkitError
from shardkit.loaders import StreamingLoader
from shardkit.loaders.config import Stream
from shardkit.storage import StorageOptions
from simulation.scheduler import Process
from simulation.threads import Condition
from simulation.world import (
    LENGTH,
    URL,
    BrokenPromiseError,
    Served,
    dataset_rows,
    expected_order,
)

if TYPE_CHECKING:
    from simulation.training import World

__all__ = ["DATASETS", "MOST_BATCH", "Job", "JobPlan"]

DATASETS = ("mds-240-24", "zstd-180-15", "mds-96-6")
MOST_RANKS = MOST_ROWS = 4
MOST_BATCH = MOST_RANKS * MOST_ROWS
MOST_REQUESTS = 4 * StorageOptions().connections
"""Of a process: those that hold its connections, and three for each that have been abandoned."""
CALM_SECONDS = 30.0
"""Without faults, a batch is not waited for longer: as long as a lease and a lock that others hold."""
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
    changes_live: bool
    """Whether weights change by `set_weights` during a run, not by a schedule given to the loader."""

    @classmethod
    def drawn(cls, chance: random.Random, name: str, folder: Path, cache_bytes: int) -> JobPlan:
        datasets = tuple(chance.sample(DATASETS, chance.choice((1, 1, 2))))
        samples = chance.choice((60, 150, 300))
        schedule = [(0, tuple(chance.randint(1, 3) for _ in datasets))]
        if len(datasets) > 1 and chance.random() < 0.7:
            start = chance.randrange(MOST_BATCH, samples)
            schedule.append((start, tuple(chance.randint(1, 3) for _ in datasets)))
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
            changes_live=len(schedule) > 1 and chance.random() < 0.5,
        )


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
        self._began_calm = self.world.is_calm
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
        options: dict[str, Any] = {}
        if len(plan.datasets) > 1 and not plan.changes_live:
            options["schedule"] = list(plan.schedule)
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
        scheduler, chance, position = self.world.scheduler, self.world.machine.chance, self.start
        batches = iter(loader)
        change_at = self.plan.schedule[-1][0] - MOST_BATCH if self.plan.changes_live else None
        if change_at is not None and position >= max(1, change_at):
            change_at = None  # it is in the state
        while position < self.plan.samples:
            began = scheduler.now
            batch = next(batches)
            self._check_wait(scheduler.now - began)
            self._check_batch(rank, position, batch)
            position += self.world_size * self.batch_size
            if loader.position != position:
                raise BrokenPromiseError(f"the position is {loader.position}, not {position}")
            scheduler.note(f"batch {position}")
            if change_at is not None and position >= change_at:
                start, weights = self.plan.schedule[-1]
                loader.set_weights(weights, at_position=max(start, position))
                change_at = None
            self._pass_barrier(position, loader)
            if chance.random() < 0.03:  # leave the loop, and come back
                batches = iter(loader)
            if self.plan.pause_seconds:
                scheduler.sleep(self.plan.pause_seconds * chance.random())

    def _check_wait(self, seconds: float) -> None:
        longest = CALM_SECONDS if self._began_calm else self.plan.timeout_seconds + 60.0
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
        # The clock's own thread ends a minute after its last use.
        names = sorted(other.name for other in process.tasks if other is not task)
        names = [name for name in names if not name.endswith(":suspension-watch")]
        if names or process.descriptors:
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
