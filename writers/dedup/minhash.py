"""MinHash signatures of texts (Broder 1997), and the keys of their bands (Indyk and Motwani 1998).

Value i of a signature is the least of h_i(x) = a_i * x modulo 2**32 over the text's n-grams, x being the
upper half of an n-gram's 64-bit hash; a_i is odd. (Hashes are random already: a summand would not make their
orders more independent.) Two signatures agree in a value with a probability near the Jaccard similarity of
the sets of n-grams.

A band is some neighbouring values; its key is a 64-bit hash of them, of the band's number, and of the source
where documents are compared within their source only. Texts without any word have no signature: they are
like nothing. From UTF-8 to signatures takes about 2 ns a byte with 112 functions on a core with AVX-512.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.writers.dedup.config import MinHashConfig
from shardkit.writers.dedup.normalization import character_tables, composed, text_bytes
from shardkit.writers.dedup.shingles import make_shingle_scratch, next_shingles
from shardkit.writers.documents import text_offsets

__all__ = [
    "Signatures",
    "band_keys",
    "permutations",
    "sign_batch",
    "word_keys",
]

_EMPTY = np.uint32(0xFFFFFFFF)
_MASK = (1 << 64) - 1
_BAND_SEED_64, _BAND_FACTOR_64 = np.uint64(0x452821E638D01377), np.uint64(0x9E3779B97F4A7C15)
_U29, _U32 = np.uint64(29), np.uint64(32)
_GLOBAL = -1


class Signatures(NamedTuple):
    """Of n texts: values, uint32[n, permutations]; keys of all units, uint8[n, 16]; n-grams, int64[n].

    Equal keys mean equal normalized words in equal order. A text without units has 0 n-grams.
    """

    values: npt.NDArray[np.uint32]
    keys: npt.NDArray[np.uint8]
    shingles: npt.NDArray[np.int64]


def permutations(count: int, seed: int) -> npt.NDArray[np.uint32]:
    """uint32[count]: the odd factors, from splitmix64 (Steele, Lea and Flood 2014)."""
    state, numbers = seed, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        value = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
        numbers.append(value ^ value >> 31)
    return np.array([number >> 32 | 1 for number in numbers], np.uint32)


def sign_batch(texts: pa.LargeStringArray, config: MinHashConfig) -> Signatures:
    """Signatures of all texts (large_string without nulls)."""
    texts = composed(texts)
    data, edges = text_bytes(texts), text_offsets(texts)
    factors = permutations(config.permutations, config.seed)
    values = np.full((len(texts), len(factors)), _EMPTY)
    keys, shingles = np.zeros((len(texts), 2), np.uint64), np.zeros(len(texts), np.int64)
    characters = config.unit == "characters"
    _sign(data, edges, config.ngram, characters, character_tables(), factors, values, keys, shingles)
    return Signatures(values, keys.astype("<u8").view(np.uint8).reshape(-1, 16), shingles)


def word_keys(texts: pa.LargeStringArray) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
    """(uint8[n, 16]: 128-bit keys of each text's normalized words in order; bool[n]: has it any?)."""
    _, keys, shingles = sign_batch(
        texts, MinHashConfig.model_construct(unit="words", ngram=1, permutations=0)
    )
    return keys, shingles > 0


def band_keys(
    signatures: npt.NDArray[np.uint32],
    bands: int,
    rows: int,
    sources: npt.NDArray[np.int32] | None = None,
) -> npt.NDArray[np.uint64]:
    """uint64[n, bands] of uint32[n, permutations]; int32[n] `sources` keep different ones apart."""
    assert bands * rows <= signatures.shape[1]
    keys = np.empty((len(signatures), bands), np.uint64)
    groups = np.full(len(signatures), _GLOBAL) if sources is None else sources.astype(np.int64)
    _hash_bands(signatures, groups, rows, keys)
    return keys


@numba.njit(nogil=True, cache=True)
def _sign(data, edges, ngram, characters, tables, factors, values, keys, shingles):  # type: ignore[no-untyped-def]
    scratch = make_shingle_scratch(ngram)
    hashes = scratch[2]
    some = len(factors) > 0
    for text in range(len(edges) - 1):
        at, stop, state = edges[text], edges[text + 1], (0, 0)
        key, lowest = keys[text], values[text]  # here, because a view costs a counted reference
        count = 0
        while at < stop:
            found, at, state = next_shingles(data, at, stop, state, ngram, characters, tables, scratch, key)
            count += found
            if some:
                _lower_values(hashes, found, factors, lowest)
        shingles[text] = count


@numba.njit(nogil=True, cache=True)
def _lower_values(hashes, count, factors, values):  # type: ignore[no-untyped-def]
    """values[i] = min(values[i], factors[i] * x) over the x of hashes[:count].

    Eight n-grams a round, so that factors are loaded an eighth as often; the loop over factors is what
    becomes vector instructions.
    """
    at = 0
    while at + 8 <= count:
        x0, x1 = _upper(hashes[at]), _upper(hashes[at + 1])
        x2, x3 = _upper(hashes[at + 2]), _upper(hashes[at + 3])
        x4, x5 = _upper(hashes[at + 4]), _upper(hashes[at + 5])
        x6, x7 = _upper(hashes[at + 6]), _upper(hashes[at + 7])
        for i in range(len(values)):
            factor, least = factors[i], values[i]
            least = min(least, np.uint32(factor * x0))
            least = min(least, np.uint32(factor * x1))
            least = min(least, np.uint32(factor * x2))
            least = min(least, np.uint32(factor * x3))
            least = min(least, np.uint32(factor * x4))
            least = min(least, np.uint32(factor * x5))
            least = min(least, np.uint32(factor * x6))
            values[i] = min(least, np.uint32(factor * x7))
        at += 8
    while at < count:
        x = _upper(hashes[at])
        for i in range(len(values)):
            values[i] = min(values[i], np.uint32(factors[i] * x))
        at += 1


@numba.njit(nogil=True, cache=True, inline="always")
def _upper(number):  # type: ignore[no-untyped-def]
    return np.uint32(number >> _U32)


@numba.njit(nogil=True, cache=True)
def _hash_bands(signatures, groups, rows, keys):  # type: ignore[no-untyped-def]
    for text in range(len(keys)):
        for band in range(keys.shape[1]):
            value = _BAND_SEED_64 ^ np.uint64(band)
            value = (value ^ np.uint64(groups[text])) * _BAND_FACTOR_64
            for row in range(band * rows, (band + 1) * rows):
                value ^= value >> _U32
                value = (value ^ np.uint64(signatures[text, row])) * _BAND_FACTOR_64
            value ^= value >> _U32
            value *= _BAND_FACTOR_64
            keys[text, band] = value ^ value >> _U29
