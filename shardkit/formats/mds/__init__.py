"""Read and write MDS, the format of MosaicML Streaming.

Files are compatible both ways: MosaicML reads the files written here, and all files that it writes are read
here. The format and its checks are in `index` (index.json), `shard` (one file), `encodings` (one value) and
`writer`; `merge` joins datasets. Damaged or hostile input raises ShardError with the file and, where known,
the byte offset.
"""

from shardkit.formats.mds.index import index_bytes, index_files, parse_index, read_index, write_index
from shardkit.formats.mds.merge import merge
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
    "merge",
    "open_shard",
    "parse_index",
    "read_index",
    "shard_from_raw",
    "write_arrays_shard",
    "write_columns_shard",
    "write_index",
    "write_rows_shard",
]
