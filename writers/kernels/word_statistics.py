"""Counts of characters, words and lines in the UTF-8 bytes of a batch.

Words are split as by `str.split()`, lines as by `str.splitlines()`. A text is read in blocks of 64 bytes as
bit masks (blocks.py), in which words are runs of ones. Words with a letter are found by adding the masks of
words and letters: the sum has a carry out of each run that has a letter. The only memory used is the counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from shardkit.kernels.numba_support import Bools, Int64s, UInt8s, UInt64s, int64, kernel
from shardkit.kernels.simd import count_ones, leading_zeros, load_8_bytes, range_mask, trailing_zeros
from shardkit.kernels.utf8 import (
    LINE_END,
    SPACE,
    character_flags,
    find_run,
    join_runs,
    next_character,
    pack_bytes,
)
from shardkit.writers.kernels.blocks import BLOCK_BYTES, TAIL_BYTES, block_at, lowest_bits, word_masks

_ELLIPSIS = 0x2026
_BULLET = 0x2022
_ONE, _TOP = np.uint64(1), np.uint64(63)
_STOP_SLOTS = 1024  # size of the hash table of at most 64 stop words
_STOP_SHIFT = np.uint64(54)
_SCATTER = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class WordStatistics:
    """Counts, int64[n] each: one number per document."""

    characters: Int64s
    words: Int64s
    plain_words: Int64s  # words with a character that is not punctuation
    plain_word_characters: Int64s  # characters in plain words
    letter_words: Int64s  # words with a letter
    hashes: Int64s  # characters #
    ellipses: Int64s  # "..." without overlaps, and the ellipsis U+2026
    newlines: Int64s
    lines: Int64s
    bullet_lines: Int64s  # lines whose first character other than white space is the bullet U+2022 or -
    ellipsis_lines: Int64s  # lines that end in ... or the ellipsis U+2026, apart from white space
    stop_words: Int64s  # how many different stop words occur


def word_statistics(
    data: UInt8s, offsets: Int64s, wanted: Bools, stop_words: Sequence[str] = ()
) -> WordStatistics:
    """Return counts for the documents data[offsets[i]:offsets[i + 1]], valid UTF-8; 0 where not `wanted`."""
    counts = np.zeros((len(fields(WordStatistics)), len(wanted)), np.int64)
    stops = [word.encode() for word in dict.fromkeys(stop_words) if word]
    if len(stops) > 64:
        raise ValueError(f"got {len(stops)} stop words; the limit is 64, the bits of the kernel's mask")
    tail = np.zeros(TAIL_BYTES, np.uint8)
    _count(data, offsets, wanted, character_flags(), _stop_table(stops), tail, counts)
    return WordStatistics(*counts)


class _StopWords(NamedTuple):
    """All stop words as `join_runs` returns them; those of up to eight bytes also in a hash table."""

    keys: UInt64s
    bits: UInt64s  # the bit of each stop word in `keys`; 0 where a slot is empty
    data: UInt8s
    offsets: Int64s
    longest: int
    all: np.uint64


def _stop_table(stops: Sequence[bytes]) -> _StopWords:
    keys, bits = np.zeros(_STOP_SLOTS, np.uint64), np.zeros(_STOP_SLOTS, np.uint64)
    for number, word in enumerate(stops):
        if len(word) > 8 or not word[-1]:
            continue
        key = int.from_bytes(word, "little")
        slot = (key * _SCATTER & ((1 << 64) - 1)) >> int(_STOP_SHIFT)
        while bits[slot]:
            slot = (slot + 1) % _STOP_SLOTS
        keys[slot], bits[slot] = key, 1 << number
    longest, every = max(map(len, stops), default=0), np.uint64((1 << len(stops)) - 1)
    return _StopWords(keys, bits, *join_runs(stops), longest, every)


@kernel(allocates=False)
def _count(
    data: UInt8s,
    offsets: Int64s,
    wanted: Bools,
    flags: UInt8s,
    stop_words: _StopWords,
    tail: UInt8s,
    counts: Int64s,
) -> None:
    for document in range(len(wanted)):
        if wanted[document]:
            begin, end, out = offsets[document], offsets[document + 1], counts[:, document]
            _count_words(data, begin, end, flags, stop_words, tail, out)
            _count_lines(data, begin, end, flags, tail, out)


@kernel(allocates=False)
def _count_words(
    data: UInt8s, begin: int, end: int, flags: UInt8s, stop_words: _StopWords, tail: UInt8s, out: Int64s
) -> None:
    zero = np.uint64(0)
    stops = spilled = zero
    # State of a word that continues in the next block: `inside` is 1, `start` is where it began, and `length`
    # its characters so far; the flags tell whether it has a letter, and a character other than punctuation.
    inside, start, length, has_letter, has_plain = zero, begin, 0, zero, zero
    for at in range(begin, end + 1, BLOCK_BYTES):  # up to `end`, where the last word ends
        spaces, letters, plain, heads, spilled = word_masks(data, at, end, flags, spilled, tail)
        words = ~spaces
        before = words << _ONE | inside
        ends = before & spaces
        letters, has_letter = _add(words, letters, has_letter)
        plain, has_plain = _add(words, plain, has_plain)
        out[0] += count_ones(heads)
        out[1] += count_ones(ends)
        out[2] += count_ones(ends & plain)
        out[3] += count_ones(heads & words)
        out[4] += count_ones(ends & letters)
        symbols = ends & ~plain
        while symbols:  # few words have only punctuation
            stop = trailing_zeros(symbols)
            symbols &= symbols - _ONE
            first = BLOCK_BYTES - leading_zeros(spaces & lowest_bits(stop))
            out[3] -= count_ones(heads & lowest_bits(stop) & ~lowest_bits(first))
            out[3] -= 0 if first else length
        if stops != stop_words.all:
            stops |= _find_stops(data, at, words, before, start, stop_words)
        first = BLOCK_BYTES - leading_zeros(spaces)
        if first:
            start, length = at + first, 0
        length += count_ones(heads & ~lowest_bits(first))
        inside = words >> _TOP
    out[11] = count_ones(stops)


@kernel(inline=True)
def _add(words: np.uint64, some: np.uint64, carry: np.uint64) -> tuple[np.uint64, np.uint64]:
    """Return (sum, its carry); the sum has a bit after each run of `words` that contains a bit of `some`."""
    part = words + some
    total = part + carry
    return total, np.uint64(part < words) | np.uint64(total < part)


@kernel(allocates=False)
def _find_stops(
    data: UInt8s, at: int, words: np.uint64, before: np.uint64, start: int, stop_words: _StopWords
) -> np.uint64:
    """Return the bits of the stop words that end in the block at `at`; `before` is `words` shifted by 1."""
    found = np.uint64(0)
    if before & _ONE:  # a word that began at `start`, in an earlier block
        stop = at + (trailing_zeros(~words) if ~words else BLOCK_BYTES)
        if stop < at + BLOCK_BYTES and stop - start <= stop_words.longest:
            found |= _stop_bit(data, start, stop, stop_words)
    begins = words & ~before
    while begins:
        first = trailing_zeros(begins)
        begins &= begins - _ONE
        rest = ~(words >> np.uint64(first))
        size = trailing_zeros(rest) if rest else BLOCK_BYTES
        if size <= stop_words.longest and first + size < BLOCK_BYTES:
            found |= _stop_bit(data, at + first, at + first + size, stop_words)
    return found


@kernel(allocates=False)
def _stop_bit(data: UInt8s, begin: int, end: int, stop_words: _StopWords) -> np.uint64:
    """Return the bit of the stop word data[begin:end], or 0."""
    if end - begin > 8 or not data[end - 1]:  # the key would ignore zero bytes at the end of a word
        number = find_run(data, begin, end, stop_words.data, stop_words.offsets)
        return _ONE << np.uint64(number) if number >= 0 else np.uint64(0)
    if begin + 8 <= len(data):
        key = load_8_bytes(data, begin) & lowest_bits(8 * (end - begin))
    else:
        key = pack_bytes(data, begin, end)
    slot = int64(key * np.uint64(_SCATTER) >> _STOP_SHIFT)
    while stop_words.bits[slot]:
        if stop_words.keys[slot] == key:
            return np.uint64(stop_words.bits[slot])
        slot = (slot + 1) & (_STOP_SLOTS - 1)
    return np.uint64(0)


@kernel(allocates=False)
def _count_lines(data: UInt8s, begin: int, end: int, flags: UInt8s, tail: UInt8s, out: Int64s) -> None:
    line_begin, after = begin, begin
    for at in range(begin, end, BLOCK_BYTES):
        block, place = block_at(data, at, tail)
        valid = lowest_bits(min(BLOCK_BYTES, end - at))
        out[5] += count_ones(range_mask(block, place, 35, 1) & valid)
        newlines = range_mask(block, place, 10, 1)
        out[7] += count_ones(newlines & valid)
        # All bytes that may begin a line end, a dot or an ellipsis.
        marks = range_mask(block, place, 10, 4) | range_mask(block, place, 28, 3)
        marks |= range_mask(block, place, 46, 1)
        marks |= range_mask(block, place, 0xC2, 1) | range_mask(block, place, 0xE2, 1)
        marks &= valid
        while marks:
            here = at + trailing_zeros(marks)
            marks &= marks - _ONE
            if here < after:
                continue
            code, after = next_character(data, here)
            if code == 46:
                while after < end and data[after] == 46:
                    after += 1
                out[6] += (after - here) // 3
            elif code == _ELLIPSIS:
                out[6] += 1
            elif flags[code] & LINE_END:
                out[8] += 1
                out[9] += _begins_with_bullet(data, line_begin, here, flags)
                out[10] += _ends_with_ellipsis(data, line_begin, here, flags)
                after += code == 13 and after < end and data[after] == 10
                line_begin = after
    if line_begin < end:
        out[8] += 1
        out[9] += _begins_with_bullet(data, line_begin, end, flags)
        out[10] += _ends_with_ellipsis(data, line_begin, end, flags)


@kernel(allocates=False)
def _begins_with_bullet(data: UInt8s, begin: int, end: int, flags: UInt8s) -> bool:
    at = begin
    while at < end:
        code, at = next_character(data, at)
        if not flags[code] & SPACE:
            return code == _BULLET or code == 45
    return False


@kernel(allocates=False)
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
