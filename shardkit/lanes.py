"""How an epoch is cut into lanes and windows: the arithmetic between a position and a place in its window.

An epoch of N samples has L lanes. Position g of the epoch is row r of lane l, r, l = divmod(g, L), so a
global batch draws evenly on all lanes, and lane l has N // L samples, one more when l < N % L. Lanes lie one
after another in the epoch's span (its shards, in that epoch's order). A lane is cut into windows of W samples
that are shuffled inside: a lane reads only the shards under its current window. The first window of lane l is
shorter, W - W * l // L samples, so that lanes enter their next windows, and new shards, one after another and
not all at once.

Everything here is pure and exact in 64 bits: N <= 2**60, L <= 2**16, W <= 2**44.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

__all__ = [
    "MAX_LANES",
    "MAX_SAMPLES",
    "MAX_WINDOW",
    "LaneNumbers",
    "Lanes",
    "default_lanes",
    "default_window",
    "rank_slice",
]

MAX_SAMPLES = 1 << 60  # what is added to a place in an epoch cannot overflow int64
MAX_LANES = 1 << 16  # lane numbers fit uint16, which NumPy sorts by radix
MAX_WINDOW = 1 << 44  # window * lane stays below 2**60

LaneNumbers = npt.NDArray[np.int32] | npt.NDArray[np.int64]

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Lanes:
    """The lanes of an epoch of `samples`; `window` 0 means one window over a whole lane."""

    samples: int
    lanes: int
    window: int

    @cached_property
    def lengths(self) -> _Ints:
        """int64[L]: samples of each lane."""
        length, longer = divmod(self.samples, self.lanes)
        return length + (np.arange(self.lanes) < longer).astype(np.int64)

    @cached_property
    def starts(self) -> _Ints:
        """int64[L]: where each lane's span begins in the epoch's."""
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def shifts(self) -> _Ints:
        """int64[L]: by how much each lane's first window is shortened."""
        return np.arange(self.lanes, dtype=np.int64) * self._window // self.lanes

    @cached_property
    def _window(self) -> int:
        return self.window or max(1, -(-self.samples // self.lanes))

    def windows(self, lanes: LaneNumbers, rows: _Ints) -> _Ints:
        """The number of the window that holds each row of a lane."""
        return np.floor_divide(rows + self.shifts[lanes], self._window, dtype=np.int64)

    def bounds(self, lanes: LaneNumbers, windows: _Ints) -> tuple[_Ints, _Ints]:
        """(first row, size) of windows of lanes; the size is <= 0 where a lane has no such window."""
        nominal = windows * self._window - self.shifts[lanes]
        first = np.maximum(nominal, 0)
        return first, np.minimum(nominal + self._window, self.lengths[lanes]) - first

    def find(self, places: _Ints) -> tuple[npt.NDArray[np.int32], _Ints]:
        """(lane, row in lane) of places in the epoch's span: the inverse of starts[lane] + row."""
        length, longer = divmod(self.samples, self.lanes)
        edge = longer * (length + 1)
        # With fewer samples than lanes, length is 0 and no place lies behind the edge.
        lanes = np.where(
            places < edge, places // (length + 1), longer + (places - edge) // max(length, 1)
        ).astype(np.int32)
        return lanes, places - self.starts[lanes]


def rank_slice(size: int, rank: int, world_size: int) -> slice:
    """The part of a global batch of `size` that `rank` takes: the rank-th of `world_size` equal parts."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in range(world_size={world_size})")
    if size % world_size:
        raise ValueError(
            f"a global batch of {size:,} does not divide into {world_size:,} equal parts: "
            f"use a multiple of the world size"
        )
    part = size // world_size
    return slice(rank * part, (rank + 1) * part)


def default_lanes(global_batch: int, nodes: int = 1) -> int:
    """The largest divisor of the global batch that is <= 64, a multiple of `nodes` where there is one.

    Then every batch takes equally many samples from each lane, and each node has lanes of its own.
    """
    if global_batch < 1 or nodes < 1:
        raise ValueError(f"global_batch and nodes must be at least 1, not {global_batch} and {nodes}")
    divisors = [lanes for lanes in range(1, 65) if global_batch % lanes == 0]
    return max([lanes for lanes in divisors if lanes % nodes == 0] or divisors)


def default_window(lanes: int, row_bytes: int, budget_bytes: int = 4 << 30) -> int:
    """Samples per window such that two windows of every lane fit in `budget_bytes`; at least 1."""
    if lanes < 1 or row_bytes < 1:
        raise ValueError(f"lanes and row_bytes must be at least 1, not {lanes} and {row_bytes}")
    return max(1, min(budget_bytes // (2 * lanes * row_bytes), MAX_WINDOW))
