"""An iterator that can go back to the first micro-batch of a step."""

from __future__ import annotations

import copy
from typing import Any

__all__ = ["RerunDataIterator"]


class RerunDataIterator:
    def __init__(self, iterable: Any) -> None:
        self.iterable = iterable
        self.saved_microbatches: list[Any] = []
        self.replaying, self.replay_pos = False, 0

    def __next__(self) -> Any:
        if self.replaying:
            self.replay_pos += 1
            return self.saved_microbatches[self.replay_pos - 1]
        batch = next(self.iterable)
        self.saved_microbatches.append(copy.copy(batch))
        return batch

    def rewind(self) -> None:
        self.replaying, self.replay_pos = True, 0

    def advance(self) -> None:
        self.replaying, self.saved_microbatches = False, []
