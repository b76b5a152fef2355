"""Where steps begin and how many samples they hold, by the tail's rule alone.

Written apart from the loader's own plan (`shardkit.loaders.plan`), which it is there to check. N samples an
epoch, G samples a step over all ranks; a step at position p has left = N - p % N samples of the epoch
before it:

    carry  p .. p + G
    drop   if left < G the epoch's rest is skipped: the step is at p + left .. p + left + G
    pad    p .. p + min(G, left), and padding fills the step up
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Steps", "Tiling"]


@dataclass(frozen=True, slots=True)
class Steps:
    """`count` steps of `size` samples each, of consecutive positions from `start` on."""

    start: int
    size: int
    count: int

    @property
    def end(self) -> int:
        """The position behind the last one."""
        return self.start + self.size * self.count


@dataclass(frozen=True, slots=True)
class Tiling:
    """How positions are cut into steps: `samples` an epoch, and what happens at its edge."""

    samples: int
    tail: str

    def settle(self, position: int, global_batch: int) -> int:
        """Where the step begins of a run that stands at `position`: behind what is dropped."""
        left = self.samples - position % self.samples
        return position + left if self.tail == "drop" and left < global_batch else position

    def steps(self, position: int, global_batch: int, most: int) -> Steps:
        """The next steps that are alike and follow without a break: 1 to `most` of them."""
        start = self.settle(position, global_batch)
        left = self.samples - start % self.samples
        if self.tail == "carry":
            return Steps(start, global_batch, most)
        if left < global_batch:
            return Steps(start, left, 1)
        return Steps(start, global_batch, min(most, left // global_batch))
