"""Characters of UTF-8 for kernels: decoding, tables of what each code point is, and runs of bytes.

`character_flags` has one byte of flags for each code point. White space, letters and line ends are Python's
(`str.isspace`, `str.isalpha`, `str.splitlines`), so they follow the Unicode version of the running Python;
the two punctuation sets are datatrove's, listed here. `count_kinds` counts characters by kind, again as in
Python.

Runs of bytes can be hashed, compared, looked up, stripped and counted in characters. Kernels do not check
bounds: the caller passes valid UTF-8, and nothing outside a run is read. Small helpers are inlined: as calls,
they made loops over lines and words 10 to 30 % slower. For the same reason, `strip_space` calls no helpers.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.kernels.numba_support import Bools, Int64s, UInt8s, int64, kernel
from shardkit.kernels.simd import load_8_bytes

SPACE = 1
ALPHA = 2
PUNCTUATION = 4  # Gopher's rules treat a word of only such characters as a symbol
TERMINAL = 8  # characters that may end a sentence, by FineWeb's line rule
LINE_END = 16
_KINDS = tuple(1 << bit for bit in range(5))
_SYMBOL, _DIGIT, _UPPER, _SPACE, _ALPHA = _KINDS

CODE_POINTS = 0x110000
ASSIGNED = 0x40000  # all letters are below this code point; from it on, there are only tags and private use
IDEOGRAPHS = 0x20000  # from here to ASSIGNED, every assigned code point is a letter

# datatrove.utils.text.TERMINAL_PUNCTUATION: Unicode's sentence terminals with a few more full stops.
_TERMINAL = (
    "21 2E 3F 589 61D-61F 6D4 700-702 7F9 837 839 83D-83E 964-965 104A-104B 1362 1367-1368 166E 1735-1736 "
    "17D4-17D6 17D9-17DA 1803 1809 1944-1945 1AA8-1AAB 1B5A-1B5B 1B5E-1B5F 1B7D-1B7E 1C3B-1C3C 1C7E-1C7F "
    "203C-203D 2047-2049 2E2E 2E3C 2E53-2E54 3002 A4FF A60E-A60F A6F3 A6F7 A876-A877 A8CE-A8CF A92F "
    "A9C8-A9C9 AA5D-AA5F AAF0-AAF1 ABEB FE52 FE56-FE57 FF01 FF0E FF1F FF61 10A56-10A57 10F55-10F59 "
    "10F86-10F89 11047-11048 110BE-110C1 11141-11143 111C5-111C6 111CD 111DE-111DF 11238-11239 1123B-1123C "
    "112A9 1144B-1144C 115C2-115C3 115C9-115D7 11641-11642 1173C-1173E 11944 11946 11A42-11A43 11A9B-11A9C "
    "11C41-11C42 11EF7-11EF8 11F43-11F44 16A6E-16A6F 16AF5 16B37-16B38 16B44 16E98 1BC9F 1DA88"
)
# datatrove.utils.text.PUNCTUATION, without the terminals that it also contains.
_OTHER_PUNCTUATION = (
    "0-8 B-1F 22-2D 2F 3A-3E 40 5B-60 7B-9F AB B4 BB 2013-2014 2019 201C-201E 2026 2236 2501 25BA 3001 "
    "3008-300D 3010-3011 FF05 FF08-FF09 FF0C FF11 FF1A-FF1B FF5E"
)

_LINE_ENDS = "A-D 1C-1E 85 2028-2029"


def every_character() -> npt.NDArray[np.str_]:
    """Return str[262,144], all characters below ASSIGNED, for NumPy's string functions (Python's tables)."""
    return np.arange(ASSIGNED, dtype=np.uint32).view("U1")


@cache
def signs() -> tuple[Int64s, npt.NDArray[np.str_]]:
    """Return all code points that are neither letters nor white space, and the general category of each."""
    every = every_character()[:IDEOGRAPHS]
    codes = np.flatnonzero(~np.char.isalpha(every) & ~np.char.isspace(every))
    return codes, np.array([unicodedata.category(chr(code)) for code in codes.tolist()])


@cache
def character_flags() -> UInt8s:
    """Return uint8[1,114,112]: the flags of every code point, read-only."""
    flags, every = np.zeros(CODE_POINTS, np.uint8), every_character()
    flags[:ASSIGNED] |= np.char.isspace(every) * np.uint8(SPACE)
    flags[:ASSIGNED] |= np.char.isalpha(every) * np.uint8(ALPHA)
    for ranges, flag in (
        (_OTHER_PUNCTUATION, PUNCTUATION),
        (_TERMINAL, PUNCTUATION | TERMINAL),
        (_LINE_ENDS, LINE_END),
    ):
        for first, last in _ranges(ranges):
            flags[first : last + 1] |= flag
    flags.flags.writeable = False
    return flags


@cache
def characters_with(flag: int) -> frozenset[str]:
    """Return the characters that have a flag of `character_flags`."""
    return frozenset(map(chr, np.flatnonzero(character_flags() & flag).tolist()))


def first_bytes(texts: Iterable[str]) -> Bools:
    """Return bool[256]: the first bytes of these texts in UTF-8, so that kernels can skip all other bytes."""
    found = np.zeros(256, np.bool_)
    found[[text.encode()[0] for text in texts]] = True
    return found


def _ranges(text: str) -> list[tuple[int, int]]:
    pairs = [part.split("-") for part in text.split()]
    return [(int(pair[0], 16), int(pair[-1], 16)) for pair in pairs]


@kernel(inline=True)
def next_character(data: UInt8s, at: int) -> tuple[int, int]:
    """Return (code point, index after it) of the character at `at` in valid UTF-8."""
    byte = int64(data[at])
    if byte < 0x80:
        return byte, at + 1
    if byte < 0xE0:
        return (byte & 0x1F) << 6 | (data[at + 1] & 0x3F), at + 2
    if byte < 0xF0:
        return (byte & 0x0F) << 12 | (data[at + 1] & 0x3F) << 6 | (data[at + 2] & 0x3F), at + 3
    high = (byte & 0x07) << 18 | (data[at + 1] & 0x3F) << 12
    return high | (data[at + 2] & 0x3F) << 6 | (data[at + 3] & 0x3F), at + 4


@kernel(allocates=False)
def character_at(data: UInt8s, at: int) -> tuple[int, int]:
    """Call next_character without inlining it: kernels that use it often compile in a third of the time."""
    return next_character(data, at)


@kernel(inline=True)
def character_before(data: UInt8s, end: int) -> tuple[int, int]:
    """Return (code point, its index) of the character that ends at `end`."""
    at = end - 1
    while data[at] & 0xC0 == 0x80:
        at -= 1
    return next_character(data, at)[0], at


class KindCounts(NamedTuple):
    """Characters of each text by kind, int64[n] each."""

    characters: Int64s
    symbols: Int64s  # characters of the Unicode categories P and S, but not white space
    digits: Int64s  # characters for which str.isdigit is true
    upper_case: Int64s  # letters for which str.isupper is true
    space: Int64s  # characters for which str.isspace is true
    letters: Int64s  # characters for which str.isalpha is true


def count_kinds(data: UInt8s, offsets: Int64s, wanted: Bools) -> KindCounts:
    """Count characters of data[offsets[i]:offsets[i + 1]], valid UTF-8, by kind; zeros where not `wanted`."""
    counts = np.zeros((len(wanted), 1 << len(_KINDS)), np.int64)
    _count_kinds(data, offsets, wanted, _kinds(), counts)
    masks = np.arange(counts.shape[1])
    return KindCounts(counts.sum(axis=1), *(counts[:, masks & kind > 0].sum(axis=1) for kind in _KINDS))


@cache
def _kinds() -> UInt8s:
    """Return uint8[1,114,112]: the kinds of every code point; 0 in planes that are empty or private."""
    kinds, every = np.zeros(CODE_POINTS, np.uint8), every_character()
    letters, space, upper, digits = (
        test(every) for test in (np.char.isalpha, np.char.isspace, np.char.isupper, np.char.isdigit)
    )
    kinds[:ASSIGNED] = np.where(letters, _ALPHA | upper * np.uint8(_UPPER), space * np.uint8(_SPACE))
    codes, categories = signs()
    symbols = np.isin(categories.astype("U1"), ("P", "S"))
    kinds[codes] = symbols * np.uint8(_SYMBOL) | digits[codes] * np.uint8(_DIGIT)
    kinds.flags.writeable = False
    return kinds


@kernel(allocates=False)
def _count_kinds(data: UInt8s, offsets: Int64s, wanted: Bools, kinds: UInt8s, counts: Int64s) -> None:
    """Count the characters of each document by their combination of kinds."""
    for document in range(len(wanted)):
        if wanted[document]:
            at, end = offsets[document], offsets[document + 1]
            while at < end:
                code, at = next_character(data, at)
                counts[document, kinds[code]] += 1


@kernel(allocates=False)
def utf8_bytes(code: int) -> tuple[np.uint64, int]:
    """Return the UTF-8 bytes of a code point as a uint64, the first byte lowest, and their number."""
    rest = np.uint64(code)
    if rest < np.uint64(0x80):
        return rest, 1
    last = np.uint64(0x80) | (rest & np.uint64(0x3F))
    rest >>= np.uint64(6)
    if rest < np.uint64(0x20):
        return np.uint64(0xC0) | rest | last << np.uint64(8), 2
    third = np.uint64(0x80) | (rest & np.uint64(0x3F))
    rest >>= np.uint64(6)
    if rest < np.uint64(0x10):
        return np.uint64(0xE0) | rest | third << np.uint64(8) | last << np.uint64(16), 3
    second = np.uint64(0x80) | (rest & np.uint64(0x3F))
    first = np.uint64(0xF0) | rest >> np.uint64(6)
    return first | second << np.uint64(8) | third << np.uint64(16) | last << np.uint64(24), 4


@kernel(inline=True)
def skip_space(data: UInt8s, at: int, end: int, flags: UInt8s) -> int:
    """Return the end of the white space at `at`, or `at` if there is none; pass character_flags()."""
    while at < end:
        code, after = next_character(data, at)
        if not flags[code] & SPACE:
            break
        at = after
    return at


@kernel(allocates=False)
def strip_space(data: UInt8s, begin: int, end: int, flags: UInt8s) -> tuple[int, int]:
    """Return (begin, end) of data[begin:end] without white space at both ends; pass character_flags()."""
    while begin < end:
        code, after = next_character(data, begin)
        if not flags[code] & SPACE:
            break
        begin = after
    while begin < end:
        last = end - 1
        while data[last] & 0xC0 == 0x80:
            last -= 1
        if not flags[next_character(data, last)[0]] & SPACE:
            break
        end = last
    return begin, end


_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)


@kernel(inline=True)
def mix(hashed: np.uint64, eight: np.uint64) -> np.uint64:
    """Extend a hash by eight bytes: multiply and fold."""
    hashed = (hashed ^ eight) * _FACTOR
    return hashed ^ hashed >> _HALF


@kernel(inline=True)
def pack_bytes(data: UInt8s, begin: int, end: int) -> np.uint64:
    """Return data[begin:end], at most eight bytes, as a number, the first byte lowest; 0 if it is empty."""
    value = np.uint64(0)
    for at in range(end - 1, begin - 1, -1):
        value = value << np.uint64(8) | np.uint64(data[at])
    return value


@kernel(allocates=False)
def hash_run(data: UInt8s, begin: int, end: int) -> np.uint64:
    """Return a hash of data[begin:end], for tables whose hits are compared byte by byte."""
    hashed = np.uint64(end - begin)
    at = begin
    while at + 8 <= end:
        hashed = mix(hashed, load_8_bytes(data, at))
        at += 8
    if at < end:  # hash the last eight bytes, some of them again; a shorter run has fewer
        last = load_8_bytes(data, end - 8) if end - begin >= 8 else pack_bytes(data, begin, end)
        hashed = mix(hashed, last)
    return hashed


@kernel(allocates=False)
def same_runs(data: UInt8s, begin: int, other: UInt8s, other_begin: int, length: int) -> bool:
    """Return whether data[begin:begin + length] equals other[other_begin:other_begin + length]."""
    at = 0
    while at + 8 <= length:
        if load_8_bytes(data, begin + at) != load_8_bytes(other, other_begin + at):
            return False
        at += 8
    while at < length:
        if data[begin + at] != other[other_begin + at]:
            return False
        at += 1
    return True


def join_runs(runs: Sequence[bytes]) -> tuple[UInt8s, Int64s]:
    """Return (bytes, offsets): run i is bytes[offsets[i]:offsets[i + 1]]. The bytes are never empty."""
    return np.frombuffer(b"".join(runs) or b"\0", np.uint8), np.cumsum([0, *map(len, runs)], dtype=np.int64)


@kernel(allocates=False)
def find_run(data: UInt8s, begin: int, end: int, runs: UInt8s, offsets: Int64s) -> int:
    """Return the index of the first of the joined runs that equals data[begin:end]; -1 if there is none."""
    for index in range(len(offsets) - 1):
        start = offsets[index]
        if offsets[index + 1] - start == end - begin:
            same = True
            for at in range(end - begin):  # faster than calling same_runs for short words
                if data[begin + at] != runs[start + at]:
                    same = False
                    break
            if same:
                return index
    return -1


@kernel(allocates=False)
def count_characters(data: UInt8s, begin: int, end: int) -> int:
    """Return the number of code points in the valid UTF-8 data[begin:end]."""
    characters = 0
    for at in range(begin, end):
        characters += (data[at] & 0xC0) != 0x80
    return characters
