"""Checks which samples every rank would receive, step by step, without reading a sample.

The audit walks the plan of a real loader, which is the object under test: the order is the `Arrangement` of
its settings, batches come from `BatchPlan`, a restart passes through the state's JSON and `resume`, and
workers take turns like the workers of `StreamingDataset`. The delivered ids are compared with the index, with
separate arithmetic (`expectation`), and with the inverse of the order. Only indexes and cards are read, and
the tables of row costs if ranks are balanced.

Memory: one block of positions and a few arrays with an entry per shard; nothing grows with the number of
samples. Planning a rank takes as long as in training: about 5 ns per position of the global batch and 100 ns
per sample of the rank; with balance, about 500 ns per position.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shardkit.arrays import Ints
from shardkit.loaders.config import LoaderConfig
from shardkit.loaders.defaults import open_work_balance
from shardkit.loaders.streams import Opened
from shardkit.order.arrangement import Arrangement, StreamSizes
from shardkit.order.balance import WorkBalance, planned_steps
from shardkit.order.batches import BatchPlan, Cursor
from shardkit.order.order import Shuffle
from shardkit.order.run_settings import RunSettings, Tail
from shardkit.order.state import LoaderState, resume
from shardkit.progress import counting
from shardkit.tools.audit.checker import BLOCK_POSITIONS, Checker
from shardkit.tools.audit.expectation import Expectation
from shardkit.tools.audit.findings import AuditReport, Finding, Findings, Walk
from shardkit.tools.audit.sums import SampleHash


@dataclass(frozen=True, slots=True)
class Leg:
    """A part of a walk with one batch and world size, up to step `until_step` of the walk (None: its end)."""

    batch_size: int
    world_size: int
    until_step: int | None = None

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.world_size


def legs_of_resumes(legs: Sequence[Leg], steps: Sequence[int]) -> list[Leg]:
    """Return the legs of a walk that stops after each of `steps` and resumes with the next leg, in turn."""
    ends = [*sorted(set(steps)), None]
    turns = [legs[number % len(legs)] for number in range(len(ends))]
    return [
        Leg(leg.batch_size, leg.world_size, end) for leg, end in zip(turns, ends, strict=True) if end != 0
    ]


class PlannedRun:
    """A simulated run of all ranks from its first step; each rank has `workers` DataLoader workers."""

    def __init__(
        self,
        streams: Sequence[StreamSizes],
        settings: RunSettings,
        *,
        batch_size: int,
        world_size: int,
        workers: int = 0,
        balance: WorkBalance | None = None,
    ) -> None:
        self._streams, self._first, self._workers, self._balance = streams, settings, workers, balance
        self._cursor: Cursor
        self._plans: list[BatchPlan]
        self._begin(LoaderState(0, 0, settings), batch_size, world_size)

    @property
    def position(self) -> int:
        """The position where the next step begins, as in `StreamingLoader.position`."""
        return self._cursor[0]

    def steps(self, most: int) -> Ints:
        """Return the next 1 to `most` steps, all of one epoch: int64[steps, ranks, batch], -1 for padding."""
        plan = self._plans[0]
        left = plan.batches_left(self.position)
        count = min(most, left)
        ids = np.stack([self._of_rank(each, count) for each in self._plans], axis=1)
        self._cursor = plan.advance(self._cursor, count)
        return ids

    def restart(self, batch_size: int, world_size: int) -> None:
        """Save the state as JSON and continue from it with a new batch and world size, as after a restart."""
        saved = LoaderState(*self._cursor, self._settings)
        loaded = LoaderState.from_dict(json.loads(json.dumps(saved.to_dict())))
        resumed = resume(loaded, self._first, fixed=frozenset(), on_mismatch="error")
        self._begin(resumed, batch_size, world_size)

    def _begin(self, state: LoaderState, batch_size: int, world_size: int) -> None:
        self._settings = settings = state.settings
        self._cursor = (state.position, state.epoch_batches)
        self._arrangement = Arrangement(settings, self._streams)
        self._plans = [
            BatchPlan(settings.epoch_samples, batch_size, rank, world_size, settings.tail)
            for rank in range(world_size)
        ]

    def _of_rank(self, plan: BatchPlan, count: int) -> Ints:
        """Return int64[count, batch], a rank's sample ids; with n workers, each plans every n-th step."""
        if self._workers < 2:
            return self._planned(plan, self._cursor, count, 1)
        ids = np.empty((count, plan.batch_size), dtype=np.int64)
        for worker in range(min(self._workers, count)):
            cursor = plan.advance(self._cursor, worker)
            share = -(-(count - worker) // self._workers)
            ids[worker :: self._workers] = self._planned(plan, cursor, share, self._workers)
        return ids

    def _planned(self, plan: BatchPlan, cursor: Cursor, count: int, every: int) -> Ints:
        order = self._arrangement.order
        steps = planned_steps(plan, self._balance, order, cursor[0], count, every=every)
        return steps.sample_id.reshape(count, plan.batch_size)


def audit_plan(
    opened: Opened,
    config: LoaderConfig,
    legs: Sequence[Leg],
    *,
    seed: int = 17,
    shuffle: Shuffle = "window",
    tail: Tail = "carry",
    epochs: int = 2,
    resume_at: Sequence[int] = (),
    workers: int = 0,
    key: bytes | None = None,
    start: Callable[..., PlannedRun] = PlannedRun,
    progress: bool = True,
) -> AuditReport:
    """Walk `epochs` epochs with the ranks of each of `legs`, and report what differs from the expectation.

    With `resume_at`, one more walk stops after each of these steps and resumes with the next leg. `workers`
    is the number of DataLoader workers per rank. `key` is the key of the sums (default: random). `start` is
    called like `PlannedRun` to create a run. Raises ValueError if a leg's batch and world size are invalid.
    """
    # BatchPlan raises ValueError for an invalid leg: create one per leg before the first walk.
    settings = opened.settings(config, seed=seed, shuffle=shuffle, tail=tail)
    for leg in legs:
        BatchPlan(settings.epoch_samples, leg.batch_size, 0, leg.world_size, tail)
    expected = Expectation(settings.named(opened.streams.names), opened.streams.datasets, opened.exclusions)
    balance = open_work_balance(opened.streams, config, max(leg.world_size for leg in legs))
    location = ", ".join(dataset.location for dataset in opened.streams.datasets)
    report = AuditReport("plan", location, expected.settings.to_dict(), Findings())
    hashing = SampleHash(key)
    end = epochs * expected.tiling.samples
    walks = [[leg] for leg in legs] + ([legs_of_resumes(legs, resume_at)] if resume_at else [])
    by_batch: dict[int, Walk] = {}
    with counting("audit", len(walks) * end, "samples", progress=progress) as advance:
        for walk in walks:
            began = time.perf_counter()
            name = " then ".join(f"{leg.world_size} x {leg.batch_size}" for leg in walk)
            checker = Checker(expected, report, hashing, name, runs=len(walk))
            ranks = {"batch_size": walk[0].batch_size, "world_size": walk[0].world_size}
            run = start(opened.sizes, settings, **ranks, workers=workers, balance=balance)
            _walk(checker, walk, run, end, advance)
            checker.finish(seconds=time.perf_counter() - began)
            if len({leg.global_batch for leg in walk}) == 1:
                first = by_batch.setdefault(walk[0].global_batch, checker.walk)
                if first.digest != checker.walk.digest:
                    problem = f"ranks {name} have other samples in some steps than ranks {first.name}"
                    report.findings.add(Finding(kind="world", problem=problem))
    return report


def _walk(
    checker: Checker, legs: Sequence[Leg], run: PlannedRun, end: int, advance: Callable[[int], None]
) -> None:
    for number, leg in enumerate(legs):
        if number:
            run.restart(leg.batch_size, leg.world_size)
        block = max(1, BLOCK_POSITIONS // leg.global_batch)
        while checker.position < end:
            most = block if leg.until_step is None else min(block, leg.until_step - checker.walk.steps)
            if most <= 0:
                break
            # Request no step after the one that reaches position `end`.
            most = min(most, -(-(end - checker.position) // leg.global_batch))
            ids = run.steps(most)
            checker.deliver(ids)
            advance(ids.size)
            if run.position != checker.position:
                problem = f"the loader continues at position {run.position:,}, not at {checker.position:,}"
                checker.found("steps", problem, position=checker.position)
                return
