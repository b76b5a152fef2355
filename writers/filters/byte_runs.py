"""Runs of bytes in kernels: their hash, whether two are equal, and how many characters they are.

Bounds are the caller's care; nothing is read outside of the runs.
"""

from __future__ import annotations

import numba
import numpy as np

from shardkit.writers.dedup.simd import load_8_bytes

__all__ = ["count_characters", "hash_run", "same_runs"]

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)


@numba.njit(nogil=True, cache=True)
def hash_run(data, begin, end):  # type: ignore[no-untyped-def]
    """uint64: eight bytes a step, multiplied and folded. A hash for tables whose hits are compared."""
    hashed = np.uint64(end - begin)
    at = begin
    while at + 8 <= end:
        hashed = (hashed ^ load_8_bytes(data, at)) * _FACTOR
        hashed ^= hashed >> _HALF
        at += 8
    while at < end:
        hashed = (hashed ^ np.uint64(data[at])) * _FACTOR
        hashed ^= hashed >> _HALF
        at += 1
    return hashed


@numba.njit(nogil=True, cache=True)
def same_runs(data, one, other, length):  # type: ignore[no-untyped-def]
    """Whether data[one:one + length] and data[other:other + length] are the same bytes."""
    at = 0
    while at + 8 <= length:
        if load_8_bytes(data, one + at) != load_8_bytes(data, other + at):
            return False
        at += 8
    while at < length:
        if data[one + at] != data[other + at]:
            return False
        at += 1
    return True


@numba.njit(nogil=True, cache=True)
def count_characters(data, begin, end):  # type: ignore[no-untyped-def]
    """Code points of valid UTF-8."""
    characters = 0
    for at in range(begin, end):
        characters += (data[at] & 0xC0) != 0x80
    return characters
