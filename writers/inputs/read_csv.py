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

from shardkit.writers.inputs.fields import MISSING, field_at
from shardkit.writers.inputs.files import open_input
from shardkit.writers.inputs.records import Lines, RecordSink
from shardkit.writers.recipe import InputConfig

__all__ = ["read_csv"]

_BOM = b"\xef\xbb\xbf"
_TAB_NAMES = (".tsv",)


class _TooLongError(Exception):
    """A row is longer than a record may be."""


class _Source:
    """Lines for the csv module, which takes as many as a row has; knows where the row began."""

    def __init__(self, lines: Lines, limit: int) -> None:
        self._lines, self._limit = iter(lines), limit
        self.start = self.length = self.lines = 0
        self.ended = False
        self.head = b""
        self._fresh = True

    def next_row(self) -> None:
        """The next line begins a row."""
        self._fresh = True

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
        if self.lines == 1 and line.startswith(_BOM):
            line = line[len(_BOM) :]
        return line.decode("utf-8", "surrogateescape") + "\n"


def read_csv(sink: RecordSink, config: InputConfig) -> Iterator[None]:
    """Hand the rows of a whole file to the sink."""
    split = sink.split
    csv.field_size_limit(sink.max_record_bytes)
    sink.columns = config.columns
    sink.offset = 0
    with open_input(split.input) as file:
        lines = Lines(sink.pieces(file), max_line_bytes=sink.max_record_bytes)
        source = _Source(lines, sink.max_record_bytes)
        rows = csv.reader(source, strict=True, delimiter=_delimiter(split.file, config))
        try:
            while (row := _next_row(rows, source)) is not None:
                sink.offset = source.start
                if isinstance(row, csv.Error):
                    problem = f"misplaced quote or carriage return: {row}"
                    sink.bad("bad_row", problem, head=source.head, bytes=source.length)
                    sink.record += 1
                elif row and not sink.columns:
                    sink.columns = row
                    if _unfit(sink, config, row):
                        return
                elif row:  # else a blank line
                    _take_row(sink, config, row, source)
                    sink.record += 1
                sink.offset = lines.offset
                yield
        except (_TooLongError, csv.Error) as error:
            sink.offset = source.start
            lost = max(split.bytes - source.start, source.length)
            sink.damaged(_problem(error, source, sink), bytes=lost)


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
    sink.offset = None  # it is about the whole file
    book(problem.encode("utf-8", "backslashreplace").decode(), bytes=sink.split.bytes)
    return True


def _take_row(sink: RecordSink, config: InputConfig, row: list[str], source: _Source) -> None:
    names = sink.columns or ()
    if sink.replaces:
        row = [sink.decode(value.encode("utf-8", "surrogateescape")) for value in row]
    fields = dict(zip(names, row, strict=False))
    text = field_at(fields, config.text)
    if len(row) != len(names):
        problem = "bad_row", f"{len(row)} fields where there are {len(names)} columns"
    elif not all(map(_is_unicode, row)):
        problem = "bad_utf8", f"the row is not {sink.charset}"
    elif text is MISSING:
        problem = "no_text", f"no field {config.text!r}"
    else:
        sink.add(text, fields, bytes=source.length)
        return
    sink.bad(*problem, head=source.head, bytes=source.length)


def _is_unicode(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # bytes that are not UTF-8 were decoded to surrogates
        return False
    return True


def _problem(error: Exception, source: _Source, sink: RecordSink) -> str:
    if isinstance(error, _TooLongError):
        return f"a row over max_record_bytes {sink.max_record_bytes:,}, or a quote that nothing closes"
    return f"the row that begins at byte {source.start:,} cannot be taken apart: {error}"
