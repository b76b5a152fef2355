"""What a search found, as a file: Parquet, JSON lines or CSV, by the name's ending.

One line a piece: `sample_id` (row number in dataset order), `shard`, `shard_file`, `row` (in the shard),
`token_start`, `token_end`, `document_id` (hex), `document_start`, `copies`, `source` (the label), `file`,
`record`, `id`, `url`, `metadata`, and `text` if the pieces were decoded. It is written to a temporary file
and renamed when it is whole.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from shardkit.dataset import Dataset
from shardkit.errors import ShardkitError

__all__ = ["ENDINGS", "Exporter"]

ENDINGS = (".parquet", ".jsonl", ".csv")
Texts = Callable[[pa.Table], list[str]]


class Exporter:
    """Writes tables as `ProvenanceTable.search` gives them; a context manager, which publishes at its end.

    `texts` gives the text of each line of a table, None leaves that column out. ShardkitError if the file
    cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        dataset: Dataset,
        sources: Sequence[str],
        texts: Texts | None = None,
    ) -> None:
        self._path = Path(path)
        if self._path.suffix not in ENDINGS:
            raise ShardkitError(f"{self._path}: a list of pieces is written as {', '.join(ENDINGS)}")
        self._dataset, self._sources, self._texts = dataset, sources, texts
        self._temporary = self._path.with_name(f".{self._path.name}.tmp-{os.getpid()}")
        self._schema = _schema(texts is not None)
        self._writer: Any = None
        self.lines = 0

    def write(self, pieces: pa.Table) -> None:
        """Add pieces."""
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
                self._writer = pq.ParquetWriter(self._temporary, self._schema, compression="zstd")
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
        files = {n: shards[n].stored.basename for n in set(pieces.column("shard").to_pylist())}
        columns["shard_file"] = [files[n] for n in pieces.column("shard").to_pylist()]
        columns["document_id"] = [one.hex() for one in pieces.column("document_id").to_pylist()]
        columns["source"] = [self._label(n) for n in pieces.column("source").to_pylist()]
        if self._texts is not None:
            columns["text"] = self._texts(pieces)
        return pa.table({name: columns[name] for name in self._schema.names}, schema=self._schema)

    def _label(self, source: int) -> str:
        return self._sources[source] if source < len(self._sources) else str(source)


def _schema(with_text: bool) -> pa.Schema:
    names = {
        "sample_id": pa.int64(),
        "shard": pa.int32(),
        "shard_file": pa.string(),
        "row": pa.int32(),
        "token_start": pa.int32(),
        "token_end": pa.int32(),
        "document_id": pa.string(),
        "document_start": pa.int64(),
        "copies": pa.int32(),
        "source": pa.string(),
        "file": pa.string(),
        "record": pa.int64(),
        "id": pa.string(),
        "url": pa.string(),
        "metadata": pa.string(),
    }
    return pa.schema({**names, **({"text": pa.string()} if with_text else {})})


def _csv(lines: Any) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()
