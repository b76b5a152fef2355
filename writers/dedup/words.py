"""The hashes of a text's normalized words, straight from its UTF-8 bytes.

A word's hash is made of its lower-case UTF-8 bytes, eight at a time as little-endian numbers, the last ones
filled with zeros: h = seed; for each eight: h = (h ^ eight) * factor; h ^= h >> 32, modulo 2**64. Words of up
to eight bytes never share a hash.

Text is worked on in segments of 4,096 bytes: 64 bytes at a time become a bit mask of word bytes, whose
changes from 0 to 1 and back are the runs; a run of ASCII is a word, and hashing it costs a load and a
multiplication per eight bytes. Runs with other characters are decoded one by one.
"""

from __future__ import annotations

import numba
import numpy as np

from shardkit.writers.dedup.normalization import WORD
from shardkit.writers.dedup.simd import load_8_bytes, trailing_zeros, word_mask
from shardkit.writers.utf8 import next_character, utf8_bytes

__all__ = ["SCRATCH_WORDS", "SEGMENT_BYTES", "make_scratch", "next_words"]

SEGMENT_BYTES = 4096
SCRATCH_WORDS = 2 * SEGMENT_BYTES  # a call finds at most SEGMENT_BYTES words

_SEED_64, _FACTOR_64 = np.uint64(0x243F6A8885A308D3), np.uint64(0x9E3779B97F4A7C15)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
_BEYOND_ASCII = np.uint64(0x8080808080808080)
_ONE, _HALF, _TOP = np.uint64(1), np.uint64(32), np.uint64(63)


@numba.njit(nogil=True, cache=True)
def make_scratch():  # type: ignore[no-untyped-def]
    """What `next_words` works in, to be used again: 45 KB."""
    return (
        np.zeros(SEGMENT_BYTES + 128, np.uint8),
        np.zeros(SEGMENT_BYTES + 128, np.uint8),
        np.zeros(SEGMENT_BYTES + 130, np.int64),
    )


@numba.njit(nogil=True, cache=True)
def next_words(data, at, stop, tables, scratch, out, count):  # type: ignore[no-untyped-def]
    """Append hashes of words of data[at:stop] to out[count:]; returns (count, where to go on).

    `at` and what is returned for it are never inside of a word; `stop` is the end of the text. `scratch` is
    made by `make_scratch`; `out` needs SCRATCH_WORDS more.
    """
    segment, lower, edges = scratch
    flags, lower_table = tables
    size = min(SEGMENT_BYTES, stop - at)
    source = data[at : at + size]  # a view, indexed from 0: the loop becomes a memory copy
    for i in range(size):  # (Numba takes six seconds to compile the assignment of a slice to a slice)
        segment[i] = source[i]
    for i in range(size, size + 72):
        segment[i] = 0
    found = _find_edges(segment, size, lower, edges)
    after = size
    if at + size < stop and found and edges[found - 1] == size:  # the last run may go on
        found -= 2
        after = edges[found]
        if after == 0:  # it is longer than a segment
            return _hash_run(data, at, stop, True, flags, lower_table, out, count)
    for run in range(0, found, 2):
        begin, end = edges[run], edges[run + 1]
        length = end - begin
        eight = load_8_bytes(lower, begin)
        if length <= 8:
            eight &= _ALL >> np.uint64(64 - 8 * length)
            value = (_SEED_64 ^ eight) * _FACTOR_64
            value ^= value >> _HALF
            other = eight & _BEYOND_ASCII
        else:
            value, other = _hash_long(lower, begin, length)
        if other:
            count, _ = _hash_run(data, at + begin, at + end, False, flags, lower_table, out, count)
        else:
            out[count] = value
            count += 1
    return count, at + after


@numba.njit(nogil=True, cache=True)
def _find_edges(segment, size, lower, edges):  # type: ignore[no-untyped-def]
    """Where runs of word bytes begin and end, in turns; how many such places there are."""
    found = 0
    before = np.uint64(0)
    for block in range(0, size + 1, 64):  # zeros follow the text, so the last run ends
        mask = word_mask(segment, block, lower)
        change = mask ^ (mask << _ONE | before)
        before = mask >> _TOP
        while change:
            edges[found] = block + trailing_zeros(change)
            found += 1
            change &= change - _ONE
    return found


@numba.njit(nogil=True, cache=True)
def _hash_long(lower, begin, length):  # type: ignore[no-untyped-def]
    """Hash of a run of more than eight bytes, and bits that are set where a byte is not ASCII."""
    value, other = _SEED_64, np.uint64(0)
    while length > 0:
        eight = load_8_bytes(lower, begin)
        if length < 8:
            eight &= _ALL >> np.uint64(64 - 8 * length)
        other |= eight & _BEYOND_ASCII
        value = (value ^ eight) * _FACTOR_64
        value ^= value >> _HALF
        begin += 8
        length -= 8
    return value, other


@numba.njit(nogil=True, cache=True)
def _hash_run(data, at, stop, open_end, flags, lower_table, out, count):  # type: ignore[no-untyped-def]
    """As `next_words`, one by one, to `stop`; with an open end to ASCII that is no word's or enough words."""
    limit = count + SEGMENT_BYTES
    value, eight, filled = _SEED_64, np.uint64(0), 0
    inside = False
    while at < stop:
        code, after = next_character(data, at)
        if not flags[code] & WORD:
            if inside:
                out[count] = _finish(value, eight, filled)
                count += 1
                value, eight, filled, inside = _SEED_64, np.uint64(0), 0, False
            if open_end and (code < 0x80 or count >= limit):
                return count, at if code < 0x80 else after
            at = after
            continue
        at = after
        inside = True
        utf8, size = utf8_bytes(lower_table[code])
        for _ in range(size):
            eight |= (utf8 & np.uint64(0xFF)) << np.uint64(8 * filled)
            utf8 >>= np.uint64(8)
            filled += 1
            if filled == 8:
                value = (value ^ eight) * _FACTOR_64
                value ^= value >> _HALF
                eight, filled = np.uint64(0), 0
    if inside:
        out[count] = _finish(value, eight, filled)
        count += 1
    return count, at


@numba.njit(nogil=True, cache=True)
def _finish(value, eight, filled):  # type: ignore[no-untyped-def]
    if filled:
        value = (value ^ eight) * _FACTOR_64
        value ^= value >> _HALF
    return value
