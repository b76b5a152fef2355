"""What a Parquet file's footer says of the values of a column, also of a damaged or hostile file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow.parquet as pq

__all__ = ["column_limits"]


def column_limits(
    group: pq.RowGroupMetaData, schema: pq.ParquetSchema, column: int
) -> tuple[Any, Any] | None:
    """(least, greatest) value of a column in a row group; None if that is not said, or cannot be true."""
    chunk = group.column(column)
    if chunk.physical_type != schema.column(column).physical_type:
        return None  # pyarrow 26 lets a C++ exception out of `statistics`, which ends the process
    statistics = chunk.statistics
    if statistics is None or not statistics.has_min_max:
        return None
    try:
        return statistics.min, statistics.max
    except ValueError:  # among them strings that are not UTF-8
        return None
