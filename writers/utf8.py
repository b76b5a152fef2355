"""Characters of UTF-8, for kernels."""

from __future__ import annotations

import numba
import numpy as np

from shardkit.writers.filters.characters import SPACE

__all__ = ["next_character", "strip_space", "utf8_bytes"]


@numba.njit(nogil=True, cache=True, inline="always")
def next_character(data, at):  # type: ignore[no-untyped-def]
    """(code point, index after it) of valid UTF-8."""
    byte = np.int64(data[at])
    if byte < 0x80:
        return byte, at + 1
    if byte < 0xE0:
        return (byte & 0x1F) << 6 | (data[at + 1] & 0x3F), at + 2
    if byte < 0xF0:
        return (byte & 0x0F) << 12 | (data[at + 1] & 0x3F) << 6 | (data[at + 2] & 0x3F), at + 3
    high = (byte & 0x07) << 18 | (data[at + 1] & 0x3F) << 12
    return high | (data[at + 2] & 0x3F) << 6 | (data[at + 3] & 0x3F), at + 4


@numba.njit(nogil=True, cache=True)
def utf8_bytes(code):  # type: ignore[no-untyped-def]
    """(the UTF-8 bytes of a code point as a uint64, the first byte lowest; how many they are)."""
    rest = np.uint64(code)
    if rest < np.uint64(0x80):
        return rest, 1
    last = np.uint64(0x80) | (rest & np.uint64(0x3F))
    rest >>= np.uint64(6)
    if rest < np.uint64(0x20):
        return np.uint64(0xC0) | rest | last << np.uint64(8), 2
    third = np.uint64(0x80) | (rest & np.uint64(0x3F))
    rest >>= np.uint64(6)
    if rest < np.uint64(0x10):
        return np.uint64(0xE0) | rest | third << np.uint64(8) | last << np.uint64(16), 3
    second = np.uint64(0x80) | (rest & np.uint64(0x3F))
    first = np.uint64(0xF0) | rest >> np.uint64(6)
    return first | second << np.uint64(8) | third << np.uint64(16) | last << np.uint64(24), 4


@numba.njit(nogil=True, cache=True)
def strip_space(data, begin, end, flags):  # type: ignore[no-untyped-def]
    """(begin, end) of data[begin:end] without white space at both ends; `flags` as `character_flags`."""
    while begin < end:
        code, after = next_character(data, begin)
        if not flags[code] & SPACE:
            break
        begin = after
    while begin < end:
        last = end - 1
        while data[last] & 0xC0 == 0x80:
            last -= 1
        if not flags[next_character(data, last)[0]] & SPACE:
            break
        end = last
    return begin, end
