"""Probabilities of texts in a KenLM model, for a whole UTF-8 batch at once.

Every line with a word is a sentence: it begins after `<s>` and ends with `</s>`. A word's log10 probability
is the probability of the model's longest n-gram that ends with it, plus the backoffs of the longer contexts.
Sums are made in KenLM's order and in float32, sums of sentences in float64, so that values have the same bits
as in KenLM. A word is found by the hash of its bytes.

A probing model has a cache miss for each word and order. The positions in its tables depend on hashes only,
so the entries for a few dozen words are prefetched together before any of them is read.
"""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import numpy as np

from shardkit.errors import RecipeError
from shardkit.kernels.numba_support import (
    Bools,
    Float32s,
    Float64s,
    Int64s,
    UInt8s,
    UInt32s,
    UInt64s,
    boolean,
    int64,
    kernel,
)
from shardkit.kernels.simd import load_8_bytes, prefetch
from shardkit.kernels.utf8 import (
    LINE_END,
    SPACE,
    character_flags,
    next_character,
    utf8_bytes,
)
from shardkit.writers.kernels.kenlm_tables import (
    COUNT,
    NO_EXTENSION,
    SIGN,
    START,
    STRIDE,
    KenlmModel,
    find_word,
    float_of,
    hash_of,
    longer_key,
    murmur_hash,
    probing_weights,
    remainder_64,
    trie_children,
    trie_search,
    trie_weights,
)
from shardkit.writers.kernels.words import WORD, character_tables

_SEGMENT = 32  # maximum number of entries that are looked up together
_WORD, _LINE_END = 1, 2  # flags of a character: it is part of words; it ends a line
_IS_WORD, _BEGINS, _ENDS = 0, 1, 2  # kinds of entries: a word, the beginning of a sentence, or its end


class _Characters(NamedTuple):
    """Two tables by code point: flags, uint8[1,114,112], and the code point in lower case, uint32[1,114,112].

    If words are not normalized, `lower` maps every code point to itself.
    """

    flags: UInt8s
    lower: UInt32s


class KenlmScorer:
    """Scores texts with a model.

    `where` names the model in errors. If `normalized`, words are looked up in lower case and without
    punctuation; else words are the pieces between white space, unchanged.
    """

    def __init__(self, model: KenlmModel, where: str, *, normalized: bool) -> None:
        self._model, self._where = model, where
        flags = (character_flags() & LINE_END > 0) * np.uint8(_LINE_END)
        if normalized:
            tables = character_tables()
            flags |= (tables.flags & WORD > 0) * np.uint8(_WORD)
            self._characters = _Characters(flags, tables.lower)
        else:
            flags |= (character_flags() & SPACE == 0) * np.uint8(_WORD)
            self._characters = _Characters(flags, np.arange(len(flags), dtype=np.uint32))
        for table in self._characters:
            table.flags.writeable = False
        self._marks = np.zeros(2, np.int64)
        for place, word in enumerate((b"<s>", b"</s>")):
            self._marks[place] = find_word(model, hash_of(word))
        self._check(int(self._marks.min()))

    def scores(self, data: UInt8s, offsets: Int64s, wanted: Bools) -> tuple[Float64s, Int64s]:
        """Return (log10 probabilities, numbers of words plus sentences), one per text.

        The texts are data[offsets[i]:offsets[i + 1]], valid UTF-8; the results are 0 where not `wanted`.
        Raises RecipeError for a damaged model.
        """
        totals, lengths = np.zeros(len(wanted)), np.zeros(len(wanted), np.int64)
        longest = int(np.diff(offsets).max(initial=0))
        room = np.empty(2 * longest + 16, np.uint8)  # lower case needs at most 1.5 times the bytes
        damage = _score_texts(
            data, offsets, wanted, self._characters, self._model, self._marks, room, totals, lengths
        )
        self._check(damage)
        if np.isnan(totals).any():
            self._refuse("a probability is not a number")
        return totals, lengths

    def _check(self, damage: int) -> None:
        if damage < 0:
            table = "vocabulary" if damage == -1 else f"table of {-damage - 1}-grams"
            self._refuse(f"its {table} points outside of the file, or has no end")

    def _refuse(self, problem: str) -> NoReturn:
        raise RecipeError(
            f"{self._where}: {problem}: it is damaged; copy it again, or build it again with build_binary"
        )


@kernel(allocates=False)
def _score_word(
    model: KenlmModel, words: Int64s, at: int, length: int, backoffs: Float32s, fresh: Float32s
) -> tuple[np.float32, int]:
    """Score words[at] after the `length` words before it; return (log10 probability, next context's length).

    backoffs[n - 1] is the backoff of the last n words of this context; it is replaced by the backoff of the
    last n words of the next context. `fresh` is a scratch array. A negative length means a damaged model.
    """
    data, order = model.data, len(model.tables)
    word = words[at]
    key, begin, end = np.uint64(word), int64(0), int64(0)
    weights = load_8_bytes(data, model.tables[0, START] + word * model.tables[0, STRIDE])
    if model.is_trie:
        begin, end = trie_children(model, int64(0), word)
        if end < begin:
            return np.float32(0), -2
        more = begin < end
    else:
        more = weights & SIGN == 0
    prob, matched = float_of(weights | SIGN), int64(1)
    fresh[0] = float_of(weights >> np.uint64(32))
    kept = int64(weights >> np.uint64(32) != NO_EXTENSION)
    while more and matched <= length:
        row = matched
        if model.is_trie:
            number = trie_search(model, row, words[at - matched], begin, end)
            if number < 0:
                break
            weights = trie_weights(model, row, number)
            if row < order - 1:
                begin, end = trie_children(model, row, number)
                if end < begin:
                    return np.float32(0), -row - 2
            more = begin < end
        else:
            key = longer_key(key, words[at - matched])
            found, weights = probing_weights(model, row, key)
            if found < 0:
                return np.float32(0), -row - 2
            if not found:
                break
            more = weights & SIGN == 0
        prob = float_of(weights | SIGN)
        matched += 1
        if matched == order:
            break
        fresh[matched - 1] = float_of(weights >> np.uint64(32))
        if weights >> np.uint64(32) != NO_EXTENSION:
            kept = matched
    for longer in range(matched - 1, length):
        prob += backoffs[longer]
    for shorter in range(kept):
        backoffs[shorter] = fresh[shorter]
    return prob, kept


@kernel(allocates=False)
def _next_words(
    data: UInt8s,
    at: int,
    stop: int,
    characters: _Characters,
    room: UInt8s,
    opened: bool,
    hashes: UInt64s,
    kinds: UInt8s,
) -> tuple[int, int, bool]:
    """Fill `hashes` and `kinds` with entries for the next words of data[at:stop] and for sentence boundaries.

    Return (number of entries, index of the next byte to read, whether a sentence has begun and not ended).
    """
    flags, lower = characters
    count = int64(0)
    while at < stop and count < _SEGMENT - 2:
        code, after = next_character(data, at)
        if not flags[code] & _WORD:
            if opened and flags[code] & _LINE_END:
                kinds[count] = _ENDS
                count += 1
                opened = boolean(False)
            at = after
            continue
        size = int64(0)
        while True:
            low = lower[code]
            if low < 0x80:
                room[size] = low
                size += 1
            else:
                size = _write_character(low, room, size)
            at = after
            if at >= stop:
                break
            code, after = next_character(data, at)
            if not flags[code] & _WORD:
                break
        if not opened:
            kinds[count] = _BEGINS
            count += 1
            opened = boolean(True)
        kinds[count] = _IS_WORD
        hashes[count] = murmur_hash(room, int64(0), size)
        count += 1
    if at >= stop and opened:
        kinds[count] = _ENDS
        count += 1
        opened = boolean(False)
    return count, at, opened


@kernel(allocates=False)
def _write_character(code: int, room: UInt8s, size: int) -> int:
    value, length = utf8_bytes(code)
    for i in range(length):
        room[size + i] = value >> np.uint64(8 * i) & np.uint64(0xFF)
    return size + length


@kernel(allocates=False)
def _fetch(model: KenlmModel, words: Int64s, at: int, depth: int) -> None:
    """Prefetch the entries of the n-grams that end with words[at] and begin up to `depth` words before it."""
    key = np.uint64(words[at])
    for row in range(1, min(depth + 1, len(model.tables))):
        key = longer_key(key, words[at - row])
        table = model.tables[row]
        place = remainder_64(key, table[COUNT], model.reciprocals[row + 1])
        prefetch(model.data, table[START] + place * table[STRIDE])


@kernel
def _score_texts(
    data: UInt8s,
    offsets: Int64s,
    wanted: Bools,
    characters: _Characters,
    model: KenlmModel,
    marks: Int64s,
    room: UInt8s,
    totals: Float64s,
    lengths: Int64s,
) -> int:
    """Sum the log10 probabilities of each text in `totals`, and count its words and sentences in `lengths`.

    Return 0, or a negative number if the model is damaged: -1 for its vocabulary, -1 - n for its n-grams.
    """
    carried = len(model.tables) - 1
    hashes, kinds = np.zeros(_SEGMENT, np.uint64), np.zeros(_SEGMENT, np.uint8)
    words = np.zeros(carried + _SEGMENT, np.int64)
    backoffs, fresh = np.zeros(carried + 1, np.float32), np.zeros(carried + 1, np.float32)
    for text in range(len(wanted)):
        if not wanted[text]:
            continue
        at, stop, opened = offsets[text], offsets[text + 1], boolean(False)
        sentence, context, depth = np.float32(0), int64(0), int64(0)
        while at < stop:
            count, at, opened = _next_words(data, at, stop, characters, room, opened, hashes, kinds)
            if not model.is_trie:
                for i in range(count):
                    place = remainder_64(hashes[i], model.word_slots, model.reciprocals[0])
                    prefetch(model.data, model.words + 12 * place)
            for i in range(count):
                word = marks[kinds[i] - 1] if kinds[i] else find_word(model, hashes[i])
                if word < 0:
                    return -1
                words[carried + i] = word
                depth = 0 if kinds[i] == _BEGINS else depth + 1
                if not model.is_trie and depth:
                    _fetch(model, words, carried + i, depth)
            for i in range(count):
                if kinds[i] == _BEGINS:
                    sentence = np.float32(0)
                    table = model.tables[0]
                    weights = load_8_bytes(model.data, table[START] + marks[0] * table[STRIDE])
                    backoffs[0], context = float_of(weights >> np.uint64(32)), int64(1)
                    continue
                prob, context = _score_word(model, words, carried + i, context, backoffs, fresh)
                if context < 0:
                    return context
                sentence += prob
                lengths[text] += 1
                if kinds[i] == _ENDS:
                    totals[text] += sentence
            for i in range(carried):
                words[i] = words[count + i]
    return 0
