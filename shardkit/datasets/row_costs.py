"""The work of each row: sums of squared document lengths, in a table beside a dataset.

With attention inside documents, a row costs about the sum of the squares of its documents' lengths. Loaders
that balance work (`shardkit.loaders.work_balance`) need that number of rows that they do not read. It depends
on the dataset alone, so it is counted once (`shardkit.loaders.row_costs`), and `make_row_costs` writes it
beside the index:

    row-costs.FINGERPRINT.eos50256.npy    uint32[rows] (uint64 for rows of 65,536 tokens or more), a .npy file
                                          with 16 bytes behind it: the xxh3_128 of all before them

Its name states which rows it is about and which id ends documents there, so a table of other data is never
taken for it. Padding at the end of a row is one more document, as it is for `cu_seqlens`. No card names it;
`upload` and `download` carry it with the dataset.

Tables of remote datasets are kept in the cache folder, where all processes of the machine map one file;
without a folder each process holds 4 bytes a row. A table is hashed whenever it is opened, and processes
compare what they have before the first batch (`shardkit.loaders.agreement`): ranks with different tables
would not deliver each row once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.arrays import Bytes
from shardkit.cache.indexes import NodeIndexes
from shardkit.datasets.dataset import Dataset
from shardkit.errors import ShardError
from shardkit.files import map_path
from shardkit.formats.tar.values import make_npy_header
from shardkit.hashing import hash_bytes, new_hash
from shardkit.storage.store import METADATA_NAME, ObjectNotFoundError, Store

__all__ = [
    "DocumentIds",
    "RowCosts",
    "find_row_costs",
    "row_length",
    "table_dtype",
    "table_name",
    "tables_among",
    "write_row_costs",
]

_DIGEST_BYTES = 16
_HASH = "xxh3_128"

_Squares = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, slots=True)
class DocumentIds:
    """How documents are found in rows, as `LoaderConfig` has it."""

    eos_id: int | None = None
    bos_id: int | None = None
    pad_id: int | None = None

    def __str__(self) -> str:
        """Part of a table's name."""
        first = f"eos{self.eos_id}" if self.bos_id is None else f"bos{self.bos_id}"
        return first if self.pad_id is None else f"{first}-pad{self.pad_id}"


@dataclass(frozen=True, slots=True, eq=False)
class RowCosts:
    """The sum of squared document lengths of every row of a dataset, in its order."""

    squares: _Squares
    digest: str
    """Of the table's bytes."""

    @classmethod
    def of(cls, squares: _Squares) -> RowCosts:
        """A table of these sums."""
        return cls(squares, _digest(make_npy_header(squares.dtype, len(squares)), squares.data))

    @classmethod
    def parse(cls, where: str, data: Bytes, rows: int, length: int) -> RowCosts:
        """The table in a file's bytes; ShardError if it is damaged, or not of `rows` of `length` tokens."""
        dtype = table_dtype(length)
        header, end = make_npy_header(dtype, rows), len(data) - _DIGEST_BYTES
        if end != len(header) + rows * dtype.itemsize or data[: len(header)].tobytes() != header:
            raise ShardError(where, f"is no table of {rows:,} rows: remove it and call make_row_costs again")
        digest = hash_bytes(data[:end].data, [_HASH])[_HASH]
        if bytes.fromhex(digest) != data[end:].tobytes():
            raise ShardError(where, "is damaged: remove it and call make_row_costs again")
        return cls(data[len(header) : end].view(dtype), digest)

    def to_bytes(self) -> bytes:
        """The file."""
        header = make_npy_header(self.squares.dtype, len(self.squares))
        return header + self.squares.tobytes() + bytes.fromhex(self.digest)


def table_name(dataset: Dataset, ids: DocumentIds) -> str:
    """The name of a dataset's table, beside its index."""
    return f"row-costs.{dataset.fingerprint}.{ids}.npy"


def tables_among(names: Iterable[str], fingerprint: str) -> list[str]:
    """Those of `names` that are tables of the dataset of this fingerprint, whatever ends its documents."""
    return [name for name in names if name.startswith(f"row-costs.{fingerprint}.") and name.endswith(".npy")]


def find_row_costs(dataset: Dataset, ids: DocumentIds, indexes: NodeIndexes | None = None) -> RowCosts | None:
    """The table that lies beside a dataset's index; None if there is none, ShardError if it is damaged."""
    name, length = table_name(dataset, ids), row_length(dataset)
    data: Bytes | None = None
    if dataset.shards is None:
        file = dataset.path / name
        data = map_path(file) if file.is_file() else None
    elif indexes is None:
        text = _fetch(dataset.store, name)
        data = None if text is None else np.frombuffer(text, dtype=np.uint8)
    else:
        # Under a URL of its own: the index's entry says when the index was checked.
        url = f"{dataset.location}#{name}"
        kept = indexes.objects(url, [name], lambda: {name: _fetch(dataset.store, name)})[name]
        if kept is not None:
            data = map_path(kept) if isinstance(kept, Path) else np.frombuffer(kept, dtype=np.uint8)
    if data is None:
        return None
    return RowCosts.parse(f"{dataset.location}/{name}", data, len(dataset), length)


def write_row_costs(dataset: Dataset, ids: DocumentIds, costs: RowCosts) -> str:
    """Put a dataset's table beside its index, or beside that of a copy; return its name. StoreError."""
    name, data = table_name(dataset, ids), costs.to_bytes()
    dataset.store.put(name, data, metadata={METADATA_NAME: hash_bytes(data, [_HASH])[_HASH]})
    return name


def row_length(dataset: Dataset) -> int:
    """Tokens of a row; ShardError for a dataset without rows of tokens of one length."""
    if (length := dataset.sequence_length) is None:
        raise ShardError(
            dataset.location, "has no rows of tokens of one length, whose costs could be counted"
        )
    return length


def table_dtype(length: int) -> np.dtype[np.unsignedinteger[Any]]:
    """The smallest type that holds the square of a row's length."""
    return np.dtype("<u4" if length < 1 << 16 else "<u8")


def _digest(header: bytes, values: memoryview) -> str:
    hasher = new_hash(_HASH)
    hasher.update(header)
    hasher.update(values)
    return hasher.hexdigest()


def _fetch(store: Store, name: str) -> bytes | None:
    try:
        return store.get(name)
    except ObjectNotFoundError:
        return None
