"""Tables on disk that are larger than memory: .npy files, written row by row and read in slices.

`numpy.load` reads a whole file, and the pages of a mapped file count as memory of the process that touches
them. `Rows` and `RowFile` read only the requested rows, and keep neither bytes nor an open file between calls
(except inside a `with` block), so that a task may use ten thousand files. Files without a header
(`pairs.bin`) are read the same way.

A file may come from an untrusted source (an index): its header is accepted only if the file has exactly the
size that its dtype and shape require, so that no row number is outside the file.
"""

from __future__ import annotations

import io
import math
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from shardkit.errors import BuildError
from shardkit.writers.execution.artifacts import Artifact, BinaryFile, read_into

CHUNK_ROWS = 1 << 16  # rows per read when a whole table is read: a few megabytes

_READ_BYTES = 1 << 20

_CLOSE_ROWS = 256

HEADER_BYTES = 512  # fits all dtypes used here and any row count, so that the header can be written last


class RowsWriter:
    """Writes a .npy file whose number of rows is known only at the end, with `width` values per row."""

    def __init__(self, path: Path, dtype: npt.DTypeLike, *, width: int | None = None) -> None:
        self.dtype = np.dtype(dtype)
        self.rows = 0
        self._shape = () if width is None else (width,)
        self._file = path.open("wb")
        self._file.write(bytes(HEADER_BYTES))

    def write(self, rows: npt.NDArray[Any]) -> None:
        """Append rows of exactly this dtype and width."""
        assert rows.dtype == self.dtype, rows.dtype
        assert rows.shape[1:] == self._shape, rows.shape
        self._file.write(np.ascontiguousarray(rows).data if len(rows) else b"")
        self.rows += len(rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            descr = np.lib.format.dtype_to_descr(self.dtype)
            fields = {"descr": descr, "fortran_order": False, "shape": (self.rows, *self._shape)}
            header = repr(fields).encode().ljust(HEADER_BYTES - 11) + b"\n"
            start = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
            assert len(start) == HEADER_BYTES
            self._file.seek(0)
            self._file.write(start)


class Rows:
    """Reads the rows of one file in slices; `len()` is the number of rows."""

    def __init__(self, file: Artifact, dtype: npt.DTypeLike, *, header: bool = True) -> None:
        self.artifact = file
        self.dtype = np.dtype(dtype)
        self._file: BinaryFile | None = None
        self._begin = 0
        if header:
            self._begin, self._rows = self._read_header()
        else:
            self._rows = file.size() // self.dtype.itemsize

    def __len__(self) -> int:
        return self._rows

    def __enter__(self) -> Self:
        """Keep the file open, for many small reads."""
        self._file = self.artifact.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None
        self._file.close()
        self._file = None

    def read(self, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        """Return a new array of rows [start, stop). Raises BuildError if the file is too short."""
        rows = np.empty((self._rows if stop is None else stop) - start, self.dtype)
        if self._file is not None:
            self._read_into(rows, start)
        elif len(rows):
            with self:
                self._read_into(rows, start)
        return rows

    def sample(self, start: int, stop: int, step: int) -> npt.NDArray[Any]:
        """Return rows start, start + step, … below stop; rows close to each other share a read."""
        wanted = range(start, stop, step)
        rows = np.empty(len(wanted), self.dtype)
        at_once = max(1, _READ_BYTES // (step * self.dtype.itemsize)) if step <= _CLOSE_ROWS else 1
        with self:
            for at in range(0, len(wanted), at_once):
                some = wanted[at : at + at_once]
                rows[at : at + len(some)] = self.read(some[0], some[-1] + 1)[::step]
        return rows

    def _read_into(self, rows: npt.NDArray[Any], start: int) -> None:
        assert 0 <= start <= start + len(rows) <= self._rows, (self.artifact, start, len(rows), self._rows)
        offset = self._begin + start * self.dtype.itemsize
        if not len(rows):
            return
        assert self._file is not None
        self._file.seek(offset)
        if read_into(self._file, rows.view(np.uint8).data) != rows.nbytes:
            raise BuildError(f"{self.artifact}: is shorter than its header says; {self.artifact.remedy}")

    def _read_header(self) -> tuple[int, int]:
        begin, shape, dtype = read_header(self.artifact)
        if dtype != self.dtype or len(shape) != 1:
            raise BuildError(
                f"{self.artifact}: has rows of {dtype}, expected {self.dtype}; {self.artifact.remedy}"
            )
        return begin, shape[0]


def read_header(table: Artifact) -> tuple[int, tuple[int, ...], np.dtype[Any]]:
    """Return (offset of the rows, shape, dtype) of a .npy file in C order. Raises BuildError if not."""
    with table.open() as file:
        try:
            version = np.lib.format.read_magic(file)
            if version != (1, 0):
                raise ValueError(f"version {version}")
            header = np.lib.format.read_array_header_1_0(file)
        except OSError:
            raise
        except (
            Exception
        ) as error:  # NumPy's parser also raises errors of Python's parser: TokenError, SyntaxError
            raise BuildError(f"{table}: is not a valid .npy table: {error}; {table.remedy}") from None
        begin = file.tell()
        size = file.seek(0, io.SEEK_END)
    shape: tuple[int, ...] = header[0]
    dtype: np.dtype[Any] = header[2]
    if (header[1] and len(shape) > 1) or not shape or min(shape) < 0:
        raise BuildError(f"{table}: is not a table of rows in C order: shape {shape}; {table.remedy}")
    if begin + math.prod(shape) * dtype.itemsize != size:
        raise BuildError(f"{table}: is {size:,} bytes, its header says {shape} of {dtype}; {table.remedy}")
    return begin, shape, dtype


_GAP_BYTES = 64 << 10  # rows with a smaller gap between them are read together: cheaper than two reads

_PIECE_BYTES = 1 << 20


class RowFile:
    """Reads any rows of a .npy file in C order; holds no open file between calls.

    `header` is an earlier result of `read_header` for the file.
    """

    def __init__(
        self, table: Artifact, header: tuple[int, tuple[int, ...], np.dtype[Any]] | None = None
    ) -> None:
        self._artifact = table
        self._start, shape, self.dtype = read_header(table) if header is None else header
        self.rows: int = shape[0]
        self.row_shape: tuple[int, ...] = shape[1:]
        self._row_bytes = int(np.prod(self.row_shape, dtype=np.int64)) * self.dtype.itemsize

    def read(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return these rows, whose numbers must ascend strictly. Raises BuildError if the file ends early."""
        found = np.empty((len(rows), self._row_bytes), np.uint8)
        apart = np.diff(rows) * self._row_bytes > _GAP_BYTES + self._row_bytes
        edges = [0, *(np.flatnonzero(apart) + 1).tolist(), len(rows)]
        places, data, size = rows.tolist(), found.reshape(-1).data, self._row_bytes
        with self._artifact.open() as file:
            for begin, end in pairwise(edges):
                if end - begin > 1:
                    self._read_together(file, rows[begin:end], found[begin:end])
                elif end > begin:  # a fast path of a few microseconds: hubs read millions of scattered rows
                    self._read_at(file, places[begin], data[begin * size : end * size])
        table: npt.NDArray[Any] = found.view(self.dtype).reshape(len(rows), *self.row_shape)
        return table

    def _read_together(
        self, file: BinaryFile, rows: npt.NDArray[np.int64], found: npt.NDArray[np.uint8]
    ) -> None:
        """Fill `found` with rows close to each other, reading all from the first to the last in pieces."""
        most = max(1, _PIECE_BYTES // self._row_bytes)
        at = 0
        while at < len(rows):
            first = int(rows[at])
            stop = int(np.searchsorted(rows, first + most))
            count = int(rows[stop - 1]) - first + 1
            table = np.empty((count, self._row_bytes), np.uint8)
            self._read_at(file, first, table.reshape(-1).data)
            found[at:stop] = table[rows[at:stop] - first]
            at = stop

    def _read_at(self, file: BinaryFile, row: int, data: memoryview) -> None:
        file.seek(self._start + row * self._row_bytes)
        if read_into(file, data) != len(data):
            raise BuildError(f"{self._artifact}: is shorter than its header says; {self._artifact.remedy}")
