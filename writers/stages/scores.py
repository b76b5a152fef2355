"""Stages `scores` and `score_tables`: sort the files of `scores` filters by the ids of documents.

One task per split of a file writes a run of rows, and one per range of ids a part of the table
(id_tables.py). Scores are integers, floats, booleans and null.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from shardkit.errors import BuildError
from shardkit.writers.exchange.exchange import Table
from shardkit.writers.exchange.sorted_runs import Limits
from shardkit.writers.execution.digests import MemoryBytes, RecipeKey
from shardkit.writers.execution.stage import Stage
from shardkit.writers.filters.scores import ScoresConfig
from shardkit.writers.inputs.scan import Split
from shardkit.writers.recipe.recipe import Recipe
from shardkit.writers.stages.flow import Build, Documents, Step
from shardkit.writers.stages.id_tables import make_table, row_dtype, sort_split, table_needs, write_part
from shardkit.writers.stages.needs import Needs

_KEY = "filters: scores"


def _score_table(columns: int) -> Table:
    return Table("scores.run", row_dtype("<f8", columns))


def sort_scores(documents: Documents, build: Build) -> Documents:
    """Sort the files of each `scores` filter into a table, in which tasks look up documents."""
    tables, limits = [], build.limits
    for number, one in enumerate(build.inputs.scores):
        config, names, tasks = one.config, list(one.config.columns), []
        for split in one.splits:
            args = split, config.key, names, build.memory_bytes, limits
            tasks.append(SCORES.task(f"{number}-{split.task_name}", split.bytes, *args))
        [runs] = build.run(tasks)
        rows, table = sum(SCORES.result(commit) for commit in runs), _score_table(len(names))
        of = SCORE_TABLES, table, runs, rows, _KEY, limits
        tables.append(make_table(build.run, *of, prefix=f"{number}-"))
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

    def scores(batch: pa.Table, ids: pa.LargeStringArray) -> npt.NDArray[np.float64]:
        return np.stack([_numbers(batch.column(name), split, name) for name in columns], axis=1)

    table, names = _score_table(len(columns)), [key, *columns]
    return sort_split(folder, split, table, names, scores, _KEY, memory_bytes, limits)


SCORES = Stage("scores", "read and filter", write_run)
SCORE_TABLES = Stage("score_tables", "read and filter", write_part)


def _numbers(column: pa.ChunkedArray, split: Split, name: str) -> npt.NDArray[np.float64]:
    """Return scores as float64[n], with NaN for null."""
    kind = column.type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    if not (is_number or pa.types.is_boolean(kind) or pa.types.is_null(kind)):
        raise BuildError(f"{_KEY}: {split.path}: {name!r} is {kind}; scores must be numbers")
    if pa.types.is_boolean(kind):
        column = column.cast(pa.uint8())
    numbers: npt.NDArray[np.float64] = pc.fill_null(column.cast(pa.float64(), safe=False), np.nan).to_numpy()
    return numbers


def needs(n: Needs) -> None:
    """Add the requests and bytes of sorting scores (one row per document and filter) and looking them up."""
    for _ in range(n.corpus.shape.scores):
        n.looked_up += table_needs(n, SCORES, SCORE_TABLES, _score_table(1))


def _stages(recipe: Recipe) -> Sequence[Stage[..., Any]]:
    has_scores = any(isinstance(config, ScoresConfig) for _, config in recipe.filter_chain())
    return (SCORES, SCORE_TABLES) if has_scores else ()


STEP = Step(_stages, sort_scores, needs)
