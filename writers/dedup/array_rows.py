"""Some rows of a large .npy file, read where they are: a map would count as memory for every page touched."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.errors import BuildError
from shardkit.writers.dedup.array_file import read_header
from shardkit.writers.execution.work_files import BinaryFile, open_file, read_into

__all__ = ["RowFile"]

_GAP_BYTES = 4096  # rows closer than this are read together: cheaper than one more call
_PIECE_BYTES = 1 << 20


class RowFile:
    """A .npy file of rows in C order. Holds no open file between calls."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start, shape, self.dtype = read_header(path)
        self.rows: int = shape[0]
        self.row_shape: tuple[int, ...] = shape[1:]
        self._row_bytes = int(np.prod(self.row_shape, dtype=np.int64)) * self.dtype.itemsize

    def read(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """[len(rows), ...]: these rows, which ascend strictly. BuildError if the file ends early."""
        found = np.empty((len(rows), self._row_bytes), np.uint8)
        apart = np.diff(rows) * self._row_bytes > _GAP_BYTES + self._row_bytes
        edges = [0, *(np.flatnonzero(apart) + 1).tolist(), len(rows)]
        with open_file(self._path) as file:
            for begin, end in pairwise(edges):
                self._read_together(file, rows[begin:end], found[begin:end])
        table: npt.NDArray[Any] = found.view(self.dtype).reshape(len(rows), *self.row_shape)
        return table

    def _read_together(
        self, file: BinaryFile, rows: npt.NDArray[np.int64], found: npt.NDArray[np.uint8]
    ) -> None:
        """Rows that lie close: all from the first to the last are read, a piece at a time."""
        most = max(1, _PIECE_BYTES // self._row_bytes)
        at = 0
        while at < len(rows):
            first = int(rows[at])
            stop = int(np.searchsorted(rows, first + most))
            count = int(rows[stop - 1]) - first + 1
            table = np.empty((count, self._row_bytes), np.uint8)
            file.seek(self._start + first * self._row_bytes)
            if read_into(file, table.reshape(-1).data) != table.nbytes:
                raise BuildError(f"{self._path}: ends early; remove the work folder and build again")
            found[at:stop] = table[rows[at:stop] - first]
            at = stop
