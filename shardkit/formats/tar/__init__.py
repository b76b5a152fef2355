"""Read WebDataset tars in place, shardkit's own and those of others; write tars with a constant stride.

This module exports the format's functions. `shard` reads an open tar; `members` finds members and samples,
`stride` finds them faster if all samples have the same layout, `values` decodes members, `writer` writes a
tar. `shard_list` (shards.json, and the syntax of tar names) and `find` determine the tars of a dataset.
Damaged or hostile input raises ShardError with the file and, where known, the byte offset.
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
