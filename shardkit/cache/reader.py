"""One reader of a remote dataset: its plan, how long it waits, and its first rows.

Several readers may share the shards of one open dataset, such as training and an evaluation in mid-epoch.
Each has its own place in its own order, so each has its own plan. A plan ends when its reader is closed,
starts another run, or is garbage.

A run begins with an empty cache and a loop that waits. Until `FetchLimits.single_rows` rows have been read,
shards that are needed and not cached are not waited for: their rows are fetched one by one, in parallel,
before or while the whole shards stream in. After that, reads wait for whole shards, which come by deadline.
Shards for which the cache has no room among the others in use are always read by rows: fetched whole, they
would be dropped and fetched again each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from shardkit.cache.planner import Planner
from shardkit.cache.rows import FetchedRows
from shardkit.cache.shards import CachedShards
from shardkit.order.order import Order
from shardkit.order.residency import MixedUses

__all__ = ["CacheReader"]

FIRST_ROWS = 16  # up to so many rows are fetched before any whole shard; more of them at the same time


class CacheReader:
    """Reads `shards` for one loop; `start` says where the loop is."""

    def __init__(self, shards: CachedShards, timeout_seconds: float | None = None) -> None:
        self._shards = shards
        self.timeout_seconds = timeout_seconds or shards.timeout_seconds
        self.using: frozenset[int] = frozenset()
        """The shards that the loop reads now; they stay open."""
        self.is_open = False
        """Whether a run was started and this was not closed since."""
        self._rows_left = shards.limits.single_rows
        self._make_plan: Callable[[], Planner] | None = None  # fetching ahead has not begun
        self._plan: Planner | None = None

    def start(
        self,
        order: Order | MixedUses,
        position: int,
        lanes: Sequence[int] | None,
        *,
        share: float = 1.0,
        siblings: Sequence[CachedShards] = (),
    ) -> None:
        """Begin a run, as `CachedShards.make_plan` has it; fetching ahead begins after its first rows."""
        self.close()
        self.is_open, self._rows_left = True, self._shards.limits.single_rows
        self._shards.readers.add(self)
        self._make_plan = partial(
            self._shards.make_plan, order, position, lanes, share=share, siblings=siblings
        )

    def close(self) -> None:
        """Stop fetching ahead. May be started again."""
        self.is_open, self.using, self._make_plan = False, frozenset(), None
        if self._plan is not None:
            self._shards.fetcher.drop(self._plan)
            self._plan = None

    def load(self, number: int) -> npt.NDArray[np.uint8]:
        """As `CachedShards.load`, waiting no longer than this reader should."""
        return self._shards.load(number, self.timeout_seconds, self._plan)

    def advance(self, position: int) -> None:
        """Everything before `position` has been read."""
        if self._plan is not None:
            self._shards.fetcher.advance(self._plan, position)

    def missing(self, numbers: Sequence[int]) -> list[int]:
        """Which of these shards are not here yet."""
        return [number for number in numbers if not self._shards.fetcher.is_there(number)]

    def fetch_ahead(self) -> None:
        """Begin to fetch ahead, unless that has begun."""
        make_plan, self._make_plan = self._make_plan, None
        if make_plan is not None:
            self._plan = make_plan()

    def first_rows(
        self, missing: Sequence[int], rows_of: Callable[[int], npt.NDArray[np.int64]]
    ) -> dict[int, FetchedRows]:
        """The rows that are needed of shards that are not here, as far as they should not be waited for.

        Fetching ahead has begun when this returns.
        """
        shards = self._shards
        wanted = {
            number: np.unique(rows_of(number)) for number in missing if shards.rows.layout(number) is not None
        }
        count = sum(map(len, wanted.values()))
        if len(wanted) < len(missing) or count > self._rows_left:
            wanted = {number: rows for number, rows in wanted.items() if shards.fetcher.has_no_room(number)}
        else:
            self._rows_left -= count
        if sum(map(len, wanted.values())) > FIRST_ROWS:
            self.fetch_ahead()
        fetched = shards.rows.read(wanted, self.timeout_seconds) if wanted else {}
        self.fetch_ahead()
        return fetched

    def progress(self) -> str:
        """What is being waited for, as the end of a sentence; "" if nothing is."""
        progress = self._shards.fetcher.progress()
        return f"; waiting for {progress}" if progress else ""
