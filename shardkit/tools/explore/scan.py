"""Reads lines of a table from a given place: as many as a page shows, within a bounded time.

A `Place` identifies a line by file, row group and number. Links contain it, so that the next page starts
where the last one ended, for tables of any size. A `Wanted` defines which lines match: the columns that it
tests are read first, and row groups whose statistics rule out a match are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from shardkit.datasets.provenance.folder import ParquetFolder
from shardkit.errors import ShardkitError

SCAN_SECONDS = 1.0  # time limit of a scan; a page then shows the lines found so far

Line = dict[str, object]
"""A line of a table: {column: value}, and the line's `Place` under the key `at`."""


@dataclass(frozen=True, order=True, slots=True)
class Place:
    """The place of a line in a folder of tables: number of the file, row group in it, line in the group."""

    file: int = 0
    group: int = 0
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}.{self.group}.{self.line}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text that `str` returns; raises ShardkitError if it is invalid."""
        parts = text.split(".")
        if len(parts) != 3 or not all(part.isdecimal() and len(part) < 10 for part in parts):
            raise ShardkitError(f"{text[:80]!r} is not a place such as 0.2.17: use the links on the pages")
        return cls(*map(int, parts))


class Wanted(Protocol):
    """The interface of conditions on lines; `shardkit.datasets.provenance.search.Selection` implements it."""

    @property
    def columns(self) -> Sequence[str]: ...
    def match(self, table: pa.Table) -> npt.NDArray[np.bool_]: ...
    def may_be_within(self, limits: Mapping[str, tuple[Any, Any]]) -> bool: ...


@dataclass(frozen=True, slots=True)
class Equal:
    """Matches lines in which all columns have the given values."""

    values: Mapping[str, object]

    @property
    def columns(self) -> Sequence[str]:
        return list(self.values)

    def match(self, table: pa.Table) -> npt.NDArray[np.bool_]:
        mask = np.ones(table.num_rows, np.bool_)
        for name, value in self.values.items():
            mask &= _is(table, name, value)
        return mask

    def may_be_within(self, limits: Mapping[str, tuple[Any, Any]]) -> bool:
        return all(_may_be(limits, name, value) for name, value in self.values.items())


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Matches lines in which at least one column has the given value."""

    values: Mapping[str, object]

    @property
    def columns(self) -> Sequence[str]:
        return list(self.values)

    def match(self, table: pa.Table) -> npt.NDArray[np.bool_]:
        mask = np.zeros(table.num_rows, np.bool_)
        for name, value in self.values.items():
            mask |= _is(table, name, value)
        return mask

    def may_be_within(self, limits: Mapping[str, tuple[Any, Any]]) -> bool:
        return any(_may_be(limits, name, value) for name, value in self.values.items())


@dataclass(frozen=True, slots=True)
class Found:
    """The lines found, the `next` place to examine (None: end of the table), and how many were examined."""

    lines: list[Line]
    next: Place | None
    lines_read: int


def scan(
    folder: ParquetFolder,
    wanted: Wanted,
    *,
    columns: Sequence[str] | None = None,
    start: Place | None = None,
    limit: int = 25,
    seconds: float = SCAN_SECONDS,
) -> Found:
    """Return the first `limit` lines from `start` that match `wanted`, with the given columns (default: all).

    The scan stops after `seconds`, but examines at least one row group.
    """
    start = start or Place()
    end = monotonic() + seconds
    lines: list[Line] = []
    lines_read = 0
    with closing(folder.run(lambda job: _matching(folder, *job, wanted), _groups(folder, start))) as groups:
        for file, group, rows, numbers in groups:
            if (file, group) == (start.file, start.group):
                numbers = numbers[numbers >= start.line]
            shown = numbers[: limit - len(lines)]
            lines += _read(folder, Place(file, group), shown, columns)
            if len(shown) < len(numbers):
                return Found(lines, Place(file, group, int(numbers[len(shown)])), lines_read)
            lines_read += rows
            if monotonic() > end or len(lines) == limit:
                return Found(lines, Place(file, group + 1), lines_read)
    return Found(lines, None, lines_read)


def read_line(folder: ParquetFolder, place: Place) -> Line:
    """Return the table's line at a place; raises ShardkitError if the table has no such place."""
    if place.file < len(folder.names):
        footer, _ = folder.footer(place.file)
        if place.group < footer.num_row_groups and place.line < footer.row_group(place.group).num_rows:
            return _read(folder, place, np.array([place.line]), None)[0]
    raise ShardkitError(f"{folder.where}: has no line {place}")


def read_lines(
    folder: ParquetFolder, places: Sequence[Place], columns: Sequence[str] | None = None
) -> list[Line]:
    """Return the table's lines at places, in their order; each row group is read once, several at a time."""
    groups: dict[tuple[int, int], list[int]] = {}
    for place in places:
        groups.setdefault((place.file, place.group), []).append(place.line)

    def read(job: tuple[int, int]) -> list[Line]:
        return _read(folder, Place(*job), np.array(groups[job], np.int64), columns)

    with closing(folder.run(read, iter(groups))) as found:
        lines = {line["at"]: line for some in found for line in some}
    return [lines[place] for place in places]


def _groups(folder: ParquetFolder, start: Place) -> Iterator[tuple[int, int]]:
    """Yield (file, row group) of nonempty row groups, in order; each footer is read only when reached."""
    for file in range(start.file, len(folder.names)):
        footer, _ = folder.footer(file)
        for group in range(start.group if file == start.file else 0, footer.num_row_groups):
            if footer.row_group(group).num_rows:
                yield file, group


def _matching(
    folder: ParquetFolder, file: int, group: int, wanted: Wanted
) -> tuple[int, int, int, npt.NDArray[np.int64]]:
    """Return (file, row group, number of lines in it, int64 numbers of the lines that match `wanted`)."""
    footer, _ = folder.footer(file)
    rows = footer.row_group(group).num_rows
    if not wanted.may_be_within(folder.limits(file)[group]):
        return file, group, rows, np.empty(0, np.int64)
    with folder.open(file) as opened:
        table = opened.read_row_group(group, columns=list(wanted.columns), use_threads=False)
    return file, group, rows, np.flatnonzero(wanted.match(table))


def _read(
    folder: ParquetFolder, place: Place, lines: npt.NDArray[np.int64], columns: Sequence[str] | None
) -> list[Line]:
    if not len(lines):
        return []
    with folder.open(place.file) as opened:
        table = opened.read_row_group(place.group, columns=columns and list(columns), use_threads=False)
    table = table.take(pa.array(lines))
    table.validate(full=True)  # the Parquet reader does not check that strings are valid UTF-8
    numbered = zip(lines.tolist(), table.to_pylist(), strict=True)
    return [line | {"at": Place(place.file, place.group, number)} for number, line in numbered]


def _is(table: pa.Table, name: str, value: object) -> npt.NDArray[np.bool_]:
    found = pc.fill_null(pc.equal(table.column(name), pa.scalar(value, table.column(name).type)), False)
    mask: npt.NDArray[np.bool_] = found.to_numpy()
    return mask


def _may_be(limits: Mapping[str, tuple[Any, Any]], name: str, value: object) -> bool:
    if name not in limits:
        return True
    low, high = limits[name]
    return bool(low <= value <= high)
