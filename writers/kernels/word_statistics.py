"""Counts of characters, words and lines in the UTF-8 bytes of a batch.

Words are those of `str.split()`, lines those of `str.splitlines()`. Needs no memory but the counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from shardkit.writers.kernels.numba_support import Bools, Int64s, UInt8s, kernel
from shardkit.writers.kernels.utf8 import (
    ALPHA,
    LINE_END,
    PUNCTUATION,
    SPACE,
    character_flags,
    characters_with,
    find_run,
    first_bytes,
    join_runs,
    next_character,
)

__all__ = ["WordStatistics", "word_statistics"]

_ELLIPSIS = 0x2026
_BULLET = 0x2022


@dataclass(frozen=True, slots=True)
class WordStatistics:
    """int64[n] each: one number per document."""

    characters: Int64s
    words: Int64s
    plain_words: Int64s  # words with a character that is not punctuation
    plain_word_characters: Int64s
    letter_words: Int64s  # words with a letter
    hashes: Int64s
    ellipses: Int64s  # "..." that do not overlap, and "…"
    newlines: Int64s
    lines: Int64s
    bullet_lines: Int64s  # the first character that is no space is • or -
    ellipsis_lines: Int64s  # without spaces at the end, they end in ... or …
    stop_words: Int64s  # distinct ones


def word_statistics(
    data: UInt8s, offsets: Int64s, wanted: Bools, stop_words: Sequence[str] = ()
) -> WordStatistics:
    """Counts of the documents data[offsets[i]:offsets[i + 1]], valid UTF-8; zeros where not `wanted`."""
    counts = np.zeros((len(fields(WordStatistics)), len(wanted)), np.int64)
    stops = [word for word in dict.fromkeys(stop_words) if word]
    if len(stops) > 64:
        raise ValueError(f"{len(stops)} stop words; at most 64 fit in the kernel's bit mask")
    listed = (*join_runs([word.encode() for word in stops]), first_bytes(stops))
    letters = np.zeros(256, np.bool_)
    letters[:128] = character_flags()[:128] == ALPHA
    # All bytes that begin no line end, dot or ellipsis can be skipped.
    marks = first_bytes(characters_with(LINE_END) | {".", chr(_ELLIPSIS)})
    _count(data, offsets, wanted, (character_flags(), letters, marks, listed), counts)
    return WordStatistics(*counts)


_StopWords = tuple[UInt8s, Int64s, Bools]  # as from join_runs, and their first bytes
_Tables = tuple[UInt8s, Bools, Bools, _StopWords]  # character flags, ASCII letters, line marks, stop words


@kernel
def _count(data: UInt8s, offsets: Int64s, wanted: Bools, tables: _Tables, counts: Int64s) -> None:
    flags, letters, marks, stop_words = tables
    for document in range(len(wanted)):
        if wanted[document]:
            begin, end, out = offsets[document], offsets[document + 1], counts[:, document]
            _count_words(data, begin, end, flags, letters, stop_words, out)
            _count_lines(data, begin, end, flags, marks, out)


@kernel
def _count_words(
    data: UInt8s, begin: int, end: int, flags: UInt8s, letters: Bools, stop_words: _StopWords, out: Int64s
) -> None:
    stop_data, stop_offsets, starts = stop_words
    characters = words = plain_words = plain_characters = letter_words = hashes = newlines = 0
    stops = np.uint64(0)
    at = begin
    while at < end:
        code, after = next_character(data, at)
        if flags[code] & SPACE:
            characters += 1
            newlines += code == 10
            at = after
            continue
        word_begin, length, seen = at, 0, 0
        while at < end:
            if letters[data[at]]:  # runs of ASCII letters are most of most texts
                run = at
                while at < end and letters[data[at]]:
                    at += 1
                length += at - run
                seen = ALPHA | PUNCTUATION
                continue
            code, after = next_character(data, at)
            flag = flags[code]
            if flag & SPACE:
                break
            at = after
            length += 1
            hashes += code == 35
            # In `seen`, PUNCTUATION stands for a character that is not punctuation.
            seen |= (flag ^ PUNCTUATION) & (ALPHA | PUNCTUATION)
        characters += length
        words += 1
        letter_words += (seen & ALPHA) != 0
        if seen & PUNCTUATION:
            plain_words += 1
            plain_characters += length
        if starts[data[word_begin]]:
            found = find_run(data, word_begin, at, stop_data, stop_offsets)
            if found >= 0:
                stops |= np.uint64(1) << np.uint64(found)
    out[0], out[1], out[2], out[3], out[4] = characters, words, plain_words, plain_characters, letter_words
    out[5], out[7], out[11] = hashes, newlines, _bits(stops)


@kernel
def _count_lines(data: UInt8s, begin: int, end: int, flags: UInt8s, marks: Bools, out: Int64s) -> None:
    ellipses = lines = bullet_lines = ellipsis_lines = 0
    line_begin = at = begin
    while at < end:
        if not marks[data[at]]:
            at += 1
            continue
        here = at
        code, at = next_character(data, at)
        if code == 46:
            while at < end and data[at] == 46:
                at += 1
            ellipses += (at - here) // 3
        elif code == _ELLIPSIS:
            ellipses += 1
        elif flags[code] & LINE_END:
            lines += 1
            bullet_lines += _begins_with_bullet(data, line_begin, here, flags)
            ellipsis_lines += _ends_with_ellipsis(data, line_begin, here, flags)
            at += code == 13 and at < end and data[at] == 10
            line_begin = at
    if line_begin < end:
        lines += 1
        bullet_lines += _begins_with_bullet(data, line_begin, end, flags)
        ellipsis_lines += _ends_with_ellipsis(data, line_begin, end, flags)
    out[6], out[8], out[9], out[10] = ellipses, lines, bullet_lines, ellipsis_lines


@kernel
def _begins_with_bullet(data: UInt8s, begin: int, end: int, flags: UInt8s) -> bool:
    at = begin
    while at < end:
        code, at = next_character(data, at)
        if not flags[code] & SPACE:
            return code == _BULLET or code == 45
    return False


@kernel
def _ends_with_ellipsis(data: UInt8s, begin: int, end: int, flags: UInt8s) -> bool:
    at = end
    while at > begin:
        at -= 1
        while data[at] & 0xC0 == 0x80:
            at -= 1
        code, after = next_character(data, at)
        if not flags[code] & SPACE:
            dots = after - begin >= 3 and data[after - 1] == data[after - 2] == data[after - 3] == 46
            return code == _ELLIPSIS or dots
    return False


@kernel
def _bits(mask: np.uint64) -> int:
    count = 0
    while mask:
        mask &= mask - np.uint64(1)
        count += 1
    return count
