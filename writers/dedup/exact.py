"""Documents with equal text, found partition by partition.

A document's key is the xxh3-128 of its UTF-8 text. Keys are divided among partitions by their leading bits,
so all copies of a text meet in one partition, whose rows alone are held in memory (`partitions_for` tells how
many partitions a memory budget needs). Among equal keys the winner is the document of the lowest source, then
of the lowest document id: a property of the documents, so neither the number of partitions nor the order of
splits changes it. Two different texts share a key with probability 10^-19 among 10^10 documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from shardkit.errors import BuildError

__all__ = ["KEY_DTYPE", "LOSER_DTYPE", "KeyFile", "find_losers", "partitions_for"]

# Bytes of keys and ids are kept as made, big-endian when read as numbers.
KEY_DTYPE = np.dtype([("key", "u1", (16,)), ("id", "u1", (16,)), ("bytes", "<i8"), ("source", "<i4")])
LOSER_DTYPE = np.dtype([("split", "<i4"), ("row", "<i8"), ("bytes", "<i8")])

_HEADER_BYTES = 256  # room for any row count, so that it can be written last
_CHUNK_ROWS = 1 << 18
_PEAK_BYTES_PER_ROW = 140  # measured, in the worst case that most rows have a copy
_MAX_PARTITIONS = 1 << 16
_ROW_DTYPE = np.dtype(
    [
        ("high", "<u8"),
        ("low", "<u8"),
        ("id", "u1", (16,)),
        ("row", "<i8"),
        ("bytes", "<i8"),
        ("source", "<i4"),
        ("split", "<i4"),
    ]
)


class KeyFile:
    """A .npy file of KEY_DTYPE rows whose number is known only at the end."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._file.write(bytes(_HEADER_BYTES))
        self._rows = 0

    def write(self, keys: npt.NDArray[np.void]) -> None:
        """Append rows."""
        assert keys.dtype == KEY_DTYPE
        self._file.write(keys.tobytes())
        self._rows += len(keys)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            fields = {"descr": KEY_DTYPE.descr, "fortran_order": False, "shape": (self._rows,)}
            header = repr(fields).encode().ljust(_HEADER_BYTES - 11) + b"\n"
            start = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
            assert len(start) == _HEADER_BYTES
            self._file.seek(0)
            self._file.write(start)


def partitions_for(documents: int, memory_bytes: int) -> int:
    """Partitions that keep one within half of a memory budget."""
    return min(max(1, -(-documents * _PEAK_BYTES_PER_ROW * 2 // memory_bytes)), _MAX_PARTITIONS)


def find_losers(keys_paths: Sequence[Path], partition: int, partitions: int) -> npt.NDArray[np.void]:
    """LOSER_DTYPE rows, sorted by (split, row), of the partition's documents whose text another one keeps.

    `split` is the position in `keys_paths`, `row` the row in that file and in its documents.arrow.
    """
    if not 0 <= partition < partitions <= _MAX_PARTITIONS:
        raise ValueError(f"partition {partition} of {partitions}: at most {_MAX_PARTITIONS:,} partitions")
    parts = [
        rows
        for split, path in enumerate(keys_paths)
        for rows in _partition_rows(path, split, partition, partitions)
    ]
    rows = np.concatenate(parts) if parts else np.empty(0, _ROW_DTYPE)
    parts.clear()
    rows = _repeated(rows)
    ids = rows["id"].reshape(-1, 16).view(">u8")
    order = np.lexsort((ids[:, 1], ids[:, 0], rows["source"], rows["low"], rows["high"]))
    rows = rows[order]
    lost = np.zeros(len(rows), np.bool_)
    lost[1:] = (rows["high"][1:] == rows["high"][:-1]) & (rows["low"][1:] == rows["low"][:-1])
    losers = np.empty(int(lost.sum()), LOSER_DTYPE)
    for name in ("split", "row", "bytes"):
        losers[name] = rows[name][lost]
    losers[:] = losers[np.lexsort((losers["row"], losers["split"]))]
    return losers


def _partition_rows(path: Path, split: int, partition: int, partitions: int) -> list[npt.NDArray[np.void]]:
    keys = _open_keys(path)
    found = []
    for start in range(0, len(keys), _CHUNK_ROWS):
        chunk = keys[start : start + _CHUNK_ROWS]
        numbers = np.ascontiguousarray(chunk["key"]).view(">u8")
        high = numbers[:, 0].astype(np.uint64)
        mine = np.flatnonzero((high >> np.uint64(48)) * np.uint64(partitions) >> np.uint64(16) == partition)
        rows = np.empty(len(mine), _ROW_DTYPE)
        rows["high"], rows["low"] = high[mine], numbers[mine, 1]
        for name in ("id", "bytes", "source"):
            rows[name] = chunk[name][mine]
        rows["row"], rows["split"] = mine + start, split
        found.append(rows)
    return found


def _open_keys(path: Path) -> npt.NDArray[np.void]:
    if path.stat().st_size == _HEADER_BYTES:
        return np.empty(0, KEY_DTYPE)  # nothing to map
    keys: npt.NDArray[np.void] = np.load(path, mmap_mode="r")
    if keys.dtype != KEY_DTYPE:
        raise BuildError(f"{path}: not a file of keys; remove the work folder and build again")
    return keys


def _repeated(rows: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """The rows whose leading 64 bits occur more than once: usually few, and all that must be sorted fully."""
    order = np.argsort(rows["high"])
    high = rows["high"][order]
    same = high[1:] == high[:-1]
    shared = np.zeros(len(rows), np.bool_)
    shared[1:] |= same
    shared[:-1] |= same
    repeated: npt.NDArray[np.void] = rows[order[shared]]
    return repeated
