"""How much of a text is repeated n-grams of words, straight from the UTF-8 bytes of a batch.

Words are those of `str.split()`. Three ways to count, after those who use them:

top       the n-gram that occurs most often, the first of those: occurrences, and characters without spaces
excess    going from word to word, an n-gram met before counts and is jumped over (datatrove; n-grams are
          compared as joined words, so "ab c" equals "a bc")
copies    every occurrence of an n-gram that occurs twice or more, overlapping ones too (dolma)

A document's words are put one after the other without the spaces and hashed with a polynomial, so that an
n-gram's hash comes from the (n - 1)-gram's. Per n, two bits of each n-gram's slot in a table of 16 slots per
word tell which n-grams may occur twice; only those go to a hash table, where every hit is compared byte by
byte. Memory: 26 to 42 bytes per word of the longest document. `reference_ngrams` is the same in plain Python.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from shardkit.writers.filters.byte_runs import same_runs
from shardkit.writers.filters.characters import SPACE, character_flags, characters_with
from shardkit.writers.utf8 import next_character

__all__ = ["COPIES", "EXCESS", "TOP", "NgramCounts", "ngram_statistics", "reference_ngrams"]

TOP, EXCESS, COPIES = 0, 1, 2
_BASE = np.uint64(0xD6E8FEB86659FD93)
_SCATTER = np.uint64(0x9E3779B97F4A7C15)
_ONE = np.uint64(1)
_POWERS = 64  # powers of the base for words up to so many bytes are looked up
_WORD_BYTE, _MAYBE_SPACE = 0, 1
_MAX_BYTES = 1 << 31  # positions are int32


class NgramCounts(NamedTuple):
    """int64[n]: characters of the text, and of its words; int64[m, n]: two numbers for each of m jobs.

    TOP: `first` is occurrences and `second` characters of one; EXCESS: characters, and 0; COPIES: characters
    of the repeated ones and of all. An n-gram that is longer than the text has zeros.
    """

    characters: npt.NDArray[np.int64]
    word_characters: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]
    second: npt.NDArray[np.int64]


def ngram_statistics(
    data: npt.NDArray[np.uint8],
    offsets: npt.NDArray[np.int64],
    wanted: npt.NDArray[np.bool_],
    jobs: Sequence[tuple[int, int]],
) -> NgramCounts:
    """Counts of the documents data[offsets[i]:offsets[i + 1]], valid UTF-8; zeros where not `wanted`.

    `jobs` are (n, TOP | EXCESS | COPIES).
    """
    sizes = np.diff(offsets)[wanted]
    longest = int(sizes.max(initial=0))
    if longest >= _MAX_BYTES:
        raise ValueError(f"a text of {longest:,} bytes; at most {_MAX_BYTES - 1:,}")
    count = len(wanted)
    counts = NgramCounts(
        np.zeros(count, np.int64),
        np.zeros(count, np.int64),
        np.zeros((len(jobs), count), np.int64),
        np.zeros((len(jobs), count), np.int64),
    )
    if longest:
        order = sorted(range(len(jobs)), key=lambda number: jobs[number][0])
        plan = np.array([(*jobs[number], number) for number in order], np.int64).reshape(-1, 3)
        _count(data, offsets, wanted, plan, longest, character_flags(), _byte_classes(), tuple(counts))
    return counts


def _byte_classes() -> npt.NDArray[np.uint8]:
    """uint8[256]: whether a byte may begin a white-space character."""
    classes = np.full(256, _WORD_BYTE, np.uint8)
    for space in characters_with(SPACE):
        classes[space.encode()[0]] = _MAYBE_SPACE
    return classes


@numba.njit(nogil=True, cache=True)
def _count(data, offsets, wanted, plan, longest, flags, classes, counts):  # type: ignore[no-untyped-def]
    characters, word_characters, first, second = counts
    powers = np.ones(_POWERS, np.uint64)
    for length in range(1, _POWERS):
        powers[length] = powers[length - 1] * _BASE
    words = longest // 2 + 1
    # Pages that no document reaches are never touched, so they take no memory.
    joined = np.empty(longest + 8, np.uint8)
    starts, edges = np.empty(words + 1, np.int32), np.empty(words + 1, np.int32)
    word_hashes, hashes = np.empty(words, np.uint64), np.empty(words, np.uint64)
    marks = np.empty(_slots(16 * words) // 4, np.uint8)
    chosen, numbers = np.empty(words, np.int32), np.empty(words, np.int32)
    table = np.empty(_slots(2 * words), np.int32)
    for document in range(len(wanted)):
        if not wanted[document]:
            continue
        begin, end = offsets[document], offsets[document + 1]
        texts = (data, begin, end, flags, classes)
        found, spaces = _split(texts, joined, starts, edges, word_hashes)
        characters[document] = edges[found] + spaces
        word_characters[document] = edges[found]
        hashes[:found] = word_hashes[:found]
        size = 1
        for job in range(len(plan)):
            n, kind, row = plan[job, 0], plan[job, 1], plan[job, 2]
            if n > found:
                break
            while size < n:
                _extend(hashes, word_hashes, starts, powers, found, size)
                size += 1
            grams = found - n + 1
            maybe = _choose(hashes[:grams], marks, chosen)
            words_of = (joined, starts, edges, hashes)
            if kind == EXCESS:
                one, other = _excess(words_of, n, chosen[:maybe], table), 0
            elif kind == TOP:
                one, other = _top(words_of, n, chosen[:maybe], table, numbers)
            else:
                one = _copies(words_of, n, chosen[:maybe], table, numbers)
                other = 0
                for at in range(grams):
                    other += edges[at + n] - edges[at]
            first[row, document], second[row, document] = one, other


@numba.njit(nogil=True, cache=True)
def _slots(least):  # type: ignore[no-untyped-def]
    slots = 16
    while slots < least:
        slots *= 2
    return slots


@numba.njit(nogil=True, cache=True)
def _split(texts, joined, starts, edges, hashes):  # type: ignore[no-untyped-def]
    """(number of words, white-space characters); words' bytes go to `joined`, hashes to `hashes`.

    Word i is joined[starts[i]:starts[i + 1]] and has edges[i + 1] - edges[i] characters.
    """
    data, at, end, flags, classes = texts
    words = spaces = filled = characters = 0
    starts[0] = edges[0] = 0
    hashed = np.uint64(0)
    while at < end:
        byte = data[at]
        if classes[byte] == _MAYBE_SPACE:
            code, after = next_character(data, at)
            if flags[code] & SPACE:
                if filled > starts[words]:
                    hashes[words] = hashed
                    words += 1
                    starts[words], edges[words] = filled, characters
                    hashed = np.uint64(0)
                spaces += 1
                at = after
                continue
        joined[filled] = byte
        filled += 1
        characters += (byte & 0xC0) != 0x80
        hashed = hashed * _BASE + np.uint64(byte)
        at += 1
    if filled > starts[words]:
        hashes[words] = hashed
        words += 1
        starts[words], edges[words] = filled, characters
    return words, spaces


@numba.njit(nogil=True, cache=True)
def _extend(hashes, word_hashes, starts, powers, words, size):  # type: ignore[no-untyped-def]
    """Make hashes of n-grams of `size` words those of one more."""
    for at in range(words - size):
        last = at + size
        length = starts[last + 1] - starts[last]
        if length < _POWERS:
            power = powers[length]
        else:
            power = _ONE
            for _ in range(length):
                power *= _BASE
        hashes[at] = hashes[at] * power + word_hashes[last]


@numba.njit(nogil=True, cache=True)
def _choose(hashes, marks, chosen):  # type: ignore[no-untyped-def]
    """Put positions of n-grams that may occur twice into `chosen`, in order; returns how many.

    A slot has two bits: 1 when it was met, 3 when it was met again.
    """
    slots = _slots(16 * len(hashes))
    shift = np.uint64(64)
    while slots > 1:
        shift -= _ONE
        slots >>= 1
    marks[: 1 << (62 - np.int64(shift))] = 0
    for at in range(len(hashes)):
        slot = (hashes[at] * _SCATTER) >> shift
        byte, bit = np.int64(slot >> np.uint64(2)), (np.int64(slot) & 3) * 2
        mark = np.int64(marks[byte])
        marks[byte] = mark | (1 | (mark >> bit & 1) << 1) << bit
    count = 0
    for at in range(len(hashes)):
        slot = (hashes[at] * _SCATTER) >> shift
        byte, bit = np.int64(slot >> np.uint64(2)), (np.int64(slot) & 3) * 2
        chosen[count] = at
        count += np.int64(marks[byte]) >> (bit + 1) & 1
    return count


@numba.njit(nogil=True, cache=True)
def _excess(words, n, chosen, table):  # type: ignore[no-untyped-def]
    """Characters of n-grams met before, jumping over each."""
    joined, starts, edges, hashes = words
    slots = _slots(2 * len(chosen))
    table[:slots] = 0
    repeated, after = 0, 0
    for at in chosen:
        if at < after:
            continue
        length = starts[at + n] - starts[at]
        slot = np.int64((hashes[at] * _SCATTER) >> np.uint64(20)) & (slots - 1)
        while True:
            other = table[slot] - 1
            if other < 0:
                table[slot] = at + 1
                break
            if (
                hashes[other] == hashes[at]
                and starts[other + n] - starts[other] == length
                and same_runs(joined, starts[at], starts[other], length)
            ):
                repeated += edges[at + n] - edges[at]
                after = at + n
                break
            slot = (slot + 1) & (slots - 1)
    return repeated


@numba.njit(nogil=True, cache=True)
def _tally(words, n, chosen, table, numbers):  # type: ignore[no-untyped-def]
    """Count equal n-grams: chosen[:k] become where each of k kinds stands first, numbers[:k] how often; k."""
    joined, starts, _, hashes = words
    slots = _slots(2 * len(chosen))
    table[:slots] = 0
    kinds = 0
    for index in range(len(chosen)):
        at = chosen[index]
        slot = np.int64((hashes[at] * _SCATTER) >> np.uint64(20)) & (slots - 1)
        while True:
            kind = table[slot] - 1
            if kind < 0:
                table[slot] = kinds + 1
                chosen[kinds], numbers[kinds] = at, 1
                kinds += 1
                break
            other = chosen[kind]
            if hashes[other] == hashes[at] and _same_words(joined, starts, at, other, n):
                numbers[kind] += 1
                break
            slot = (slot + 1) & (slots - 1)
    return kinds


@numba.njit(nogil=True, cache=True)
def _same_words(joined, starts, one, other, n):  # type: ignore[no-untyped-def]
    shift = starts[other] - starts[one]
    for word in range(1, n + 1):
        if starts[other + word] - starts[one + word] != shift:
            return False
    return same_runs(joined, starts[one], starts[other], starts[one + n] - starts[one])


@numba.njit(nogil=True, cache=True)
def _top(words, n, chosen, table, numbers):  # type: ignore[no-untyped-def]
    """(occurrences, characters) of the first of the most frequent n-grams."""
    edges = words[2]
    best, count = 0, 1
    for kind in range(_tally(words, n, chosen, table, numbers)):
        if numbers[kind] > count:
            best, count = chosen[kind], np.int64(numbers[kind])
    return count, np.int64(edges[best + n] - edges[best])


@numba.njit(nogil=True, cache=True)
def _copies(words, n, chosen, table, numbers):  # type: ignore[no-untyped-def]
    """Characters of all n-grams that occur twice or more."""
    edges = words[2]
    copied = 0
    for kind in range(_tally(words, n, chosen, table, numbers)):
        if numbers[kind] > 1:
            copied += np.int64(numbers[kind]) * np.int64(edges[chosen[kind] + n] - edges[chosen[kind]])
    return copied


def reference_ngrams(text: str, n: int, kind: int) -> tuple[int, int]:
    """One job on one text in plain Python: (first, second)."""
    words = text.split()
    grams = [tuple(words[at : at + n]) for at in range(len(words) - n + 1)]
    counts = Counter(grams)
    if not grams:
        return 0, 0
    if kind == TOP:
        gram, occurrences = counts.most_common(1)[0]
        return occurrences, sum(map(len, gram))
    if kind == COPIES:
        sizes = {gram: times * sum(map(len, gram)) for gram, times in counts.items()}
        return sum(size for gram, size in sizes.items() if counts[gram] > 1), sum(sizes.values())
    seen: set[str] = set()
    at = repeated = 0
    while at < len(grams):
        joined = "".join(grams[at])
        if joined in seen:
            repeated += len(joined)
            at += n
        else:
            seen.add(joined)
            at += 1
    return repeated, 0
