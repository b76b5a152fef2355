"""n-grams (shingles) of texts as 64-bit hashes, the units of similarity.

Units are a text's normalized words (`words.py`), or the characters of those words joined by single spaces, or
(for "auto") words, where each character of a script without spaces is a word by itself. An n-gram's hash is
made from the hashes u of its n units: the sum of u[i] * _BASE ** (n - 1 - i), then h ^= h >> 32; h *=
_SCATTER; h ^= h >> 29, modulo 2**64. A text of fewer than n units has one n-gram, all its units; a text
without any unit has no n-gram. Two different n-grams share a hash with probability 2**-64.

`next_shingles` returns n-grams block by block, so memory does not depend on the length of a text.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from shardkit.kernels.numba_support import Int32s, Int64s, UInt8s, UInt64s, int64, kernel
from shardkit.kernels.text_arrays import text_bytes, text_offsets
from shardkit.kernels.utf8 import character_before, next_character
from shardkit.writers.kernels.words import (
    SCRATCH_WORDS,
    SEGMENT_BYTES,
    UNSPACED,
    UNSPACED_CLASS,
    WORD,
    CharacterTables,
    character_tables,
    composed,
    make_scratch,
    next_words,
    normalized_words,
)

_BASE, _SCATTER = np.uint64(0xD6E8FEB86659FD93), np.uint64(0xFF51AFD7ED558CCD)
_CHARACTER = np.uint64(0xC2B2AE3D27D4EB4F)
_U29, _U32 = np.uint64(29), np.uint64(32)
_SPACE = 32
UNITS = ("words", "characters", "auto")
_MIXED = re.compile(f"[{UNSPACED_CLASS}]|[^{UNSPACED_CLASS}]+")
UNIT_PATTERNS = {
    "words": re.compile(r"\w+"),
    "auto": re.compile(rf"(?=\w)[{UNSPACED_CLASS}]|(?:(?![{UNSPACED_CLASS}])\w)+"),
}
_OPEN_NGRAMS = 32 << 20  # 256 MiB of hashes; if texts may have more n-grams, these are counted first


class NgramUnits(Protocol):
    """Settings that define an n-gram, such as the settings of MinHash."""

    @property
    def unit(self) -> str:
        """The kind of units: "words", "characters" or "auto"."""

    @property
    def ngram(self) -> int:
        """The number of units in an n-gram."""


class Ngrams(NamedTuple):
    """Settings for n-grams of words, unless `unit` is "characters" or "auto"."""

    ngram: int
    unit: str = "words"


class Shingles(NamedTuple):
    """N-gram hashes of n texts: text i has hashes[offsets[i]:offsets[i + 1]], in order, with repetitions."""

    hashes: UInt64s
    offsets: Int64s


def shingle_batch(texts: pa.LargeStringArray, config: NgramUnits) -> Shingles:
    """Return the hashes of all n-grams of each text (large_string without nulls)."""
    texts = composed(texts)
    data, edges = text_bytes(texts), text_offsets(texts)
    arguments = (data, edges, config.ngram, UNITS.index(config.unit), character_tables())
    size = int(edges[-1] - edges[0])
    # A word takes at least two bytes with its separator. Pages that are never written take no memory.
    room = (size // 2 if config.unit == "words" else size) + len(texts)
    if room > _OPEN_NGRAMS:
        room = int(_count_shingles(*arguments))
    hashes, offsets = np.empty(room, np.uint64), np.zeros(len(texts) + 1, np.int64)
    _collect_shingles(*arguments, hashes, offsets)
    hashes.resize(offsets[-1], refcheck=False)  # in place, which frees the rest of the memory
    return Shingles(hashes, offsets)


# (scratch arrays of `next_words`, hashes of units, hashes of n-grams)
_Scratch = tuple[tuple[UInt8s, UInt8s, Int32s, Int32s], UInt64s, UInt64s]


@kernel
def make_shingle_scratch(ngram: int) -> _Scratch:
    """Make the scratch arrays of `next_shingles`: (scratch for words, hashes of units, hashes of n-grams)."""
    room = SCRATCH_WORDS + ngram
    return make_scratch(), np.zeros(room, np.uint64), np.zeros(room, np.uint64)


@kernel
def next_shingles(
    data: UInt8s,
    at: int,
    stop: int,
    state: tuple[int, int],
    ngram: int,
    unit: int,
    tables: CharacterTables,
    scratch: _Scratch,
    key: UInt64s,
) -> tuple[int, int, tuple[int, int]]:
    """Write hashes of the next n-grams of data[at:stop] to scratch[2]; return (number, next index, state).

    `unit` is an index into UNITS; `stop` is the text's end. `state` is (number of units kept in scratch from
    the last call, number of n-grams so far): pass (0, 0) in the first call. `key`, uint64[2], is zeros in the
    first call; `add_to_key` adds the n-grams to it.
    """
    word_scratch, units, hashes = scratch
    kept, total = state
    if unit == 1:
        count, at = _next_characters(data, at, stop, tables, units, kept, kept + total > 0)
    elif unit == 2:
        count, at = _next_mixed(data, at, stop, tables, units, kept)
    else:
        count, at = next_words(data, at, stop, tables, word_scratch, units, kept)
    found = count - ngram + 1
    if found > 0:
        _hash_shingles(units, found, ngram, hashes)
        add_to_key(key, hashes, found, total)
        for i in range(ngram - 1):
            units[i] = units[found + i]
        return found, at, (ngram - 1, total + found)
    if at >= stop and count > 0 and total == 0:
        _hash_shingles(units, 1, count, hashes)
        add_to_key(key, hashes, 1, 0)
        return 1, at, (count, 1)
    return 0, at, (count, total)


@kernel
def _hash_shingles(units: UInt64s, count: int, ngram: int, hashes: UInt64s) -> None:
    for i in range(count):
        hashes[i] = units[i]
    for further in range(1, ngram):
        shifted = units[further:]  # a view that is indexed from 0, so that the loop is vectorized
        for i in range(count):
            hashes[i] = hashes[i] * _BASE + shifted[i]
    for i in range(count):
        value = hashes[i]
        value ^= value >> _U32
        value *= _SCATTER
        hashes[i] = value ^ value >> _U29


@kernel
def add_to_key(key: UInt64s, hashes: UInt64s, count: int, position: int) -> None:
    """Add hashes[:count] to a 128-bit key of a text; the first hash is its n-gram number `position`.

    The key is the sum of all n-gram hashes, and the sum of each times 2 * its position + 1. N-grams in order
    determine the units in order, so texts with equal keys have equal units, except by chance with a
    probability of 2**-128 per pair of texts. Equal keys can be made on purpose.
    """
    first, second = key[0], key[1]
    weight = np.uint64(2 * position + 1)
    for i in range(count):
        first += hashes[i]
        second += hashes[i] * (weight + np.uint64(2 * i))
    key[0], key[1] = first, second


@kernel
def _next_characters(
    data: UInt8s, at: int, stop: int, tables: CharacterTables, out: UInt64s, count: int, begun: bool
) -> tuple[int, int]:
    """Append hashes of the characters of words, with one space between words, as `next_words` does."""
    flags, lower = tables
    limit = count + 2 * SEGMENT_BYTES - 2
    between = begun and not (flags[character_before(data, at)[0]] & WORD)
    while at < stop and count < limit:
        code, after = next_character(data, at)
        if not flags[code] & WORD:
            between = True
            at = after
            continue
        if between and begun:
            out[count] = _hash_character(_SPACE)
            count += 1
        out[count] = _hash_character(lower[code])
        count += 1
        begun, between = True, False
        at = after
    return count, at


@kernel
def _next_mixed(
    data: UInt8s, at: int, stop: int, tables: CharacterTables, out: UInt64s, count: int
) -> tuple[int, int]:
    """Append hashes of words as `next_words` does, but make a word of each character of unspaced scripts."""
    flags, lower = tables
    limit = count + 2 * SEGMENT_BYTES - 2
    value, inside = _U32, False
    while at < stop and (inside or count < limit):
        code, at = next_character(data, at)
        is_alone = flags[code] & UNSPACED
        if inside and (is_alone or not flags[code] & WORD):
            out[count] = value
            count += 1
            inside = False
        if not flags[code] & WORD:
            continue
        if is_alone:
            out[count] = _hash_character(lower[code])
            count += 1
            continue
        value = value if inside else _U32
        value = (value ^ np.uint64(lower[code] + 1)) * _CHARACTER
        value ^= value >> _U32
        inside = True
    if inside:
        out[count] = value
        count += 1
    return count, at


@kernel
def _hash_character(code: int) -> np.uint64:
    value = np.uint64(code + 1) * _CHARACTER
    return value ^ value >> _U32


@kernel
def _count_shingles(data: UInt8s, edges: Int64s, ngram: int, unit: int, tables: CharacterTables) -> int:
    scratch, key = make_shingle_scratch(ngram), np.zeros(2, np.uint64)
    total = 0
    for text in range(len(edges) - 1):
        at, stop, state = edges[text], edges[text + 1], (int64(0), int64(0))
        while at < stop:
            found, at, state = next_shingles(data, at, stop, state, ngram, unit, tables, scratch, key)
            total += found
    return total


@kernel
def _collect_shingles(
    data: UInt8s,
    edges: Int64s,
    ngram: int,
    unit: int,
    tables: CharacterTables,
    out: UInt64s,
    offsets: Int64s,
) -> None:
    scratch, key = make_shingle_scratch(ngram), np.zeros(2, np.uint64)
    hashes = scratch[2]
    total = 0
    for text in range(len(edges) - 1):
        at, stop, state = edges[text], edges[text + 1], (int64(0), int64(0))
        while at < stop:
            found, at, state = next_shingles(data, at, stop, state, ngram, unit, tables, scratch, key)
            target = out[total:]
            for i in range(found):
                target[i] = hashes[i]
            total += found
        offsets[text + 1] = total


def text_units(text: str, unit: str) -> list[str]:
    """Return the units of a text for `unit`: "words", "characters" or "auto"."""
    words = normalized_words(text)
    if unit == "auto":
        return [each for word in words for each in _MIXED.findall(word)]
    return words if unit == "words" else list(" ".join(words))
