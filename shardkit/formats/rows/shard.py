"""Read a shard of a row file: its columns are decoded when one of their values is read first, and kept."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from threading import Lock
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from shardkit.errors import ShardError
from shardkit.formats.budget import SampleBudget
from shardkit.formats.mds.encodings import constant_layout
from shardkit.formats.rows.columns import (
    IMAGE,
    NULLABLE,
    VARYING,
    Ragged,
    Strings,
    dtype_in,
    plain,
    strings_of,
)
from shardkit.formats.rows.contract import Pieces, ReadColumns, RowPart
from shardkit.formats.tar.values import decode_member
from shardkit.limits import usable_cores
from shardkit.manifest import Column, ShardInfo

_DECODING_THREADS = 4
_FEW_ROWS = 16  # fewer values are read one by one, because a call of Arrow takes some microseconds
# The first bytes of image files, and the extension by which webdataset's words select a decoder.
_IMAGE_STARTS = {b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"GIF8": "gif", b"BM": "bmp", b"RIFF": "webp"}


class RowShard:
    """An open shard of a row file; safe to share among threads."""

    def __init__(
        self,
        where: str | PathLike[str],
        info: ShardInfo,
        part: RowPart,
        pieces: Pieces,
        *,
        decode: bool | str = True,
    ) -> None:
        """`pieces` are the bytes of the shard. Errors name `where`, the file."""
        self.info = info
        self._where, self._part, self._decode = where, part, decode
        self._pieces = list(pieces)
        self._encodings = {column.name: column.encoding for column in info.columns}
        self._columns: dict[str, Any] = {}
        self._reader: ReadColumns | None = None
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

    def has_decoded(self, names: Iterable[str]) -> bool:
        """Return whether these columns are decoded, so that reading their values is fast."""
        return self._columns.keys() >= set(names)

    def decode(self, names: Iterable[str]) -> None:
        """Decode columns. Raises ShardError if one is damaged."""
        with self._lock:
            missing = [name for name in names if name not in self._columns]
            for name, column in self._read_columns(missing).items() if missing else ():
                self._columns[name] = self._converted(name, column)

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
            return cast("npt.NDArray[Any]", found[rows])
        if isinstance(found, Strings):
            return found.values(rows)
        if isinstance(found, Ragged) or len(rows) < _FEW_ROWS or self._is_converted(column):
            return [self._value(column, row) for row in rows.tolist()]
        return cast("list[Any]", found.take(rows).to_pylist())

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

        found = self._read_columns([column])[column]
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
            self._columns, self._pieces, self._reader = {}, [], None

    def _value(self, name: str, row: int) -> object:
        found = self._decoded(name)
        if isinstance(found, np.ndarray):
            return found[row].item() if found.ndim == 1 else found[row].copy()
        if isinstance(found, Ragged):
            if found.there is not None and not found.there[row]:
                return None
            return found.values[found.ends[row] : found.ends[row + 1]].copy()
        if isinstance(found, Strings):
            return found.value(row)
        value = found[row].as_py()
        if value is None or not self._is_converted(name):
            return cast(object, value)
        encoding = self._encodings[name]
        return self._image(name, value) if encoding == IMAGE else np.array(value, dtype_in(encoding))

    def _is_converted(self, name: str) -> bool:
        """Return whether the values of a column are made from those of its Arrow array."""
        encoding = self._encodings[name]
        if encoding == IMAGE:
            return self._decode not in (False, "basic")
        return encoding.startswith(VARYING) and encoding.endswith(NULLABLE)

    def _image(self, name: str, value: Mapping[str, Any]) -> object:
        data = value.get("bytes")
        if data is None:
            problem = f"column {name!r} names the image file {value.get('path')!r:.200} and does not hold it"
            raise ValueError(f"{problem}; embed images in the files, as push_to_hub does")
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
                    column = self._read_columns([name])[name]
                    found = self._columns[name] = self._converted(name, column)
        return found

    def _read_columns(self, names: Sequence[str]) -> Mapping[str, Any]:
        """Return columns as Arrow's `ChunkedArray`. Raises ShardError if one is damaged."""
        import pyarrow as pa

        try:
            if self._reader is None:
                self._reader = self._part.open(self._pieces)
            columns = self._reader(names)
            for name, column in columns.items():
                if len(column) != len(self):
                    raise ValueError(f"column {name!r} has {len(column):,} rows, not {len(self):,} as stated")
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            raise self._unreadable(error) from error
        return columns

    def _unreadable(self, error: Exception) -> ShardError:
        problem = f"{self._part.title} cannot be read: {' '.join(str(error).split())}; fetch the file again"
        return ShardError(self._where, problem)

    def _converted(self, name: str, column: Any) -> Any:
        """Return a column as an array, `Strings`, `Ragged` or as it is. Raises ShardError if damaged."""
        try:
            return self._convert(name, column)
        except (ArithmeticError, ValueError) as error:  # pyarrow's errors are ValueErrors, too
            raise self._unreadable(error) from error

    def _convert(self, name: str, column: Any) -> Any:
        import pyarrow as pa

        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        encoding = self._encodings[name]
        layout = constant_layout(encoding)
        if encoding in ("str", "bytes"):
            return strings_of(column, is_text=encoding == "str")
        if layout is None and not encoding.startswith(VARYING):
            return column
        array = column.combine_chunks()
        if isinstance(array, pa.ChunkedArray):
            array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], column.type)
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        if layout is not None and array.null_count:
            row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
            raise self._error(row, f"column {name!r} is null, although the file states no nulls")
        if layout is not None and not layout[1]:
            return plain(array, layout[0])
        if encoding.endswith(NULLABLE):
            return column
        return self._list(name, array, layout)

    def _list(self, name: str, array: Any, layout: tuple[np.dtype[Any], tuple[int, ...]] | None) -> Any:
        import pyarrow as pa

        values = array.flatten()
        if values.null_count and not pa.types.is_floating(values.type):
            raise ValueError(f"column {name!r} has nulls inside of its lists")
        dtype = dtype_in(self._encodings[name])
        if layout is not None and pa.types.is_fixed_size_list(array.type):
            return plain(values, dtype).reshape(len(self), *layout[1])
        lengths = array.value_lengths()
        there = None if not array.null_count else array.is_valid().to_numpy(zero_copy_only=False)
        counts = lengths.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        if layout is not None:
            [length] = layout[1]
            if len(wrong := np.flatnonzero(counts != length)):
                row = int(wrong[0])
                found = f"column {name!r} has {int(counts[row]):,} values, not sequence_length={length:,}"
                raise self._error(row, found)
            return plain(values, dtype).reshape(len(self), length)
        ends = np.zeros(len(self) + 1, np.int64)
        np.cumsum(counts, out=ends[1:])
        return Ragged(plain(values, dtype), ends, there)

    def _error(self, row: int, problem: str) -> ShardError:
        return ShardError(self._where, f"row {self._part.first_row + row:,}: {problem}")


def decode_together(shards: Sequence[RowShard], names: Sequence[str]) -> None:
    """Decode columns of several shards in threads, because decoders do not hold the interpreter's lock.

    Raises ShardError if one is damaged.
    """
    missing = [shard for shard in shards if not shard.has_decoded(names)]
    if len(missing) > 1:
        threads = min(len(missing), _DECODING_THREADS, usable_cores())
        with ThreadPoolExecutor(threads, thread_name_prefix="shardkit-decode") as pool:
            list(pool.map(lambda shard: shard.decode(names), missing))
