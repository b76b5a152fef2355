"""Which samples make up which batch of which rank: arithmetic on top of an order, no I/O.

With N samples, B sequences per rank and R ranks, the global batch is G = B * R. Position p is sample p % N of
epoch p // N for every tail and batch size, so both may change between runs. A batch covers positions [p, p +
G), sorted by lane (`lane_keys`), and rank r takes the r-th of R equal parts. `tail` says what happens at the
end of an epoch:

    carry  the batch continues into the next epoch; it belongs to the epoch in which it starts
    drop   a batch that would cross the edge is not delivered: the next batch starts with the next epoch
    pad    the batch ends at the edge; its real samples are spread evenly over the ranks, and each rank's
           part is filled up with padding (shard, row and sample id -1)

All ranks plan from the same position, so they always have the same number of batches.

`StepSizes` says how many sequences make an optimizer step, which is one batch or several. Its steps are cut
by positions alone: their sets are the same for any batch size and number of ranks.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Protocol, SupportsIndex, cast, get_args

import numpy as np
import numpy.typing as npt

from shardkit.errors import StateError
from shardkit.order.order import MAX_POSITION, Located, rank_slice
from shardkit.order.run_settings import Tail
from shardkit.units import whole_number

MAX_BATCH = 1 << 24  # sequences per rank and step; far above any training run, below any memory

Cursor = tuple[int, int]
"""(position, batches delivered in its epoch)."""


class SampleOrder(Protocol):
    """An order of samples: of one dataset (`shardkit.order.order`) or of several
    (`shardkit.order.streams`).
    """

    def locate(self, positions: npt.NDArray[np.int64], /) -> Located: ...
    def global_batch(self, position: int, size: int, /) -> npt.NDArray[np.int64]: ...
    def global_batches(
        self, position: int, size: int, count: int, /, *, part: slice, every: int
    ) -> Located: ...


@dataclass(frozen=True, slots=True)
class Steps:
    """Consecutive batches of one rank: arrays of shape (batches, batch size), -1 where there is padding."""

    shard: npt.NDArray[np.int32]
    row: npt.NDArray[np.int64]
    sample_id: npt.NDArray[np.int64]
    after: tuple[int, ...]  # the position after each batch
    padded: bool = False
    work: npt.NDArray[np.int64] | None = None
    """int64[batches, 6]: what `shardkit.order.balance` knows of each batch, if ranks are balanced."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How an epoch of `samples` is cut into batches."""

    samples: int
    batch_size: int
    rank: int
    world_size: int
    tail: Tail

    def __post_init__(self) -> None:
        try:
            size = whole_number(self.batch_size, "batch_size")
        except ValueError as error:
            raise ValueError(f"{error}: the loader makes the batches, of so many rows per rank") from None
        if not 1 <= size <= MAX_BATCH:
            raise ValueError(f"batch_size must be from 1 to {MAX_BATCH:,}, not {size:,}")
        object.__setattr__(self, "batch_size", size)
        if self.tail not in get_args(Tail):
            raise ValueError(f"tail must be one of {', '.join(get_args(Tail))}, not {self.tail!r}")
        if self.samples < 1:
            raise ValueError("the dataset has no samples, or all are excluded")
        if self.tail == "drop" and self.samples < self.global_batch:
            raise ValueError(
                f"tail='drop' would deliver nothing: the dataset has {self.samples:,} samples and a batch "
                f"over all ranks {self.global_batch:,}; use a smaller batch_size, or tail='carry' or 'pad'"
            )

    @property
    def global_batch(self) -> int:
        """Sequences per step over all ranks."""
        return self.batch_size * self.world_size

    def start(self, position: int) -> int:
        """Return where the next batch starts: `position`, unless the rest of the epoch is dropped."""
        left = self.samples - position % self.samples
        return position + left if self.tail == "drop" and left < self.global_batch else position

    def after(self, start: int) -> int:
        """Return where the batch after the one at `start` starts."""
        left = self.samples - start % self.samples
        end = start + self.global_batch
        return start + left if self.tail == "pad" and left < self.global_batch else self.start(end)

    def epoch(self, position: int) -> int:
        """The epoch of the next batch."""
        return self.start(position) // self.samples

    def delivered(self, cursor: Cursor) -> int:
        """Batches delivered in the epoch of the next batch."""
        position, delivered = cursor
        return delivered if self.start(position) == position else 0

    def cursor_at(self, position: int) -> Cursor:
        """The cursor of a run with this global batch at a position that it has come to."""
        return position, self.delivered((position, position % self.samples // self.global_batch))

    def first_batch(self, epoch: int) -> int:
        """Return the start of the first batch in an epoch, or behind it, in a run from position 0 on."""
        first = epoch * self.samples
        return -(-first // self.global_batch) * self.global_batch if self.tail == "carry" else first

    def batches_left(self, position: int) -> int:
        """Batches of the next batch's epoch that are still to be delivered; at least 1."""
        left = self.samples - self.start(position) % self.samples
        return left // self.global_batch if self.tail == "drop" else -(-left // self.global_batch)

    def advance(self, cursor: Cursor, batches: int) -> Cursor:
        """Return the loader's cursor `batches` batches after `cursor`."""
        position, delivered = cursor
        while batches:
            left = self.batches_left(position)
            passed = min(batches, left)
            position = self.after(self.start(position) + (passed - 1) * self.global_batch)
            delivered = delivered + passed if passed < left else 0
            batches -= passed
        return position, delivered

    def start_of_step(self, step: int) -> int:
        """Return where batch `step`, counted from 1, of a run from position 0 on starts."""
        if self.tail == "carry":
            return (step - 1) * self.global_batch
        epoch, number = divmod(step - 1, self.batches_left(0))
        return epoch * self.samples + number * self.global_batch

    def step_of(self, position: int) -> int | None:
        """Return the batch, counted from 1, that delivers a position; None if the tail drops it."""
        if self.tail == "carry":
            return position // self.global_batch + 1
        epoch, place = divmod(position, self.samples)
        number, batches = place // self.global_batch, self.batches_left(0)
        return epoch * batches + number + 1 if number < batches else None

    def span_at(self, position: int) -> tuple[int, int]:
        """Return (first position, how many) of the next global batch of a run that stands at `position`."""
        start = self.start(position)
        return start, min(self.global_batch, self.after(start) - start)

    def rank_of(self, index: int, count: int) -> tuple[int, int]:
        """Return (rank, index in its batch) of sample `index` of a sorted global batch of `count`."""
        rank = ((index + 1) * self.world_size - 1) // count  # the last whose part begins at or before index
        return rank, index - count * rank // self.world_size

    def steps(self, order: SampleOrder, position: int, count: int, *, every: int = 1) -> Steps:
        """`count` batches of this rank, all of one epoch: the next one and each `every`-th after it."""
        assert 1 <= (count - 1) * every + 1 <= self.batches_left(position)
        start = self.start(position)
        after = self._afters(start, count, every)
        last = start + (count - 1) * every * self.global_batch
        short = self.tail == "pad" and after[-1] - last < self.global_batch
        part = rank_slice(self.global_batch, self.rank, self.world_size)
        located = order.global_batches(start, self.global_batch, count - short, part=part, every=every)
        steps = Steps(located.shard, located.row, located.sample_id, after)
        return self._with_short_batch(order, steps, last) if short else steps

    def _afters(self, start: int, count: int, every: int) -> tuple[int, ...]:
        step = every * self.global_batch
        last = start + (count - 1) * step
        return (*range(start + self.global_batch, last + self.global_batch, step), self.after(last))

    def _with_short_batch(self, order: SampleOrder, steps: Steps, start: int) -> Steps:
        """`steps` and the epoch's last batch, which starts at `start` and ends before it is full."""
        real = order.global_batch(start, self.samples - start % self.samples)
        low, high = (len(real) * rank // self.world_size for rank in (self.rank, self.rank + 1))
        located = order.locate(real[low:high])
        columns = []
        for whole, last in (
            (steps.shard, located.shard),
            (steps.row, located.row),
            (steps.sample_id, located.sample_id),
        ):
            padded = np.full((1, self.batch_size), -1, dtype=whole.dtype)
            padded[0, : len(last)] = last
            columns.append(np.concatenate([whole.reshape(-1, self.batch_size), padded]))
        return Steps(columns[0], columns[1], columns[2], steps.after, padded=True)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Sequences of an optimizer step over all ranks, by position: ((start, sequences), …).

    Steps follow each other from position 0 on, whatever the ranks and micro-batches are. A change takes
    effect with the first step that starts at its position or behind it, as in Megatron's ramp-up of the
    batch size; `changes` are kept as (first step's start, sequences). ValueError for anything else.
    """

    changes: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        made: list[tuple[int, int]] = []
        previous = -1
        for position, sequences in self.changes:
            if not previous < position < MAX_POSITION:
                raise ValueError(f"global_batch changes at ascending positions, not at {position:,}")
            if not 1 <= sequences < MAX_POSITION:
                raise ValueError(f"global_batch must be at least 1 sequence, not {sequences:,}")
            previous = position
            if made:
                start, size = made[-1]
                position = start + max(0, -(-(position - start) // size) * size)
                if position == start:  # it takes the place of a change that no step has begun with
                    made.pop()
            if not made or sequences != made[-1][1]:
                made.append((position, sequences))
        if not made or made[0][0] != 0:
            raise ValueError("global_batch must say the size of the first step: begin at position 0")
        object.__setattr__(self, "changes", tuple(made))

    @classmethod
    def of(cls, sizes: SupportsIndex | Sequence[tuple[SupportsIndex, SupportsIndex]]) -> StepSizes:
        """One size for all steps, or [(position, sequences), …]."""
        if isinstance(sizes, SupportsIndex):
            sizes = [(0, sizes)]
        return cls(tuple((operator.index(position), operator.index(size)) for position, size in sizes))

    def step_at(self, position: int) -> tuple[int, int]:
        """(start, end) of the step that the sample at `position` is part of."""
        start, size = self.changes[bisect_right(self.changes, position, key=itemgetter(0)) - 1]
        start += (position - start) // size * size
        return start, start + size

    def sizes_from(self, position: int) -> list[int]:
        """Return the rest of the step at `position` and the sizes of later steps, each once, ascending."""
        _, end = self.step_at(position)
        start, after = self.step_at(end)
        return sorted({end - position, after - start, *(size for at, size in self.changes if at > end)})

    def changed(self, position: int, sequences: SupportsIndex) -> StepSizes:
        """These sizes before `position`, and steps of `sequences` from there on."""
        return StepSizes((*self._before(position), (position, operator.index(sequences))))

    def agrees_before(self, other: StepSizes, position: int) -> bool:
        """Whether both cut all that lies before this position into the same steps."""
        return self._before(position) == other._before(position)

    def to_list(self) -> list[list[int]]:
        """Plain data for a state; `from_list` reads it back."""
        return [list(change) for change in self.changes]

    @classmethod
    def from_list(cls, data: object) -> StepSizes:
        """StateError when `data` is not what `to_list` gives."""
        try:
            return cls.of(cast(Sequence[tuple[int, int]], data))
        except (TypeError, ValueError) as error:
            raise StateError(f"global_batch is a list of [position, sequences]: {error}") from error

    def _before(self, position: int) -> tuple[tuple[int, int], ...]:
        return tuple(change for change in self.changes if change[0] < position)
