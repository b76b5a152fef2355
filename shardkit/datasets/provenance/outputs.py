"""Write the results of a search: an exclusion list or a token mask for loaders, and an export of the pieces.

Exclusion list. Rows are excluded as a whole, so tokens of other documents in them are lost, too; `measure`
counts them. Rows arrive mostly in order and are merged into ranges, so memory grows with ranges, not rows.

Export. Parquet, JSON lines or CSV, depending on the file's extension, one line per piece: `sample_id` (row
number in dataset order), `shard`, `shard_file`, `row` (in the shard), `token_start`, `token_end`,
`document_id` (hex), `document_start`, `copies`, `source` (the label), `file`, `record`, `id`, `url`,
`metadata`, and `text` if the pieces are decoded.

All files are written under a temporary name and renamed when they are complete.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from shardkit.datasets.opened import OpenDataset
from shardkit.datasets.provenance.table import ProvenanceTable
from shardkit.errors import ShardkitError
from shardkit.files import publish_bytes
from shardkit.formats.provenance import PROVENANCE_SCHEMA
from shardkit.order.exclusions import Exclusions
from shardkit.order.token_mask import TokenMask

_Ints = npt.NDArray[np.int64]

_Ids = npt.NDArray[np.bytes_]

_ROWS_AT_ONCE = 1 << 16  # number of rows whose pieces are in memory at a time


class Ranges:
    """Merges row numbers into ranges [begin, end); they may be in any order, but should mostly ascend."""

    def __init__(self) -> None:
        self._parts: list[_Ints] = []
        self._waiting = 0

    def add(self, rows: _Ints) -> None:
        """Add rows; repeated rows count once."""
        rows = np.unique(rows)
        if not len(rows):
            return
        breaks = np.flatnonzero(np.diff(rows) > 1)
        begins = rows[np.concatenate([[0], breaks + 1])]
        ends = rows[np.concatenate([breaks, [len(rows) - 1]])] + 1
        self._parts.append(np.stack([begins, ends], axis=1))
        self._waiting += len(begins)
        if len(self._parts) > 256 and self._waiting > 2 * len(self._parts[0]):
            self._merge()

    def exclusions(self) -> Exclusions:
        """Return all ranges as an exclusion list."""
        self._merge()
        return Exclusions(self._parts[0])

    def _merge(self) -> None:
        found = Exclusions(np.concatenate([np.empty((0, 2), np.int64), *self._parts])).to_list()
        self._parts = [np.array(found, np.int64).reshape(-1, 2)]
        self._waiting = 0


@dataclass(frozen=True, slots=True)
class RemovalReport:
    """The effect of an exclusion list. `tokens`, the size of the excluded rows, consists of `removed_tokens`
    (of documents that were searched for), `other_tokens` (of other documents in these rows) and `padding`."""

    rows: int
    dataset_rows: int
    ranges: int
    tokens: int
    removed_tokens: int
    removed_documents: int
    other_tokens: int
    other_documents: int
    padding: int
    fingerprint: str
    digest: str


def measure(
    dataset: OpenDataset,
    table: ProvenanceTable,
    excluded: Exclusions,
    removed: _Ids,
    *,
    rows_at_once: int = _ROWS_AT_ONCE,
) -> RemovalReport:
    """Measure the effect of excluding rows, by reading all their pieces from the provenance table.

    `removed` are the sorted ids S16[documents] of the documents searched for. Takes 16 bytes of memory for
    each other document that loses a piece, and the pieces of `rows_at_once` rows.
    """
    length = dataset.sequence_length
    if length is None:
        raise ShardkitError(f"{dataset.location}: has no column of tokens of constant length")
    removed_tokens = other_tokens = 0
    others = np.empty(0, removed.dtype)
    for rows in _blocks(excluded, rows_at_once):
        pieces = table.of_rows(rows, columns=("token_start", "token_end", "document_id"))
        ids = document_ids(pieces)
        tokens = pieces.column("token_end").to_numpy() - pieces.column("token_start").to_numpy()
        at = np.searchsorted(removed, ids).clip(max=max(0, len(removed) - 1))
        is_removed = removed[at] == ids if len(removed) else np.zeros(len(ids), np.bool_)
        removed_tokens += int(tokens[is_removed].sum())
        other_tokens += int(tokens[~is_removed].sum())
        others = np.unique(np.concatenate([others, ids[~is_removed]]))
    return RemovalReport(
        rows=excluded.count,
        dataset_rows=len(dataset),
        ranges=len(excluded.to_list()),
        tokens=excluded.count * length,
        removed_tokens=removed_tokens,
        removed_documents=len(removed),
        other_tokens=other_tokens,
        other_documents=len(others),
        padding=excluded.count * length - removed_tokens - other_tokens,
        fingerprint=dataset.fingerprint,
        digest=excluded.digest,
    )


def write_exclusions(
    path: str | os.PathLike[str], dataset: OpenDataset, excluded: Exclusions, why: Iterable[str] = ()
) -> None:
    """Write an exclusion list for `Exclusions.read` and `Stream(exclude=...)`, valid for this dataset only.

    The lines of `why` become comments. Raises ShardkitError if the file cannot be written, or if the list
    excludes no rows or all rows.
    """
    if not 0 < excluded.count < len(dataset):
        share = "no row" if not excluded.count else "every row"
        raise ShardkitError(f"{os.fspath(path)}: not written: {share} of {dataset.location} is excluded")
    lines = [
        f"# rows that training leaves out: {excluded.count:,} of {len(dataset):,} of {dataset.location}",
        *(f"# {line}" for line in why),
        f"# fingerprint: {dataset.fingerprint}",
    ]
    lines += [f"{begin}" if end == begin + 1 else f"{begin}:{end}" for begin, end in excluded.to_list()]
    _write_lines(path, lines)


def write_mask(path: str | os.PathLike[str], dataset: OpenDataset, mask: TokenMask, documents: int) -> None:
    """Write a token mask for `TokenMask.read` and `Stream(mask=...)`, valid for this dataset only.

    `documents` is the number of documents in it. Raises ShardkitError if the file cannot be written.
    """
    lines = [
        f"# tokens that are no targets: {mask.tokens:,} of {documents:,} documents, in {mask.rows:,} rows of "
        f"{dataset.location}",
        f"# fingerprint: {dataset.fingerprint}",
    ]
    _write_lines(path, [*lines, *(f"{row} {begin}:{end}" for row, begin, end in mask.to_list())])


def _write_lines(path: str | os.PathLike[str], lines: Iterable[str]) -> None:
    try:
        publish_bytes(Path(path), "".join(" ".join(line.split()) + "\n" for line in lines).encode())
    except OSError as error:
        raise ShardkitError(f"{os.fspath(path)}: cannot be written: {error}") from error


def document_ids(table: pa.Table) -> _Ids:
    """Return the column `document_id` of a table as S16[n], which NumPy can compare and sort."""
    parts = [
        np.frombuffer(chunk.buffers()[1], "S16", len(chunk), 16 * chunk.offset)
        for chunk in table.column("document_id").chunks
        if len(chunk)
    ]
    return np.concatenate([np.empty(0, "S16"), *parts])


def _blocks(excluded: Exclusions, rows_at_once: int) -> Iterator[_Ints]:
    """Yield the excluded rows in ascending blocks of `rows_at_once`; a block may span several ranges."""
    block: list[_Ints] = []
    room = rows_at_once
    for begin, end in excluded.to_list():
        while begin < end:
            taken = min(end - begin, room)
            block.append(np.arange(begin, begin + taken))
            begin, room = begin + taken, room - taken
            if not room:
                yield np.concatenate(block)
                block, room = [], rows_at_once
    if block:
        yield np.concatenate(block)


ENDINGS = (".parquet", ".jsonl", ".csv")

_REPEATING = ("shard", "shard_file", "source", "file")

Texts = Callable[[pa.Table], list[str]]


class Exporter:
    """Writes the pieces that `ProvenanceTable.search` yields to a file, which appears under its name on exit.

    A context manager. `texts` returns the text of each piece in a table; None omits the column `text`. Raises
    ShardkitError if the file cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        dataset: OpenDataset,
        sources: Sequence[str],
        texts: Texts | None = None,
    ) -> None:
        self._path = Path(path)
        if self._path.suffix not in ENDINGS:
            raise ShardkitError(f"{self._path}: name a file with one of the extensions {', '.join(ENDINGS)}")
        self._dataset, self._sources, self._texts = dataset, sources, texts
        self._temporary = self._path.with_name(f".{self._path.name}.tmp-{os.getpid()}")
        self._schema = _schema(texts is not None)
        self._writer: Any = None
        self.lines = 0

    def write(self, pieces: pa.Table) -> None:
        """Append pieces to the file."""
        table = self._table(pieces)
        self.lines += table.num_rows
        try:
            if self._path.suffix == ".parquet":
                self._writer.write_table(table)
                return
            lines = table.to_pylist()
            if self._path.suffix == ".jsonl":
                text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            else:
                text = _csv(list(line.values()) for line in lines)
            self._writer.write(text.encode())
        except OSError as error:
            raise ShardkitError(f"{self._path}: cannot be written: {error}") from error

    def __enter__(self) -> Self:
        try:
            if self._path.suffix == ".parquet":
                self._writer = pq.ParquetWriter(
                    self._temporary, self._schema, compression="zstd", use_dictionary=list(_REPEATING)
                )
            else:
                self._writer = self._temporary.open("wb")
                if self._path.suffix == ".csv":
                    self._writer.write(_csv([self._schema.names]).encode())
        except OSError as error:
            raise ShardkitError(f"{self._path}: cannot be written: {error}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()
        if kind is None:
            self._temporary.replace(self._path)
        else:
            self._temporary.unlink(missing_ok=True)

    def _table(self, pieces: pa.Table) -> pa.Table:
        shards = self._dataset.manifest.shards
        columns: dict[str, Any] = {name: pieces.column(name) for name in pieces.column_names}
        columns["shard_file"] = _named(pieces.column("shard"), lambda n: shards[n].stored.basename)
        columns["document_id"] = _hex(document_ids(pieces))
        columns["source"] = _named(pieces.column("source"), self._label)
        if self._texts is not None:
            columns["text"] = self._texts(pieces)
        return pa.table({name: columns[name] for name in self._schema.names}, schema=self._schema)

    def _label(self, source: int) -> str:
        return self._sources[source] if source < len(self._sources) else str(source)


def _named(numbers: pa.ChunkedArray, name: Callable[[int], str]) -> pa.Array:
    """Return string[n]: the name of each number, of which few differ."""
    known, places = np.unique(numbers.to_numpy(), return_inverse=True)
    return pa.array([name(number) for number in known.tolist()], pa.string()).take(pa.array(places))


def _hex(ids: _Ids) -> pa.Array:
    """Return string[n]: the hexadecimal digits of ids of 16 bytes."""
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)
    data = ids.view(np.uint8)
    text = np.stack([digits[data >> 4], digits[data & 15]], axis=1).tobytes()
    offsets = np.arange(0, 32 * len(ids) + 1, 32, dtype=np.int32)
    return pa.StringArray.from_buffers(len(ids), pa.py_buffer(offsets), pa.py_buffer(text))


def _schema(with_text: bool) -> pa.Schema:
    types = {"sample_id": pa.int64(), "shard": pa.int32(), "shard_file": pa.string()}
    types |= {field.name: field.type for field in PROVENANCE_SCHEMA}
    types |= {"document_id": pa.string(), "source": pa.string()}
    return pa.schema({**types, **({"text": pa.string()} if with_text else {})})


def _csv(lines: Any) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()
