"""A split of an input file as batches of documents, every record accounted for.

Each record of the split ends up in a batch or in quarantine, and in the ledger either way. One bad record
costs itself only; a damaged container costs what comes after the damage. Memory is bounded by one batch plus
one record. JSONL is cut at b"\\n" only; blank lines count as lines but are no records. Record numbers are
line numbers or row numbers within the file, from 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import BinaryIO

import orjson
import pyarrow as pa

from shardkit.errors import BuildError
from shardkit.writers.decompress import ContainerError, decompressed, plain_range
from shardkit.writers.documents import (
    BATCH_DOCUMENTS,
    BATCH_TEXT_BYTES,
    DOCUMENT_SCHEMA,
    document_ids,
    text_offsets,
)
from shardkit.writers.input_files import open_input
from shardkit.writers.ledger import Count, Ledger
from shardkit.writers.lines import Lines
from shardkit.writers.quarantine import BadRecord, Quarantine, snippet_of
from shardkit.writers.recipe import InputConfig
from shardkit.writers.scan import Split

__all__ = ["RecordSink", "read_split"]

_BOM = b"\xef\xbb\xbf"


class RecordSink:
    """Where a reader puts what it read: documents into the next batch, the rest into quarantine."""

    def __init__(self, split: Split, config: InputConfig, ledger: Ledger, quarantine: Quarantine) -> None:
        self.split, self._config = split, config
        self._ledger, self._quarantine = ledger, quarantine
        self.records = 0  # read so far from this split, good or bad
        self._bytes = 0
        self._rows: list[tuple[int, str, str | None, str | None, str | None]] = []

    def add(self, record: int, text: str, fields: Mapping[str, object], *, bytes: int) -> None:
        """Take a document; `bytes` is its size as read, which decides when a batch is full."""
        config = self._config
        self.records += 1
        self._bytes += bytes
        id, url = _field_text(fields.get(config.id or "id")), _field_text(fields.get(config.url or "url"))
        metadata = None
        if config.metadata:
            kept = {name: fields[name] for name in config.metadata if name in fields}
            metadata = _field_text(kept)
        self._rows.append((record, text, id, url, metadata))

    def bad(
        self,
        record: int,
        reason: str,
        error: str,
        *,
        bytes: int,
        head: bytes = b"",
        offset: int | None = None,
    ) -> None:
        """Book one unreadable record of `bytes` bytes."""
        self.records += 1
        self._book(1, bytes, BadRecord(self.split.file, record, offset, reason, error, snippet_of(head)))

    def damaged(
        self, record: int, error: str, *, bytes: int, records: int = 1, offset: int | None = None
    ) -> None:
        """Book the unreadable rest of a file: `records` of it as far as known, at least one."""
        error = f"{error}; {self.records:,} records were read before"
        self._book(
            max(records, 1), bytes, BadRecord(self.split.file, record, offset, "damaged_file", error, "")
        )

    def _book(self, records: int, bytes: int, entry: BadRecord) -> None:
        self._ledger.read += Count(records, bytes)
        self._ledger.quarantine(entry.reason, records, bytes)
        self._quarantine.add(entry)

    @property
    def full(self) -> bool:
        """Whether a batch should be taken now."""
        return self._bytes >= BATCH_TEXT_BYTES or len(self._rows) >= BATCH_DOCUMENTS

    def take(self) -> Iterator[pa.RecordBatch]:
        """The batch gathered so far, if it holds anything."""
        if not self._rows:
            return
        records, texts, ids, urls, metadata = zip(*self._rows, strict=True)
        count = len(records)
        self._rows, self._bytes = [], 0
        text = pa.array(texts, pa.large_string())
        self._ledger.read += Count(count, int(text_offsets(text)[-1]))
        yield pa.RecordBatch.from_arrays(
            [
                pa.array(document_ids(self.split.file, records), pa.binary(16)),
                pa.array([self.split.source] * count, pa.int32()),
                pa.array([self.split.file] * count, pa.string()),
                pa.array(records, pa.int64()),
                text,
                pa.array(ids, pa.string()),
                pa.array(urls, pa.string()),
                pa.array(metadata, pa.string()),
            ],
            schema=DOCUMENT_SCHEMA,
        )


def read_split(
    split: Split,
    config: InputConfig,
    ledger: Ledger,
    quarantine: Quarantine,
    *,
    max_record_bytes: int = 1 << 26,
) -> Iterator[pa.RecordBatch]:
    """Batches of DOCUMENT_SCHEMA in record order; books `ledger.read` and `ledger.quarantined`.

    The caller books kept and dropped documents. BuildError when the file cannot be opened, or at the first
    bad record if `quarantine` allows none.
    """
    sink = RecordSink(split, config, ledger, quarantine)
    try:
        size = split.input.bytes
        if split.format == "parquet":
            from shardkit.writers.read_parquet import read_parquet

            batches = read_parquet(sink, config, max_record_bytes)
        elif split.format == "jsonl" or config.lines:
            batches = _read_lines(sink, config, size, max_record_bytes)
        else:
            batches = _read_whole(sink, size, max_record_bytes)
        yield from batches
        yield from sink.take()
    except OSError as error:
        raise BuildError(f"{split.path}: cannot be read: {error.strerror or error}") from error


def _pieces(sink: RecordSink, file: BinaryIO, size: int) -> Iterator[bytes]:
    split = sink.split
    if split.compression is None:
        return plain_range(file, split.start, split.end)
    return decompressed(file, split.compression, size)


def _read_lines(
    sink: RecordSink, config: InputConfig, size: int, max_record_bytes: int
) -> Iterator[pa.RecordBatch]:
    split = sink.split
    take = _take_json if split.format == "jsonl" else _take_text
    with open_input(split.input) as file:
        lines = Lines(_pieces(sink, file, size), offset=split.start, max_line_bytes=max_record_bytes)
        record = split.first_record
        try:
            for offset, length, line, whole in lines:
                if offset == 0 and line.startswith(_BOM):
                    line, length = line[3:], length - 3
                if not whole:
                    error = f"{length:,} bytes, more than max_record_bytes {max_record_bytes:,}"
                    sink.bad(record, "too_long", error, bytes=length, head=line, offset=offset)
                elif line and not line.isspace():
                    take(sink, config, record, offset, line)
                record += 1
                if sink.full:
                    yield from sink.take()
        except ContainerError as damage:
            yield from sink.take()
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
    text = fields.get(config.text)
    if not isinstance(text, str):
        if config.text in fields:
            problem = f"field {config.text!r} holds {_kind(text)}, not text"
        else:
            known = ", ".join(sorted(fields)[:20]) or "none"
            problem = f"no field {config.text!r}; its fields: {known}"
        sink.bad(record, "no_text", problem, bytes=len(line), head=line, offset=offset)
        return
    sink.add(record, text, fields, bytes=len(line))


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


def _read_whole(sink: RecordSink, size: int, max_record_bytes: int) -> Iterator[pa.RecordBatch]:
    """A text file as one document."""
    held: list[bytes] = []
    length = 0
    with open_input(sink.split.input) as file:
        try:
            for piece in _pieces(sink, file, size):
                length += len(piece)
                if length <= max_record_bytes:
                    held.append(piece)
        except ContainerError as damage:
            sink.damaged(0, damage.problem, bytes=length + damage.rest_bytes, offset=length)
            return
    data = b"".join(held)
    if length > max_record_bytes:
        error = f"{length:,} bytes, more than max_record_bytes {max_record_bytes:,}"
        sink.bad(0, "too_long", error, bytes=length, head=data, offset=0)
        return
    try:
        text = data.removeprefix(_BOM).decode()
    except UnicodeDecodeError as error:
        problem = f"byte {error.start:,} is not UTF-8"
        sink.bad(0, "bad_utf8", problem, bytes=length, head=data[max(error.start - 40, 0) :], offset=0)
        return
    sink.add(0, text, {}, bytes=length)
    yield from sink.take()


def _field_text(value: object) -> str | None:
    """A field of the user's as text: strings as they are, everything else as JSON."""
    if value is None or isinstance(value, str):
        return value
    return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


def _kind(value: object) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
