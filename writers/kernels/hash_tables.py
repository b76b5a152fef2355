"""Open-addressing tables of 64-bit hashes, with linear probing from a hash's low bits.

There are two kinds of tables. One (`keys`, `values`) maps a hash to a float64 of at most 0; `values` is 1
where a slot is empty. The other (`keys`, `places`) maps a hash to the index with which it was inserted;
`places` is -1 where a slot is empty, and the filter `bits` rejects most hashes that are not in the table. The
size of a table is a power of two, and every table has empty slots.
"""

from __future__ import annotations

import numpy as np

from shardkit.kernels.numba_support import Float64s, Int64s, UInt64s, int64, kernel

_BLOCK, _FIRST_ROOM = 1024, 256  # number of hashes filtered before the lookups; initial rows of the result


@kernel
def table_slots(least: int) -> int:
    """Return the size of a table with at least `least` slots: a power of two, and at least 16."""
    slots = 16
    while slots < least:
        slots *= 2
    return slots


@kernel
def fill_values(hashes: UInt64s, logs: Float64s, keys: UInt64s, values: Float64s) -> None:
    """Insert each hash with its value in `logs` into an empty table; a value above 0 is stored as 0."""
    mask = np.uint64(len(keys) - 1)
    for number in range(len(hashes)):
        slot = hashes[number] & mask
        while values[slot] <= 0:
            slot = (slot + np.uint64(1)) & mask
        keys[slot], values[slot] = hashes[number], min(logs[number], 0.0)


def mean_values(
    hashes: UInt64s, offsets: Int64s, keys: UInt64s, values: Float64s, missing: float
) -> Float64s:
    """Return float64[n], the mean table value of hashes[offsets[i]:offsets[i + 1]], or 0 without hashes.

    A hash that is not in the table has the value `missing`.
    """
    means = np.zeros(len(offsets) - 1, np.float64)
    _mean(hashes, offsets, keys, values, missing, means)
    return means


@kernel
def _mean(
    hashes: UInt64s, offsets: Int64s, keys: UInt64s, values: Float64s, unknown: float, means: Float64s
) -> None:
    mask = np.uint64(len(keys) - 1)
    for text in range(len(means)):
        total = 0.0
        for at in range(offsets[text], offsets[text + 1]):
            slot = hashes[at] & mask
            while values[slot] <= 0 and keys[slot] != hashes[at]:
                slot = (slot + np.uint64(1)) & mask
            total += values[slot] if values[slot] <= 0 else unknown
        if offsets[text + 1] > offsets[text]:
            means[text] = total / (offsets[text + 1] - offsets[text])


@kernel
def fill_places(hashes: UInt64s, bits: UInt64s, keys: UInt64s, places: Int64s) -> None:
    """Insert each hash with its index in `hashes`; for equal hashes, the first index is stored."""
    mask, low = np.uint64(len(keys) - 1), np.uint64(63)
    for number in range(len(hashes)):
        value = hashes[number]
        bit = (value >> np.uint64(20)) & np.uint64(64 * len(bits) - 1)
        bits[bit >> np.uint64(6)] |= np.uint64(1) << (bit & low)
        slot = value & mask
        while places[slot] >= 0 and keys[slot] != value:
            slot = (slot + np.uint64(1)) & mask
        if places[slot] < 0:
            keys[slot], places[slot] = value, number


@kernel
def _place(value: np.uint64, keys: UInt64s, places: Int64s) -> int:
    """Return the index with which the hash `value` was inserted, or -1 if it was not."""
    mask = np.uint64(len(keys) - 1)
    slot = value & mask
    while places[slot] >= 0:
        if keys[slot] == value:
            return int64(places[slot])
        slot = (slot + np.uint64(1)) & mask
    return -1


@kernel
def find_matches(hashes: UInt64s, bits: UInt64s, keys: UInt64s, places: Int64s) -> Int64s:
    """Return int64[m, 2]: (index in `hashes`, index in the table) of each hash that the table contains."""
    found = np.empty((_FIRST_ROOM, 2), np.int64)
    candidates = np.empty(_BLOCK, np.int64)
    mask, low, one = np.uint64(64 * len(bits) - 1), np.uint64(63), np.uint64(1)
    count = 0
    for begin in range(0, len(hashes), _BLOCK):
        passed = int64(0)
        for at in range(begin, min(begin + _BLOCK, len(hashes))):  # no branches: cache misses overlap
            bit = (hashes[at] >> np.uint64(20)) & mask
            candidates[passed] = at
            passed = passed + int64(bits[bit >> np.uint64(6)] >> (bit & low) & one)
        for i in range(passed):
            number = _place(hashes[candidates[i]], keys, places)
            if number >= 0:
                if count == len(found):
                    found = np.concatenate((found, np.empty_like(found)))
                found[count, 0], found[count, 1] = candidates[i], number
                count += 1
    return found[:count]
