"""Parquet files of any writer, whose row groups are read in place as shards."""

from shardkit.formats.parquet.footer import (
    MAX_FOOTER_BYTES,
    TAIL_BYTES,
    Chunk,
    ParquetFooter,
    RowGroup,
    as_file,
    footer_bytes,
)
from shardkit.formats.parquet.shard import (
    NULL,
    NULLABLE,
    ParquetPart,
    ParquetShard,
    encodings_of,
    fixed_size,
    split_pieces,
)

__all__ = [
    "MAX_FOOTER_BYTES",
    "NULL",
    "NULLABLE",
    "TAIL_BYTES",
    "Chunk",
    "ParquetFooter",
    "ParquetPart",
    "ParquetShard",
    "RowGroup",
    "as_file",
    "encodings_of",
    "fixed_size",
    "footer_bytes",
    "split_pieces",
]
