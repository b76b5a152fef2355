"""Read the Parquet tables in one folder of a dataset, local or remote, with threads that read ahead.

Threads read row groups in parallel; results are in the order of files and row groups. Only a few row groups
are in memory at a time, for tables of any size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import BinaryIO, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from shardkit.datasets.opened import OpenDataset
from shardkit.datasets.provenance.search import Selection
from shardkit.errors import ShardError
from shardkit.files import map_path
from shardkit.formats.parquet_limits import Footer, Limits
from shardkit.formats.provenance import is_provenance_name
from shardkit.storage.object_file import open_object

_THREADS = 4  # a thread uses one core or waits for a store; four threads hold about 100 MB

_UNREADABLE = (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError)

_Item = TypeVar("_Item")

_Result = TypeVar("_Result")


class ParquetFolder:
    """The Parquet tables in `folder`, sorted by name; it may be empty. Threads may share it."""

    def __init__(self, dataset: OpenDataset, folder: str, columns: pa.Schema) -> None:
        """List the tables; each must have at least these `columns`."""
        self.where = f"{dataset.location}/{folder}"
        self._dataset, self._columns = dataset, columns
        self._objects = {
            info.key: info for info in dataset.store.list(folder + "/") if is_provenance_name(info.key)
        }
        if self._objects and dataset.card is not None:
            dataset.card.check_fingerprint(dataset.fingerprint)
        self.names = sorted(self._objects)
        self._footers: dict[int, tuple[Footer, pa.Schema]] = {}
        self._lock = Lock()

    def lines(self) -> int:
        """Return the number of lines in all tables; reads all footers, several at a time."""
        return sum(footer.num_rows for footer, _ in self.run(self.footer, iter(range(len(self.names)))))

    def footer(self, number: int) -> tuple[pq.FileMetaData, pa.Schema]:
        """Return (footer, schema) of file `number`. Raises ShardError if it is damaged or lacks a column."""
        footer, schema = self._footer(number)
        return footer.metadata, schema

    def limits(self, number: int) -> Sequence[Limits]:
        """Return {column: (minimum, maximum)} per row group of a file, for columns with statistics."""
        return self._footer(number)[0].limits

    def _footer(self, number: int) -> tuple[Footer, pa.Schema]:
        with self._lock:
            found = self._footers.get(number)
        if found is None:
            try:
                with self._stored(number) as file:
                    footer = Footer(file)
                found = footer, footer.metadata.schema.to_arrow_schema()
            except (*_UNREADABLE, ValueError) as error:
                where = f"{self._dataset.location}/{self.names[number]}"
                raise ShardError(where, f"cannot be read: {error}") from error
            if (problem := _problem(found[1], self._columns)) is not None:
                raise ShardError(f"{self._dataset.location}/{self.names[number]}", problem)
            with self._lock:
                self._footers[number] = found
        return found

    def groups(self) -> Iterator[tuple[int, int]]:
        """Yield (file number, row group) of all row groups that have lines."""
        for number in range(len(self.names)):
            footer, _ = self.footer(number)
            groups = range(footer.num_row_groups)
            yield from ((number, group) for group in groups if footer.row_group(group).num_rows)

    def open(self, number: int) -> pq.ParquetFile:
        """Open a file to read its row groups."""
        return self._open(number, self.footer(number)[0])

    def search(
        self,
        selection: Selection,
        columns: Sequence[str] | None = None,
        advance: Callable[[int], None] = lambda lines: None,
    ) -> Iterator[pa.Table]:
        """Yield the selected lines of all tables in order, with `columns` (default: all).

        `advance` is called with the number of lines searched since its last call.
        """

        def select(job: tuple[int, int]) -> tuple[int, pa.Table | None]:
            number, group = job
            footer, _ = self.footer(number)
            row_group = footer.row_group(group)
            if not selection.may_be_within(self.limits(number)[group]):
                return row_group.num_rows, None
            with self.open(number) as file:
                wanted = file.read_row_group(group, columns=selection.columns, use_threads=False)
                mask = selection.match(wanted)
                if not mask.any():
                    return row_group.num_rows, None
                table = file.read_row_group(group, columns=columns and list(columns), use_threads=False)
            table = table.filter(pa.array(mask))
            table.validate(full=True)  # the Parquet reader does not check that strings are UTF-8
            return row_group.num_rows, table

        for lines, table in self.run(select, self.groups()):
            advance(lines)
            if table is not None:
                yield table

    def run(self, work: Callable[[_Item], _Result], items: Iterator[_Item]) -> Generator[_Result, None, None]:
        """Yield `work(item)` for `items` in order; threads work ahead. Close the generator to stop them."""
        waiting: deque[Future[_Result]] = deque()
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="shardkit-trace") as pool:
            try:
                for item in items:
                    waiting.append(pool.submit(work, item))
                    if len(waiting) > 2 * _THREADS:
                        yield self._answer(waiting.popleft())
                while waiting:
                    yield self._answer(waiting.popleft())
            finally:
                for future in waiting:
                    future.cancel()

    def _stored(self, number: int) -> BinaryIO:
        name = self.names[number]
        if self._dataset.shards is None:
            return (self._dataset.path / name).open("rb")
        return open_object(self._dataset.store, self._objects[name])

    def _open(self, number: int, footer: pq.FileMetaData) -> pq.ParquetFile:
        name = self.names[number]
        try:
            if self._dataset.shards is None:
                return pq.ParquetFile(pa.BufferReader(map_path(self._dataset.path / name)), metadata=footer)
            return pq.ParquetFile(self._stored(number), metadata=footer)
        except _UNREADABLE as error:
            raise ShardError(f"{self._dataset.location}/{name}", f"cannot be read: {error}") from error

    def _answer(self, future: Future[_Result]) -> _Result:
        try:
            return future.result()
        except _UNREADABLE as error:
            raise ShardError(self.where, f"cannot be read: {error}; run shardkit verify") from error


def _problem(schema: pa.Schema, expected: pa.Schema) -> str | None:
    """Return the problem if a table lacks an expected column or has another type for it; otherwise None."""
    for name in expected.names:
        if (count := schema.names.count(name)) != 1:
            return f"has no column {name!r}" if not count else f"has {count} columns named {name!r}"
    for column in expected:
        found = schema.field(column.name)
        kind = found.type.value_type if pa.types.is_dictionary(found.type) else found.type
        if kind != column.type:
            return f"column {column.name!r} is of type {found.type}, not {column.type}"
        if found.nullable and not column.nullable:
            return f"column {column.name!r} may have nulls"
    return None
