from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.writers.kernels.sorting import argsort_keys, distinct_hashes, sort_keys, sort_pairs

LOW, ANY, HIGH = st.integers(0, 3), st.integers(0, (1 << 64) - 1), st.integers((1 << 64) - 3, (1 << 64) - 1)


@pytest.mark.parametrize("spread", [1, 300, 1 << 32, 1 << 64])
@pytest.mark.parametrize("count", [0, 1, 2, 5000])
def test_keys_are_sorted_as_numpy_sorts_them(spread: int, count: int) -> None:
    keys = np.random.default_rng(2).integers(0, spread, count, np.uint64, endpoint=False)
    before = keys.copy()
    found, order = argsort_keys(keys)
    assert np.array_equal(order, np.argsort(before, kind="stable"))
    assert np.array_equal(found, np.sort(before))
    keys = before.copy()
    sort_keys(keys)
    assert np.array_equal(keys, np.sort(before))


@pytest.mark.parametrize("spread", [(3, 3), (1 << 32, 1 << 32), (1 << 40, 5), (5, 1 << 64)])
@pytest.mark.parametrize("count", [0, 1, 3000])
def test_pairs_are_sorted_by_the_first_then_by_the_second_number(spread: tuple[int, int], count: int) -> None:
    random = np.random.default_rng(3)
    one, other = (np.uint64((1 << 64) - 1) - random.integers(0, width, count, np.uint64) for width in spread)
    found = sort_pairs(one, other)
    assert list(zip(*(side.tolist() for side in found), strict=True)) == sorted(
        zip(one.tolist(), other.tolist(), strict=True)
    )


@settings(max_examples=200, deadline=None)  # kernels may be compiled first
@given(
    st.lists(st.lists(st.one_of(LOW, ANY, HIGH), max_size=150), max_size=8),
    st.integers(1, 200),
    st.integers(0, 3),
)
def test_sets_are_the_sorted_distinct_hashes(sets: list[list[int]], smallest: int, skipped: int) -> None:
    hashes = np.array([7] * skipped + [value for one in sets for value in one], np.uint64)
    offsets = np.cumsum([skipped, *map(len, sets)], dtype=np.int64)
    stored, distinct = np.zeros(len(sets), np.int64), np.zeros(len(sets), np.int64)
    count = distinct_hashes(hashes, offsets, smallest, stored, distinct)
    kept = [sorted(set(one))[:smallest] for one in sets]
    assert hashes[:count].tolist() == [value for one in kept for value in one]
    assert stored.tolist() == [len(one) for one in kept]
    assert distinct.tolist() == [len(set(one)) for one in sets]


@pytest.mark.parametrize("words", [2, 1000])
def test_long_texts_of_few_words_take_no_longer_than_others(words: int) -> None:
    """Hashes that repeat, or that all share their upper bits, are sorted in linear time."""
    random = np.random.default_rng(1)
    vocabulary = random.integers(0, 1 << 20, words, np.uint64)  # all in one bucket
    hashes = vocabulary[random.integers(0, words, 3_000_000)]
    stored, distinct = np.zeros(1, np.int64), np.zeros(1, np.int64)
    expected = np.unique(hashes)
    assert distinct_hashes(hashes, np.array([0, len(hashes)]), 1 << 30, stored, distinct) == len(expected)
    assert np.array_equal(hashes[: len(expected)], expected)
