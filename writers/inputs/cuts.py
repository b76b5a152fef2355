"""Finds where large files are cut into splits: at line ends, and between the row groups of Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, BinaryIO

import zstandard

from shardkit.errors import BuildError
from shardkit.files import load_json
from shardkit.writers.inputs.files import (
    InputFile,
    open_input,
)
from shardkit.writers.inputs.first_bytes import HEAD_BYTES, look

_CUTS_FORMAT = 1


_READ_BYTES = 1 << 20


_NEWLINE_BYTES = 1 << 16  # size of a read that searches for a newline; most lines are shorter


UNCOUNTED = -1  # value of `Split.first_record` until tasks have counted the records (stages/record_counts.py)


Cut = tuple[int, int, int, int]
"""The position of a split in its file: (start, end, number of first record, stored bytes); see `Split`."""


class KeptCuts:
    """A cache, kept in the work folder, of the cuts of files that must be read to find their cuts."""

    def __init__(self, data: bytes | None = None) -> None:
        """Load the result of `to_bytes`; if `data` cannot be read, start without any cuts."""
        self._files: dict[str, list[Any]] = {}
        self.changed = False
        if data is not None:
            with suppress(ValueError, TypeError, KeyError, zstandard.ZstdError):
                found = load_json(zstandard.ZstdDecompressor().decompress(data))
                self._files = dict(found["files"]) if found["format"] == _CUTS_FORMAT else {}

    def get(self, file: InputFile, split_bytes: int) -> list[Cut] | None:
        """Return the cached cuts of this version of a file for `split_bytes`, or None."""
        match self._files.get(file.path):
            case [file.bytes, file.version, int(size), list(cuts)] if size == split_bytes:
                return [tuple(cut) for cut in cuts]
        return None

    def put(self, file: InputFile, split_bytes: int, cuts: Sequence[Cut]) -> None:
        """Add the cuts of a file for `split_bytes` to the cache."""
        self._files[file.path] = [file.bytes, file.version, split_bytes, [list(cut) for cut in cuts]]
        self.changed = True

    def to_bytes(self) -> bytes:
        """Return all cuts as compressed JSON."""
        text = json.dumps({"format": _CUTS_FORMAT, "files": self._files}, sort_keys=True)
        return zstandard.ZstdCompressor(write_checksum=True).compress(text.encode())


def read_cuts(file: InputFile, format: str, split_bytes: int) -> list[Cut]:
    """Read a file to find its cuts."""
    if format != "parquet" and not _has_lines(file, format):
        return [(0, file.bytes, 0, file.bytes)]
    line_cuts = _remote_line_cuts if file.is_remote else _line_cuts
    return list((_parquet_cuts if format == "parquet" else line_cuts)(file, split_bytes))


def _has_lines(input: InputFile, format: str) -> bool:
    """Return whether the file begins as plain UTF-8 with one record per line, as its format requires."""
    try:
        with open_input(input) as file:
            return look(file.read(HEAD_BYTES)).has_lines(format)
    except OSError as error:
        raise BuildError(f"{input.path}: cannot be read: {error.strerror or error}") from error


def unreadable_cut(file: InputFile) -> Cut:
    """Return the only cut of a Parquet file whose footer is unreadable; its reader quarantines the damage."""
    return 0, 0, 0, file.bytes


def _line_cuts(input: InputFile, split_bytes: int) -> Iterator[Cut]:
    """Yield cuts, each up to the first newline that makes it `split_bytes` or longer; count the lines."""
    size = input.bytes
    start = first_record = lines = at = 0
    aim = split_bytes
    with open_input(input) as file:
        while piece := file.read(min(_READ_BYTES, size - at)):
            done = 0
            while at + len(piece) >= aim:
                newline = piece.find(b"\n", max(aim - 1 - at, done))
                if newline < 0:
                    aim = at + len(piece) + 1  # the line continues: search the next piece
                    break
                lines += piece.count(b"\n", done, newline + 1)
                done = newline + 1
                end = at + done
                if end < size:
                    yield start, end, first_record, end - start
                    start, first_record = end, lines
                aim = end + split_bytes
            lines += piece.count(b"\n", done)
            at += len(piece)
    yield start, size, first_record, size - start


def _remote_line_cuts(input: InputFile, split_bytes: int) -> Iterator[Cut]:
    """Yield the cuts of `_line_cuts`, but with one small read per cut and without counting records."""
    size, start = input.bytes, 0
    try:
        with open_input(input) as file:
            while (end := _line_end(file, start + split_bytes - 1, size)) < size:
                yield start, end, UNCOUNTED if start else 0, end - start
                start = end
    except OSError as error:
        raise BuildError(f"{input.path}: cannot be read: {error.strerror or error}") from error
    yield start, size, UNCOUNTED if start else 0, size - start


def _line_end(file: BinaryIO, at: int, size: int) -> int:
    """Return the end of the line that contains byte `at`, after its newline; `size` if it has no newline."""
    if at < size:
        file.seek(at)
        while piece := file.read(_NEWLINE_BYTES):
            if (newline := piece.find(b"\n")) >= 0:
                return at + newline + 1
            at += len(piece)
    return size


def _parquet_cuts(input: InputFile, split_bytes: int) -> Iterator[Cut]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_input(input) as file:
            metadata = pq.read_metadata(file)
    except (pa.ArrowException, OSError, ValueError) as error:
        if getattr(error, "errno", None) is not None:
            raise BuildError(f"{input.path}: cannot be read: {getattr(error, 'strerror', error)}") from error
        yield unreadable_cut(input)
        return
    # Stored bytes are divided in proportion to decoded bytes. The stored sizes of columns are not read,
    # because inconsistent metadata would crash the process there (formats.parquet_limits).
    sizes = [max(metadata.row_group(group).total_byte_size, 0) for group in range(metadata.num_row_groups)]
    start = first_record = rows = held = done = stored = 0
    for group, size in enumerate(sizes):
        rows += metadata.row_group(group).num_rows
        held, done = held + size, done + size
        if held >= split_bytes and group + 1 < len(sizes):
            upto = input.bytes * done // max(sum(sizes), 1)
            yield start, group + 1, first_record, upto - stored
            start, first_record, held, stored = group + 1, rows, 0, upto
    yield start, len(sizes), first_record, input.bytes - stored
