"""A split of an input file as batches of documents, every record accounted for; and the readers of lines.

Each record of the split ends up in a batch or in quarantine, and in the ledger either way. One bad record
costs itself only. A damaged member of a compressed file costs all its records, because a checksum confirms a
member as a whole, and what comes after it. Memory is bounded by one batch plus one record. Record numbers are
line numbers or row numbers within the file, from 0. Blank lines count as lines but are no records.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress

import orjson
import pyarrow as pa

from shardkit.errors import BuildError
from shardkit.writers.inputs.decompress import ContainerError
from shardkit.writers.inputs.fields import MISSING, NamedFields, field_at
from shardkit.writers.inputs.files import open_input
from shardkit.writers.inputs.read_columnar import read_arrow, read_parquet
from shardkit.writers.inputs.read_csv import read_csv
from shardkit.writers.inputs.records import Lines, RecordSink, SuspectDataError
from shardkit.writers.inputs.scan import Split
from shardkit.writers.ledger import Ledger, Quarantine
from shardkit.writers.recipe import InputConfig

__all__ = ["SuspectDataError", "read_split"]

Reader = Callable[[RecordSink, InputConfig], Iterator[pa.RecordBatch]]
_TABLES: dict[str, Reader] = {"parquet": read_parquet, "arrow": read_arrow, "csv": read_csv}
_BOM = b"\xef\xbb\xbf"


def read_split(
    split: Split,
    config: InputConfig,
    ledger: Ledger,
    quarantine: Quarantine,
    *,
    max_record_bytes: int = 1 << 26,
    fields: NamedFields | None = None,
    suspect: SuspectDataError | None = None,
) -> Iterator[pa.RecordBatch]:
    """Batches of DOCUMENT_SCHEMA in record order; books `ledger.read` and `ledger.quarantined`.

    `fields` learns which named fields there are; the caller books kept and dropped documents.
    BuildError when the file cannot be opened, or at the first bad record if `quarantine` allows none. If it
    allows some and a member of a compressed file is damaged, SuspectDataError: discard batches and counts,
    and read again with this error as `suspect`.
    """
    sink = RecordSink(
        split, config, ledger, quarantine, max_record_bytes, fields or NamedFields(config), suspect
    )
    try:
        yield from _reader(split, config)(sink, config)
        yield from sink.flush()
    except OSError as error:
        raise BuildError(f"{split.path}: cannot be read: {error.strerror or error}") from error


def _reader(split: Split, config: InputConfig) -> Reader:
    if split.format in _TABLES:
        return _TABLES[split.format]
    if split.format == "warc":  # its module needs an extra
        from shardkit.writers.inputs.read_warc import read_warc

        return read_warc
    lines = split.format == "jsonl" or config.lines
    return _read_lines if lines else _read_whole


def _read_lines(sink: RecordSink, config: InputConfig) -> Iterator[pa.RecordBatch]:
    split = sink.split
    take = _take_json if split.format == "jsonl" else _take_text
    with open_input(split.input) as file:
        lines = Lines(sink.pieces(file), offset=split.start, max_line_bytes=sink.max_record_bytes)
        record = split.first_record
        try:
            for offset, length, line, whole in lines:
                if offset == 0 and line.startswith(_BOM):
                    line, length = line[3:], length - 3
                if not whole:
                    sink.too_long(record, length, head=line, offset=offset)
                elif line and not line.isspace():
                    take(sink, config, record, offset, line)
                record += 1
                if sink.full:
                    yield from sink.flush()
        except ContainerError as damage:
            yield from sink.flush()
            lost = lines.unfinished_bytes + damage.rest_bytes
            sink.damaged(record, damage.problem, bytes=lost, offset=lines.offset)


def _take_json(sink: RecordSink, config: InputConfig, record: int, offset: int, line: bytes) -> None:
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        reason, problem = _json_problem(line, error)
        sink.bad(record, reason, problem, bytes=len(line), head=line, offset=offset)
        return
    if not isinstance(fields, dict):
        problem = f"a JSON {_kind(fields)} where an object is expected"
        sink.bad(record, "not_an_object", problem, bytes=len(line), head=line, offset=offset)
        return
    text = field_at(fields, config.text)
    if not isinstance(text, str):
        if text is not MISSING:
            problem = f"field {config.text!r} holds {_kind(text)}, not text"
        else:
            known = ", ".join(sorted(fields)[:20]) or "none"
            problem = f"no field {config.text!r}; its fields: {known}"
        sink.bad(record, "no_text", problem, bytes=len(line), head=line, offset=offset)
        return
    if any(_holds_large_number(field_at(fields, path)) for path in sink.carried):
        # orjson makes floats of integers that 64 bits do not hold; json nests a little less deep than it.
        with suppress(RecursionError):
            fields = json.loads(line)
    sink.add(record, text, fields, bytes=len(line))


def _holds_large_number(value: object) -> bool:
    """Whether there is a float anywhere in it that may be an integer of more than 64 bits."""
    held = [value]
    while held:
        value = held.pop()
        if isinstance(value, float) and abs(value) >= 1 << 63:
            return True
        if isinstance(value, dict | list):
            held += value.values() if isinstance(value, dict) else value
    return False


def _json_problem(line: bytes, error: orjson.JSONDecodeError) -> tuple[str, str]:
    try:
        line.decode()
    except UnicodeDecodeError as bad:
        return "bad_utf8", f"byte {bad.start:,} of the line is not UTF-8"
    return "bad_json", f"not JSON: {error.msg} at character {error.pos:,} of the line"


def _take_text(sink: RecordSink, config: InputConfig, record: int, offset: int, line: bytes) -> None:
    try:
        text = line.removesuffix(b"\r").decode()
    except UnicodeDecodeError as error:
        problem = f"byte {error.start:,} of the record is not UTF-8"
        sink.bad(record, "bad_utf8", problem, bytes=len(line), head=line, offset=offset)
        return
    sink.add(record, text, {}, bytes=len(line))


def _read_whole(sink: RecordSink, config: InputConfig) -> Iterator[pa.RecordBatch]:
    """A text file as one document."""
    held: list[bytes] = []
    length = 0
    with open_input(sink.split.input) as file:
        try:
            for piece in sink.pieces(file):
                length += len(piece)
                if length <= sink.max_record_bytes:
                    held.append(piece)
        except ContainerError as damage:
            sink.damaged(0, damage.problem, bytes=length + damage.rest_bytes, offset=length)
            return
    data = b"".join(held)
    if length > sink.max_record_bytes:
        sink.too_long(0, length, head=data, offset=0)
        return
    try:
        text = data.removeprefix(_BOM).decode()
    except UnicodeDecodeError as error:
        problem = f"byte {error.start:,} is not UTF-8"
        sink.bad(0, "bad_utf8", problem, bytes=length, head=data[max(error.start - 40, 0) :], offset=0)
        return
    sink.add(0, text, {}, bytes=length)
    yield from sink.flush()


def _kind(value: object) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
