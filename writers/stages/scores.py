"""Stages `scores` and `score_tables`: sort the files of `scores` filters by the ids of documents.

A task for each part of a file writes a run of rows (score_tables.py), keyed by a hash of the id; after the
exchange, a task for each range of keys writes one part of the table. Memory is a share of the budget, however
large the files are. An id that has two rows with other scores ends the build.

Files are Parquet or JSON lines, also compressed ones, on this machine or in a store. What is read of them is
their ids and the columns that the filter names: integers, floats, booleans and null.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from shardkit.errors import BuildError, RecipeError
from shardkit.hashing import digest_of
from shardkit.storage.store import StorageOptions
from shardkit.writers.dedup.exact import partition_bounds
from shardkit.writers.dedup.tables import RowsWriter
from shardkit.writers.exchange import RunWriter, Slice, Table, exchange
from shardkit.writers.execution.task import RunTasks, Task, partition_name
from shardkit.writers.filters.scores import ScoresConfig
from shardkit.writers.inputs.decompress import ContainerError, decompressed, plain_range
from shardkit.writers.inputs.files import open_input
from shardkit.writers.inputs.first_bytes import compression_of
from shardkit.writers.inputs.scan import Split, hash_splits, scan_inputs
from shardkit.writers.recipe import InputConfig, Recipe
from shardkit.writers.runs import Limits
from shardkit.writers.score_tables import (
    BLOCK_ROWS,
    INDEX_FILE,
    SCORES_FILE,
    ScoreTable,
    id_keys,
    score_dtype,
)
from shardkit.writers.stages.clean import split_name

__all__ = ["ScoreFiles", "find_score_files", "sort_scores"]

_RUN_FILE = "scores.run"
_BATCH_ROWS = 1 << 16


@dataclass(frozen=True)
class ScoreFiles:
    """The files of one `scores` filter, cut into parts."""

    config: ScoresConfig
    splits: Sequence[Split]

    @cached_property
    def hashes(self) -> list[str]:
        """`hash_split` of all parts, as they were when this was first asked for."""
        return hash_splits(self.splits)

    def digests(self) -> dict[str, str]:
        """xxh3-128 of each file by its path; of one in a store, of its size and version."""
        found: dict[str, list[str]] = {}
        for split, digest in zip(self.splits, self.hashes, strict=True):
            found.setdefault(split.file, []).append(digest)
        return {f"scores/{name}": digest_of(digests) for name, digests in found.items()}


def find_score_files(recipe: Recipe, storage: StorageOptions | None) -> list[ScoreFiles]:
    """Those of each `scores` filter, in the order of the recipe; RecipeError if one cannot be read."""
    found = []
    for _, config in recipe.filter_chain():
        if isinstance(config, ScoresConfig):
            inputs = tuple(InputConfig(path=path) for path in config.path)
            of_files = recipe.model_copy(update={"inputs": inputs, "limit": None})
            splits = scan_inputs(of_files, storage, key="filters: scores.path[{}]")
            for split in splits:
                if split.format not in ("parquet", "jsonl"):
                    raise RecipeError(
                        f"filters: scores.path: {split.path}: scores are read from Parquet and JSON lines"
                    )
            found.append(ScoreFiles(config, splits))
    return found


def sort_scores(
    files: Sequence[ScoreFiles], run: RunTasks, memory_bytes: int, limits: Limits
) -> list[ScoreTable]:
    """Run the stages: the table of each filter."""
    tables = []
    for number, one in enumerate(files):
        config, names = one.config, list(one.config.columns)
        table = Table(_RUN_FILE, score_dtype(len(names)))
        tasks = []
        for split in one.splits:
            settings = {"key": config.key, "columns": names, "range": [split.start, split.end]}
            inputs: dict[str, Any] = {"file": [split.input.bytes, split.input.version]}
            args = split, config.key, names, memory_bytes, limits
            name = f"{number}-{split_name(split)}"
            tasks.append(Task("scores", name, settings, _write_run, args, split.bytes, inputs))
        [commits] = run(tasks)
        rows = sum(commit.counts["rows"] for commit in commits)
        partitions = limits.partitions(rows, table.dtype)
        exchanged = exchange(run, "scores", table, commits, readers=partitions, limits=limits)
        bounds = [partition_bounds(part, partitions) for part in range(partitions)]
        tasks = []
        for part, (start, stop) in enumerate(bounds):
            piece = exchanged.slice(start, stop)
            name, inputs = f"{number}-{partition_name(part, partitions)}", {"rows": piece.digest}
            tasks.append(Task("score_tables", name, {}, _write_part, (piece,), piece.bytes, inputs))
        [parts] = run(tasks)
        content = digest_of([commit.content for commit in parts])
        starts = tuple(start for start, _ in bounds)
        tables.append(ScoreTable(tuple(commit.files for commit in parts), starts, len(names), content))
    return tables


def _write_run(
    folder: Path, split: Split, key: str, columns: Sequence[str], memory_bytes: int, limits: Limits
) -> dict[str, int]:
    """Write the rows of a part of a file, sorted."""
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
            raise BuildError(f"{split.path}: is damaged: {error}; write it again") from error
    return {"rows": rows}


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
            raise BuildError(f"{split.path}: {_place(split, number)}: not JSON: {error}") from None
        if not isinstance(record, dict) or record.get(names[0]) is None:
            raise BuildError(f"{split.path}: {_place(split, number)}: an object without {names[0]!r}")
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
            raise BuildError(f"{split.path}: {name!r} has values of several kinds: {error}") from None
    return pa.table(columns, names=list(names))


def _ids(column: pa.ChunkedArray, split: Split, name: str) -> pa.LargeStringArray:
    """Ids as text: integers in decimal, bytes in hexadecimal digits."""
    if column.null_count:
        raise BuildError(f"filters: scores: {split.path}: {name!r} is null in {column.null_count:,} rows")
    kind = column.type
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return pa.array([one.hex() for one in column.to_pylist()], pa.large_string())
    if pa.types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_integer(kind)):
        raise BuildError(f"filters: scores: {split.path}: {name!r} is {kind}; ids are text or integers")
    return column.cast(pa.large_string()).combine_chunks()


def _numbers(column: pa.ChunkedArray, split: Split, name: str) -> npt.NDArray[np.float64]:
    """float64[n]; NaN for null."""
    kind = column.type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    if not (is_number or pa.types.is_boolean(kind) or pa.types.is_null(kind)):
        raise BuildError(f"filters: scores: {split.path}: {name!r} is {kind}; scores are numbers")
    if pa.types.is_boolean(kind):
        column = column.cast(pa.uint8())
    numbers: npt.NDArray[np.float64] = pc.fill_null(column.cast(pa.float64(), safe=False), np.nan).to_numpy()
    return numbers


def _write_part(folder: Path, piece: Slice) -> dict[str, int]:
    """Write one part of a table; BuildError for an id with two rows of other scores."""
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
                    "filters: scores: an id has two rows with other scores; keep one row for each document"
                )
            rows = rows[~again]
            first = -writer.rows % BLOCK_ROWS
            index.write(np.ascontiguousarray(rows["key"][first::BLOCK_ROWS]))
            writer.write(rows)
        return {"rows": writer.rows}
