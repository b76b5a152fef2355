"""What every rank would be given, checked step by step without reading a sample.

The plan that is walked is the loader's own (`shardkit.loaders.dry_run`); what it is held against is the
index, arithmetic of its own (`tiling`, `expectation`) and the inverse of the order. Memory: one block of
positions and a few arrays of the number of shards; nothing grows with the number of samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shardkit.tools.audit.checker import BLOCK_POSITIONS, Checker
from shardkit.tools.audit.expectation import Expectation
from shardkit.tools.audit.findings import Finding, Findings, SampleHash
from shardkit.tools.audit.report import AuditReport, Walk

__all__ = ["Leg", "Planned", "audit_plan", "legs_of_resumes"]


class Planned(Protocol):
    """A run of all ranks, as the loader plans it."""

    @property
    def position(self) -> int:
        """Where the next step begins, as the loader says."""
        ...

    def steps(self, most: int) -> npt.NDArray[np.int64]:
        """The next 1 to `most` steps: int64[steps, ranks, batch] of sample ids, -1 for padding."""
        ...

    def restart(self, batch_size: int, world_size: int) -> None:
        """Save the state, end, and go on from it with other ranks."""
        ...


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
    """A walk that is stopped after each of `steps` and goes on with the next of `legs`, in turn."""
    ends = [*sorted(set(steps)), None]
    turns = [legs[number % len(legs)] for number in range(len(ends))]
    return [
        Leg(leg.batch_size, leg.world_size, end) for leg, end in zip(turns, ends, strict=True) if end != 0
    ]


def audit_plan(
    expected: Expectation,
    walks: Sequence[Sequence[Leg]],
    start: Callable[[Leg], Planned],
    *,
    epochs: int,
    dataset: str = "",
    key: bytes | None = None,
    progress: Callable[[int], None] = lambda samples: None,
) -> AuditReport:
    """Walk each of `walks` for `epochs` epochs, and compare; `start` begins a run of a walk's first leg.

    `key`: of the fingerprint; drawn anew by default. `progress` is told of samples as they are checked.
    """
    findings, hashing = Findings(), SampleHash(key)
    report = AuditReport("plan", dataset, expected.settings.to_dict(), findings)
    by_batch: dict[int, Walk] = {}
    for legs in walks:
        began = time.perf_counter()
        checker = Checker(expected, findings, hashing)
        _walk(checker, legs, start(legs[0]), epochs * expected.tiling.samples, progress)
        checker.finish()
        name = " then ".join(f"{leg.world_size} x {leg.batch_size}" for leg in legs)
        walk = Walk.of(name, checker, runs=len(legs), seconds=time.perf_counter() - began)
        report.walks.append(walk)
        report.add_shards(checker.shard_uses(), checker)
        batches = {leg.global_batch for leg in legs}
        if len(batches) == 1:
            first = by_batch.setdefault(batches.pop(), walk)
            if first.digest != walk.digest:
                problem = f"the sets of steps of ranks {name} differ from those of {first.name}"
                findings.add(Finding(kind="world", problem=problem))
    return report


def _walk(
    checker: Checker, legs: Sequence[Leg], run: Planned, end: int, progress: Callable[[int], None]
) -> None:
    for number, leg in enumerate(legs):
        if number:
            run.restart(leg.batch_size, leg.world_size)
        block = max(1, BLOCK_POSITIONS // leg.global_batch)
        while checker.position < end:
            most = block if leg.until_step is None else min(block, leg.until_step - checker.steps)
            if most <= 0:
                break
            # A walk of `end` positions ends with the step that reaches it: a longer one would run on.
            most = min(most, -(-(end - checker.position) // leg.global_batch))
            ids = run.steps(most)
            checker.deliver(ids)
            progress(ids.size)
            if run.position != checker.position:
                problem = f"the loader goes on at position {run.position:,}, not at {checker.position:,}"
                found = Finding(kind="steps", problem=problem, position=checker.position, step=checker.steps)
                checker.findings.add(found)
                return
