"""The schema of `provenance/*.parquet`, which records the document from which each token comes.

There is one file per partition of the build, named by `provenance_name`. A record describes a piece: the
tokens of one document in one row. Records are sorted by (shard, row, token_start) within and across files.
Tokens that no record covers are padding. Row groups have `ROW_GROUP_PIECES` records and statistics, so one or
two are read to look up rows. The schema metadata of a file with records holds the build's shuffle seed and
the range of its documents' shuffle hashes, so only one file has to be searched for a document.

`shardkit.writers.stages.provenance` writes these files, `shardkit.datasets.provenance` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

PROVENANCE_FOLDER = "provenance"
ROW_GROUP_PIECES = 1 << 16  # records per row group: about 2 MB in columns without repeating values

PROVENANCE_SCHEMA = pa.schema(
    [
        pa.field("shard", pa.int32(), nullable=False),
        pa.field("row", pa.int32(), nullable=False),  # within the shard
        pa.field("token_start", pa.int32(), nullable=False),  # within the row
        pa.field("token_end", pa.int32(), nullable=False),  # exclusive; includes an eos token
        pa.field("document_id", pa.binary(16), nullable=False),
        pa.field("document_start", pa.int64(), nullable=False),  # number of its tokens before this piece
        pa.field("copies", pa.int32(), nullable=False),  # 1 + number of its removed duplicates
        pa.field("source", pa.int32(), nullable=False),  # index into recipe.inputs
        pa.field("file", pa.string(), nullable=False),
        pa.field("record", pa.int64(), nullable=False),
        pa.field("id", pa.string()),
        pa.field("url", pa.string()),
        pa.field("metadata", pa.string()),
    ]
)

_SEED, _FIRST_HASH, _LAST_HASH = b"shardkit.seed", b"shardkit.first_hash", b"shardkit.last_hash"


@dataclass(frozen=True, slots=True)
class HashRange:
    """The range of the shuffle hashes of a file's documents, `first` to `last`, both inclusive."""

    seed: int
    first: int
    last: int

    def to_metadata(self) -> Mapping[bytes | str, bytes | str]:
        """Return the range as the file's schema metadata."""
        return {_SEED: str(self.seed), _FIRST_HASH: str(self.first), _LAST_HASH: str(self.last)}

    @classmethod
    def from_metadata(cls, metadata: Mapping[bytes, bytes]) -> HashRange | None:
        """Parse the range from a file's schema metadata; None if it has no records or damaged metadata."""
        try:
            return cls(*(int(metadata[key]) for key in (_SEED, _FIRST_HASH, _LAST_HASH)))
        except (KeyError, ValueError):
            return None


def provenance_name(number: int) -> str:
    """Return the name of the file of partition `number`, relative to the dataset's folder."""
    return f"{PROVENANCE_FOLDER}/part-{number:05d}.parquet"


def is_provenance_name(name: str) -> bool:
    """Return whether a file of the provenance folder is one of its tables."""
    return name.endswith(".parquet") and not name.rpartition("/")[2].startswith(".")
