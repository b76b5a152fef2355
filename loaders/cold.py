"""Rows of remote shards that are not here yet, for the first batches after a start.

A run begins with an empty cache and a loop that waits. Until `MAX_ROWS` rows have been read, shards that a
plan needs and that are not here are not waited for: their rows are fetched one by one, side by side, while
the whole shards stream in behind. Afterwards plans wait for their shards, which come by deadline. Shards for
which the cache has no room beside the others in use are always read by rows: fetched whole, they would be
dropped and fetched again with every plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from shardkit.cache.rows import FetchedRows
from shardkit.dataset import Dataset
from shardkit.loaders.streams import Streams

__all__ = ["ColdRows", "waiting_for"]

MAX_ROWS = 32  # of a rank, after each start: two small requests each
FIRST_ROWS = 16  # so many are fetched before anything else; more of them beside the whole shards


class ColdRows:
    """Decides, for each plan, which shards to wait for and which rows to fetch singly."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._parts = [_ColdStream(dataset) for dataset in streams.datasets]
        self._is_local = all(dataset.shards is None for dataset in streams.datasets)
        self.waited = False

    def restart(self, follow: Callable[[int], None]) -> None:
        """A new run begins; `follow` starts to fetch a stream ahead of it, behind its first plan's rows."""
        for number, part in enumerate(self._parts):
            part.restart(partial(follow, number))

    def advance(self, positions: Sequence[int]) -> None:
        """Everything before these positions, one for each stream, has been read."""
        for part, position in zip(self._parts, positions, strict=True):
            part.advance(position)

    def progress(self) -> str:
        """What is being waited for, as the end of a sentence; "" if nothing is."""
        return next(filter(None, map(waiting_for, self._streams.datasets)), "")

    def fetch(
        self, used: npt.NDArray[np.int32], shard: npt.NDArray[np.int32], row: npt.NDArray[np.int64]
    ) -> dict[int, FetchedRows]:
        """The rows of those shards among `used` that are not here, as far as this should not wait.

        `used` has every shard once, sorted.
        """
        if self._is_local:
            return {}
        self.waited = False
        found: dict[int, FetchedRows] = {}
        for stream, _, numbers in self._streams.split(used):
            part, first = self._parts[stream], self._streams.first_shard(stream)
            rows = part.fetch(numbers.tolist(), partial(_rows_of, shard, row, first))
            found |= {first + number: fetched for number, fetched in rows.items()}
            self.waited |= part.waited
        return found


def _rows_of(
    shard: npt.NDArray[np.int32], row: npt.NDArray[np.int64], first: int, number: int
) -> npt.NDArray[np.int64]:
    rows: npt.NDArray[np.int64] = row[shard == first + number]
    return rows


class _ColdStream:
    """The same for one dataset."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self.waited = False
        self._left = MAX_ROWS
        self._follow: Callable[[], None] | None = None

    def restart(self, follow: Callable[[], None]) -> None:
        self._left = MAX_ROWS
        self._follow = follow if self._dataset.shards is not None else None

    def advance(self, position: int) -> None:
        if self._dataset.shards is not None:
            self._dataset.shards.advance(position)

    def fetch(
        self, used: list[int], rows_of: Callable[[int], npt.NDArray[np.int64]]
    ) -> dict[int, FetchedRows]:
        shards = self._dataset.shards
        self.waited = False
        if shards is None:
            return {}
        self._dataset.keep_only(set(used))
        missing = [number for number in used if not shards.is_there(number)]
        self.waited = bool(missing)
        wanted = {
            number: np.unique(rows_of(number)) for number in missing if shards.rows.layout(number) is not None
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
