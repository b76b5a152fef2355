"""MDS, the format of MosaicML Streaming: one name for reading and writing it.

Files go both ways: MosaicML reads what is written here, and all it writes is read here. The format and
its checks are in `index` (index.json), `shard` (one file), `encodings` (one value), `writer`.
Whatever is damaged or hostile raises ShardError with the file and, where known, the byte.
"""

from shardkit.formats.mds.index import index_bytes, index_files, parse_index, read_index, write_index
from shardkit.formats.mds.shard import MdsShard, open_shard, shard_from_raw
from shardkit.formats.mds.writer import (
    MdsWriter,
    array_bytes,
    write_arrays_shard,
    write_columns_shard,
    write_rows_shard,
)

__all__ = [
    "MdsShard",
    "MdsWriter",
    "array_bytes",
    "index_bytes",
    "index_files",
    "open_shard",
    "parse_index",
    "read_index",
    "shard_from_raw",
    "write_arrays_shard",
    "write_columns_shard",
    "write_index",
    "write_rows_shard",
]
