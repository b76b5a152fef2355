"""Counts about lines that FineWeb's rules need, one pass over the UTF-8 bytes of a batch.

Lines are cut at "\\n" only and lines of nothing but white space do not count. Repeated lines are found
exactly: a hash table of line starts, every hit compared byte by byte. Memory is at most 16 bytes for each
line of the document with the most lines.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt

from shardkit.writers.filters.characters import SPACE, TERMINAL, character_flags
from shardkit.writers.utf8 import next_character

__all__ = ["LineStatistics", "line_statistics"]


@dataclass(frozen=True, slots=True)
class LineStatistics:
    """int64[n] each: one number per document."""

    lines: npt.NDArray[np.int64]  # lines that are not blank
    terminal_lines: npt.NDArray[np.int64]  # whose last character is terminal punctuation
    short_lines: npt.NDArray[np.int64]
    repeated_characters: npt.NDArray[np.int64]  # in lines that stood before in the document


def line_statistics(
    data: npt.NDArray[np.uint8],
    offsets: npt.NDArray[np.int64],
    wanted: npt.NDArray[np.bool_],
    *,
    short_line_length: int,
) -> LineStatistics:
    """Counts of the documents data[offsets[i]:offsets[i + 1]], valid UTF-8; zeros where not `wanted`."""
    counts = np.zeros((4, len(wanted)), np.int64)
    _count(data, offsets, wanted, character_flags(), short_line_length, counts)
    return LineStatistics(*counts)


@numba.njit(nogil=True, cache=True)
def _count(data, offsets, wanted, flags, short, counts):  # type: ignore[no-untyped-def]
    table = np.zeros(1024, np.int32)
    for document in range(len(wanted)):
        if not wanted[document]:
            continue
        begin, end = offsets[document], offsets[document + 1]
        newlines = 0
        for at in range(begin, end):
            newlines += data[at] == 10
        size = 16
        while size < 2 * (newlines + 1):
            size *= 2
        if size > len(table):
            table = np.zeros(size, np.int32)
        else:
            table[:size] = 0
        _count_one(data, begin, end, flags, short, table[:size], counts[:, document])


@numba.njit(nogil=True, cache=True)
def _count_one(data, begin, end, flags, short, table, out):  # type: ignore[no-untyped-def]
    lines = terminal = shorts = repeated = 0
    line_begin = begin
    while line_begin <= end:
        line_end = line_begin
        while line_end < end and data[line_end] != 10:
            line_end += 1
        if _visible(data, line_begin, line_end, flags):
            characters = 0
            for at in range(line_begin, line_end):
                characters += (data[at] & 0xC0) != 0x80
            last = line_end - 1
            while data[last] & 0xC0 == 0x80:
                last -= 1
            lines += 1
            terminal += (flags[next_character(data, last)[0]] & TERMINAL) != 0
            shorts += characters <= short
            if _seen(data, begin, line_begin, line_end, table):
                repeated += characters
        line_begin = line_end + 1
    out[0], out[1], out[2], out[3] = lines, terminal, shorts, repeated


@numba.njit(nogil=True, cache=True)
def _visible(data, begin, end, flags):  # type: ignore[no-untyped-def]
    at = begin
    while at < end:
        code, at = next_character(data, at)
        if not flags[code] & SPACE:
            return True
    return False


@numba.njit(nogil=True, cache=True)
def _hash(data, begin, end):  # type: ignore[no-untyped-def]
    """64 bits of a line: eight bytes a step, multiplied and folded."""
    hashed = np.uint64(end - begin)
    at = begin
    while at + 8 <= end:
        word = np.uint64(0)
        for byte in range(8):
            word |= np.uint64(data[at + byte]) << np.uint64(8 * byte)
        hashed = (hashed ^ word) * np.uint64(0x9E3779B97F4A7C15)
        hashed ^= hashed >> np.uint64(32)
        at += 8
    while at < end:
        hashed = (hashed ^ np.uint64(data[at])) * np.uint64(0x9E3779B97F4A7C15)
        hashed ^= hashed >> np.uint64(32)
        at += 1
    return hashed


@numba.njit(nogil=True, cache=True)
def _seen(data, begin, line_begin, line_end, table):  # type: ignore[no-untyped-def]
    """Whether the line is in the table, where it is put otherwise (as 1 + its start in the document)."""
    mask = len(table) - 1
    slot = np.int64(_hash(data, line_begin, line_end) >> np.uint64(8)) & mask
    length = line_end - line_begin
    while table[slot]:
        other = begin + table[slot] - 1
        if (
            data[other + length] == 10
        ):  # earlier lines end in a newline; this one, as long, is within the data
            same = True
            for at in range(length):
                if data[other + at] != data[line_begin + at]:
                    same = False
                    break
            if same:
                return True
        slot = (slot + 1) & mask
    table[slot] = line_begin - begin + 1
    return False
