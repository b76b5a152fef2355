"""Rows of Arrow files as documents: IPC files and streams, Feather of both versions.

Which of them a file is its first bytes tell. Every record batch is validated before anything is taken out of
it: Arrow itself trusts offsets, and a damaged file would read memory that is not its own. Damage costs the
rows behind it; the footer of an IPC file tells how many batches these are, nothing tells how many rows. Memory
is one record batch as it was written: Arrow cannot read parts of one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import BinaryIO

import pyarrow as pa
import pyarrow.feather

from shardkit.writers.arrow_rows import (
    DAMAGE,
    first_line,
    raise_unless_damage,
    take_rows,
    text_problem,
    wanted_paths,
)
from shardkit.writers.documents import BATCH_DOCUMENTS
from shardkit.writers.input_files import open_input
from shardkit.writers.recipe import InputConfig
from shardkit.writers.record_sink import RecordSink

__all__ = ["read_arrow"]

_FILE_MAGIC = b"ARROW1"
_FEATHER_MAGIC = b"FEA1"


def read_arrow(sink: RecordSink, config: InputConfig) -> Iterator[pa.RecordBatch]:
    """Batches of the documents of a whole file."""
    split, read = sink.split, 0
    with open_input(split.input) as stored:
        try:
            for batch in _batches(stored, config):
                unfit = text_problem(batch.schema, config.text)
                if unfit:
                    sink.damaged(read, unfit, bytes=split.bytes, records=batch.num_rows)
                    return
                for start in range(0, batch.num_rows, BATCH_DOCUMENTS):
                    rows = batch.slice(start, BATCH_DOCUMENTS)
                    take_rows(sink, config, rows, read)
                    read += rows.num_rows
                    if sink.full:
                        yield from sink.take()
        except DAMAGE as error:
            raise_unless_damage(error)
            yield from sink.take()
            sink.damaged(read, f"not readable as Arrow: {first_line(error)}", bytes=split.bytes)


def _batches(stored: BinaryIO, config: InputConfig) -> Iterator[pa.RecordBatch]:
    """Validated record batches; an empty one first, whose schema shows what the file has."""
    magic = stored.read(len(_FILE_MAGIC))
    stored.seek(0)
    source = pa.PythonFile(stored, "r")
    if magic.startswith(_FEATHER_MAGIC):
        yield from _feather_batches(source)
        return
    opener = pa.ipc.open_file if magic == _FILE_MAGIC else pa.ipc.open_stream
    schema = opener(source).schema
    yield schema.empty_table().to_batches()[0] if schema.names else pa.record_batch([], names=[])
    stored.seek(0)
    roots = {
        path.split(".")[0] if path not in schema.names else path for path in wanted_paths(schema, config)
    }
    fields = [number for number, name in enumerate(schema.names) if name in roots]
    reader = opener(pa.PythonFile(stored, "r"), options=pa.ipc.IpcReadOptions(included_fields=fields))
    if magic == _FILE_MAGIC:
        for number in range(reader.num_record_batches):
            yield _valid(reader.get_batch(number))
    else:
        for batch in reader:
            yield _valid(batch)


def _feather_batches(source: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the format is; files of it are still about
        table = pyarrow.feather.read_table(source, memory_map=False)
    for batch in table.to_batches() or table.schema.empty_table().to_batches():
        yield _valid(batch)


def _valid(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch if its buffers fit its lengths; that text is UTF-8 is checked row by row later."""
    for column in batch.columns:
        kind = column.type
        for text, raw in ((pa.string(), pa.binary()), (pa.large_string(), pa.large_binary())):
            if kind == text:
                column = column.view(raw)
        column.validate(full=True)
    return batch
