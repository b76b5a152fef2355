"""WebDataset tars: shardkit's own and any made by others, read in place; constant-stride tars written.

One name for the format. `shard` is one open tar; `members` says which members and samples it holds, `stride`
does so at once where all are alike, `values` decodes them, `writer` writes a tar. `shard_list` (shards.json,
and what names of tars mean) and `find` say which tars make a dataset. Whatever is damaged or hostile raises
ShardError with the file and, where known, the byte.
"""

from shardkit.formats.tar.shard import (
    TarShard,
    column_names,
    open_shard,
    renamed,
    scan_folder,
    shard_from_raw,
    tell_name,
)
from shardkit.formats.tar.shard_list import parse_shard_list, shard_list_bytes, write_shard_list
from shardkit.formats.tar.writer import member_bytes, write_columns_shard, write_rows_shard

__all__ = [
    "TarShard",
    "column_names",
    "member_bytes",
    "open_shard",
    "parse_shard_list",
    "renamed",
    "scan_folder",
    "shard_from_raw",
    "shard_list_bytes",
    "tell_name",
    "write_columns_shard",
    "write_rows_shard",
    "write_shard_list",
]
