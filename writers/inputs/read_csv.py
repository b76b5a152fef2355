"""Reads documents from the rows of CSV and TSV files: UTF-8, quoted as in RFC 4180 or not quoted at all.

The header row decides the delimiter if the recipe does not: the usual one for the file's name, unless only
another one yields the text column. A line `sep=;` before the header, as Excel writes, is honored. Line ends
are LF, CRLF or, if the first line ends with CR alone, CR. TSV corpora are rarely quoted, and a quote at the
start of a field would swallow rows up to the next quote, so files with .tsv in their names are read without
quoting. Either choice can be wrong for a file, so the reader counts and reports lines inside quotes that look
like rows of their own, and fields that look quoted but are read unquoted.

Record numbers count rows after the header, and byte offsets point to a row's first line. A row is quarantined
alone if it has more or fewer fields than columns, bytes that are not UTF-8, or is one line with misplaced
quotes. Misplaced quotes in a later line of a row, an unclosed quote, and a row over `max_record_bytes` cost
the rest of the file, because the start of the next row would be a guess. A file is one split, because only
reading from its start shows which text is quoted.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from shardkit.writers.inputs.fields import MISSING, field_at
from shardkit.writers.inputs.files import open_input
from shardkit.writers.inputs.lines import Line, Lines
from shardkit.writers.inputs.records import RecordSink
from shardkit.writers.recipe.inputs import InputConfig

_BOM = b"\xef\xbb\xbf"
_TAB_NAMES = (".tsv",)
_DELIMITERS = "\t,;|"  # candidates for the delimiter
_SEPARATOR_LINE = re.compile(r'"?sep=(.)"?', re.IGNORECASE)
_LINE_END = re.compile(rb"\n|\r\n?")
_SAMPLE_LINE_BYTES = 1 << 20  # limit for a row that `shardkit init` looks at
_LINE_END_BYTES = 1 << 20  # if the first line is longer, lines are taken to end with LF
_LOOKS_QUOTED = re.compile(r'"(?:[^"]|"")*""(?:[^"]|"")*"')  # a quoted field with doubled quotes


class _TooLongError(Exception):
    """A row is longer than the limit for records."""


@dataclass(frozen=True)
class _Dialect:
    """The delimiter and quote of a file; without a quote, every line is a row."""

    delimiter: str
    quote: str | None

    def rows(self, lines: Iterator[str]) -> Iterator[list[str]]:
        """Yield the fields of each row; raise csv.Error for misplaced quotes."""
        if self.quote is not None:
            return csv.reader(lines, strict=True, delimiter=self.delimiter, quotechar=self.quote)
        stripped = (line.removesuffix("\n").removesuffix("\r") for line in lines)
        return (line.split(self.delimiter) if line else [] for line in stripped)


class _Source:
    """Iterates over lines for the csv module, which may take several per row; stores where the row began."""

    def __init__(self, lines: Lines, limit: int) -> None:
        self._lines: Iterator[Line] = iter(lines)
        self._limit = limit
        self.start = self.length = self.lines = 0
        self.ended = False
        self.head = b""
        self._fresh = True
        self.delimiter, self.delimiters = b"", -1  # how many of them a row on one line has: -1 is unknown
        self.are_rows = False  # whether each line of the current row has that number of delimiters

    def next_row(self) -> None:
        """Start a new row: the next line is its first."""
        self._fresh = True

    def first_line(self) -> str:
        """Return the first line that is not blank, without consuming it; "" if there is none."""
        for offset, length, line, whole in self._lines:
            if line.strip(b"\r") or not whole:
                self._lines = chain([(offset, length, line, whole)], self._lines)
                return line.removeprefix(_BOM).decode("utf-8", "surrogateescape").removesuffix("\r")
        return ""

    def skip_line(self) -> None:
        """Skip the next line."""
        next(self._lines)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self.ended = True
        offset, length, line, whole = next(self._lines)
        self.ended = False
        if self._fresh:
            self.start, self.length, self.lines, self.head, self._fresh = offset, 0, 0, line, False
            self.are_rows = self.delimiters > 0
        self.lines += 1
        self.length += length + 1
        self.are_rows = self.are_rows and line.count(self.delimiter) == self.delimiters
        if not whole or self.length - 1 > self._limit:
            raise _TooLongError
        if self.lines == 1 and line.startswith(_BOM):
            line = line[len(_BOM) :]
        return line.decode("utf-8", "surrogateescape") + "\n"


def read_csv(sink: RecordSink, config: InputConfig) -> Iterator[None]:
    """Read a CSV or TSV file: pass all of its rows to the sink."""
    split = sink.split
    csv.field_size_limit(sink.max_record_bytes)
    sink.columns = config.columns
    sink.offset = 0
    with open_input(split.input) as file:
        lines = Lines(_with_line_feeds(sink.pieces(file)), max_line_bytes=sink.max_record_bytes)
        source = _Source(lines, sink.max_record_bytes)
        doubts = _Doubts(sink, config)
        try:
            dialect = _dialect(split.file, config, source)
            source.delimiter, source.delimiters = dialect.delimiter.encode(), len(config.columns) - 1
            rows = dialect.rows(source)
            while (row := _next_row(rows, source)) is not None:
                sink.offset = source.start
                if isinstance(row, csv.Error):
                    sink.bad("bad_row", _misplaced(row), head=source.head, bytes=source.length)
                    sink.record += 1
                elif row and not sink.columns:
                    sink.columns, source.delimiters = row, len(row) - 1
                    if _unfit(sink, config, row):
                        return
                elif row:  # an empty row is a blank line
                    doubts.look(row, source, dialect)
                    _take_row(sink, config, row, source, dialect)
                    sink.record += 1
                sink.offset = lines.offset
                yield
        except (_TooLongError, csv.Error) as error:
            sink.offset = source.start
            lost = max(split.bytes - source.start, source.length)
            sink.damaged(_problem(error, source, sink), bytes=lost)
        finally:
            doubts.report()


def first_rows(name: str, pieces: Iterator[bytes], limit: int) -> list[dict[str, str]]:
    """Return at most `limit` rows of a file as {column: value}, with the dialect guessed from the file.

    `pieces` are UTF-8. Skips rows with too many or too few fields; raises csv.Error for misplaced quotes.
    """
    csv.field_size_limit(_SAMPLE_LINE_BYTES)
    source = _Source(Lines(_with_line_feeds(pieces), max_line_bytes=_SAMPLE_LINE_BYTES), _SAMPLE_LINE_BYTES)
    rows = _dialect(name, None, source).rows(source)
    names: list[str] = []
    found: list[dict[str, str]] = []
    while len(found) < limit:
        try:
            row = _next_row(rows, source)
        except _TooLongError:
            break
        if row is None:
            break
        if isinstance(row, csv.Error) or not row:
            continue
        if not names:
            names = row
        elif len(row) == len(names):
            found.append(dict(zip(names, row, strict=True)))
    return found


def _with_line_feeds(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the pieces; replace every CR by LF if the first line ends with CR alone."""
    head = b""
    for piece in pieces:
        head += piece
        found = _LINE_END.search(head)
        if (found and found.end() < len(head)) or len(head) > _LINE_END_BYTES:
            break
    found = _LINE_END.search(head)
    if found is None or found[0] != b"\r":
        yield head
        yield from pieces
    else:
        for piece in chain([head], pieces):
            yield piece.replace(b"\r", b"\n")


def _next_row(rows: Iterator[list[str]], source: _Source) -> list[str] | csv.Error | None:
    """Return the next row, the csv.Error of a bad row of one line, or None at the end."""
    source.next_row()
    try:
        return next(rows, None)
    except csv.Error as error:
        if source.lines > 1 or source.ended:
            raise
        return error


def _dialect(name: str, config: InputConfig | None, source: _Source) -> _Dialect:
    """Choose delimiter and quote by the recipe, a line `sep=;`, the header row, or the file's name.

    Without a recipe, the delimiter that divides the header row into the most columns is chosen.
    """
    is_tsv = any(part in name.lower() for part in _TAB_NAMES)
    line, delimiter = source.first_line(), config.delimiter if config else None
    if (stated := _SEPARATOR_LINE.fullmatch(line)) is not None:
        source.skip_line()
        line, delimiter = source.first_line(), delimiter or stated[1]
    names, quote = ("" if config.columns else line, config.quote) if config else (line, "auto")
    if delimiter is None:
        usual = "\t" if is_tsv else ","
        fields = {one: _fields(names, one, quote) for one in usual + _DELIMITERS}
        if config is None:
            delimiter = max(fields, key=lambda one: len(fields[one]))
        else:
            delimiter = next((one for one, found in fields.items() if config.text in found), usual)
    if quote == "auto":
        is_quoted = all(len(name) > 1 and name[0] == name[-1] == '"' for name in names.split(delimiter))
        quote = '"' if delimiter != "\t" or not is_tsv or is_quoted else None
    return _Dialect(delimiter, quote)


def _fields(line: str, delimiter: str, quote: str | None) -> list[str]:
    """Return the fields of a line divided by a candidate delimiter; [] if that is impossible."""
    if delimiter == quote:
        return []
    try:
        return next(_Dialect(delimiter, '"' if quote == "auto" else quote).rows(iter([line])), [])
    except csv.Error:
        return []


class _Doubts:
    """Counts and reports signs that the reader has chosen the wrong quote character for the file."""

    def __init__(self, sink: RecordSink, config: InputConfig) -> None:
        self._sink, self._chosen = sink, config.quote
        self._counts = {"swallowed": 0, "quoted": 0}
        self._first = {"swallowed": "", "quoted": ""}

    def look(self, row: list[str], source: _Source, dialect: _Dialect) -> None:
        """Check a row for signs of a wrong quote; count lines swallowed by its quotes as dropped."""
        if dialect.quote is None:
            if self._chosen == "auto" and b'""' in source.head:
                self._count("quoted", sum(_LOOKS_QUOTED.fullmatch(field) is not None for field in row))
        elif source.lines > 1 and source.are_rows:
            self._sink.drop_lines("csv/rows_in_quotes", source.lines - 1)
            self._count("swallowed", source.lines - 1)

    def _count(self, kind: str, number: int) -> None:
        if number and not self._counts[kind]:
            self._first[kind] = f"record {self._sink.record:,} (byte {self._sink.offset:,})"
        self._counts[kind] += number

    def report(self) -> None:
        """Pass the counts to the sink as notes about the file."""
        key = f"inputs[{self._sink.split.source}].quote"
        if count := self._counts["swallowed"]:
            self._sink.note(
                f"{count:,} lines that would be rows by themselves are inside quotes, and so are not "
                f"documents; first in {self._first['swallowed']}; if quotes are part of the text, "
                f"set {key}: null"
            )
        if count := self._counts["quoted"]:
            self._sink.note(
                f"{count:,} fields are in quotes with doubled quotes inside, but are read with all these "
                f"quotes, first in {self._first['quoted']}; if the file is quoted, set {key}: '\"'"
            )


def _unfit(sink: RecordSink, config: InputConfig, names: list[str]) -> bool:
    """Return whether the header row is unusable; if so, quarantine the whole file."""
    if len(set(names)) == len(names) and config.text in names:
        return False
    book, why = (
        (sink.damaged, "a column name occurs twice")
        if len(set(names)) < len(names)
        else (sink.no_column, f"no column {config.text!r}")
    )
    problem = f"{why}; its columns: {', '.join(names[:40])}"
    sink.offset = None  # the entry is about the whole file
    book(problem.encode("utf-8", "backslashreplace").decode(), bytes=sink.split.bytes)
    return True


def _take_row(
    sink: RecordSink, config: InputConfig, row: list[str], source: _Source, dialect: _Dialect
) -> None:
    names = sink.columns or ()
    if sink.replaces:
        row = [sink.decode(value.encode("utf-8", "surrogateescape")) for value in row]
    fields = dict(zip(names, row, strict=False))
    text = field_at(fields, config.text)
    if len(row) != len(names):
        counts = f"{len(row)} fields where there are {len(names)} columns"
        problem = "bad_row", counts + _hint(sink, source.head, len(names), dialect)
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


def _hint(sink: RecordSink, line: bytes, columns: int, dialect: _Dialect) -> str:
    """Return a hint which key of the recipe may be wrong for a row with too many or too few fields, or ""."""
    key = f"inputs[{sink.split.source}]"
    for other in _DELIMITERS:
        if columns > 1 and other != dialect.delimiter and line.count(other.encode()) == columns - 1:
            return f"; if {other!r} is between fields, set {key}.delimiter"
    if dialect.quote is None and b'"' in line:
        return f"; if fields are quoted, set {key}.quote: '\"'"
    return ""


def _misplaced(error: Exception) -> str:
    if "new-line character" in str(error):  # Python's own message only says how to open a file
        return "a carriage return in a field that is not quoted, in a file whose lines end with line feeds"
    if str(error) == "unexpected end of data":
        return "a quote is never closed"
    return f"misplaced quote: {error}"


def _problem(error: Exception, source: _Source, sink: RecordSink) -> str:
    if isinstance(error, _TooLongError):
        problem = (
            f"a row is longer than max_record_bytes {sink.max_record_bytes:,}, or a quote is never closed"
        )
    else:
        problem = f"the row that begins at byte {source.start:,} cannot be split: {_misplaced(error)}"
    return f"{problem}; if quotes are part of the text, set inputs[{sink.split.source}].quote: null"
