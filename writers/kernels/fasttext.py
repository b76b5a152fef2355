"""The probabilities that a fastText model assigns to the labels of texts, for a whole UTF-8 batch at once.

As in fastText, tokens are separated by ASCII white space and NUL, and newlines are spaces. The vector of a
text is the mean of rows of the input matrix: those of its tokens, of their character n-grams and of n-grams
of tokens, with one `</s>` at the end. `descend` and `activate` compute probabilities from this vector.

Two things differ from fastText: `</s>` inside a text does not end it, and sums are made in another order. The
vector of a token is summed in float32 and cached for its next occurrence; the vector of a text is summed in
float64. Scores equal fastText's to a few 1e-5. They depend on nothing but the model and the text.
"""

from __future__ import annotations

import threading
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
from shardkit.kernels.simd import (
    LANES,
    add_rows,
    add_vector,
    count_ones,
    load_8_bytes,
    multiply_high,
    prefetch,
    range_mask,
    trailing_zeros,
)
from shardkit.kernels.utf8 import next_character, pack_bytes, same_runs
from shardkit.writers.kernels.blocks import BLOCK_BYTES, TAIL_BYTES, block_at, lowest_bits
from shardkit.writers.kernels.fasttext_losses import activate, descend, products
from shardkit.writers.kernels.fasttext_model import LABEL_PREFIX, FastTextModel, aligned


class _Tables(NamedTuple):
    """The parts of a FastTextModel that kernels read, with `reciprocal` and the hash table `slots`."""

    buckets: int
    reciprocal: np.uint64  # reciprocal_of(buckets)
    min_ngram: int
    max_ngram: int
    word_ngrams: int
    slots: Int32s  # hash table of the words with linear probing: the number of a word, or -1
    words: UInt8s
    word_offsets: Int64s
    pruned: UInt64s
    inputs: Float32s


class _Work(NamedTuple):
    """The cache of token vectors, and scratch arrays."""

    facts: UInt64s  # per cached vector: its token's bytes as 3 numbers, and (row count + 1) << 32 | hash
    vectors: Float32s  # cached vectors; the last row is scratch memory
    numbers: Int32s  # row numbers in the input matrix of the rows to add next
    tokens: UInt64s  # per token of a segment: begin, end, index in `vectors`, its bytes as 3 numbers
    tail: UInt8s  # scratch array of block_at


# Constants of 32-bit FNV-1a, and the multiplier that chains hashes of tokens to hashes of token n-grams.
_BASIS_64, _PRIME_64, _MASK_64, _NEXT_64 = map(np.uint64, (2166136261, 16777619, 0xFFFFFFFF, 116049371))
_OPEN, _CLOSE = 60, 62  # < and > around a token
_END = np.frombuffer(b"</s>", np.uint8)
_PREFIX = np.frombuffer(LABEL_PREFIX.encode(), np.uint8)
_KEY_BYTES = 24  # maximum size of a token whose vector is cached
_MIX = np.uint64(0x9E3779B97F4A7C15)
_KEPT, _KEPT_BYTES = 1 << 15, 64 << 20  # maximum number, and total size, of cached token vectors
# Size of the buffer of row numbers: they are collected first and the rows are then summed in one loop, so
# that cache misses overlap.
_ROWS = 1024
_SEGMENT_BYTES = 512  # size of the piece of text whose tokens are listed before their vectors are added


class FastTextScorer:
    """Scores texts with a model. Thread-safe: one call runs at a time."""

    def __init__(self, model: FastTextModel) -> None:
        self.model = model
        slots = np.full(1 << max(4, (2 * len(model.word_offsets) - 2).bit_length()), -1, np.int32)
        _fill_slots(model.words, model.word_offsets, slots)
        dim = model.dimensions
        kept = min(_KEPT, 1 << (_KEPT_BYTES // (4 * dim)).bit_length() - 1)
        self._tables = _Tables(
            model.buckets, reciprocal_of(model.buckets), model.min_ngram, model.max_ngram, model.word_ngrams,
            slots, model.words, model.word_offsets, model.pruned, model.inputs,
        )  # fmt: skip
        self._work = _Work(
            aligned((kept + 1, 4), np.uint64),
            aligned((kept + 1, dim), np.float32),
            np.zeros(_ROWS + model.max_ngram + 1, np.int32),
            np.zeros((_SEGMENT_BYTES // 2 + 1, 6), np.uint64),
            np.zeros(TAIL_BYTES, np.uint8),
        )
        self._columns = np.array(model.outputs.T, order="C")  # a copy has the same array type for every model
        self._lock = threading.Lock()

    def scores(self, data: UInt8s, offsets: Int64s, wanted: Bools, characters: int | None = None) -> Float32s:
        """Return float32[n, labels], probabilities of the texts data[offsets[i]:offsets[i + 1]], valid UTF-8.

        Rows are 0 where not `wanted`. If `characters` is given, only the first `characters` code points of a
        text are read. As in fastText, probabilities may exceed 1 by 1e-5.
        """
        scores = np.zeros((len(wanted), len(self.model.labels)), np.float32)
        loss = ("hs", "softmax", "ns", "ova").index(self.model.loss)
        limit = -1 if characters is None else characters
        with self._lock:
            _score(
                data, offsets, wanted, limit, self._tables, self._work, self._columns,
                self.model.tree, loss, scores,
            )  # fmt: skip
        return scores


@kernel(allocates=False)
def _fill_slots(words: UInt8s, offsets: Int64s, slots: Int32s) -> None:
    mask = np.uint64(len(slots) - 1)
    for word in range(len(offsets) - 1):
        at = _hash(words, offsets[word], offsets[word + 1]) & mask
        while slots[at] >= 0:
            at = (at + np.uint64(1)) & mask
        slots[at] = word


@kernel(inline=True)
def _add_byte(value: np.uint64, byte: int) -> np.uint64:
    """Return the FNV-1a hash `value` extended by a byte, signed as in fastText; its low 32 bits are valid."""
    return (value ^ np.uint64(np.int8(byte))) * _PRIME_64


@kernel(allocates=False)
def _hash(data: UInt8s, begin: int, end: int) -> np.uint64:
    value = _BASIS_64
    for at in range(begin, end):
        value = _add_byte(value, data[at])
    return value & _MASK_64


@kernel(allocates=False)
def _find_word(
    data: UInt8s, begin: int, end: int, value: np.uint64, slots: Int32s, words: UInt8s, offsets: Int64s
) -> int:
    """Return the number of the word data[begin:end], whose hash is `value`, or -1 if the model lacks it."""
    mask = np.uint64(len(slots) - 1)
    at = value & mask
    while slots[at] >= 0:
        word: int = slots[at]
        start = offsets[word]
        if offsets[word + 1] - start == end - begin and same_runs(data, begin, words, start, end - begin):
            return word
        at = (at + np.uint64(1)) & mask
    return -1


def reciprocal_of(divisor: int) -> np.uint64:
    """Return 2**64 / divisor, rounded up, for `remainder`; 0 for a divisor of 1."""
    return np.uint64(-(-(1 << 64) // max(1, divisor)) & ((1 << 64) - 1))


@kernel(inline=True)
def remainder(value: np.uint64, divisor: np.uint64, reciprocal: np.uint64) -> np.uint64:
    """Return `value` modulo `divisor`, both of 32 bits, without a division (Lemire et al. 2019).

    `reciprocal` is the result of reciprocal_of(divisor).
    """
    return multiply_high(value * reciprocal, divisor)


@kernel(inline=True)
def _append_row(bucket: np.uint64, tables: _Tables, numbers: Int32s, filled: int) -> int:
    """Append the row number of a bucket to `numbers`, unless the bucket was pruned; return the new count.

    The code does not branch on pruned buckets, because processors cannot predict which ones were pruned.
    """
    first = len(tables.word_offsets) - 1
    if not len(tables.pruned):
        numbers[filled] = first + int64(bucket)
        return filled + 1
    at, place = int64(bucket >> np.uint64(6)), bucket & np.uint64(63)
    bits = tables.pruned[at, 0]
    before = bits & ((np.uint64(1) << place) - np.uint64(1))
    numbers[filled] = first + int64(tables.pruned[at, 1]) + count_ones(before)
    return filled + int64(bits >> place & np.uint64(1))


@kernel(inline=True)
def _append_ngram(value: np.uint64, tables: _Tables, numbers: Int32s, filled: int) -> int:
    """Append the row number of the character n-gram with hash `value`; return as `_append_row` does."""
    bucket = remainder(value & _MASK_64, np.uint64(tables.buckets), tables.reciprocal)
    return _append_row(bucket, tables, numbers, filled)


@kernel(allocates=False)
def _sum_rows(rows: Float32s, numbers: Int32s, count: int, out: Float32s, place: int) -> None:
    """Add the row rows[n] to the vector out[place] for each n in numbers[:count], in this order."""
    whole = out.shape[1] // LANES * LANES
    for column in range(0, whole, LANES):
        add_rows(rows, numbers, count, column, out, place)
    if whole < out.shape[1]:
        for index in range(count):
            for column in range(whole, out.shape[1]):
                out[place, column] += rows[numbers[index], column]


@kernel(allocates=False)
def _token_vector(
    data: UInt8s, begin: int, end: int, tables: _Tables, work: _Work, place: int
) -> tuple[int, np.uint64]:
    """Write the sum of the rows of the token data[begin:end] to vectors[place]; return (row count, hash).

    The row count is -1 if the token is a label, which has no rows.
    """
    out, numbers = work.vectors, work.numbers
    out[place] = 0
    value = _hash(data, begin, end)
    word = _find_word(data, begin, end, value, tables.slots, tables.words, tables.word_offsets)
    size = end - begin
    if word < 0 and size >= len(_PREFIX) and same_runs(data, begin, _PREFIX, 0, len(_PREFIX)):
        return -1, value
    count, filled = int64(0), int64(0)
    if word >= 0:
        numbers[0] = word
        filled = int64(1)
    is_end = size == len(_END) and same_runs(data, begin, _END, 0, size)
    if tables.max_ngram > 0 and not is_end:
        at = begin - 1
        while at < end:
            filled, at = _list_ngrams(data, begin, at, end, tables, numbers, filled)
            _sum_rows(tables.inputs, numbers, filled, out, place)
            count, filled = count + filled, int64(0)
    _sum_rows(tables.inputs, numbers, filled, out, place)
    return count + filled, value


@kernel(allocates=False)
def _list_ngrams(
    data: UInt8s, begin: int, first: int, end: int, tables: _Tables, numbers: Int32s, filled: int
) -> tuple[int, int]:
    """Append the row numbers of the n-grams of <token> that start at `first` or later to `numbers`.

    Return (new count, start of the n-grams for the next call). The `<` counts as the byte before `begin`, and
    the `>` as the byte at `end`; neither alone is an n-gram.
    """
    least, most = tables.min_ngram, tables.max_ngram
    start = first
    while start < end and filled < _ROWS:
        value, at, length = _BASIS_64, start, 0
        if start < begin:
            value, at, length = _add_byte(value, _OPEN), begin, 1
        start = at
        while length < most and at < end:
            value = _add_byte(value, data[at])
            at += 1
            while at < end and data[at] & 0xC0 == 0x80:
                value = _add_byte(value, data[at])
                at += 1
            length += 1
            if length >= least:
                filled = _append_ngram(value, tables, numbers, filled)
        if length < most:
            length += 1
            if length >= least:
                filled = _append_ngram(_add_byte(value, _CLOSE), tables, numbers, filled)
        if first < begin:
            first = begin
            continue
        start += 1
        while start < end and data[start] & 0xC0 == 0x80:
            start += 1
    return filled, start


@kernel(inline=True)
def _list_token(data: UInt8s, begin: int, end: int, work: _Work, token: UInt64s) -> None:
    """Fill `token` with begin, end, cache index of its vector and, if it is short, its bytes as 3 numbers.

    Prefetch the entry of the cache at this index.
    """
    size, place = end - begin, len(work.vectors) - 1
    token[0], token[1] = np.uint64(begin), np.uint64(end)
    if size <= _KEY_BYTES:
        if begin + _KEY_BYTES <= len(data):
            first = load_8_bytes(data, begin) & lowest_bits(8 * min(size, 8))
            second = load_8_bytes(data, begin + 8) & lowest_bits(8 * min(size - 8, 8))
            third = load_8_bytes(data, begin + 16) & lowest_bits(8 * min(size - 16, 8))
        else:
            first = pack_bytes(data, begin, min(end, begin + 8))
            second = pack_bytes(data, begin + 8, min(end, begin + 16))
            third = pack_bytes(data, begin + 16, end)
        token[3], token[4], token[5] = first, second, third
        mixed = ((first * _MIX ^ second) * _MIX ^ third) * _MIX
        place = int64((mixed ^ mixed >> np.uint64(32)) & np.uint64(len(work.vectors) - 2))
        prefetch(work.facts, 4 * place)
        prefetch(work.vectors, work.vectors.shape[1] * place)
    token[2] = np.uint64(place)


@kernel(inline=True)
def _find_vector(data: UInt8s, token: UInt64s, tables: _Tables, work: _Work) -> tuple[int, int, np.uint64]:
    """Return (index of a token's vector, its row count, the token's hash); compute it if it is not cached."""
    facts, place = work.facts, int64(token[2])
    begin, end = int64(token[0]), int64(token[1])
    if place == len(work.vectors) - 1:
        rows, value = _token_vector(data, begin, end, tables, work, place)
        return place, rows, value
    if facts[place, 0] != token[3] or facts[place, 1] != token[4] or facts[place, 2] != token[5]:
        rows, value = _token_vector(data, begin, end, tables, work, place)
        facts[place, 0], facts[place, 1], facts[place, 2] = token[3], token[4], token[5]
        facts[place, 3] = np.uint64(rows + 1) << np.uint64(32) | value
        return place, rows, value
    return place, int64(facts[place, 3] >> np.uint64(32)) - 1, facts[place, 3] & _MASK_64


@kernel(allocates=False)
def _cut(data: UInt8s, begin: int, end: int, characters: int) -> int:
    """Return the index after `characters` code points of data[begin:end]; `end` if that is negative."""
    if characters < 0 or end - begin <= characters:
        return end
    at = begin
    while at < end and characters > 0:
        _, at = next_character(data, at)
        characters -= 1
    return at


@kernel
def _score(
    data: UInt8s,
    offsets: Int64s,
    wanted: Bools,
    limit: int,
    tables: _Tables,
    work: _Work,
    columns: Float32s,
    tree: Int32s,
    loss: int,
    scores: Float32s,
) -> None:
    labels, dim = scores.shape[1], work.vectors.shape[1]
    spare = len(work.vectors) - 1
    total, nodes = np.zeros(dim, np.float64), np.zeros(2 * labels, np.float64)
    values = np.zeros(labels, np.float64)
    runs = np.zeros(max(1, tables.word_ngrams), np.uint64)
    for text in range(len(wanted)):
        if not wanted[text]:
            continue
        total[:] = 0
        end = _cut(data, offsets[text], offsets[text + 1], limit)
        count, seen = _add_text(data, offsets[text], end, tables, work, total, runs)
        rows, value = _token_vector(_END, int64(0), len(_END), tables, work, spare)
        _add_to_total(work.vectors, spare, total)
        count += rows + _add_runs(value, seen, runs, tables, work, total)
        if count:
            for i in range(dim):
                total[i] /= count
            products(total, columns, values)
            if loss == 0:
                descend(values, tree, nodes, scores, text)
            else:
                activate(values, loss, scores, text)


@kernel(inline=True)
def _add_to_total(vectors: Float32s, place: int, total: Float64s) -> None:
    whole = len(total) // LANES * LANES
    for column in range(0, whole, LANES):
        add_vector(vectors, place, column, total)
    for column in range(whole, len(total)):
        total[column] += vectors[place, column]


@kernel(allocates=False)
def _separators(data: UInt8s, at: int, end: int, tail: UInt8s) -> np.uint64:
    """Return a mask of data[at:at + 64] with the bits of ASCII white space, NUL, and bytes from `end` on."""
    block, place = block_at(data, at, tail)
    found = range_mask(block, place, 32, 1) | range_mask(block, place, 9, 5) | range_mask(block, place, 0, 1)
    return found | ~lowest_bits(min(BLOCK_BYTES, end - at))


@kernel(allocates=False)
def _add_text(
    data: UInt8s, begin: int, end: int, tables: _Tables, work: _Work, total: Float64s, runs: UInt64s
) -> tuple[int, int]:
    """Add the vectors of the tokens of data[begin:end] to `total`; return (count of rows, of tokens)."""
    count, seen, start = int64(0), int64(0), begin
    before = ~np.uint64(0)  # its lowest bit is 1 if the byte before the block separates tokens
    for segment in range(begin, end + 1, _SEGMENT_BYTES):
        listed = 0
        for block in range(segment, min(segment + _SEGMENT_BYTES, end + 1), BLOCK_BYTES):
            mask = _separators(data, block, end, work.tail)
            change = mask ^ (mask << np.uint64(1) | before & np.uint64(1))
            before = mask >> np.uint64(63)
            while change:
                at = block + trailing_zeros(change)
                change &= change - np.uint64(1)
                if mask >> np.uint64(at - block) & np.uint64(1):
                    _list_token(data, start, at, work, work.tokens[listed])
                    listed += 1
                start = at
        for index in range(listed):
            place, rows, value = _find_vector(data, work.tokens[index], tables, work)
            if rows < 0:
                continue
            count += rows
            _add_to_total(work.vectors, place, total)
            if tables.word_ngrams > 1:
                count += _add_runs(value, seen, runs, tables, work, total)
            seen += 1
    return count, seen


@kernel(allocates=False)
def _add_runs(
    value: np.uint64, seen: int, runs: UInt64s, tables: _Tables, work: _Work, total: Float64s
) -> int:
    """Add the rows of the token n-grams that end with the token of hash `value` to `total`; return how many.

    The text has `seen` tokens before this one; runs[n - 1] is the chained hash of the last n tokens.
    """
    most, spare = tables.word_ngrams, len(work.vectors) - 1
    if most <= 1:
        return 0
    if value >= np.uint64(1) << np.uint64(31):
        value |= ~_MASK_64  # extend the sign: hashes of tokens are signed 32-bit numbers
    filled = int64(0)
    for length in range(min(most, seen + 1), 1, -1):
        runs[length - 1] = runs[length - 2] * _NEXT_64 + value
        bucket = runs[length - 1] % np.uint64(tables.buckets)
        filled = _append_row(bucket, tables, work.numbers, filled)
    runs[0] = value
    work.vectors[spare] = 0
    _sum_rows(tables.inputs, work.numbers, filled, work.vectors, spare)
    _add_to_total(work.vectors, spare, total)
    return filled
