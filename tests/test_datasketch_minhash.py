"""Signatures are datasketch's to the bit, and xxh32 is xxHash's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from datasketch import MinHash
from datasketch.hashfunc import sha1_hash32
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardkit.writers.dedup.datasketch_minhash import (
    Scheme,
    datasketch_permutations,
    signatures_datasketch,
    xxh32_ranges,
)

SCHEMES: list[Scheme] = ["affine32", "legacy"]
MAX_HASH = (1 << 32) - 1

Hashes = st.lists(st.integers(0, MAX_HASH), max_size=40)


def theirs(documents: list[list[int]], permutations: int, seed: int, scheme: Scheme) -> list[list[int]]:
    """datasketch's values of documents that are given by the hashes of their n-grams."""
    rows = []
    for hashes in documents:
        sketch = MinHash(num_perm=permutations, seed=seed, hashfunc=lambda h: h, scheme=scheme)
        sketch.update_batch(hashes)
        rows.append(sketch.hashvalues.tolist())
    return rows


def ours(documents: list[list[int]], permutations: int, seed: int, scheme: Scheme) -> npt.NDArray[np.uint32]:
    flat = np.array([h for hashes in documents for h in hashes], np.uint32)
    offsets = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    return signatures_datasketch(flat, offsets, *datasketch_permutations(permutations, seed, scheme))


@pytest.mark.parametrize("scheme", SCHEMES)
@settings(deadline=None, max_examples=60)
@given(
    documents=st.lists(Hashes, max_size=5),
    permutations=st.integers(1, 140),
    seed=st.integers(0, MAX_HASH),
)
@example(documents=[[], [0], [MAX_HASH], [0] * 9, []], permutations=128, seed=1)
def test_signatures_are_datasketchs_values(
    scheme: Scheme, documents: list[list[int]], permutations: int, seed: int
) -> None:
    found = ours(documents, permutations, seed, scheme)
    assert found.dtype == np.uint32
    assert found.shape == (len(documents), permutations)
    assert found.tolist() == theirs(documents, permutations, seed, scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_signatures_are_datasketchs_over_many_documents(scheme: Scheme) -> None:
    random = np.random.default_rng(7)
    documents = [random.integers(0, MAX_HASH, n, endpoint=True).tolist() for n in (0, 1, 2, 3, 5, 700, 4001)]
    assert ours(documents, 112, 1, scheme).tolist() == theirs(documents, 112, 1, scheme)


@pytest.mark.parametrize("multiplier", [1, 8, (1 << 61) - 2])
def test_the_legacy_fold_is_exact_beside_multiples_of_its_prime(multiplier: int) -> None:
    """Where x mod 2^61 - 1 is 0 or nearly: no random test meets that."""
    prime, wraps = (1 << 61) - 1, 1 << 64
    near = [times * prime + away for times in range(9) for away in (-2, -1, 0, 1, 2)]
    targets = [target for target in near if 0 <= target < wraps]
    a = np.full(len(targets), multiplier, np.uint64)
    b = np.array([(target - 12345 * multiplier) % wraps for target in targets], np.uint64)
    found = signatures_datasketch(np.array([12345], np.uint32), np.array([0, 1]), a, b)
    assert found[0].tolist() == [target % prime & MAX_HASH for target in targets]


def test_a_document_without_ngrams_has_the_greatest_hash_as_datasketch_has() -> None:
    found = ours([[], []], 16, 3, "affine32")
    assert (found == MinHash(16, 3).hashvalues).all()
    assert (found == MAX_HASH).all()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("hash_function", [sha1_hash32, xxhash.xxh32_intdigest])
def test_texts_have_datasketchs_signatures_with_both_hash_functions(
    scheme: Scheme, hash_function: Callable[[bytes], int]
) -> None:
    words = [f"Wort{i % 7}ü{i}" for i in range(20)]
    grams = [" ".join(words[i : i + 5]).encode() for i in range(len(words) - 4)]
    sketch = MinHash(num_perm=128, seed=11, hashfunc=hash_function, scheme=scheme)
    sketch.update_batch(grams)
    text = " ".join(words).encode()
    if hash_function is sha1_hash32:
        hashes = np.array([sha1_hash32(gram) for gram in grams], np.uint32)
    else:
        starts = np.array([text.index(gram) for gram in grams])
        stops = starts + [len(gram) for gram in grams]
        hashes = xxh32_ranges(np.frombuffer(text, np.uint8), starts, stops)
    permutations = datasketch_permutations(128, 11, scheme)
    found = signatures_datasketch(hashes, np.array([0, len(grams)]), *permutations)
    assert (found[0] == sketch.hashvalues).all()


def test_permutations_without_a_scheme_are_those_of_datasketch_without_one() -> None:
    assert (np.array(datasketch_permutations(20, 5)) == MinHash(num_perm=20, seed=5).permutations).all()


@settings(deadline=None, max_examples=100)
@given(data=st.binary(max_size=200), seed=st.integers(0, MAX_HASH), cuts=st.data())
def test_xxh32_is_xxhash_over_any_ranges(data: bytes, seed: int, cuts: st.DataObject) -> None:
    ends = st.integers(0, len(data))
    ranges = [sorted(pair) for pair in cuts.draw(st.lists(st.tuples(ends, ends), max_size=8))]
    starts, stops = np.array(ranges, np.int64).reshape(-1, 2).T
    found = xxh32_ranges(np.frombuffer(data, np.uint8), starts, stops, seed)
    assert found.tolist() == [xxhash.xxh32_intdigest(data[start:stop], seed) for start, stop in ranges]


def test_xxh32_is_xxhash_for_every_length_up_to_a_hundred_and_long_ones() -> None:
    data = np.random.default_rng(3).integers(0, 256, 1 << 20, dtype=np.uint8)
    lengths = np.array([*range(101), 4095, 4096, 4097, (1 << 20) - 3])
    starts = np.full(len(lengths), 3)
    found = xxh32_ranges(data, starts, starts + lengths)
    assert found.tolist() == [xxhash.xxh32_intdigest(data[3 : 3 + n].tobytes()) for n in lengths]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 9)])
def test_ranges_outside_the_buffer_are_our_mistake(start: int, stop: int) -> None:
    with pytest.raises(AssertionError):
        xxh32_ranges(np.zeros(8, np.uint8), np.array([start]), np.array([stop]))
