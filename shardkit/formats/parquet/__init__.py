"""Parquet files of any writer, whose row groups are read in place as shards."""

from shardkit.formats.parquet.footer import TAIL_BYTES, ParquetFooter, ParquetFormat, footer_bytes
from shardkit.formats.parquet.part import ParquetPart, as_file

__all__ = ["TAIL_BYTES", "ParquetFooter", "ParquetFormat", "ParquetPart", "as_file", "footer_bytes"]
