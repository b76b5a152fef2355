from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reference.near import reference_compare
from shardkit.writers.dedup.compare import PairRule, compare_pairs
from shardkit.writers.dedup.config import NearDedupConfig
from shardkit.writers.dedup.shingle_store import SET, Sets

Document = tuple[list[int], int, int]  # stored hashes, distinct, total


def sets_of(documents: list[Document]) -> Sets:
    rows = np.zeros(len(documents), SET)
    rows["number"] = np.arange(len(documents))
    for row, (_, distinct, total) in zip(rows, documents, strict=True):
        row["distinct"], row["total"] = distinct, total
    flat = [value for hashes, _, _ in documents for value in hashes]
    offsets = np.cumsum([0, *(len(hashes) for hashes, _, _ in documents)], dtype=np.int64)
    return Sets(rows, np.array(flat, np.uint64), offsets)


def whole(hashes: set[int], total: int | None = None) -> Document:
    return sorted(hashes), len(hashes), total or len(hashes)


def sketch(hashes: set[int], smallest: int) -> Document:
    return sorted(hashes)[:smallest], len(hashes), len(hashes)


def check(a: list[Document], b: list[Document], config: NearDedupConfig) -> list[bool]:
    """Compare a[i] with b[i], both ways round, with the reference; returns which verified."""
    rows = np.arange(len(a), dtype=np.int64)
    found = compare_pairs(sets_of(a), sets_of(b[::-1]), rows, rows[::-1].copy(), PairRule.of(config))
    turned = compare_pairs(sets_of(b), sets_of(a), rows, rows, PairRule.of(config))
    for at, pair in enumerate(zip(a, b, strict=True)):
        expected = reference_compare(*pair, config)
        assert found.verified[at] == turned.verified[at] == (expected is not None), pair
        for values, which in ((found, 0), (turned, 0)):
            jaccard, containment = expected or (Fraction(), Fraction())
            assert values.jaccard[at] == np.float32(float(jaccard)), which
            assert values.containment[at] == np.float32(float(containment)), which
    return [bool(verified) for verified in found.verified]


def overlapping(m: int, n: int, shared: int, seed: int = 0) -> tuple[set[int], set[int]]:
    rng = random.Random(f"{m} {n} {shared} {seed}")
    values = [rng.getrandbits(44) << 20 | at for at in range(m + n - shared)]
    common = values[:shared]
    return {*common, *values[shared:m]}, {*common, *values[m:]}


shares = st.sampled_from([0.1, 0.3, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0])


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300), st.floats(0, 1)), min_size=1, max_size=12),
    shares,
    st.none() | shares,
    st.sampled_from([0, 20]),
    st.sampled_from([None, 1, 2, 40]),
    st.sampled_from([1, 12]),
)
@example([(4, 5, 1.0), (40, 50, 1.0), (400, 500, 1.0)], 0.8, None, 0, None, 1)
def test_pairs_compare_as_in_plain_python(
    shapes: list[tuple[int, int, float]],
    similarity: float,
    containment: float | None,
    small_shingles: int,
    stored: int | None,
    repetition: int,
) -> None:
    config = NearDedupConfig(similarity=similarity, containment=containment, small_shingles=small_shingles)
    a, b = [], []
    for seed, (m, n, part) in enumerate(shapes):
        first, second = overlapping(m, n, round(part * min(m, n)), seed)
        a.append(whole(first, len(first) * (repetition if seed % 2 else 1)))
        b.append(whole(second) if stored is None else sketch(second, stored))
    check(a, b, config)


@pytest.mark.parametrize("similarity", [0.8, 0.7, 0.85, 0.9, 0.95, 0.123])
def test_a_pair_exactly_at_the_threshold_counts_and_one_below_does_not(similarity: float) -> None:
    config = NearDedupConfig(similarity=similarity, small_shingles=0)
    exact = Fraction(str(similarity))
    for scale in (1, 3, 7):
        shared, union = exact.numerator * scale, exact.denominator * scale
        pair = overlapping(shared + (union - shared) // 2, union - (union - shared) // 2, shared)
        below = pair[0] | {1}, pair[1]
        assert check([whole(pair[0]), whole(below[0])], [whole(pair[1]), whole(below[1])], config) == [
            True,
            False,
        ]


def test_documents_with_few_or_ever_repeated_ngrams_are_compared_strictly() -> None:
    config = NearDedupConfig(containment=0.9)
    nineteen, twenty = overlapping(19, 20, 18)  # 18 / 21
    large = overlapping(40, 40, 36)  # 36 / 44, containment 0.9
    alike = overlapping(39, 40, 39)  # 39 / 40
    assert check([whole(nineteen)], [whole(twenty)], config) == [False]
    assert check([whole(large[0])], [whole(large[1])], config) == [True]
    assert check([whole(large[0], 399)], [whole(large[1])], config) == [True]
    assert check([whole(large[0], 400)], [whole(large[1])], config) == [False]
    assert check([whole(alike[0], 4000)], [whole(alike[1])], config) == [True]


def test_containment_finds_a_short_document_in_a_very_long_one() -> None:
    short, long = overlapping(50, 5000, 45)
    pairs = [whole(short)], [whole(long)]
    assert check(*pairs, NearDedupConfig(containment=0.9)) == [True]
    assert check(*pairs, NearDedupConfig(containment=0.91)) == [False]
    assert check(*pairs, NearDedupConfig()) == [False]


def test_empty_sets_are_like_nothing() -> None:
    config = NearDedupConfig(similarity=0.1, small_shingles=0, containment=0.1)
    assert check([whole(set())] * 2, [whole(set()), whole({1, 2})], config) == [False, False]


@pytest.mark.parametrize(("m", "n", "shared"), [(900, 900, 800), (600, 1000, 580)])
def test_a_sketch_estimates_the_similarity_without_bias(m: int, n: int, shared: int) -> None:
    """The mean of 1,500 estimates from 64 hashes each: its deviation is at most 0.5 / sqrt(64 x 1,500)."""
    rng = np.random.default_rng(5)
    config = NearDedupConfig(similarity=0.01, small_similarity=0.01)
    count, union = 1500, m + n - shared
    values = np.argsort(rng.random((count, union)), axis=1)  # a random order of the union, for each pair
    a = [whole(set(row[:m].tolist())) for row in values]
    b = [sketch(set(row[m - shared :].tolist()), 64) for row in values]
    rows = np.arange(count, dtype=np.int64)
    found = compare_pairs(sets_of(a), sets_of(b), rows, rows, PairRule.of(config))
    bound = 4 * 0.5 / (64 * count) ** 0.5
    assert abs(found.jaccard.astype(np.float64).mean() - shared / union) < bound
    assert abs(found.containment.astype(np.float64).mean() - shared / m) < bound
