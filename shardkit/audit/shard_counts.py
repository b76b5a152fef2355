"""How often each shard was used, against what its rows and the epochs make of it.

Of a shard with k kept rows, E whole epochs use E * k samples, and each epoch that was not delivered whole
between none and k more. What the tail "drop" leaves out is no use, but counts towards what a shard owes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardkit.audit.expectation import Expectation
from shardkit.audit.findings import Finding, Findings

__all__ = ["ShardCounts", "check_shards"]

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ShardCounts:
    """int64[shards of all streams]: samples delivered, dropped; the least and the most expected of both."""

    delivered: _Ints
    dropped: _Ints
    least: _Ints
    most: _Ints

    @classmethod
    def of(
        cls,
        expected: Expectation,
        delivered: _Ints,
        dropped: _Ints,
        whole_epochs: Sequence[int],
        part_epochs: Sequence[int],
    ) -> ShardCounts:
        """`whole_epochs`, `part_epochs`: of each stream, those delivered whole and those in part."""
        kept = [expected.kept_of_shards(stream) for stream in range(len(expected.streams))]
        least = np.concatenate([rows * whole for rows, whole in zip(kept, whole_epochs, strict=True)])
        more = np.concatenate([rows * part for rows, part in zip(kept, part_epochs, strict=True)])
        return cls(delivered, dropped, least, least + more)

    @property
    def wrong(self) -> npt.NDArray[np.intp]:
        """The shards that were used less or more than expected."""
        used = self.delivered + self.dropped
        return np.flatnonzero((used < self.least) | (used > self.most))


def check_shards(counts: ShardCounts, expected: Expectation, findings: Findings) -> None:
    """A finding for each shard that is wrong."""
    for shard in counts.wrong.tolist():
        if not findings.wants("shard"):
            findings.counts["shard"] += 1
            continue
        least, most = int(counts.least[shard]), int(counts.most[shard])
        due = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        problem = f"{counts.delivered[shard]:,} samples delivered, {due} expected"
        findings.add(Finding(kind="shard", problem=problem, shard=expected.shard_name(shard)))
