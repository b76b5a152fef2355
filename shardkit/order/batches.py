"""The samples of each batch of each rank: arithmetic on top of an order, no I/O.

With N samples, B sequences per rank and R ranks, the global batch is G = B * R. Position p is sample p % N of
epoch p // N for every tail and batch size, so both may change between runs. A batch covers positions [p, p +
G), sorted by lane (`lane_keys`), and rank r takes the r-th of R equal parts. `tail` says what happens at the
end of an epoch:

    carry  the batch continues into the next epoch; it belongs to the epoch in which it starts
    drop   a batch that would cross the edge is not delivered: the next batch starts with the next epoch
    pad    the batch ends at the edge; its real samples are spread evenly over the ranks, and each rank's
           part is filled up with padding (shard, row and sample id -1)

All ranks plan from the same position, so they always have the same number of batches.

`StepSizes` is the number of sequences in an optimizer step, which consists of one or more batches. Steps are
cut by positions alone: a step has the same set of samples for any batch size and number of ranks.
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

MAX_BATCH = 1 << 24  # maximum number of sequences per rank and batch: more than any run uses, yet fits memory

Cursor = tuple[int, int]
"""A loader's position, and the number of batches delivered in the epoch of that position."""


class SampleOrder(Protocol):
    """An order of samples, as plans use it (`shardkit.order.order`, `shardkit.order.streams`)."""

    def locate(self, positions: npt.NDArray[np.int64], /) -> Located: ...
    def global_batch(self, position: int, size: int, /) -> npt.NDArray[np.int64]: ...
    def global_batches(
        self, position: int, size: int, count: int, /, *, part: slice, every: int
    ) -> Located: ...


@dataclass(frozen=True, slots=True)
class Steps:
    """Consecutive batches of one rank: arrays of shape (batches, batch size), with -1 for padding."""

    shard: npt.NDArray[np.int32]
    row: npt.NDArray[np.int64]
    sample_id: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]  # the position of each sample, counted over all ranks and epochs
    after: tuple[int, ...]  # the position after each batch
    padded: bool = False
    work: npt.NDArray[np.int64] | None = None
    """Work measured by `shardkit.order.balance` if ranks are balanced, int64[batches, 6].

    Columns: total work of the batch, largest share of a rank, largest share without balancing; then these
    three for the optimizer step, if the batch is its last.
    """


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The division of an epoch of `samples` into batches, for one rank."""

    samples: int
    batch_size: int
    rank: int
    world_size: int
    tail: Tail

    def __post_init__(self) -> None:
        try:
            size = whole_number(self.batch_size, "batch_size")
        except ValueError as error:
            raise ValueError(
                f"{error}: the loader makes the batches, with batch_size rows per rank"
            ) from None
        if not 1 <= size <= MAX_BATCH:
            raise ValueError(f"batch_size must be from 1 to {MAX_BATCH:,}, not {size:,}")
        object.__setattr__(self, "batch_size", size)
        if self.tail not in get_args(Tail):
            raise ValueError(f"tail must be one of {', '.join(get_args(Tail))}, not {self.tail!r}")
        if self.samples < 1:
            raise ValueError("there is nothing to read: the dataset has no samples, or all are excluded")
        if self.tail == "drop" and self.samples < self.global_batch:
            raise ValueError(
                f"tail='drop' would deliver nothing: the dataset has {self.samples:,} samples and a batch "
                f"over all ranks {self.global_batch:,}; use a smaller batch_size, or tail='carry' or 'pad'"
            )

    @property
    def global_batch(self) -> int:
        """The number of sequences per batch over all ranks."""
        return self.batch_size * self.world_size

    def start(self, position: int) -> int:
        """Return where the next batch starts: at `position`, unless the rest of the epoch is dropped."""
        left = self.samples - position % self.samples
        return position + left if self.tail == "drop" and left < self.global_batch else position

    def after(self, start: int) -> int:
        """Return the position at which the batch after the one at `start` starts."""
        left = self.samples - start % self.samples
        end = start + self.global_batch
        return start + left if self.tail == "pad" and left < self.global_batch else self.start(end)

    def epoch(self, position: int) -> int:
        """Return the epoch of the next batch of a run at `position`."""
        return self.start(position) // self.samples

    def delivered(self, cursor: Cursor) -> int:
        """Return the number of batches delivered in the epoch of the next batch."""
        position, delivered = cursor
        return delivered if self.start(position) == position else 0

    def cursor_at(self, position: int) -> Cursor:
        """Return the cursor of a run that has reached `position` with this global batch size."""
        return position, self.delivered((position, position % self.samples // self.global_batch))

    def first_batch(self, epoch: int) -> int:
        """Return the first batch start at or after the start of `epoch`, in a run from position 0 on."""
        first = epoch * self.samples
        return -(-first // self.global_batch) * self.global_batch if self.tail == "carry" else first

    def batches_left(self, position: int) -> int:
        """Return the number of batches left in the epoch of the next batch, including that batch."""
        left = self.samples - self.start(position) % self.samples
        return left // self.global_batch if self.tail == "drop" else -(-left // self.global_batch)

    def advance(self, cursor: Cursor, batches: int) -> Cursor:
        """Return the cursor of a loader at `cursor` after it has delivered `batches` more batches."""
        position, delivered = cursor
        while batches:
            left = self.batches_left(position)
            passed = min(batches, left)
            position = self.after(self.start(position) + (passed - 1) * self.global_batch)
            delivered = delivered + passed if passed < left else 0
            batches -= passed
        return position, delivered

    def start_of_step(self, step: int) -> int:
        """Return the position at which batch `step` (from 1) starts, in a run from position 0 on."""
        if self.tail == "carry":
            return (step - 1) * self.global_batch
        epoch, number = divmod(step - 1, self.batches_left(0))
        return epoch * self.samples + number * self.global_batch

    def step_of(self, position: int) -> int | None:
        """Return the number (from 1) of the batch that delivers `position`; None if the tail drops it."""
        if self.tail == "carry":
            return position // self.global_batch + 1
        epoch, place = divmod(position, self.samples)
        number, batches = place // self.global_batch, self.batches_left(0)
        return epoch * batches + number + 1 if number < batches else None

    def span_at(self, position: int) -> tuple[int, int]:
        """Return the first position and the size of the next global batch of a run at `position`."""
        start = self.start(position)
        return start, min(self.global_batch, self.after(start) - start)

    def rank_of(self, index: int, count: int) -> tuple[int, int]:
        """Return (rank, index in the rank's batch) of sample `index` of a sorted global batch of `count`."""
        rank = ((index + 1) * self.world_size - 1) // count  # last rank whose part begins at or before index
        return rank, index - count * rank // self.world_size

    def steps(self, order: SampleOrder, position: int, count: int, *, every: int = 1) -> Steps:
        """Return `count` batches of this rank in one epoch: the next one and each `every`-th after it."""
        assert 1 <= (count - 1) * every + 1 <= self.batches_left(position)
        start = self.start(position)
        after = self._afters(start, count, every)
        last = start + (count - 1) * every * self.global_batch
        short = self.tail == "pad" and after[-1] - last < self.global_batch
        part = rank_slice(self.global_batch, self.rank, self.world_size)
        located = order.global_batches(start, self.global_batch, count - short, part=part, every=every)
        steps = Steps(located.shard, located.row, located.sample_id, located.position, after)
        return self._with_short_batch(order, steps, last) if short else steps

    def _afters(self, start: int, count: int, every: int) -> tuple[int, ...]:
        step = every * self.global_batch
        last = start + (count - 1) * step
        return (*range(start + self.global_batch, last + self.global_batch, step), self.after(last))

    def _with_short_batch(self, order: SampleOrder, steps: Steps, start: int) -> Steps:
        """Return `steps` plus the epoch's last batch, which starts at `start` and is padded."""
        real = order.global_batch(start, self.samples - start % self.samples)
        low, high = (len(real) * rank // self.world_size for rank in (self.rank, self.rank + 1))
        located = order.locate(real[low:high])
        columns = []
        for whole, last in (
            (steps.shard, located.shard),
            (steps.row, located.row),
            (steps.sample_id, located.sample_id),
            (steps.position, located.position),
        ):
            padded = np.full((1, self.batch_size), -1, dtype=whole.dtype)
            padded[0, : len(last)] = last
            columns.append(np.concatenate([whole.reshape(-1, self.batch_size), padded]))
        return Steps(columns[0], columns[1], columns[2], columns[3], steps.after, padded=True)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The number of sequences in an optimizer step over all ranks, by position: ((start, sequences), …).

    Steps follow each other from position 0 on, independent of ranks and micro-batches. A change takes effect
    with the first step that starts at or after its position, as in Megatron's batch-size ramp-up; `changes`
    stores (start of that step, sequences). Raises ValueError for invalid changes.
    """

    changes: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        made: list[tuple[int, int]] = []
        previous = -1
        for position, sequences in self.changes:
            if not previous < position < MAX_POSITION:
                raise ValueError(f"global_batch must change at ascending positions, not at {position:,}")
            if not 1 <= sequences < MAX_POSITION:
                raise ValueError(f"global_batch must be at least 1 sequence, not {sequences:,}")
            previous = position
            if made:
                start, size = made[-1]
                position = start + max(0, -(-(position - start) // size) * size)
                if position == start:  # the earlier change would begin with the same step: replace it
                    made.pop()
            if not made or sequences != made[-1][1]:
                made.append((position, sequences))
        if not made or made[0][0] != 0:
            raise ValueError("global_batch has no size for the first step: it must begin at position 0")
        object.__setattr__(self, "changes", tuple(made))

    @classmethod
    def of(cls, sizes: SupportsIndex | Sequence[tuple[SupportsIndex, SupportsIndex]]) -> StepSizes:
        """Make step sizes from one size for all steps, or from [(position, sequences), …]."""
        if isinstance(sizes, SupportsIndex):
            sizes = [(0, sizes)]
        return cls(tuple((operator.index(position), operator.index(size)) for position, size in sizes))

    def step_at(self, position: int) -> tuple[int, int]:
        """Return the start and end of the step that includes `position`."""
        start, size = self.changes[bisect_right(self.changes, position, key=itemgetter(0)) - 1]
        start += (position - start) // size * size
        return start, start + size

    def sizes_from(self, position: int) -> list[int]:
        """Return the distinct step sizes in sequences from `position` on, ascending.

        The step at `position` counts with what is left of it.
        """
        _, end = self.step_at(position)
        start, after = self.step_at(end)
        return sorted({end - position, after - start, *(size for at, size in self.changes if at > end)})

    def check_whole(self, position: int, batch: int) -> None:
        """Raise ValueError if a step at or after `position` is not a whole number of global batches."""
        if uneven := [size for size in self.sizes_from(position) if size % batch]:
            raise ValueError(
                f"a step of {uneven[0]:,} sequences is not a multiple of batch_size * world_size "
                f"= {batch:,}: choose another batch_size"
            )

    def changed(self, position: int, sequences: SupportsIndex) -> StepSizes:
        """Return these sizes before `position`, with steps of `sequences` from there on."""
        return StepSizes((*self._before(position), (position, operator.index(sequences))))

    def agrees_before(self, other: StepSizes, position: int) -> bool:
        """Return whether both have the same steps before this position."""
        return self._before(position) == other._before(position)

    def to_list(self) -> list[list[int]]:
        """Return the changes of size as plain data for a state; `from_list` reads it back."""
        return [list(change) for change in self.changes]

    @classmethod
    def from_list(cls, data: object) -> StepSizes:
        """Build step sizes from what `to_list` returns; raises StateError for any other data."""
        try:
            return cls.of(cast(Sequence[tuple[int, int]], data))
        except (TypeError, ValueError) as error:
            raise StateError(f"global_batch must be a list of [position, sequences]: {error}") from error

    def _before(self, position: int) -> tuple[tuple[int, int], ...]:
        return tuple(change for change in self.changes if change[0] < position)
