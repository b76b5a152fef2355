"""Stages `scores` and `score_tables`: sort the files of `scores` filters by the ids of documents.

One task per split of a file writes a run of rows (score_tables.py), keyed by a hash of the id; after the
exchange, one task per range of keys writes one part of the table. Memory is a share of the budget and does
not grow with the files. An id that has two rows with different scores ends the build.

Files are Parquet or JSON lines, also compressed, on a local disk or in a store. Only the ids are read, and
the columns that the filter names: integers, floats, booleans and null.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from shardkit.errors import BuildError
from shardkit.hashing import digest_of
from shardkit.writers.dedup.exact import partition_bounds
from shardkit.writers.dedup.tables import RowsWriter
from shardkit.writers.exchange.exchange import RunWriter, Slice, Table, exchange
from shardkit.writers.exchange.sorted_runs import Limits
from shardkit.writers.execution.digests import MemoryBytes, RecipeKey
from shardkit.writers.execution.stage import Stage, partition_name
from shardkit.writers.filters.scores import ScoresConfig
from shardkit.writers.inputs.decompress import ContainerError, decompressed, plain_range
from shardkit.writers.inputs.files import open_input
from shardkit.writers.inputs.first_bytes import compression_of
from shardkit.writers.inputs.scan import Split
from shardkit.writers.recipe.recipe import Recipe
from shardkit.writers.stages.flow import Build, Documents, Step
from shardkit.writers.stages.needs import Needs
from shardkit.writers.stages.score_tables import (
    BLOCK_ROWS,
    INDEX_FILE,
    SCORES_FILE,
    ScoreTable,
    id_keys,
    score_dtype,
)

_RUN_FILE = "scores.run"
_BATCH_ROWS = 1 << 16


def sort_scores(documents: Documents, build: Build) -> Documents:
    """Sort the files of each `scores` filter into a table, in which tasks look up documents."""
    tables, limits = [], build.limits
    for number, one in enumerate(build.inputs.scores):
        config, names = one.config, list(one.config.columns)
        table, tasks = Table(_RUN_FILE, score_dtype(len(names))), []
        for split in one.splits:
            args = split, config.key, names, build.memory_bytes, limits
            tasks.append(SCORES.task(f"{number}-{split.task_name}", split.bytes, *args))
        [commits] = build.run(tasks)
        rows = sum(SCORES.result(commit) for commit in commits)
        partitions = limits.partitions(rows, table.dtype)
        moved = exchange(build.run, SCORE_TABLES, table, commits, readers=partitions, limits=limits)
        bounds = [partition_bounds(part, partitions) for part in range(partitions)]
        tasks = []
        for part, (start, stop) in enumerate(bounds):
            piece = moved.slice(start, stop)
            name = f"{number}-{partition_name(part, partitions)}"
            tasks.append(SCORE_TABLES.task(name, piece.bytes, piece))
        [parts] = build.run(tasks)
        content = digest_of([commit.content for commit in parts])
        starts = tuple(start for start, _ in bounds)
        tables.append(ScoreTable(tuple(commit.files for commit in parts), starts, len(names), content))
    return replace(documents, scores=tables)


def write_run(
    folder: Path,
    split: Annotated[Split, RecipeKey()],
    key: str,
    columns: Sequence[str],
    memory_bytes: MemoryBytes,
    limits: Limits,
) -> int:
    """Write a sorted run with one row (id hash, scores) per record of a split; return the number of rows."""
    table, rows = Table(_RUN_FILE, score_dtype(len(columns))), 0
    read: Callable[..., Iterator[pa.Table]] = _read_parquet if split.format == "parquet" else _read_lines
    with RunWriter(folder / _RUN_FILE, table, memory_bytes=memory_bytes, limits=limits) as writer:
        try:
            for batch in read(split, [key, *columns]):
                found = np.empty(batch.num_rows, table.dtype)
                found["key"], found["low"] = id_keys(_ids(batch.column(key), split, key))
                for number, name in enumerate(columns):
                    found["values"][:, number] = _numbers(batch.column(name), split, name)
                writer.write(found)
                rows += len(found)
        except OSError as error:
            raise BuildError(f"{split.path}: cannot be read: {error.strerror or error}") from error
        except (ContainerError, pa.ArrowException) as error:
            raise BuildError(f"{split.path}: is damaged: {error}; make the file again") from error
    return rows


SCORES = Stage("scores", "read and filter", write_run)


def _read_parquet(split: Split, names: Sequence[str]) -> Iterator[pa.Table]:
    with open_input(split.input) as stored:
        file = pq.ParquetFile(stored, page_checksum_verification=True)
        if absent := [name for name in names if name not in file.schema_arrow.names]:
            known = ", ".join(file.schema_arrow.names)
            raise BuildError(f"filters: scores: {split.path}: has no column {absent[0]!r}; it has {known}")
        groups = list(range(split.start, split.end))
        for batch in file.iter_batches(_BATCH_ROWS, row_groups=groups, columns=list(names)):
            yield pa.Table.from_batches([batch])


def _read_lines(split: Split, names: Sequence[str]) -> Iterator[pa.Table]:
    records: list[Mapping[str, Any]] = []
    for number, line in enumerate(_lines(split)):
        if not line.strip():
            continue
        try:
            record = orjson.loads(line)
        except ValueError as error:
            raise BuildError(f"{split.path}: {_place(split, number)}: is not valid JSON: {error}") from None
        if not isinstance(record, dict) or record.get(names[0]) is None:
            raise BuildError(
                f"{split.path}: {_place(split, number)}: must be a JSON object with a value of {names[0]!r}"
            )
        records.append(record)
        if len(records) == _BATCH_ROWS:
            yield _table(records, split, names)
            records = []
    if records:
        yield _table(records, split, names)


def _lines(split: Split) -> Iterator[bytes]:
    with open_input(split.input) as file:
        compression = split.compression if split.start else compression_of(file, split.compression)
        pieces = (
            decompressed(file, compression, split.input.bytes)
            if compression
            else plain_range(file, split.start, split.end)
        )
        rest = b""
        for piece in pieces:
            *lines, rest = (rest + piece).split(b"\n")
            yield from lines
        if rest:
            yield rest


def _place(split: Split, number: int) -> str:
    return f"line {number:,}" + (f" after byte {split.start:,}" if split.start else "")


def _table(records: Sequence[Mapping[str, Any]], split: Split, names: Sequence[str]) -> pa.Table:
    columns = []
    for name in names:
        try:
            columns.append(pa.array([record.get(name) for record in records]))
        except pa.ArrowException as error:
            raise BuildError(f"{split.path}: {name!r} has values of several types: {error}") from None
    return pa.table(columns, names=list(names))


def _ids(column: pa.ChunkedArray, split: Split, name: str) -> pa.LargeStringArray:
    """Return ids as text: integers in decimal, bytes in hexadecimal."""
    if column.null_count:
        raise BuildError(f"filters: scores: {split.path}: {name!r} is null in {column.null_count:,} rows")
    kind = column.type
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return pa.array([one.hex() for one in column.to_pylist()], pa.large_string())
    if pa.types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_integer(kind)):
        raise BuildError(f"filters: scores: {split.path}: {name!r} is {kind}; ids must be text or integers")
    return column.cast(pa.large_string()).combine_chunks()


def _numbers(column: pa.ChunkedArray, split: Split, name: str) -> npt.NDArray[np.float64]:
    """Return scores as float64[n], with NaN for null."""
    kind = column.type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    if not (is_number or pa.types.is_boolean(kind) or pa.types.is_null(kind)):
        raise BuildError(f"filters: scores: {split.path}: {name!r} is {kind}; scores must be numbers")
    if pa.types.is_boolean(kind):
        column = column.cast(pa.uint8())
    numbers: npt.NDArray[np.float64] = pc.fill_null(column.cast(pa.float64(), safe=False), np.nan).to_numpy()
    return numbers


def write_part(folder: Path, piece: Slice) -> None:
    """Write one part of a score table. Raises BuildError if two rows of an id have different scores."""
    memory_bytes = piece.limits.read_memory_bytes
    with (
        RowsWriter(folder / SCORES_FILE, piece.table.dtype) as writer,
        RowsWriter(folder / INDEX_FILE, "<u8") as index,
    ):
        for rows, _ in piece.stream(memory_bytes):
            rows = rows[np.lexsort((rows["low"], rows["key"]))]
            again = np.append(
                False,
                (rows["key"][1:] == rows["key"][:-1]) & (rows["low"][1:] == rows["low"][:-1]),
            )
            at = np.flatnonzero(again)
            if not np.array_equal(rows["values"][at], rows["values"][at - 1], equal_nan=True):
                raise BuildError(
                    "filters: scores: an id has two rows with different scores; keep one row per document"
                )
            rows = rows[~again]
            first = -writer.rows % BLOCK_ROWS
            index.write(np.ascontiguousarray(rows["key"][first::BLOCK_ROWS]))
            writer.write(rows)


SCORE_TABLES = Stage("score_tables", "read and filter", write_part)


def needs(n: Needs) -> None:
    """Add the requests and bytes of sorting scores (one row per document and filter) and looking them up."""
    c, table = n.corpus, Table(_RUN_FILE, score_dtype(1))
    readers = c.limits.partitions(c.documents, table.dtype)
    size = c.documents * table.dtype.itemsize
    for _ in range(c.shape.scores):
        n.add(SCORES, c.splits, 0, files=1, written=size)
        runs = n.exchange(SCORE_TABLES, table, c.splits, c.documents, readers)
        n.add(SCORE_TABLES, readers, *n.slices(runs, readers), files=2, written=size)
    n.looked_up = 2 * readers * c.shape.scores


def _stages(recipe: Recipe) -> Sequence[Stage[..., Any]]:
    has_scores = any(isinstance(config, ScoresConfig) for _, config in recipe.filter_chain())
    return (SCORES, SCORE_TABLES) if has_scores else ()


STEP = Step(_stages, sort_scores, needs)
