"""The tables of a KenLM model, and how words and n-grams are found in them.

There are two kinds of models. *Probing* models are hash tables with linear probing: words and n-grams are
found by 64-bit hashes. *Trie* models have sorted records, packed to the bit: the n-grams that extend an
n-gram to the left are neighbors in the next table. Probabilities may be indexes into a table, and the high
bits of pointers may be in an array. Both layouts are those of KenLM's binary files, which are mapped as is.

A file may be damaged. Every position read from it is checked before use, and each lookup has a return value
for "the file is damaged".
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardkit.kernels.numba_support import Int64s, UInt8s, UInt64s, int64, kernel
from shardkit.kernels.simd import load_8_bytes, multiply_high
from shardkit.writers.kernels.blocks import lowest_bits

# Columns of KenlmModel.tables: a table's start, its number of buckets or records, and their size in bytes (in
# bits for a trie's n-grams of two or more words), bits of a word and of a pointer. A trie's record is a word,
# a probability, a backoff and a pointer to the first record that extends it.
START, COUNT, STRIDE, WORD_BITS, NEXT_BITS = range(5)
# Starts of the tables of quantized values (-1: values are floats), and the bits of an index into them.
PROB_TABLE, PROB_BITS, BACKOFF_TABLE, BACKOFF_BITS = range(5, 9)
# Start of the array of the high bits of pointers, and its length (0: pointers are not split).
ARRAY, ARRAY_COUNT = range(9, 11)
FIELDS = 11

MAX_ORDER = 20  # maximum order of a model; KenLM's own programs are compiled for 6

# Weights are a uint64: the float32 bits of a log10 probability in the low half, and of a log10 backoff in the
# high half. In a hash table, the sign bit of a probability is set if no longer n-gram ends with this one.
SIGN = np.uint64(1 << 31)
NO_EXTENSION = np.uint64(1 << 31)  # a backoff of -0.0: no longer n-gram begins with this one
# Constants of MurmurHash64A, and of KenLM's hash of an n-gram, which chains its words, last word first.
_MURMUR, _MURMUR_SHIFT = np.uint64(0xC6A4A7935BD1E995), np.uint64(47)
_CHAIN, _CHAINED = np.uint64(8978948897894561157), np.uint64(17894857484156487943)
_LOW = np.uint64(0xFFFFFFFF)


class KenlmModel(NamedTuple):
    """An n-gram model for kernels: the bytes of its tables, and the positions of the tables in these bytes.

    Row n - 1 of `tables` int64[order, FIELDS] is for n-grams; its columns are START to ARRAY_COUNT.
    `reciprocals` uint64[order + 1] has the reciprocal_64 of the number of buckets of the vocabulary and of
    each table. The vocabulary has `word_slots` entries from byte `words` on; its highest word number is
    `last_word`, and word 0 is the unknown word.
    """

    data: UInt8s
    tables: Int64s
    reciprocals: UInt64s
    is_trie: bool
    words: int
    word_slots: int
    last_word: int


def reciprocal_64(divisor: int) -> int:
    """Return 2**64 / divisor, rounded down, for `remainder_64`; for a divisor of 1, return 2**64 - 1."""
    return min((1 << 64) // max(1, divisor), (1 << 64) - 1)


@kernel(allocates=False)
def murmur_hash(data: UInt8s, begin: int, size: int) -> np.uint64:
    """Compute MurmurHash64A of data[begin:begin + size]; the eight bytes after it must be readable."""
    value = np.uint64(size) * _MURMUR
    at = begin
    for _ in range(size >> 3):
        eight = load_8_bytes(data, at) * _MURMUR
        value = (value ^ (eight ^ eight >> _MURMUR_SHIFT) * _MURMUR) * _MURMUR
        at += 8
    if size & 7:
        value = (value ^ load_8_bytes(data, at) & lowest_bits(8 * (size & 7))) * _MURMUR
    value = (value ^ value >> _MURMUR_SHIFT) * _MURMUR
    return value ^ value >> _MURMUR_SHIFT


def hash_of(word: bytes) -> np.uint64:
    """Compute the hash that identifies a word in a model."""
    return np.uint64(murmur_hash(np.frombuffer(word + bytes(8), np.uint8), 0, len(word)))


@kernel(inline=True)
def remainder_64(value: np.uint64, divisor: int, reciprocal: np.uint64) -> int:
    """Compute `value` modulo `divisor`; `reciprocal` is 2**64 / divisor, rounded down."""
    rest = value - multiply_high(value, reciprocal) * np.uint64(divisor)
    return int64(rest - np.uint64(divisor) if rest >= np.uint64(divisor) else rest)


@kernel(inline=True)
def longer_key(key: np.uint64, word: int) -> np.uint64:
    """Extend the key of an n-gram by a word in front of it."""
    return key * _CHAIN ^ np.uint64(1 + word) * _CHAINED


@kernel(allocates=False)
def find_entry(
    data: UInt8s, start: int, buckets: int, stride: int, reciprocal: np.uint64, key: np.uint64
) -> int:
    """Return the byte offset of a key's entry in a hash table; -1 if absent, -2 if no bucket is empty."""
    place = remainder_64(key, buckets, reciprocal)
    for _ in range(buckets):
        at = start + place * stride
        found = load_8_bytes(data, at)
        if found == key:
            return at
        if found == 0:
            return -1
        place += 1
        if place == buckets:
            place = 0
    return -2


@kernel(allocates=False)
def find_word(model: KenlmModel, value: np.uint64) -> int:
    """Return the number of the word with hash `value`: 0 if unknown, -1 if the vocabulary is damaged."""
    data = model.data
    if not model.is_trie:
        at = find_entry(data, model.words, model.word_slots, int64(12), model.reciprocals[0], value)
        if at < 0:
            return at + 1
        word = int64(load_8_bytes(data, at + 4) >> np.uint64(32))
        return word if word <= model.last_word else -1
    low, high = int64(-1), model.word_slots
    least, most = np.uint64(0), ~np.uint64(0)
    while high - low > 1:
        at = low + 1 + _pivot(value - least, most - least, high - low - 1)
        found = load_8_bytes(data, model.words + 8 * at)
        if found < value:
            low, least = at, found
        elif found > value:
            high, most = at, found
        else:
            return at + 1
    return 0


@kernel(inline=True)
def _pivot(offset: np.uint64, span: np.uint64, width: int) -> int:
    """Guess the index of the value `offset` among `width` sorted values spread evenly over 0 to `span`."""
    return min(int64(np.float64(offset) / np.float64(span) * width), width - 1)


@kernel(inline=True)
def float_of(bits: np.uint64) -> np.float32:
    """Return the float32 in the lower half of `bits`."""
    return np.uint32(bits & _LOW).view(np.float32)


@kernel(inline=True)
def _bits_at(data: UInt8s, start: int, bit: int, count: int) -> np.uint64:
    """Load `count` bits, at most 57, from the offset `bit` in the records that begin at byte `start`."""
    return load_8_bytes(data, start + (bit >> 3)) >> np.uint64(bit & 7) & lowest_bits(count)


@kernel(allocates=False)
def probing_weights(model: KenlmModel, row: int, key: np.uint64) -> tuple[int, np.uint64]:
    """Return (1, weights of the n-gram `key`), (0, 0) if it is absent, or (-1, 0) if the model is damaged."""
    table = model.tables[row]
    at = find_entry(model.data, table[START], table[COUNT], table[STRIDE], model.reciprocals[row + 1], key)
    if at < 0:
        return at + 1, np.uint64(0)
    if row < len(model.tables) - 1:
        return 1, load_8_bytes(model.data, at + 8)
    # The longest n-grams have no backoff; loading from at + 8 could pass the end of the file.
    return 1, load_8_bytes(model.data, at + 4) >> np.uint64(32)


@kernel(allocates=False)
def trie_search(model: KenlmModel, row: int, word: int, begin: int, end: int) -> int:
    """Return the number of the record for `word` among records begin to end - 1 of table `row`, or -1."""
    table = model.tables[row]
    low, high = begin - 1, end
    least, most = np.uint64(0), np.uint64(model.last_word)
    wanted = np.uint64(word)
    while high - low > 1:
        at = low + 1 + _pivot(wanted - least, most - least, high - low - 1)
        found = _bits_at(model.data, table[START], at * table[STRIDE], table[WORD_BITS])
        if found < wanted:
            low, least = at, found
        elif found > wanted:
            high, most = at, found
        else:
            return at
    return -1


@kernel(allocates=False)
def trie_weights(model: KenlmModel, row: int, number: int) -> np.uint64:
    """Load the weights of the n-gram in record `number` of table `row` of a trie."""
    data, table = model.data, model.tables[row]
    bit = number * table[STRIDE] + table[WORD_BITS]
    prob_bits, backoff_bits = table[PROB_BITS], table[BACKOFF_BITS]
    if table[PROB_TABLE] < 0:
        prob = _bits_at(data, table[START], bit, prob_bits)
        return prob | _bits_at(data, table[START], bit + prob_bits, backoff_bits) << np.uint64(32)
    backoff = np.uint64(0)
    if backoff_bits:
        place = table[BACKOFF_TABLE] + 4 * int64(_bits_at(data, table[START], bit, backoff_bits))
        backoff = load_8_bytes(data, place) << np.uint64(32)
    place = table[PROB_TABLE] + 4 * int64(_bits_at(data, table[START], bit + backoff_bits, prob_bits))
    return load_8_bytes(data, place) & _LOW | backoff


@kernel(allocates=False)
def trie_children(model: KenlmModel, row: int, number: int) -> tuple[int, int]:
    """Return (first, last + 1) of the next table's records that extend this record; (1, 0) if damaged."""
    data, table = model.data, model.tables[row]
    if row == 0:
        at = table[START] + 16 * number + 8
        first, last = int64(load_8_bytes(data, at)), int64(load_8_bytes(data, at + 16))
    else:
        bits = table[NEXT_BITS]
        bit = (number + 1) * table[STRIDE] - bits
        first = int64(_bits_at(data, table[START], bit, bits))
        last = int64(_bits_at(data, table[START], bit + table[STRIDE], bits))
        if table[ARRAY_COUNT]:
            first |= _high_bits(data, table[ARRAY], table[ARRAY_COUNT], number) << bits
            last |= _high_bits(data, table[ARRAY], table[ARRAY_COUNT], number + 1) << bits
    if 0 <= first <= last <= model.tables[row + 1, COUNT]:
        return first, last
    return 1, 0


@kernel(allocates=False)
def _high_bits(data: UInt8s, start: int, count: int, number: int) -> int:
    """Return the high bits of pointer `number`: the last index in the array with a value of at most `number`.

    The array is sorted; it has `count` values of eight bytes from byte `start` on.
    """
    low, high = int64(0), int64(count)
    while high - low > 1:
        at = (low + high) >> 1
        if load_8_bytes(data, start + 8 * at) <= np.uint64(number):
            low = at
        else:
            high = at
    return low
