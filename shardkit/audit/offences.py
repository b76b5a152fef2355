"""Deliveries that do not fit, told apart: lost, repeated, moved to another step, or another rank's part.

A sample where it does not belong counts +1 in its epoch, one that is missing in its step -1. When all is
known, what is above 0 was repeated, what is below was lost, and what came out even was moved. Followed up
to a limit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardkit.audit.expectation import Expectation
from shardkit.audit.findings import Finding, Findings
from shardkit.audit.tiling import Steps

__all__ = ["Misfits", "Offences"]

MAX_FOLLOWED = 1 << 17  # samples, about 30 MB; with more wrong than that, the first ones tell the story
MAX_EXPLAINED = 8  # steps whose ranks' parts are looked at
NEAR_STEPS = 2  # before and behind a faulty step, in which a rank's samples are looked for

_Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Sample:
    """One sample in one epoch: where it came too much, and where it is missing."""

    index: int
    net: int = 0
    came: tuple[int, int] | None = None  # (step, rank)
    missing: int | None = None  # step


@dataclass(frozen=True, slots=True)
class Misfits:
    """A stream's samples in some steps: arrays of one length, and which of them are in their own step.

    `edges` are the stream's indices where each step begins, and behind the last.
    """

    ids: _Ints
    indices: _Ints
    rows: _Ints
    ranks: _Ints
    edges: _Ints
    fits: npt.NDArray[np.bool_]


class Offences:
    """What did not fit, until `settle` says what it amounts to."""

    def __init__(self, expected: Expectation, findings: Findings) -> None:
        self._expected, self._findings = expected, findings
        self._samples: dict[tuple[int, int, int], _Sample] = {}
        self._explained = self._not_followed = 0

    def add(self, stream: int, found: Misfits, first_step: int) -> set[int]:
        """Note what is wrong; gives the rows of the first steps that it is in."""
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
        """Nothing more will come: say what was lost, repeated or moved."""
        for (stream, epoch, sample), entry in self._samples.items():
            kind = "moved" if not entry.net else "repeated" if entry.net > 0 else "lost"
            count = max(1, abs(entry.net))
            if not self._findings.wants(kind):
                self._findings.counts[kind] += count
                continue
            step, rank = entry.came or (None, None)
            if kind == "moved":
                problem = f"belongs to step {entry.missing}"
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
                    step=step,
                    rank=rank,
                    **self._expected.place(sample),  # type: ignore[arg-type]
                ),
                count,
            )
        if self._not_followed:
            self._findings.notices.append(
                f"{self._not_followed:,} more samples did not fit and were not followed: of those listed, "
                "some called lost or repeated may have been moved"
            )

    def explain(self, steps: Steps, delivered: _Ints, rows: list[int], first_step: int) -> None:
        """For the first faulty steps: which ranks were given something else than their part, and what."""
        ranks = delivered.shape[1]
        for row in rows:
            if self._explained >= MAX_EXPLAINED:
                return
            self._explained += 1
            parts = self._parts(steps, row, ranks)
            assert parts is not None
            for rank in range(ranks):
                given = _as_set(delivered[row, rank])
                if given == parts[rank]:
                    continue
                finding = Finding(
                    kind="part",
                    problem=self._whose(given, parts, steps, row, ranks, first_step)
                    or f"{len(given - parts[rank]):,} of {delivered.shape[2]:,} samples are not of its part",
                    position=steps.start + row * steps.size,
                    step=first_step + row,
                    rank=rank,
                )
                self._findings.add(finding)

    def _parts(self, steps: Steps, row: int, ranks: int) -> list[frozenset[int]] | None:
        """The samples of each rank's part of a step; None before the first position."""
        start = steps.start + row * steps.size
        if start < 0:
            return None
        ids = self._expected.order.global_batches(start, steps.size, 1).sample_id[0]
        cuts = [len(ids) * rank // ranks for rank in range(ranks + 1)]
        return [_as_set(ids[cuts[rank] : cuts[rank + 1]]) for rank in range(ranks)]

    def _whose(
        self,
        given: frozenset[int],
        parts: list[frozenset[int]],
        steps: Steps,
        row: int,
        ranks: int,
        first_step: int,
    ) -> str | None:
        """Whose part these samples are, if they are one."""
        if given in parts:
            return f"was given the part of rank {parts.index(given)}"
        for distance in range(1, NEAR_STEPS + 1):
            for other in (row - distance, row + distance):
                if (near := self._parts(steps, other, ranks)) is not None and given in near:
                    return f"was given what rank {near.index(given)} has at step {first_step + other}"
        return None


def _as_set(ids: _Ints) -> frozenset[int]:
    return frozenset(ids[ids >= 0].tolist())
