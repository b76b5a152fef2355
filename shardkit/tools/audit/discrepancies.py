"""Deliveries that do not fit, classified: lost, repeated, moved to another step, or another rank's part.

A sample that is delivered where it does not belong counts +1 in its epoch, one that is missing from its step
-1. When the walk is over, a sum above 0 means repeated, below 0 lost, and 0 moved. Follows up to
`MAX_FOLLOWED` samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from shardkit.arrays import Ints
from shardkit.tools.audit.expectation import Expectation, Steps
from shardkit.tools.audit.findings import Finding, Findings

MAX_FOLLOWED = 1 << 17  # samples, about 30 MB; if more are wrong, the first ones tell the story
MAX_EXPLAINED = 8  # steps whose ranks' parts are compared
NEAR_STEPS = 2  # before and after a faulty step, where a rank's samples are searched for


@dataclass(slots=True)
class _Sample:
    """One sample in one epoch: where it was delivered but not expected, and where it is missing."""

    index: int
    net: int = 0
    came: tuple[int, int] | None = None  # (step, rank)
    missing: int | None = None  # step


@dataclass(frozen=True, slots=True)
class Delivered:
    """A stream's samples in some steps: arrays of one length, and which of them fit into their step.

    `edges`: the stream's indices where each step begins, and after the last.
    """

    ids: Ints
    indices: Ints
    rows: Ints
    ranks: Ints
    edges: Ints
    fits: npt.NDArray[np.bool_]


class Discrepancies:
    """What did not fit, until `settle` classifies it."""

    def __init__(self, expected: Expectation, findings: Findings) -> None:
        self._expected, self._findings = expected, findings
        self._samples: dict[tuple[int, int, int], _Sample] = {}
        self._explained = self._not_followed = 0

    def add(self, stream: int, found: Delivered, first_step: int) -> set[int]:
        """Record what is wrong; return the rows of the first steps that have it."""
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
        """The walk is over: report what was lost, repeated or moved."""
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
                problem = "delivered here, where it does not belong, and elsewhere in the epoch"
            else:
                problem, step, rank = "not delivered at its step, nor later", entry.missing, None
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
                f"{self._not_followed:,} more samples did not fit and were not followed: of those listed, "
                "some called lost or repeated may have been moved"
            )

    def explain(self, steps: Steps, delivered: Ints, rows: list[int], first_step: int) -> None:
        """For the first faulty steps: the ranks that were not given their part, and what they were given."""
        _, ranks, batch = delivered.shape
        for row in rows[: MAX_EXPLAINED - self._explained]:
            self._explained += 1
            near = [row, *(row + sign * far for far in range(1, NEAR_STEPS + 1) for sign in (-1, 1))]
            parts = {other: self._parts(steps, other, ranks) for other in near}
            for rank, own in enumerate(parts[row]):
                given = _as_set(delivered[row, rank])
                if given == own:
                    continue
                problem = f"{len(given - own):,} of {batch:,} samples are not of its part"
                if (other := next((each for each in near if given in parts[each]), None)) is not None:
                    whose = parts[other].index(given)
                    problem = f"was given what rank {whose} has at step {first_step + other + 1}"
                    if other == row:
                        problem = f"was given the part of rank {whose}"
                found = Finding(
                    kind="part",
                    problem=problem,
                    position=steps.start + row * steps.size,
                    step=first_step + row + 1,
                    rank=rank,
                )
                self._findings.add(found)

    def _parts(self, steps: Steps, row: int, ranks: int) -> list[frozenset[int]]:
        """The samples of each rank's part of a step; none before the first position."""
        start = steps.start + row * steps.size
        if start < 0:
            return []
        ids = self._expected.order.global_batches(start, steps.size, 1).sample_id[0]
        cuts = [len(ids) * rank // ranks for rank in range(ranks + 1)]
        return [_as_set(ids[low:high]) for low, high in pairwise(cuts)]


def _as_set(ids: Ints) -> frozenset[int]:
    return frozenset(ids[ids >= 0].tolist())


def _from_1(step: int | None) -> int | None:
    """Return the number of a step as findings have it, of one counted from 0."""
    return None if step is None else step + 1
