"""The mean vector of a text's tokens, for tokenizers that treat every word by itself.

A text is a sequence of words. A word is a run of bytes without ASCII white space and without ASCII
punctuation, or one punctuation mark. The tokens of a text are those of its words. `Words` is an
open-addressing table of all words that were met, with their tokens, so that the tokenizer runs once for each
distinct word. Words are compared byte by byte.

`add_tokens` adds the vectors of a text's first tokens in their order, in single precision and without fused
operations, so that the sums have the same bits on every machine.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardkit.kernels.numba_support import (
    Bools,
    Float32s,
    Float64s,
    Int32s,
    Int64s,
    UInt8s,
    UInt64s,
    int64,
    kernel,
)

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_U29, _U32 = np.uint64(29), np.uint64(32)
_SPACE, _MARK = np.uint8(1), np.uint8(2)


class Words(NamedTuple):
    """The table: `slots` has the number of the word with a hash, or -1; words are numbered as they came.

    `hashes`, `starts` and `stops` (in `data`), `token_starts` and `token_stops` (in `tokens`) are by number.
    """

    slots: Int64s
    hashes: UInt64s
    starts: Int64s
    stops: Int64s
    token_starts: Int64s
    token_stops: Int64s
    data: UInt8s
    tokens: Int32s


def byte_classes() -> UInt8s:
    """Return uint8[256]: 1 for white space, 2 for marks that are words by themselves, 0 for all others."""
    classes = np.zeros(256, np.uint8)
    classes[[9, 10, 13, 32]] = _SPACE
    for low, high in ((33, 47), (58, 64), (91, 96), (123, 126)):
        classes[low : high + 1] = _MARK
    return classes


@kernel(inline=True, allocates=False)
def _next_word(data: UInt8s, at: int, stop: int, classes: UInt8s) -> tuple[int, int]:
    """Return (start, stop) of the first word at or after `at`; start == stop: there is none."""
    while at < stop and classes[data[at]] == _SPACE:
        at += 1
    start = at
    if at < stop and classes[data[at]] == _MARK:
        return start, at + 1
    while at < stop and classes[data[at]] == 0:
        at += 1
    return start, at


@kernel(inline=True, allocates=False)
def _hash(data: UInt8s, start: int, stop: int) -> np.uint64:
    value = np.uint64(stop - start) * _FACTOR
    for at in range(start, stop):
        value = (value ^ np.uint64(data[at])) * _FACTOR
        value ^= value >> _U32
    return value ^ value >> _U29


@kernel(inline=True, allocates=False)
def _find(data: UInt8s, start: int, stop: int, value: np.uint64, words: Words) -> int:
    """Return the slot of a word: that with its number, or the empty one where it belongs."""
    mask = np.uint64(len(words.slots) - 1)
    slot = value & mask
    while words.slots[slot] >= 0:
        number = words.slots[slot]
        if words.hashes[number] == value and words.stops[number] - words.starts[number] == stop - start:
            same = True
            first = words.starts[number]
            for at in range(stop - start):
                if words.data[first + at] != data[start + at]:
                    same = False
                    break
            if same:
                break
        slot = (slot + np.uint64(1)) & mask
    return int64(slot)


@kernel(allocates=False)
def insert_words(words: Words, first: int, stop: int) -> None:
    """Put the words [first, stop), whose places in `data` and `tokens` are known, into the slots."""
    for number in range(first, stop):
        start, end = words.starts[number], words.stops[number]
        words.hashes[number] = _hash(words.data, start, end)
        slot = _find(words.data, start, end, words.hashes[number], words)
        if words.slots[slot] < 0:
            words.slots[slot] = number


@kernel(allocates=False)
def add_tokens(
    data: UInt8s,
    edges: Int64s,
    rows: Int64s,
    classes: UInt8s,
    words: Words,
    matrix: Float32s,
    most: int,
    sums: Float32s,
    done: Int64s,
    unknown: Int64s,
    found: Int32s,
) -> tuple[int, int]:
    """Add to sums[row] the vectors of the first `most` tokens of each text in `rows`.

    If words among them are not in the table, their (start, stop) are added to `unknown`, int64[m, 2], and
    the sum ends before the first one. `done`, int64[n, 2], has the place where it ends and how many tokens
    are in it; the next call goes on from there. Returns the number of unknown words, and of the rows that
    were taken: all, unless there was no room for more words. `found`, int32[most], is scratch space.
    """
    noted = 0
    for place in range(len(rows)):
        row = rows[place]
        at, tokens, stop, is_known = done[row, 0], done[row, 1], edges[row + 1], True
        count = 0
        while at < stop and tokens < most:
            start, at = _next_word(data, at, stop, classes)
            if start == at:
                break
            number = words.slots[_find(data, start, at, _hash(data, start, at), words)]
            if number < 0:
                if is_known:
                    done[row, 0], done[row, 1] = start, tokens
                    _add(sums, row, matrix, found, count)
                if noted == len(unknown):
                    return noted, place
                is_known = False
                tokens += 1
                unknown[noted, 0], unknown[noted, 1] = start, at
                noted += 1
                continue
            first = words.token_starts[number]
            last = min(words.token_stops[number], first + most - tokens)
            tokens += last - first
            if is_known:
                for token in range(first, last):
                    found[count] = words.tokens[token]
                    count += 1
        if is_known:
            done[row, 0], done[row, 1] = stop, tokens
            _add(sums, row, matrix, found, count)
    return noted, len(rows)


@kernel(allocates=False)
def _add(sums: Float32s, row: int, matrix: Float32s, tokens: Int32s, count: int) -> None:
    """Add the vectors of tokens[:count]; not inlined, where the compiler would not vectorize the loop."""
    for number in range(count):
        token = tokens[number]
        for column in range(sums.shape[1]):
            sums[row, column] += matrix[token, column]


@kernel(allocates=False)
def add_rows(tokens: Int32s, offsets: Int64s, matrix: Float32s, most: int, sums: Float32s) -> None:
    """Set sums[i] to the sum of the vectors of the first `most` of tokens[offsets[i]:offsets[i + 1]]."""
    for row in range(len(offsets) - 1):
        for column in range(sums.shape[1]):
            sums[row, column] = np.float32(0)
        first = offsets[row]
        _add(sums, row, matrix, tokens[first:], min(offsets[row + 1] - first, most))


@kernel
def squares(vectors: Float32s) -> Float64s:
    """Return float64[n], the square of each vector's length, summed in order and in double precision."""
    found = np.empty(len(vectors), np.float64)
    for row in range(len(vectors)):
        vector, total = vectors[row], 0.0
        for at in range(len(vector)):
            value = np.float64(vector[at])
            total += value * value
        found[row] = total
    return found


@kernel
def cosines(
    ours: Float32s, theirs: Float32s, our_squares: Float64s, their_squares: Float64s, a: Int64s, b: Int64s
) -> Float64s:
    """Return the cosine of ours[a[i]] and theirs[b[i]], float64[n]: of equal vectors, it is exactly 1.

    The squares of lengths are those of `squares`. As there, a sum is the same on every machine.
    """
    found = np.empty(len(a), np.float64)
    for pair in range(len(a)):
        one, other, total = ours[a[pair]], theirs[b[pair]], 0.0
        for at in range(len(one)):
            total += np.float64(one[at]) * np.float64(other[at])
        found[pair] = total / np.sqrt(our_squares[a[pair]] * their_squares[b[pair]])
    return found


@kernel
def take_highest(queries: Int64s, similar: Bools, taken: Int64s, most: int) -> Bools:
    """Return which pairs to use: the first `most` similar ones of each query, with those in `taken` before.

    `queries` has the query of each pair, in the order in which they are wanted; `taken` is updated, and is
    `most` + 1 for a query that had more.
    """
    used = np.zeros(len(queries), np.bool_)
    for pair in range(len(queries)):
        query = queries[pair]
        if similar[pair] and taken[query] <= most:
            used[pair] = taken[query] < most
            taken[query] += 1
    return used
