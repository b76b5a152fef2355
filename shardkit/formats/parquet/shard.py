"""Read consecutive row groups of a Parquet file in place, as a shard.

A shard's bytes are ranges of the file, *pieces*, which hold the wanted columns of its row groups. pyarrow
reads them as a file whose other bytes are missing, with a footer of these row groups only. Columns are
decoded when one of their values is read first, and kept in memory until the shard is closed.

| Arrow type                        | encoding          | value of a sample                                |
|-----------------------------------|-------------------|--------------------------------------------------|
| integer, float                    | int64, …          | int, float; an array [rows] in batches           |
| fixed-size list of numbers        | ndarray:int64:512 | NumPy array; an array [rows, 512] in batches     |
| list of numbers                   | ndarray:int64     | NumPy array of any length                        |
| string, binary                    | str, bytes        | str, bytes                                       |
| struct of Hugging Face's `Image`  | image             | PIL image, or what `decode` says; else the struct |
| any other                         | its name in Arrow | what pyarrow's `to_pylist` returns               |

A null is None. A column of numbers or fixed-size lists with nulls has no array in batches: its encoding ends
with `|null`. Dictionary-encoded columns are read as the values that they stand for.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from os import PathLike
from threading import Lock
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import zstandard

from shardkit.arrays import Bytes
from shardkit.errors import ShardError
from shardkit.formats.budget import SampleBudget
from shardkit.formats.mds.encodings import ARRAY_DTYPES, constant_layout
from shardkit.formats.parquet.footer import MAX_FOOTER_BYTES, as_file
from shardkit.formats.tar.values import decode_member
from shardkit.formats.tokens import Piece
from shardkit.manifest import Column, ShardInfo

NULLABLE = "|null"
NULL = "null"  # encoding of a column that has only nulls
IMAGE = "image"
_VARYING = "ndarray:"
_STRINGS = ("string", "large_string", "string_view")
_BINARIES = ("binary", "large_binary", "binary_view")
_FEW_ROWS = 16  # fewer values are read one by one, because a call of Arrow takes some microseconds
# The first bytes of image files, and the extension by which webdataset's words select a decoder.
_IMAGE_STARTS = {b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"GIF8": "gif", b"BM": "bmp", b"RIFF": "webp"}


@dataclass(frozen=True, slots=True)
class ParquetPart:
    """The row groups of a file from `first` to `stop` (exclusive), which are a shard.

    `footer` is a footer of these row groups only, compressed with zstd.
    """

    file: str
    file_bytes: int
    first: int
    stop: int
    first_row: int
    """The number of the shard's first row in the file."""
    footer: bytes


def encodings_of(schema: Any) -> dict[str, str]:
    """Return the encoding of each top-level column of an Arrow schema. Raises ValueError for equal names."""
    found: dict[str, str] = {}
    images = _hugging_face_images(schema.metadata or {})
    for field in schema:
        if field.name in found:
            raise ValueError(f"two columns are called {field.name!r}")
        found[field.name] = IMAGE if field.name in images else _encoding(field.type)
    return found


def fixed_size(encoding: str) -> int | None:
    """Return the size in bytes of the values of an encoding; None if it varies."""
    layout = constant_layout(encoding)
    return None if layout is None else prod(layout[1]) * layout[0].itemsize


def _encoding(kind: Any) -> str:
    import pyarrow as pa

    if isinstance(kind, pa.FixedShapeTensorType) and _is_plain(kind) and (dtype := _dtype(kind.value_type)):
        return f"ndarray:{dtype}:{','.join(map(str, kind.shape))}"
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if dtype := _dtype(kind):
        return dtype
    for name, are in (("str", _STRINGS), ("bytes", _BINARIES)):
        if str(kind) in are or (name == "bytes" and pa.types.is_fixed_size_binary(kind)):
            return name
    is_fixed = pa.types.is_fixed_size_list(kind)
    is_list = is_fixed or pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not is_list or not (dtype := _dtype(kind.value_type)):
        return str(kind)
    return f"ndarray:{dtype}:{kind.list_size}" if is_fixed and kind.list_size else f"ndarray:{dtype}"


def _is_plain(kind: Any) -> bool:
    """Return whether the values of a tensor type are stored in the order of its shape."""
    order = kind.permutation
    return bool(kind.shape) and all(kind.shape) and (order is None or [*order] == [*range(len(kind.shape))])


def _dtype(kind: Any) -> str | None:
    import pyarrow as pa

    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return None
    name = np.dtype(kind.to_pandas_dtype()).name
    return name if name in ARRAY_DTYPES.values() else None


def _hugging_face_images(metadata: Mapping[bytes, bytes]) -> set[str]:
    """Return the columns that the metadata which `datasets` writes call images."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return {name for name, what in features.items() if what.get("_type") == "Image"}
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return set()


class _Pieces(io.RawIOBase):
    """A file of which only some ranges of bytes are there; reading others is an error."""

    def __init__(self, size: int, parts: Sequence[tuple[int, Bytes]]) -> None:
        """`parts`: (offset in the file, bytes) of each range."""
        self._size, self._parts, self._at = size, parts, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read_buffer(self, count: int) -> Any:
        """Return the next bytes as an Arrow buffer, without a copy; pyarrow calls this method."""
        import pyarrow as pa

        return pa.py_buffer(self._next(count))

    def read(self, count: int | None = -1, /) -> bytes:
        return self._next(self._size if count is None or count < 0 else count).tobytes()

    def _next(self, count: int) -> Bytes:
        count = min(count, self._size - self._at)
        for start, data in self._parts:
            if start <= self._at and self._at + count <= start + len(data):
                found = data[self._at - start : self._at - start + count]
                self._at += count
                return found
        raise OSError(f"bytes {self._at:,} to {self._at + count:,} do not belong to these columns")


@dataclass(frozen=True, slots=True)
class _Ragged:
    """Lists of numbers of any length: row i is values[ends[i] : ends[i + 1]], or None unless there[i]."""

    values: npt.NDArray[Any]
    ends: npt.NDArray[np.int64]
    there: npt.NDArray[np.bool_] | None

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.ends.nbytes


@dataclass(frozen=True, slots=True)
class _Strings:
    """Strings or bytes: row i is data[ends[i] : ends[i + 1]], or None unless there[i].

    Arrow's own access to a value takes five times as long.
    """

    data: memoryview
    ends: memoryview
    there: npt.NDArray[np.bool_] | None
    is_text: bool

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.ends.nbytes

    def value(self, row: int) -> str | bytes | None:
        if self.there is not None and not self.there[row]:
            return None
        found = self.data[self.ends[row] : self.ends[row + 1]]
        return str(found, "utf-8") if self.is_text else bytes(found)


class ParquetShard:
    """An open shard of a Parquet file; safe to share among threads."""

    def __init__(
        self,
        where: str | PathLike[str],
        info: ShardInfo,
        part: ParquetPart,
        parts: Sequence[tuple[int, Bytes]],
        *,
        decode: bool | str = True,
    ) -> None:
        """`parts`: (offset in the file, bytes) of each piece. Errors name `where`, the file."""
        self.info = info
        self._where, self._part, self._decode = where, part, decode
        self._parts = list(parts)
        self._encodings = {column.name: column.encoding for column in info.columns}
        self._columns: dict[str, Any] = {}
        self._file: Any = None
        self._lock = Lock()

    def __len__(self) -> int:
        return self.info.samples

    @property
    def columns(self) -> tuple[Column, ...]:
        return self.info.columns

    @property
    def resident_bytes(self) -> int:
        """The memory that the decoded columns take, in bytes."""
        return sum(column.nbytes for column in list(self._columns.values()))

    def sample(self, row: int, columns: Container[str] | None = None) -> dict[str, object]:
        """Return {column: value} of one row, of `columns` only if they are given.

        Raises IndexError unless 0 <= row < len, and ShardError if the values cannot be read.
        """
        if not 0 <= row < len(self):
            raise IndexError(f"{os.fspath(self._where)}: no row {row}; the shard has {len(self)} rows")
        names = [name for name in self._encodings if columns is None or name in columns]
        try:
            return {name: self._value(name, row) for name in names}
        except ValueError as error:  # a string is not UTF-8, an image is damaged, a time has nanoseconds
            raise self._error(row, str(error)) from error

    def values(self, column: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any] | list[Any]:
        """Return a column of some rows: an array if `fixed_rows` has one, else a list as of `sample`.

        Raises ValueError or ShardError if a value cannot be read; `sample` says of which row.
        """
        found = self._decoded(column)
        if isinstance(found, np.ndarray):
            return cast(npt.NDArray[Any], found[rows])
        if isinstance(found, _Strings):
            return [found.value(row) for row in rows.tolist()]
        if isinstance(found, _Ragged) or len(rows) < _FEW_ROWS or self._is_converted(column):
            return [self._value(column, row) for row in rows.tolist()]
        return cast(list[Any], found.take(rows).to_pylist())

    def fixed_rows(self, column: str) -> npt.NDArray[Any] | None:
        """Return a read-only array (rows, *shape) of a column; None if its values vary in size."""
        if column not in self._encodings:
            have = ", ".join(self._encodings)
            raise KeyError(f"{os.fspath(self._where)}: no column {column!r}; columns: {have}")
        found = self._decoded(column)
        return found if isinstance(found, np.ndarray) else None

    def arrow(self, column: str) -> Any:
        """Return a column as one Arrow array, strings as large_string. Raises ShardError if it is damaged."""
        import pyarrow as pa

        found = self._column(column)
        if pa.types.is_dictionary(found.type):
            found = found.cast(found.type.value_type)
        if self._encodings[column] == "str":
            found = found.cast(pa.large_string())
        array = found.combine_chunks()
        if not isinstance(array, pa.ChunkedArray):
            return array
        return pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], found.type)

    def close(self) -> None:
        """Drop the decoded columns and the map; arrays returned earlier stay readable."""
        with self._lock:
            self._columns, self._parts, self._file = {}, [], None

    def _value(self, name: str, row: int) -> object:
        found = self._decoded(name)
        if isinstance(found, np.ndarray):
            return found[row].item() if found.ndim == 1 else found[row].copy()
        if isinstance(found, _Ragged):
            if found.there is not None and not found.there[row]:
                return None
            return found.values[found.ends[row] : found.ends[row + 1]].copy()
        if isinstance(found, _Strings):
            return found.value(row)
        value = found[row].as_py()
        if value is None or not self._is_converted(name):
            return cast(object, value)
        encoding = self._encodings[name]
        return self._image(name, value) if encoding == IMAGE else np.array(value, _dtype_in(encoding))

    def _is_converted(self, name: str) -> bool:
        """Return whether the values of a column are made from those of its Arrow array."""
        encoding = self._encodings[name]
        if encoding == IMAGE:
            return self._decode not in (False, "basic")
        return encoding.startswith(_VARYING) and encoding.endswith(NULLABLE)

    def _image(self, name: str, value: Mapping[str, Any]) -> object:
        data = value.get("bytes")
        if data is None:
            problem = f"column {name!r} names the image file {value.get('path')!r:.200} and does not hold it"
            raise ValueError(f"{problem}; embed images before writing Parquet, as push_to_hub does")
        kind = next((kind for start, kind in _IMAGE_STARTS.items() if data.startswith(start)), "tiff")
        try:
            return decode_member(kind, memoryview(data), decode=self._decode, budget=SampleBudget(len(data)))
        except ValueError as error:
            raise ValueError(f"column {name!r}: {error}") from error

    def _decoded(self, name: str) -> Any:
        found = self._columns.get(name)
        if found is None:
            with self._lock:
                found = self._columns.get(name)
                if found is None:
                    found = self._columns[name] = self._read(name)
        return found

    def _read(self, name: str) -> Any:
        """Decode a column to an array, `_Ragged`, or an Arrow array. Raises ShardError if it is damaged."""
        column = self._column(name)
        try:
            return self._converted(name, column)
        except (ArithmeticError, ValueError) as error:  # pyarrow's errors are ValueErrors, too
            raise self._unreadable(error) from error

    def _column(self, name: str) -> Any:
        """Return a column as Arrow's `ChunkedArray`. Raises ShardError if it is damaged."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        part = self._part
        try:
            if self._file is None:
                metadata = pq.read_metadata(as_file(zstandard.decompress(part.footer, MAX_FOOTER_BYTES)))
                source = _Pieces(part.file_bytes, self._parts)
                self._file = pq.ParquetFile(source, metadata=metadata, pre_buffer=False)
            groups = list(range(part.stop - part.first))
            column = self._file.read_row_groups(groups, columns=[name], use_threads=False).column(name)
            if len(column) != len(self):
                raise ValueError(f"column {name!r} has {len(column):,} rows, the footer states {len(self):,}")
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            raise self._unreadable(error) from error
        return column

    def _unreadable(self, error: Exception) -> ShardError:
        groups = _groups(self._part.first, self._part.stop)
        problem = f"{groups} cannot be read: {' '.join(str(error).split())}; fetch the file again"
        return ShardError(self._where, problem)

    def _converted(self, name: str, column: Any) -> Any:
        import pyarrow as pa

        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        encoding = self._encodings[name]
        layout = constant_layout(encoding)
        if encoding in ("str", "bytes"):
            return _strings(column, is_text=encoding == "str")
        if layout is None and not encoding.startswith(_VARYING):
            return column
        array = column.combine_chunks()
        if isinstance(array, pa.ChunkedArray):
            array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], column.type)
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        if layout is not None and array.null_count:
            row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
            raise self._error(row, f"column {name!r} is null, although its statistics state no nulls")
        if layout is not None and not layout[1]:
            return _plain(array, layout[0])
        if encoding.endswith(NULLABLE):
            return column
        return self._list(name, array, layout)

    def _list(self, name: str, array: Any, layout: tuple[np.dtype[Any], tuple[int, ...]] | None) -> Any:
        import pyarrow as pa

        values = array.flatten()
        if values.null_count and not pa.types.is_floating(values.type):
            raise ValueError(f"column {name!r} has nulls inside of its lists")
        dtype = _dtype_in(self._encodings[name])
        if layout is not None and pa.types.is_fixed_size_list(array.type):
            return _plain(values, dtype).reshape(len(self), *layout[1])
        lengths = array.value_lengths()
        there = None if not array.null_count else array.is_valid().to_numpy(zero_copy_only=False)
        counts = lengths.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        if layout is not None:
            [length] = layout[1]
            if len(wrong := np.flatnonzero(counts != length)):
                row = int(wrong[0])
                found = f"column {name!r} has {int(counts[row]):,} values, not sequence_length={length:,}"
                raise self._error(row, found)
            return _plain(values, dtype).reshape(len(self), length)
        ends = np.zeros(len(self) + 1, np.int64)
        np.cumsum(counts, out=ends[1:])
        return _Ragged(_plain(values, dtype), ends, there)

    def _error(self, row: int, problem: str) -> ShardError:
        return ShardError(self._where, f"row {self._part.first_row + row:,}: {problem}")


def _strings(column: Any, *, is_text: bool) -> _Strings:
    import pyarrow as pa

    kind = pa.large_string() if is_text else pa.large_binary()
    array = column.cast(kind).combine_chunks()  # offsets of 64 bits, because chunks may have 2 GB each
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], kind)
    _, offsets, data = array.buffers()
    ends = np.zeros(1, np.int64)
    if len(array):
        ends = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    there = array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None
    return _Strings(memoryview(b"" if data is None else data).cast("B"), ends.data, there, is_text)


def _dtype_in(encoding: str) -> np.dtype[Any]:
    """Return the dtype in the encoding of a column of arrays."""
    return np.dtype(encoding.removesuffix(NULLABLE).split(":")[1])


def _plain(array: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    values: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False).astype(dtype, copy=False)
    values.flags.writeable = False
    return values


def _groups(first: int, stop: int) -> str:
    return f"row group {first}" if stop - first == 1 else f"row groups {first} to {stop - 1}"


def split_pieces(pieces: Sequence[Piece], raw: Bytes) -> list[tuple[int, Bytes]]:
    """Return (offset in the file, bytes) of each piece of a shard whose concatenated bytes are `raw`."""
    found, at = [], 0
    for piece in pieces:
        found.append((piece.start, raw[at : at + piece.bytes]))
        at += piece.bytes
    return found
