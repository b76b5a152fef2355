"""For documents that a step rewrites: the former row of each, and how many documents it represents."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from shardkit.writers.dedup.outcomes import OUTCOME, SplitTable
from shardkit.writers.dedup.tables import RowsWriter
from shardkit.writers.execution.commit import Commit

ROWS_FILE = "rows.npy"
_OUTCOMES_FILE = "outcomes.bin"


class RewrittenRows:
    """Writes two files about the remaining documents.

    rows.npy has the former row of each one; outcomes.bin has the new row and the copy count of each one that
    also represents removed duplicates.
    """

    def __init__(self, folder: Path) -> None:
        self._rows = RowsWriter(folder / ROWS_FILE, np.int64)
        self._outcomes = (folder / _OUTCOMES_FILE).open("wb")

    def write(self, rows: npt.NDArray[np.int64], copies: npt.NDArray[np.integer]) -> None:
        """Append documents: the former row of each, and how many documents it represents, itself included."""
        several = np.flatnonzero(copies > 1)
        outcomes = np.zeros(len(several), OUTCOME)
        outcomes["row"], outcomes["copies"] = self._rows.rows + several, copies[several]
        self._outcomes.write(outcomes.data if len(several) else b"")
        self._rows.write(rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._rows, self._outcomes:
            pass


def left_of(commit: Commit) -> SplitTable:
    """Return a handle to the outcomes.bin that a task of a rewriting step wrote for its split."""
    output = commit.outputs[_OUTCOMES_FILE]
    return SplitTable(commit.file(_OUTCOMES_FILE), 0, output.bytes // OUTCOME.itemsize, output.xxh3_128)
