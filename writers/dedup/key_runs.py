"""Tables with a 128-bit hash in each row, in runs sorted by its leading bits.

A partition is a range of the hash's first 16 bits, so rows with equal hashes meet in one, and every run holds
the partition's rows in one piece: a partition reads those and little else. Rows have the hash as the fields
`high` and `low`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.writers.dedup.array_file import Rows

__all__ = ["MAX_PARTITIONS", "leading_bits", "partition_range", "read_range", "repeated"]

MAX_PARTITIONS = 1 << 16


def leading_bits(high: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint16]:
    """uint16[n]: what runs are sorted by; NumPy sorts 16 bits in linear time."""
    return (high >> np.uint64(48)).astype(np.uint16)


def partition_range(partition: int, partitions: int) -> tuple[int, int]:
    """[first, last) of the leading bits that belong to a partition."""
    if not 0 <= partition < partitions <= MAX_PARTITIONS:
        raise ValueError(f"partition {partition} of {partitions}: at most {MAX_PARTITIONS:,} partitions")
    first, last = (-(-(number << 16) // partitions) for number in (partition, partition + 1))
    return first, last


def read_range(table: Rows, begin: int, end: int, bits: tuple[int, int]) -> npt.NDArray[Any]:
    """The rows of the run [begin, end) whose leading bits are in [first, last)."""
    first, last = bits
    count = end - begin
    # Hashes are spread evenly, so a range lies where its share of the run is, give or take: mostly one read.
    margin = 2 * int(count**0.5) + 1  # four standard deviations at most
    start = max(0, (count * first >> 16) - margin)
    stop = min(count, (count * last >> 16) + margin)
    while True:
        rows = table.read(begin + start, begin + stop)
        found = leading_bits(rows["high"])
        if start > 0 and found[0] >= first:
            start = max(0, 2 * start - stop)
        elif stop < count and found[-1] < last:
            stop = min(count, 2 * stop - start)
        else:
            edges = np.searchsorted(found.astype(np.int64), [first, last])
            return rows[int(edges[0]) : int(edges[1])]


def repeated(high: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Indices of the values that occur more than once: usually few, and all that must be sorted fully."""
    order: npt.NDArray[np.int64] = np.argsort(high)
    high = high[order]
    same = high[1:] == high[:-1]
    shared = np.zeros(len(high), np.bool_)
    shared[1:] |= same
    shared[:-1] |= same
    return order[shared]
