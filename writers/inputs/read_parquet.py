"""Rows of a Parquet file's row groups as documents.

Damage in the file costs the rows that had not been read yet, whose number the footer tells.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from shardkit.writers.documents import BATCH_DOCUMENTS, BATCH_TEXT_BYTES
from shardkit.writers.inputs.arrow_rows import (
    DAMAGE,
    first_line,
    raise_unless_damage,
    take_rows,
    text_problem,
    wanted_paths,
)
from shardkit.writers.inputs.input_files import open_input
from shardkit.writers.inputs.record_sink import RecordSink
from shardkit.writers.recipe import InputConfig

__all__ = ["read_parquet"]


def read_parquet(sink: RecordSink, config: InputConfig) -> Iterator[pa.RecordBatch]:
    """Batches of the documents in the row groups [start, end) of the sink's split."""
    with open_input(sink.split.input) as stored:  # outside of what counts as damage
        yield from _read_open(sink, config, stored)


def _read_open(sink: RecordSink, config: InputConfig, stored: BinaryIO) -> Iterator[pa.RecordBatch]:
    split = sink.split
    try:
        file = pq.ParquetFile(stored, pre_buffer=False, buffer_size=1 << 20)
    except DAMAGE as error:
        raise_unless_damage(error)
        sink.damaged(
            split.first_record, f"not a readable Parquet file: {first_line(error)}", bytes=split.bytes
        )
        return
    with file:
        groups = range(split.start, min(split.end, file.num_row_groups))
        expected = sum(file.metadata.row_group(group).num_rows for group in groups)
        unfit = text_problem(file.schema_arrow, config.text)
        if unfit:
            sink.no_column(split.first_record, unfit, bytes=split.bytes, records=expected)
            return
        read, sink.columns = 0, file.schema_arrow.names
        columns = wanted_paths(file.schema_arrow, config)
        batch_rows = _rows_per_batch(file, groups)
        try:
            for batch in _batches(file, groups, columns, batch_rows):
                take_rows(sink, config, batch, split.first_record + read)
                read += batch.num_rows
                if sink.full:
                    yield from sink.take()
            if read != expected:
                raise ValueError(f"row groups hold {read:,} rows where the footer says {expected:,}")
        except DAMAGE as error:
            raise_unless_damage(error)
            yield from sink.take()
            left = max(expected - read, 1)
            lost = split.bytes * left // max(expected, 1)
            sink.damaged(split.first_record + read, first_line(error), bytes=lost, records=left)


def _batches(
    file: pq.ParquetFile, groups: range, columns: list[str], batch_rows: int
) -> Iterator[pa.RecordBatch]:
    # Group by group: a batch that reached into a damaged group would take sound rows with it.
    for group in groups:
        yield from file.iter_batches(batch_rows, row_groups=[group], columns=columns, use_threads=False)


def _rows_per_batch(file: pq.ParquetFile, groups: range) -> int:
    """So many rows that a decoded batch stays near BATCH_TEXT_BYTES, judged by the footer."""
    rows = size = 0
    for group in groups:
        metadata = file.metadata.row_group(group)
        rows += metadata.num_rows
        size += metadata.total_byte_size
    return max(1, min(BATCH_DOCUMENTS, BATCH_TEXT_BYTES * rows // max(size, 1)))
