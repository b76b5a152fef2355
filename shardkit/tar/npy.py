"""The .npy format, read without trust: no pickles, no evaluation of deep literals, no sizes that lie.

A header is at most 64 KiB of a Python literal; it is parsed only when it is shallow and holds no
operators, because deep literals can exhaust the parser's stack. An array's bytes must be exactly those that
its shape and type ask for, so nothing is allocated on a header's word alone.
"""

from __future__ import annotations

import ast
import math
import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

__all__ = ["NpyHeader", "decode_npy", "make_npy_header", "parse_npy_header"]

MAX_HEADER_BYTES = 1 << 16  # NumPy itself stops at 10,000 characters
MAX_DIMENSIONS = 32
MAX_NESTING = 16  # brackets; structured types nest a few levels
WRITTEN_HEADER_BYTES = 128  # a multiple of 64 that holds any 1-D header: payloads stay 64-aligned
_MAGIC = b"\x93NUMPY"
_STRINGS = re.compile(rb"'[^'\\\n]*'|\"[^\"\\\n]*\"")


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """What a .npy says of its array; the values start `bytes` after the start of the file."""

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    fortran_order: bool
    bytes: int

    @property
    def payload_bytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


def parse_npy_header(head: memoryview) -> NpyHeader:
    """The header at the start of a .npy file; ValueError says what is wrong with it."""
    start = bytes(head[:12])
    if len(start) < 10 or start[:6] != _MAGIC:
        raise ValueError("not a .npy file: the magic is missing")
    if start[6:8] not in (b"\x01\x00", b"\x02\x00", b"\x03\x00"):
        raise ValueError(f"unknown .npy version {start[6]}.{start[7]}")
    prefix = 10 if start[6] == 1 else 12
    length = int.from_bytes(start[8:prefix], "little")
    if length > MAX_HEADER_BYTES or prefix + length > len(head):
        raise ValueError(f"a .npy header of {length:,} bytes in a member of {len(head):,}")
    return _parse(bytes(head[prefix : prefix + length]), prefix + length, start[6])


@lru_cache(maxsize=64)
def _parse(text: bytes, header_bytes: int, version: int) -> NpyHeader:
    fields = _literal(text, "utf-8" if version == 3 else "latin-1")
    if not isinstance(fields, dict) or set(fields) != {"descr", "fortran_order", "shape"}:
        raise ValueError("a .npy header must have descr, fortran_order and shape")
    shape, fortran = fields["shape"], fields["fortran_order"]
    if not isinstance(shape, tuple) or len(shape) > MAX_DIMENSIONS or not isinstance(fortran, bool):
        raise ValueError("a .npy header whose shape or order is malformed")
    if any(type(d) is not int or not 0 <= d < 1 << 62 for d in shape):
        raise ValueError("a .npy header with an impossible shape")
    try:
        dtype: np.dtype[np.generic] = np.lib.format.descr_to_dtype(fields["descr"])  # type: ignore[no-untyped-call]
    except Exception as error:  # np.dtype raises many types on hostile descriptions, SyntaxError among them
        raise ValueError(f"a .npy header with an unknown type: {str(fields['descr'])[:60]!r}") from error
    if dtype.hasobject:
        raise ValueError("an array of Python objects, which would have to be unpickled; store plain arrays")
    if dtype.itemsize == 0:
        raise ValueError("an array type of zero bytes")
    return NpyHeader(dtype, shape, fortran, header_bytes)


def _literal(text: bytes, encoding: str) -> object:
    """ast.literal_eval of text that cannot exhaust the parser."""
    bare = _STRINGS.sub(b"''", text)
    depth = deepest = 0
    for char in bare:
        if char in b"([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in b")]}":
            depth -= 1
    if deepest > MAX_NESTING or any(char in bare for char in b"+-~*/%\\#"):
        raise ValueError("a .npy header that is no plain literal")
    try:
        return ast.literal_eval(text.decode(encoding).strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError("a .npy header that is no literal") from error


def decode_npy(payload: memoryview) -> npt.NDArray[np.generic]:
    """A .npy file's array, as a copy that the caller owns; ValueError says what is wrong."""
    header = parse_npy_header(payload)
    if header.payload_bytes != len(payload) - header.bytes:
        raise ValueError(
            f"a .npy of shape {header.shape} and type {header.dtype} needs {header.payload_bytes:,} bytes "
            f"of values, the member has {len(payload) - header.bytes:,}"
        )
    values = np.frombuffer(payload[header.bytes :], dtype=header.dtype)
    return values.reshape(header.shape, order="F" if header.fortran_order else "C").copy(order="K")


def make_npy_header(dtype: np.dtype[np.generic], length: int) -> bytes:
    """The header of a 1-D array, always 128 bytes, the same from every NumPy version."""
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({length},), }}"
    text = text.ljust(WRITTEN_HEADER_BYTES - 11) + "\n"
    assert len(text) == WRITTEN_HEADER_BYTES - 10
    return _MAGIC + b"\x01\x00" + len(text).to_bytes(2, "little") + text.encode("ascii")
