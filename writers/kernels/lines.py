"""Line statistics and repeated lines and paragraphs, straight from the UTF-8 bytes of a batch.

`line_statistics` makes the counts for FineWeb's rules. Lines are split at LF, and lines of white space only
do not count. Memory: at most 16 bytes for each line of the longest document.

`count_long_lines` makes the counts for mC4's rule: lines are split at LF, and blank lines count.

`line_repetition` measures how much of a text is repeated, with two definitions of a line. As in datatrove,
lines are separated by runs of LF, and a text that begins or ends with LF has an empty line there; paragraphs
are separated by runs of two or more LF in the stripped text; all copies but the first count as repeated. As
in dolma, every LF ends a line, even an empty one, and all copies count, including the first. Memory: up to 56
bytes for each line of the longest document.

Equal lines are found exactly, by a hash table whose hits are compared byte by byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardkit.kernels.numba_support import Bools, Int32s, Int64s, UInt8s, int64, kernel
from shardkit.kernels.utf8 import (
    TERMINAL,
    character_before,
    character_flags,
    count_characters,
    hash_run,
    same_runs,
    skip_space,
    strip_space,
)
from shardkit.writers.kernels.blocks import find_byte
from shardkit.writers.kernels.hash_tables import table_slots

_NEWLINE = 10


@dataclass(frozen=True, slots=True)
class LineStatistics:
    """Counts, int64[n] each: one number per document."""

    lines: Int64s  # lines that are not blank
    terminal_lines: Int64s  # lines whose last character is terminal punctuation
    short_lines: Int64s  # lines of at most `short_line_length` characters
    repeated_characters: Int64s  # characters in lines that occurred earlier in the document


def line_statistics(
    data: UInt8s, offsets: Int64s, wanted: Bools, *, short_line_length: int
) -> LineStatistics:
    """Count the lines of the documents data[offsets[i]:offsets[i + 1]], valid UTF-8; 0 where not `wanted`."""
    counts = np.zeros((4, len(wanted)), np.int64)
    _count(data, offsets, wanted, character_flags(), short_line_length, counts)
    return LineStatistics(*counts)


@kernel
def _count(data: UInt8s, offsets: Int64s, wanted: Bools, flags: UInt8s, short: int, counts: Int64s) -> None:
    table = np.zeros(1024, np.int32)
    for document in range(len(wanted)):
        if not wanted[document]:
            continue
        begin, end = offsets[document], offsets[document + 1]
        newlines = 0
        for at in range(begin, end):
            newlines += data[at] == 10
        size = table_slots(2 * (newlines + 1))
        if size > len(table):
            table = np.zeros(size, np.int32)
        else:
            table[:size] = 0
        _count_one(data, begin, end, flags, short, table[:size], counts[:, document])


@kernel(allocates=False)
def _count_one(
    data: UInt8s, begin: int, end: int, flags: UInt8s, short: int, table: Int32s, out: Int64s
) -> None:
    lines = terminal = shorts = repeated = 0
    line_begin = begin
    while line_begin <= end:
        line_end = find_byte(data, line_begin, end, _NEWLINE)
        if skip_space(data, line_begin, line_end, flags) < line_end:
            characters = count_characters(data, line_begin, line_end)
            lines += 1
            terminal += (flags[character_before(data, line_end)[0]] & TERMINAL) != 0
            shorts += characters <= short
            if _seen(data, begin, line_begin, line_end, table):
                repeated += characters
        line_begin = line_end + 1
    out[0], out[1], out[2], out[3] = lines, terminal, shorts, repeated


@kernel(allocates=False)
def _seen(data: UInt8s, begin: int, line_begin: int, line_end: int, table: Int32s) -> bool:
    """Return whether the table has an equal line; if not, add this line (1 + its offset in the document)."""
    mask = len(table) - 1
    slot = int64(hash_run(data, line_begin, line_end) >> np.uint64(20)) & mask
    length = line_end - line_begin
    while table[slot]:
        other = begin + table[slot] - 1
        # A newline at this index means that both lines have the same length. The index is valid, because the
        # other line begins before this one.
        if data[other + length] == 10 and same_runs(data, other, data, line_begin, length):
            return True
        slot = (slot + 1) & mask
    table[slot] = line_begin - begin + 1
    return False


def count_long_lines(data: UInt8s, offsets: Int64s, wanted: Bools, least: int) -> Int64s:
    """Return int64[n], the number of lines with `least` characters or more; 0 where not `wanted`."""
    counts = np.zeros(len(wanted), np.int64)
    _count_long_lines(data, offsets, wanted, least, counts)
    return counts


@kernel(allocates=False)
def _count_long_lines(data: UInt8s, offsets: Int64s, wanted: Bools, least: int, counts: Int64s) -> None:
    for document in range(len(wanted)):
        if not wanted[document]:
            continue
        start, end = offsets[document], offsets[document + 1]
        for at in range(start, end + 1):
            if at == end or data[at] == 10:
                counts[document] += count_characters(data, start, at) >= least
                start = at + 1


LINES, PARAGRAPHS, ALL_LINES = 0, 1, 2


class Repetition(NamedTuple):
    """Counts for n documents, int64[n]: lines or paragraphs, those that are repeated, characters in these."""

    elements: Int64s
    repeated: Int64s
    characters: Int64s


def line_repetition(data: UInt8s, offsets: Int64s, wanted: Bools, kind: int) -> Repetition:
    """Count repetition in the documents data[offsets[i]:offsets[i + 1]], valid UTF-8; 0 where not `wanted`.

    `kind` is LINES or PARAGRAPHS, as in datatrove, where all copies but the first count as repeated, or
    ALL_LINES, as in dolma, where all copies count, including the first.
    """
    counts = Repetition(*np.zeros((3, len(wanted)), np.int64))
    _count_repeated(data, offsets, wanted, kind, character_flags(), tuple(counts))
    return counts


@kernel
def _count_repeated(
    data: UInt8s, offsets: Int64s, wanted: Bools, kind: int, flags: UInt8s, counts: tuple[Int64s, ...]
) -> None:
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
            begins, ends = np.empty(room, np.int64), np.empty(room, np.int64)
            copies = np.empty(room, np.int32)
            table = np.empty(2 * room, np.int32)
        elements = _cut(data, begin, end, kind, begins, ends)
        found = (data, begins[:elements], ends[:elements])
        repeated, characters = _find_repeated(
            found, copies, table[: table_slots(2 * elements)], kind == ALL_LINES
        )
        counts[0][document], counts[1][document], counts[2][document] = elements, repeated, characters


@kernel(allocates=False)
def _cut(data: UInt8s, begin: int, end: int, kind: int, begins: Int64s, ends: Int64s) -> int:
    """Write the bounds of the lines or paragraphs of a text to `begins` and `ends`; return their number."""
    least = 2 if kind == PARAGRAPHS else 1
    elements = 0
    start = at = begin
    while at < end:
        stop = find_byte(data, at, end, _NEWLINE)
        if stop == end:
            break
        at = stop + 1
        while kind != ALL_LINES and at < end and data[at] == _NEWLINE:
            at += 1
        if at - stop >= least:
            begins[elements], ends[elements] = start, stop
            elements += 1
            start = at
    begins[elements], ends[elements] = start, end
    return elements + 1


@kernel(allocates=False)
def _find_repeated(
    found: tuple[UInt8s, Int64s, Int64s], copies: Int32s, table: Int32s, every: bool
) -> tuple[int, int]:
    """Return (number, characters) of elements that equal an earlier one or, with `every`, any other one."""
    data, begins, ends = found
    table[:] = 0
    mask = len(table) - 1
    repeated = characters = 0
    for index in range(len(begins)):
        begin, length = begins[index], ends[index] - begins[index]
        copies[index] = 1
        slot = int64(hash_run(data, begin, begin + length) >> np.uint64(20)) & mask
        while table[slot]:
            other = table[slot] - 1
            if ends[other] - begins[other] == length and same_runs(data, begin, data, begins[other], length):
                times = 2 if every and copies[other] == 1 else 1
                copies[other] += 1
                repeated += times
                characters += times * count_characters(data, begin, begin + length)
                break
            slot = (slot + 1) & mask
        else:
            table[slot] = index + 1
    return repeated, characters
