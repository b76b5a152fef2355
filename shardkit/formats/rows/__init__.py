"""What the formats of row files (Parquet, Arrow, JSON lines) have in common."""

from shardkit.formats.rows.columns import IMAGE, NULL, NULLABLE, encodings_of, fixed_size
from shardkit.formats.rows.contract import Chunk, RowFile, RowFormat, RowGroup, RowPart, plural, split_pieces
from shardkit.formats.rows.shard import RowShard, decode_together

__all__ = [
    "IMAGE",
    "NULL",
    "NULLABLE",
    "Chunk",
    "RowFile",
    "RowFormat",
    "RowGroup",
    "RowPart",
    "RowShard",
    "decode_together",
    "encodings_of",
    "fixed_size",
    "plural",
    "split_pieces",
]
