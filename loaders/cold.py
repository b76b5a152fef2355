"""Rows of remote shards that are not here yet, for the first batches after a start.

A run begins with an empty cache and a loop that waits. Until `MAX_ROWS` rows have been read, shards that a
plan needs and that are not here are not waited for: their rows are fetched one by one, side by side, while
the whole shards stream in behind. Afterwards plans wait for their shards, which come by deadline. Shards for
which the cache has no room beside the others in use are always read by rows: fetched whole, they would be
dropped and fetched again with every plan.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from shardkit.cache.rows import FetchedRows
from shardkit.dataset import Dataset

__all__ = ["ColdRows", "waiting_for"]

MAX_ROWS = 32  # of a rank, after each start: two small requests each
FIRST_ROWS = 16  # so many are fetched before anything else; more of them beside the whole shards


class ColdRows:
    """Decides, for each plan, which shards to wait for and which rows to fetch singly."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.waited = False
        self._left = MAX_ROWS
        self._follow: Callable[[], None] | None = None

    def restart(self, follow: Callable[[], None]) -> None:
        """A new run begins; `follow` starts to fetch ahead of it, behind the rows of its first plan."""
        self._left = MAX_ROWS
        self._follow = follow

    def advance(self, position: int) -> None:
        """Everything before `position` has been read."""
        if self.dataset.shards is not None:
            self.dataset.shards.advance(position)

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
        wanted = {
            number: np.unique(row[shard == number])
            for number in missing
            if shards.rows.layout(number) is not None
        }
        squeezed = {number: rows for number, rows in wanted.items() if shards.is_squeezed(number)}
        count = sum(map(len, wanted.values()))
        if len(wanted) < len(missing) or count > self._left:
            wanted = squeezed
        else:
            self._left -= count
        if sum(map(len, wanted.values())) > FIRST_ROWS:
            self._start()
        fetched = shards.rows.read(wanted, shards.timeout_seconds) if wanted else {}
        self._start()
        return fetched

    def _start(self) -> None:
        if self._follow is not None:
            self._follow()
            self._follow = None


def waiting_for(dataset: Dataset) -> str:
    """What a remote dataset's fetcher is asked for, as the end of a sentence; "" if nothing is."""
    progress = dataset.shards.progress() if dataset.shards is not None else ""
    return f"; waiting for {progress}" if progress else ""
