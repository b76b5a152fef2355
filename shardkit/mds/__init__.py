"""MDS, the format of MosaicML Streaming: one name for reading and writing it.

Files go both ways: MosaicML reads what is written here, and all it writes is read here. The format and
its checks are in `index` (index.json), `shard` (one file), `encodings` (one value), `writer`.
Whatever is damaged or hostile raises ShardError with the file and, where known, the byte.
"""

from shardkit.mds.index import read_index, write_index
from shardkit.mds.shard import MdsShard, open_shard
from shardkit.mds.writer import MdsWriter, write_rows_shard

__all__ = ["MdsShard", "MdsWriter", "open_shard", "read_index", "write_index", "write_rows_shard"]
