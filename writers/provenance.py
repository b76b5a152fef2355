"""Where every token came from, and where every document went.

Beside the shards lies one Parquet file a partition (`provenance/*.parquet`), one line a piece of a document
in a row, sorted by (shard, row, token_start). `documents_at` goes from a row, or a token of it, to the raw
files' records; `rows_of` goes from a document to its rows. What no line covers is padding.

Shard numbers count from 0 within the part while it is built; `renumber` makes them global at publication. Row
groups have a fixed size and statistics, so a look-up reads one or two of them; each file also states the
range of shuffle hashes that its documents have, so that a document is looked for in one file only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from shardkit.errors import BuildError, ShardkitError
from shardkit.writers.documents import keyed_hashes
from shardkit.writers.execution.work_files import open_arrow
from shardkit.writers.pack import Placement

__all__ = ["PROVENANCE_SCHEMA", "Piece", "documents_at", "renumber", "rows_of", "write_provenance"]

ROW_GROUP_PIECES = 1 << 16  # about 2 MB of columns that do not repeat

PROVENANCE_SCHEMA = pa.schema(
    [
        pa.field("shard", pa.int32(), nullable=False),
        pa.field("row", pa.int32(), nullable=False),  # within the shard
        pa.field("token_start", pa.int32(), nullable=False),  # within the row
        pa.field("token_end", pa.int32(), nullable=False),  # one past the last; eos included where it is
        pa.field("document_id", pa.binary(16), nullable=False),
        pa.field("document_start", pa.int64(), nullable=False),  # tokens of the document before this piece
        pa.field("copies", pa.int32(), nullable=False),  # documents it stands for: 1 + duplicates
        pa.field("source", pa.int32(), nullable=False),  # index into recipe.inputs
        pa.field("file", pa.string(), nullable=False),
        pa.field("record", pa.int64(), nullable=False),
        pa.field("id", pa.string()),
        pa.field("url", pa.string()),
        pa.field("metadata", pa.string()),
    ]
)
_OF_DOCUMENT = ("document_id", "copies", "source", "file", "record", "id", "url", "metadata")
_COUNTING = ("row", "token_start", "token_end", "document_start", "copies", "record")
_SEED, _FIRST_HASH, _LAST_HASH = b"shardkit.seed", b"shardkit.first_hash", b"shardkit.last_hash"


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [token_start, token_end) of a row, and the document they are from."""

    shard: int
    row: int
    token_start: int
    token_end: int
    document_id: bytes
    document_start: int
    copies: int
    source: int
    file: str
    record: int
    id: str | None
    url: str | None
    metadata: str | None


def write_provenance(
    path: Path, placement: Placement, shard_starts: npt.NDArray[np.int64], documents: pa.Table, *, seed: int
) -> None:
    """Write the lines of one partition.

    `placement` is sorted by (row, column); its document numbers are rows of `documents` (SPILL_SCHEMA, sorted
    by hash). `shard_starts` int64[shards + 1] are the partition's rows at which its shards begin.
    """
    schema = PROVENANCE_SCHEMA
    if documents.num_rows:
        first, last = documents.column("hash")[0].as_py(), documents.column("hash")[-1].as_py()
        schema = schema.with_metadata({_SEED: str(seed), _FIRST_HASH: str(first), _LAST_HASH: str(last)})
    with _writer(path, schema) as writer:
        for start in range(0, len(placement.row), ROW_GROUP_PIECES):
            part = slice(start, start + ROW_GROUP_PIECES)
            rows = placement.row[part]
            shards = np.searchsorted(shard_starts, rows, side="right") - 1
            ends = placement.column[part] + placement.length[part]
            places = (shards, rows - shard_starts[shards], placement.column[part], ends)
            columns = [pa.array(values.astype(np.int32)) for values in places]
            carried = documents.select(_OF_DOCUMENT).take(pa.array(placement.document[part]))
            columns += [carried.column(name) for name in _OF_DOCUMENT]
            columns.insert(5, pa.array(placement.start[part]))
            writer.write_table(pa.Table.from_arrays(columns, schema=schema), row_group_size=ROW_GROUP_PIECES)


def renumber(path_in: Path, path_out: Path, first_shard: int) -> None:
    """Copy a provenance file with `first_shard` added to its shard numbers; row groups stay as they are."""
    with open_arrow(path_in) as source, pq.ParquetFile(source) as file:
        schema = file.schema_arrow
        with _writer(path_out, schema) as writer:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group)
                shards = pc.cast(pc.add(table.column("shard"), first_shard), pa.int32())
                table = table.set_column(0, schema.field("shard"), shards)
                writer.write_table(table, row_group_size=ROW_GROUP_PIECES)


def documents_at(dataset: Path, shard: int, row: int, token: int | None = None) -> list[Piece]:
    """The documents in a row of a shard (numbers as in the index), or the one that holds token `token`.

    An empty list means padding, or no such row.
    """
    wanted = (pc.field("shard") == shard) & (pc.field("row") == row)
    if token is not None:
        wanted &= (pc.field("token_start") <= token) & (pc.field("token_end") > token)
    pieces = []
    for path in _files(dataset):
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                if _may_hold(file.metadata.row_group(group), {"shard": shard, "row": row}):
                    pieces += _pieces(file.read_row_group(group).filter(wanted))
    return sorted(pieces, key=lambda piece: piece.token_start)


def rows_of(dataset: Path, document_id: bytes) -> list[Piece]:
    """Where the tokens of a document are, in the order of the document; empty if it is not in the dataset."""
    if len(document_id) != 16:
        raise ValueError(f"a document id has 16 bytes, not {len(document_id)}")
    pieces = []
    for path in _files(dataset):
        with pq.ParquetFile(path) as file:
            if not _may_hold_document(file.schema_arrow.metadata or {}, document_id):
                continue
            for group in range(file.num_row_groups):
                ids = file.read_row_group(group, columns=["document_id"]).column(0)
                found = pc.equal(ids, pa.scalar(document_id, pa.binary(16)))
                if pc.any(found).as_py():
                    pieces += _pieces(file.read_row_group(group).filter(found))
    return sorted(pieces, key=lambda piece: piece.document_start)


def _files(dataset: Path) -> Iterator[Path]:
    paths = sorted((dataset / "provenance").glob("*.parquet"))
    if not paths:
        raise ShardkitError(
            f"{dataset / 'provenance'}: no provenance tables; only datasets built by shardkit have them"
        )
    yield from paths


def _may_hold(group: Any, wanted: Mapping[str, int]) -> bool:
    """Whether a row group's statistics leave room for these values; all groups have statistics."""
    # A row group may span shards: its row numbers are then not contiguous, but min and max still bound them.
    for index in range(group.num_columns):
        column = group.column(index)
        value = wanted.get(column.path_in_schema)
        limits = column.statistics
        if value is not None and limits is not None and not limits.min <= value <= limits.max:
            return False
    return True


def _may_hold_document(metadata: Mapping[bytes, bytes], document_id: bytes) -> bool:
    if _SEED not in metadata:
        return True
    number = int(keyed_hashes([document_id], int(metadata[_SEED]), "shuffle")[0])
    return int(metadata[_FIRST_HASH]) <= number <= int(metadata[_LAST_HASH])


def _pieces(table: pa.Table) -> list[Piece]:
    return [Piece(**{name: line.get(name) for name in PROVENANCE_SCHEMA.names}) for line in table.to_pylist()]


def _writer(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    if schema.names != PROVENANCE_SCHEMA.names:
        raise BuildError(f"{path}: columns {schema.names} are not those of a provenance table")
    return pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        use_dictionary=["shard", "source", "file"],
        column_encoding=dict.fromkeys(_COUNTING, "DELTA_BINARY_PACKED"),
        write_statistics=True,
    )
