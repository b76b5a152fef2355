"""Writes the provenance tables: where every token came from, and where every document went.

`shardkit.formats.provenance` defines the format. Packing a partition writes its table with shard numbers that
count from 0 (`write_provenance`); this stage copies each table with the dataset's shard numbers (`renumber`),
which are known only when all partitions are packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from shardkit.errors import BuildError
from shardkit.formats.provenance import PROVENANCE_SCHEMA, ROW_GROUP_PIECES, HashRange
from shardkit.tokens.packing import Placement
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.stage import Stage, Task

PROVENANCE_NAME = "provenance.parquet"
_OF_DOCUMENT = ("document_id", "copies", "source", "file", "record", "id", "url", "metadata")

_COUNTING = ("row", "token_start", "token_end", "document_start", "copies", "record")


def write_provenance(
    path: Path,
    placement: Placement,
    shard_starts: npt.NDArray[np.int64],
    documents: pa.Table,
    *,
    seed: int | None,
) -> None:
    """Write the table of one partition.

    `placement` is sorted by (row, column); its document numbers are rows of `documents` (SPILL_SCHEMA, sorted
    by hash). `shard_starts`, int64[shards + 1], are the partition's rows at which its shards begin. `seed` is
    the seed of the hashes of document ids; the table records it with its range of hashes, so that readers
    find the table of a document. None if the hashes are not of document ids.
    """
    schema = PROVENANCE_SCHEMA
    if documents.num_rows and seed is not None:
        first, last = documents.column("hash")[0].as_py(), documents.column("hash")[-1].as_py()
        schema = schema.with_metadata(HashRange(seed, first, last).to_metadata())
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


def tasks(packed: Sequence[Commit], shards: Sequence[int]) -> list[Task]:
    """Return one task per partition, in order; `shards` has the number of shards of each."""
    made = []
    first_shard = 0
    for commit, count in zip(packed, shards, strict=True):
        table = commit.outputs[PROVENANCE_NAME]
        made.append(PROVENANCE.task(commit.name, table.bytes, commit.file(PROVENANCE_NAME), first_shard))
        first_shard += count
    return made


def renumber(folder: Path, table: Artifact, first_shard: int) -> None:
    """Copy a provenance table into `folder`, with `first_shard` added to all shard numbers."""
    with table.open_arrow() as source, pq.ParquetFile(source) as file:
        schema = file.schema_arrow
        with _writer(folder / PROVENANCE_NAME, schema) as writer:
            for group in range(file.num_row_groups):
                rows = file.read_row_group(group)
                shards = pc.cast(pc.add(rows.column("shard"), first_shard), pa.int32())
                rows = rows.set_column(0, schema.field("shard"), shards)
                writer.write_table(rows, row_group_size=ROW_GROUP_PIECES)


PROVENANCE = Stage("provenance", "shuffle and pack", renumber, cost=1)


def _writer(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    if schema.names != PROVENANCE_SCHEMA.names:
        raise BuildError(
            f"{path}: has columns {schema.names}, a provenance table has {PROVENANCE_SCHEMA.names}"
        )
    return pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        use_dictionary=["shard", "source", "file"],
        column_encoding=dict.fromkeys(_COUNTING, "DELTA_BINARY_PACKED"),
        write_statistics=True,
    )
