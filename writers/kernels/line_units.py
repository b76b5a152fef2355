"""Lines, paragraphs and spans of documents for line dedup: find and hash them, and cut some of them out.

A line ends at LF only. A paragraph is a run of lines up to a blank one (white space only) or the end; the
blank lines after it are cut with it. Two units are equal if their bytes without white space at both ends (as
by Python's `str.strip`) are equal; case and inner white space count. Their hash is MurmurHash3 x64 128 with
seed 0.

Spans are runs of words that may begin anywhere. Words are separated by white space; each character of a
script without spaces is a word by itself. Of every `spacing` consecutive windows of `size` words, the window
with the lowest value (a rolling hash) is sampled: winnowing, as in Schleimer, Wilkerson and Aiken,
"Winnowing: local algorithms for document fingerprinting" (SIGMOD 2003), with their rule for equal values.
If two texts share size + spacing - 1 words, both sample the same windows of these words. A window's hash is
made from its words' hashes, so white space between words makes no difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from shardkit.kernels.numba_support import Bools, Int64s, UInt8s, UInt32s, UInt64s, kernel
from shardkit.kernels.simd import load_8_bytes
from shardkit.kernels.text_arrays import text_bytes, text_offsets
from shardkit.kernels.utf8 import (
    SPACE,
    character_at,
    character_flags,
    count_characters,
    pack_bytes,
    skip_space,
    strip_space,
)
from shardkit.writers.kernels.words import UNSPACED, character_tables

_C1, _C2 = np.uint64(0x87C37B91114253D5), np.uint64(0x4CF5AD432745937F)
_MIX_1, _MIX_2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_A, _B, _FIVE = np.uint64(0x52DCE729), np.uint64(0x38495AB5), np.uint64(5)
_ROLL = np.uint64(0x9E3779B97F4A7C15)  # multiplier of the rolling hash; any odd number works
_64, _27, _31, _33 = np.uint64(64), np.uint64(27), np.uint64(31), np.uint64(33)


class UnitSettings(Protocol):
    """Settings that select units: for line deduplication and for the `repeated_lines` filter."""

    @property
    def unit(self) -> str:
        """The kind of units: "line" or "paragraph"."""

    @property
    def min_characters(self) -> int:
        """Minimum number of characters in a unit, without white space at both ends."""


@dataclass(frozen=True, slots=True)
class Units:
    """Lines, paragraphs or windows, sorted by document and position; all arrays have the same length."""

    high: UInt64s  # first half of the hash
    low: UInt64s  # second half of the hash
    document: Int64s  # index of the unit's text in the batch
    unit: UInt32s  # index of the unit in its text, short units included; for a window: of its first word
    found: int  # number of all units, short ones included; for windows, the number of all words


def find_units(texts: pa.LargeStringArray, wanted: Bools, config: UnitSettings) -> Units:
    """Find the units in the wanted texts, except units that are shorter than `min_characters`."""
    data, offsets = text_bytes(texts), text_offsets(texts)
    most = int(offsets[-1] - offsets[0]) // (config.min_characters + 1) + len(texts)
    high, low = np.empty(most, np.uint64), np.empty(most, np.uint64)
    document, unit = np.empty(most, np.int64), np.empty(most, np.uint32)
    count, found = _find(
        data,
        offsets,
        wanted,
        character_flags(),
        config.unit == "paragraph",
        config.min_characters,
        (high, low, document, unit),
    )
    return Units(high[:count], low[:count], document[:count], unit[:count], int(found))


def cut_units(
    texts: pa.LargeStringArray, document: Int64s, unit: UInt32s, kind: str
) -> tuple[pa.LargeStringArray, Bools]:
    """Cut unit[i] out of texts[document[i]]; return (the texts, which of them have only white space left).

    `document` and `unit` are sorted by (document, unit). A text without cuts is never marked as blank.
    """
    return _without(texts, (document, unit), _cut, (character_flags(), kind == "paragraph"))


def _without(
    texts: pa.LargeStringArray,
    places: tuple[Int64s, UInt32s],
    cut: Callable[..., int],
    settings: tuple[Any, ...],
) -> tuple[pa.LargeStringArray, Bools]:
    data, offsets = text_bytes(texts), text_offsets(texts)
    out = np.empty(int(offsets[-1] - offsets[0]), np.uint8)
    ends = np.zeros(len(texts) + 1, np.int64)
    blank = np.zeros(len(texts), np.bool_)
    done = cut(data, offsets, places, *settings, (out, ends, blank))
    assert done == len(places[0]), "a unit to cut does not exist"
    left = pa.LargeStringArray.from_buffers(len(texts), pa.py_buffer(ends), pa.py_buffer(out[: ends[-1]]))
    return left, blank


def span_windows(words: int) -> tuple[int, int]:
    """Return (size, spacing) in words, so that texts with `words` common words in a row share a window."""
    return words - words // 3, words // 3 + 1


def find_spans(texts: pa.LargeStringArray, wanted: Bools, words: int) -> Units:
    """Return the sampled windows of the wanted texts. Texts with a common span of `words` words share one."""
    data, offsets = text_bytes(texts), text_offsets(texts)
    most = int(offsets[-1] - offsets[0]) // 2  # at least 2 bytes per word; unwritten pages are free
    high, low = np.empty(most, np.uint64), np.empty(most, np.uint64)
    document, unit = np.empty(most, np.int64), np.empty(most, np.uint32)
    out = (high, low, document, unit)
    count, found = _find_spans(data, offsets, wanted, _word_flags(), span_windows(words), out)
    return Units(high[:count], low[:count], document[:count], unit[:count], int(found))


def cut_spans(
    texts: pa.LargeStringArray, document: Int64s, unit: UInt32s, words: int
) -> tuple[pa.LargeStringArray, Bools]:
    """Cut the words of the windows that begin at word unit[i]; arguments and results are as for `cut_units`.

    Of the runs of white space before, between and after words that are cut, the run with the most line feeds
    stays. If a text begins or ends with such words, the run at its beginning or end stays instead.
    """
    size, _ = span_windows(words)
    return _without(texts, (document, unit), _cut_spans, (_word_flags(), size))


@cache
def _word_flags() -> UInt8s:
    """Return uint8[1,114,112], flags by code point: SPACE, or UNSPACED for a character that is a word."""
    return character_flags() & np.uint8(SPACE) | character_tables().flags & np.uint8(UNSPACED)


@kernel
def _find(
    data: UInt8s,
    offsets: Int64s,
    wanted: Bools,
    flags: UInt8s,
    paragraphs: bool,
    least: int,
    out: tuple[UInt64s, UInt64s, Int64s, UInt32s],
) -> tuple[int, int]:
    """Fill `out`, the arrays (high, low, document, unit); return (number of units in it, of all units)."""
    high, low, documents, units = out
    count = found = 0
    for document in range(len(wanted)):
        if not wanted[document]:
            continue
        at, end = offsets[document], offsets[document + 1]
        unit = 0
        while at <= end:
            begin, stop, at = _next_unit(data, at, end, flags, paragraphs)
            begin, stop = strip_space(data, begin, stop, flags)
            if _has_characters(data, begin, stop, least):
                high[count], low[count] = _hash(data, begin, stop)
                documents[count], units[count] = document, unit
                count += 1
            unit += 1
        found += unit
    return count, found


@kernel
def _cut(
    data: UInt8s,
    offsets: Int64s,
    places: tuple[Int64s, UInt32s],
    flags: UInt8s,
    paragraphs: bool,
    result: tuple[UInt8s, Int64s, Bools],
) -> int:
    """Write the texts without the units at `places` to `result`; return the number of these units.

    `result` is (bytes, ends, blank).
    """
    documents, units = places
    out, ends, blank = result
    cut = size = 0
    for document in range(len(blank)):
        at, end = offsets[document], offsets[document + 1]
        start = size
        if cut == len(documents) or documents[cut] != document:
            size = _copy(data, at, end, out, size)
        else:
            # Act as if a line feed followed the text, so that each unit ends with a line feed.
            unit, kept = 0, at
            while at <= end and cut < len(documents) and documents[cut] == document:
                begin, _, at = _next_unit(data, at, end, flags, paragraphs)
                if units[cut] == unit:
                    size = _copy_lines(data, kept, begin, end, out, size)
                    kept = at
                    cut += 1
                unit += 1
            size = _copy_lines(data, kept, end + 1, end, out, size)
            size -= size > start
            blank[document] = skip_space(out, start, size, flags) == size
        ends[document + 1] = size
    return cut


@kernel
def _find_spans(
    data: UInt8s,
    offsets: Int64s,
    wanted: Bools,
    flags: UInt8s,
    windows: tuple[int, int],
    out: tuple[UInt64s, UInt64s, Int64s, UInt32s],
) -> tuple[int, int]:
    """Fill `out`, the arrays (high, low, document, unit); return (number of windows in it, of all words)."""
    size, spacing = windows
    ring = size + spacing  # how many of the latest words, and of the windows that begin at them, are stored
    hashes, values = np.empty((ring, 2), np.uint64), np.empty(ring, np.uint64)
    window_hashes = np.empty((size, 2), np.uint64)
    window_bytes = window_hashes.reshape(2 * size).view(np.uint8)
    power = np.uint64(1)
    for _ in range(size):
        power *= _ROLL
    high, low, documents, units = out
    count = found = 0
    for document in range(len(wanted)):
        if not wanted[document]:
            continue
        end = offsets[document + 1]
        begin, at = _next_word(data, offsets[document], end, flags)
        rolling, words, sampled = np.uint64(0), 0, -1
        while begin < end:
            one, two = _hash(data, begin, at)
            rolling = rolling * _ROLL + one
            if words >= size:
                rolling -= power * hashes[(words - size) % ring, 0]
            hashes[words % ring, 0], hashes[words % ring, 1] = one, two
            words += 1
            newest = words - size
            if newest >= 0:
                values[newest % ring] = _finish(rolling)
            if newest >= spacing - 1:
                chosen = _lowest(values, newest, spacing, sampled)
                if chosen != sampled:
                    for word in range(size):
                        window_hashes[word] = hashes[(chosen + word) % ring]
                    high[count], low[count] = _hash(window_bytes, 0, 16 * size)
                    documents[count], units[count] = document, chosen
                    count += 1
                    sampled = chosen
            begin, at = _next_word(data, at, end, flags)
        found += words
    return count, found


@kernel
def _lowest(values: UInt64s, newest: int, spacing: int, before: int) -> int:
    """Return the window with the lowest value among the `spacing` windows that end with `newest`.

    `before` is the result of the previous call. Of windows with equal values, `before` wins, else the newest.
    """
    ring = len(values)
    if before > newest - spacing:
        return newest if values[newest % ring] < values[before % ring] else before
    chosen = newest
    for window in range(newest - 1, newest - spacing, -1):
        if values[window % ring] < values[chosen % ring]:
            chosen = window
    return chosen


@kernel
def _cut_spans(
    data: UInt8s,
    offsets: Int64s,
    places: tuple[Int64s, UInt32s],
    flags: UInt8s,
    window: int,
    result: tuple[UInt8s, Int64s, Bools],
) -> int:
    """Write the texts without the windows at `places` to `result`; return the number of these windows.

    `result` is (bytes, ends, blank).
    """
    documents, units = places
    out, ends, blank = result
    cut = size = 0
    for document in range(len(blank)):
        at, end = offsets[document], offsets[document + 1]
        start = size
        if cut == len(documents) or documents[cut] != document:
            size = _copy(data, at, end, out, size)
        else:
            word = lost = 0  # index of the word; number of words still to be cut
            gap_at, gap_end, is_cut = at, at, False  # the run of white space that stays
            begin = at
            while begin < end:
                before = at
                begin, at = _next_word(data, before, end, flags)
                more = _count_lines(data, before, begin) > _count_lines(data, gap_at, gap_end)
                if not is_cut or begin == end or (more and size > start):
                    gap_at, gap_end = before, begin
                if cut < len(documents) and documents[cut] == document and units[cut] == word:
                    lost = window
                    cut += 1
                word += 1
                is_cut = lost > 0 and begin < end
                if is_cut:
                    lost -= 1
                else:
                    size = _copy(data, gap_at, gap_end, out, size)
                    size = _copy(data, begin, at, out, size)
            blank[document] = skip_space(out, start, size, flags) == size
        ends[document + 1] = size
    return cut


@kernel
def _count_lines(data: UInt8s, begin: int, end: int) -> int:
    count = 0
    for at in range(begin, end):
        count += data[at] == 10
    return count


@kernel
def _next_word(data: UInt8s, at: int, end: int, flags: UInt8s) -> tuple[int, int]:
    """Return (begin, end) of the next word from `at` on; both are `end` if there is none."""
    begin = skip_space(data, at, end, flags)
    at = begin
    while at < end:
        code, after = character_at(data, at)
        if flags[code]:
            return begin, (after if at == begin else at)  # at `begin`, it is a one-character word
        at = after
    return begin, at


@kernel
def _next_unit(data: UInt8s, at: int, end: int, flags: UInt8s, paragraphs: bool) -> tuple[int, int, int]:
    """Return (start of the unit, end of its text, start of the next unit); `end` counts as a line end."""
    if not paragraphs:
        stop = _line_end(data, at, end)
        return at, stop, stop + 1
    begin, stop = _skip_blank(data, at, end, flags), at
    after = begin
    while after <= end:
        line_end = _line_end(data, after, end)
        if skip_space(data, after, line_end, flags) == line_end:
            break
        stop = line_end
        after = line_end + 1
    return begin, max(begin, stop), _skip_blank(data, after, end, flags)


@kernel
def _skip_blank(data: UInt8s, at: int, end: int, flags: UInt8s) -> int:
    """Return the start of the first line from `at` on that is not blank; end + 1 if there is none."""
    while at <= end:
        stop = _line_end(data, at, end)
        if skip_space(data, at, stop, flags) < stop:
            return at
        at = stop + 1
    return at


@kernel
def _line_end(data: UInt8s, at: int, end: int) -> int:
    while at < end and data[at] != 10:
        at += 1
    return at


@kernel
def _has_characters(data: UInt8s, begin: int, end: int, least: int) -> bool:
    if end - begin < least or end - begin >= 4 * least:
        return end - begin >= least
    return count_characters(data, begin, end) >= least


@kernel
def _copy(data: UInt8s, begin: int, end: int, out: UInt8s, size: int) -> int:
    source, target = data[begin:end], out[size:]  # a loop over two views from index 0 becomes a memory copy
    for at in range(end - begin):
        target[at] = source[at]
    return size + end - begin


@kernel
def _copy_lines(data: UInt8s, begin: int, after: int, end: int, out: UInt8s, size: int) -> int:
    """Copy data[begin:after] as `_copy` does; if `after` is end + 1, write a line feed as the last byte."""
    if after <= end or after == begin:
        return _copy(data, begin, after, out, size)
    size = _copy(data, begin, end, out, size)
    out[size] = 10
    return size + 1


@kernel
def _hash(data: UInt8s, begin: int, end: int) -> tuple[np.uint64, np.uint64]:
    one = two = np.uint64(0)
    at = begin
    while at + 16 <= end:
        one ^= _rotate(load_8_bytes(data, at) * _C1, _31) * _C2
        one = (_rotate(one, _27) + two) * _FIVE + _A
        two ^= _rotate(load_8_bytes(data, at + 8) * _C2, _33) * _C1
        two = (_rotate(two, _31) + one) * _FIVE + _B
        at += 16
    one ^= _rotate(pack_bytes(data, at, min(at + 8, end)) * _C1, _31) * _C2
    two ^= _rotate(pack_bytes(data, at + 8, end) * _C2, _33) * _C1
    length = np.uint64(end - begin)
    one ^= length
    two ^= length
    one += two
    two += one
    one, two = _finish(one), _finish(two)
    one += two
    return one, two + one


@kernel
def _rotate(value: np.uint64, by: np.uint64) -> np.uint64:
    return value << by | value >> (_64 - by)


@kernel
def _finish(value: np.uint64) -> np.uint64:
    value = (value ^ value >> _33) * _MIX_1
    value = (value ^ value >> _33) * _MIX_2
    return value ^ value >> _33
