"""Reads ARPA files, the text form of n-gram models, into hash tables for `kenlm.py`.

The file is read in pieces, each line once. The tables are those of KenLM: a word is identified by the hash of
its bytes, and an n-gram by a hash of its words, last word first. A file that was pruned may lack n-grams that
are the end of longer ones. Because a search stops at the first missing n-gram, this module adds them with
their backoff probability, as KenLM does.

As in KenLM, these are errors: wrong counts, n-grams whose words are not unigrams or whose contexts are
missing, positive log10 probabilities, and files without `<s>` or `</s>`. Without `<unk>` in the file, unknown
words have the probability 10**-100. A model takes 12 to 24 bytes per n-gram, and three times as much while it
is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from shardkit.kernels.numba_support import Bools, UInt8s, UInt32s, UInt64s, int64, kernel
from shardkit.kernels.simd import load_8_bytes, store_8_bytes
from shardkit.writers.kernels.kenlm_lines import UNKNOWN, UNKNOWN_TOO, ArpaLines
from shardkit.writers.kernels.kenlm_tables import (
    COUNT,
    FIELDS,
    NO_EXTENSION,
    SIGN,
    START,
    STRIDE,
    KenlmModel,
    find_entry,
    find_word,
    hash_of,
    longer_key,
    reciprocal_64,
    remainder_64,
)

_WORD_ENTRY, _UNIGRAM, _MIDDLE, _LONGEST = 12, 8, 16, 12  # bytes per entry of the four kinds of tables
_UNKNOWN_WEIGHTS = np.array([-100, 0], np.float32).view(np.uint64)  # weights of <unk> if the file lacks it
_LOW = np.uint64(0xFFFFFFFF)


class _Section(NamedTuple):
    """The m n-grams of one order: their words uint32[m, n], weights uint64[m] and first line number.

    A weight is the bits of two float32: the log10 probability (low half) and the backoff.
    """

    words: UInt32s
    weights: UInt64s
    line: int


def read_arpa(pieces: Iterator[bytes]) -> KenlmModel:
    """Read a model from pieces of a file's content. Raises ValueError, naming the line, if it is invalid."""
    lines = ArpaLines(pieces)
    counts = lines.counts()
    lines.expect("\\1-grams:", "the list of words")
    known, unigrams = _vocabulary(*lines.unigrams(counts[0]))
    for mark in ("<s>", "</s>"):
        if not find_word(known, hash_of(mark.encode())):
            raise ValueError(f"it lacks {mark}, the mark of a sentence's beginning or end")
    sections = []
    for order, count in enumerate(counts[1:], start=2):
        lines.expect(f"\\{order}-grams:", f"what follows the {order - 1}-grams")
        first = lines.number + 1
        sections.append(_Section(*lines.ngrams(order, count, known), first))
    lines.expect("\\end\\", "the end of the file")
    return _joined(known, unigrams, sections)


def _vocabulary(hashes: UInt64s, weights: UInt64s) -> tuple[KenlmModel, UInt64s]:
    """Return (a model that has only a vocabulary, the weights of the words by word number)."""
    unknown = (hashes == UNKNOWN) | (hashes == UNKNOWN_TOO)
    first = weights[unknown][:1] if unknown.any() else _UNKNOWN_WEIGHTS
    words = hashes[~unknown]
    table = _table(words, np.arange(1, len(words) + 1, dtype=np.uint64), _WORD_ENTRY)
    reciprocals = np.array([_reciprocal(len(words))], np.uint64)
    places = np.zeros((1, FIELDS), np.int64)
    known = KenlmModel(table, places, reciprocals, False, 0, _buckets(len(words)), len(words))
    return known, np.concatenate([first, weights[~unknown]])


def _buckets(count: int) -> int:
    return max(count + 1, count * 3 // 2)


def _reciprocal(count: int) -> np.uint64:
    return np.uint64(reciprocal_64(_buckets(count)))


def _table(keys: UInt64s, weights: UInt64s, stride: int) -> UInt8s:
    """Return a hash table from `keys` to `weights`, `stride` bytes per entry; skip keys that are repeated."""
    table = np.zeros(_buckets(len(keys)) * stride, np.uint8)
    _fill(keys, weights, table, _buckets(len(keys)), stride, _reciprocal(len(keys)))
    return table


def _joined(known: KenlmModel, unigrams: UInt64s, sections: list[_Section]) -> KenlmModel:
    """Return the complete model: the vocabulary, the n-grams of all orders, and n-grams the file lacks."""
    real = [len(section.words) for section in sections]
    parts: list[UInt8s] = []
    for place in range(len(sections) - 1, -1, -1):
        stride = _MIDDLE if parts else _LONGEST
        table = _table(_keys_of(sections[place].words), sections[place].weights, stride)
        if parts and (blanks := _blanks(sections[place + 1].words, table, real[place])) is not None:
            words = np.concatenate([sections[place].words, blanks])
            weights = np.full(len(blanks), NO_EXTENSION << np.uint64(32), np.uint64)
            weights = np.concatenate([sections[place].weights, weights])
            sections[place] = sections[place]._replace(words=words, weights=weights)
            table = _table(_keys_of(words), weights, stride)
        parts.insert(0, table)
    parts = [known.data, unigrams.view(np.uint8), *parts]
    starts = np.cumsum([0, *map(len, parts)])
    tables = np.zeros((len(sections) + 1, FIELDS), np.int64)
    tables[:, START] = starts[1:-1]
    tables[:, COUNT] = [len(unigrams), *(_buckets(len(section.words)) for section in sections)]
    tables[:, STRIDE] = [_UNIGRAM, *[_MIDDLE] * (len(sections) - 1), _LONGEST]
    reciprocals = [known.reciprocals[0], np.uint64(1), *(_reciprocal(len(one.words)) for one in sections)]
    data = np.concatenate(parts)
    model = known._replace(data=data, tables=tables, reciprocals=np.array(reciprocals, np.uint64))
    for row, (section, count) in enumerate(zip(sections, real, strict=True), start=1):
        lacking = _link(model, row, section.words, count)
        if lacking >= 0:
            line = f"line {section.line + lacking:,}"
            raise ValueError(
                f"{line}: the first {row} words of this {row + 1}-gram are not listed among the model's "
                f"{row}-grams"
            )
    data.flags.writeable = False
    return model


def _keys_of(words: UInt32s) -> UInt64s:
    keys = np.zeros(len(words), np.uint64)
    _find_keys(words, keys)
    return keys


def _blanks(longer: UInt32s, table: UInt8s, count: int) -> UInt32s | None:
    """Return the n-grams that `longer` n-grams end with and `table` lacks, or None if it has them all."""
    lacking = np.zeros(len(longer), np.bool_)
    suffixes = np.ascontiguousarray(longer[:, 1:])
    keys = _keys_of(suffixes)
    _find_lacking(keys, table, _buckets(count), _reciprocal(count), lacking)
    if not lacking.any():
        return None
    _, first = np.unique(keys[lacking], return_index=True)
    return suffixes[lacking][first]


@kernel(allocates=False)
def _find_keys(words: UInt32s, keys: UInt64s) -> None:
    for row in range(len(words)):
        key = np.uint64(words[row, words.shape[1] - 1])
        for column in range(words.shape[1] - 2, -1, -1):
            key = longer_key(key, int64(words[row, column]))
        keys[row] = key


@kernel(allocates=False)
def _fill(
    keys: UInt64s, weights: UInt64s, table: UInt8s, buckets: int, stride: int, reciprocal: np.uint64
) -> None:
    for row in range(len(keys)):
        key = keys[row]
        at = remainder_64(key, buckets, reciprocal) * stride
        while load_8_bytes(table, at) != key:
            if load_8_bytes(table, at) == 0:
                store_8_bytes(table, at, key)
                if stride == _MIDDLE:
                    store_8_bytes(table, at + 8, weights[row])
                else:  # store four bytes of the weight: a word number or a probability
                    store_8_bytes(table, at + 4, key >> np.uint64(32) | weights[row] << np.uint64(32))
                break
            at += stride
            if at == buckets * stride:
                at = int64(0)


@kernel(allocates=False)
def _find_lacking(keys: UInt64s, table: UInt8s, buckets: int, reciprocal: np.uint64, lacking: Bools) -> None:
    for row in range(len(keys)):
        lacking[row] = find_entry(table, int64(0), buckets, int64(_MIDDLE), reciprocal, keys[row]) < 0


@kernel(allocates=False)
def _weights_at(model: KenlmModel, words: UInt32s, row: int, first: int, count: int) -> int:
    """Return the byte offset of the weights of words[row, first:first + count], negative if it is missing."""
    key = np.uint64(words[row, first + count - 1])
    table = model.tables[count - 1]
    if count == 1:
        return int64(table[START] + int64(key) * table[STRIDE])
    for column in range(first + count - 2, first - 1, -1):
        key = longer_key(key, int64(words[row, column]))
    at = find_entry(model.data, table[START], table[COUNT], table[STRIDE], model.reciprocals[count], key)
    return at + 8 if at >= 0 else at


@kernel(allocates=False)
def _link(model: KenlmModel, row: int, words: UInt32s, real: int) -> int:
    """Mark the shorter n-grams with which the n-grams of table `row` begin or end.

    Return the index of the first n-gram whose beginning is missing, or -1. The first `real` n-grams are from
    the file; the others, which it lacks, get their backoff probability.
    """
    data, size = model.data, row + 1
    for ngram in range(len(words)):
        suffix, context = _weights_at(model, words, ngram, 1, row), _weights_at(model, words, ngram, 0, row)
        store_8_bytes(data, suffix, load_8_bytes(data, suffix) & ~SIGN)  # mark: a longer one ends with it
        if context >= 0:
            weights = load_8_bytes(data, context)
            # Change a backoff of -0.0 ("no longer n-gram begins with this one") to 0.0, because one does.
            if weights >> np.uint64(32) == NO_EXTENSION:
                store_8_bytes(data, context, weights & _LOW)
        elif ngram < real:
            return ngram
        if ngram >= real:
            prob = -np.uint32(load_8_bytes(data, suffix) & _LOW).view(np.float32)
            if context >= 0:
                prob += np.uint32(load_8_bytes(data, context) >> np.uint64(32)).view(np.float32)
            at = _weights_at(model, words, ngram, 0, size)
            bits = np.uint64(np.float32(prob).view(np.uint32)) | SIGN
            store_8_bytes(data, at, load_8_bytes(data, at) & ~_LOW | bits)
    return -1
