"""How much of a text is repeated lines and paragraphs, straight from the UTF-8 bytes of a batch.

Two ways to cut lines, after those who use them. datatrove: lines lie between runs of newlines, and a text
that begins or ends with one has an empty line there; paragraphs lie between runs of two or more newlines of
the text without white space at both ends; what counts are elements that stood before. dolma: every newline
ends a line, also an empty one, and all copies of a repeated line count. Equal lines are found by a hash table
whose hits are compared byte by byte. Memory: up to 56 bytes per line of the document with the most.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from shardkit.writers.filters.byte_runs import count_characters, hash_run, same_runs
from shardkit.writers.filters.characters import character_flags
from shardkit.writers.utf8 import strip_space

__all__ = ["ALL_LINES", "LINES", "PARAGRAPHS", "Repetition", "line_repetition"]

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
    _count(data, offsets, wanted, kind, character_flags(), tuple(counts))
    return counts


@numba.njit(nogil=True, cache=True)
def _count(data, offsets, wanted, kind, flags, counts):  # type: ignore[no-untyped-def]
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
