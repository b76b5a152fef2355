"""Rows of Arrow batches as documents: what Parquet and Arrow files have in common.

The text column may be any string or binary type, dictionary-encoded or not, also inside structs. Each value
is checked to be UTF-8, because Arrow does not. A null text, bad UTF-8 or an oversized text costs its row.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from shardkit.writers.inputs.fields import column_at, type_at
from shardkit.writers.inputs.record_sink import RecordSink
from shardkit.writers.recipe import InputConfig

__all__ = ["DAMAGE", "first_line", "raise_unless_damage", "take_rows", "text_problem", "wanted_paths"]

# Arrow reports damage as ArrowException (a ValueError or its kin) or as OSError without an errno.
DAMAGE = (pa.ArrowException, OSError, ValueError, KeyError, OverflowError, NotImplementedError)


def raise_unless_damage(error: Exception) -> None:
    """A disk that fails and memory that runs out say nothing about the file."""
    if isinstance(error, MemoryError | pa.ArrowCancelled) or getattr(error, "errno", None) is not None:
        raise error


def first_line(error: Exception) -> str:
    """An error of Arrow's without what it adds."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def wanted_paths(schema: pa.Schema, config: InputConfig) -> list[str]:
    """The columns and struct fields that the recipe wants and the file has."""
    paths = dict.fromkeys((config.text, config.id or "id", config.url or "url", *config.metadata))
    return [path for path in paths if type_at(schema, path) is not None]


def text_problem(schema: pa.Schema, text: str) -> str | None:
    """Why `text` is no column of text; None if it is one."""
    kind = type_at(schema, text)
    if kind is None:
        repeated = text in schema.names
        names = ", ".join(schema.names[:40])
        return f"{'more than one' if repeated else 'no'} column {text!r}; its columns: {names}"
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return None if _is_textual(kind) else f"column {text!r} holds {kind}, not text"


def take_rows(sink: RecordSink, config: InputConfig, batch: pa.RecordBatch, first: int) -> None:
    """Give all rows to the sink, the first as record number `first`."""
    columns = {path: _values(column_at(batch, path)) for path in wanted_paths(batch.schema, config)}
    others = {path: values for path, values in columns.items() if path != config.text}
    for row, raw in enumerate(columns[config.text]):
        record = first + row
        if raw is None:
            sink.bad(record, "no_text", f"column {config.text!r} is null", bytes=0)
            continue
        if len(raw) > sink.max_record_bytes:
            sink.too_long(record, len(raw), head=raw)
            continue
        try:
            text = raw.decode()
            fields = {path: _decoded(values[row]) for path, values in others.items()}
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
