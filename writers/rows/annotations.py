"""Annotations: the values of all filter rules for every document read, next to the shards (`annotate: true`).

`annotations/part-*.parquet` have one line per document, in the order of the inputs:

    document_id, source, file, record   as in the provenance tables
    bytes      size of the text as it was read, in bytes of UTF-8
    dropped    "<filter>/<rule>" that dropped the document, null if it was kept
    failed     all rules that the document fails, in order. Rules after an editor judge the edited text; if
               the editor itself drops a document, later rules may judge the text before the edit.
    <filter>/<rule>   the value that the rule compared: numbers (int64 or double) or labels (string)

With these values, `thresholds` tries other thresholds without reading the text again. If a recipe uses the
same filter twice, there is one set of columns for both uses, with the values of the second use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from shardkit.errors import BuildError, ShardkitError, naming_extras

with naming_extras("shardkit.writers.rows.annotations"):
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

from shardkit.settings import ANNOTATIONS_FOLDER
from shardkit.writers.kernels.text_arrays import text_offsets
from shardkit.writers.rows.filtered import Filtered
from shardkit.writers.rows.ledger import Count

ANNOTATIONS_FILE = "annotations.parquet"
ROW_GROUP_DOCUMENTS = 1 << 15  # documents per row group; with 50 rules, a group takes about 15 MB of memory
_FIRST = pa.schema(
    [
        pa.field("document_id", pa.binary(16), nullable=False),
        pa.field("source", pa.int32(), nullable=False),
        pa.field("file", pa.string(), nullable=False),
        pa.field("record", pa.int64(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
        pa.field("dropped", pa.string()),
        pa.field("failed", pa.list_(pa.string()), nullable=False),
    ]
)
_OF_DOCUMENT = ("document_id", "source", "file", "record")

Bounds = tuple[float | None, float | None] | Set[str]
"""The values that pass a rule: (least, greatest), both inclusive, None for no bound; or a set of labels."""


class AnnotationFile:
    """Writes the annotations of one split. All batches must have the columns of the first batch."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: pq.ParquetWriter | None = None
        self._schema = _FIRST
        self._batches: list[pa.RecordBatch] = []

    def write(self, documents: pa.RecordBatch, filtered: Filtered) -> None:
        """Add the annotations of one batch: `documents` as read, and the result of the filters for them.

        Raises BuildError if a rule has values in some batches only, or values of different types.
        """
        if not documents.num_rows:
            return
        batch = _table(documents, filtered)
        if not self._batches and self._writer is None:
            self._schema = batch.schema
        if batch.schema != self._schema:
            kinds = [{f"{field.name}: {field.type}" for field in one} for one in (batch.schema, self._schema)]
            odd = ", ".join(sorted(kinds[0] ^ kinds[1]))
            raise BuildError(
                f"annotations: {odd}: differs between batches; a rule must give values of one type for every "
                f"batch, or for none"
            )
        self._batches.append(batch)
        if sum(one.num_rows for one in self._batches) >= ROW_GROUP_DOCUMENTS:
            self._flush()

    def _flush(self) -> None:
        if self._writer is None:
            floats = [field.name for field in self._schema if pa.types.is_floating(field.type)]
            others = [field.name for field in self._schema if field.name not in {*floats, "document_id"}]
            self._writer = pq.ParquetWriter(
                self._path,
                self._schema,
                compression="zstd",
                use_dictionary=others,
                use_byte_stream_split=floats,
            )
        rows = sum(batch.num_rows for batch in self._batches)
        if rows:
            self._writer.write_table(pa.Table.from_batches(self._batches), row_group_size=rows)
        self._batches = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the remaining rows. If the split has no documents, its file has no columns for the rules."""
        if kind is None:
            self._flush()
        if self._writer is not None:
            self._writer.close()


def _table(documents: pa.RecordBatch, filtered: Filtered) -> pa.RecordBatch:
    """Return the annotations of a batch, one row per document."""
    values = dict(filtered.annotations)
    dropped = values.pop("dropped", np.full(documents.num_rows, None, np.object_))
    columns = [documents.column(name) for name in _OF_DOCUMENT]
    columns.append(pa.array(np.diff(text_offsets(documents.column("text")))))
    columns += [pa.array(dropped, pa.string()), _names_of(filtered.failed, documents.num_rows)]
    columns += [_column(one) for one in values.values()]
    fields = [
        pa.field(name, column.type) for name, column in zip(values, columns[len(_FIRST) :], strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema([*_FIRST, *fields]))


def _names_of(failed: Mapping[str, npt.NDArray[np.bool_]], rows: int) -> pa.ListArray:
    """Return list<string>[rows]: for each document, the rules it fails. `failed` has bool[rows] per rule."""
    flags = np.array(list(failed.values()), np.bool_).reshape(len(failed), rows).T
    offsets = np.concatenate([[0], np.cumsum(flags.sum(axis=1))])
    names = pa.array(list(failed), pa.string()).take(pa.array(np.nonzero(flags)[1]))
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), names)


def _column(values: npt.NDArray[Any]) -> pa.Array:
    if values.dtype.kind in "OUS":
        return pa.array(values, pa.string())
    return pa.array(values, pa.float64() if values.dtype.kind == "f" else pa.int64(), safe=False)


def annotation_values(source: pa.NativeFile) -> pa.StructArray:
    """Return a struct with the values of all rules for each kept document in `source`, a split's file."""
    table = pq.read_table(source)
    table = table.filter(pc.is_null(table.column("dropped")))
    names = table.column_names[len(_FIRST) :]
    columns = [table.column(name).combine_chunks() for name in names]
    if not names:
        return pa.nulls(table.num_rows, pa.struct([]))
    return pa.StructArray.from_arrays(columns, names=names)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of `thresholds`: the documents read and kept by the build, and kept with the new bounds.

    Bytes are sizes before any edit, because the size of a dropped document after an edit is not known.
    `failed` has, for each rule with new bounds, the count of documents that fail these bounds.
    """

    read: Count
    kept: Count
    would_keep: Count
    failed: Mapping[str, Count]


def thresholds(dataset: str | Path, bounds: Mapping[str, Bounds]) -> Outcome:
    """Compute how many documents the filters of a finished build would keep with other bounds.

    `bounds` has the new bounds of rules by "<filter>/<rule>": (least, greatest), where None means no bound,
    or a set of labels. NaN passes. Rules without an entry judge as in the build. Duplicates are not removed.
    Raises ShardkitError if the dataset, a local folder, was not built with `annotate: true`.
    """
    total = Outcome(Count(), Count(), Count(), dict.fromkeys(bounds, Count()))
    for table in _row_groups(Path(dataset), list(bounds)):
        passes = {name: _passes(table.column(name), limits, name) for name, limits in bounds.items()}
        would_keep = _fail_no_other(table.column("failed"), set(bounds))
        for good in passes.values():
            would_keep &= good
        sizes = table.column("bytes").to_numpy()
        kept = table.column("dropped").is_null().to_numpy()
        total = Outcome(
            total.read + Count(len(sizes), int(sizes.sum())),
            total.kept + _count(kept, sizes),
            total.would_keep + _count(would_keep, sizes),
            {name: total.failed[name] + _count(~good, sizes) for name, good in passes.items()},
        )
    return total


def _row_groups(dataset: Path, names: list[str]) -> Iterator[pa.Table]:
    paths = sorted((dataset / ANNOTATIONS_FOLDER).glob("*.parquet"))
    if not paths:
        raise ShardkitError(f"{dataset}: has no annotations; build it with `annotate: true`")
    for path in paths:
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                known = file.schema_arrow.names[len(_FIRST) :]
                for name in names:
                    if name not in known:
                        listed = ", ".join(known) or "none"
                        raise ShardkitError(f"{dataset}: has no values of rule {name!r}; rules: {listed}")
                yield file.read_row_group(group, columns=["bytes", "dropped", "failed", *names])


def _passes(values: pa.ChunkedArray, bounds: Bounds, name: str) -> npt.NDArray[np.bool_]:
    """Return bool[n]: whether each value is within `bounds`; ShardkitError if they have the wrong type."""
    labels = pa.types.is_string(values.type)
    if labels != isinstance(bounds, Set):
        expected = "a set of labels" if labels else "(least, greatest)"
        raise ShardkitError(f"{name}: has values of type {values.type}; give {expected} as its bounds")
    if isinstance(bounds, Set):
        found: npt.NDArray[np.bool_] = pc.is_in(values, pa.array(sorted(bounds), pa.string())).to_numpy()
        return found
    numbers = values.to_numpy()
    good = np.ones(len(numbers), np.bool_)
    least, greatest = bounds
    if least is not None:
        good &= ~(numbers < least)
    if greatest is not None:
        good &= ~(numbers > greatest)
    return good


def _fail_no_other(failed: pa.ChunkedArray, named: set[str]) -> npt.NDArray[np.bool_]:
    """Return bool[n]: whether each document, given the rules it failed, passes all rules except `named`."""
    good = np.ones(len(failed), np.bool_)
    start = 0
    for chunk in failed.chunks:
        others = ~pc.is_in(chunk.flatten(), pa.array(sorted(named), pa.string())).to_numpy(
            zero_copy_only=False
        )
        good[start + pc.list_parent_indices(chunk).to_numpy()[others]] = False
        start += len(chunk)
    return good


def _count(chosen: npt.NDArray[np.bool_], sizes: npt.NDArray[np.int64]) -> Count:
    return Count(int(chosen.sum()), int(sizes[chosen].sum()))
