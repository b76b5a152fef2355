"""Sorted files of edges as one sorted stream, in bounded memory.

Of every file some rows are held. What is not above the lowest of their last rows can be followed by nothing
that is still on disk: it is merged and handed on, and what has run low is filled up again, all files at a
time. Where there are too many files for buffers worth reading, groups of them are merged into files first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numba
import numpy as np
import numpy.typing as npt

from shardkit.writers.dedup.array_file import Rows, RowsWriter
from shardkit.writers.dedup.verify import EDGE

__all__ = ["MAX_FILES", "merge_edges"]

MAX_FILES = 256  # merged at a time
_BYTES_PER_ROW = 4 * EDGE.itemsize  # held with keys, taken out, put in order, and the order
_MIN_ROWS = 16

_kernel = numba.njit(nogil=True, cache=True)


def merge_edges(
    files: Sequence[Path], memory_bytes: int, temporary: Path, *, max_files: int = MAX_FILES
) -> Iterator[npt.NDArray[np.void]]:
    """EDGE rows of all files by descending priority of `hi`, some at a time; each file is sorted so.

    `temporary` is an empty folder for files in between; they are removed.
    """
    rest, made = list(files), 0
    while len(rest) > max_files:
        group, rest = rest[:max_files], rest[max_files:]
        merged = temporary / f"merged{made}.npy"
        made += 1
        with RowsWriter(merged, EDGE) as writer:
            for edges in _merge(group, memory_bytes):
                writer.write(edges)
        _remove(group, temporary)
        rest.append(merged)
    yield from _merge(rest, memory_bytes)
    _remove(rest, temporary)


def _remove(files: Sequence[Path], temporary: Path) -> None:
    for file in files:
        if file.parent == temporary:
            file.unlink()


class _Buffer:
    """Rows of one file that are held until they are handed on."""

    def __init__(self, path: Path) -> None:
        self._table = Rows(path, EDGE)
        self._next = 0
        self._held = np.empty(0, EDGE)
        self.keys = np.empty((0, 3), np.uint64)
        self.fill(_MIN_ROWS)

    @property
    def at_end(self) -> bool:
        """Nothing is left on disk."""
        return self._next == len(self._table)

    def fill(self, rows: int) -> None:
        """Hold `rows` rows, if there are so many."""
        if not self.at_end and len(self._held) < rows // 2 + 1:
            stop = min(self._next + rows - len(self._held), len(self._table))
            self._held = np.concatenate([self._held, self._table.read(self._next, stop)])
            self.keys = np.ascontiguousarray(self._held["hi_priority"])
            self._next = stop

    def take(self, limit: npt.NDArray[np.uint64]) -> npt.NDArray[np.void]:
        """Take out the rows that are not above the limit."""
        count = _not_above(self.keys, limit)
        taken, self._held = self._held[:count], self._held[count:]
        self.keys = self.keys[count:]
        return taken


def _merge(files: Sequence[Path], memory_bytes: int) -> Iterator[npt.NDArray[np.void]]:
    buffers = [_Buffer(path) for path in files]
    rows = max(_MIN_ROWS, memory_bytes // (_BYTES_PER_ROW * max(1, len(files))))
    while True:
        for buffer in buffers:
            buffer.fill(rows)
        buffers = [buffer for buffer in buffers if len(buffer.keys)]
        if not buffers:
            return
        limit = np.full(3, np.iinfo(np.uint64).max, np.uint64)
        for buffer in buffers:
            if not buffer.at_end and _above(limit, buffer.keys[-1]):
                limit = buffer.keys[-1].copy()
        taken = [edges for buffer in buffers if len(edges := buffer.take(limit))]
        if len(taken) == 1:
            yield taken[0]
            continue
        edges = np.concatenate(taken)
        starts = np.cumsum([0, *(len(some) for some in taken)], dtype=np.int64)
        del taken
        yield edges[_merged_order(np.ascontiguousarray(edges["hi_priority"]), starts)]


@_kernel
def _above(first, second):  # type: ignore[no-untyped-def]
    """Whether the first key of three numbers is greater than the second."""
    for column in range(3):
        if first[column] != second[column]:
            return first[column] > second[column]
    return False


@_kernel
def _not_above(keys, limit):  # type: ignore[no-untyped-def]
    """How many of these ascending keys are not above the limit."""
    begin, end = 0, len(keys)
    while begin < end:
        middle = (begin + end) // 2
        if _above(keys[middle], limit):
            end = middle
        else:
            begin = middle + 1
    return begin


@_kernel
def _merged_order(keys, starts):  # type: ignore[no-untyped-def]
    """int64[n]: the order that merges the runs keys[starts[i]:starts[i + 1]], each of them ascending."""
    order, other = np.arange(len(keys)), np.empty(len(keys), np.int64)
    edges = starts.copy()
    runs = len(edges) - 1
    while runs > 1:
        out = 0
        for run in range(0, runs, 2):
            i, i_end = edges[run], edges[run + 1]
            j, j_end = i_end, edges[min(run + 2, runs)]
            at = i
            while i < i_end and j < j_end:
                if _above(keys[order[i]], keys[order[j]]):
                    other[at] = order[j]
                    j += 1
                else:
                    other[at] = order[i]
                    i += 1
                at += 1
            while i < i_end:
                other[at] = order[i]
                i, at = i + 1, at + 1
            while j < j_end:
                other[at] = order[j]
                j, at = j + 1, at + 1
            edges[out] = edges[run]
            out += 1
        edges[out] = edges[runs]
        runs = out
        order, other = other, order
    return order
