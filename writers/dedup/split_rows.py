"""What tables of many partitions say about one split, in order of its rows, some at a time.

Partitions write tables sorted by (split, row, …). A split's rows lie in one piece of each, found by binary
search; they are read as a pass over the split's documents comes to them, so that memory does not grow with
their number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.writers.dedup.array_file import Rows

__all__ = ["SplitRows", "piece_of_split"]

_CHUNK_ROWS = 1024  # of each of up to thousands of tables

Piece = tuple[Rows, int, int]  # rows [begin, end) of a table


class SplitRows:
    """The rows of some pieces, each sorted by `row` and then by the fields of `then`."""

    def __init__(self, dtype: npt.DTypeLike, pieces: Iterable[Piece], *, then: Sequence[str] = ()) -> None:
        self._dtype = np.dtype(dtype)
        self._order = (*reversed(then), "row")
        self._cursors = [_Cursor(piece) for piece in pieces if piece[1] < piece[2]]

    def before(self, row: int) -> npt.NDArray[Any]:
        """All rows not given yet whose `row` is lower, in order."""
        parts = [part for cursor in self._cursors for part in cursor.take(row)]
        rows = np.concatenate([np.empty(0, self._dtype), *parts])
        ordered: npt.NDArray[Any] = rows[np.lexsort([rows[name] for name in self._order])]
        return ordered


class _Cursor:
    def __init__(self, piece: Piece) -> None:
        self._table, self._next, self._end = piece
        self._held = self._read()

    def _read(self) -> npt.NDArray[Any]:
        start = self._next
        self._next = min(start + _CHUNK_ROWS, self._end)
        return self._table.read(start, self._next)

    def take(self, row: int) -> Iterator[npt.NDArray[Any]]:
        while len(self._held):
            count = int(np.searchsorted(self._held["row"], row))
            yield self._held[:count]
            self._held = self._held[count:]
            if len(self._held):
                return
            self._held = self._read()


def piece_of_split(table: Rows, split: int) -> Piece:
    """Where the rows of a split lie in a table that is sorted by `split`."""
    with table:
        begin, end = (
            bisect_left(range(len(table)), number, key=lambda at: int(table.read(at, at + 1)["split"][0]))
            for number in (split, split + 1)
        )
    return table, begin, end
