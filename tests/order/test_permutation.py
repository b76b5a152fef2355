"""The permutation is one to one for every size, reversible, unbiased, and never changes."""

from __future__ import annotations

import json
import math
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.permutation import permute_one
from shardkit.order.permutation import MAX_SIZE, Domains, Permutation, mix64, permute, unpermute

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "order_permutation.json"
POWERS_OF_TWO = [1 << bits for bits in range(1, 21)]
KEYS = st.integers(0, 2**64 - 1)

Ints = npt.NDArray[np.int64]


def words(values: list[int] | int) -> npt.NDArray[np.uint64]:
    return np.array(values, dtype=np.uint64)


def many(size: int, keys: int, first_key: int = 0, elements: list[int] | None = None) -> Ints:
    """int64[keys, elements]: the permutations of range(size) under that many keys."""
    wanted = np.arange(size) if elements is None else np.array(elements)
    each = np.repeat(mix64(np.arange(first_key, first_key + keys).astype(np.uint64)), len(wanted))
    domains = Domains.of(np.full(len(each), size, dtype=np.uint64), each)
    images = permute(np.tile(wanted.astype(np.uint64), keys), domains)
    return images.view(np.int64).reshape(keys, len(wanted))


def deviation(counts: npt.NDArray[np.integer[Any]], expected: float) -> float:
    """Chi-square of counts that should be equal, in standard deviations from its mean."""
    degrees = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees))


def fisher_yates(size: int, seed: int) -> Ints:
    order = list(range(size))
    random.Random(seed).shuffle(order)
    return np.array(order)


# One to one, and back


def test_every_size_to_5000_is_a_bijection() -> None:
    for size in range(5001):
        images = Permutation(size, key=size * 1_000_003)(np.arange(size))
        seen = np.zeros(size, dtype=np.bool_)
        seen[images] = True
        assert seen.all(), size


@pytest.mark.sampled(8)
@pytest.mark.parametrize("power", POWERS_OF_TWO)
def test_sizes_around_powers_of_two_are_bijections_with_an_inverse(power: int) -> None:
    for size in (power - 1, power, power + 1):
        permutation = Permutation(size, key=b"around")
        images = permutation(np.arange(size))
        np.testing.assert_array_equal(np.sort(images), np.arange(size))
        np.testing.assert_array_equal(permutation.inverse(images), np.arange(size))


@pytest.mark.parametrize("bits", range(21, 63))
def test_large_sizes_go_there_and_back(bits: int) -> None:
    rng = np.random.default_rng(bits)
    for size in (
        (1 << bits) - 1,
        1 << bits,
        min((1 << bits) + 1, MAX_SIZE),
        (1 << bits) - (1 << bits - 2) + 1,
    ):
        permutation = Permutation(size, key=bits)
        indices = np.concatenate([rng.integers(0, size, 500), [0, 1, size - 2, size - 1]])
        images = permutation(indices)
        assert images.min() >= 0
        assert images.max() < size
        assert len(np.unique(images)) == len(np.unique(indices))
        np.testing.assert_array_equal(permutation.inverse(images), indices)
        np.testing.assert_array_equal(permutation(permutation.inverse(indices)), indices)


@given(size=st.integers(1, 2**62) | st.integers(1, 300), key=KEYS, data=st.data())
@settings(max_examples=200, deadline=None)
def test_the_kernel_agrees_with_plain_python(size: int, key: int, data: st.DataObject) -> None:
    indices = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=8))
    domain = Domains.of(words(size), words(key))
    images = permute(words(indices), domain)
    assert images.tolist() == [permute_one(index, size, key) for index in indices]
    assert unpermute(images, domain).tolist() == indices


@given(st.lists(st.tuples(st.integers(1, 2**62) | st.integers(1, 200), KEYS, KEYS), min_size=1, max_size=40))
@settings(max_examples=100, deadline=None)
def test_many_permutations_in_one_call_equal_each_alone(cases: list[tuple[int, int, int]]) -> None:
    sizes, keys = [size for size, _, _ in cases], [key for _, key, _ in cases]
    indices = [draw % size for size, _, draw in cases]
    domains = Domains.of(words(sizes), words(keys))
    images = permute(words(indices), domains)
    assert images.tolist() == [permute_one(*case) for case in zip(indices, sizes, keys, strict=True)]
    assert unpermute(images, domains).tolist() == indices


def test_long_arrays_equal_their_pieces() -> None:
    indices = np.arange(100_000)
    permutation = Permutation(100_000, key=4)
    pieces = [permutation(piece) for piece in np.array_split(indices, 77)]
    np.testing.assert_array_equal(permutation(indices), np.concatenate(pieces))


# Surface


def test_wraparound_raises_no_warning_and_input_is_left_alone() -> None:
    indices = np.arange(5000)
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        for size in (1, 2, 64, 65, 5000, MAX_SIZE):
            permutation = Permutation(size, key=2**64 - 1)
            permutation.inverse(permutation(indices[: min(size, 5000)]))
    np.testing.assert_array_equal(indices, np.arange(5000))


def test_empty_and_single_permutations_work() -> None:
    empty: list[int] = []
    assert Permutation(0, 7)(empty).tolist() == []
    assert Permutation(0, 7).inverse(np.zeros((2, 0), dtype=np.int64)).shape == (2, 0)
    assert Permutation(1, 7)([0, 0]).tolist() == [0, 0]
    assert len(Permutation(0, 7)) == 0
    assert len(Permutation(12, 7)) == 12


def test_shape_is_kept_and_results_are_int64() -> None:
    permutation = Permutation(1000, b"shape")
    for dtype in (np.int64, np.uint64, np.int32, np.uint16):
        images = permutation(np.arange(60, dtype=dtype).reshape(3, 20).T)
        assert images.shape == (20, 3)
        assert images.dtype == np.int64
    assert permutation(5) == permutation([5])[0]


@pytest.mark.parametrize("indices", [[10], [-1], [3, -1], np.array([3, 2**63], dtype=np.uint64)])
def test_an_index_outside_is_refused(indices: npt.ArrayLike) -> None:
    with pytest.raises(IndexError, match="is not in range"):
        Permutation(10, 1)(indices)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="must be integers"):
        Permutation(10, 1)([0.5])
    for size, key in ((-1, 1), (MAX_SIZE + 1, 1), (10, -1), (10, 2**64)):
        with pytest.raises(ValueError):
            Permutation(size, key)


def test_an_integer_key_is_its_eight_bytes() -> None:
    assert Permutation(50, 3)(range(50)).tolist() == Permutation(50, bytes([3] + [0] * 7))(range(50)).tolist()


def test_golden_vectors_never_change() -> None:
    for case in json.loads(GOLDEN.read_text()):
        key = int(case["key"]) if "key" in case else bytes.fromhex(case["key_bytes"])
        permutation = Permutation(case["size"], key)
        assert permutation(case["indices"]).tolist() == case["images"], case
        assert permutation.inverse(case["images"]).tolist() == case["indices"], case


# Quality, with fixed keys: bounds that a fair shuffle passes with large odds and a known bad one fails


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_every_order_of_a_few_elements_is_equally_likely(size: int) -> None:
    keys = 60_000
    codes = (many(size, keys, first_key=size << 32) * size ** np.arange(size)).sum(axis=1)
    orders, counts = np.unique(codes, return_counts=True)
    assert len(orders) == math.factorial(size)
    assert abs(deviation(counts, keys / len(orders))) < 4


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [64, 65, 72, 96])
def test_pairs_of_elements_go_to_all_pairs_of_places_equally_often(size: int) -> None:
    # 65 is the smallest Feistel domain. With six rounds in place of eight the mean is above 0.3.
    keys, elements = 100_000, [0, 1, 2, 7, 8, 9, 15, 16, 31, 32, 33, 40, 47, 48, 56, 62, 63, size - 1]
    images = many(size, keys, first_key=size << 32, elements=sorted(set(elements)))
    deviations = []
    for i in range(images.shape[1]):
        for j in range(i):
            counts = np.bincount(images[:, i] * size + images[:, j], minlength=size * size)
            assert not counts[:: size + 1].any()
            counts = np.delete(counts, np.arange(size) * (size + 1))
            deviations.append(deviation(counts, keys / (size * (size - 1))))
    assert max(deviations) < 5.5
    assert abs(np.mean(deviations)) < 0.25


@pytest.mark.parametrize("size", [65, 100, 1000])
def test_each_element_goes_to_each_place_equally_often(size: int) -> None:
    keys = 2_000_000 // size
    images = many(size, keys)
    for element in (0, 1, size // 2, size - 1):
        assert deviation(np.bincount(images[:, element], minlength=size), keys / size) < 4.5


def lowest_bits_correlation(images: Ints, bit: int, lag: int) -> float:
    """Correlation of a bit of outputs `lag` apart, in standard deviations of a fair shuffle."""
    signs = 1 - 2 * ((images >> bit) & 1)
    return float((signs[:-lag] * signs[lag:]).sum() / math.sqrt(len(images) - lag))


def step_deviation(images: Ints) -> float:
    """How unequal the steps between neighbouring outputs are, in 64 bins."""
    steps = np.diff(images) % len(images)
    counts = np.bincount(steps * 64 // len(images), minlength=64)
    return deviation(counts, len(steps) / 64)


def unit_steps(images: Ints) -> int:
    return int((np.abs(np.diff(images)) == 1).sum())


@pytest.mark.parametrize("size", [10_007, 2**16, 2**16 + 1, 200_000])
def test_neighbouring_outputs_are_as_unrelated_as_after_fisher_yates(size: int) -> None:
    repeats = 8
    ours = [Permutation(size, key=key)(np.arange(size)) for key in range(repeats)]
    fair = [fisher_yates(size, seed) for seed in range(2)]
    for shuffled in (ours, fair):
        for images in shuffled:
            for bit in (0, 1, 2, 8):
                for lag in (1, 2, 3, 4, 8, 256):
                    assert abs(lowest_bits_correlation(images, bit, lag)) < 4.8
            assert abs(step_deviation(images)) < 5


@pytest.mark.parametrize("size", [1000, 4097, 10_007])
def test_steps_of_one_are_as_frequent_as_after_fisher_yates(size: int) -> None:
    # Of n - 1 steps 2 (n - 1) / n are +1 or -1 on average, with variance 2. Four rounds would give 2.6 to 3.
    counts = [unit_steps(Permutation(size, key)(np.arange(size))) for key in range(500)]
    fair = [unit_steps(fisher_yates(size, seed)) for seed in range(50)]
    for found in (counts, fair):
        assert abs(np.mean(found) - 2 * (size - 1) / size) < 4 * math.sqrt(2 / len(found))


def test_the_quality_tests_catch_known_bad_shuffles() -> None:
    size = 2**16 + 1
    affine = (np.arange(size) * 40_503 + 77) % size
    assert abs(step_deviation(affine)) > 100
    halves = fisher_yates(size // 2, 1)
    paired = np.stack([halves * 2, halves * 2 + 1], axis=1).ravel()
    assert unit_steps(paired) > 1000
    same_low_bit = np.concatenate([halves * 2, halves * 2 + 1])
    assert abs(lowest_bits_correlation(same_low_bit, 0, 1)) > 100


@pytest.mark.parametrize("size", [60, 10_007])
def test_neighbouring_keys_share_nothing(size: int) -> None:
    images = np.stack([Permutation(size, key)(np.arange(size)) for key in range(200)])
    for distance in (1, 2, 64, 128):
        agreements = int((images[distance:] == images[:-distance]).sum())
        pairs = len(images) - distance
        assert abs(agreements - pairs) < 5 * math.sqrt(pairs)


def test_few_elements_walk() -> None:
    # The reason for the domain: a power of four would be up to four times as large as the permutation.
    for size in (65, 257, 1025, 4**8 + 1, 100_000, 4**12 + 1):
        domain = Domains.of(words(size), words(0))
        excess = (int(domain.rows) << int(domain.low_bits)) - size
        assert 0 <= excess < 2 * math.isqrt(size)
