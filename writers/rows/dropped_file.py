"""Writes the tables of dropped documents in `dropped/`; tables of `duplicates/` share parts of this code.

`shardkit.formats.dropped_table` has the formats. A split's file is written while the split is cleaned, and is
published unchanged. A row has a text if its hash is among the lowest of the split, or its value among the
nearest to the rule's bound. This is known only at the end of the split, so `Lowest` holds back the candidates
for a text. Memory does not grow with the size of a split.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from shardkit.formats.dropped_table import DROPPED_SCHEMA, TEXT_CHARACTERS
from shardkit.kernels.text_arrays import text_offsets
from shardkit.writers.rows.filtered import Dropped

DROPPED_FILE = "dropped.parquet"

ROW_GROUP_DOCUMENTS = 1 << 15

OF_DOCUMENT = ("document_id", "source", "file", "record", "id", "url")

_TEXTS_OF_RULE = 16  # rows with a text, per rule and split: 16 chosen by hash, 16 by distance to the bound


class Lowest:
    """Holds back, of all rows added so far, the `count` rows with the lowest values in a column."""

    def __init__(self, column: str, count: int) -> None:
        self._column, self._count = column, count
        self.held: pa.Table | None = None

    def exchange(self, rows: pa.Table) -> pa.Table:
        """Add `rows`. Return the rows, new or earlier, that are no longer held back: not among the lowest."""
        if self.held is None and rows.num_rows <= self._count:
            self.held = rows.combine_chunks()
            return rows.slice(0, 0)
        rows = rows if self.held is None else pa.concat_tables([self.held, rows])
        order = np.argsort(rows.column(self._column).to_numpy(), kind="stable")
        is_held = np.zeros(len(order), np.bool_)
        is_held[order[: self._count]] = True
        self.held = rows.filter(pa.array(is_held)).combine_chunks()
        return rows.filter(pa.array(~is_held))


class RemovedFile:
    """Writes a Parquet table of removed documents in row groups of equal size, whatever batches it gets."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._schema = schema
        dictionaries = [name for name in schema.names if name in ("source", "file", "rule", "reason")]
        self._file = pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=dictionaries)
        self._pending: list[pa.Table] = []
        self._rows = 0

    def write(self, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        self._pending.append(rows.select(self._schema.names).cast(self._schema))
        self._rows += rows.num_rows
        if self._rows >= ROW_GROUP_DOCUMENTS:
            whole = self._rows - self._rows % ROW_GROUP_DOCUMENTS
            table = pa.concat_tables(self._pending)
            self._file.write_table(table.slice(0, whole), row_group_size=ROW_GROUP_DOCUMENTS)
            self._pending, self._rows = [table.slice(whole)], self._rows - whole

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._rows:
            self._file.write_table(pa.concat_tables(self._pending), row_group_size=ROW_GROUP_DOCUMENTS)
        self._file.close()


class DroppedFile:
    """Writes the table of the documents that filters drop from one split."""

    def __init__(self, path: Path) -> None:
        self._file = RemovedFile(path, DROPPED_SCHEMA)
        self._samples: dict[str, tuple[Lowest, Lowest]] = {}

    def write(self, dropped: Dropped) -> None:
        """Add the documents that one rule dropped from a batch."""
        rows = _dropped_rows(dropped)
        if dropped.rule not in self._samples:
            self._samples[dropped.rule] = Lowest("hash", _TEXTS_OF_RULE), Lowest("distance", _TEXTS_OF_RULE)
        for sample in self._samples[dropped.rule]:
            rows = sample.exchange(rows)
        self._file.write(without_text(rows))

    def __enter__(self) -> Self:
        self._file.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._samples:
            samples = [sample.held for rule in sorted(self._samples) for sample in self._samples[rule]]
            self._file.write(pa.concat_tables(samples))
        self._file.__exit__(kind, error, trace)


def _dropped_rows(dropped: Dropped) -> pa.Table:
    """Return one row per dropped document: DROPPED_SCHEMA plus `hash` and `distance` (of value to bound).

    Only rows whose hash or distance may be among the lowest of the split have their text.
    """
    rows, values = pa.array(dropped.rows), dropped.values
    count = len(rows)
    numbers, labels = np.full(count, np.nan), pa.nulls(count, pa.string())
    if values is not None and values.dtype.kind in "OUS":
        labels = pa.array(values, pa.string())
    elif values is not None:
        numbers = values.astype(np.float64)
    if dropped.labels is not None:
        labels = pa.array(dropped.labels, pa.string())
    bound = np.nan if dropped.bound is None else dropped.bound
    distance = np.abs(numbers - bound)
    lowest = np.argsort(dropped.hashes)[:_TEXTS_OF_RULE]
    # Twice as many as are written: up to half of the nearest rows may be held back for their hash instead.
    nearest = np.argsort(distance, kind="stable")[: 2 * _TEXTS_OF_RULE]
    judged = {
        "rule": pa.array([dropped.rule] * count),
        "value": pa.array(numbers, from_pandas=True),
        "label": labels,
        "bound": pa.array(np.full(count, bound, np.float64), from_pandas=True),
        "text": beginnings(dropped.documents, dropped.rows[np.union1d(lowest, nearest)]).take(rows),
        "hash": pa.array(dropped.hashes),
        "distance": pa.array(distance),
    }
    columns = {name: column.take(rows) for name, column in described(dropped.documents).items()}
    return pa.table(columns | judged)


def described(documents: pa.RecordBatch) -> dict[str, pa.Array]:
    """Return the columns that identify documents in a table of removed documents, and their size `bytes`."""
    columns = {name: documents.column(name) for name in OF_DOCUMENT}
    return columns | {"bytes": pa.array(np.diff(text_offsets(documents.column("text"))))}


def beginnings(documents: pa.RecordBatch, rows: npt.NDArray[np.int64]) -> pa.Array:
    """Return string[documents]: the beginning of the text of each document in `rows`, null for all others."""
    texts = documents.column("text").take(pa.array(rows))
    short = pc.utf8_slice_codeunits(texts, 0, TEXT_CHARACTERS).cast(pa.string())
    places, wanted = np.zeros(documents.num_rows, np.int64), np.zeros(documents.num_rows, np.bool_)
    places[rows], wanted[rows] = np.arange(len(rows)), True
    return short.take(pa.array(places, mask=~wanted))


def without_text(rows: pa.Table) -> pa.Table:
    return rows.set_column(rows.schema.get_field_index("text"), "text", pa.nulls(rows.num_rows, pa.string()))
