"""Find the documents in rows that are read in place: of row files, or made from their texts.

There are no tables of provenance, and none are needed. A row of a row file is a document. The documents of a
row that is made from texts follow from the lengths that the index keeps; if it is gone, the texts of the
shard are fetched and measured again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from shardkit.arrays import Ints
from shardkit.datasets.opened import OpenDataset
from shardkit.datasets.provenance.table import Piece
from shardkit.datasets.row_files import FileRows
from shardkit.datasets.text_rows import TextRows


def is_in_place(dataset: OpenDataset) -> bool:
    """Return whether the documents of a dataset are known without tables."""
    return isinstance(dataset.in_place, (FileRows, TextRows))


def pieces_in_place(dataset: OpenDataset, sample_ids: Sequence[int]) -> Iterator[Piece]:
    """Yield the pieces in rows of a dataset for which `is_in_place`, in the order of rows.

    `file` and `record` are the file and the row in it. `source` is 0. A row of a row file that has no tokens
    of constant number has tokens 0 to 0. Raises ShardError or StoreError if a shard cannot be read.
    """
    rows, starts = dataset.in_place, dataset.manifest.shard_starts
    wanted = np.unique(np.array(sample_ids, np.int64))
    shards = np.searchsorted(starts, wanted, side="right") - 1
    for shard in np.unique(shards).tolist():
        within = wanted[shards == shard] - starts[shard]
        if isinstance(rows, TextRows):
            yield from _of_texts(dataset, rows, shard, within)
            continue
        assert isinstance(rows, FileRows)
        part, length = rows.parts[shard], dataset.sequence_length or 0
        for row in within.tolist():
            record = part.first_row + row
            yield _piece(int(starts[shard]) + row, shard, row, (0, length), 0, part.file, record)


def _of_texts(dataset: OpenDataset, rows: TextRows, shard: int, wanted: Ints) -> Iterator[Piece]:
    """Yield the pieces in some rows of a shard that is made from texts."""
    part = rows.packer.rows.parts[shard]
    documents, places = rows.placed(shard)
    start = int(dataset.manifest.shard_starts[shard])
    found = np.flatnonzero(np.isin(places.row, wanted))
    for place in found[np.lexsort((places.column[found], places.row[found]))].tolist():
        row, column = int(places.row[place]), int(places.column[place])
        span = column, column + int(places.length[place])
        record = part.first_row + int(documents[places.document[place]])
        yield _piece(start + row, shard, row, span, int(places.start[place]), part.file, record)


def _piece(
    sample_id: int, shard: int, row: int, tokens: tuple[int, int], begin: int, file: str, record: int
) -> Piece:
    document = hashlib.blake2b(f"{file}\0{record}".encode(), digest_size=16).digest()
    first, end = tokens
    return Piece(
        sample_id,
        shard,
        row,
        first,
        end,
        document,
        begin,
        copies=1,
        source=0,
        file=file,
        record=record,
        id=None,
        url=None,
        metadata=None,
    )
