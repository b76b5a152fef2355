"""Rows of remote shards that are not here yet, for the first batches after a start.

A run begins with an empty cache and a loop that waits. Until `MAX_ROWS` rows have been read, shards that a
plan needs and that are not here are not waited for: their rows are fetched one by one, side by side, while
the whole shards stream in behind. Afterwards plans wait for their shards, which come by deadline.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardkit.cache.rows import FetchedRows
from shardkit.dataset import Dataset

__all__ = ["ColdRows"]

MAX_ROWS = 128  # of a rank, after each start: two small requests each


class ColdRows:
    """Decides, for each plan, which shards to wait for and which rows to fetch singly."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.waited = False
        self._left = MAX_ROWS

    def restart(self) -> None:
        """A new run begins."""
        self._left = MAX_ROWS

    def fetch(
        self, used: npt.NDArray[np.int32], shard: npt.NDArray[np.int32], row: npt.NDArray[np.int64]
    ) -> dict[int, FetchedRows]:
        """The rows of those shards among `used` that are not here, as far as this should not wait."""
        shards = self.dataset.shards
        if shards is None:
            return {}
        self.dataset.keep_only(set(used.tolist()))
        missing = [number for number in used.tolist() if not shards.is_there(number)]
        self.waited = bool(missing)
        wanted = {number: np.unique(row[shard == number]) for number in missing}
        count = sum(map(len, wanted.values()))
        if not count or count > self._left or any(shards.rows.layout(number) is None for number in missing):
            return {}
        self._left -= count
        return shards.rows.read(wanted)
