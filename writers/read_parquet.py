"""Rows of a Parquet file's row groups as documents.

The text column may be any string or binary type, dictionary-encoded or not; each value is checked to be
UTF-8, because Parquet readers do not. A null text, bad UTF-8 or an oversized text costs its row; damage in
the file costs the rows that had not been read yet, whose number the footer tells.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from shardkit.writers.documents import BATCH_DOCUMENTS, BATCH_TEXT_BYTES
from shardkit.writers.input_files import open_input
from shardkit.writers.recipe import InputConfig

if TYPE_CHECKING:
    from shardkit.writers.readers import RecordSink

__all__ = ["read_parquet"]

# Arrow reports damage as ArrowException (a ValueError or its kin) or as OSError without an errno.
_DAMAGE = (pa.ArrowException, OSError, ValueError, KeyError, OverflowError, NotImplementedError)


def read_parquet(sink: RecordSink, config: InputConfig, max_record_bytes: int) -> Iterator[pa.RecordBatch]:
    """Batches of the documents in the row groups [start, end) of the sink's split."""
    with open_input(sink.split.input) as stored:  # outside of what counts as damage
        yield from _read_open(sink, config, stored, max_record_bytes)


def _read_open(
    sink: RecordSink, config: InputConfig, stored: BinaryIO, max_record_bytes: int
) -> Iterator[pa.RecordBatch]:
    split = sink.split
    try:
        file = pq.ParquetFile(stored, pre_buffer=False, buffer_size=1 << 20)
    except _DAMAGE as error:
        _raise_unless_damage(error)
        sink.damaged(split.first_record, f"not a readable Parquet file: {_line(error)}", bytes=split.bytes)
        return
    with file:
        groups = range(split.start, min(split.end, file.num_row_groups))
        expected = sum(file.metadata.row_group(group).num_rows for group in groups)
        problem = _text_problem(file.schema_arrow, config.text)
        if problem:
            sink.damaged(split.first_record, problem, bytes=split.bytes, records=expected)
            return
        wanted = {config.text, config.id or "id", config.url or "url", *config.metadata}
        read = 0
        columns = [name for name in file.schema_arrow.names if name in wanted]
        batch_rows = _rows_per_batch(file, groups)
        try:
            for batch in _batches(file, groups, columns, batch_rows):
                _take_rows(sink, config, batch, split.first_record + read, max_record_bytes)
                read += batch.num_rows
                if sink.full:
                    yield from sink.take()
            if read != expected:
                raise ValueError(f"row groups hold {read:,} rows where the footer says {expected:,}")
        except _DAMAGE as error:
            _raise_unless_damage(error)
            yield from sink.take()
            left = max(expected - read, 1)
            lost = split.bytes * left // max(expected, 1)
            sink.damaged(split.first_record + read, _line(error), bytes=lost, records=left)


def _raise_unless_damage(error: Exception) -> None:
    """A disk that fails and memory that runs out say nothing about the file."""
    if isinstance(error, MemoryError | pa.ArrowCancelled) or getattr(error, "errno", None) is not None:
        raise error


def _batches(
    file: pq.ParquetFile, groups: range, columns: list[str], batch_rows: int
) -> Iterator[pa.RecordBatch]:
    # Group by group: a batch that reached into a damaged group would take sound rows with it.
    for group in groups:
        yield from file.iter_batches(batch_rows, row_groups=[group], columns=columns, use_threads=False)


def _text_problem(schema: pa.Schema, text: str) -> str | None:
    index = schema.get_field_index(text)
    if index < 0:
        repeated = text in schema.names
        names = ", ".join(schema.names[:40])
        return f"{'more than one' if repeated else 'no'} column {text!r}; its columns: {names}"
    kind = schema.field(index).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return None if _is_textual(kind) else f"column {text!r} holds {kind}, not text"


def _rows_per_batch(file: pq.ParquetFile, groups: range) -> int:
    """So many rows that a decoded batch stays near BATCH_TEXT_BYTES, judged by the footer."""
    rows = size = 0
    for group in groups:
        metadata = file.metadata.row_group(group)
        rows += metadata.num_rows
        size += metadata.total_byte_size
    return max(1, min(BATCH_DOCUMENTS, BATCH_TEXT_BYTES * rows // max(size, 1)))


def _take_rows(
    sink: RecordSink, config: InputConfig, batch: pa.RecordBatch, first: int, max_record_bytes: int
) -> None:
    columns = {name: _values(batch.column(name)) for name in batch.schema.names}
    others = {name: values for name, values in columns.items() if name != config.text}
    for row, raw in enumerate(columns[config.text]):
        record = first + row
        if raw is None:
            sink.bad(record, "no_text", f"column {config.text!r} is null", bytes=0)
            continue
        if len(raw) > max_record_bytes:
            error = f"{len(raw):,} bytes, more than max_record_bytes {max_record_bytes:,}"
            sink.bad(record, "too_long", error, bytes=len(raw), head=raw)
            continue
        try:
            text = raw.decode()
            fields = {name: _decoded(values[row]) for name, values in others.items()}
        except UnicodeDecodeError as error:
            problem = f"byte {error.start:,} of a value is not UTF-8"
            sink.bad(record, "bad_utf8", problem, bytes=len(raw), head=raw)
            continue
        sink.add(record, text, fields, bytes=len(raw))


def _is_textual(kind: pa.DataType) -> bool:
    return (
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or kind in (pa.string_view(), pa.binary_view())
    )


def _values(column: pa.Array) -> list[Any]:
    """Python values; strings as bytes that are still to be checked, times as ISO text."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_temporal(column.type):
        column = column.cast(pa.string())
    if _is_textual(column.type):
        column = column.cast(pa.large_binary())
    values: list[Any] = column.to_pylist()
    return values


def _decoded(value: object) -> object:
    return value.decode() if isinstance(value, bytes) else value


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
