"""Stages `semantic_vectors` and `semantic_tables`: sort files of vectors by the ids of documents.

One task per split of a file writes a run of rows, and one per range of ids a part of the table
(id_tables.py), in which the tasks of stage `semantic_embed` look up the vectors of their documents. A vector
is a list of numbers of any type, all of one length. It is scaled to length 1 and stored as float16 as soon as
it is read, as those of other origins are. A null is no vector, nor are zeros, which have no direction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from shardkit.errors import BuildError
from shardkit.writers.dedup.config import EmbedConfig
from shardkit.writers.dedup.semantic import TITLE
from shardkit.writers.exchange.exchange import Table
from shardkit.writers.exchange.sorted_runs import Limits
from shardkit.writers.execution.digests import MemoryBytes, RecipeKey
from shardkit.writers.execution.stage import RunTasks, Stage
from shardkit.writers.inputs.scan import Split
from shardkit.writers.kernels.token_means import squares
from shardkit.writers.stages.id_tables import (
    IdTable,
    make_table,
    read_rows,
    row_dtype,
    sort_split,
    write_part,
)

MOST_DIMENSIONS = 8192

KEY = "dedup.semantic.embed"

Lookup = Callable[[Sequence[str | bytes | None]], npt.NDArray[np.float16]]
"""Returns the vectors of documents by their ids, float16[n, dimensions]: of length 1, or zeros, or NaN."""


def joined_table(dimensions: int) -> Table:
    """Return the table of vectors by the ids of documents."""
    return Table("joined.run", row_dtype("<f2", dimensions), packed=1)


@dataclass(frozen=True, slots=True)
class JoinedVectors:
    """The vectors of documents by id. `table` is None in the trial run before a build, which reads none."""

    table: IdTable | None
    dimensions: int

    def open(self) -> Lookup:
        """Return the lookup; without a table, it gives each id a vector of its own."""
        return self._drawn if self.table is None else self.table.open()

    def _drawn(self, ids: Sequence[str | bytes | None]) -> npt.NDArray[np.float16]:
        shape = len(ids), self.dimensions
        drawn = np.random.default_rng(xxhash.xxh3_64_intdigest(repr(ids).encode()))
        return unit_vectors(drawn.standard_normal(shape, np.float32))


def sort_vectors(
    run: RunTasks,
    splits: Sequence[Split],
    embed: EmbedConfig,
    dimensions: int,
    memory_bytes: int,
    limits: Limits,
) -> JoinedVectors:
    """Sort files of vectors into a table; there are no `splits` in a trial run."""
    if not splits:
        return JoinedVectors(None, dimensions)
    tasks = []
    for split in splits:
        args = split, embed.key, embed.column, dimensions, memory_bytes, limits
        tasks.append(VECTORS.task(split.task_name, split.bytes, *args))
    [runs] = run(tasks)
    rows = sum(VECTORS.result(commit) for commit in runs)
    table = make_table(run, VECTOR_TABLES, joined_table(dimensions), runs, rows, KEY, limits)
    return JoinedVectors(table, dimensions)


def write_vectors(
    folder: Path,
    split: Annotated[Split, RecipeKey()],
    key: Annotated[str, RecipeKey("dedup.semantic.embed.key")],
    column: Annotated[str, RecipeKey("dedup.semantic.embed.column")],
    dimensions: int,
    memory_bytes: MemoryBytes,
    limits: Limits,
) -> int:
    """Write a sorted run with one row (id hash, vector) per record of a split; return the number of rows."""

    def vectors(batch: pa.Table, ids: pa.LargeStringArray) -> npt.NDArray[np.float16]:
        return unit_vectors(_Lists.of(batch, split, column).matrix(ids, dimensions))

    table, names = joined_table(dimensions), [key, column]
    return sort_split(folder, split, table, names, vectors, KEY, memory_bytes, limits)


VECTORS = Stage("semantic_vectors", TITLE, write_vectors, cost=5)
VECTOR_TABLES = Stage("semantic_tables", TITLE, write_part, cost=2)


def dimensions_of(splits: Sequence[Split], embed: EmbedConfig) -> int:
    """Return the number of values of the first vector in the files.

    Raises BuildError if files cannot be read or have no vector, or if it has too few or too many values.
    """
    for split in splits:
        for lengths in _lengths(split, embed):
            if len(some := lengths[lengths >= 0]):
                if not 0 < some[0] <= MOST_DIMENSIONS:
                    raise BuildError(
                        f"{KEY}: {split.path}: {embed.column!r} has lists of {some[0]:,} values; vectors "
                        f"have 1 to {MOST_DIMENSIONS:,}"
                    )
                return int(some[0])
    raise BuildError(f"{KEY}.vectors: no row of {embed.origin} has a vector in {embed.column!r}")


def _lengths(split: Split, embed: EmbedConfig) -> Iterator[npt.NDArray[np.int64]]:
    for batch in read_rows(split, [embed.key, embed.column], KEY, MOST_DIMENSIONS):
        yield _Lists.of(batch, split, embed.column).lengths


@dataclass(frozen=True)
class _Lists:
    """A column of lists: the `lengths`, int64[n], -1 for null, and the values of all lists in order."""

    split: Split
    column: str
    lengths: npt.NDArray[np.int64]
    values: pa.Array

    @classmethod
    def of(cls, batch: pa.Table, split: Split, column: str) -> _Lists:
        """Return a column of a batch. Raises BuildError if it does not hold lists of numbers."""
        lists = batch.column(column).combine_chunks()
        while isinstance(lists, pa.ExtensionArray):  # such as a tensor of a fixed shape
            lists = lists.storage
        kind = lists.type
        if pa.types.is_null(kind):
            return cls(split, column, np.full(len(lists), -1), pa.array([], pa.float32()))
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        of = kind.value_type if is_list else None
        if of is None or not (pa.types.is_floating(of) or pa.types.is_integer(of) or pa.types.is_null(of)):
            raise BuildError(
                f"{KEY}: {split.path}: {column!r} is {kind}; vectors must be lists of numbers; set `column` "
                "to the column that has them"
            )
        lengths = pc.fill_null(pc.list_value_length(lists).cast(pa.int64()), -1).to_numpy()
        return cls(split, column, lengths, lists.flatten())

    def matrix(self, ids: pa.LargeStringArray, dimensions: int) -> npt.NDArray[np.float32]:
        """Return the lists as vectors, float32[n, dimensions], with zeros for null.

        Raises BuildError for a list of another length, and for a value that is not a finite number.
        """
        some = self.lengths >= 0
        if (wrong := some & (self.lengths != dimensions)).any():
            row = int(wrong.argmax())
            problem = f"has {self.lengths[row]:,} dimensions, others have {dimensions:,}"
            raise self._wrong(ids, row, f"{problem}; all vectors must have the same number")
        found = np.zeros((len(some), dimensions), np.float32)
        if self.values.null_count:
            empty = int(self.values.is_null().to_numpy(zero_copy_only=False).argmax())
            raise self._wrong(ids, int(np.flatnonzero(some)[empty // dimensions]), "has a null value")
        with np.errstate(over="ignore"):  # refused below
            numbers = self.values.to_numpy(zero_copy_only=False).astype(np.float32)
        found[some] = numbers.reshape(-1, dimensions)
        if (bad := ~np.isfinite(found).all(axis=1)).any():
            row = int(bad.argmax())
            value = found[row][~np.isfinite(found[row])][0]
            raise self._wrong(ids, row, f"has the value {value}; vectors must be finite numbers")
        return found

    def _wrong(self, ids: pa.LargeStringArray, row: int, problem: str) -> BuildError:
        where = f"{KEY}: {self.split.path}: {self.column!r}"
        name = ids.cast(pa.large_binary())[row].as_py().decode(errors="replace")  # Arrow does not check UTF-8
        return BuildError(f"{where}: the vector of id {name!r} {problem}")


def unit_vectors(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
    """Return the vectors scaled to length 1, float16[n, dimensions]; zeros stay zeros."""
    lengths = np.sqrt(squares(vectors))
    units: Any = vectors / np.where(lengths == 0, 1, lengths)[:, None]
    return np.asarray(units, np.float16)
