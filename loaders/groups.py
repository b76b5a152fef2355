"""Batches made a few at a time: thousands of positions planned at once, a cache-sized group gathered at once.

Planning costs about 100 ns a sample in calls for thousands; a gather is fastest while its result fits a
core's second-level cache. So a plan covers up to `PLAN_ROWS` samples, after a short first one (the first
batch must not wait for a long plan, nor for shards that only later batches need), and a group up to
`GROUP_BYTES`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardkit.loaders.batch import Batch, BatchMaker
from shardkit.loaders.plan import BatchPlan, Steps
from shardkit.loaders.sources import SourceInfo
from shardkit.order import Order

__all__ = ["Cursor", "Group", "GroupMaker"]

PLAN_ROWS = 8192  # of one rank; half a millisecond of planning
PLAN_POSITIONS = 1 << 20  # of all ranks; 8 MiB
GROUP_BYTES = 512 << 10

Cursor = tuple[int, int]
"""(position, batches delivered in its epoch)."""


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive batches and where the loader is after each."""

    batches: list[Batch]
    cursors: list[Cursor]
    bytes: int

    @property
    def batch_count(self) -> int:
        return len(self.batches)


@dataclass(slots=True)
class Progress:
    """What is being read, for the message of a wait that got too long."""

    position: int = 0
    doing: str = "planning"


class GroupMaker:
    """Makes the groups of one rank from any position on."""

    def __init__(
        self, order: Order, plan: BatchPlan, source: SourceInfo, maker: BatchMaker, shard_names: list[str]
    ) -> None:
        self._order, self._plan, self._source, self._maker = order, plan, source, maker
        self._shard_names = shard_names
        self._progress = Progress()

    def groups(self, cursor: Cursor, *, endless: bool) -> Iterator[Group]:
        """The batches of the epoch of the next batch; all that follow, if endless."""
        position, delivered = cursor
        plan_rows = self._plan.batch_size
        while True:
            left = self._plan.batches_left(position)
            while left:
                count = self._count(plan_rows, left)
                plan_rows = min(plan_rows * 8, PLAN_ROWS)
                self._progress.position, self._progress.doing = position, "planning"
                steps = self._plan.steps(self._order, position, count)
                left -= count
                cursors = [(after, delivered + i) for i, after in enumerate(steps.after, 1)]
                if not left:
                    cursors[-1] = (steps.after[-1], 0)
                yield from self._groups(steps, cursors)
                position, delivered = cursors[-1]
            if not endless:
                return

    def describe(self) -> str:
        """What is being read now."""
        plan, progress = self._plan, self._progress
        return f"rank {plan.rank} of {plan.world_size}, position {progress.position:,}, {progress.doing}"

    def _count(self, rows: int, left: int) -> int:
        most = min(rows // self._plan.batch_size, PLAN_POSITIONS // self._plan.global_batch)
        return max(1, min(most, left))

    def _groups(self, steps: Steps, cursors: list[Cursor]) -> Iterator[Group]:
        size = self._plan.batch_size
        shard, row, ids = steps.shard.ravel(), steps.row.ravel(), steps.sample_id.ravel()
        # Readers see real samples only: `real[i]` of them come before entry i.
        real = np.concatenate([[0], np.cumsum(shard >= 0)]) if steps.padded else None
        if real is not None:
            shard, row = shard[ids >= 0], row[ids >= 0]
        self._say_shards(shard)
        reader = self._source.source.reader(shard, row)
        per_group = max(1, GROUP_BYTES // (size * (self._source.delivered_bytes or GROUP_BYTES)))
        for first in range(0, len(cursors), per_group):
            last = min(first + per_group, len(cursors))
            low, high = first * size, last * size
            read = (low, high) if real is None else (int(real[low]), int(real[high]))
            self._progress.position = cursors[first - 1][0] if first else self._progress.position
            batches, count = self._maker.make(reader(*read), ids[low:high])
            yield Group(batches, cursors[first:last], count)

    def _say_shards(self, shard: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
        if len(shard):
            first, others = self._shard_names[int(shard[0])], len(np.unique(shard)) - 1
            more = f" and {others} more" if others else ""
            self._progress.doing = f"reading {first}{more}"
