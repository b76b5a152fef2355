"""Counts of characters, words and lines, one pass over the UTF-8 bytes of a batch.

Words are those of `str.split()`, lines those of `str.splitlines()`; `reference_word_statistics` is the same
in plain Python and the kernel is tested equal to it. No memory but the counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import numba
import numpy as np
import numpy.typing as npt

from shardkit.writers.filters.characters import (
    ALPHA,
    LINE_END,
    PUNCTUATION,
    SPACE,
    character_flags,
    characters_with,
)

__all__ = ["WordStatistics", "reference_word_statistics", "word_statistics"]

_ELLIPSIS = 0x2026
_BULLET = 0x2022


@dataclass(frozen=True, slots=True)
class WordStatistics:
    """int64[n] each: one number per document."""

    characters: npt.NDArray[np.int64]
    words: npt.NDArray[np.int64]
    plain_words: npt.NDArray[np.int64]  # words with a character that is not punctuation
    plain_word_characters: npt.NDArray[np.int64]
    letter_words: npt.NDArray[np.int64]  # words with a letter
    hashes: npt.NDArray[np.int64]
    ellipses: npt.NDArray[np.int64]  # "..." that do not overlap, and "…"
    newlines: npt.NDArray[np.int64]
    lines: npt.NDArray[np.int64]
    bullet_lines: npt.NDArray[np.int64]  # the first character that is no space is • or -
    ellipsis_lines: npt.NDArray[np.int64]  # without spaces at the end, they end in ... or …
    stop_words: npt.NDArray[np.int64]  # distinct ones


def word_statistics(
    data: npt.NDArray[np.uint8],
    offsets: npt.NDArray[np.int64],
    wanted: npt.NDArray[np.bool_],
    stop_words: Sequence[str] = (),
) -> WordStatistics:
    """Counts of the documents data[offsets[i]:offsets[i + 1]], valid UTF-8; zeros where not `wanted`."""
    counts = np.zeros((len(fields(WordStatistics)), len(wanted)), np.int64)
    stops = [word.encode() for word in dict.fromkeys(stop_words) if word]
    if len(stops) > 64:
        raise ValueError(f"{len(stops)} stop words; at most 64 fit in the kernel's bit mask")
    stop_data = np.frombuffer(b"".join(stops) or b"\0", np.uint8)
    stop_offsets = np.cumsum([0, *map(len, stops)], dtype=np.int64)
    starts = np.zeros(256, np.bool_)
    starts[[word[0] for word in stops]] = True
    letters = np.zeros(256, np.bool_)
    letters[:128] = character_flags()[:128] == ALPHA
    tables = (character_flags(), letters, stop_data, stop_offsets, starts)
    _count(data, offsets, wanted, tables, counts)
    return WordStatistics(*counts)


@numba.njit(nogil=True, cache=True)
def _count(data, offsets, wanted, tables, counts):  # type: ignore[no-untyped-def]
    for document in range(len(wanted)):
        if wanted[document]:
            _count_one(data, offsets[document], offsets[document + 1], tables, counts[:, document])


@numba.njit(nogil=True, cache=True)
def _count_one(data, begin, end, tables, out):  # type: ignore[no-untyped-def]
    flags, letters, stop_data, stop_offsets, starts = tables
    characters = words = plain_words = plain_characters = letter_words = 0
    hashes = ellipses = newlines = lines = bullet_lines = ellipsis_lines = 0
    stops = np.uint64(0)
    word_begin, word_characters, word_flags, in_word = begin, 0, 0, False
    dots = tail = first = 0  # run of dots, the run at the line's last visible character, its first one
    line_open = False
    before = 0
    at = begin
    while at < end:
        here = at
        if letters[data[at]]:  # runs of ASCII letters are most of most texts
            while at < end and letters[data[at]]:
                at += 1
            if not in_word:
                in_word, word_begin, word_characters = True, here, 0
            word_flags = ALPHA | PUNCTUATION
            characters += at - here
            word_characters += at - here
            if first == 0:
                first = 97  # any letter will do, here and below
            before, line_open, dots, tail = 97, True, 0, 0
            continue
        code, at = _next_character(data, at)
        characters += 1
        flag = flags[code]
        if flag & SPACE:
            if in_word:
                in_word = False
                words += 1
                letter_words += (word_flags & ALPHA) != 0
                if word_flags & PUNCTUATION:
                    plain_words += 1
                    plain_characters += word_characters
                if starts[data[word_begin]]:
                    stops |= _stop_bit(data, word_begin, here, stop_data, stop_offsets)
            dots = 0
            if flag & LINE_END:
                newlines += code == 10
                if not (code == 10 and before == 13):
                    lines += 1
                    bullet_lines += first == _BULLET or first == 45
                    ellipsis_lines += tail >= 3
                    tail = first = 0
                line_open = False
            else:
                line_open = True
        else:
            if not in_word:
                in_word, word_begin, word_characters, word_flags = True, here, 0, 0
            word_characters += 1
            # In a word's flags, PUNCTUATION stands for "has a character that is not punctuation".
            word_flags |= (flag ^ PUNCTUATION) & (ALPHA | PUNCTUATION)
            line_open = True
            if first == 0:
                first = code
            if code == 46:
                dots += 1
                ellipses += dots % 3 == 0
                tail = dots
            else:
                dots = tail = 0
                hashes += code == 35
                if code == _ELLIPSIS:
                    ellipses += 1
                    tail = 3
        before = code
    if in_word:
        words += 1
        letter_words += (word_flags & ALPHA) != 0
        if word_flags & PUNCTUATION:
            plain_words += 1
            plain_characters += word_characters
        if starts[data[word_begin]]:
            stops |= _stop_bit(data, word_begin, end, stop_data, stop_offsets)
    if line_open:
        lines += 1
        bullet_lines += first == _BULLET or first == 45
        ellipsis_lines += tail >= 3
    out[0], out[1], out[2], out[3], out[4] = characters, words, plain_words, plain_characters, letter_words
    out[5], out[6], out[7], out[8], out[9] = hashes, ellipses, newlines, lines, bullet_lines
    out[10], out[11] = ellipsis_lines, _bits(stops)


@numba.njit(nogil=True, cache=True, inline="always")
def _next_character(data, at):  # type: ignore[no-untyped-def]
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
def _stop_bit(data, begin, end, stop_data, stop_offsets):  # type: ignore[no-untyped-def]
    for word in range(len(stop_offsets) - 1):
        start = stop_offsets[word]
        if stop_offsets[word + 1] - start == end - begin:
            same = True
            for at in range(end - begin):
                if data[begin + at] != stop_data[start + at]:
                    same = False
                    break
            if same:
                return np.uint64(1) << np.uint64(word)
    return np.uint64(0)


@numba.njit(nogil=True, cache=True)
def _bits(mask):  # type: ignore[no-untyped-def]
    count = 0
    while mask:
        mask &= mask - np.uint64(1)
        count += 1
    return count


def reference_word_statistics(text: str, stop_words: Sequence[str] = ()) -> tuple[int, ...]:
    """The counts of one text in the order of WordStatistics, in plain Python."""
    punctuation = characters_with(PUNCTUATION)
    words, lines = text.split(), text.splitlines()
    plain = [word for word in words if any(character not in punctuation for character in word)]
    return (
        len(text),
        len(words),
        len(plain),
        sum(map(len, plain)),
        sum(any(character.isalpha() for character in word) for word in words),
        text.count("#"),
        text.count("...") + text.count("…"),
        text.count("\n"),
        len(lines),
        sum(line.lstrip().startswith(("•", "-")) for line in lines),
        sum(line.rstrip().endswith(("...", "…")) for line in lines),
        len(set(stop_words) & set(words)),
    )


def as_rows(statistics: WordStatistics) -> list[tuple[int, ...]]:
    """One tuple per document, to compare with the reference."""
    return [tuple(map(int, row)) for row in zip(*astuple(statistics), strict=True)]
