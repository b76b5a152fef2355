"""The `ndarray` encodings of MDS: what each array states about itself, and what its column states.

    ndarray:dtype:shape   values
    ndarray:dtype         byte ndim << 2 | c, dims, values      (c: 0, 1, 2, 3 for u8, u16, u32, u64 dims)
    ndarray               byte dtype, byte ndim << 2 | c, dims, values

Values are little-endian in C order. Sizes are computed with Python's integers and must come out exactly, so a
header with absurd dimensions is refused before anything is allocated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ARRAY_DTYPES", "ArrayLayout", "parse_array_layout"]

# The byte that stands for a dtype.
ARRAY_DTYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
_DTYPE_BYTES = {name: byte for byte, name in ARRAY_DTYPES.items()}
MAX_AXES = 32  # the header has room for 63; NumPy 1 stops at 32
_MAX_COLUMN_BYTES = (1 << 32) - 1  # a sample lies inside a shard, which u32 offsets limit


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """What the column fixes: its dtype, or its dtype and shape, or nothing."""

    dtype: np.dtype[Any] | None
    shape: tuple[int, ...] | None

    @property
    def size(self) -> int | None:
        """Bytes of every array, when the column fixes them."""
        if self.dtype is None or self.shape is None:
            return None
        return math.prod(self.shape) * self.dtype.itemsize

    def encode(self, value: object) -> bytes:
        """Header and values; ValueError for another dtype or shape than the column's."""
        if not isinstance(value, np.ndarray):
            raise TypeError(f"ndarray takes a NumPy array, not {type(value).__name__}")
        name = value.dtype.name
        if name not in _DTYPE_BYTES:
            raise ValueError(f"arrays of {name} cannot be stored; known: {', '.join(_DTYPE_BYTES)}")
        if not 1 <= value.ndim <= MAX_AXES or value.size == 0:
            raise ValueError(f"an array needs 1 to {MAX_AXES} axes and one element, not shape {value.shape}")
        header = b""
        if self.dtype is None:
            header = bytes([_DTYPE_BYTES[name]])
        elif name != self.dtype.name:
            raise ValueError(f"array of {name} in a column of {self.dtype.name}")
        if self.shape is None:
            header += _encode_shape(value.shape)
        elif value.shape != self.shape:
            raise ValueError(f"array of shape {value.shape} in a column of shape {self.shape}")
        return header + value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()

    def decode(self, data: memoryview) -> npt.NDArray[Any]:
        """A fresh array; ValueError if the header and the number of bytes disagree."""
        start, dtype, shape = 0, self.dtype, self.shape
        if dtype is None:
            if len(data) < 1 or data[0] not in ARRAY_DTYPES:
                raise ValueError(f"array with an unknown dtype byte: {data[0] if len(data) else 'none'}")
            start, dtype = 1, _little(ARRAY_DTYPES[data[0]])
        if shape is None:
            start, shape = _decode_shape(data, start)
        if math.prod(shape) * dtype.itemsize != len(data) - start:
            raise ValueError(
                f"array of {dtype.name} and shape {shape} does not fill {len(data) - start:,} bytes"
            )
        values: npt.NDArray[Any] = np.frombuffer(data[start:], dtype).reshape(shape).copy()
        return values


def parse_array_layout(details: str) -> ArrayLayout:
    """The layout that stands behind `ndarray:` in an encoding; ValueError if it makes no sense."""
    if not details:
        return ArrayLayout(None, None)
    dtype, colon, dims = details.partition(":")
    if dtype not in _DTYPE_BYTES:
        raise ValueError(f"unknown dtype {dtype!r} in ndarray:{details}; known: {', '.join(_DTYPE_BYTES)}")
    if not colon:
        return ArrayLayout(_little(dtype), None)
    parts = dims.split(",")
    if len(parts) > MAX_AXES or not all(p.isascii() and p.isdigit() and len(p) <= 10 for p in parts):
        raise ValueError(f"bad shape {dims[:80]!r} in ndarray:{dtype}; write dimensions as 3,4")
    layout = ArrayLayout(_little(dtype), tuple(int(part) for part in parts))
    if not 1 <= (layout.size or 0) <= _MAX_COLUMN_BYTES:
        raise ValueError(f"shape {dims!r} in ndarray:{dtype} must hold 1 byte to 4 GiB")
    return layout


def _little(name: str) -> np.dtype[Any]:
    return np.dtype(name).newbyteorder("<")


def _encode_shape(shape: tuple[int, ...]) -> bytes:
    code = next(c for c in range(4) if max(shape) < 1 << (8 << c))
    return bytes([len(shape) << 2 | code]) + np.array(shape, _little(f"uint{8 << code}")).tobytes()


def _decode_shape(data: memoryview, start: int) -> tuple[int, tuple[int, ...]]:
    """(where the values begin, shape)"""
    if start >= len(data):
        raise ValueError("array without a shape")
    axes, code = data[start] >> 2, data[start] & 3
    end = start + 1 + (axes << code)
    if axes > MAX_AXES or end > len(data):
        raise ValueError(f"array header states {axes} axes; it has room for {len(data) - start - 1:,} bytes")
    dims = np.frombuffer(data[start + 1 : end], _little(f"uint{8 << code}"))
    return end, tuple(int(dim) for dim in dims)
