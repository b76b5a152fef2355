r"""Normalized words of texts, as lists in plain Python and as 64-bit hashes straight from UTF-8 bytes.

Normalization "shardkit-1" converts a text to Unicode normalization form C and to lower case; its words are
the maximal runs of letters, digits and underscores of any script (Python's `\w`). Punctuation, symbols and
white space are dropped; digits and accents are kept. Lower case is `str.lower` character by character, with
two exceptions where `str.lower` depends on context or changes the length: a final sigma becomes a sigma, and
a dotted capital I a plain i. Letters and forms are those of the running Python's Unicode version.

A word's hash is made from its lower-case UTF-8 bytes, eight at a time as little-endian numbers, the last ones
padded with zeros: h = _SEED; for each eight: h = mix(h, eight) (`utf8.py`). Words of up to eight bytes never
share a hash.

`next_words` works on segments of 4,096 bytes: every 64 bytes become a bit mask of word bytes, whose runs of
ones are found. A run of ASCII is a word, which costs a load and a multiplication per eight bytes; in other
runs, non-ASCII characters are decoded one by one.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from shardkit.kernels.numba_support import (
    Bools,
    Int32s,
    Int64s,
    UInt8s,
    UInt32s,
    UInt64s,
    int64,
    kernel,
)
from shardkit.kernels.simd import count_ones, load_8_bytes, range_mask, trailing_zeros, word_mask
from shardkit.kernels.text_arrays import replace_texts, text_bytes, text_offsets
from shardkit.kernels.utf8 import (
    ASSIGNED,
    CODE_POINTS,
    IDEOGRAPHS,
    every_character,
    mix,
    next_character,
    utf8_bytes,
)

NORMALIZATION = "shardkit-1"
WORD = 1
CHANGING = 2  # normalization form C changes the character
LEADING = 4  # form C may combine the character with a JOINING character after it
JOINING = 8
UNSPACED = 16  # the character is of a script that is written without spaces between words
_UNSPACED_SCRIPTS = (
    *((0x0E00, 0x0E7F), (0x0E80, 0x0EFF)),  # Thai, Lao
    *((0x1000, 0x109F), (0xA9E0, 0xA9FF), (0xAA60, 0xAA7F)),  # Burmese
    *((0x1780, 0x17FF), (0x19E0, 0x19FF)),  # Khmer
    *((0x3005, 0x3007), (0x3041, 0x30FF), (0x31F0, 0x31FF), (0xFF66, 0xFF9F)),  # Kana
    *((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x323AF)),  # Chinese characters
)
UNSPACED_CLASS = "".join(f"{chr(first)}-{chr(last)}" for first, last in _UNSPACED_SCRIPTS)
_SPECIAL_LOWER = {0x0130: 0x69, 0x03C2: 0x03C3}  # dotted capital I, final sigma
_HANGUL_INITIALS, _HANGUL_SYLLABLES = range(0x1100, 0x1113), range(0xAC00, 0xD7A4)
_HANGUL_VOWELS, _HANGUL_FINALS = range(0x1161, 0x1176), range(0x11A8, 0x11C3)
_UTF_32 = f"utf-32-{sys.byteorder[0]}e"
_BLOCK = 256
_BEYOND_ASCII = np.uint64(0x8080808080808080)
_WORDS = re.compile(r"\w+")


class CharacterTables(NamedTuple):
    """For every code point: flags, uint8[1,114,112], and its lower case, uint32[1,114,112]; read-only."""

    flags: UInt8s
    lower: UInt32s


@cache
def combining_classes() -> UInt8s:
    """Return uint8[1,114,112]: the canonical combining class of every code point."""
    classes = np.zeros(CODE_POINTS, np.uint8)
    found = map(unicodedata.combining, map(chr, range(IDEOGRAPHS)))
    classes[:IDEOGRAPHS] = np.fromiter(found, np.uint8, IDEOGRAPHS)
    return classes


def normalization_version() -> str:
    """Return the version of everything that a text's words depend on, apart from the text itself."""
    return f"{NORMALIZATION}, Unicode {unicodedata.unidata_version}"


@cache
def character_tables() -> CharacterTables:
    """Return the tables of flags and lower case, which are made once per process."""
    flags, lower = np.zeros(CODE_POINTS, np.uint8), np.arange(CODE_POINTS, dtype=np.uint32)
    every = every_character()
    flags[:ASSIGNED] |= np.char.isalnum(every) * np.uint8(WORD)
    flags[ord("_")] |= WORD
    for first, last in _UNSPACED_SCRIPTS:
        flags[first : last + 1] |= UNSPACED
    text = every.tobytes().decode(_UTF_32, "surrogatepass")
    # This equals lower-casing one by one: no sigma in this text is final, because a letter follows it, and
    # only the dotted capital I would become two characters.
    low = text.replace("\u0130", "i").lower()
    lower[:ASSIGNED] = np.frombuffer(low.encode(_UTF_32, "surrogatepass"), np.uint32)
    for code, replacement in _SPECIAL_LOWER.items():
        lower[code] = replacement
    _mark_composing(flags, text)
    flags.flags.writeable = lower.flags.writeable = False
    return CharacterTables(flags, lower)


def _mark_composing(flags: UInt8s, text: str) -> None:
    """Set CHANGING, LEADING and JOINING: characters that form C changes, and pairs that it combines.

    `text` has all characters, in order. Most blocks of it have no character that decomposes.
    """
    for block in range(0, len(text), _BLOCK):
        if unicodedata.is_normalized("NFD", text[block : block + _BLOCK]):
            continue
        for code, character in enumerate(text[block : block + _BLOCK], block):
            decomposition = unicodedata.decomposition(character)
            if not decomposition or decomposition.startswith("<"):
                continue
            parts = [int(part, 16) for part in decomposition.split()]
            if unicodedata.normalize("NFC", character) != character:
                flags[code] |= CHANGING
            elif len(parts) == 2:
                flags[parts[0]] |= LEADING
                flags[parts[1]] |= JOINING
    for leading in (_HANGUL_INITIALS, _HANGUL_SYLLABLES):
        flags[leading.start : leading.stop] |= LEADING
    for joining in (_HANGUL_VOWELS, _HANGUL_FINALS):
        flags[joining.start : joining.stop] |= JOINING


def composed(texts: pa.LargeStringArray) -> pa.LargeStringArray:
    """Return the texts in normalization form C; the same array, at memory speed, if all are in it already."""
    offsets = text_offsets(texts)
    suspect = np.zeros(len(texts), np.bool_)
    _find_composing(text_bytes(texts), offsets, character_tables().flags, combining_classes(), suspect)
    changed = {}
    for number in np.flatnonzero(suspect).tolist():
        text = texts[number].as_py()
        if not unicodedata.is_normalized("NFC", text):
            changed[number] = unicodedata.normalize("NFC", text)
    return replace_texts(texts, changed)


# (the bytes of a segment, these in lower case, starts of its runs of word bytes, ends of the runs)
_Scratch = tuple[UInt8s, UInt8s, Int32s, Int32s]


@kernel
def _find_composing(data: UInt8s, offsets: Int64s, flags: UInt8s, classes: UInt8s, found: Bools) -> None:
    """Mark texts that may not be in form C, by a refined quick check of Unicode Standard Annex 15.

    A JOINING character counts only after a LEADING one, which is rare for vowel signs in Indic scripts.
    """
    for text in range(len(found)):
        at, stop = offsets[text], offsets[text + 1]
        leading = before = int64(0)
        while at < stop:
            if data[at] < 0x80:
                if at + 64 <= stop:
                    beyond = range_mask(data, at, 0x80, 0x80)
                    at += trailing_zeros(beyond) if beyond else 64
                else:
                    at += 1
                leading, before = int64(data[at - 1]), int64(0)
                continue
            code, at = next_character(data, at)
            flag, combining = flags[code], int64(classes[code])
            joins = (flag & JOINING) != 0 and (flags[leading] & LEADING) != 0
            if joins or flag & CHANGING or 0 < combining < before:
                found[text] = True
                break
            if combining == 0:
                leading = code
            before = combining


@lru_cache(maxsize=1 << 16)
def lower_case(word: str) -> str:
    """Return a word in lower case, character by character."""
    if word.isascii():
        return word.lower()
    lower = character_tables().lower
    return "".join(chr(int(lower[ord(character)])) for character in word)


def normalized_words(text: str) -> list[str]:
    """Return the normalized words of a text, in plain Python."""
    return [lower_case(word) for word in _WORDS.findall(unicodedata.normalize("NFC", text))]


SEGMENT_BYTES = 4096
SCRATCH_WORDS = 2 * SEGMENT_BYTES  # a call finds at most SEGMENT_BYTES words
_SEED = np.uint64(0x243F6A8885A308D3)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
_ONE, _TOP = np.uint64(1), np.uint64(63)


@kernel
def make_scratch() -> _Scratch:
    """Make the 25 KB of scratch arrays for `next_words`; calls can share them."""
    return (
        np.zeros(SEGMENT_BYTES + 128, np.uint8),
        np.zeros(SEGMENT_BYTES + 128, np.uint8),
        np.zeros(SEGMENT_BYTES // 2 + 72, np.int32),
        np.zeros(SEGMENT_BYTES // 2 + 72, np.int32),
    )


@kernel
def next_words(
    data: UInt8s, at: int, stop: int, tables: CharacterTables, scratch: _Scratch, out: UInt64s, count: int
) -> tuple[int, int]:
    """Append hashes of words of data[at:stop] to out[count:]; return (new count, `at` for the next call).

    `at` and the returned index are never inside a word; `stop` is the end of the text. `scratch` is made by
    `make_scratch`; `out` needs room for SCRATCH_WORDS more hashes.
    """
    segment, lower, begins, ends = scratch
    flags, lower_table = tables
    size = min(SEGMENT_BYTES, stop - at)
    source = data[at : at + size]  # a view with indexes from 0, so that the loop becomes a memory copy
    for i in range(size):  # not a slice assignment, which takes Numba six seconds to compile
        segment[i] = source[i]
    for i in range(size, size + 72):
        segment[i] = 0
    found = _find_runs(segment, size, lower, begins, ends)
    after = size
    if at + size < stop and found and ends[found - 1] == size:  # the last run may continue
        found -= 1
        after = begins[found]
        if after == 0:  # the run is longer than a segment
            return _hash_run(data, at, stop, True, flags, lower_table, out, count)
    for run in range(found):
        begin, end = begins[run], ends[run]
        value, other = _hash_lower(lower, begin, end - begin)
        if other:
            words = _split_run(lower, begin, end, flags, lower_table, out, count)
            if words < 0:
                words, _ = _hash_run(data, at + begin, at + end, False, flags, lower_table, out, count)
            count = words
        else:
            out[count] = value
            count += 1
    return count, at + after


@kernel(allocates=False)
def _split_run(
    lower: UInt8s, begin: int, end: int, flags: UInt8s, lower_table: UInt32s, out: UInt64s, count: int
) -> int:
    """Append hashes of the words of a run, which non-ASCII characters may separate; return the new count.

    ASCII in `lower` is in lower case already. Other characters are changed to lower case in place; return -1
    at one of the few whose lower case has more or fewer bytes.
    """
    word, at = begin, begin
    while at < end:
        others = load_8_bytes(lower, at) & _BEYOND_ASCII
        at += trailing_zeros(others) >> 3 if others else 8
        if not others or at >= end:
            continue
        code, after = next_character(lower, at)
        if not flags[code] & WORD:
            if at > word:
                out[count] = _hash_lower(lower, word, at - word)[0]
                count += 1
            word = after
        elif lower_table[code] != code:
            utf8, length = utf8_bytes(lower_table[code])
            if length != after - at:
                return -1
            for i in range(length):
                lower[at + i] = utf8 >> np.uint64(8 * i) & np.uint64(0xFF)
        at = after
    if word < end:
        out[count] = _hash_lower(lower, word, end - word)[0]
        count += 1
    return count


@kernel(allocates=False)
def _find_runs(segment: UInt8s, size: int, lower: UInt8s, begins: Int32s, ends: Int32s) -> int:
    """Write the bounds of the runs of word bytes in `segment` to `begins` and `ends`; return their number."""
    begun = ended = 0
    before = np.uint64(0)
    for block in range(0, size + 1, 64):  # zeros follow the text, so the last run ends
        mask = word_mask(segment, block, lower)
        shifted = mask << _ONE | before
        before = mask >> _TOP
        starts, stops = mask & ~shifted, shifted & ~mask
        begun_after, ended_after = begun + count_ones(starts), ended + count_ones(stops)
        while begun < begun_after or ended < ended_after:
            for i in range(8):  # always eight: branch prediction would fail for the exact number
                begins[begun + i] = block + trailing_zeros(starts)
                ends[ended + i] = block + trailing_zeros(stops)
                starts &= starts - _ONE
                stops &= stops - _ONE
            begun += 8
            ended += 8
        begun, ended = begun_after, ended_after
    return ended


@kernel(allocates=False)
def _hash_lower(lower: UInt8s, begin: int, length: int) -> tuple[np.uint64, np.uint64]:
    """Return (hash of a run of bytes, a number that is not 0 if any byte is not ASCII)."""
    if length > 15:
        return _hash_long(lower, begin, length)
    # There is no branch here, because it is hard to predict which words have more than eight bytes.
    first = load_8_bytes(lower, begin) & _ALL >> np.uint64(64 - 8 * min(length, 8))
    second = load_8_bytes(lower, begin + 8) & ~(_ALL << np.uint64(8 * max(length - 8, 0)))
    value = mix(_SEED, first)
    longer = mix(value, second)
    return longer if length > 8 else value, (first | second) & _BEYOND_ASCII


@kernel
def _hash_long(lower: UInt8s, begin: int, length: int) -> tuple[np.uint64, np.uint64]:
    """Return the same as `_hash_lower`, for runs of any length."""
    value, other = _SEED, np.uint64(0)
    while length > 0:
        eight = load_8_bytes(lower, begin)
        if length < 8:
            eight &= _ALL >> np.uint64(64 - 8 * length)
        other |= eight & _BEYOND_ASCII
        value = mix(value, eight)
        begin += 8
        length -= 8
    return value, other


@kernel
def _hash_run(
    data: UInt8s,
    at: int,
    stop: int,
    open_end: bool,
    flags: UInt8s,
    lower_table: UInt32s,
    out: UInt64s,
    count: int,
) -> tuple[int, int]:
    """Append hashes of words as `next_words` does, but character by character up to `stop`.

    With `open_end`, stop earlier: at an ASCII character that is not part of a word, or after SEGMENT_BYTES
    words.
    """
    limit = count + SEGMENT_BYTES
    value, eight, filled = _SEED, np.uint64(0), 0
    inside = False
    while at < stop:
        code, after = next_character(data, at)
        if not flags[code] & WORD:
            if inside:
                out[count] = mix(value, eight) if filled else value
                count += 1
                value, eight, filled, inside = _SEED, np.uint64(0), 0, False
            if open_end and (code < 0x80 or count >= limit):
                return count, at if code < 0x80 else after
            at = after
            continue
        at = after
        inside = True
        utf8, size = utf8_bytes(lower_table[code])
        eight |= utf8 << np.uint64(8 * filled)
        filled += size
        if filled >= 8:
            value = mix(value, eight)
            filled -= 8
            eight = utf8 >> np.uint64(8 * (size - filled))
    if inside:
        out[count] = mix(value, eight) if filled else value
        count += 1
    return count, at
