"""Statistics of Parquet footers are those that pyarrow states, and a hostile footer ends nothing."""

from __future__ import annotations

import datetime
import io
import random
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fuzz.engine import mutate
from shardkit.formats.parquet_limits import Footer

ROWS = 200
TABLE = pa.table(
    {
        "int32": pa.array(range(ROWS), pa.int32()),
        "int64": pa.array([-(1 << 40) - number for number in range(ROWS)]),
        "int8": pa.array([-3, 4] * (ROWS // 2), pa.int8()),
        "uint16": pa.array([60_000 + number for number in range(ROWS)], pa.uint16()),
        "uint32": pa.array([(1 << 32) - 1 - number for number in range(ROWS)], pa.uint32()),
        "uint64": pa.array([(1 << 64) - 1 - number for number in range(ROWS)], pa.uint64()),
        "text": [f"ä {number}" for number in range(ROWS)],
        "raw": [b"\xff%d" % number for number in range(ROWS)],
        "fixed": pa.array([bytes([number] * 16) for number in range(ROWS)], pa.binary(16)),
        "list": pa.array([[number, number + 1] for number in range(ROWS)], pa.list_(pa.uint16())),
        "nulls": pa.array([None] * ROWS, pa.int64()),
        "some": [None if number % 3 else number for number in range(ROWS)],
        "struct": [{"a": number, "b": {"c": f"{number}"}} for number in range(ROWS)],
        "float": [number / 3 for number in range(ROWS)],
        "time": [datetime.datetime(2000, 1, 1)] * ROWS,
    }
)
OTHERS = {"float", "time", "nulls"}


def written(**options: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(TABLE, file, row_group_size=64, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    "options", [{}, {"version": "1.0"}, {"compression": "zstd", "data_page_version": "2.0"}]
)
def test_limits_are_those_that_pyarrow_states(options: dict[str, Any]) -> None:
    footer = Footer(io.BytesIO(written(**options)))
    metadata, found = footer.metadata, footer.limits
    assert len(found) == metadata.num_row_groups == 4
    for number, limits in enumerate(found):
        assert set(limits) >= {"int32", "text", "fixed", "list.list.element", "struct.b.c"} - OTHERS
        for column in range(metadata.num_columns):
            path = metadata.schema.column(column).path
            stated = metadata.row_group(number).column(column).statistics
            if path in limits:
                assert limits[path] == (stated.min, stated.max)
            else:
                assert path in OTHERS


def test_a_file_without_statistics_has_no_limits() -> None:
    assert Footer(io.BytesIO(written(write_statistics=False))).limits == ({},) * 4


def test_hostile_footers_have_limits_or_none() -> None:
    data = written()
    length = int.from_bytes(data[-8:-4], "little")
    start = len(data) - 8 - length
    read = 0
    for number in range(1500):
        rng = random.Random(number)
        footer = mutate(data[start:-8], rng)
        file = io.BytesIO(data[:start] + footer + len(footer).to_bytes(4, "little") + b"PAR1")
        try:
            found = Footer(file)
        except (pa.ArrowException, OSError, ValueError):
            continue
        read += 1
        assert len(found.limits) == found.metadata.num_row_groups
    assert read > 100


def test_nothing_asks_pyarrow_for_the_metadata_of_a_column() -> None:
    """It would end the process at some damaged footers: see shardkit.formats.parquet_limits."""
    asks = re.compile(
        r"write_metadata_file\(|\b(?:row_group|group|metadata)(?:\([^)]*\))?\.column\(|\.statistics\b"
    )
    root = Path(__file__).resolve().parents[2]
    sources = [
        file for folder in ("shardkit", "writers", "loaders") for file in (root / folder).rglob("*.py")
    ]
    assert len(sources) > 300
    found = [
        f"{file}:{line}" for file in sources for line in file.read_text().splitlines() if asks.search(line)
    ]
    assert not [line for line in found if "FileMetaData.row_group(n).column(m)" not in line]
