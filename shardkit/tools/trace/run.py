"""A training run as arithmetic: where it delivers a row, and which rows a step has. Reads nothing.

A row's positions follow from the order by its inverse, once for each epoch of its own stream; a step's rows
follow from the order itself. Which step has which positions follows from the loader's `BatchPlan`, given the
same batch size and world size from position 0 on. All are exact for any length of run: nothing is replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardkit.errors import ShardkitError
from shardkit.loaders.plan import BatchPlan
from shardkit.order.order import Order
from shardkit.order.run_settings import RunSettings
from shardkit.order.streams import MixedOrder, StreamOrder

__all__ = ["BatchRow", "Run", "Sighting", "rank_of", "span_at", "start_of_step", "step_of"]


def start_of_step(plan: BatchPlan, step: int) -> int:
    """The first position of a step."""
    if plan.tail == "carry":
        return step * plan.global_batch
    epoch, number = divmod(step, plan.batches_left(0))
    return epoch * plan.samples + number * plan.global_batch


def step_of(plan: BatchPlan, position: int) -> int | None:
    """The step that delivers a position; None if the tail drops it."""
    if plan.tail == "carry":
        return position // plan.global_batch
    epoch, place = divmod(position, plan.samples)
    number, steps = place // plan.global_batch, plan.batches_left(0)
    return epoch * steps + number if number < steps else None


def span_at(plan: BatchPlan, position: int) -> tuple[int, int]:
    """(first position, how many) of the next global batch of a loader that stands at `position`."""
    start = plan.start(position)
    return start, min(plan.global_batch, plan.after(start) - start)


def rank_of(plan: BatchPlan, index: int, count: int) -> tuple[int, int]:
    """(rank, index in its batch) of sample `index` of a sorted global batch of `count`."""
    rank = ((index + 1) * plan.world_size - 1) // count  # the last whose part begins at or before index
    return rank, index - count * rank // plan.world_size


@dataclass(frozen=True, slots=True)
class Sighting:
    """One delivery of a row. `epoch` is that of its own stream.

    `step`, `rank` and `index` (in the rank's batch) are None where batch size and world size are not known,
    or, with `is_dropped`, because the tail drops the position. `is_delivered`: before the state's position.
    """

    epoch: int
    position: int
    step: int | None = None
    rank: int | None = None
    index: int | None = None
    is_dropped: bool = False
    is_delivered: bool | None = None


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A sample of a step: row number `row` of stream `stream`, and who has it where."""

    rank: int
    index: int
    position: int
    epoch: int
    stream: int
    row: int


class Run:
    """What a loader with these settings delivers, in the `order` that they make of its streams.

    `plan` None: batches are not known, only positions are. `delivered`: samples that the run has delivered
    so far (a state's position), None if that is not known. `names`: of the streams.
    """

    def __init__(
        self,
        settings: RunSettings,
        order: Order | StreamOrder | MixedOrder,
        names: Sequence[str],
        *,
        plan: BatchPlan | None = None,
        delivered: int | None = None,
    ) -> None:
        self.settings, self.order, self.names = settings, order, tuple(names)
        self.plan, self.delivered = plan, delivered

    def samples(self, stream: int) -> int:
        """Samples in an epoch of a stream."""
        mixed = isinstance(self.order, MixedOrder)
        return self.order.streams[stream].samples if mixed else self.order.samples  # type: ignore[union-attr]

    def epochs(self, stream: int) -> int:
        """Epochs of a stream that the run has begun; 1 if it is not known how far it is."""
        if self.delivered is None:
            return 1
        had = self.delivered
        if isinstance(self.order, MixedOrder):
            had = int(self.order.mixture.counts(self.delivered)[stream])
        return max(1, -(-had // max(1, self.samples(stream))))

    def is_excluded(self, row: int, stream: int = 0) -> bool:
        """Whether the run leaves this row of a stream out."""
        order = self.order.streams[stream] if isinstance(self.order, MixedOrder) else self.order
        excluded = order.exclusions if isinstance(order, StreamOrder) else None
        return excluded is not None and bool(excluded.contains([row])[0])

    def sightings(self, row: int, stream: int = 0, *, epochs: int) -> list[Sighting]:
        """Where the first `epochs` epochs of its stream deliver a row; none if it is left out."""
        if self.is_excluded(row, stream):
            return []
        found = []
        for epoch in range(epochs):
            position = self._position(row, stream, epoch)
            if position is None:
                break
            found.append(self._sighting(epoch, position))
        return found

    def batch(self, step: int) -> list[BatchRow]:
        """The rows of a step over all ranks, rank by rank."""
        return self.batch_at(start_of_step(self._known_plan(), step))

    def batch_at(self, position: int) -> list[BatchRow]:
        """The same for the global batch that a loader at this position delivers next."""
        plan = self._known_plan()
        start, count = span_at(plan, position)
        located = self.order.locate(self.order.global_batch(start, count))
        rows = []
        for index in range(count):
            sample = int(located.sample_id[index])
            stream = 0
            if isinstance(self.order, MixedOrder):
                stream = int(np.searchsorted(self.order.first_samples, sample, side="right")) - 1
                sample -= int(self.order.first_samples[stream])
            rank, place = rank_of(plan, index, count)
            at, epoch = int(located.position[index]), int(located.epoch[index])
            rows.append(BatchRow(rank, place, at, epoch, stream, sample))
        return rows

    def _known_plan(self) -> BatchPlan:
        if self.plan is None:
            raise ShardkitError(
                "which rows a step has depends on the batch size and the world size: give them"
            )
        return self.plan

    def _position(self, row: int, stream: int, epoch: int) -> int | None:
        if isinstance(self.order, MixedOrder):
            return self.order.position_of(row + int(self.order.first_samples[stream]), epoch)
        return int(self.order.positions_of([row], epoch)[0])

    def _sighting(self, epoch: int, position: int) -> Sighting:
        delivered = None if self.delivered is None else position < self.delivered
        if self.plan is None:
            return Sighting(epoch, position, is_delivered=delivered)
        step = step_of(self.plan, position)
        if step is None:
            return Sighting(epoch, position, is_dropped=True, is_delivered=False)
        start, count = span_at(self.plan, start_of_step(self.plan, step))
        batch = self.order.global_batch(start, count)
        rank, index = rank_of(self.plan, int(np.flatnonzero(batch == position)[0]), count)
        return Sighting(epoch, position, step, rank, index, is_delivered=delivered)
