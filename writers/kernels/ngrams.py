"""How much of a text is repeated n-grams of words, straight from the UTF-8 bytes of a batch.

Words are split as by `str.split()`. There are three ways to count, each named for what it counts:

- TOP: the most frequent n-gram (the first one, if several are): its occurrences, and its characters without
  spaces;
- EXCESS: going from word to word, an n-gram that occurred before counts, and its words are skipped
  (datatrove; n-grams are compared as joined words, so "ab c" equals "a bc");
- COPIES: every occurrence of an n-gram that occurs twice or more, including overlapping ones (dolma).

A document's words are concatenated without the spaces; a polynomial hash of every prefix gives the hash of
any n-gram. A table of two-bit counters, 16 per n-gram, selects the n-grams that may occur twice; only these
go to a hash table, where every hit is compared byte by byte. Positions whose n-gram cannot occur twice are
skipped for longer n-grams. EXCESS also skips positions whose next 16 bytes occur only once.

Memory: 44 bytes for each word of the longest document, and up to 24 more if everything repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardkit.kernels.numba_support import Bools, Int32s, Int64s, UInt8s, UInt64s, int64, kernel
from shardkit.kernels.simd import count_ones, load_8_bytes, range_mask, store_8_bytes, trailing_zeros
from shardkit.kernels.utf8 import character_flags, same_runs
from shardkit.writers.kernels.blocks import BLOCK_BYTES, TAIL_BYTES, block_at, lowest_bits, space_mask
from shardkit.writers.kernels.hash_tables import table_slots

TOP, EXCESS, COPIES = 0, 1, 2
_BASE = np.uint64(0xD6E8FEB86659FD93)
_SCATTER = np.uint64(0x9E3779B97F4A7C15)
_ONE = np.uint64(1)
_POWERS_OF_BASE = tuple(np.uint64(pow(int(_BASE), power, 1 << 64)) for power in range(1, 8))
_POWERS = 256  # number of precomputed powers of the base, for n-grams of fewer bytes
_PREFIX = 16  # bytes of joined words that are compared first: equal n-grams begin with the same bytes
_TABLE_SHIFT = np.uint64(20)
_MAX_BYTES = 1 << 31  # texts must be smaller, because positions in them are int32


class NgramCounts(NamedTuple):
    """Characters of t texts and of their words, int64[t]; `first` and `second` of m jobs, int64[m, t].

    TOP: `first` is the number of occurrences and `second` the characters of one. EXCESS: `first` is the
    characters of n-grams that occurred before. COPIES: `first` is the characters of the repeated n-grams and
    `second` those of all n-grams. Both are 0 for texts of fewer than n words.
    """

    characters: Int64s
    word_characters: Int64s
    first: Int64s
    second: Int64s


class _Words(NamedTuple):
    """Words of a text: word i is joined[starts[i]:starts[i + 1]], with edges[i + 1] - edges[i] characters."""

    joined: UInt8s
    starts: Int32s
    edges: Int32s
    prefixes: UInt64s  # hash of joined[:starts[i]]
    powers: UInt64s


class _Scratch(NamedTuple):
    hashes: UInt64s
    marks: UInt8s
    chosen: Int32s
    firsts: Int32s
    numbers: Int32s
    table: Int32s


def ngram_statistics(
    data: UInt8s, offsets: Int64s, wanted: Bools, jobs: Sequence[tuple[int, int]]
) -> NgramCounts:
    """Count n-grams of the documents data[offsets[i]:offsets[i + 1]], valid UTF-8; zeros where not `wanted`.

    Each of the `jobs` is (n, TOP | EXCESS | COPIES).
    """
    sizes = np.diff(offsets)[wanted]
    longest = int(sizes.max(initial=0))
    if longest >= _MAX_BYTES:
        raise ValueError(f"a text is {longest:,} bytes long; the limit is {_MAX_BYTES - 1:,}")
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
        _count(data, offsets, wanted, plan, longest, character_flags(), tuple(counts))
    return counts


@kernel
def _count(
    data: UInt8s,
    offsets: Int64s,
    wanted: Bools,
    plan: Int64s,
    longest: int,
    flags: UInt8s,
    counts: tuple[Int64s, ...],
) -> None:
    characters, word_characters, first, second = counts
    powers = np.ones(_POWERS, np.uint64)
    for length in range(1, _POWERS):
        powers[length] = powers[length - 1] * _BASE
    most = longest // 2 + 1
    # Pages that no document reaches are never touched, so they take no memory.
    joined, tail = np.empty(longest + _PREFIX, np.uint8), np.zeros(TAIL_BYTES, np.uint8)
    starts, edges = np.empty(most + 1, np.int32), np.empty(most + 1, np.int32)
    prefixes = np.empty(most + 1, np.uint64)
    scratch = _Scratch(
        np.empty(most, np.uint64),
        np.empty(table_slots(16 * most) // 4, np.uint8),
        np.empty(most, np.int32),
        np.empty(most, np.int32),
        np.empty(most, np.int32),
        np.empty(table_slots(2 * most), np.int32),
    )
    of_words, of_joined = np.empty(most, np.int32), np.empty(most, np.int32)
    words = _Words(joined, starts, edges, prefixes, powers)
    for document in range(len(wanted)):
        if not wanted[document]:
            continue
        begin, end = offsets[document], offsets[document + 1]
        found, spaces = _split(data, begin, end, flags, words, tail)
        characters[document], word_characters[document] = edges[found] + spaces, edges[found]
        # Numbers of positions in of_words and of_joined whose n-grams may occur twice; -1: not known yet.
        whole, some = -1, -1
        for job in range(len(plan)):
            n, kind, row = plan[job, 0], plan[job, 1], plan[job, 2]
            if n > found:
                break
            if kind == EXCESS:
                if some < 0:
                    some = _share_prefix(words, found, n, scratch, of_joined)
                maybe = _choose(words, found, n, of_joined[:some], scratch)
                first[row, document] = _excess(words, n, maybe, scratch)
                continue
            if whole < 0:
                whole = found
                for at in range(found):
                    of_words[at] = at
            whole = _choose(words, found, n, of_words[:whole], scratch)
            of_words[:whole] = scratch.chosen[:whole]
            kinds = _tally(words, n, whole, scratch)
            if kind == TOP:
                first[row, document], second[row, document] = _top(words, n, kinds, scratch)
            else:
                first[row, document] = _copies(words, n, kinds, scratch)
                for at in range(found - n + 1):
                    second[row, document] += edges[at + n] - edges[at]


@kernel(allocates=False)
def _split(data: UInt8s, begin: int, end: int, flags: UInt8s, words: _Words, tail: UInt8s) -> tuple[int, int]:
    """Fill `words` from data[begin:end]; return (number of words, number of white-space characters)."""
    joined, starts, edges, prefixes = words.joined, words.starts, words.edges, words.prefixes
    found = spaces = filled = characters = 0
    starts[0] = edges[0] = 0
    prefixes[0] = hashed = spilled = np.uint64(0)
    for at in range(begin, end + 1, BLOCK_BYTES):
        block, place = block_at(data, at, tail)
        mask, spilled = space_mask(data, at, end, flags, spilled, tail)
        heads = lowest_bits(min(BLOCK_BYTES, end - at)) & ~range_mask(block, place, 0x80, 0x40)
        spaces += count_ones(heads & mask)
        rest, first = ~mask, 0
        if filled > starts[found] and mask & _ONE:  # the last word ended with the previous block
            found += 1
            starts[found], edges[found], prefixes[found] = filled, characters, hashed
        while rest:
            first = trailing_zeros(rest)
            after = rest + (_ONE << np.uint64(first))  # the carry clears the lowest run of ones
            stop = trailing_zeros(after) if after else BLOCK_BYTES
            rest &= after
            hashed = _append(block, place + first, stop - first, hashed, words, filled)
            filled += stop - first
            characters += count_ones(heads & lowest_bits(stop) & ~lowest_bits(first))
            if stop < BLOCK_BYTES:
                found += 1
                starts[found], edges[found], prefixes[found] = filled, characters, hashed
    joined[filled : filled + _PREFIX] = 0
    return found, spaces


@kernel(inline=True)
def _append(block: UInt8s, at: int, size: int, hashed: np.uint64, words: _Words, filled: int) -> np.uint64:
    """Append block[at:at + size] to the joined words, eight bytes at a time; return the hash of all words."""
    part = (size - 1 & 7) + 1  # size of the first group, 1 to 8 bytes; few words have a second group
    eight = load_8_bytes(block, at)
    store_8_bytes(words.joined, filled, eight)
    value: np.uint64 = hashed * words.powers[part] + _hash_eight(eight << np.uint64(64 - 8 * part))
    for more in range(part, size, 8):
        eight = load_8_bytes(block, at + more)
        store_8_bytes(words.joined, filled + more, eight)
        value = value * words.powers[8] + _hash_eight(eight)
    return value


@kernel(inline=True)
def _hash_eight(eight: np.uint64) -> np.uint64:
    """Return the polynomial hash of eight bytes, lowest first; zero bytes at the beginning do not count."""
    low = np.uint64(0xFF)
    value: np.uint64 = eight >> np.uint64(56)
    for number in range(7):
        value += (eight >> np.uint64(48 - 8 * number) & low) * _POWERS_OF_BASE[number]
    return value


@kernel(allocates=False)
def _share_prefix(words: _Words, found: int, n: int, scratch: _Scratch, chosen: Int32s) -> int:
    """Write positions of n-grams whose joined words may occur twice to `chosen`; return how many.

    The positions are also valid for larger n. All n-grams of fewer than 16 bytes are chosen. A longer n-gram
    is chosen if its first 16 bytes may occur twice, because equal n-grams begin with the same bytes.
    """
    for at in range(found):
        start = words.starts[at]
        low, high = load_8_bytes(words.joined, start), load_8_bytes(words.joined, start + 8)
        scratch.hashes[at] = (low ^ high * _BASE) * _SCATTER
        scratch.hashes[at] ^= scratch.hashes[at] >> np.uint64(32)
    shift = _mark(scratch.hashes[:found], scratch.marks)
    count = 0
    for at in range(found - n + 1):
        chosen[count] = at
        short = words.starts[at + n] - words.starts[at] < _PREFIX
        count += short | _met_again(scratch.hashes[at], shift, scratch.marks)
    return count


@kernel(allocates=False)
def _choose(words: _Words, found: int, n: int, positions: Int32s, scratch: _Scratch) -> int:
    """Write positions whose n-grams may occur twice to scratch.chosen, and their hashes; return how many."""
    hashes, chosen = scratch.hashes, scratch.chosen
    total = len(positions)
    while total and positions[total - 1] > found - n:
        total -= 1
    for index in range(total):
        at = positions[index]
        length = words.starts[at + n] - words.starts[at]
        power = words.powers[length] if length < _POWERS else _power(length)
        hashes[index] = words.prefixes[at + n] - words.prefixes[at] * power
    shift = _mark(hashes[:total], scratch.marks)
    count = 0
    for index in range(total):
        hashed = hashes[index]
        chosen[count], hashes[count] = positions[index], hashed
        count += _met_again(hashed, shift, scratch.marks)
    return count


@kernel(allocates=False)
def _power(exponent: int) -> np.uint64:
    power, square = _ONE, _BASE
    while exponent:
        if exponent & 1:
            power *= square
        square *= square
        exponent >>= 1
    return power


@kernel(allocates=False)
def _mark(hashes: UInt64s, marks: UInt8s) -> np.uint64:
    """Set the two bits of each slot: 1 if it has one hash, 3 if more; return the shift from hash to slot."""
    slots = table_slots(16 * len(hashes))
    marks[: slots >> 2] = 0
    shift = np.uint64(64)
    while slots > 1:
        shift -= _ONE
        slots >>= 1
    for hashed in hashes:
        slot = int64((hashed * _SCATTER) >> shift)
        mark, bit = int64(marks[slot >> 2]), (slot & 3) * 2
        marks[slot >> 2] = mark | (1 | (mark >> bit & 1) << 1) << bit
    return shift


@kernel(inline=True)
def _met_again(hashed: np.uint64, shift: np.uint64, marks: UInt8s) -> int:
    slot = int64((hashed * _SCATTER) >> shift)
    return int64(marks[slot >> 2]) >> ((slot & 3) * 2 + 1) & 1


@kernel(allocates=False)
def _excess(words: _Words, n: int, count: int, scratch: _Scratch) -> int:
    """Return the number of characters in n-grams that occurred before; skip the words of each one found."""
    joined, starts, edges = words.joined, words.starts, words.edges
    hashes, chosen, table = scratch.hashes, scratch.chosen, scratch.table
    slots = table_slots(2 * count)
    table[:slots] = 0
    repeated = after = 0
    for index in range(count):
        at, hashed = chosen[index], hashes[index]
        if at < after:
            continue
        length = starts[at + n] - starts[at]
        slot = int64((hashed * _SCATTER) >> _TABLE_SHIFT) & (slots - 1)
        while table[slot]:
            other = table[slot] - 1
            start = starts[chosen[other]]
            if (
                hashes[other] == hashed
                and starts[chosen[other] + n] - start == length
                and same_runs(joined, starts[at], joined, start, length)
            ):
                repeated += edges[at + n] - edges[at]
                after = at + n
                break
            slot = (slot + 1) & (slots - 1)
        else:
            table[slot] = index + 1
    return int64(repeated)


@kernel(allocates=False)
def _tally(words: _Words, n: int, count: int, scratch: _Scratch) -> int:
    """Return the number of distinct n-grams; write first index in `chosen`, and count, of each to scratch."""
    hashes, chosen, table = scratch.hashes, scratch.chosen, scratch.table
    firsts, numbers = scratch.firsts, scratch.numbers
    slots = table_slots(2 * count)
    table[:slots] = 0
    kinds = 0
    for index in range(count):
        hashed = hashes[index]
        slot = int64((hashed * _SCATTER) >> _TABLE_SHIFT) & (slots - 1)
        while table[slot]:
            kind = table[slot] - 1
            other = firsts[kind]
            if hashes[other] == hashed and _same_words(words, chosen[index], chosen[other], n):
                numbers[kind] += 1
                break
            slot = (slot + 1) & (slots - 1)
        else:
            firsts[kinds], numbers[kinds] = index, 1
            kinds += 1
            table[slot] = kinds
    return kinds


@kernel(allocates=False)
def _same_words(words: _Words, one: int, other: int, n: int) -> bool:
    starts = words.starts
    shift = starts[other] - starts[one]
    for word in range(1, n + 1):
        if starts[other + word] - starts[one + word] != shift:
            return False
    joined = words.joined
    return same_runs(joined, starts[one], joined, starts[other], starts[one + n] - starts[one])


@kernel(allocates=False)
def _top(words: _Words, n: int, kinds: int, scratch: _Scratch) -> tuple[int, int]:
    """Return (occurrences, characters) of the most frequent n-gram, the first one if several are."""
    at, most = 0, 1
    for kind in range(kinds):
        if scratch.numbers[kind] > most:
            at, most = int(scratch.chosen[scratch.firsts[kind]]), int(scratch.numbers[kind])
    return most, words.edges[at + n] - words.edges[at]


@kernel(allocates=False)
def _copies(words: _Words, n: int, kinds: int, scratch: _Scratch) -> int:
    """Return the number of characters in all occurrences of n-grams that occur twice or more."""
    copied = 0
    for kind in range(kinds):
        if scratch.numbers[kind] > 1:
            at = scratch.chosen[scratch.firsts[kind]]
            copied += int(scratch.numbers[kind]) * int(words.edges[at + n] - words.edges[at])
    return copied
