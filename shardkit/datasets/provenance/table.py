"""Look up pieces in the provenance tables of a dataset, local or remote: by row, or by document.

`provenance/*.parquet` have one line per piece (the tokens of one document in one row), sorted by (shard, row,
token_start) within and across files (`shardkit.writers.stages.provenance` writes them). Therefore:

    rows -> pieces      only row groups that may have these rows, by the footers' statistics, are read; the
                        file of a shard is found by binary search
    documents -> rows   all files are scanned, first the columns of the search criteria; files and row groups
                        that cannot have one of the documents are skipped

Row groups have 65,536 lines, and only a few are in memory at a time, for tables of any size (folder.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from shardkit.datasets.opened import IN_PLACE, OpenDataset
from shardkit.datasets.provenance.folder import ParquetFolder
from shardkit.datasets.provenance.search import Selection
from shardkit.errors import ShardError, ShardkitError
from shardkit.formats.provenance import (
    PROVENANCE_FOLDER,
    PROVENANCE_SCHEMA,
    HashRange,
)

_SCHEMA = pa.schema([("sample_id", pa.int64()), *((field.name, field.type) for field in PROVENANCE_SCHEMA)])

COLUMNS = tuple(PROVENANCE_SCHEMA.names)
"""Columns of the stored tables."""

_PLACE = ["shard", "row"]

_Ints = npt.NDArray[np.int64]


class NoProvenanceError(ShardkitError):
    """The dataset has no provenance tables."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [token_start, token_end) of row `sample_id`, and the document from which they come.

    `document_start` is the number of the document's tokens before the piece, `copies` is 1 + the number of
    its removed duplicates, and `source` is the index of its input in the recipe.
    """

    sample_id: int
    shard: int
    row: int
    token_start: int
    token_end: int
    document_id: bytes
    document_start: int
    copies: int
    source: int
    file: str
    record: int
    id: str | None
    url: str | None
    metadata: str | None


@dataclass(frozen=True, slots=True)
class _Part:
    """Facts from one file's footer; `groups` and the two arrays have an entry per row group with lines."""

    footer: pq.FileMetaData
    hashes: HashRange | None
    groups: tuple[int, ...]
    first_rows: _Ints
    last_rows: _Ints


class ProvenanceTable:
    """The provenance tables of a dataset. Raises NoProvenanceError if it has none. Threads may share it."""

    def __init__(self, dataset: OpenDataset) -> None:
        self._dataset = dataset
        self._starts = dataset.manifest.shard_starts
        if dataset.manifest.format in IN_PLACE:  # tables are of others
            raise NoProvenanceError(
                f"{dataset.location}: has no provenance tables for rows that are read in place; open "
                "the folder that shardkit built, without sequence_length"
            )
        self._folder = ParquetFolder(dataset, PROVENANCE_FOLDER, PROVENANCE_SCHEMA)
        if not self._folder.names:
            raise NoProvenanceError(
                f"{dataset.location}: has no provenance tables, so documents are not known: only datasets "
                f"built by shardkit have {PROVENANCE_FOLDER}/*.parquet in their folder"
            )
        self._parts: dict[int, _Part] = {}
        self._lock = Lock()

    def lines(self) -> int:
        """Return the number of pieces in all tables; reads all footers."""
        parts = self._folder.run(self._part, iter(range(len(self._folder.names))))
        return sum(part.footer.num_rows for part in parts)

    def of_rows(self, sample_ids: npt.ArrayLike, columns: Sequence[str] = COLUMNS) -> pa.Table:
        """Return the pieces of rows, given as numbers in dataset order, sorted by (row, token).

        The table has `sample_id` and `columns`, and is held in memory. Raises IndexError for a missing row.
        """
        rows = np.unique(np.asarray(sample_ids, dtype=np.int64))
        if len(rows) and not 0 <= rows[0] <= rows[-1] < self._starts[-1]:
            raise IndexError(f"rows are 0 to {self._starts[-1] - 1:,}, not {rows[0]:,} to {rows[-1]:,}")
        found = self._folder.run(lambda job: self._lines_of(*job, rows, columns), self._groups_with(rows))
        empty = _SCHEMA.empty_table().select(["sample_id", *columns])
        return pa.concat_tables([empty, *(table for table in found if table.num_rows)])

    def search(
        self, selection: Selection, advance: Callable[[int], None] = lambda lines: None
    ) -> Iterator[pa.Table]:
        """Yield tables of the selected pieces in row order; their first column is `sample_id`.

        `advance` is called with the number of lines searched since its last call.
        """
        self.lines()  # reads all footers, several at a time
        jobs = (
            (number, group)
            for number in range(len(self._folder.names))
            if selection.may_be_in(self._part(number).hashes)
            for group in self._part(number).groups
        )
        for lines, table in self._folder.run(lambda job: self._selected(*job, selection), jobs):
            advance(lines)
            if table.num_rows:
                yield table

    def _groups_with(self, rows: _Ints) -> Iterator[tuple[int, int]]:
        """Yield (file number, row group) of all row groups that may have pieces of these sorted rows."""
        at = 0
        while at < len(rows):
            end = at + 1
            for number in range(self._file_of(int(rows[at])), len(self._folder.names)):
                part = self._part(number)
                firsts = np.searchsorted(rows, part.first_rows, side="left")
                lasts = np.searchsorted(rows, part.last_rows, side="right")
                yield from ((number, part.groups[each]) for each in np.flatnonzero(firsts < lasts))
                if len(part.groups):
                    end = max(end, int(lasts[-1]))
                    break
            at = end

    def _file_of(self, row: int) -> int:
        """Return the number of the first file that may have pieces of a row, by binary search."""
        low, high = 0, len(self._folder.names) - 1
        while low < high:
            middle = (low + high) // 2
            known = next((n for n in range(middle, high) if len(self._part(n).groups)), None)
            if known is not None and self._part(known).last_rows[-1] < row:
                low = known + 1
            else:
                high = middle
        return low

    def _part(self, number: int) -> _Part:
        with self._lock:
            part = self._parts.get(number)
        if part is None:
            part = self._read_footer(number)
            with self._lock:
                self._parts[number] = part
        return part

    def _read_footer(self, number: int) -> _Part:
        name = self._folder.names[number]
        footer, schema = self._folder.footer(number)
        groups = [group for group in range(footer.num_row_groups) if footer.row_group(group).num_rows]
        limits = [self._folder.limits(number)[group] for group in groups]
        last = len(self._starts) - 2
        firsts, lasts = [], []
        for each in limits:
            (low, high), (first, end) = each.get("shard", (0, last)), each.get("row", (0, 0))
            if not 0 <= low <= high <= last:
                problem = f"has shard {high}, the dataset {last + 1} shards: it belongs to another dataset"
                raise ShardError(f"{self._dataset.location}/{name}", problem)
            alone = low == high and "row" in each
            firsts.append(int(self._starts[low]) + (first if alone else 0))
            lasts.append(int(self._starts[low]) + end if alone else int(self._starts[high + 1]) - 1)
        rows = (np.array(firsts, np.int64), np.array(lasts, np.int64))
        return _Part(footer, HashRange.from_metadata(schema.metadata or {}), tuple(groups), *rows)

    def _lines_of(self, number: int, group: int, rows: _Ints, columns: Sequence[str]) -> pa.Table:
        """Return the pieces of the sorted `rows` that are in row group `group` of file `number`."""
        with self._folder.open(number) as file:
            places = file.read_row_group(group, columns=_PLACE, use_threads=False)
            ids = self._sample_ids(places)
            at = np.searchsorted(rows, ids).clip(max=len(rows) - 1)
            return _with_columns(file, group, columns, ids, rows[at] == ids)

    def _selected(self, number: int, group: int, selection: Selection) -> tuple[int, pa.Table]:
        """Return (number of lines in a row group, table of its selected lines)."""
        part = self._part(number)
        rows = part.footer.row_group(group).num_rows
        if not selection.may_be_within(self._folder.limits(number)[group]):
            return rows, _SCHEMA.empty_table()
        with self._folder.open(number) as file:
            columns = selection.columns
            mask = np.ones(rows, np.bool_)
            if columns:
                mask = selection.match(file.read_row_group(group, columns=columns, use_threads=False))
            if not mask.any():
                return rows, _SCHEMA.empty_table()
            ids = self._sample_ids(file.read_row_group(group, columns=_PLACE, use_threads=False))
            return rows, _with_columns(file, group, COLUMNS, ids, mask)

    def _sample_ids(self, places: pa.Table) -> _Ints:
        shards, rows = (places.column(name).to_numpy().astype(np.int64) for name in _PLACE)
        known = (shards >= 0) & (shards < len(self._starts) - 1) & (rows >= 0)
        if known.all():
            ids: _Ints = self._starts[shards] + rows
            if (ids < self._starts[shards + 1]).all():
                return ids
        problem = "a table has a row that its shard does not have: it is damaged or from another dataset"
        raise ShardError(self._folder.where, problem)


def pieces_of(table: pa.Table) -> list[Piece]:
    """Convert the lines of a table from `ProvenanceTable` to pieces."""
    return [Piece(**line) for line in table.to_pylist()]


def _with_columns(
    file: pq.ParquetFile, group: int, columns: Sequence[str], ids: _Ints, mask: npt.NDArray[np.bool_]
) -> pa.Table:
    """Return the lines of a row group that `mask` selects: `sample_id`, taken from `ids`, and `columns`."""
    schema = pa.schema([_SCHEMA.field(name) for name in ("sample_id", *columns)])
    if not mask.any():
        return schema.empty_table()
    table = file.read_row_group(group, columns=list(columns), use_threads=False).filter(pa.array(mask))
    lines = table.select(columns).add_column(0, "sample_id", pa.array(ids[mask])).cast(schema)
    lines.validate(full=True)  # the Parquet reader does not check that strings are UTF-8
    return lines
