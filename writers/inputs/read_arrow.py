"""Rows of Arrow files as documents: IPC files and streams, Feather of both versions.

Which of them a file is its first bytes tell. Every record batch is validated before anything is taken out of
it: Arrow itself trusts offsets, and a damaged file would read memory that is not its own. Damage costs the
rows behind it, whose number nothing tells. Memory is one record batch as it was written: Arrow cannot read
parts of one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.feather

from shardkit.writers.documents import BATCH_DOCUMENTS
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

__all__ = ["read_arrow"]

_FILE_MAGIC = b"ARROW1"
_FILE_START_BYTES = 8  # the magic and padding, then a stream
_FEATHER_MAGIC = b"FEA1"


def read_arrow(sink: RecordSink, config: InputConfig) -> Iterator[pa.RecordBatch]:
    """Batches of the documents of a whole file."""
    split, read = sink.split, 0
    with open_input(split.input) as stored:
        try:
            schema, batches = _open(stored, config)
            unfit = text_problem(schema, config.text)
            if unfit:
                rows = sum(batch.num_rows for batch in batches)
                sink.no_column(read, unfit, bytes=split.bytes, records=rows)
                return
            sink.columns = schema.names
            for batch in batches:
                _validate(batch)
                for start in range(0, batch.num_rows, BATCH_DOCUMENTS):
                    part = batch.slice(start, BATCH_DOCUMENTS)
                    take_rows(sink, config, part, read)
                    read += part.num_rows
                    if sink.full:
                        yield from sink.take()
        except DAMAGE as error:
            raise_unless_damage(error)
            yield from sink.take()
            sink.damaged(read, f"not readable as Arrow: {first_line(error)}", bytes=split.bytes)


def _open(stored: BinaryIO, config: InputConfig) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """What columns the file has, and the record batches of those that are wanted."""
    magic = stored.read(len(_FILE_MAGIC))
    stored.seek(0)
    if magic.startswith(_FEATHER_MAGIC):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of the format; files of it are still about
            table = pyarrow.feather.read_table(pa.PythonFile(stored, "r"), memory_map=False)
        return table.schema, iter(table.to_batches())
    if magic == _FILE_MAGIC:
        try:
            schema, file = _reader(pa.ipc.open_file, stored, 0, config)
            return schema, (file.get_batch(number) for number in range(file.num_record_batches))
        except DAMAGE as error:
            raise_unless_damage(error)
            return _without_footer(stored, config, error)
    schema, stream = _reader(pa.ipc.open_stream, stored, 0, config)
    return schema, iter(stream)


def _without_footer(
    stored: BinaryIO, config: InputConfig, error: Exception
) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """The batches of a file that was cut short: it is a stream with a frame. Raises `error` behind them."""
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
    wanted = wanted_paths(schema, config)
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
