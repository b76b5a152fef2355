"""Comparison of two documents: the exact Jaccard similarity and containment of their sets of n-grams.

Sets are sorted, so a merge without branches finds the common n-grams, in about three nanoseconds per step.
The sizes determine how many n-grams a pair must share to verify; a pair whose sizes make that impossible is
not compared, and a merge ends as soon as the remaining n-grams cannot suffice. If one set is many times
larger than the other, it is searched instead.

At the threshold: a similarity is a quotient of two integers, and the recipe's threshold is the double nearest
to a decimal fraction with few digits. Division rounds correctly, so equal rationals give equal doubles; two
rationals that differ do so by at least 1 / (union x the fraction's denominator), far more than 2^-53 for sets
below 2^31 and fractions of six digits. So comparing the doubles is comparing the rationals: 4 of 5 shared
n-grams verify at 0.8.

An index stores a sketch of a document (sketches.py), the smallest k hashes of its set, or all; let t be the
largest of them. Hashes are random, so the union's hashes below t are a random sample of it, and the share of
the sample that is in both sets is an unbiased estimate of the similarity (Broder 1997; without t itself:
Haldane 1945, Cohen and Kaplan 2007). The same sample of the smaller set gives the containment. Its standard
deviation is sqrt(s (1 - s) / k): 0.025 at 0.8 for k = 256.

Of the hashes of an index only upper bits are known, so both sets are compared by these, each hash with at
most one. One of m hashes that is not among the n of the index then seems to be there if it meets one of those
without a partner: of two sets that share s hashes, (m - s) (n - s) / 2^bits on average, 0.01 of 400 n-grams
with 19 bits at a similarity of 0.7. So no correction is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np
import numpy.typing as npt

from shardkit.kernels.numba_support import Bools, Float32s, Int64s, UInt64s, int64, kernel
from shardkit.writers.dedup.config import NearDedupConfig
from shardkit.writers.dedup.shingle_store import Sets
from shardkit.writers.execution.digests import RecipeKey

_NEVER = 2.0  # a containment threshold that no pair reaches
_SEARCH_RATIO = 16  # a set more than this many times larger than the other is searched, not merged
_STEPS = 64  # merge steps between two checks whether enough n-grams are left


@dataclass(frozen=True, slots=True)
class PairRule:
    """The settings of `dedup.near` that decide whether a pair of documents verifies."""

    unit: Annotated[str, RecipeKey("minhash.unit")]
    ngram: Annotated[int, RecipeKey("minhash.ngram")]
    similarity: float
    containment: float | None
    small_shingles: int
    small_repetition: float
    small_similarity: float

    @classmethod
    def of(cls, config: NearDedupConfig) -> Self:
        """Return the rule of a recipe's `dedup.near`."""
        return cls(
            config.minhash.unit,
            config.minhash.ngram,
            config.similarity,
            config.containment,
            config.small_shingles,
            config.small_repetition,
            config.small_similarity,
        )


@dataclass(frozen=True, slots=True)
class Compared:
    """The results of a comparison, one entry per pair. Similarities of pairs that do not verify are 0."""

    verified: npt.NDArray[np.bool_]
    jaccard: npt.NDArray[np.float32]
    containment: npt.NDArray[np.float32]  # share of the smaller set that is in the other one


def compare_pairs(
    a: Sets, b: Sets, a_rows: npt.NDArray[np.int64], b_rows: npt.NDArray[np.int64], rule: PairRule
) -> Compared:
    """Compare row a_rows[i] of `a` with row b_rows[i] of `b`, for all i; at most one of them is a sketch."""
    count = len(a_rows)
    result = Compared(np.zeros(count, np.bool_), np.zeros(count, np.float32), np.zeros(count, np.float32))
    numbers = (
        rule.similarity,
        rule.small_similarity,
        _NEVER if rule.containment is None else rule.containment,
        rule.small_shingles,
        rule.small_repetition,
    )
    # Pass whole columns: the kernel would copy structured rows field by field.
    sizes = [(sets.rows["distinct"].astype(np.int64), sets.rows["total"].astype(np.int64)) for sets in (a, b)]
    first, second = (a.hashes, a.offsets, *sizes[0], a.bits), (b.hashes, b.offsets, *sizes[1], b.bits)
    _compare(first, second, a_rows, b_rows, numbers, result.verified, result.jaccard, result.containment)
    return result


# Hashes, offsets, and per document: distinct n-grams, all n-grams, known bits of a hash
_Sets = tuple[UInt64s, Int64s, Int64s, Int64s, Int64s]


@kernel
def _compare(
    first: _Sets,
    second: _Sets,
    a_rows: Int64s,
    b_rows: Int64s,
    rule: tuple[float, float, float, int, float],
    verified: Bools,
    jaccard: Float32s,
    containment: Float32s,
) -> None:
    similarity, small_similarity, contained, small_shingles, small_repetition = rule
    a_hashes, a_offsets, a_distinct, a_total, a_bits = first
    b_hashes, b_offsets, b_distinct, b_total, b_bits = second
    for pair in range(len(a_rows)):
        a, b = a_rows[pair], b_rows[pair]
        i, i_end, j, j_end = a_offsets[a], a_offsets[a + 1], b_offsets[b], b_offsets[b + 1]
        if i == i_end or j == j_end:
            continue
        if i_end - i < a_distinct[a] or j_end - j < b_distinct[b]:
            i_end, j_end = _common_sample(
                a_hashes, i, i_end, a_distinct[a], b_hashes, j, j_end, b_distinct[b]
            )
        m, n = i_end - i, j_end - j
        # Of equally large sets, the sketch counts as the smaller one: its sample's size is not random.
        smaller = (
            m if a_distinct[a] < b_distinct[b] + (a_offsets[a + 1] - a_offsets[a] < a_distinct[a]) else n
        )
        small = _small(a_distinct[a], a_total[a], small_shingles, small_repetition)
        small |= _small(b_distinct[b], b_total[b], small_shingles, small_repetition)
        needed = _least_shared(m, n, small_similarity if small else similarity)
        if not small:
            needed = min(needed, _least_contained(smaller, contained))
        if needed > min(m, n):
            continue
        bits = min(a_bits[a], b_bits[b])
        if bits < 64:
            known = np.uint64(0xFFFFFFFFFFFFFFFF) << np.uint64(64 - bits)
            shared = _shared_of_known(a_hashes, i, i_end, b_hashes, j, j_end, known)
        elif m <= n:
            shared = _shared(a_hashes, i, i_end, b_hashes, j, j_end, needed)
        else:
            shared = _shared(b_hashes, j, j_end, a_hashes, i, i_end, needed)
        if shared >= needed:
            verified[pair] = True
            jaccard[pair] = shared / (m + n - shared)
            containment[pair] = shared / smaller if smaller else 0.0


@kernel
def _small(distinct: int, total: int, small_shingles: int, small_repetition: float) -> bool:
    return distinct < small_shingles or total / distinct >= small_repetition


@kernel
def _common_sample(
    a_hashes: UInt64s,
    i: int,
    i_end: int,
    a_distinct: int,
    b_hashes: UInt64s,
    j: int,
    j_end: int,
    b_distinct: int,
) -> tuple[int, int]:
    """Return, for each set, the index after its last hash below the largest hash of the sketch."""
    limit = np.uint64(0xFFFFFFFFFFFFFFFF)
    if i_end - i < a_distinct:
        limit = a_hashes[i_end - 1]
    if j_end - j < b_distinct:
        limit = min(limit, b_hashes[j_end - 1])
    i_end = i + int64(np.searchsorted(a_hashes[i:i_end], limit))
    j_end = j + int64(np.searchsorted(b_hashes[j:j_end], limit))
    return i_end, j_end


@kernel
def _least_shared(m: int, n: int, share: float) -> int:
    """Return how many elements sets of sizes m and n must share for a similarity of `share`; at least 1."""
    shared = max(int(share / (1.0 + share) * (m + n)) - 1, 1)
    while shared <= min(m, n) and shared / (m + n - shared) < share:
        shared += 1
    return shared


@kernel
def _least_contained(size: int, share: float) -> int:
    shared = max(int(share * size) - 1, 1)
    while shared <= size and shared / size < share:
        shared += 1
    return shared


@kernel
def _shared(a: UInt64s, i: int, i_end: int, b: UInt64s, j: int, j_end: int, needed: int) -> int:
    """Count the common elements of a[i:i_end] and b[j:j_end], which is not shorter.

    Stops with a lower count as soon as `needed` common elements cannot be reached.
    """
    shared = 0
    if j_end - j > _SEARCH_RATIO * (i_end - i):
        while i < i_end and shared + (i_end - i) >= needed:
            step = 1
            while j + step < j_end and b[j + step] < a[i]:
                step *= 2
            j += np.searchsorted(b[j : min(j + step + 1, j_end)], a[i])
            if j == j_end:
                break
            shared += b[j] == a[i]
            i += 1
        return shared
    while shared + min(i_end - i, j_end - j) >= needed:
        steps = min(_STEPS, min(i_end - i, j_end - j))  # cannot run past the end of either set
        if steps == 0:
            break
        for _ in range(steps):
            x, y = a[i], b[j]
            shared += x == y
            i += x <= y
            j += y <= x
    return shared


@kernel
def _shared_of_known(a: UInt64s, i: int, i_end: int, b: UInt64s, j: int, j_end: int, known: np.uint64) -> int:
    """Count the elements of a[i:i_end] and b[j:j_end] that have the `known` bits in common, each once."""
    shared = 0
    while i < i_end and j < j_end:
        x, y = a[i] & known, b[j] & known
        shared += x == y
        i += x <= y
        j += y <= x
    return shared
