"""Finds the table of each row's work (`shardkit.datasets.row_costs`), or counts it from the tokens.

A local dataset without a table is counted when a loader is made, if it is not large; any other is refused
with the command to run. Counting reads every row: 1 to 2 GB/s a core.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from shardkit.cache.indexes import NodeIndexes
from shardkit.datasets.dataset import Dataset
from shardkit.datasets.row_costs import (
    DocumentIds,
    RowCosts,
    find_row_costs,
    row_length,
    table_dtype,
    table_name,
)
from shardkit.errors import ShardError
from shardkit.loaders.batch import find_segments
from shardkit.progress import counting
from shardkit.units import format_bytes

__all__ = ["count_row_costs", "open_row_costs"]

COUNTED_BYTES = 8 << 30  # of a local dataset that every process counts at its start: a few seconds
_PIECE_BYTES = 16 << 20  # of rows searched at a time
_MOST_THREADS = 16


def open_row_costs(dataset: Dataset, ids: DocumentIds, indexes: NodeIndexes | None = None) -> RowCosts:
    """The table of a dataset, counted if it has none, is local and is not large; ShardError otherwise.

    `indexes`: the cache folder's, for tables of remote datasets. What was found stays with the dataset.
    """
    name = table_name(dataset, ids)
    if (known := dataset.row_costs.get(name)) is not None:
        return known
    found = find_row_costs(dataset, ids, indexes)
    if found is None:
        size = int(dataset.manifest.raw_bytes.clip(0).sum())
        if dataset.shards is not None or size > COUNTED_BYTES:
            what = "a remote dataset" if dataset.shards is not None else format_bytes(size)
            option = f"eos_id={ids.eos_id}" if ids.bos_id is None else f"bos_id={ids.bos_id}"
            raise ShardError(
                dataset.location,
                f"balance needs the costs of all rows, and {what} is not read for them at a start: make "
                f"{name} once with shardkit.tools.row_costs: make_row_costs({dataset.location!r}, {option})",
            )
        found = count_row_costs(dataset, ids, progress=False)
    dataset.row_costs[name] = found
    return found


def count_row_costs(dataset: Dataset, ids: DocumentIds, *, progress: bool = True) -> RowCosts:
    """Count a dataset's table from its rows; ShardError if it has no rows of tokens of one length."""
    length = row_length(dataset)
    squares = np.zeros(len(dataset), dtype=table_dtype(length))
    starts = dataset.manifest.shard_starts
    threads = min(_MOST_THREADS, os.cpu_count() or 1)

    def count(number: int) -> int:
        part = squares[int(starts[number]) : int(starts[number + 1])]
        for low, rows in _pieces(dataset, number, length):
            segments = find_segments(rows, ids.eos_id, bos_id=ids.bos_id, pad_id=ids.pad_id)
            lengths = segments.lengths
            part[low : low + len(rows)] = np.add.reduceat(lengths * lengths, segments.first_of_rows()[:-1])
        return len(part)

    filled = np.flatnonzero(dataset.manifest.shard_samples).tolist()
    with (
        counting("row-costs", len(dataset), "rows", progress=progress) as advance,
        ThreadPoolExecutor(threads, thread_name_prefix="shardkit-count") as pool,
    ):
        for first in range(0, len(filled), 4 * threads):  # so that few shards are open at a time
            for rows in pool.map(count, filled[first : first + 4 * threads]):
                advance(rows)
            dataset.keep_only(frozenset())
    return RowCosts.of(squares)


def _pieces(dataset: Dataset, number: int, length: int) -> list[tuple[int, npt.NDArray[np.generic]]]:
    """(first row, rows) of parts of a shard, none of them large."""
    shard, column = dataset.shard(number), dataset.token_column
    assert column is not None
    rows = shard.fixed_rows(column)
    if rows is None:  # tars of others: sample by sample
        rows = np.stack([np.asarray(shard.sample(row, {column})[column]) for row in range(len(shard))])
    step = max(1, _PIECE_BYTES // (length * rows.dtype.itemsize))
    return [(low, rows[low : low + step]) for low in range(0, len(rows), step)]
