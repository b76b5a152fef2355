"""Stage `text`: writes the kept documents as Parquet or JSON lines, in the order of the inputs.

A task takes neighboring splits with about `shard_bytes` of text and writes one or more files of at most that
size (a longer document makes a longer file). The earlier commits determine its splits, and so every byte.
Each document is one row (TEXT_SCHEMA): its text after the filters, its origin, how many documents it
represents, its language if a filter determined one, and with `annotate` the value of every rule.

`document_id` determines a document's position in the training order. A build that reads these files with
`document_id: document_id` makes the same rows of tokens as a build from the raw inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from shardkit.formats.compression import new_compressor, parse_compression
from shardkit.hashing import hash_file
from shardkit.kernels.text_arrays import text_offsets
from shardkit.manifest import Column, FileInfo, ShardInfo
from shardkit.writers.dedup.duplicates import TwinsFile
from shardkit.writers.dedup.outcomes import SplitRemovals
from shardkit.writers.dedup.population import LanguageLabels, RowFiles, in_rows
from shardkit.writers.exchange.sorted_runs import Limits
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.digests import MemoryBytes, RecipeKey
from shardkit.writers.execution.progress import PULSE
from shardkit.writers.execution.stage import Stage, Task
from shardkit.writers.recipe.outputs import OutputConfig
from shardkit.writers.recipe.recipe import Recipe
from shardkit.writers.rows.annotations import annotation_values
from shardkit.writers.rows.ledger import Count, Ledger
from shardkit.writers.stages.flow import Build, Documents, Step
from shardkit.writers.stages.labels import Labels, marked_batches
from shardkit.writers.stages.needs import DOCUMENTS, Needs
from shardkit.writers.stages.selection import Selection, remaining

TEXT_SCHEMA = pa.schema(
    [
        pa.field("text", pa.large_string(), nullable=False),
        pa.field("id", pa.string()),
        pa.field("url", pa.string()),
        pa.field("source", pa.string(), nullable=False),  # the label of the input
        pa.field("file", pa.string(), nullable=False),
        pa.field("record", pa.int64(), nullable=False),
        pa.field("document_id", pa.string(), nullable=False),  # 32 hexadecimal digits
        pa.field("copies", pa.int32(), nullable=False),  # documents it represents, itself included
        pa.field("metadata", pa.string()),  # a JSON object as text; in JSON lines a nested object
    ]
)
ROW_GROUP_BYTES = 32 << 20  # maximum size of the texts in a row group
ROW_GROUP_DOCUMENTS = 8192
_ZSTD_LEVEL = 3
_SUFFIXES = {"zstd": "zst", "gz": "gz"}
_PIECE_BYTES = 1 << 20
_TYPES = {"string": "str", "large_string": "str", "double": "float64"}


@dataclass(slots=True)
class Written:
    """The result of a task: the ledger of each of its splits, and its files by their names in the folder."""

    ledgers: list[Ledger]
    shards: list[ShardInfo]


@dataclass(frozen=True, slots=True)
class SplitText:
    """The documents of one split with their labels and annotations, as an argument of a task.

    `languages` has an entry for each document in the file `documents`. `annotations` has an entry for each
    document that filters kept; `rows` map rows of `documents` to these entries.
    """

    documents: Artifact
    removed: SplitRemovals
    source: str
    languages: LanguageLabels | None
    annotations: Artifact | None
    rows: RowFiles
    labels: Labels


def write_texts(documents: Documents, build: Build) -> Documents:
    """Run stage `text` for each dataset of text."""
    outputs = []
    for one in documents.outputs:
        if one.recipe.output.is_text:
            [texts] = build.run(_tasks(one.recipe, documents.of_part(one.recipe.part), build.limits))
            one = replace(one, texts=texts)
        outputs.append(one)
    return replace(documents, outputs=outputs)


def _tasks(recipe: Recipe, documents: Documents, limits: Limits) -> list[Task]:
    """Return the tasks, each with neighboring splits of about `shard_bytes` of text."""
    selection, memory_bytes = Selection.of(recipe), recipe.memory // 2
    made: list[Task] = []
    group: list[SplitText] = []
    size = 0
    for number, split in enumerate(documents.splits):
        annotations, rows = documents.annotations(number) if recipe.annotate else (None, ())
        group.append(
            SplitText(
                documents.file(number),
                documents.removals[number],
                recipe.sources[split.source],
                documents.languages(number),
                annotations,
                rows,
                documents.labels_of(number),
            )
        )
        size += documents.files[number].ledger().kept.bytes
        if size >= recipe.output.shard_bytes or number == len(documents.splits) - 1:
            args = group, recipe.output, selection, memory_bytes, limits
            made.append(TEXT.task(f"{len(made):05d}", size, *args))
            group, size = [], 0
    return made


def write_text(
    folder: Path,
    splits: Sequence[SplitText],
    output: OutputConfig,
    selection: Annotated[Selection | None, RecipeKey("where")],
    memory_bytes: MemoryBytes,
    limits: Limits,
) -> Written:
    """Write the kept documents of `splits` into `folder`, and a run of removed ones for `duplicates/`."""
    written = Written([], [])
    with TwinsFile(folder, memory_bytes=memory_bytes // 16, limits=limits) as twins:
        file: _TextFile | None = None
        for split in splits:
            ledger = Ledger()
            for table in _documents(split, selection, ledger, twins):
                sizes = np.diff(text_offsets(table.column("text").combine_chunks()))
                start = 0
                while start < table.num_rows:
                    if file is None:
                        file = _TextFile(folder, len(written.shards), table.schema, output)
                    taken = file.take(sizes[start:])
                    file.write(table.slice(start, taken), sizes[start : start + taken])
                    start += taken
                    if start < table.num_rows:
                        written.shards.append(file.close())
                        file = None
                PULSE.tell(ledger)
            ledger.check(str(folder))
            written.ledgers.append(ledger)
        if file is not None:
            written.shards.append(file.close())
    return written


TEXT = Stage("text", "text", write_text, cost=20)


def _documents(
    split: SplitText, selection: Selection | None, ledger: Ledger, twins: TwinsFile
) -> Iterator[pa.Table]:
    """Yield the kept documents in batches, as rows of TEXT_SCHEMA with language and filter columns."""
    removed = split.removed.load()
    beside = _beside(split)
    start = 0
    with split.documents.open_arrow() as source:
        reader = pa.ipc.open_file(source)
        for batch in marked_batches(reader, split.labels):
            more = [column[start : start + batch.num_rows] for column in beside.values()]
            for name, column in zip(beside, more, strict=True):
                batch = batch.append_column(f"+{name}", column)
            part = removed.within(start, batch.num_rows)
            start += batch.num_rows
            others = None
            if selection is not None:
                languages = batch.column("+language").to_pylist() if "language" in beside else None
                others = selection.others(batch, split.source, languages, part)
            kept, copies = remaining(batch, part, ledger, twins, others)
            kept, copies = _not_empty(kept, copies, ledger, twins)
            if kept.num_rows:
                yield _rows(kept, copies, split.source, list(beside))


def _not_empty(
    batch: pa.RecordBatch, copies: npt.NDArray[np.int32], ledger: Ledger, twins: TwinsFile
) -> tuple[pa.RecordBatch, npt.NDArray[np.int32]]:
    """Drop documents without text; count these as "empty" and the others as kept in the ledger."""
    sizes = np.diff(text_offsets(batch.column("text")))
    if (empty := sizes == 0).any():
        ledger.drop("empty", int(empty.sum()), 0)
        twins.remove(batch, "empty", np.flatnonzero(empty))
        batch, copies = batch.filter(pa.array(~empty)), copies[~empty]
    ledger.kept += Count(batch.num_rows, int(sizes.sum()))
    return batch, copies


def _beside(split: SplitText) -> dict[str, pa.Array]:
    """Return columns with the language and the filters' values of all documents of the split, if known."""
    columns: dict[str, pa.Array] = {}
    if split.languages is not None:
        labels = pa.array(split.languages.labels, pa.string())
        columns["language"] = labels.take(pa.array(split.languages.read()))
    if split.annotations is not None:
        with split.annotations.open_arrow() as source:
            values = annotation_values(source)
        if values.type.num_fields:  # Parquet has no structs without fields
            if split.rows:
                values = values.take(pa.array(in_rows(np.arange(len(values)), split.rows)))
            columns["filters"] = values
    return columns


def _rows(
    documents: pa.RecordBatch, copies: npt.NDArray[np.int32], source: str, beside: Sequence[str]
) -> pa.Table:
    columns: dict[str, Any] = {
        name: documents.column(name) for name in ("text", "id", "url", "file", "record", "metadata")
    }
    columns["source"] = pa.repeat(pa.scalar(source), documents.num_rows)
    ids = documents.column("document_id").to_pylist()
    columns["document_id"] = pa.array([one.hex() for one in ids], pa.string())
    columns["copies"] = pa.array(copies)
    fields = list(TEXT_SCHEMA)
    for name in beside:
        columns[name] = documents.column(f"+{name}")
        fields.append(pa.field(name, columns[name].type))
    return pa.table([columns[field.name] for field in fields], schema=pa.schema(fields))


class _TextFile:
    """Writes one file of whole documents: up to `shard_bytes` of text, or one longer document."""

    def __init__(self, folder: Path, number: int, schema: pa.Schema, output: OutputConfig) -> None:
        self._output, self._schema = output, schema
        self._left = output.shard_bytes
        self._documents = self._pending_bytes = 0
        self._pending: list[pa.Table] = []
        self._path = folder / f"part-00000.{number:05d}.{output.format}"
        self._file: Any
        if output.format == "jsonl":
            self._file = self._path.open("wb")
        else:
            self._file = pq.ParquetWriter(
                self._path,
                schema,
                compression="zstd",
                compression_level=_ZSTD_LEVEL,
                use_dictionary=["source", "file", "language"],
                write_page_index=True,
            )

    def take(self, sizes: npt.NDArray[np.int64]) -> int:
        """Return how many of the next documents, whose texts have these sizes, fit into the file."""
        fit = int(np.searchsorted(np.cumsum(sizes), self._left, side="right"))
        return max(fit, 0 if self._documents else 1)

    def write(self, rows: pa.Table, sizes: npt.NDArray[np.int64]) -> None:
        """Append documents whose texts have these sizes in bytes."""
        self._left -= int(sizes.sum())
        self._documents += rows.num_rows
        if self._output.format == "jsonl":
            self._file.writelines(map(_line, rows.to_pylist()))
            return
        self._pending.append(rows)
        self._pending_bytes += int(sizes.sum())
        waiting = sum(table.num_rows for table in self._pending)
        if self._pending_bytes >= ROW_GROUP_BYTES or waiting >= ROW_GROUP_DOCUMENTS:
            self._flush()

    def _flush(self) -> None:
        if rows := sum(table.num_rows for table in self._pending):
            self._file.write_table(pa.concat_tables(self._pending), row_group_size=rows)
        self._pending, self._pending_bytes = [], 0

    def close(self) -> ShardInfo:
        """Finish the file and return its entry for the manifest."""
        if self._output.format == "parquet":
            self._flush()
        self._file.close()
        columns = tuple(
            Column(field.name, _TYPES.get(str(field.type), str(field.type))) for field in self._schema
        )
        if self._output.compression is None:
            return ShardInfo(self._described(self._path), self._documents, columns)
        raw = FileInfo(self._path.name, self._path.stat().st_size)
        algorithm, stored = _compress(self._path, self._output.compression)
        return ShardInfo(raw, self._documents, columns, zip=self._described(stored), compression=algorithm)

    def _described(self, path: Path) -> FileInfo:
        return FileInfo(path.name, path.stat().st_size, hash_file(path, self._output.hashes))


def _line(row: dict[str, Any]) -> bytes:
    if row["metadata"] is not None:
        row["metadata"] = orjson.loads(row["metadata"])
    return orjson.dumps(row) + b"\n"


def _compress(path: Path, compression: str) -> tuple[str, Path]:
    """Replace a file by its compressed form; return (algorithm, new path)."""
    algorithm, _ = parse_compression(compression)
    stored = path.with_name(f"{path.name}.{_SUFFIXES[algorithm]}")
    compressor = new_compressor(compression, path.stat().st_size)
    with path.open("rb") as source, stored.open("wb") as target:
        while piece := source.read(_PIECE_BYTES):
            target.write(compressor.compress(piece))
        target.write(compressor.flush())
    path.unlink()
    return algorithm, stored


def needs(n: Needs) -> None:
    """Add the requests and bytes of stage `text`, for every dataset of text."""
    c, text = n.corpus, n.corpus.text_bytes * DOCUMENTS
    if not c.shape.texts:
        return
    shard_bytes = c.shard_bytes / c.scale
    tasks = max(1, min(c.gathered, ceil(c.text_bytes / shard_bytes)))
    shards = max(tasks, ceil(c.text_bytes / shard_bytes))
    gets, read = n.scans(text, c.gathered)
    outputs = ceil(c.shape.texts / (1 + c.shape.parts))
    times = c.shape.texts
    files = ceil(shards / tasks) + 1
    n.add(TEXT, times * tasks, times * gets, times * read, files=files, written=outputs * text)
    n.shards, n.output_bytes = n.shards + times * shards, n.output_bytes + outputs * text


def _stages(recipe: Recipe) -> Sequence[Stage[..., Any]]:
    return (TEXT,) if any(one.output.is_text for one in recipe.datasets()) else ()


STEP = Step(_stages, write_texts, needs)
