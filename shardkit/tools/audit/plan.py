"""Checks what every rank would be given, step by step, without reading a sample.

The plan that is walked is the loader's own (`shardkit.loaders.dry_run`): it is what is judged. It is compared
with the index, with separate arithmetic (`expectation`), and with the inverse of the order. Memory: one block
of positions and a few arrays with an entry per shard; nothing grows with the number of samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardkit.loaders.config import LoaderConfig
from shardkit.loaders.dry_run import PlannedRun
from shardkit.loaders.plan import BatchPlan
from shardkit.loaders.streams import Opened
from shardkit.loaders.work_balance import open_work_balance
from shardkit.order.order import Shuffle
from shardkit.order.run_settings import Tail
from shardkit.progress import counting
from shardkit.tools.audit.checker import BLOCK_POSITIONS, Checker
from shardkit.tools.audit.expectation import Expectation
from shardkit.tools.audit.findings import AuditReport, Finding, Findings, Walk
from shardkit.tools.audit.sums import SampleHash

__all__ = ["Leg", "audit_plan", "legs_of_resumes"]


@dataclass(frozen=True, slots=True)
class Leg:
    """A part of a walk by one set of ranks, up to `until_step` steps since the walk began (None: its end)."""

    batch_size: int
    world_size: int
    until_step: int | None = None

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.world_size


def legs_of_resumes(legs: Sequence[Leg], steps: Sequence[int]) -> list[Leg]:
    """A walk that stops after each of `steps` and goes on with the next of `legs`, in turn."""
    ends = [*sorted(set(steps)), None]
    turns = [legs[number % len(legs)] for number in range(len(ends))]
    return [
        Leg(leg.batch_size, leg.world_size, end) for leg, end in zip(turns, ends, strict=True) if end != 0
    ]


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
    """Walk `epochs` epochs with the ranks of each of `legs`, and compare; ValueError for an impossible one.

    `resume_at`: one more walk stops after each of these steps and resumes with the next leg. `workers` of a
    DataLoader in each rank. `key`: of the sums, random by default. `start` begins a run as `PlannedRun` does.
    """
    # All legs are checked before the first one walks.
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
            run = start(opened, settings, **ranks, workers=workers, balance=balance)
            _walk(checker, walk, run, end, advance)
            checker.finish(seconds=time.perf_counter() - began)
            if len({leg.global_batch for leg in walk}) == 1:
                first = by_batch.setdefault(walk[0].global_batch, checker.walk)
                if first.digest != checker.walk.digest:
                    problem = f"the sets of steps of ranks {name} differ from those of {first.name}"
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
            # A walk of `end` positions ends with the step that reaches it.
            most = min(most, -(-(end - checker.position) // leg.global_batch))
            ids = run.steps(most)
            checker.deliver(ids)
            advance(ids.size)
            if run.position != checker.position:
                problem = f"the loader goes on at position {run.position:,}, not at {checker.position:,}"
                checker.found("steps", problem, position=checker.position)
                return
