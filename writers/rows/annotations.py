"""Annotations: the values of all filter rules for every document read, next to the shards (`annotate: true`).

`annotations/part-*.parquet` have one line per document, in the order of the inputs:

    document_id, source, file, record   as in the provenance tables
    bytes      size of the text as it was read, in bytes of UTF-8
    dropped    "<filter>/<rule>" that dropped the document; null if no filter did, as for duplicates
    failed     all rules that the document fails, in order. Rules after an editor judge the edited text; if
               the editor itself drops a document, later rules may judge the text before the edit.
    passes     how many passes of filters judged the document; only if filters follow duplicate removal
    <filter>/<rule>   the value that the rule compared: numbers (int64 or double) or labels (string)

With these values, `thresholds` tries other thresholds without reading the text again. If one pass uses the
same filter twice, there is one set of columns for both uses, with the values of the second use.

Filters behind duplicate removal are further passes, which judge only what is left. Their values are null for
other documents. A filter that an earlier pass used, too, gets another name: `<filter>-2` in the second pass
that uses it, in columns, `dropped` and `failed`. Each such pass writes LEFT_FILE for the documents that it
judged (`row`, `dropped`, `failed`, values), and `join_passes` joins these with the first pass's annotations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
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

from shardkit.kernels.text_arrays import text_offsets
from shardkit.settings import ANNOTATIONS_FOLDER
from shardkit.writers.rows.filtered import Filtered
from shardkit.writers.rows.ledger import Count

ANNOTATIONS_FILE = "annotations.parquet"
LEFT_FILE = "annotations_left.parquet"  # annotations of a pass behind duplicate removal
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
_LEFT = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),  # in the file of documents that the pass read
        _FIRST.field("dropped"),
        _FIRST.field("failed"),
    ]
)
_PASSES = pa.field("passes", pa.int64(), nullable=False)
_PASS_KEY = b"pass"  # metadata of a rule's column: the number of its pass, if that is not the first one

Bounds = tuple[float | None, float | None] | Set[str]
"""The values that pass a rule: (least, greatest), both inclusive, None for no bound; or a set of labels."""


class AnnotationFile:
    """Writes the annotations of one split. All batches must have the columns of the first batch.

    With `of_left`, it writes those of a pass behind duplicate removal, whose documents have a column `row`.
    """

    def __init__(self, path: Path, *, of_left: bool = False) -> None:
        self._path = path
        self._writer: pq.ParquetWriter | None = None
        self._schema = self._first = _LEFT if of_left else _FIRST
        self._batches: list[pa.RecordBatch] = []

    def write(self, documents: pa.RecordBatch, filtered: Filtered) -> None:
        """Add the annotations of one batch: `documents` as read, and the result of the filters for them.

        Raises BuildError if a rule has values in some batches only, or values of different types.
        """
        if not documents.num_rows:
            return
        batch = _table(self._first, documents, filtered)
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
            self._writer = _open_writer(self._path, self._schema)
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


def _open_writer(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    floats = [field.name for field in schema if pa.types.is_floating(field.type)]
    others = [field.name for field in schema if field.name not in {*floats, "document_id"}]
    return pq.ParquetWriter(
        path, schema, compression="zstd", use_dictionary=others, use_byte_stream_split=floats
    )


def _table(first: pa.Schema, documents: pa.RecordBatch, filtered: Filtered) -> pa.RecordBatch:
    """Return the annotations of a batch, one row per document: the columns `first`, then those of rules."""
    values = dict(filtered.annotations)
    dropped = values.pop("dropped", np.full(documents.num_rows, None, np.object_))
    found = {
        "bytes": pa.array(np.diff(text_offsets(documents.column("text")))),
        "dropped": pa.array(dropped, pa.string()),
        "failed": _names_of(filtered.failed, documents.num_rows),
    }
    columns = [found[name] if name in found else documents.column(name) for name in first.names]
    columns += [_column(one) for one in values.values()]
    fields = [pa.field(name, column.type) for name, column in zip(values, columns[len(first) :], strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema([*first, *fields]))


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


class LaterPass:
    """Reads the annotations of one split by a pass behind duplicate removal, to join them with others.

    `source` is the pass's LEFT_FILE. `lines`, int64[n], has the line of each document in the file that the
    pass read. `like` is the LEFT_FILE of another split, which has columns for rules, if no document of this
    split reached the pass. `number` counts the passes up to this one; `names` are other names of filters.
    """

    def __init__(
        self,
        source: pa.NativeFile,
        lines: npt.NDArray[np.int64],
        *,
        number: int,
        names: Mapping[str, str],
        like: pa.NativeFile | None = None,
    ) -> None:
        file = pq.ParquetFile(source)
        self._lines = lines[file.read(columns=["row"]).column("row").to_numpy()]
        assert (np.diff(self._lines) > 0).all(), "documents are not in the order of the inputs"
        self._schema = file.schema_arrow if like is None else pq.read_schema(like)
        self._held = self._schema.empty_table()
        self._batches = file.iter_batches(ROW_GROUP_DOCUMENTS)
        self._names = names
        self.number = number
        self.fields = [
            pa.field(self._renamed(field.name), field.type, metadata={_PASS_KEY: str(number)})
            for field in self._schema
            if "/" in field.name
        ]

    def _renamed(self, rule: str) -> str:
        name, slash, rest = rule.partition("/")
        return self._names.get(name, name) + slash + rest

    def judged(self, start: int, stop: int) -> tuple[npt.NDArray[np.bool_], pa.Table]:
        """Return whether the pass judged the document of each line in [start, stop), and its annotations.

        Ranges must follow each other. The table has a row per line: `dropped`, `failed`, and the columns of
        the rules in the order of `fields`. It is null where the pass judged no document.
        """
        begin, end = np.searchsorted(self._lines, [start, stop])
        while self._held.num_rows < end - begin:
            self._held = pa.concat_tables([self._held, pa.Table.from_batches([next(self._batches)])])
        table, self._held = self._held.slice(0, end - begin), self._held.slice(end - begin)
        at, reached = np.zeros(stop - start, np.int64), np.zeros(stop - start, np.bool_)
        places = self._lines[begin:end] - start
        at[places], reached[places] = np.arange(end - begin), True
        table = table.drop_columns(["row"]).combine_chunks().take(pa.array(at, mask=~reached))
        dropped, failed = (table.column(name).combine_chunks() for name in ("dropped", "failed"))
        table = table.set_column(0, "dropped", self._other_names(dropped))
        offsets, rules = failed.offsets, self._other_names(failed.values)
        failed = pa.ListArray.from_arrays(offsets, rules, mask=pa.array(~reached))
        return reached, table.set_column(1, "failed", failed)

    def _other_names(self, rules: pa.StringArray) -> pa.StringArray:
        if not self._names:
            return rules
        coded = rules.dictionary_encode()
        names = pa.array([self._renamed(rule) for rule in coded.dictionary.to_pylist()], pa.string())
        return names.take(coded.indices)


def join_passes(
    path: Path, first: pa.NativeFile, later: Sequence[LaterPass], *, passes: int
) -> npt.NDArray[np.bool_]:
    """Write the annotations of one split by all passes; return bool[lines]: which documents none dropped.

    `first` are those of the pass over the documents as read; `passes` is 0 if it has no filters, else 1.
    """
    stays = [np.zeros(0, np.bool_)]
    with pq.ParquetFile(first) as file:
        own = [field for field in file.schema_arrow if "/" in field.name]
        fields = [*_FIRST, _PASSES, *own, *(field for one in later for field in one.fields)]
        with _open_writer(path, pa.schema(fields)) as writer:
            start = 0
            for group in range(file.num_row_groups):
                table = file.read_row_group(group)
                stop = start + table.num_rows
                joined = _joined(table, [(one, *one.judged(start, stop)) for one in later], passes)
                writer.write_table(pa.table(joined, schema=writer.schema), row_group_size=stop - start)
                stays.append(joined[_FIRST.get_field_index("dropped")].is_null().to_numpy())
                start = stop
    return np.concatenate(stays)


def _joined(
    table: pa.Table, later: Sequence[tuple[LaterPass, npt.NDArray[np.bool_], pa.Table]], passes: int
) -> list[pa.ChunkedArray]:
    """Return the columns of joined annotations: those of `_FIRST`, `_PASSES`, and all rules."""
    counts = np.full(table.num_rows, passes)
    dropped, failed = table.column("dropped"), table.column("failed")
    for one, reached, judged in later:
        counts[reached] = one.number
        # What reached a pass failed no rule of an earlier one.
        dropped = pc.coalesce(judged.column("dropped"), dropped)
        failed = pc.if_else(pa.array(reached), judged.column("failed"), failed)
    found = {"dropped": dropped, "failed": failed.cast(_FIRST.field("failed").type)}
    columns = [found.get(name, table.column(name)) for name in _FIRST.names]
    columns += [pa.chunked_array([pa.array(counts)]), *table.columns[len(_FIRST) :]]
    return columns + [column for _, _, judged in later for column in judged.columns[len(_LEFT) - 1 :]]


def annotation_values(source: pa.NativeFile) -> pa.StructArray:
    """Return a struct with the values of all rules for each kept document in `source`, a split's file."""
    table = pq.read_table(source)
    table = table.filter(pc.is_null(table.column("dropped")))
    names = [name for name in table.column_names if "/" in name]
    columns = [table.column(name).combine_chunks() for name in names]
    if not names:
        return pa.nulls(table.num_rows, pa.struct([]))
    return pa.StructArray.from_arrays(columns, names=names)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of `thresholds`: the documents read and kept by the build, and kept with the new bounds.

    If the rules with new bounds are of a later pass of filters, these are the documents that the pass read
    and kept. Bytes are sizes before any edit, because the size of a dropped document after an edit is not
    known. `failed` has, for each rule with new bounds, the count of documents that fail these bounds.
    """

    read: Count
    kept: Count
    would_keep: Count
    failed: Mapping[str, Count]


def thresholds(dataset: str | Path, bounds: Mapping[str, Bounds]) -> Outcome:
    """Compute how many documents the filters of a finished build would keep with other bounds.

    `bounds` has the new bounds of rules by "<filter>/<rule>": (least, greatest), where None means no bound,
    or a set of labels. NaN passes. Rules without an entry judge as in the build. Duplicates are not removed.

    All rules must be of one pass of filters, and other passes are not considered: which documents reach a
    pass behind duplicate removal depends on the earlier ones in a way that only a build can tell. Raises
    ShardkitError otherwise, or if the dataset, a local folder, was not built with `annotate: true`.
    """
    total = Outcome(Count(), Count(), Count(), dict.fromkeys(bounds, Count()))
    for table, later in _row_groups(Path(dataset), list(bounds)):
        passes = {name: _passes(table.column(name), limits, name) for name, limits in bounds.items()}
        would_keep = _fail_no_other(table.column("failed"), set(bounds)) | later
        for good in passes.values():
            would_keep &= good
        sizes = table.column("bytes").to_numpy()
        kept = table.column("dropped").is_null().to_numpy() | later
        total = Outcome(
            total.read + Count(len(sizes), int(sizes.sum())),
            total.kept + _count(kept, sizes),
            total.would_keep + _count(would_keep, sizes),
            {name: total.failed[name] + _count(~good, sizes) for name, good in passes.items()},
        )
    return total


def _row_groups(dataset: Path, names: list[str]) -> Iterator[tuple[pa.Table, npt.NDArray[np.bool_]]]:
    """Yield the documents that the pass with the rules `names` judged, and whether a later pass did, too."""
    paths = sorted((dataset / ANNOTATIONS_FOLDER).glob("*.parquet"))
    if not paths:
        raise ShardkitError(f"{dataset}: has no annotations; build it with `annotate: true`")
    for path in paths:
        with pq.ParquetFile(path) as file:
            columns = ["bytes", "dropped", "failed", _PASSES.name, *names]  # absent ones are not read
            for group in range(file.num_row_groups):
                number = _pass_of(names, file.schema_arrow, dataset)
                table = file.read_row_group(group, columns=columns)
                passes = np.full(table.num_rows, number)
                if _PASSES.name in table.column_names:
                    passes = table.column(_PASSES.name).to_numpy()
                    table = table.filter(pa.array(passes >= number))
                yield table, passes[passes >= number] > number


def _pass_of(names: Sequence[str], schema: pa.Schema, dataset: Path) -> int:
    """Return the number of the pass that has all of these rules. Raises ShardkitError if there is none."""
    known = [name for name in schema.names if "/" in name]
    passes: dict[int, list[str]] = {}
    for name in names:
        if name not in known:
            listed = ", ".join(known) or "none"
            raise ShardkitError(f"{dataset}: has no values of rule {name!r}; rules: {listed}")
        number = int((schema.field(name).metadata or {}).get(_PASS_KEY, b"1"))
        passes.setdefault(number, []).append(name)
    if len(passes) > 1:
        listed = "; ".join(f"pass {number}: {', '.join(of)}" for number, of in sorted(passes.items()))
        raise ShardkitError(
            f"{dataset}: rules of several passes of filters ({listed}), with duplicate removal between them: "
            "other bounds in one pass change which documents reach the next, in a way that only a build can "
            "tell; try the rules of one pass at a time"
        )
    return next(iter(passes), 1)


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
