"""Reads documents from the rows of Parquet and Arrow files (IPC files and streams, Feather version 2).

The text column may have any string or binary type, dictionary-encoded or not, also inside structs. Each value
is checked to be UTF-8, because Arrow does not check. A row whose text is null, not UTF-8 or too long is
quarantined. Carried fields (fields.py) may have any type and never cost a row its text: a value that Python
or UTF-8 cannot represent becomes null, and `fields.field_text` converts binary data to text.

Damage in a Parquet file costs the rows that had not been read yet; the footer has their number. Every record
batch of an Arrow file is validated before it is used, because Arrow trusts offsets, and a damaged file could
make it read foreign memory. Damage costs the rows after it; their number is unknown. Memory is one record
batch as it was written, because Arrow cannot read a part of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from shardkit.tokens.chat import without_nulls
from shardkit.writers.inputs.fields import column_at, type_at
from shardkit.writers.inputs.files import open_input
from shardkit.writers.inputs.first_bytes import HEAD_BYTES, look, raise_if_pointer
from shardkit.writers.inputs.records import RecordSink
from shardkit.writers.recipe.inputs import InputConfig
from shardkit.writers.rows.documents import BATCH_DOCUMENTS, BATCH_TEXT_BYTES

# Arrow reports damage by one of these exceptions; an OSError then has no errno.
_DAMAGE = (pa.ArrowException, OSError, ValueError, KeyError, OverflowError, NotImplementedError)
# Conversion to a Python value raises these if the value is out of range or not UTF-8, or has no Python type.
_NO_VALUE = (pa.ArrowException, ValueError, ArithmeticError, TypeError, LookupError, AttributeError)
_FILE_MAGIC = b"ARROW1"
_FILE_START_BYTES = 8  # the magic number and padding, before a stream begins
_FEATHER_MAGIC = b"FEA1"


def _raise_unless_damage(error: Exception) -> None:
    """Raise `error` again if it is about memory, a cancellation or the disk, not about a damaged file."""
    if isinstance(error, MemoryError | pa.ArrowCancelled) or getattr(error, "errno", None) is not None:
        raise error


def _first_line(error: Exception) -> str:
    """Return the first line of an error from Arrow; the others are C++ context."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _wanted_paths(schema: pa.Schema, config: InputConfig) -> list[str]:
    """Return the paths of all columns and struct fields to read: those in the recipe that the file has."""
    paths = dict.fromkeys((*_text_paths(config), config.id or "id", config.url or "url", *config.metadata))
    paths |= {} if config.document_id is None else {config.document_id: None}
    return [path for path in paths if type_at(schema, path) is not None]


def _text_paths(config: InputConfig) -> list[str]:
    """Return the paths of the columns that contain the text, or from which it is rendered."""
    if not config.is_masked:
        return [config.text]
    own = (config.tools, config.chat_template_kwargs)
    named = (config.messages, config.prompt, config.completion, *own)
    return [path for path in named if path is not None]


def _text_problem(schema: pa.Schema, text: str) -> str | None:
    """Return why the path `text` is not exactly one column of text, or None if it is."""
    kind = type_at(schema, text)
    if kind is None:
        repeated = text in schema.names
        names = ", ".join(schema.names[:40])
        return f"{'more than one' if repeated else 'no'} column {text!r}; its columns: {names}"
    return None if _is_textual(_value_type(kind)) else f"column {text!r} holds {kind}, not text"


def _problem(schema: pa.Schema, config: InputConfig) -> str | None:
    """Return why a table lacks a column that the recipe requires, or None if it has all of them."""
    if not config.is_masked:
        return _text_problem(schema, config.text)
    wanted = [path for path in (config.messages, config.prompt, config.completion) if path is not None]
    lacking = next((path for path in wanted if type_at(schema, path) is None), None)
    names = ", ".join(schema.names[:40])
    return None if lacking is None else f"no column {lacking!r}; its columns: {names}"


def _take_masked_rows(sink: RecordSink, config: InputConfig, batch: pa.RecordBatch) -> None:
    paths = [path for path in _text_paths(config) if type_at(batch.schema, path) is not None]
    columns = {path: column_at(batch, path) for path in paths}
    others = {path: _carried(sink, column_at(batch, path)) for path in _carried_paths(batch.schema, sink)}
    for row in range(batch.num_rows):
        size = batch.nbytes // batch.num_rows
        try:
            fields = {path: without_nulls(column[row].as_py()) for path, column in columns.items()}
        except (pa.ArrowException, ValueError) as error:
            sink.bad("bad_utf8", f"a value cannot be read: {_first_line(error)}", bytes=size)
        else:
            sink.add_masked({path: values[row] for path, values in others.items()} | fields, bytes=size)
        sink.record += 1


def _take_rows(sink: RecordSink, config: InputConfig, batch: pa.RecordBatch) -> None:
    if config.is_masked:
        _take_masked_rows(sink, config, batch)
        return
    others = {path: _carried(sink, column_at(batch, path)) for path in _carried_paths(batch.schema, sink)}
    holds_bytes = "binary" in str(type_at(batch.schema, config.text))  # may be web pages in any encoding
    for row, raw in enumerate(_as_binary(column_at(batch, config.text)).to_pylist()):
        if raw is None:
            sink.bad("no_text", f"column {config.text!r} is null")
        elif len(raw) > sink.max_record_bytes:
            sink.too_long(len(raw), head=raw)
        else:
            try:
                text = sink.text_of(raw) if holds_bytes else sink.decode(raw)
            except UnicodeDecodeError as error:
                problem = f"byte {error.start:,} of column {config.text!r} is not UTF-8"
                sink.bad("bad_utf8", problem, head=raw)
            else:
                sink.add(text, {path: values[row] for path, values in others.items()}, bytes=len(raw))
        sink.record += 1


def _carried_paths(schema: pa.Schema, sink: RecordSink) -> list[str]:
    """Return the paths of the carried fields that the file has."""
    return [path for path in dict.fromkeys(sink.carried) if type_at(schema, path) is not None]


def _value_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of a column's values, without dictionary or run-end encoding and extension types."""
    while True:
        if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
            kind = kind.value_type
        elif isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        else:
            return kind


def _decoded(column: pa.Array) -> pa.Array:
    """Return a column without dictionary or run-end encoding."""
    while True:
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        elif pa.types.is_run_end_encoded(column.type):
            column = pc.run_end_decode(column)
        else:
            return column


def _is_string(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == pa.string_view())


def _is_textual(kind: pa.DataType) -> bool:
    return (
        _is_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or kind == pa.binary_view()
    )


def _as_binary(column: pa.Array) -> pa.Array:
    """Return a column of strings or binary values as large_binary, not yet checked to be UTF-8."""
    column = _decoded(column)
    while isinstance(column, pa.ExtensionArray):
        column = _decoded(column.storage)
    return column.cast(pa.large_binary())


def _carried(sink: RecordSink, column: pa.Array) -> list[object]:
    """Return the values of a carried column as Python objects, times as ISO text.

    A value that cannot be converted becomes None, never an error, because the text of its row is valid.
    """
    column, kind = _decoded(column), _value_type(column.type)
    if _is_string(kind):
        return [_text_or_null(sink, value) for value in _as_binary(column).to_pylist()]
    if pa.types.is_temporal(kind) and kind == column.type:
        with suppress(pa.ArrowException, ValueError):  # some, such as intervals, cannot be cast to text
            return list(column.cast(pa.string()).to_pylist())
    try:
        return list(column.to_pylist())
    except MemoryError:
        raise
    except _NO_VALUE:
        return [_value_or_null(value) for value in column]


def python_values(column: pa.Array) -> list[object]:
    """Return the values of a column as Python objects; text that is not UTF-8 as bytes.

    A value that Python cannot represent becomes None, and a time that it cannot represent becomes text.
    """
    column, kind = _decoded(column), _value_type(column.type)
    try:
        return list(column.to_pylist())
    except MemoryError:
        raise
    except _NO_VALUE:
        if _is_string(kind):
            return [
                None if value is None else _text_or_bytes(value) for value in _as_binary(column).to_pylist()
            ]
        if pa.types.is_temporal(kind) and kind == column.type:
            with suppress(pa.ArrowException, ValueError):
                return list(column.cast(pa.string()).to_pylist())
        return [_value_or_null(value) for value in column]


def _text_or_bytes(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _text_or_null(sink: RecordSink, value: bytes | None) -> str | None:
    try:
        return None if value is None else sink.decode(value)
    except UnicodeDecodeError:
        return None


def _value_or_null(value: pa.Scalar) -> object:
    try:
        return value.as_py()
    except MemoryError:
        raise
    except _NO_VALUE:
        return None


def read_parquet(sink: RecordSink, config: InputConfig) -> Iterator[None]:
    """Read a Parquet file: pass the rows of row groups [start, end) of the sink's split to the sink."""
    with open_input(sink.split.input) as stored:  # an error here is not damage of the file
        yield from _read_open(sink, config, stored)


def _read_open(sink: RecordSink, config: InputConfig, stored: BinaryIO) -> Iterator[None]:
    split = sink.split
    try:
        file = pq.ParquetFile(stored, pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True)
    except _DAMAGE as error:
        _raise_unless_damage(error)
        problem = _other_format(stored, sink) or _first_line(error)
        sink.damaged(f"not a readable Parquet file: {problem}", bytes=split.bytes)
        return
    with file:
        groups = range(split.start, min(split.end, file.num_row_groups))
        expected = sum(file.metadata.row_group(group).num_rows for group in groups)
        unfit = _problem(file.schema_arrow, config)
        if unfit:
            sink.no_column(unfit, bytes=split.bytes, records=expected)
            return
        end, sink.columns = sink.record + expected, file.schema_arrow.names
        columns = _wanted_paths(file.schema_arrow, config)
        batch_rows = _rows_per_batch(file, groups)
        try:
            for batch in _batches(file, groups, columns, batch_rows):
                _take_rows(sink, config, batch)
                yield
            if sink.record != end:
                read = sink.record - split.first_record
                raise ValueError(f"the row groups have {read:,} rows, but the footer says {expected:,}")
        except _DAMAGE as error:
            _raise_unless_damage(error)
            left = max(end - sink.record, 1)
            lost = split.bytes * left // max(expected, 1)
            sink.damaged(_first_line(error), bytes=lost, records=left)


def _other_format(stored: BinaryIO, sink: RecordSink) -> str | None:
    """Return which other format a file has, and what to do about it; None if it is not recognized."""
    stored.seek(0)
    found = look(stored.read(HEAD_BYTES))
    raise_if_pointer(found, sink.split.path)
    return found.problem(sink.split.format, f"inputs[{sink.split.source}]")


def _batches(
    file: pq.ParquetFile, groups: range, columns: list[str], batch_rows: int
) -> Iterator[pa.RecordBatch]:
    # One row group at a time: a batch that extended into a damaged group would lose intact rows.
    for group in groups:
        yield from file.iter_batches(batch_rows, row_groups=[group], columns=columns, use_threads=False)


def _rows_per_batch(file: pq.ParquetFile, groups: range) -> int:
    """Estimate from the sizes in the footer how many rows decode to about BATCH_TEXT_BYTES."""
    rows = size = 0
    for group in groups:
        metadata = file.metadata.row_group(group)
        rows += metadata.num_rows
        size += metadata.total_byte_size
    return max(1, min(BATCH_DOCUMENTS, BATCH_TEXT_BYTES * rows // max(size, 1)))


def read_arrow(sink: RecordSink, config: InputConfig) -> Iterator[None]:
    """Read an Arrow file: pass all of its rows to the sink."""
    split = sink.split
    with open_input(split.input) as stored:
        try:
            schema, batches = _open(stored, config)
            unfit = _text_problem(schema, config.text)
            if unfit:
                rows = sum(batch.num_rows for batch in batches)
                sink.no_column(unfit, bytes=split.bytes, records=rows)
                return
            sink.columns = schema.names
            for batch in batches:
                _validate(batch)
                for start in range(0, batch.num_rows, BATCH_DOCUMENTS):
                    _take_rows(sink, config, batch.slice(start, BATCH_DOCUMENTS))
                    yield
        except _DAMAGE as error:
            _raise_unless_damage(error)
            problem = _other_format(stored, sink) or _first_line(error)
            sink.damaged(f"not readable as Arrow: {problem}", bytes=split.bytes)


def _open(stored: BinaryIO, config: InputConfig) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Return (schema of the file, its record batches); the batches have only the columns to read."""
    magic = stored.read(len(_FILE_MAGIC))
    stored.seek(0)
    if magic.startswith(_FEATHER_MAGIC):
        # Arrow does not check the metadata of Feather version 1, so a damaged file would crash the process.
        raise ValueError(
            "it is Feather of version 1, which is not read; convert it to version 2 by pyarrow.feather's "
            "write_feather(read_table(OLD), NEW)"
        )
    if magic == _FILE_MAGIC:
        try:
            schema, file = _reader(pa.ipc.open_file, stored, 0, config)
            return schema, (file.get_batch(number) for number in range(file.num_record_batches))
        except _DAMAGE as error:
            _raise_unless_damage(error)
            return _without_footer(stored, config, error)
    schema, stream = _reader(pa.ipc.open_stream, stored, 0, config)
    return schema, iter(stream)


def _without_footer(
    stored: BinaryIO, config: InputConfig, error: Exception
) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Return (schema, batches) of a truncated file, read as a stream; after the last batch, raise `error`."""
    schema, stream = _reader(pa.ipc.open_stream, stored, _FILE_START_BYTES, config)

    def batches() -> Iterator[pa.RecordBatch]:
        yield from stream
        raise error

    return schema, batches()


def _reader(
    opener: Callable[..., Any], stored: BinaryIO, start: int, config: InputConfig
) -> tuple[pa.Schema, Any]:
    """Return (schema of the file, a reader made by `opener` that reads only the columns to read)."""
    stored.seek(start)
    schema = opener(pa.PythonFile(stored, "r")).schema
    wanted = _wanted_paths(schema, config)
    roots = {path if path in schema.names else path.split(".")[0] for path in wanted}
    fields = [number for number, name in enumerate(schema.names) if name in roots]
    stored.seek(start)
    return schema, opener(pa.PythonFile(stored, "r"), options=pa.ipc.IpcReadOptions(included_fields=fields))


def _validate(batch: pa.RecordBatch) -> None:
    """Raise ArrowInvalid if buffers are too short or have bad offsets; UTF-8 is checked later, row by row."""
    for column in batch.columns:
        raw = _raw_type(column.type)
        if raw != column.type:
            with suppress(NotImplementedError):  # for a type without such a view, UTF-8 is checked here, too
                column = column.view(raw)
        column.validate(full=True)


def _raw_type(kind: pa.DataType) -> pa.DataType:
    """Return the type with every string type in it replaced by the binary type of the same layout."""
    if _is_string(kind):
        views = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
        return views.get(kind, pa.binary_view())
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_raw_type(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_raw_type(kind.value_type)))
    if pa.types.is_map(kind):
        return pa.map_(_raw_type(kind.key_type), _raw_type(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_raw_type(field.type)) for field in kind])
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _raw_type(kind.value_type), kind.ordered)
    return kind
