"""Counts for dolma's quality rules, in one pass over the UTF-8 bytes of a batch.

Words are split as by `str.split()`; lines end at LF only, and blank lines count. A median word length above
LONGEST is reported as LONGEST. The histogram of word lengths takes 32 KB of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardkit.kernels.numba_support import Bools, Int64s, UInt8s, kernel
from shardkit.kernels.utf8 import ALPHA, SPACE, character_flags, find_run, join_runs, next_character

LONGEST = 4096  # maximum word length in characters; longer words are counted as this long
_ELLIPSIS = 0x2026


class DolmaStatistics(NamedTuple):
    """Counts, int64[n] each: one number per document."""

    words: Int64s
    median_twice: Int64s  # twice the median word length in characters, so that it is an integer
    symbol_words: Int64s  # words that contain # or the ellipsis U+2026
    letter_words: Int64s  # words that contain a letter
    required: Int64s  # occurrences of required words
    lines: Int64s
    bullet_lines: Int64s  # lines whose first character is * or -
    ellipsis_lines: Int64s  # lines whose last character is the ellipsis U+2026


def dolma_statistics(
    data: UInt8s, offsets: Int64s, wanted: Bools, required: Sequence[str]
) -> DolmaStatistics:
    """Return counts for the documents data[offsets[i]:offsets[i + 1]], valid UTF-8; 0 where not `wanted`."""
    counts = np.zeros((len(DolmaStatistics._fields), len(wanted)), np.int64)
    listed = join_runs([word.encode() for word in dict.fromkeys(required) if word])
    _count(data, offsets, wanted, (character_flags(), *listed), counts)
    return DolmaStatistics(*counts)


# (flags of characters, the bytes of all required words, the offsets of these words)
_Tables = tuple[UInt8s, UInt8s, Int64s]


@kernel
def _count(data: UInt8s, offsets: Int64s, wanted: Bools, tables: _Tables, counts: Int64s) -> None:
    lengths = np.zeros(LONGEST + 1, np.int64)
    for document in range(len(wanted)):
        if wanted[document]:
            begin, end = offsets[document], offsets[document + 1]
            _count_words(data, begin, end, tables, lengths, counts[:, document])
            _count_lines(data, begin, end, counts[:, document])


@kernel
def _count_words(data: UInt8s, begin: int, end: int, tables: _Tables, lengths: Int64s, out: Int64s) -> None:
    flags, listed, edges = tables
    words = symbols = letters = required = longest = 0
    at = begin
    while at < end:
        start, length, seen, symbol = at, 0, 0, False
        after = at
        while at < end:
            code, after = next_character(data, at)
            flag = flags[code]
            if flag & SPACE:
                break
            seen |= flag
            symbol |= (code == 35) | (code == _ELLIPSIS)
            length += 1
            at = after
        if length:
            words += 1
            symbols += symbol
            letters += (seen & ALPHA) != 0
            length = min(length, LONGEST)
            lengths[length] += 1
            longest = max(longest, length)
            required += find_run(data, start, at, listed, edges) >= 0
        at = after
    out[0], out[1], out[2], out[3], out[4] = words, _median_twice(lengths, words), symbols, letters, required
    lengths[: longest + 1] = 0


@kernel
def _median_twice(lengths: Int64s, words: int) -> int:
    """Return twice the median word length: the sum of the two middle lengths, or the middle one twice.

    `lengths` is the histogram of the lengths of `words` words.
    """
    if not words:
        return 0
    total = below = length = 0
    for middle in ((words - 1) // 2, words // 2):
        while below + lengths[length] <= middle:
            below += lengths[length]
            length += 1
        total += length
    return total


@kernel
def _count_lines(data: UInt8s, begin: int, end: int, out: Int64s) -> None:
    lines = bullets = ellipses = 0
    start = begin
    for at in range(begin, end + 1):
        if at < end and data[at] != 10:
            continue
        lines += 1
        if at > start:
            bullets += data[start] == 42 or data[start] == 45
            if at - start >= 3:
                ellipses += data[at - 3] == 0xE2 and data[at - 2] == 0x80 and data[at - 1] == 0xA6
        start = at + 1
    out[5], out[6], out[7] = lines, bullets, ellipses
