"""Documents as a scan of input files makes them, for tests of the stages that read them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from shardkit.writers.rows.documents import DOCUMENT_SCHEMA, document_ids

__all__ = ["document_batch", "write_documents"]


def document_batch(
    texts: Sequence[str], *, file: str = "a.jsonl", records: Sequence[int] | None = None, **columns: Any
) -> pa.RecordBatch:
    """Records of one file, from 0 or with these numbers; fields that no column is given for are null."""
    count = len(texts)
    numbers = list(range(count) if records is None else records)
    filled: dict[str, Any] = {
        "document_id": document_ids(file, numbers),
        "source": [0] * count,
        "file": [file] * count,
        "record": numbers,
        "text": list(texts),
    }
    filled |= columns
    arrays = [pa.array(filled.get(field.name, [None] * count), field.type) for field in DOCUMENT_SCHEMA]
    return pa.record_batch(arrays, schema=DOCUMENT_SCHEMA)


def write_documents(path: Path, texts: Sequence[str], *, batch_rows: int = 7, **settings: Any) -> Path:
    """An Arrow file of them, in batches of so many rows."""
    with pa.ipc.new_file(path, DOCUMENT_SCHEMA) as writer:
        writer.write_table(pa.table(document_batch(texts, **settings)), max_chunksize=batch_rows)
    return path
