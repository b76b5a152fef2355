r"""Counts about lines that FineWeb's rules need, one pass over the UTF-8 bytes of a batch.

Lines are cut at "\n" only and lines of nothing but white space do not count. Repeated lines are found
exactly: a hash table of line starts, every hit compared byte by byte. Memory is at most 16 bytes for each
line of the document with the most lines.

How much of a text is repeated lines and paragraphs, straight from the UTF-8 bytes of a batch.

Two ways to cut lines, after those who use them. datatrove: lines lie between runs of newlines, and a text
that begins or ends with one has an empty line there; paragraphs lie between runs of two or more newlines of
the text without white space at both ends; what counts are elements that stood before. dolma: every newline
ends a line, also an empty one, and all copies of a repeated line count. Equal lines are found by a hash table
whose hits are compared byte by byte. Memory: up to 56 bytes per line of the document with the most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from shardkit.writers.kernels.utf8 import (
    SPACE,
    TERMINAL,
    character_flags,
    count_characters,
    hash_run,
    next_character,
    same_runs,
    strip_space,
)

__all__ = [
    "ALL_LINES",
    "LINES",
    "PARAGRAPHS",
    "LineStatistics",
    "Repetition",
    "line_repetition",
    "line_statistics",
]


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


LINES, PARAGRAPHS, ALL_LINES = 0, 1, 2

_NEWLINE = 10


class Repetition(NamedTuple):
    """int64[n]: elements, those that are repeated, and the characters in those."""

    elements: npt.NDArray[np.int64]
    repeated: npt.NDArray[np.int64]
    characters: npt.NDArray[np.int64]


def line_repetition(
    data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64], wanted: npt.NDArray[np.bool_], kind: int
) -> Repetition:
    """Counts of the documents data[offsets[i]:offsets[i + 1]], valid UTF-8; zeros where not `wanted`.

    `kind` is LINES or PARAGRAPHS (datatrove's; repeated: what stood before), or ALL_LINES (dolma's; repeated:
    every copy).
    """
    counts = Repetition(*np.zeros((3, len(wanted)), np.int64))
    _count_repeated(data, offsets, wanted, kind, character_flags(), tuple(counts))
    return counts


@numba.njit(nogil=True, cache=True)
def _count_repeated(data, offsets, wanted, kind, flags, counts):  # type: ignore[no-untyped-def]
    room = 16
    begins, ends, copies = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int32)
    table = np.empty(2 * room, np.int32)
    for document in range(len(wanted)):
        if not wanted[document]:
            continue
        begin, end = offsets[document], offsets[document + 1]
        if kind == PARAGRAPHS:
            begin, end = strip_space(data, begin, end, flags)
        most = 1
        for at in range(begin, end):
            most += data[at] == _NEWLINE
        if most > room:
            while room < most:
                room *= 2
            begins, ends, copies = (
                np.empty(room, np.int64),
                np.empty(room, np.int64),
                np.empty(room, np.int32),
            )
            table = np.empty(2 * room, np.int32)
        elements = _cut(data, begin, end, kind, begins, ends)
        slots = 16
        while slots < 2 * elements:
            slots *= 2
        found = (data, begins[:elements], ends[:elements])
        repeated, characters = _find_repeated(found, copies, table[:slots], kind == ALL_LINES)
        counts[0][document], counts[1][document], counts[2][document] = elements, repeated, characters


@numba.njit(nogil=True, cache=True)
def _cut(data, begin, end, kind, begins, ends):  # type: ignore[no-untyped-def]
    """Cut at runs of newlines that are long enough; how many elements there are."""
    least = 2 if kind == PARAGRAPHS else 1
    elements = 0
    start = at = begin
    while at < end:
        if data[at] != _NEWLINE:
            at += 1
            continue
        stop = at
        at += 1
        while kind != ALL_LINES and at < end and data[at] == _NEWLINE:
            at += 1
        if at - stop >= least:
            begins[elements], ends[elements] = start, stop
            elements += 1
            start = at
    begins[elements], ends[elements] = start, end
    return elements + 1


@numba.njit(nogil=True, cache=True)
def _find_repeated(found, copies, table, every):  # type: ignore[no-untyped-def]
    """(elements, their characters) that equal an earlier one; with `every`, those earliest ones too."""
    data, begins, ends = found
    table[:] = 0
    mask = len(table) - 1
    repeated = characters = 0
    for index in range(len(begins)):
        begin, length = begins[index], ends[index] - begins[index]
        copies[index] = 1
        slot = np.int64(hash_run(data, begin, begin + length) >> np.uint64(20)) & mask
        while table[slot]:
            other = table[slot] - 1
            if ends[other] - begins[other] == length and same_runs(data, begin, begins[other], length):
                times = 2 if every and copies[other] == 1 else 1
                copies[other] += 1
                repeated += times
                characters += times * count_characters(data, begin, begin + length)
                break
            slot = (slot + 1) & mask
        else:
            table[slot] = index + 1
    return repeated, characters
