"""The kernel of C4's line rules: judge and copy lines in one pass over the UTF-8 bytes of a batch.

Lines are split as by `str.splitlines()`, words as by `str.split()`, sentences as in `sentences.py`. The rules
on a line are, in order: a word is too long (0), no terminal punctuation (1), too few words (2), the line has
"javascript" (3) or a policy phrase (4); the numbers are row numbers in the counts. Lines that are kept are
written to a second buffer of the batch's size. To find a phrase, the kernel searches blocks of 64 bytes for
the phrase's rarest letter and the letter before it.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from shardkit.kernels.numba_support import Bools, Int64s, UInt8s, kernel
from shardkit.kernels.simd import range_mask, trailing_zeros
from shardkit.kernels.utf8 import (
    LINE_END,
    SPACE,
    character_at,
    character_flags,
    strip_space,
)
from shardkit.writers.kernels.blocks import (
    BLOCK_BYTES,
    TAIL_BYTES,
    block_at,
    copy_bytes,
    find_byte,
    find_line_mark,
    lowest_bits,
)
from shardkit.writers.kernels.sentences import SentenceTables, count_sentences, sentence_tables

_LOREM, _JAVASCRIPT, _CURLY, _POLICY = 1, 2, 4, 8
# Row numbers in the kernel's counts. Rows 0 to 4 count the bytes of the lines that rules 0 to 4 cut.
_CITATIONS, _LOREM_AT, _CURLY_AT, _SENTENCES = range(5, 9)


class LineCounts(NamedTuple):
    """Counts for n documents: `cut` is int64[6, n]; the others are int64[n].

    Rows 0 to 4 of `cut` are the bytes of the lines that each of five rules cut; row 5 is the bytes of the
    citations that were cut. `lorem` and `curly` are the number (from 1) of the first line that fails the
    lorem ipsum or { rule, or 0. `sentences` is the number of sentences in the remaining lines.
    """

    cut: Int64s
    lorem: Int64s
    curly: Int64s
    sentences: Int64s


def edit_lines(
    data: UInt8s, offsets: Int64s, wanted: Bools, switches: tuple[bool, ...], limits: tuple[int, int, int]
) -> tuple[pa.LargeStringArray, Int64s, LineCounts]:
    """Apply C4's line rules to texts; return (edited texts, their sizes in bytes, counts).

    The texts are data[offsets[i]:offsets[i + 1]], valid UTF-8. `switches` turn rules on, in this order: cut
    citations, require terminal punctuation, lorem ipsum, javascript, { and policy. `limits` are the minimum
    sentences in a document, the minimum words in a line and the maximum characters in a word; -1 turns the
    rule off. Texts that a rule drops stay unchanged; texts that are not `wanted` become empty.
    """
    size = len(wanted)
    edited = np.empty(int(np.diff(offsets)[wanted].sum()), np.uint8)
    ends = np.zeros(size + 1, np.int64)
    counts = np.zeros((_SENTENCES + 1, size), np.int64)
    tables = (character_flags(), np.zeros(TAIL_BYTES, np.uint8), _decimals(), sentence_tables())
    _edit(data, offsets, wanted, (switches, limits, tables), edited, ends, counts)
    texts = pa.LargeStringArray.from_buffers(size, pa.py_buffer(ends), pa.py_buffer(edited))
    found = LineCounts(counts[: _CITATIONS + 1], counts[_LOREM_AT], counts[_CURLY_AT], counts[_SENTENCES])
    return texts, np.diff(ends), found


@cache
def _decimals() -> Bools:
    """Return bool[131,072], true for code points that the expression `\\d` matches; no higher one matches."""
    return np.fromiter((chr(code).isdecimal() for code in range(0x20000)), np.bool_, 0x20000)


def _letters(text: str) -> UInt8s:
    return np.frombuffer(text.encode(), np.uint8)


_JA, _ASCRIPT, _LOREM_IPSUM, _SUM = _letters("ja"), _letters("ascript"), _letters("lorem i"), _letters("sum")
_TERMS, _PRIVACY, _ACY_POLICY = _letters("terms o"), _letters("pri"), _letters("acy policy")
_COO, _USE, _USES = _letters("coo"), _letters("use coo"), _letters("uses coo")
_USE_OF, _IE_POLICY, _IES = _letters("use of coo"), _letters("ie policy"), _letters("ies")
_SPACE_USE = _letters(" use")
_CITED = (_letters("edit]"), _letters("citation needed]"))


# (flags of characters, scratch array of `block_at`, result of `_decimals`, tables to find sentences)
_Tables = tuple[UInt8s, UInt8s, Bools, SentenceTables]
# (switches, limits, tables); switches and limits are as in `edit_lines`
_Rules = tuple[tuple[bool, ...], tuple[int, int, int], _Tables]


@kernel(allocates=False)
def _edit(
    data: UInt8s, offsets: Int64s, wanted: Bools, rules: _Rules, edited: UInt8s, ends: Int64s, counts: Int64s
) -> None:
    least_sentences, flags = rules[1][0], rules[2][0]
    to = ends[0]  # 0 as an int64: for a literal 0, Numba would compile all called functions again
    for document in range(len(wanted)):
        begin, end, start, out = offsets[document], offsets[document + 1], to, counts[:, document]
        if not wanted[document]:
            ends[document + 1] = to
            continue
        to = _document(data, begin, end, rules, edited, start, out)
        few = least_sentences > -1 and out[_SENTENCES] < least_sentences
        dropped = out[_LOREM_AT] > 0 or out[_CURLY_AT] > 0 or few
        if dropped:
            to = copy_bytes(data, begin, end, edited, start)
            out[: _CITATIONS + 1] = 0
        else:
            to = _strip(edited, start, to, flags)
        ends[document + 1] = to


@kernel(allocates=False)
def _document(
    data: UInt8s, begin: int, end: int, rules: _Rules, edited: UInt8s, start: int, out: Int64s
) -> int:
    """Write the kept lines of a document to edited[start:], each with a newline; return where they end."""
    flags = rules[2][0]
    to, at, lines = start, begin, 0
    while at < end:
        line_begin = line_end = at
        while at < end:
            line_end = find_line_mark(data, at, end)
            if line_end == end:
                at = end
                continue
            code, at = character_at(data, line_end)
            if flags[code] & LINE_END:
                at += code == 13 and at < end and data[at] == 10
                break
        else:
            line_end = end
        lines += 1
        first, last = strip_space(data, line_begin, line_end, flags)
        to = _line(data, first, last, lines, rules, edited, to, out)
        if to < 0:
            to = -to - 1
        elif line_end < end:
            edited[to] = 10  # there is room, because the line end in `data` has at least one byte
            to += 1
    return to


@kernel(allocates=False)
def _line(
    data: UInt8s,
    first: int,
    last: int,
    number: int,
    rules: _Rules,
    edited: UInt8s,
    start: int,
    out: Int64s,
) -> int:
    """Write a line to edited[start:]; return where it ends, or -1 - start if a rule cuts it."""
    citations, terminal, lorem, javascript, curly, policy = rules[0]
    minimum, least_words, longest_word = rules[1]
    flags, tail, decimals, sentence = rules[2]
    rule = -1
    if (
        longest_word != -1
        and last - first > longest_word
        and _longest(data, first, last, flags) > longest_word
    ):
        out[0] += last - first
        return -1 - start
    to = _copy(data, first, last, decimals, citations, edited, start)
    if terminal and not _ends_well(edited, start, to):
        rule = 1
    elif not _has_words(data, first, last, flags, least_words):
        rule = 2
    else:
        found = _phrases(edited, start, to, tail)
        if lorem and found & _LOREM:
            if not out[_LOREM_AT]:
                out[_LOREM_AT] = number
            return -1 - start
        if javascript and found & _JAVASCRIPT:
            rule = 3
        elif curly and found & _CURLY:
            if not out[_CURLY_AT]:
                out[_CURLY_AT] = number
            return -1 - start
        elif policy and found & _POLICY:
            rule = 4
    if rule >= 0:
        out[rule] += last - first
        return -1 - start
    if minimum != -1:
        out[_SENTENCES] += count_sentences(edited, start, to, sentence)
    out[_CITATIONS] += last - first - (to - start)
    return to


@kernel(allocates=False)
def _has_words(data: UInt8s, at: int, end: int, flags: UInt8s, least: int) -> bool:
    """Return whether data[at:end] has at least `least` words; read no further than needed."""
    inside = False
    while at < end and least > 0:
        code, at = character_at(data, at)
        is_space = (flags[code] & SPACE) != 0
        least -= not (is_space or inside)
        inside = not is_space
    return least <= 0


@kernel(allocates=False)
def _longest(data: UInt8s, at: int, end: int, flags: UInt8s) -> int:
    """Return the number of characters in the longest word of data[at:end]."""
    longest = length = 0
    while at < end:
        code, at = character_at(data, at)
        length = 0 if flags[code] & SPACE else length + 1
        longest = max(longest, length)
    return longest


@kernel(allocates=False)
def _copy(data: UInt8s, at: int, end: int, decimals: Bools, citations: bool, edited: UInt8s, to: int) -> int:
    """Copy the line data[at:end] to edited[to:], without citations if `citations`; return where it ends."""
    while at < end:
        bracket = find_byte(data, at, end, 91) if citations else end
        to = copy_bytes(data, at, bracket, edited, to)
        at = bracket
        if at < end:
            after = _citation(data, at + 1, end, decimals)
            if not after:
                edited[to] = 91
                to, after = to + 1, at + 1
            at = after
    return to


@kernel(allocates=False)
def _citation(data: UInt8s, begin: int, end: int, decimals: Bools) -> int:
    """Return the end of the citation, such as [2], whose [ is just before `begin`; 0 if it is no citation."""
    at = begin
    while at < end:
        code, after = character_at(data, at)
        if code >= len(decimals) or not decimals[code]:
            break
        at = after
    if at < end and data[at] == 93:
        return at + 1
    for text in _CITED:
        if end - begin >= len(text):
            same = True
            for index in range(len(text)):
                same &= data[begin + index] == text[index]
            if same:
                return begin + len(text)
    return 0


@kernel(allocates=False)
def _ends_well(data: UInt8s, begin: int, end: int) -> bool:
    if begin == end:
        return False
    last: int = data[end - 1]
    if last == 46:
        return not (end - begin > 2 and data[end - 2] == 46 and data[end - 3] == 46)
    return last == 63 or last == 33 or last == 34 or last == 39


@kernel(allocates=False)
def _before(data: UInt8s, begin: int, at: int, text: UInt8s) -> bool:
    """Return whether data[begin:at] ends with `text`, ignoring the case of ASCII letters."""
    if at - begin < len(text):
        return False
    return _after(data, at - len(text), at, text)


@kernel(allocates=False)
def _after(data: UInt8s, at: int, end: int, text: UInt8s) -> bool:
    """Return whether data[at:end] begins with `text`, ignoring the case of ASCII letters."""
    if end - at < len(text):
        return False
    for index in range(len(text)):
        byte = data[at + index]
        if 65 <= byte <= 90:
            byte += 32
        if byte != text[index]:
            return False
    return True


@kernel(allocates=False)
def _phrases(data: UInt8s, begin: int, end: int, tail: UInt8s) -> int:
    """Return the bits, such as _LOREM or _POLICY, of the phrases that occur in the line data[begin:end]."""
    found = 0
    for block in range(begin, end, BLOCK_BYTES):
        anchors = _anchors(data, block, tail) & lowest_bits(min(BLOCK_BYTES, end - block))
        while anchors:
            at = block + trailing_zeros(anchors)
            anchors &= anchors - np.uint64(1)
            found |= _phrase(data, begin, at, end)
    return found


@kernel(allocates=False)
def _anchors(data: UInt8s, at: int, tail: UInt8s) -> np.uint64:
    """Return a bit for each byte of a block at which `_phrase` may find a phrase; few bytes qualify.

    These bytes are {, the Kelvin sign (whose lower case is k), v after a or i, p after i, and f or k after o.
    For the first byte of a block, the byte before it is not checked.
    """
    block, place = block_at(data, at, tail)
    after_i = _letter(block, place, 105) << np.uint64(1) | np.uint64(1)
    after_a = _letter(block, place, 97) << np.uint64(1)
    after_o = _letter(block, place, 111) << np.uint64(1) | np.uint64(1)
    found = _letter(block, place, 118) & (after_a | after_i) | _letter(block, place, 112) & after_i
    found |= (_letter(block, place, 102) | _letter(block, place, 107)) & after_o
    return found | range_mask(block, place, 123, 1) | range_mask(block, place, 0xE2, 1)


@kernel(inline=True)
def _letter(block: UInt8s, place: int, lower: int) -> np.uint64:
    return range_mask(block, place, lower, 1) | range_mask(block, place, lower - 32, 1)


@kernel(allocates=False)
def _phrase(data: UInt8s, begin: int, at: int, end: int) -> int:
    """Return the bit of the phrase whose rarest letter is at `at` in the line data[begin:end], or 0."""
    byte, after = data[at] | 32, at + 1
    if data[at] == 123:
        return _CURLY
    if byte == 118:  # the letter v
        if _before(data, begin, at, _JA) and _after(data, after, end, _ASCRIPT):
            return _JAVASCRIPT
        if _before(data, begin, at, _PRIVACY) and _after(data, after, end, _ACY_POLICY):
            return _POLICY
    elif byte == 112:  # the letter p
        if _before(data, begin, at, _LOREM_IPSUM) and _after(data, after, end, _SUM):
            return _LOREM
    elif byte == 102:  # the letter f
        if _before(data, begin, at, _TERMS) and _after(data, after, end, _SPACE_USE):
            return _POLICY
    elif byte == 107 or (end - at > 2 and data[at + 1] == 0x84 and data[at + 2] == 0xAA):  # k, Kelvin sign
        after = at + 1 if byte == 107 else at + 3
        if _before(data, begin, at, _COO):
            whose = _before(data, begin, at, _USE) or _before(data, begin, at, _USES)
            whose = whose or _before(data, begin, at, _USE_OF)
            if _after(data, after, end, _IE_POLICY) or (whose and _after(data, after, end, _IES)):
                return _POLICY
    return 0


@kernel(allocates=False)
def _strip(edited: UInt8s, start: int, end: int, flags: UInt8s) -> int:
    """Remove white space at both ends of edited[start:end], in place; return the new end."""
    first, last = strip_space(edited, start, end, flags)
    if first > start:
        for at in range(first, last):
            edited[start + at - first] = edited[at]
    return start + last - first
