"""Compute, store and load the cost of each row, the sum of its squared document lengths, as a table.

With attention inside documents, the work of a row is about the sum of the squares of its documents' lengths.
Loaders that balance work (`shardkit.order.balance`) need this number for rows that they do not read. It
depends only on the dataset, so it is computed once, and `make_row_costs` (`shardkit.tools.row_costs`) writes
it to the dataset's folder:

    row-costs.FINGERPRINT.eos50256.npy    uint32[rows] (uint64 for rows of 65,536 tokens or more), a .npy file
                                          followed by 16 bytes: the xxh3_128 of all bytes before them

The name has the dataset's fingerprint and the id that ends documents, so a table of other data is never used.
Padding at the end of a row counts as one more document, as in `cu_seqlens`. The card does not list the table;
`upload` and `download` copy it with the dataset.

Tables of remote datasets are stored in the cache folder, where all processes of the machine map one file;
without a folder, each process holds 4 bytes per row. A table is hashed whenever it is opened, and processes
compare the hashes before the first batch (`shardkit.loaders.agreement`), because ranks with different tables
would not deliver each row once.

For a local dataset without a table, a loader computes it at its start if the dataset is not large; for any
other dataset it raises an error that names the command to run. This reads every row: 1 to 2 GB/s per core.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.arrays import Bytes
from shardkit.cache.indexes import NodeIndexes
from shardkit.datasets.opened import OpenDataset
from shardkit.datasets.segments import find_segments
from shardkit.errors import ShardError
from shardkit.files import map_path
from shardkit.formats.tar.values import make_npy_header
from shardkit.hashing import hash_bytes, new_hash
from shardkit.order.balance import DocumentIds, RowCosts
from shardkit.progress import counting
from shardkit.storage.store import METADATA_NAME, ObjectNotFoundError, Store
from shardkit.units import format_bytes

COUNTED_BYTES = 8 << 30  # size of a local dataset up to which loaders compute its table, in a few seconds

_PIECE_BYTES = 16 << 20  # maximum size of the rows that are searched at a time
_MOST_THREADS = 16
_DIGEST_BYTES = 16
_HASH = "xxh3_128"


def table_of(squares: npt.NDArray[np.unsignedinteger[Any]], length: int) -> RowCosts:
    """Return the cost table of rows of `length` tokens from each row's sum of squared document lengths."""
    return RowCosts(squares, length, _digest(make_npy_header(squares.dtype, len(squares)), squares.data))


def parse_table(where: str, data: Bytes, rows: int, length: int) -> RowCosts:
    """Parse a table of `rows` rows of `length` tokens. Raises ShardError if it is damaged or does not fit."""
    dtype = table_dtype(length)
    header, end = make_npy_header(dtype, rows), len(data) - _DIGEST_BYTES
    if end != len(header) + rows * dtype.itemsize or data[: len(header)].tobytes() != header:
        raise ShardError(where, f"is not a table of {rows:,} rows: remove it and call make_row_costs again")
    digest = hash_bytes(data[:end].data, [_HASH])[_HASH]
    if bytes.fromhex(digest) != data[end:].tobytes():
        raise ShardError(where, "is damaged: remove it and call make_row_costs again")
    return RowCosts(data[len(header) : end].view(dtype), length, digest)


def table_bytes(costs: RowCosts) -> bytes:
    """Encode a table as the bytes of its file."""
    header = make_npy_header(costs.squares.dtype, len(costs.squares))
    return header + costs.squares.tobytes() + bytes.fromhex(costs.digest)


def table_name(dataset: OpenDataset, ids: DocumentIds) -> str:
    """Return the file name of a dataset's table; the file is in the folder of its index."""
    return f"row-costs.{dataset.fingerprint}.{ids}.npy"


def tables_among(names: Iterable[str], fingerprint: str) -> list[str]:
    """Return those `names` that are tables of the dataset with this fingerprint, for any eos or bos id."""
    return [name for name in names if name.startswith(f"row-costs.{fingerprint}.") and name.endswith(".npy")]


def find_row_costs(
    dataset: OpenDataset, ids: DocumentIds, indexes: NodeIndexes | None = None
) -> RowCosts | None:
    """Load the stored cost table of a dataset, or return None. Raises ShardError if the table is damaged."""
    name, length = table_name(dataset, ids), row_length(dataset)
    data: Bytes | None = None
    if dataset.shards is None:
        file = dataset.path / name
        data = map_path(file) if file.is_file() else None
    elif indexes is None:
        text = _fetch(dataset.store, name)
        data = None if text is None else np.frombuffer(text, dtype=np.uint8)
    else:
        # A cache entry of its own: the entry of the dataset's URL records when its index was checked.
        url = f"{dataset.location}#{name}"
        kept = indexes.objects(url, [name], lambda: {name: _fetch(dataset.store, name)})[name]
        if kept is not None:
            data = map_path(kept) if isinstance(kept, Path) else np.frombuffer(kept, dtype=np.uint8)
    if data is None:
        return None
    return parse_table(f"{dataset.location}/{name}", data, len(dataset), length)


def write_row_costs(dataset: OpenDataset, ids: DocumentIds, costs: RowCosts) -> str:
    """Store a table in the folder of a dataset (or of its copy) and return its name. Raises StoreError."""
    name, data = table_name(dataset, ids), table_bytes(costs)
    dataset.store.put(name, data, metadata={METADATA_NAME: hash_bytes(data, [_HASH])[_HASH]})
    return name


def open_row_costs(dataset: OpenDataset, ids: DocumentIds, indexes: NodeIndexes | None = None) -> RowCosts:
    """Load the table of a dataset, or compute it if the dataset is local and not large.

    The table is cached in `dataset`. Raises ShardError if it can be neither loaded nor computed. `indexes`
    is the cache for tables of remote datasets.
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
                f"balance needs the costs of all rows, and {what} is not read for them at each start: create "
                f"{name} once with shardkit.tools.row_costs: make_row_costs({dataset.location!r}, {option})",
            )
        found = count_row_costs(dataset, ids, progress=False)
    dataset.row_costs[name] = found
    return found


def count_row_costs(dataset: OpenDataset, ids: DocumentIds, *, progress: bool = True) -> RowCosts:
    """Compute a dataset's table from its rows. Raises ShardError if it has no token rows of one length."""
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
        for first in range(0, len(filled), 4 * threads):  # in groups, so that few shards are open at a time
            for rows in pool.map(count, filled[first : first + 4 * threads]):
                advance(rows)
            dataset.keep_only(frozenset())
    return table_of(squares, length)


def row_length(dataset: OpenDataset) -> int:
    """Return the number of tokens per row. Raises ShardError if rows do not have one length."""
    if (length := dataset.sequence_length) is None:
        raise ShardError(
            dataset.location,
            "row costs need token rows that all have the same length, but this dataset has no fixed sequence "
            "length",
        )
    return length


def table_dtype(length: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the smallest dtype that holds the square of a row's length."""
    return np.dtype("<u4" if length < 1 << 16 else "<u8")


def _digest(header: bytes, values: memoryview) -> str:
    hasher = new_hash(_HASH)
    hasher.update(header)
    hasher.update(values)
    return hasher.hexdigest()


def _fetch(store: Store, name: str) -> bytes | None:
    try:
        return store.get(name)
    except ObjectNotFoundError:
        return None


def _pieces(dataset: OpenDataset, number: int, length: int) -> list[tuple[int, npt.NDArray[np.generic]]]:
    """Return a shard's rows as a list of (index of the first row, rows), each of about `_PIECE_BYTES`."""
    shard, column = dataset.shard(number), dataset.token_column
    assert column is not None
    rows = shard.fixed_rows(column)
    if rows is None:  # a tar without a constant stride is read sample by sample
        rows = np.stack([np.asarray(shard.sample(row, {column})[column]) for row in range(len(shard))])
    step = max(1, _PIECE_BYTES // (length * rows.dtype.itemsize))
    return [(low, rows[low : low + step]) for low in range(0, len(rows), step)]
