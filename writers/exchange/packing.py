"""Rows in few bytes: each column in as many bytes as its numbers need, less the least one.

Keys ascend, and document numbers, lengths and sources are far below 2^64, so a block of rows takes about half
of the bytes that it has in memory. A row in memory is *columns*: unsigned numbers of 1, 2, 4 or 8 bytes in
little-endian order. A field with one number is a column; one with an array has a column for each eight bytes,
or for each number if its bytes cannot be divided by eight.

    widths    uint8[columns]       bytes of a number in the block, 0 to 8
    bases     uint64[columns]      what to add to the numbers
    numbers   uint8[rows, width]   of each column, one after the other

The base of the keys is the first one, and their numbers are the differences from the row before. A key takes
at least one byte, so that a block has no more rows than bytes, whoever made it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from shardkit.kernels.numba_support import Int64s, UInt8s, UInt64s, int64, kernel
from shardkit.kernels.simd import load_8_bytes, store_8_bytes

_PADDING = 8  # bytes after an output: eight are stored at a time
_BASE_BYTES = 9  # of each column, before the numbers


@dataclass(frozen=True)
class _Columns:
    """The columns of a dtype: where they begin in a row, int64[columns], and which of them is the key.

    `masks`, uint64[columns], has ones in the bits of a column.
    """

    places: Int64s
    masks: UInt64s
    key: int
    row_bytes: int


@cache
def _columns_of(dtype: np.dtype[np.void]) -> _Columns:
    places, sizes, key = list[int](), list[int](), -1
    for name, (field, place, *_) in (dtype.fields or {}).items():
        size = 8 if field.shape and field.itemsize % 8 == 0 else field.base.itemsize
        key = len(places) if name == "key" else key
        for start in range(0, field.itemsize, size):
            places.append(place + start)
            sizes.append(size)
    assert key >= 0, dtype
    assert sum(sizes) == dtype.itemsize, dtype
    assert places == sorted(places), dtype
    return _Columns(np.array(places), _masks(np.array(sizes)), key, dtype.itemsize)


def pack(rows: npt.NDArray[np.void]) -> npt.NDArray[np.uint8]:
    """Return the bytes of a block of contiguous rows, at least one; their keys should ascend."""
    of = _columns_of(rows.dtype)
    flat, columns = rows.view(np.uint8), len(of.places)
    bases, widths = np.empty(columns, np.uint64), np.empty(columns, np.int64)
    _measure(flat, of.row_bytes, of.places, of.masks, of.key, bases, widths)
    start = _BASE_BYTES * columns
    packed = np.empty(start + len(rows) * int(widths.sum()) + _PADDING, np.uint8)
    packed[:columns] = widths
    packed[columns:start] = bases.view(np.uint8)
    _pack(flat, of.row_bytes, of.places, of.masks, of.key, bases, widths, packed, start)
    return packed[:-_PADDING]


def unpack(packed: npt.NDArray[np.uint8], count: int, dtype: np.dtype[np.void]) -> npt.NDArray[np.void]:
    """Return the `count` rows of a block. Raises ValueError if it does not have the bytes of so many rows."""
    of = _columns_of(dtype)
    columns = len(of.places)
    start = _BASE_BYTES * columns
    widths = packed[:columns].astype(np.int64)
    is_possible = len(packed) >= start and widths.max() <= 8 and widths[of.key] > 0
    if not is_possible or len(packed) != start + count * int(widths.sum()):
        raise ValueError(f"{len(packed):,} bytes are not {count:,} packed rows")
    bases = packed[columns:start].copy().view("<u8")
    places = start + count * (np.cumsum(widths) - widths)
    rows = np.empty(count * of.row_bytes + _PADDING, np.uint8)
    _unpack(packed, places, widths, _masks(widths), bases, of.key, of.places, of.row_bytes, rows)
    return rows[:-_PADDING].view(dtype)


def _masks(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return the numbers whose lower `sizes` bytes are ones, uint64[n]."""
    return np.array([(1 << 8 * size) - 1 for size in sizes.tolist()], np.uint64)


@kernel
def _load(data: UInt8s, at: int, mask: np.uint64) -> np.uint64:
    """Return the number in the bytes at `at` that `mask` covers; reads nothing behind the end of `data`."""
    if at + 8 <= len(data):
        return load_8_bytes(data, at) & mask
    value, shift = np.uint64(0), np.uint64(0)
    while mask >> shift and shift < np.uint64(64):
        value |= np.uint64(data[at + int64(shift >> np.uint64(3))]) << shift
        shift += np.uint64(8)
    return value


@kernel
def _measure(
    rows: UInt8s, row_bytes: int, places: Int64s, masks: UInt64s, key: int, bases: UInt64s, widths: Int64s
) -> None:
    """Find the base of each column, and the bytes that its numbers need."""
    for column in range(len(places)):
        mask, first = masks[column], _load(rows, places[column], masks[column])
        least = most = before = first
        if column == key:
            least = most = np.uint64(0)
        for at in range(places[column], len(rows), row_bytes):
            value = _load(rows, at, mask)
            if column == key:
                value, before = value - before, value
            least, most = min(least, value), max(most, value)
        bases[column] = first if column == key else least
        left, width = most if column == key else most - least, int64(column == key)
        while width < 8 and left >> np.uint64(8 * width):
            width += 1
        widths[column] = width


@kernel
def _pack(
    rows: UInt8s,
    row_bytes: int,
    places: Int64s,
    masks: UInt64s,
    key: int,
    bases: UInt64s,
    widths: Int64s,
    out: UInt8s,
    to: int,
) -> None:
    for column in range(len(places)):
        base = bases[column]
        for at in range(places[column], len(rows), row_bytes):
            value = _load(rows, at, masks[column])
            store_8_bytes(out, to, value - base)  # the bytes behind its width are overwritten by the next one
            to += widths[column]
            if column == key:
                base = value


@kernel
def _unpack(
    data: UInt8s,
    places: Int64s,
    widths: Int64s,
    masks: UInt64s,
    bases: UInt64s,
    key: int,
    fields: Int64s,
    row_bytes: int,
    out: UInt8s,
) -> None:
    # Row by row, since eight bytes are stored: those behind a column belong to the next one, or the next row.
    for row in range((len(out) - 8) // row_bytes):
        for column in range(len(fields)):
            value = _load(data, places[column] + row * widths[column], masks[column]) + bases[column]
            store_8_bytes(out, row * row_bytes + fields[column], value)
            if column == key:
                bases[column] = value
