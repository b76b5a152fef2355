"""Read consecutive row groups of a Parquet file in place, as a shard.

pyarrow reads the ranges of the file which hold the wanted columns as a file whose other bytes are missing,
with a footer of these row groups only.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import zstandard

from shardkit.formats.rows.contract import Pieces, PiecesFile, ReadColumns, title_of

UNIT = "row group"
MAGIC = b"PAR1"
MAX_FOOTER_BYTES = 256 << 20  # a footer of a million column chunks has about 100 MB


@dataclass(frozen=True, slots=True)
class ParquetPart:
    """Row groups of a file, which are a shard.

    `footer` is a footer of these row groups only, compressed with zstd.
    """

    file: str
    file_bytes: int
    groups: range
    first_row: int
    footer: bytes

    @property
    def title(self) -> str:
        """The row groups, for messages."""
        return title_of(UNIT, self.groups)

    def open(self, pieces: Pieces) -> ReadColumns:
        """Return the reader of the shard whose bytes are `pieces`."""
        import pyarrow.parquet as pq

        metadata = pq.read_metadata(as_file(zstandard.decompress(self.footer, MAX_FOOTER_BYTES)))
        source = PiecesFile(self.file_bytes, pieces)
        file = pq.ParquetFile(source, metadata=metadata, pre_buffer=False)
        groups = list(range(len(self.groups)))

        def read(names: Sequence[str]) -> dict[str, Any]:
            table = file.read_row_groups(groups, columns=[*names], use_threads=False)
            return {name: table.column(name) for name in names}

        return read


def as_file(footer: bytes) -> io.BytesIO:
    """Return a file that has this footer and nothing else."""
    return io.BytesIO(MAGIC + footer + len(footer).to_bytes(4, "little") + MAGIC)
