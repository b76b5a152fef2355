"""Rows of Parquet files and of Arrow files (IPC files and streams, Feather of version 2) as documents.

The text column may be any string or binary type, dictionary-encoded or not, also inside structs. Each value
is checked to be UTF-8, because Arrow does not. A null text, bad UTF-8 or an oversized text costs its row.

Damage in a Parquet file costs the rows that had not been read yet, whose number is in the footer. Every
record batch of an Arrow file is validated before anything is taken out of it, because Arrow trusts offsets
and a damaged file would read memory that is not its own. Damage costs the rows after it, whose number is not
known. Memory is one record batch as it was written: Arrow cannot read parts of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from shardkit.writers.documents import BATCH_DOCUMENTS, BATCH_TEXT_BYTES
from shardkit.writers.inputs.chat import without_nulls
from shardkit.writers.inputs.fields import column_at, type_at
from shardkit.writers.inputs.files import open_input
from shardkit.writers.inputs.records import RecordSink
from shardkit.writers.recipe import InputConfig

__all__ = ["read_arrow", "read_parquet"]

# Arrow reports damage as ArrowException (a ValueError or its kin) or as OSError without an errno.
_DAMAGE = (pa.ArrowException, OSError, ValueError, KeyError, OverflowError, NotImplementedError)
_FILE_MAGIC = b"ARROW1"
_FILE_START_BYTES = 8  # the magic and padding, then a stream
_FEATHER_MAGIC = b"FEA1"


def _raise_unless_damage(error: Exception) -> None:
    """A disk that fails and memory that runs out say nothing about the file."""
    if isinstance(error, MemoryError | pa.ArrowCancelled) or getattr(error, "errno", None) is not None:
        raise error


def _first_line(error: Exception) -> str:
    """The first line of an error of Arrow, which adds its C++ context to it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _wanted_paths(schema: pa.Schema, config: InputConfig) -> list[str]:
    """The columns and struct fields that the recipe wants and the file has."""
    texts: tuple[str, ...] = (config.text,)
    if config.is_masked:
        named = (config.messages, config.prompt, config.completion)
        own = (config.tools, config.chat_template_kwargs)
        texts = (*(path for path in named if path is not None), *own)
    paths = dict.fromkeys((*texts, config.id or "id", config.url or "url", *config.metadata))
    paths |= {} if config.document_id is None else {config.document_id: None}
    return [path for path in paths if type_at(schema, path) is not None]


def _text_problem(schema: pa.Schema, text: str) -> str | None:
    """Why `text` is no column of text; None if it is one."""
    kind = type_at(schema, text)
    if kind is None:
        repeated = text in schema.names
        names = ", ".join(schema.names[:40])
        return f"{'more than one' if repeated else 'no'} column {text!r}; its columns: {names}"
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return None if _is_textual(kind) else f"column {text!r} holds {kind}, not text"


def _problem(schema: pa.Schema, config: InputConfig) -> str | None:
    """Why a table has not what the recipe reads; None if it has."""
    if not config.is_masked:
        return _text_problem(schema, config.text)
    wanted = [path for path in (config.messages, config.prompt, config.completion) if path is not None]
    lacking = next((path for path in wanted if type_at(schema, path) is None), None)
    names = ", ".join(schema.names[:40])
    return None if lacking is None else f"no column {lacking!r}; its columns: {names}"


def _take_masked_rows(sink: RecordSink, config: InputConfig, batch: pa.RecordBatch) -> None:
    columns = {path: column_at(batch, path).to_pylist() for path in _wanted_paths(batch.schema, config)}
    for row in range(batch.num_rows):
        fields = {path: without_nulls(values[row]) for path, values in columns.items()}
        sink.add_masked(fields, bytes=batch.nbytes // batch.num_rows)
        sink.record += 1


def _take_rows(sink: RecordSink, config: InputConfig, batch: pa.RecordBatch) -> None:
    if config.is_masked:
        _take_masked_rows(sink, config, batch)
        return
    columns = {path: _values(column_at(batch, path)) for path in _wanted_paths(batch.schema, config)}
    others = {path: values for path, values in columns.items() if path != config.text}
    for row, raw in enumerate(columns[config.text]):
        if raw is None:
            sink.bad("no_text", f"column {config.text!r} is null")
        elif len(raw) > sink.max_record_bytes:
            sink.too_long(len(raw), head=raw)
        else:
            try:
                text = sink.decode(raw)
                fields = {path: _decoded(sink, values[row]) for path, values in others.items()}
            except UnicodeDecodeError as error:
                sink.bad("bad_utf8", f"byte {error.start:,} of a value is not UTF-8", head=raw)
            else:
                sink.add(text, fields, bytes=len(raw))
        sink.record += 1


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


def _decoded(sink: RecordSink, value: object) -> object:
    return sink.decode(value) if isinstance(value, bytes) else value


def read_parquet(sink: RecordSink, config: InputConfig) -> Iterator[None]:
    """Hand the rows of the row groups [start, end) of the sink's split to the sink."""
    with open_input(sink.split.input) as stored:  # outside of what counts as damage
        yield from _read_open(sink, config, stored)


def _read_open(sink: RecordSink, config: InputConfig, stored: BinaryIO) -> Iterator[None]:
    split = sink.split
    try:
        file = pq.ParquetFile(stored, pre_buffer=False, buffer_size=1 << 20)
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
                raise ValueError(f"row groups hold {read:,} rows where the footer says {expected:,}")
        except _DAMAGE as error:
            _raise_unless_damage(error)
            left = max(end - sink.record, 1)
            lost = split.bytes * left // max(expected, 1)
            sink.damaged(_first_line(error), bytes=lost, records=left)


def _other_format(stored: BinaryIO, sink: RecordSink) -> str | None:
    """What a file seems to be that is no Parquet, judged by how it begins, and what to do about it."""
    stored.seek(0)
    head = stored.read(_FILE_START_BYTES)
    key = f"inputs[{sink.split.source}].format"
    if head.lstrip()[:1] in (b"{", b"["):
        return f"it begins like JSON; if it is JSON lines, name it .jsonl or set {key}: jsonl"
    if head.startswith((_FILE_MAGIC, _FEATHER_MAGIC)):
        return f"it is an Arrow file; name it .arrow or set {key}: arrow"
    return None


def _batches(
    file: pq.ParquetFile, groups: range, columns: list[str], batch_rows: int
) -> Iterator[pa.RecordBatch]:
    # Group by group: a batch that reached into a damaged group would take sound rows with it.
    for group in groups:
        yield from file.iter_batches(batch_rows, row_groups=[group], columns=columns, use_threads=False)


def _rows_per_batch(file: pq.ParquetFile, groups: range) -> int:
    """How many rows make a decoded batch of about BATCH_TEXT_BYTES, judged by the footer."""
    rows = size = 0
    for group in groups:
        metadata = file.metadata.row_group(group)
        rows += metadata.num_rows
        size += metadata.total_byte_size
    return max(1, min(BATCH_DOCUMENTS, BATCH_TEXT_BYTES * rows // max(size, 1)))


def read_arrow(sink: RecordSink, config: InputConfig) -> Iterator[None]:
    """Hand the rows of a whole file to the sink."""
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
            sink.damaged(f"not readable as Arrow: {_first_line(error)}", bytes=split.bytes)


def _open(stored: BinaryIO, config: InputConfig) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """What columns the file has, and the record batches of those that are wanted."""
    magic = stored.read(len(_FILE_MAGIC))
    stored.seek(0)
    if magic.startswith(_FEATHER_MAGIC):
        # Arrow checks none of its metadata: a damaged file would end the process.
        raise ValueError(
            "it is Feather of version 1, which is not read; with pyarrow.feather, "
            "write_feather(read_table(OLD), NEW) makes version 2 of it"
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
    """The batches of a file that was cut short: it is a stream with a frame. Raises `error` after them."""
    schema, stream = _reader(pa.ipc.open_stream, stored, _FILE_START_BYTES, config)

    def batches() -> Iterator[pa.RecordBatch]:
        yield from stream
        raise error

    return schema, batches()


def _reader(
    opener: Callable[..., Any], stored: BinaryIO, start: int, config: InputConfig
) -> tuple[pa.Schema, Any]:
    """What columns there are, and a reader of those that the recipe wants."""
    stored.seek(start)
    schema = opener(pa.PythonFile(stored, "r")).schema
    wanted = _wanted_paths(schema, config)
    roots = {path if path in schema.names else path.split(".")[0] for path in wanted}
    fields = [number for number, name in enumerate(schema.names) if name in roots]
    stored.seek(start)
    return schema, opener(pa.PythonFile(stored, "r"), options=pa.ipc.IpcReadOptions(included_fields=fields))


def _validate(batch: pa.RecordBatch) -> None:
    """ArrowInvalid unless its buffers fit its lengths; that text is UTF-8 is checked row by row later."""
    for column in batch.columns:
        for text, raw in ((pa.string(), pa.binary()), (pa.large_string(), pa.large_binary())):
            if column.type == text:
                column = column.view(raw)
        column.validate(full=True)
