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
    "COMPOSING",
    "NORMALIZATION",
    "WORD",
    "CharacterTables",
    "character_tables",
    "combining_classes",
    "composed",
    "normalization_version",
    "reference_words",
]

NORMALIZATION = "shardkit-1"

WORD = 1
COMPOSING = 2  # Unicode's quick check for form C says No or Maybe

_ASSIGNED = 0x40000  # planes above hold tags, private use and nothing
_CODE_POINTS = 0x110000
_SPECIAL_LOWER = {0x0130: 0x69, 0x03C2: 0x03C3}  # dotted capital I, final sigma
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
    flags[_composing(every)] |= COMPOSING
    flags.flags.writeable = lower.flags.writeable = False
    return CharacterTables(flags, lower)


def _composing(every: list[str]) -> list[int]:
    """Code points that are another one in form C, or may join with one before them."""
    found = {*_HANGUL_VOWELS, *_HANGUL_FINALS}
    for code, character in enumerate(every):
        if code < 0xC0:
            continue
        decomposition = unicodedata.decomposition(character)
        if decomposition and not decomposition.startswith("<"):
            parts = decomposition.split()
            found.update(int(part, 16) for part in parts[1:])
            if unicodedata.normalize("NFC", character) != character:
                found.add(code)
    return sorted(found)


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
    """The quick check of Unicode Standard Annex 15: texts that it cannot call normalized."""
    for text in range(len(found)):
        at, stop = offsets[text], offsets[text + 1]
        before = 0
        while at < stop:
            if at + 8 <= stop and not load_8_bytes(data, at) & _BEYOND_ASCII:
                at += 8
                before = 0
                continue
            if data[at] < 0xCC:  # below U+0300 nothing combines or changes
                at += 1 + (data[at] >= 0x80)
                before = 0
                continue
            code, at = next_character(data, at)
            combining = classes[code]
            if flags[code] & COMPOSING or 0 < combining < before:
                found[text] = True
                break
            before = combining


@lru_cache(maxsize=1 << 16)
def lower_case(word: str) -> str:
    """A word in lower case, character by character."""
    if word.isascii():
        return word.lower()
    lower = character_tables().lower
    return "".join(chr(int(lower[ord(character)])) for character in word)


def reference_words(text: str) -> list[str]:
    """The normalized words of a text, in plain Python."""
    return [lower_case(word) for word in _WORDS.findall(unicodedata.normalize("NFC", text))]
