"""What two documents must share to be alike: their words, without case and without what is between them.

Version "shardkit-1": a text in Unicode normalization form C, in lower case, and of it the maximal runs of
letters, digits and underscores of any script (Python's `\\w`). So punctuation, symbols and white space do not
count, digits and accents do. Lower case is `str.lower` character by character, with two exceptions that
depend on context or length there: a final sigma is a sigma, and a dotted capital I is a plain i.
Letters and forms are those of the running Python's Unicode version.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache, lru_cache
from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from shardkit.writers.dedup.simd import load_8_bytes
from shardkit.writers.documents import text_offsets
from shardkit.writers.utf8 import next_character

__all__ = [
    "NORMALIZATION",
    "WORD",
    "CharacterTables",
    "character_tables",
    "combining_classes",
    "composed",
    "normalization_version",
    "normalized_words",
]

NORMALIZATION = "shardkit-1"

WORD = 1
CHANGING = 2  # form C writes it differently
LEADING = 4  # form C may make one of it and a JOINING character after it
JOINING = 8

_ASSIGNED = 0x40000  # planes above hold tags, private use and nothing
_CODE_POINTS = 0x110000
_SPECIAL_LOWER = {0x0130: 0x69, 0x03C2: 0x03C3}  # dotted capital I, final sigma
_HANGUL_INITIALS, _HANGUL_SYLLABLES = range(0x1100, 0x1113), range(0xAC00, 0xD7A4)
_HANGUL_VOWELS, _HANGUL_FINALS = range(0x1161, 0x1176), range(0x11A8, 0x11C3)
_BEYOND_ASCII = np.uint64(0x8080808080808080)
_WORDS = re.compile(r"\w+")


class CharacterTables(NamedTuple):
    """For every code point: flags, uint8[1,114,112], and its lower case, uint32[1,114,112]; read-only."""

    flags: npt.NDArray[np.uint8]
    lower: npt.NDArray[np.uint32]


@cache
def combining_classes() -> npt.NDArray[np.uint8]:
    """uint8[1,114,112]: canonical combining class of every code point."""
    classes = np.zeros(_CODE_POINTS, np.uint8)
    for code in range(_ASSIGNED):
        classes[code] = unicodedata.combining(chr(code))
    return classes


def normalization_version() -> str:
    """What the words of a text depend on beside the text."""
    return f"{NORMALIZATION}, Unicode {unicodedata.unidata_version}"


@cache
def character_tables() -> CharacterTables:
    """Made once a process, in a fifth of a second."""
    flags, lower = np.zeros(_CODE_POINTS, np.uint8), np.arange(_CODE_POINTS, dtype=np.uint32)
    every = [chr(code) for code in range(_ASSIGNED)]
    flags[:_ASSIGNED] |= np.fromiter(map(str.isalnum, every), np.uint8, _ASSIGNED) * np.uint8(WORD)
    flags[ord("_")] |= WORD
    for code, character in enumerate(every):
        low = character.lower()
        if low != character and len(low) == 1:
            lower[code] = ord(low)
    for code, replacement in _SPECIAL_LOWER.items():
        lower[code] = replacement
    _mark_composing(flags, every)
    flags.flags.writeable = lower.flags.writeable = False
    return CharacterTables(flags, lower)


def _mark_composing(flags: npt.NDArray[np.uint8], every: list[str]) -> None:
    """Set CHANGING, LEADING and JOINING: what form C writes differently, and which pairs it makes one."""
    for code, character in enumerate(every):
        decomposition = unicodedata.decomposition(character) if code >= 0xC0 else ""
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
    """The texts in normalization form C; the very same array, at the speed of memory, where they are."""
    offsets = text_offsets(texts)
    suspect = np.zeros(len(texts), np.bool_)
    _find_composing(text_bytes(texts), offsets, character_tables().flags, combining_classes(), suspect)
    changed = {}
    for number in np.flatnonzero(suspect).tolist():
        text = texts[number].as_py()
        if not unicodedata.is_normalized("NFC", text):
            changed[number] = unicodedata.normalize("NFC", text)
    if not changed:
        return texts
    mask = np.zeros(len(texts), np.bool_)
    mask[list(changed)] = True
    replacements = pa.array(list(changed.values()), pa.large_string())
    return pc.replace_with_mask(texts, pa.array(mask), replacements)


def text_bytes(texts: pa.LargeStringArray) -> npt.NDArray[np.uint8]:
    """uint8[m]: the array's buffer of UTF-8, a view; never empty, so that kernels may take its address."""
    data = texts.buffers()[2]
    return np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(1, np.uint8)


@numba.njit(nogil=True, cache=True)
def _find_composing(data, offsets, flags, classes, found):  # type: ignore[no-untyped-def]
    """Texts that may not be in form C: the quick check of Unicode Standard Annex 15, which also looks at what
    stands before a character that joins, as vowel signs and dots of Indic scripts seldom do."""
    for text in range(len(found)):
        at, stop = offsets[text], offsets[text + 1]
        leading = before = np.int64(0)
        while at < stop:
            if at + 8 <= stop and not load_8_bytes(data, at) & _BEYOND_ASCII:
                at += 8
                leading, before = np.int64(data[at - 1]), np.int64(0)
                continue
            code, at = next_character(data, at)
            flag, combining = flags[code], np.int64(classes[code])
            joins = (flag & JOINING) != 0 and (flags[leading] & LEADING) != 0
            if joins or flag & CHANGING or 0 < combining < before:
                found[text] = True
                break
            if combining == 0:
                leading = code
            before = combining


@lru_cache(maxsize=1 << 16)
def lower_case(word: str) -> str:
    """A word in lower case, character by character."""
    if word.isascii():
        return word.lower()
    lower = character_tables().lower
    return "".join(chr(int(lower[ord(character)])) for character in word)


def normalized_words(text: str) -> list[str]:
    """The normalized words of a text, in plain Python."""
    return [lower_case(word) for word in _WORDS.findall(unicodedata.normalize("NFC", text))]
