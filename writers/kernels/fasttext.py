"""The probabilities that a fastText model assigns to the labels of texts, for a whole UTF-8 batch at once.

As in fastText, tokens are separated by ASCII white space and NUL, and newlines are spaces. The vector of a
text is the mean of the rows of its tokens, of their character n-grams and of n-grams of tokens, with one
`</s>` at the end. `descend` and `activate` turn it into probabilities for each of fastText's losses.

Two things differ: `</s>` inside a text does not end it, and sums are made in another order. The vector of a
token is summed in float32 and kept in a table for its next occurrence, the vector of a text in float64, so
scores equal fastText's to a few 1e-5. They depend on nothing but the model and the text.
"""

from __future__ import annotations

import math
import threading
from typing import NamedTuple

import numpy as np

from shardkit.writers.kernels.fasttext_model import LABEL_PREFIX, FastTextModel, aligned
from shardkit.writers.kernels.numba_support import (
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
from shardkit.writers.kernels.simd import load_8_bytes
from shardkit.writers.kernels.utf8 import next_character, pack_bytes, same_runs

__all__ = ["FastTextScorer", "activate", "descend"]

_EPSILON = 1e-5  # fastText adds it to every probability before its logarithm


class _Tables(NamedTuple):
    """What vectors of tokens are made from, as in FastTextModel but for the slots and the separators."""

    buckets: int
    min_ngram: int
    max_ngram: int
    word_ngrams: int
    slots: Int32s  # a hash table of the words: word number or -1, at its hash or at the next free slot
    words: UInt8s
    word_offsets: Int64s
    pruned: UInt64s
    inputs: Float32s
    separators: Bools  # bool[256]: bytes between tokens


@kernel(inline=True)
def _product(total: Float64s, outputs: Float32s, row: int) -> float:
    value = 0.0
    for i in range(len(total)):
        value += total[i] * outputs[row, i]
    return value


@kernel
def descend(
    total: Float64s, outputs: Float32s, tree: Int32s, nodes: Float64s, scores: Float32s, text: int
) -> None:
    """Hierarchical softmax: the probability of a label is the product along its path."""
    labels = len(outputs)
    nodes[2 * labels - 2] = 1.0
    for inner in range(labels - 2, -1, -1):
        right = 1.0 / (1.0 + math.exp(-_product(total, outputs, inner)))
        here = nodes[labels + inner]
        nodes[tree[inner, 0]] = here * (1.0 - right + _EPSILON)
        nodes[tree[inner, 1]] = here * (right + _EPSILON)
    for label in range(labels):
        scores[text, label] = nodes[label]


@kernel
def activate(
    total: Float64s, columns: Float32s, loss: int, values: Float64s, scores: Float32s, text: int
) -> None:
    """Softmax (1), or one sigmoid for each label from fastText's table of 512 between -8 and 8.

    `columns` [dimensions, labels] are the outputs transposed: the products of all labels are summed at once,
    each in the order of dimensions, which vectorizes where one sum after the other would wait for itself.
    """
    labels = columns.shape[1]
    values[:labels] = 0
    for i in range(len(total)):
        for label in range(labels):
            values[label] += total[i] * columns[i, label]
    if loss == 1:
        greatest = values[:labels].max()
        whole = 0.0
        for label in range(labels):
            values[label] = math.exp(values[label] - greatest)
            whole += values[label]
        for label in range(labels):
            scores[text, label] = values[label] / whole + _EPSILON
        return
    for label in range(labels):
        scores[text, label] = _table_sigmoid(values[label]) + _EPSILON


@kernel
def _table_sigmoid(value: float) -> float:
    if value < -8:
        return 0.0
    if value > 8:
        return 1.0
    return 1.0 / (1.0 + math.exp(-(math.floor((value + 8) * 32) / 32 - 8)))


# FNV-1a of 32 bits, and the multiplier that chains the hashes of tokens.
_BASIS_64, _PRIME_64, _MASK_64, _NEXT_64 = map(np.uint64, (2166136261, 16777619, 0xFFFFFFFF, 116049371))
_SIGNED = np.uint64(0xFFFFFF00)  # bytes of 128 and above are negative to fastText's hash
_OPEN, _CLOSE = 60, 62  # < and > around a token
_END = np.frombuffer(b"</s>", np.uint8)
_PREFIX = np.frombuffer(LABEL_PREFIX.encode(), np.uint8)
_KEY_BYTES = 32  # longer tokens are summed again each time
_MIX = np.uint64(0x9E3779B97F4A7C15)
_KEPT_BYTES = 2 << 20  # of vectors kept: more would leave the processor's cache


class FastTextScorer:
    """A model and the tables of its kernel. Thread-safe: one call runs at a time."""

    def __init__(self, model: FastTextModel) -> None:
        self.model = model
        slots = np.full(1 << max(4, (2 * len(model.word_offsets) - 2).bit_length()), -1, np.int32)
        _fill_slots(model.words, model.word_offsets, slots)
        separators = np.zeros(256, np.bool_)
        separators[list(b" \n\r\t\v\f\0")] = True
        dim = model.dimensions
        kept = 1 << max(6, (_KEPT_BYTES // (4 * dim)).bit_length() - 1)
        self._tables = _Tables(
            model.buckets, model.min_ngram, model.max_ngram, model.word_ngrams, slots, model.words,
            model.word_offsets, model.pruned, model.inputs, separators,
        )  # fmt: skip
        self._kept = (
            aligned((kept + 1, 8), np.uint64),  # the token's bytes in four, rows, hash
            aligned((kept + 1, dim), np.float32),  # the last one is to work in
        )
        self._outputs = model.outputs
        if model.loss != "hs":
            self._outputs = np.ascontiguousarray(model.outputs.T)
            self._outputs.flags.writeable = False  # as those of all models: kernels are compiled once
        self._lock = threading.Lock()

    def scores(self, data: UInt8s, offsets: Int64s, wanted: Bools, characters: int | None = None) -> Float32s:
        """float32[n, labels]: probabilities of the texts data[offsets[i]:offsets[i + 1]], valid UTF-8.

        Zeros where not `wanted`; of the first `characters` code points only, if given. As from fastText they
        may exceed 1 by 1e-5.
        """
        scores = np.zeros((len(wanted), len(self.model.labels)), np.float32)
        loss = ("hs", "softmax", "ns", "ova").index(self.model.loss)
        limit = -1 if characters is None else characters
        with self._lock:
            _score(
                data, offsets, wanted, limit, self._tables, self._kept, self._outputs,
                self.model.tree, loss, scores,
            )  # fmt: skip
        return scores


@kernel
def _fill_slots(words: UInt8s, offsets: Int64s, slots: Int32s) -> None:
    mask = np.uint64(len(slots) - 1)
    for word in range(len(offsets) - 1):
        at = _hash(words, offsets[word], offsets[word + 1]) & mask
        while slots[at] >= 0:
            at = (at + np.uint64(1)) & mask
        slots[at] = word


@kernel(inline=True)
def _add_byte(value: np.uint64, byte: int) -> np.uint64:
    wide = np.uint64(byte)
    if byte >= 128:
        wide |= _SIGNED
    return (value ^ wide) * _PRIME_64 & _MASK_64


@kernel
def _hash(data: UInt8s, begin: int, end: int) -> np.uint64:
    value = _BASIS_64
    for at in range(begin, end):
        value = _add_byte(value, data[at])
    return value


@kernel
def _find_word(
    data: UInt8s, begin: int, end: int, value: np.uint64, slots: Int32s, words: UInt8s, offsets: Int64s
) -> int:
    """Number of the word data[begin:end] whose hash is `value`, or -1."""
    mask = np.uint64(len(slots) - 1)
    at = value & mask
    while slots[at] >= 0:
        word: int = slots[at]
        start = offsets[word]
        if offsets[word + 1] - start == end - begin and same_runs(data, begin, words, start, end - begin):
            return word
        at = (at + np.uint64(1)) & mask
    return -1


@kernel(inline=True)
def _add_row(rows: Float32s, row: int, out: Float32s, place: int) -> None:
    for i in range(rows.shape[1]):
        out[place, i] += rows[row, i]


@kernel(inline=True)
def _row_of(value: np.uint64, buckets: int, pruned: UInt64s) -> int:
    """Row, after those of words, of an n-gram's hash, or -1."""
    bucket = value % np.uint64(buckets)
    if not len(pruned):
        return int64(bucket)
    at, bit = bucket >> np.uint64(6), np.uint64(1) << (bucket & np.uint64(63))
    bits = pruned[at, 0]
    if not bits & bit:
        return int64(-1)
    return int64(pruned[at, 1]) + _count_bits(bits & (bit - np.uint64(1)))


@kernel(inline=True)
def _count_bits(value: np.uint64) -> int:
    value -= value >> np.uint64(1) & np.uint64(0x5555555555555555)
    value = (value & np.uint64(0x3333333333333333)) + (value >> np.uint64(2) & np.uint64(0x3333333333333333))
    value = value + (value >> np.uint64(4)) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return int64(value * np.uint64(0x0101010101010101) >> np.uint64(56))


@kernel
def _token_vector(
    data: UInt8s, begin: int, end: int, tables: _Tables, out: Float32s, place: int
) -> tuple[int, np.uint64]:
    """Sum of the rows of the token data[begin:end] into out[place]: (rows, hash); rows -1 for a label."""
    out[place] = 0
    value = _hash(data, begin, end)
    word = _find_word(data, begin, end, value, tables.slots, tables.words, tables.word_offsets)
    size = end - begin
    if word < 0 and size >= len(_PREFIX) and same_runs(data, begin, _PREFIX, 0, len(_PREFIX)):
        return -1, value
    count = 0
    if word >= 0:
        _add_row(tables.inputs, word, out, place)
        count = 1
    is_end = size == len(_END) and same_runs(data, begin, _END, 0, size)
    if tables.max_ngram > 0 and not is_end:
        count += _add_ngrams(data, begin, end, tables, out, place)
    return count, value


@kernel
def _add_ngrams(data: UInt8s, begin: int, end: int, tables: _Tables, out: Float32s, place: int) -> int:
    """Add the rows of the character n-grams of <token> to out[place]: how many these are."""
    first, least = len(tables.word_offsets) - 1, tables.min_ngram
    count = 0
    for start in range(begin - 1, end + 1):
        if begin <= start < end and data[start] & 0xC0 == 0x80:
            continue
        value, at = _BASIS_64, start
        for length in range(1, tables.max_ngram + 1):
            if at > end:
                break
            if at < begin:
                value = _add_byte(value, _OPEN)
                at += 1
            elif at == end:
                value = _add_byte(value, _CLOSE)
                at += 1
            else:
                value = _add_byte(value, data[at])
                at += 1
                while at < end and data[at] & 0xC0 == 0x80:
                    value = _add_byte(value, data[at])
                    at += 1
            if length >= least and not (length == 1 and (start < begin or start == end)):
                row = _row_of(value, tables.buckets, tables.pruned)
                if row >= 0:
                    _add_row(tables.inputs, first + row, out, place)
                    count += 1
    return count


@kernel
def _kept_token(data: UInt8s, begin: int, end: int, tables: _Tables, kept: tuple[UInt64s, Float32s]) -> int:
    """Place in `kept` of a token of up to _KEY_BYTES bytes, whose vector is summed if it is not there."""
    facts, vectors = kept
    size = end - begin
    parts = (np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0))
    if begin + _KEY_BYTES <= len(data):
        first = _masked(load_8_bytes(data, begin), size)
        second = _masked(load_8_bytes(data, begin + 8), size - 8)
        third = _masked(load_8_bytes(data, begin + 16), size - 16)
        parts = (first, second, third, _masked(load_8_bytes(data, begin + 24), size - 24))
    else:
        parts = (
            pack_bytes(data, begin, min(end, begin + 8)),
            pack_bytes(data, begin + 8, min(end, begin + 16)),
            pack_bytes(data, begin + 16, min(end, begin + 24)),
            pack_bytes(data, begin + 24, end),
        )
    mixed = ((parts[0] * _MIX ^ parts[1]) * _MIX ^ parts[2]) * _MIX ^ parts[3]
    mixed *= _MIX
    place = int64((mixed ^ mixed >> np.uint64(32)) & np.uint64(len(facts) - 2))
    same = facts[place, 0] == parts[0] and facts[place, 1] == parts[1]
    if not same or facts[place, 2] != parts[2] or facts[place, 3] != parts[3]:
        count, value = _token_vector(data, begin, end, tables, vectors, place)
        facts[place, 0], facts[place, 1], facts[place, 2], facts[place, 3] = parts
        facts[place, 4], facts[place, 5] = np.uint64(count), value
    return place


@kernel(inline=True)
def _masked(value: np.uint64, size: int) -> np.uint64:
    """The lowest `size` bytes of a uint64."""
    if size >= 8:
        return value
    if size <= 0:
        return np.uint64(0)
    return value & ((np.uint64(1) << np.uint64(8 * size)) - np.uint64(1))


@kernel
def _cut(data: UInt8s, begin: int, end: int, characters: int) -> int:
    """Where the first `characters` code points of data[begin:end] end; negative: all."""
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
    kept: tuple[UInt64s, Float32s],
    outputs: Float32s,
    tree: Int32s,
    loss: int,
    scores: Float32s,
) -> None:
    vectors, labels = kept[1], scores.shape[1]
    spare, dim = len(vectors) - 1, vectors.shape[1]
    total, nodes = np.zeros(dim, np.float64), np.zeros(2 * labels, np.float64)
    runs = np.zeros(max(1, tables.word_ngrams), np.uint64)
    for text in range(len(wanted)):
        if not wanted[text]:
            continue
        total[:] = 0
        end = _cut(data, offsets[text], offsets[text + 1], limit)
        count, seen = _add_text(data, offsets[text], end, tables, kept, total, runs)
        rows, value = _token_vector(_END, 0, len(_END), tables, vectors, spare)
        _add_vector(vectors, spare, total)
        count += rows + _add_runs(value, seen, runs, tables, vectors, total)
        if count:
            for i in range(dim):
                total[i] /= count
            if loss == 0:
                descend(total, outputs, tree, nodes, scores, text)
            else:
                activate(total, outputs, loss, nodes, scores, text)


@kernel(inline=True)
def _add_vector(vectors: Float32s, place: int, total: Float64s) -> None:
    for i in range(len(total)):
        total[i] += vectors[place, i]


@kernel
def _add_text(
    data: UInt8s,
    begin: int,
    end: int,
    tables: _Tables,
    kept: tuple[UInt64s, Float32s],
    total: Float64s,
    runs: UInt64s,
) -> tuple[int, int]:
    """Add the vectors of the tokens of data[begin:end] to `total`: (rows, tokens)."""
    separators = tables.separators
    facts, vectors = kept
    count, seen = int64(0), 0
    at = begin
    while at < end:
        if separators[data[at]]:
            at += 1
            continue
        start = at
        while at < end and not separators[data[at]]:
            at += 1
        place = len(vectors) - 1
        if at - start <= _KEY_BYTES:
            place = _kept_token(data, start, at, tables, kept)
        else:
            rows, value = _token_vector(data, start, at, tables, vectors, place)
            facts[place, 4], facts[place, 5] = np.uint64(rows), value
        found = int64(facts[place, 4])
        if found < 0:
            continue
        count += found
        _add_vector(vectors, place, total)
        if tables.word_ngrams > 1:
            count += _add_runs(facts[place, 5], seen, runs, tables, vectors, total)
        seen += 1
    return count, seen


@kernel
def _add_runs(
    value: np.uint64, seen: int, runs: UInt64s, tables: _Tables, vectors: Float32s, total: Float64s
) -> int:
    """Add the n-grams of tokens that end in the one with hash `value`, after `seen` others: how many rows.

    runs[n - 1] is the chained hash of the last n tokens. The last of `vectors` is there to work in.
    """
    most, first, spare = tables.word_ngrams, len(tables.word_offsets) - 1, len(vectors) - 1
    if most <= 1:
        return 0
    if value >= np.uint64(1) << np.uint64(31):
        value |= ~_MASK_64  # hashes of tokens are signed, 32 bits
    count = 0
    vectors[spare] = 0
    for length in range(min(most, seen + 1), 1, -1):
        runs[length - 1] = runs[length - 2] * _NEXT_64 + value
        row = _row_of(runs[length - 1], tables.buckets, tables.pruned)
        if row >= 0:
            _add_row(tables.inputs, first + row, vectors, spare)
            count += 1
    runs[0] = value
    _add_vector(vectors, spare, total)
    return count
