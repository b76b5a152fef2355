"""A split's documents without repeated lines: step 3 of line dedup, a task a split.

The folder receives
    documents.arrow  DOCUMENT_SCHEMA, in the same order, without the documents that exact dedup removed (later
                     stages have none to leave out) and those with nothing but white space left
    rows.npy         int64[n]: the row that each document had before
    winners.npy      WINNER_DTYPE: documents that exact duplicates lost to, with their new rows; split is 0
The ledger: read = kept + dropped["exact_duplicate"] + dropped["duplicate_lines"], where the latter counts all
bytes that were cut and the documents that nothing was left of. Memory is one batch of documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.writers.dedup.array_file import Rows, RowsWriter
from shardkit.writers.dedup.config import LinesDedupConfig
from shardkit.writers.dedup.exact import LOSER_DTYPE, WINNER_DTYPE
from shardkit.writers.dedup.lines_keys import LINE_LOSER, LINE_LOSERS_FILE
from shardkit.writers.dedup.lines_units import cut_units
from shardkit.writers.dedup.split_rows import SplitRows, piece_of_split
from shardkit.writers.documents import DOCUMENT_SCHEMA, text_offsets
from shardkit.writers.execution.work_files import open_arrow
from shardkit.writers.ledger import Count, Ledger

__all__ = ["ROWS_FILE", "WINNERS_FILE", "cut_lines"]

ROWS_FILE = "rows.npy"
WINNERS_FILE = "winners.npy"
_DOCUMENTS_FILE = "documents.arrow"


def cut_lines(
    documents: Path,
    config: LinesDedupConfig,
    folder: Path,
    *,
    split: int,
    keys_folder: Path,
    line_losers: Sequence[Path],
    exact_losers: Sequence[Path] = (),
    exact_winners: Sequence[Path] = (),
) -> dict[str, Any]:
    """Write the three files.

    `keys_folder` is the split's own of step 1, `line_losers` the files of all partitions of step 2;
    `exact_losers` and `exact_winners` are tables of LOSER_DTYPE and WINNER_DTYPE sorted by (split, row). In
    all tables but that in `keys_folder` this split's number is `split`. Counts: "ledger", "lines_cut",
    "documents_cut" (those that lost some line).
    """

    def of_split(paths: Sequence[Path], dtype: np.dtype[Any]) -> list[tuple[Rows, int, int]]:
        return [piece_of_split(Rows(path, dtype), split) for path in paths]

    own = Rows(keys_folder / LINE_LOSERS_FILE, LINE_LOSER)
    cuts = SplitRows(LINE_LOSER, [(own, 0, len(own)), *of_split(line_losers, LINE_LOSER)], then=["unit"])
    lost = SplitRows(LOSER_DTYPE, of_split(exact_losers, LOSER_DTYPE))
    winners = SplitRows(WINNER_DTYPE, of_split(exact_winners, WINNER_DTYPE))
    ledger = Ledger()
    lines = changed = start = 0
    with _Writer(folder) as writer, open_arrow(documents) as file:
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            end = start + batch.num_rows
            mine = cuts.before(end)
            cut_rows = mine["row"] - start
            kept = np.ones(batch.num_rows, np.bool_)
            kept[lost.before(end)["row"] - start] = False
            batch, kept = _cut_batch(batch, cut_rows, mine["unit"], kept, config, ledger)
            writer.write(batch, np.flatnonzero(kept) + start, winners.before(end))
            lines += len(mine)
            changed += len(np.unique(cut_rows))
            start = end
    ledger.check(str(folder))
    return {"ledger": ledger.to_dict(), "lines_cut": lines, "documents_cut": changed}


def _cut_batch(
    batch: pa.RecordBatch,
    rows: npt.NDArray[np.int64],
    units: npt.NDArray[np.uint32],
    kept: npt.NDArray[np.bool_],
    config: LinesDedupConfig,
    ledger: Ledger,
) -> tuple[pa.RecordBatch, npt.NDArray[np.bool_]]:
    """(What is left of a batch, which documents those are) without units[i] of document rows[i]; booked."""
    sizes = np.diff(text_offsets(batch.column("text")))
    ledger.read += Count(batch.num_rows, int(sizes.sum()))
    if not kept.all():
        ledger.drop("exact_duplicate", int((~kept).sum()), int(sizes[~kept].sum()))
    if len(rows):
        texts, blank = cut_units(batch.column("text"), rows, units, config)
        assert kept[rows].all(), "no line of an exact duplicate was compared"
        kept = kept & ~blank
        left = np.where(kept, np.diff(text_offsets(texts)), 0)
        before = int(sizes[kept | blank].sum())
        ledger.drop("duplicate_lines", int(blank.sum()), before - int(left.sum()))
        columns = [texts if name == "text" else batch.column(name) for name in DOCUMENT_SCHEMA.names]
        batch = pa.RecordBatch.from_arrays(columns, schema=DOCUMENT_SCHEMA)
    if not kept.all():
        batch = batch.filter(pa.array(kept))
    ledger.kept += Count(batch.num_rows, int(np.diff(text_offsets(batch.column("text"))).sum()))
    return batch, kept


class _Writer:
    """The three files."""

    def __init__(self, folder: Path) -> None:
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        self._documents = pa.ipc.new_file(folder / _DOCUMENTS_FILE, DOCUMENT_SCHEMA, options=options)
        self._rows = RowsWriter(folder / ROWS_FILE, np.int64)
        self._winners = RowsWriter(folder / WINNERS_FILE, WINNER_DTYPE)

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        with self._documents, self._rows, self._winners:
            pass

    def write(
        self, batch: pa.RecordBatch, rows: npt.NDArray[np.int64], winners: npt.NDArray[np.void]
    ) -> None:
        """Append documents with the rows that they had; `winners` have rows as before."""
        first = self._rows.rows
        winners = winners[np.isin(winners["row"], rows)]
        winners["row"] = first + np.searchsorted(rows, winners["row"])
        winners["split"] = 0
        self._winners.write(winners)
        self._rows.write(rows)
        if batch.num_rows:
            self._documents.write_batch(batch)
