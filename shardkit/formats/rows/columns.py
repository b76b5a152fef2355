"""Name the types of Arrow columns, and convert the columns of a shard to arrays and strings.

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

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.formats.mds.encodings import ARRAY_DTYPES, constant_layout

NULLABLE = "|null"
NULL = "null"  # encoding of a column that has only nulls
IMAGE = "image"
VARYING = "ndarray:"  # how encodings of lists of numbers begin
_STRINGS = ("string", "large_string", "string_view")
_MAX_INT32 = (1 << 31) - 1
_BINARIES = ("binary", "large_binary", "binary_view")


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


@dataclass(frozen=True, slots=True)
class Ragged:
    """Lists of numbers of any length: row i is values[ends[i] : ends[i + 1]], or None unless there[i]."""

    values: npt.NDArray[Any]
    ends: npt.NDArray[np.int64]
    there: npt.NDArray[np.bool_] | None

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.ends.nbytes


@dataclass(frozen=True, slots=True)
class Strings:
    """Strings or bytes: row i is data[ends[i] : ends[i + 1]], or None unless there[i].

    Arrow's own access to a value takes five times as long.
    """

    data: memoryview
    ends: npt.NDArray[np.signedinteger[Any]]
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

    def values(self, rows: npt.NDArray[np.int64]) -> list[str | bytes | None]:
        """Return the values of some rows."""
        data, ends = self.data, self.ends
        spans = zip(ends[rows].tolist(), ends[rows + 1].tolist(), strict=True)
        found: list[str | bytes | None]
        if self.is_text:
            found = [str(data[start:stop], "utf-8") for start, stop in spans]
        else:
            found = [bytes(data[start:stop]) for start, stop in spans]
        if self.there is not None:
            for place in np.flatnonzero(~self.there[rows]).tolist():
                found[place] = None
        return found


def strings_of(column: Any, *, is_text: bool) -> Strings:
    """Return a column of strings or bytes of any of Arrow's types as `Strings`."""
    import pyarrow as pa

    small, large = (pa.string(), pa.large_string()) if is_text else (pa.binary(), pa.large_binary())
    kind = small if column.type == small and column.nbytes < _MAX_INT32 else large
    array = column.cast(kind).combine_chunks()  # without offsets of 64 bits, it could have 2 GB
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], kind)
    _, offsets, data = array.buffers()
    ends: npt.NDArray[np.signedinteger[Any]] = np.zeros(1, np.int64)
    if len(array):
        ends = np.frombuffer(offsets, np.int32) if kind == small else np.frombuffer(offsets, np.int64)
        ends = ends[array.offset : array.offset + len(array) + 1]
    there = array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None
    return Strings(memoryview(b"" if data is None else data).cast("B"), ends, there, is_text)


def dtype_in(encoding: str) -> np.dtype[Any]:
    """Return the dtype in the encoding of a column of arrays."""
    return np.dtype(encoding.removesuffix(NULLABLE).split(":")[1])


def plain(array: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    values: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False).astype(dtype, copy=False)
    values.flags.writeable = False
    return values
