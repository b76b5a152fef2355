"""Read the values of documents whose texts a loader tokenizes, from other columns of the same files.

The rows of a shard of texts follow from the lengths of its documents, which the index keeps. Wanted columns
are read from the shard's row groups when a loader first needs them; which shards there are, the rows in them
and the fingerprint do not depend on these columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa

from shardkit.datasets.document_values import ShardValues, ValueType, arrow_values
from shardkit.datasets.row_files import other_columns
from shardkit.datasets.text_rows import TextRows
from shardkit.formats.rows import RowShard, split_pieces
from shardkit.formats.tokens import pieces_of

_THREADS = 4
_SAMPLES = 16  # shards all over a dataset in whose files fields are looked for
_TEXTS = ("id", "url")  # whose whole numbers are texts in builds, too


class TextValues:
    """Reads values from the files of a dataset of texts."""

    def __init__(self, texts: TextRows) -> None:
        self._texts = texts

    def types(self, names: Sequence[str]) -> dict[str, ValueType]:
        """Return the default types: see `ValueReader.types`."""
        found: dict[str, ValueType] = {}
        shards = np.linspace(0, len(self._texts.packer.rows.parts), _SAMPLES, endpoint=False).astype(np.int64)
        for number in np.unique(shards).tolist():
            left = [name for name in names if name not in found]
            where = self._texts.where(number)
            _, _, encodings = other_columns(self._texts.packer.rows, number, (), where)
            for name in left:
                if name in encodings:
                    found[name] = _type_of(name, encodings[name], where)
        return found

    def read(self, shards: Sequence[int], types: Mapping[str, ValueType]) -> Iterator[ShardValues]:
        """Yield the values of shards: see `ValueReader.read`."""
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="shardkit-values") as pool:
            yield from pool.map(lambda number: self._read(number, types), shards)

    def _read(self, number: int, types: Mapping[str, ValueType]) -> ShardValues:
        documents, placed = self._texts.placed(number)
        placed = placed.moved(np.arange(placed.rows))  # in the order of rows
        where, values = self._texts.where(number), {}
        part, info, _ = other_columns(self._texts.packer.rows, number, list(types), where)
        if info.columns:
            pieces = split_pieces(pieces_of(info.raw.basename), self._texts.stored(info.raw.basename))
            shard = RowShard(where, info, part, pieces, decode=False)
            of_pieces = pa.array(documents[placed.document])
            for column in info.columns:
                taken = shard.arrow(column.name).take(of_pieces)
                values[column.name] = arrow_values(taken, types[column.name])
        return ShardValues.of(placed.rows, placed.row, placed.column + placed.length, values, types)


def _type_of(name: str, encoding: str, where: str) -> ValueType:
    """Return the default type of a column. Raises ValueError unless it holds numbers or texts."""
    kind = encoding.partition("|")[0]
    if kind == "str" or (name in _TEXTS and kind.startswith(("int", "uint"))):
        return "hash"
    if kind in ("bool", "null", "halffloat") or kind.startswith(("int", "uint", "float", "double")):
        return "float32"
    raise ValueError(f"document_values takes numbers and texts, but column {name!r} of {where} is {kind}")
