"""Rows of CSV and TSV files as documents: UTF-8, quoted as in RFC 4180, newlines inside quotes included.

Record numbers count rows after the row of names, byte offsets point to a row's first line. A row with more
or fewer fields than there are columns, of one line with misplaced quotes, or with bytes that are not UTF-8
costs itself only. Misplaced quotes in a later line of a row, a quote that nothing closes and a row over
`max_record_bytes` cost the rest of the file: where the next row begins would be a guess. A file is one split,
because only reading from its start shows what is quoted.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import TypedDict

import pyarrow as pa

from shardkit.writers.inputs.decompress import ContainerError
from shardkit.writers.inputs.fields import MISSING, field_at
from shardkit.writers.inputs.files import open_input
from shardkit.writers.inputs.records import Lines, RecordSink
from shardkit.writers.recipe import InputConfig

__all__ = ["read_csv"]

_BOM = b"\xef\xbb\xbf"
_TAB_NAMES = (".tsv",)


class _Place(TypedDict):
    bytes: int
    head: bytes
    offset: int


class _TooLongError(Exception):
    """A row is longer than a record may be."""


class _Source:
    """Lines for the csv module, which takes as many as a row has; records where the row began."""

    def __init__(self, lines: Lines, limit: int) -> None:
        self._lines, self._limit = iter(lines), limit
        self.start = self.length = self.lines = 0
        self.ended = False
        self.head = b""
        self._fresh = True

    def next_row(self) -> None:
        """The next line begins a row."""
        self._fresh = True

    @property
    def place(self) -> _Place:
        """Where the row is, as the sink wants it."""
        return {"bytes": self.length, "head": self.head, "offset": self.start}

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self.ended = True
        offset, length, line, whole = next(self._lines)
        self.ended = False
        if self._fresh:
            self.start, self.length, self.lines, self.head, self._fresh = offset, 0, 0, line, False
        self.lines += 1
        self.length += length + 1
        if not whole or self.length - 1 > self._limit:
            raise _TooLongError
        if offset == 0 and line.startswith(_BOM):
            line = line[len(_BOM) :]
        return line.decode("utf-8", "surrogateescape") + "\n"


def read_csv(sink: RecordSink, config: InputConfig) -> Iterator[pa.RecordBatch]:
    """Batches of the documents of a whole file."""
    split = sink.split
    csv.field_size_limit(sink.max_record_bytes)
    names = sink.columns = list(config.columns)
    record = 0
    with open_input(split.input) as file:
        lines = Lines(sink.pieces(file), max_line_bytes=sink.max_record_bytes)
        source = _Source(lines, sink.max_record_bytes)
        rows = csv.reader(source, strict=True, delimiter=_delimiter(split.file, config))
        try:
            while True:
                row = _next_row(rows, source)
                if row is None:
                    return
                if isinstance(row, list) and not row:  # a blank line
                    continue
                if isinstance(row, csv.Error):
                    problem = f"misplaced quote or carriage return: {row}"
                    sink.bad(record, "bad_row", problem, **source.place)
                elif not names:
                    names = sink.columns = row
                    if _unfit(sink, config, names):
                        return
                    continue
                else:
                    _take_row(sink, config, names, row, record, source)
                record += 1
                if sink.full:
                    yield from sink.flush()
        except ContainerError as damage:
            yield from sink.flush()
            lost = lines.unfinished_bytes + damage.rest_bytes
            sink.damaged(record, damage.problem, bytes=lost, offset=source.start)
        except (_TooLongError, csv.Error) as error:
            yield from sink.flush()
            lost = max(split.bytes - source.start, source.length)
            sink.damaged(record, _problem(error, source, sink), bytes=lost, offset=source.start)


def _next_row(rows: Iterator[list[str]], source: _Source) -> list[str] | csv.Error | None:
    """A row, what is wrong with a row of one line, or None at the end."""
    source.next_row()
    try:
        return next(rows, None)
    except csv.Error as error:
        if source.lines > 1 or source.ended:
            raise
        return error


def _delimiter(name: str, config: InputConfig) -> str:
    if config.delimiter is not None:
        return config.delimiter
    return "\t" if any(part in name.lower() for part in _TAB_NAMES) else ","


def _unfit(sink: RecordSink, config: InputConfig, names: list[str]) -> bool:
    """Whether the file has no usable row of names; books it whole."""
    if len(set(names)) == len(names) and config.text in names:
        return False
    book, why = (
        (sink.damaged, "a name twice")
        if len(set(names)) < len(names)
        else (sink.no_column, f"no column {config.text!r}")
    )
    problem = f"{why}; its columns: {', '.join(names[:40])}"
    book(0, problem.encode("utf-8", "backslashreplace").decode(), bytes=sink.split.bytes)
    return True


def _take_row(
    sink: RecordSink, config: InputConfig, names: list[str], row: list[str], record: int, source: _Source
) -> None:
    if len(row) != len(names):
        sink.bad(record, "bad_row", f"{len(row)} fields where there are {len(names)} columns", **source.place)
        return
    try:
        for value in row:
            value.encode()
    except UnicodeEncodeError:
        sink.bad(record, "bad_utf8", "the row is not UTF-8", **source.place)
        return
    fields = dict(zip(names, row, strict=True))
    text = field_at(fields, config.text)
    if text is MISSING:
        sink.bad(record, "no_text", f"no field {config.text!r}", **source.place)
        return
    sink.add(record, text, fields, bytes=source.length)


def _problem(error: Exception, source: _Source, sink: RecordSink) -> str:
    if isinstance(error, _TooLongError):
        return f"a row over max_record_bytes {sink.max_record_bytes:,}, or a quote that nothing closes"
    return f"the row that begins at byte {source.start:,} cannot be taken apart: {error}"
