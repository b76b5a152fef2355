"""Encode values of MDS columns as bytes, and decode them.

`encoding_of("ndarray:uint16:2048")` returns an `Encoding`: its fixed size (None if each sample records its
own) and two functions. All numbers are little-endian. `encode` raises ValueError or TypeError for a value
that does not fit its column: nothing is silently rounded, wrapped or cut (except that floats are rounded to
the nearest value). `decode` raises ValueError for bytes that are not a value of the column; it never reads
outside its slice and allocates no more than a small multiple of it. Decoded types are MosaicML's: `int` is a
Python int, `uint16` a NumPy scalar; arrays are copies, so they are writable.

Either the column fixes the dtype and shape of its arrays, or each array records them:

    ndarray:dtype:shape   values
    ndarray:dtype         byte ndim << 2 | c, dims, values      (c: 0, 1, 2, 3 for u8, u16, u32, u64 dims)
    ndarray               byte dtype, byte ndim << 2 | c, dims, values

Values are little-endian in C order. Sizes are computed with Python's integers and must match exactly, so a
header with absurd dimensions is refused before anything is allocated.
"""

from __future__ import annotations

import json
import math
import operator
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.files import load_json
from shardkit.formats.budget import SampleBudget, json_bytes, text_bytes
from shardkit.formats.mds import images

# Maps the byte in an array's header to the dtype that it encodes.
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

MAX_AXES = 32  # limit of NumPy 1; the header could encode up to 63

_MAX_COLUMN_BYTES = (1 << 32) - 1  # the limit of a shard, because its offsets are u32


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """The dtype and shape that a column fixes for all its arrays; None if each array records its own."""

    dtype: np.dtype[Any] | None
    shape: tuple[int, ...] | None

    @property
    def size(self) -> int | None:
        """Size of every array in bytes; None if the column does not fix it."""
        if self.dtype is None or self.shape is None:
            return None
        return math.prod(self.shape) * self.dtype.itemsize

    def encode(self, value: object) -> bytes:
        """Encode an array as header and values. Raises ValueError if it has another dtype or shape."""
        if not isinstance(value, np.ndarray):
            raise TypeError(f"ndarray takes a NumPy array, not {type(value).__name__}")
        name = value.dtype.name
        if name not in _DTYPE_BYTES:
            raise ValueError(f"arrays of {name} cannot be stored; known: {', '.join(_DTYPE_BYTES)}")
        if not 1 <= value.ndim <= MAX_AXES or value.size == 0:
            raise ValueError(f"an array needs 1 to {MAX_AXES} axes and an element, not shape {value.shape}")
        header = b""
        if self.dtype is None:
            header = bytes([_DTYPE_BYTES[name]])
        elif name != self.dtype.name:
            raise ValueError(f"the column takes arrays of {self.dtype.name}, not of {name}")
        if self.shape is None:
            header += encode_shape(value.shape)
        elif value.shape != self.shape:
            raise ValueError(f"the column takes arrays of shape {self.shape}, not of shape {value.shape}")
        return header + value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()

    def decode(self, data: memoryview) -> npt.NDArray[Any]:
        """Decode into a new array. Raises ValueError if the header and the number of bytes disagree."""
        start, dtype, shape = 0, self.dtype, self.shape
        if dtype is None:
            if len(data) < 1 or data[0] not in ARRAY_DTYPES:
                raise ValueError(f"an array has an unknown dtype byte: {data[0] if len(data) else 'none'}")
            start, dtype = 1, _little(ARRAY_DTYPES[data[0]])
        if shape is None:
            start, shape = _decode_shape(data, start)
        if math.prod(shape) * dtype.itemsize != len(data) - start:
            raise ValueError(
                f"an array of {dtype.name} and shape {shape} does not fill {len(data) - start:,} bytes"
            )
        values: npt.NDArray[Any] = np.frombuffer(data[start:], dtype).reshape(shape).copy()
        return values


def parse_array_layout(details: str) -> ArrayLayout:
    """Parse the text after `ndarray:` in an encoding. Raises ValueError if it is malformed."""
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
        raise ValueError(f"arrays of shape {dims!r} in ndarray:{dtype} must have 1 byte to 4 GiB")
    return layout


def _little(name: str) -> np.dtype[Any]:
    return np.dtype(name).newbyteorder("<")


def encode_shape(shape: tuple[int, ...]) -> bytes:
    """Encode a shape, which precedes an array's values if the column does not fix it."""
    code = next(c for c in range(4) if max(shape) < 1 << (8 << c))
    return bytes([len(shape) << 2 | code]) + np.array(shape, _little(f"uint{8 << code}")).tobytes()


def _decode_shape(data: memoryview, start: int) -> tuple[int, tuple[int, ...]]:
    """Return (offset of the values, shape) of the array whose encoded shape is at `start`."""
    if start >= len(data):
        raise ValueError("an array has no shape")
    axes, code = data[start] >> 2, data[start] & 3
    end = start + 1 + (axes << code)
    if axes > MAX_AXES or end > len(data):
        raise ValueError(f"an array states {axes} axes, but only {len(data) - start - 1:,} bytes follow")
    dims = np.frombuffer(data[start + 1 : end], _little(f"uint{8 << code}"))
    return end, tuple(int(dim) for dim in dims)


@dataclass(frozen=True, slots=True)
class Encoding:
    """A column encoding. `dtype` and `shape` are set if they are the same for all its arrays or numbers.

    `decode_within` decodes values that may take more memory than their bytes, and takes that memory from the
    sample's budget first; it is None if `decode` suffices. `safe` is false for pickles, which can run code.
    """

    name: str
    encode: Callable[[Any], bytes]
    decode: Callable[[memoryview], object]
    size: int | None = None
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] = ()
    safe: bool = True
    decode_within: Callable[[memoryview, SampleBudget | None], object] | None = None


@lru_cache(maxsize=4096)
def encoding_of(name: str) -> Encoding:
    """Return the encoding that an index calls `name`. Raises ValueError listing the known names."""
    kind, colon, details = name.partition(":") if isinstance(name, str) else (str(name), "", "")
    if kind == "ndarray":
        layout = parse_array_layout(details)
        dtype = None if layout.size is None else layout.dtype
        return Encoding(name, layout.encode, layout.decode, layout.size, dtype, layout.shape or ())
    if colon or kind not in _ENCODINGS:
        known = ", ".join(sorted([*_ENCODINGS, "ndarray[:dtype[:shape]]"]))
        raise ValueError(f"unknown encoding {str(name)[:80]!r}; known: {known}")
    return _ENCODINGS[kind]


def constant_layout(name: str) -> tuple[np.dtype[np.generic], tuple[int, ...]] | None:
    """Return (dtype, shape) shared by all values of an encoding; None if they vary or are not arrays."""
    try:
        encoding = encoding_of(name)
    except ValueError:
        return None  # an encoding that only tars use
    return None if encoding.dtype is None else (encoding.dtype, encoding.shape)


def encode_value(encoding: Encoding, value: object) -> bytes:
    """Encode a column's `value`. In any column, a value of type `bytes` is already encoded, and is checked.

    MosaicML's users pass JPEG files to a `jpeg` column this way. Pickles are not checked.
    """
    if not isinstance(value, bytes):
        data = encoding.encode(value)
    else:
        data = value
        if encoding.safe:
            encoding.decode(memoryview(data))
    if encoding.size is not None and len(data) != encoding.size:
        raise ValueError(f"the value has {len(data):,} bytes; {encoding.name} takes {encoding.size:,}")
    return data


def _expect(value: object, kind: type, name: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} takes {kind.__name__}, not {type(value).__name__}")


def _integer(value: object, name: str) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} takes whole numbers, not {type(value).__name__}") from None


def _number_encoding(name: str, dtype_name: str, to_python: bool = False) -> Encoding:
    dtype = np.dtype(dtype_name).newbyteorder("<")
    limits = np.iinfo(dtype) if dtype.kind in "iu" else None

    def encode(value: object) -> bytes:
        if limits is None:
            if not isinstance(value, (int, float, np.integer, np.floating)):
                raise TypeError(f"{name} takes numbers, not {type(value).__name__}")
            try:
                number = value if isinstance(value, np.generic) else float(value)
            except OverflowError:
                raise ValueError(f"{name} cannot hold a number of this size") from None
            with np.errstate(over="ignore"):
                return np.asarray(number).astype(dtype).tobytes()
        integer = _integer(value, name)
        if not limits.min <= integer <= limits.max:
            raise ValueError(f"{integer} is outside {name}'s range {limits.min} to {limits.max}")
        return np.array(integer, dtype).tobytes()

    def decode(data: memoryview) -> object:
        if len(data) != dtype.itemsize:
            raise ValueError(f"{name} has {dtype.itemsize} bytes, not {len(data):,}")
        number = np.frombuffer(data, dtype)[0]
        return int(number) if to_python else number

    return Encoding(name, encode, decode, size=dtype.itemsize, dtype=dtype)


def _encode_bytes(value: object) -> bytes:
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    _expect(value, bytes, "bytes")
    assert isinstance(value, bytes)
    return value


def _text_encoder(kind: type, name: str) -> Callable[[object], bytes]:
    """Return an encoder for values of type `kind`, which writes `str(value)` in UTF-8."""

    def encode(value: object) -> bytes:
        _expect(value, kind, name)
        return str(value).encode()

    return encode


def _text(data: memoryview) -> str:
    return str(data, "utf-8")


def _decode_str(data: memoryview, budget: SampleBudget | None) -> str:
    (budget or SampleBudget()).take(text_bytes(data))
    return str(data, "utf-8")


def _encode_str_int(value: object) -> bytes:
    return str(_integer(value, "str_int")).encode()


def _decode_str_decimal(data: memoryview) -> Decimal:
    try:
        return Decimal(_text(data))
    except InvalidOperation:
        raise ValueError("the text is not a decimal number") from None


def _encode_json(value: object) -> bytes:
    try:
        return json.dumps(value.tolist() if isinstance(value, np.ndarray) else value).encode()
    except TypeError as error:
        raise TypeError(f"json takes dict, list, str, int, float, bool and None: {error}") from None
    except RecursionError:
        raise ValueError("the value is nested too deeply for JSON") from None


def _decode_json(data: memoryview, budget: SampleBudget | None) -> object:
    (budget or SampleBudget()).take(len(data) + json_bytes(data))
    try:
        return load_json(_text(data))
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def _decode_pickle(data: memoryview) -> object:
    try:
        return pickle.loads(data)
    except Exception as error:  # a pickle may raise anything
        raise ValueError(f"the pickle cannot be read: {type(error).__name__}: {error}") from error


def _large_encoding(
    name: str, encode: Callable[[Any], bytes], decode: Callable[[memoryview, SampleBudget | None], object]
) -> Encoding:
    return Encoding(name, encode, lambda data: decode(data, None), decode_within=decode)


def _table() -> dict[str, Encoding]:
    plain = [
        Encoding("bytes", _encode_bytes, bytes),
        _large_encoding("str", _text_encoder(str, "str"), _decode_str),
        Encoding("str_int", _encode_str_int, lambda data: int(_text(data))),
        Encoding("str_float", _text_encoder(float, "str_float"), lambda data: float(_text(data))),
        Encoding("str_decimal", _text_encoder(Decimal, "str_decimal"), _decode_str_decimal),
        _large_encoding("json", _encode_json, _decode_json),
        Encoding("pkl", pickle.dumps, _decode_pickle, safe=False),
        _large_encoding("pil", images.encode_raw, images.decode_raw),
        _large_encoding("jpeg", images.encode_jpeg, images.decode_file),
        _large_encoding("png", images.encode_png, images.decode_file),
    ]
    for name in ("jpeg_array", "jpegarray"):
        plain.append(_large_encoding(name, images.encode_jpeg_array, images.decode_jpeg_array))
    for item in ("pil", "jpeg", "png"):
        one = next(e for e in plain if e.name == item)
        assert one.decode_within is not None
        plain.append(_large_encoding(f"list[{item}]", *images.list_functions(one.encode, one.decode_within)))
    numbers = [_number_encoding(name, name) for name in ARRAY_DTYPES.values()]
    numbers.append(_number_encoding("int", "int64", to_python=True))
    return {encoding.name: encoding for encoding in plain + numbers}


_ENCODINGS: dict[str, Encoding] = _table()
