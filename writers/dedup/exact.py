"""Documents with equal keys (hashes of their text or of its words), found partition by partition.

A key is 128 bits; two different texts share one with probability 10^-19 among 10^10 documents. Among equal
keys the winner is the document of the lowest source, then of the lowest content rank (rows/documents.py).
The order "longest_of_source" puts the longest text between these two, the order "longest" before them.
Neither the number of partitions nor names and order of files change which text is kept.

Tasks write KEYS runs, which the exchange sorts by the first half of the key; a partition is a range of these
halves, so it has all copies of a text. `find_copies` streams a partition, so its memory does not grow with
it: if the documents of one key do not fit, they are read twice, first for the winner, then for the losers.

Documents with equal URLs have keys of the same form (urls.py). A row of WEIGHTED_KEYS also represents the
documents that lost to it in earlier stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.writers.exchange.exchange import Slice, Table

KEYS = Table(
    "keys.run",
    np.dtype(
        [
            ("key", "<u8"),  # the first half of the hash, read as a big-endian number
            ("low", "<u8"),  # the second half of the hash
            ("id", "<u8", (2,)),  # the halves of the content rank, as numbers in the same order
            ("bytes", "<i8"),
            ("row", "<u4"),  # row in documents.arrow, or in a part of the population
            ("source", "<i4"),
            ("split", "<i4"),
        ]
    ),
    origin="split",
    stays=True,
)

_PEAK_BYTES_PER_ROW_RANKED = 250  # measured peak memory per row while ranking rows that are all copies

WEIGHTED_KEYS = Table(
    "weighted_keys.run",
    np.dtype([*KEYS.dtype.descr, ("copies", "<i4")]),  # documents that this one represents, itself included
    origin="split",
)

Order = Literal["first", "longest_of_source", "longest"]

_Rows = npt.NDArray[np.void]


class Copies(NamedTuple):
    """Rows of KEYS: `lost[i]` is a document that loses to `kept[i]`, which has the same key.

    `winners[i]` represents `represented[i]` documents, itself included.
    """

    lost: _Rows
    kept: _Rows
    winners: _Rows
    represented: npt.NDArray[np.int64]


def partition_bounds(partition: int, partitions: int) -> tuple[int, int]:
    """Return the range [start, stop) of a partition's keys."""
    start, stop = (-(-(number << 64) // partitions) for number in (partition, partition + 1))
    return start, stop


def repeated(high: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Return the indices of values that occur more than once; usually few, so a full sort is avoided."""
    order: npt.NDArray[np.int64] = np.argsort(high)
    high = high[order]
    same = high[1:] == high[:-1]
    shared = np.zeros(len(high), np.bool_)
    shared[1:] |= same
    shared[:-1] |= same
    return order[shared]


def rank_copies(
    rows: _Rows, *, order: Order = "first"
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Rank the rows of KEYS whose key occurs several times, each key's winner first.

    Returns indices into `rows`, and for each of these indices the position of its key's winner among them.
    """
    chosen = repeated(rows["key"])
    ranked, is_copy = _ranked(rows[chosen], order)
    return chosen[ranked], np.maximum.accumulate(np.where(is_copy, 0, np.arange(len(chosen))))


def _ranked(rows: _Rows, by: Order) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the indices that sort rows by key, winners first, and which sorted rows are not winners."""
    priority = [rows["source"]]
    if by != "first":
        priority.insert(1 if by == "longest_of_source" else 0, -rows["bytes"])
    columns = [rows["key"], rows["low"], *priority, rows["id"][:, 0], rows["id"][:, 1]]
    order: npt.NDArray[np.int64] = np.lexsort(columns[::-1])
    is_copy = np.zeros(len(order), np.bool_)
    is_copy[1:] = np.diff(rows["key"][order]) == 0
    is_copy[1:] &= np.diff(rows["low"][order]) == 0
    return order, is_copy


def _weights(rows: _Rows) -> npt.NDArray[np.int64]:
    """Return the number of documents that each row represents, itself included."""
    if "copies" not in (rows.dtype.names or ()):
        return np.ones(len(rows), np.int64)
    return rows["copies"].astype(np.int64)


def row_batches(keys: Slice, memory_bytes: int) -> Iterator[_Rows]:
    """Yield the rows of a partition in order, in batches whose ranking takes an eighth of the memory.

    A third of the memory is for reading ahead with large requests. A batch may end between rows of one key.
    """
    most = _most_rows(memory_bytes)
    for rows, _ in keys.stream(memory_bytes // 3):
        for start in range(0, len(rows), most):
            yield rows[start : start + most]


def _most_rows(memory_bytes: int) -> int:
    return max(1, memory_bytes // 8 // _PEAK_BYTES_PER_ROW_RANKED)


def find_copies(keys: Slice, memory_bytes: int, *, order: Order = "first") -> Iterator[Copies]:
    """Yield the copies in a partition, some keys at a time; a key's losers are in the order (split, row).

    Takes three quarters of the memory.
    """
    carried, decided = np.empty(0, keys.table.dtype), None
    for batch in row_batches(keys, memory_bytes):
        rows = np.concatenate([carried, batch])
        rows = rows[rows["key"] != decided] if decided is not None else rows
        last = int(rows["key"][-1]) if len(rows) else 0
        begin = int(np.searchsorted(rows["key"], np.uint64(last)))
        carried = rows[begin:]  # the next batch may have more of this key
        yield _copies(rows[:begin], order)
        if len(carried) > _most_rows(memory_bytes):
            yield from _copies_of_one(keys.within(last, last + 1), memory_bytes, order)
            carried, decided = carried[:0], np.uint64(last)
    yield _copies(carried, order)


def _copies(rows: _Rows, order: Order) -> Copies:
    """Return the copies among rows, which must contain all rows of their keys."""
    chosen, winners = rank_copies(rows, order=order)
    lost = np.flatnonzero(winners != np.arange(len(chosen)))
    lost = lost[np.argsort(chosen[lost])]
    first, groups = np.unique(winners[lost], return_inverse=True)
    represented = _weights(rows[chosen[first]])
    np.add.at(represented, groups, _weights(rows[chosen[lost]]))
    return Copies(rows[chosen[lost]], rows[chosen[winners[lost]]], rows[chosen[first]], represented)


def _copies_of_one(keys: Slice, memory_bytes: int, order: Order) -> Iterator[Copies]:
    """Yield the copies among rows with the same first half of the key, in limited memory.

    Reads the rows twice. Since the caller is still reading ahead, this reads ahead half as much.
    """
    winners, represented = np.empty(0, keys.table.dtype), np.empty(0, np.int64)
    for batch in row_batches(keys, memory_bytes // 2):  # one winner per second half of the key
        rows = np.concatenate([winners, batch])
        counts = np.concatenate([represented, _weights(batch)])
        ranked, is_copy = _ranked(rows, order)
        starts = np.flatnonzero(~is_copy)
        winners, represented = rows[ranked[starts]], np.add.reduceat(counts[ranked], starts)
    nothing, none = winners[:0], represented[:0]
    for batch in row_batches(keys, memory_bytes // 2):
        kept = winners[np.searchsorted(winners["low"], batch["low"])]
        is_lost = (kept["split"] != batch["split"]) | (kept["row"] != batch["row"])
        yield Copies(batch[is_lost], kept[is_lost], nothing, none)
    several = represented > _weights(winners)
    yield Copies(nothing, nothing, winners[several], represented[several])
