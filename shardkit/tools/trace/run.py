"""A training run as arithmetic: where it delivers a row, and which rows a step has. Reads nothing.

A row's positions follow from the order by its inverse, once for each epoch of its own stream; a step's rows
by the order itself. Both are exact for any length of run: nothing is replayed.

Which step and rank delivers a position, and where a step begins: the arithmetic of tails, both ways.

With N samples in an epoch and G = batch size * world size in a global batch, and the same G from position 0
on, an epoch has

    carry  no edge: step s is positions [s G, (s + 1) G)
    drop   N // G steps; the last N % G positions of an epoch are never delivered
    pad    ceil(N / G) steps; the last has the N % G that are left, dealt evenly to the ranks

which is what `shardkit.loaders.plan` does step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from shardkit.errors import ShardkitError
from shardkit.order.order import Order
from shardkit.order.streams import MixedOrder, StreamOrder

__all__ = ["BatchRow", "Run", "Sighting", "Steps", "Tail"]

Tail = Literal["carry", "drop", "pad"]


@dataclass(frozen=True, slots=True)
class Steps:
    """How positions are cut into steps. `samples`: positions of an epoch; `batch_size`: of a rank's batch."""

    samples: int
    batch_size: int
    world_size: int = 1
    tail: Tail = "carry"

    def __post_init__(self) -> None:
        if min(self.samples, self.batch_size, self.world_size) < 1:
            raise ValueError("samples, batch_size and world_size must be at least 1")
        if self.tail not in get_args(Tail):
            raise ValueError(f"tail must be one of {', '.join(get_args(Tail))}, not {self.tail!r}")
        if self.tail == "drop" and self.samples < self.global_batch:
            raise ValueError(
                f"tail='drop' delivers nothing: an epoch has {self.samples:,} samples and a batch over all "
                f"ranks {self.global_batch:,}"
            )

    @property
    def global_batch(self) -> int:
        """Sequences per step over all ranks."""
        return self.batch_size * self.world_size

    def step_of(self, position: int) -> int | None:
        """The step that delivers a position; None if the tail drops it."""
        if self.tail == "carry":
            return position // self.global_batch
        epoch, place = divmod(position, self.samples)
        step = place // self.global_batch
        return epoch * self._steps + step if step < self._steps else None

    def span(self, step: int) -> tuple[int, int]:
        """(first position, how many) of a step's global batch; fewer than `global_batch` only with "pad"."""
        if self.tail == "carry":
            return step * self.global_batch, self.global_batch
        epoch, number = divmod(step, self._steps)
        place = number * self.global_batch
        return epoch * self.samples + place, min(self.global_batch, self.samples - place)

    def part(self, rank: int, count: int) -> tuple[int, int]:
        """[first, end) of what `rank` has of a sorted global batch of `count` samples."""
        return count * rank // self.world_size, count * (rank + 1) // self.world_size

    def rank_of(self, index: int, count: int) -> tuple[int, int]:
        """(rank, index in its batch) of sample `index` of a sorted global batch of `count`."""
        rank = ((index + 1) * self.world_size - 1) // count  # the last whose part begins at or before index
        return rank, index - self.part(rank, count)[0]

    @property
    def _steps(self) -> int:
        """Steps of an epoch whose last batch does not go on into the next one."""
        whole, left = divmod(self.samples, self.global_batch)
        return whole + (self.tail == "pad" and left > 0)


_Ints = npt.NDArray[np.int64]


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
    """What a loader with these constants delivers.

    `steps` None: batches are not known, only positions are. `delivered`: samples that the run has delivered
    so far (a state's position), None if that is not known. `names`: of the streams.
    """

    def __init__(
        self,
        order: Order | StreamOrder | MixedOrder,
        names: Sequence[str],
        *,
        steps: Steps | None = None,
        delivered: int | None = None,
    ) -> None:
        self.order, self.names, self.steps, self.delivered = order, tuple(names), steps, delivered

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
        return self._rows(*self._known_steps().span(step))

    def batch_at(self, position: int) -> list[BatchRow]:
        """The same for the global batch that a loader at this position delivers next."""
        steps = self._known_steps()
        left = steps.samples - position % steps.samples
        if steps.tail == "carry" or left >= steps.global_batch:
            return self._rows(position, steps.global_batch)
        if steps.tail == "pad":
            return self._rows(position, left)
        return self._rows(position + left, steps.global_batch)  # what is left of the epoch is dropped

    def _known_steps(self) -> Steps:
        if self.steps is None:
            raise ShardkitError(
                "which rows a step has depends on the batch size and the world size: give them"
            )
        return self.steps

    def _rows(self, position: int, count: int) -> list[BatchRow]:
        steps = self._known_steps()
        located = self.order.locate(self.order.global_batch(position, count))
        rows = []
        for index in range(count):
            sample = int(located.sample_id[index])
            stream = 0
            if isinstance(self.order, MixedOrder):
                stream = int(np.searchsorted(self.order.first_samples, sample, side="right")) - 1
                sample -= int(self.order.first_samples[stream])
            rank, place = steps.rank_of(index, count)
            at, epoch = int(located.position[index]), int(located.epoch[index])
            rows.append(BatchRow(rank, place, at, epoch, stream, sample))
        return rows

    def _position(self, row: int, stream: int, epoch: int) -> int | None:
        if isinstance(self.order, MixedOrder):
            return self.order.position_of(row + int(self.order.first_samples[stream]), epoch)
        return int(self.order.positions_of([row], epoch)[0])

    def _sighting(self, epoch: int, position: int) -> Sighting:
        delivered = None if self.delivered is None else position < self.delivered
        if self.steps is None:
            return Sighting(epoch, position, is_delivered=delivered)
        step = self.steps.step_of(position)
        if step is None:
            return Sighting(epoch, position, is_dropped=True, is_delivered=False)
        start, count = self.steps.span(step)
        batch = self.order.global_batch(start, count)
        rank, index = self.steps.rank_of(int(np.flatnonzero(batch == position)[0]), count)
        return Sighting(epoch, position, step, rank, index, is_delivered=delivered)
