"""Which step and rank delivers a position, and where a step begins: the arithmetic of tails, both ways.

With N samples in an epoch and G = batch size * world size in a global batch, and the same G from position 0
on, an epoch has

    carry  no edge: step s is positions [s G, (s + 1) G)
    drop   N // G steps; the last N % G positions of an epoch are never delivered
    pad    ceil(N / G) steps; the last has the N % G that are left, dealt evenly to the ranks

which is what `shardkit.loaders.plan` does step by step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["Steps", "Tail"]

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
