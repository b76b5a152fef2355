"""The training jobs of a simulation: ranks in lockstep, and what is checked of each step and each end."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkit.cache.folder import SUBFOLDER
from shardkit.errors import ShardkitError
from shardkit.loaders import StreamingLoader
from shardkit.loaders.batch import Batch
from shardkit.loaders.config import Stream, grouped
from shardkit.order.run_settings import Tail
from shardkit.storage import StorageOptions
from simulation.datasets import DATASETS, LANES, LENGTH, SEED, Expectation, Step, dataset_rows
from simulation.scheduler import Process
from simulation.threads import Condition
from simulation.world import URL, BrokenPromiseError, Served
from support.loader_data import EOS

if TYPE_CHECKING:
    from simulation.training import World

__all__ = ["Job", "JobPlan"]

MOST_RANKS = MOST_ROWS = 4
MOST_PROCESSES = 6
MOST_BATCH = MOST_RANKS * MOST_ROWS
PADDING = (-1, -1)
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
    """Until the job is done, over all ranks and epochs."""
    tail: Tail
    epoch_samples: int | None
    endless: bool
    is_balanced: bool
    replicas: int
    """Processes of each rank."""
    is_launched: bool
    """Whether a launcher says in the environment which process this is, as torchrun does."""
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
            tail=chance.choice(("carry", "drop", "pad")),
            epoch_samples=chance.choice((None, None, 45, 100)),
            endless=chance.random() < 0.5,
            is_balanced=chance.random() < 0.3,
            replicas=chance.choice((1, 1, 1, 2, 3)),
            is_launched=chance.random() < 0.5,
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
        self.expectation = Expectation(
            plan.datasets,
            plan.schedule,
            window=plan.window,
            tail=plan.tail,
            epoch_samples=plan.epoch_samples,
            is_balanced=plan.is_balanced,
        )
        self.ranks: list[Process] = []
        self.state: dict[str, object] | None = None
        self.position = self.epoch_batches = 0
        self.incarnations = 0
        self._delivered: Counter[tuple[int, int]] = Counter()  # each (stream, row), up to the last state

    def run(self) -> None:
        chance, scheduler, plan = self.world.chance, self.world.scheduler, self.plan
        while self.position < plan.samples:
            was_calm = self.world.is_calm
            self.incarnations += 1
            world_size = chance.randint(1, min(MOST_RANKS, MOST_PROCESSES // plan.replicas))
            batch_size = chance.randint(1, MOST_ROWS)
            scheduler.note(f"start {plan.name} at {self.position} with {world_size} ranks of {batch_size}")
            run = Incarnation(self, world_size, batch_size)
            self.ranks = [
                self._start(run, number, world_size * plan.replicas)
                for number in range(world_size * plan.replicas)
            ]
            run.wait_for(self.ranks)
            if was_calm and run.errors:
                raise run.errors[0]
            if was_calm and run.lost:
                raise BrokenPromiseError(f"{plan.name}: a rank was lost after all faults had ended")
        self._check_delivered()

    def _start(self, run: Incarnation, number: int, processes: int) -> Process:
        name = f"{self.plan.name}.{self.incarnations}.{number}"
        process = self.world.scheduler.process(name, partial(run.rank, number))
        if self.plan.is_launched:
            process.environment = {
                "RANK": f"{number}",
                "WORLD_SIZE": f"{processes}",
                "LOCAL_RANK": f"{number}",
                "LOCAL_WORLD_SIZE": f"{processes}",
            }
        return process

    def save(self, state: dict[str, object], steps: list[Step], epoch_batches: int) -> None:
        """Keep a state of all ranks, and the steps since the one before."""
        self.state, self.position, self.epoch_batches = state, steps[-1].after, epoch_batches
        rows = (row for step in steps for rank in step.ranks for row in rank)
        self._delivered.update(row for row in rows if row != PADDING)
        self.world.scheduler.note(f"save {self.plan.name} {self.position}")

    def _check_delivered(self) -> None:
        """Each row was delivered once before any of its stream was delivered again; arithmetic aside."""
        plan = self.plan
        for stream, name in enumerate(plan.datasets):
            counts = [self._delivered[stream, row] for row in range(len(dataset_rows(name)))]
            passes = -(-self.position // len(counts))
            if plan.tail != "drop":
                passes = min(counts) + 1
            if max(counts) > passes:
                raise BrokenPromiseError(f"{plan.name}: rows of {name} were delivered {counts} times")
        total, position = self._delivered.total(), self.position
        dropped = MOST_BATCH * (position // self.expectation.epoch_samples) if plan.tail == "drop" else 0
        if not position - dropped <= total <= position:
            raise BrokenPromiseError(f"{plan.name}: {total} rows were delivered before {position}")


class Incarnation:
    """A job from one start to the next."""

    def __init__(self, job: Job, world_size: int, batch_size: int) -> None:
        self.job, self.world, self.plan = job, job.world, job.plan
        self.world_size, self.batch_size = world_size, batch_size
        self.start, self.start_state, self.epoch_batches = job.position, job.state, job.epoch_batches
        self.errors: list[Exception] = []
        self.lost = False
        self._changed = Condition()
        self._arrived = self._passed = 0
        self._states: list[dict[str, object]] = []
        self._saves = False
        self._steps: list[Step] = []  # since the last state

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

    def rank(self, number: int) -> None:
        """The main task of a process."""
        rank = number // self.plan.replicas
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
        if not plan.is_launched or plan.replicas > 1:
            options = {"rank": rank, "world_size": self.world_size}
        if len(plan.datasets) > 1 and not plan.changes_live:
            options["schedule"] = list(plan.schedule)
        streams = [
            Stream(f"{URL}/{name}", name=str(number), weight=plan.schedule[0][1][number])
            for number, name in enumerate(plan.datasets)
        ]
        return StreamingLoader(
            streams if len(streams) > 1 else f"{URL}/{plan.datasets[0]}",
            batch_size=self.batch_size,
            seed=SEED,
            tail=plan.tail,
            dtype=None,
            return_ids=True,
            eos_id=EOS,
            endless=plan.endless,
            cache_dir=plan.cache_dir,
            cache_bytes=plan.cache_bytes,
            **grouped(
                {
                    "tensors": "numpy",
                    "balance": "attention" if plan.is_balanced else None,
                    "lanes": LANES,
                    "window": plan.window,
                    "epoch_samples": plan.epoch_samples,
                    "connections": plan.connections,
                    "timeout_seconds": plan.timeout_seconds,
                    "prefetch_batches": plan.prefetch_batches,
                    **options,
                }
            ),
        )

    def _train(self, rank: int, loader: StreamingLoader) -> None:
        scheduler, chance, position = self.world.scheduler, self.world.machine.chance, self.start
        expectation, size = self.job.expectation, self.world_size * self.batch_size
        batches, epoch_batches, is_epoch_over = iter(loader), self.epoch_batches, False
        change_at = self.plan.schedule[-1][0] - 2 * MOST_BATCH if self.plan.changes_live else None
        if change_at is not None and position >= max(1, change_at):
            change_at = None  # it is in the state
        while position < self.plan.samples:
            batch = self._next_batch(batches)
            if (batch is None) != is_epoch_over:
                raise BrokenPromiseError(f"at {position} the loop went on: {is_epoch_over}")
            if batch is None:
                batches, is_epoch_over = iter(loader), False
                continue
            step = expectation.step(position, self.world_size, self.batch_size)
            self._check_batch(rank, position, batch, step)
            epoch_batches = 0 if step.start != position else epoch_batches
            epoch, position = step.start // expectation.epoch_samples, step.after
            epoch_batches = epoch_batches + 1 if expectation.epoch(position, size) == epoch else 0
            self._check_place(loader, position, epoch_batches)
            scheduler.note(f"batch {position}")
            if change_at is not None and position >= change_at:
                start, weights = self.plan.schedule[-1]
                loader.set_weights(weights, at_position=max(start, position))
                change_at = None
            self._pass_barrier(step, loader, epoch_batches)
            is_epoch_over = not self.plan.endless and not epoch_batches
            if chance.random() < 0.03:  # leave the loop, and come back
                batches, is_epoch_over = iter(loader), False
            if self.plan.pause_seconds:
                scheduler.sleep(self.plan.pause_seconds * chance.random())

    def _next_batch(self, batches: Iterator[Batch]) -> Batch | None:
        """The next batch, None at the end of an epoch, or a documented error; none of them comes too late."""
        world, waits = self.world, self.world.waits
        task = world.scheduler.current
        assert task is not None
        began, waits_before = world.scheduler.now, waits[task]
        try:
            return next(batches, None)
        finally:
            # What the prefetching thread is at (`Prefetcher._take_ready`). If it has no batch then, the loop
            # reads itself: rows one by one (`CacheRun.first_rows`), and shards.
            calm = world.longest_calm_wait
            if calm is None:
                longest = (2 + waits[task] - waits_before) * world.longest_wait(self.plan.timeout_seconds)
            world.check_wait("a batch", began, longest if calm is None else calm)

    def _check_batch(self, rank: int, position: int, batch: Any, step: Step) -> None:
        """The batch has the rows that the rank must get at this step, and their tokens."""
        rows = batch["sample_id"]
        streams = batch.get("stream_id", np.where(rows < 0, -1, 0))
        got = tuple(zip(streams.tolist(), rows.tolist(), strict=True))
        if got != step.ranks[rank]:
            wanted = step.ranks[rank]
            raise BrokenPromiseError(f"rank {rank} at {position}: delivered {got}, not {wanted}")
        datasets = self.plan.datasets
        expected = np.array([dataset_rows(datasets[s])[r] if r >= 0 else [EOS] * LENGTH for s, r in got])
        if not np.array_equal(batch["tokens"], expected):
            raise BrokenPromiseError(f"rank {rank} at {position}: wrong tokens in rows {got}")
        if self.plan.tail == "pad" and not np.array_equal(batch["is_padding"], rows < 0):
            raise BrokenPromiseError(f"rank {rank} at {position}: padding is not marked")

    def _check_place(self, loader: StreamingLoader, position: int, epoch_batches: int) -> None:
        """The loader knows where it is, and how long the epoch of its next batch is."""
        if loader.position != position:
            raise BrokenPromiseError(f"the position is {loader.position}, not {position}")
        if not self.plan.endless:
            left = self.job.expectation.batches_left(position, self.world_size * self.batch_size)
            if len(loader) != epoch_batches + left:
                raise BrokenPromiseError(
                    f"at {position} an epoch has {len(loader)} batches, not {epoch_batches} and {left}"
                )

    def _pass_barrier(self, step: Step, loader: StreamingLoader, epoch_batches: int) -> None:
        """Wait for the other processes, as training does; save a state now and then."""
        with self._changed:
            self._arrived += 1
            if self._arrived == self._processes:
                self._steps.append(step)
                self._arrived, self._states = 0, []
                self._passed += 1
                self._saves = step.after >= self.plan.samples or self.world.chance.random() < 0.3
                self._changed.notify_all()
            else:
                passed = self._passed
                self._changed.wait_for(lambda: self._passed > passed)
            if not self._saves:
                return
        state = loader.state_dict()
        with self._changed:
            if any(other != state for other in self._states):
                raise BrokenPromiseError("two ranks saved different states at one step")
            self._states.append(state)
            if len(self._states) == self._processes:
                self.job.save(state, self._steps, epoch_batches)
                self._steps = []

    @property
    def _processes(self) -> int:
        return self.world_size * self.plan.replicas

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
