"""Classifies wrong deliveries: lost, repeated, moved to another step, or given to the wrong rank.

A sample that is delivered at a wrong step counts +1 in its epoch, and a sample that is missing from its step
counts -1. At the end of the walk, a sum above 0 means repeated, below 0 means lost, and 0 means moved. Up to
`MAX_FOLLOWED` samples are tracked.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from shardkit.arrays import Ints
from shardkit.tools.audit.expectation import Expectation, Steps
from shardkit.tools.audit.findings import Finding, Findings

MAX_FOLLOWED = 1 << 17  # maximum number of wrong samples that are tracked, about 30 MB of memory
MAX_EXPLAINED = 8  # maximum number of faulty steps in which each rank's samples are compared
NEAR_STEPS = 2  # number of steps before and after a faulty step that are searched for a rank's samples


@dataclass(slots=True)
class _Sample:
    """One sample in one epoch: where it was delivered unexpectedly, and which step lacks it."""

    index: int
    net: int = 0
    came: tuple[int, int] | None = None  # (step, rank) of the first unexpected delivery
    missing: int | None = None  # first step that lacks the sample


@dataclass(frozen=True, slots=True)
class Delivered:
    """The samples that a stream delivered in a block of steps, as arrays with one entry per sample.

    `rows` are numbers of steps in the block; `fits` is True for a sample that is due at its step. `edges` has
    the stream's index at the start of each step and, as its last entry, after the block.
    """

    ids: Ints
    indices: Ints
    rows: Ints
    ranks: Ints
    edges: Ints
    fits: npt.NDArray[np.bool_]


class Discrepancies:
    """Collects the wrong deliveries of a walk until `settle` classifies them."""

    def __init__(self, expected: Expectation, findings: Findings) -> None:
        self._expected, self._findings = expected, findings
        self._samples: dict[tuple[int, int, int], _Sample] = {}
        self._explained = self._not_followed = 0

    def add(self, stream: int, found: Delivered, first_step: int) -> set[int]:
        """Record a block's missing and unexpected samples; return the block's first faulty steps."""
        size = max(self._expected.streams[stream].samples, 1)
        start, end = int(found.edges[0]), int(found.edges[-1])
        fitting = np.flatnonzero(found.fits)
        _, firsts, times = np.unique(found.indices[fitting], return_index=True, return_counts=True)
        again = np.delete(fitting, firsts) if (times > 1).any() else fitting[:0]
        extra = np.sort(np.concatenate([np.flatnonzero(~found.fits), again]))
        came = np.zeros(end - start, dtype=np.bool_)
        came[found.indices[fitting] - start] = True
        missing = start + np.flatnonzero(~came)
        missing_rows = np.searchsorted(found.edges, missing, side="right") - 1
        for which in extra[: self._room(len(extra))].tolist():
            index, sample = int(found.indices[which]), int(found.ids[which])
            entry = self._samples.setdefault((stream, index // size, sample), _Sample(index))
            entry.net += 1
            entry.came = entry.came or (first_step + int(found.rows[which]), int(found.ranks[which]))
        kept = missing[: self._room(len(missing))]
        ids = self._expected.samples_at(stream, kept) if len(kept) else kept
        for index, sample, row in zip(kept.tolist(), ids.tolist(), missing_rows.tolist(), strict=False):
            entry = self._samples.setdefault((stream, index // size, sample), _Sample(index))
            entry.net -= 1
            entry.index = index
            entry.missing = first_step + row if entry.missing is None else entry.missing
        faulty = np.unique(np.concatenate([found.rows[extra], missing_rows]))
        return set(faulty[:MAX_EXPLAINED].tolist())

    def _room(self, wanted: int) -> int:
        room = min(wanted, max(0, MAX_FOLLOWED - len(self._samples)))
        self._not_followed += wanted - room
        return room

    def settle(self) -> None:
        """Report at the end of the walk which samples were lost, repeated or moved."""
        for (stream, epoch, sample), entry in self._samples.items():
            kind = "moved" if not entry.net else "repeated" if entry.net > 0 else "lost"
            count = max(1, abs(entry.net))
            if not self._findings.wants(kind):
                self._findings.counts[kind] += count
                continue
            step, rank = entry.came or (None, None)
            if kind == "moved":
                problem = f"belongs to step {_from_1(entry.missing)}"
            elif kind == "repeated":
                problem = "delivered at this step, to which it does not belong, and again in the same epoch"
            else:
                problem, step, rank = "not delivered at its step or later", entry.missing, None
            self._findings.add(
                Finding(
                    kind=kind,
                    problem=problem,
                    epoch=epoch,
                    position=self._expected.position_of(stream, entry.index),
                    step=_from_1(step),
                    rank=rank,
                    **self._expected.place(sample),
                ),
                count,
            )
        if self._not_followed:
            self._findings.notices.append(
                f"{self._not_followed:,} more samples were wrong but not tracked: some of the samples listed "
                "as lost or repeated may only have moved"
            )

    def explain(self, steps: Steps, delivered: Ints, rows: list[int], first_step: int) -> None:
        """Report ranks with wrong samples in the faulty steps `rows`, and which rank's part they received."""
        _, ranks, batch = delivered.shape
        for row in rows[: MAX_EXPLAINED - self._explained]:
            self._explained += 1
            near = [row, *(row + sign * far for far in range(1, NEAR_STEPS + 1) for sign in (-1, 1))]
            parts = {other: self._parts(steps, other, ranks) for other in near}
            for rank, own in enumerate(parts[row]):
                given = _as_set(delivered[row, rank])
                if given == own:
                    continue
                problem = f"{len(given - own):,} of {batch:,} samples do not belong to its part of the batch"
                if (other := next((each for each in near if given in parts[each]), None)) is not None:
                    whose = parts[other].index(given)
                    problem = f"received the part of rank {whose} at step {first_step + other + 1}"
                    if other == row:
                        problem = f"received the part of rank {whose}"
                found = Finding(
                    kind="part",
                    problem=problem,
                    position=steps.start + row * steps.size,
                    step=first_step + row + 1,
                    rank=rank,
                )
                self._findings.add(found)

    def _parts(self, steps: Steps, row: int, ranks: int) -> list[frozenset[int]]:
        """Return each rank's expected part of a step, as a set of ids; [] if there is no such step."""
        start = steps.start + row * steps.size
        if start < 0:
            return []
        ids = self._expected.order.global_batches(start, steps.size, 1).sample_id[0]
        cuts = [len(ids) * rank // ranks for rank in range(ranks + 1)]
        return [_as_set(ids[low:high]) for low, high in pairwise(cuts)]


def _as_set(ids: Ints) -> frozenset[int]:
    return frozenset(ids[ids >= 0].tolist())


def _from_1(step: int | None) -> int | None:
    """Convert a step counted from 0 to the number in findings, counted from 1."""
    return None if step is None else step + 1
