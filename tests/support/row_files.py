"""Writes tables as files of each format that is read in place; each table becomes one group of rows."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from hypothesis import strategies as st

KINDS = ("parquet", "arrow", "stream", "jsonl", "zst")
SUFFIXES = {
    "parquet": ".parquet",
    "arrow": ".feather",
    "stream": ".arrow",
    "jsonl": ".jsonl",
    "zst": ".jsonl.zst",
}


# Types of columns and their values.
VALUES: dict[str, tuple[Any, Any]] = {
    "int8": (pa.int8(), st.integers(-128, 127)),
    "uint64": (pa.uint64(), st.integers(0, (1 << 64) - 1)),
    "float16": (pa.float16(), st.floats(width=16, allow_nan=False).map(np.float16)),
    "float64": (pa.float64(), st.floats(allow_nan=False)),
    "bool": (pa.bool_(), st.booleans()),
    "text": (pa.string(), st.text(max_size=9)),
    "large_text": (pa.large_string(), st.text(max_size=9)),
    "bytes": (pa.binary(), st.binary(max_size=9)),
    "fixed_bytes": (pa.binary(4), st.binary(min_size=4, max_size=4)),
    "category": (pa.dictionary(pa.int8(), pa.string()), st.sampled_from(["a", "b"])),
    "date": (pa.date32(), st.dates(datetime.date(1970, 1, 1))),
    "time": (pa.timestamp("us", "UTC"), st.datetimes(timezones=st.just(datetime.UTC))),
    "decimal": (pa.decimal128(9, 2), st.integers(-9999, 9999).map(lambda n: Decimal(n) / 4)),
    "ids": (pa.list_(pa.uint16()), st.lists(st.integers(0, 65_535), max_size=5)),
    "long_ids": (pa.large_list(pa.int64()), st.lists(st.integers(-9, 9), max_size=5)),
    "vector": (pa.list_(pa.float32(), 3), st.lists(st.just(0.5), min_size=3, max_size=3)),
    "words": (pa.list_(pa.string()), st.lists(st.text(max_size=3), max_size=3)),
    "nested": (pa.list_(pa.list_(pa.int32())), st.lists(st.lists(st.integers(0, 9), max_size=2), max_size=2)),
    "struct": (
        pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))]),
        st.fixed_dictionaries({"a": st.integers(0, 9), "b": st.lists(st.text(max_size=2), max_size=2)}),
    ),
}


def write_tables(folder: Path, stem: str, kind: str, tables: Sequence[pa.Table], **options: Any) -> Path:
    """Write a file whose groups are `tables`, and return its path; `options` are for pyarrow's writer."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{stem}{SUFFIXES[kind]}"
    if kind == "parquet":
        with pq.ParquetWriter(file, tables[0].schema, **{"compression": "none"} | options) as writer:
            for table in tables:
                writer.write_table(table)
    elif kind in ("arrow", "stream"):
        open_writer = pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream
        compression = options.get("compression", "zstd" if kind == "arrow" else None)
        writing = pa.ipc.IpcWriteOptions(compression=compression)
        with open_writer(str(file), tables[0].schema, options=writing) as stream:
            for table in tables:
                stream.write_table(table.combine_chunks())
    else:
        parts = [as_lines(table) for table in tables]
        file.write_bytes(b"".join(map(zstandard.compress, parts) if kind == "zst" else parts))
    return file


def as_lines(table: pa.Table) -> bytes:
    """Return a table as JSON lines."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in table.to_pylist())


def plain(value: Any) -> Any:
    """Return an array as lists, and other values as they are."""
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
