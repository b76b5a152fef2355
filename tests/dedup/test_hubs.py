from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from reference.near import reference_hub_pairs
from shardkit.writers.dedup.hubs import (
    HubLimits,
    HubSearch,
    count_matches,
    make_prints,
    matches_for,
    sub_rows,
    thresholds,
)
from shardkit.writers.dedup.population import Kind, Population
from shardkit.writers.dedup.signatures import print_bytes
from support.default_cases import cases
from support.near_parts import Made, clusters, near_signature, write_parts

KINDS: tuple[Kind, ...] = ("input", "input", "index")


def search(
    population: Population, limits: HubLimits, *, memory_bytes: int = 1 << 24
) -> tuple[list[tuple[int, int]], int]:
    """(pairs of the hub of all documents, bounded)."""
    scratch = population.parts[0].folder.path / ".hub"
    hubs = HubSearch(population, 0.8, scratch, limits=limits, memory_bytes=memory_bytes)
    numbers = np.arange(population.starts[-1], dtype=np.uint64)
    found = [
        (a, b)
        for one, other in hubs.pairs(numbers)
        for a, b in zip(one.tolist(), other.tolist(), strict=True)
    ]
    assert not scratch.exists()
    return found, hubs.bounded


def made(signatures: npt.NDArray[np.uint32], seed: int = 0) -> list[Made]:
    """One input for each row; the priorities are those of random ids."""
    rng = random.Random(seed)
    return [Made(rng.randbytes(16), tuple(row)) for row in signatures.tolist()]


@pytest.mark.parametrize("permutations", [9, 20, 112, 1024])
def test_equal_values_are_counted_over_a_byte_of_each(permutations: int) -> None:
    rng = np.random.default_rng(permutations)
    signatures = rng.integers(0, 3, (300, permutations), np.uint32) * np.uint32(1_000_003)
    prints = make_prints(print_bytes(signatures))
    found = np.zeros(400, np.uint64)
    count_matches(prints[7], np.ascontiguousarray(prints.T), 300, found)
    expected = (signatures == signatures[7]).sum(axis=1) + -permutations % 8
    assert found[:300].tolist() == expected.tolist()
    assert matches_for(1.0, permutations) == expected[7]


def test_bytes_of_different_values_are_equal_once_in_256_times_however_small_the_values() -> None:
    rng = np.random.default_rng(1)
    for most in (1 << 12, 1 << 32):
        prints = make_prints(print_bytes(rng.integers(0, most, (2, 1 << 18), np.uint32))).view(np.uint8)
        assert 900 < (prints[0] == prints[1]).sum() < 1200  # 1,024 and 64 of equal values at 2^12


def test_sub_bands_keep_pairs_at_the_threshold() -> None:
    assert sub_rows(0.8, 112) == 6
    for similarity in (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0):
        for permutations in (64, 112, 256):
            rows = sub_rows(similarity, permutations)
            assert 1 - (1 - similarity**rows) ** (permutations // rows) >= 0.995
    assert sub_rows(0.1, 8) == 1
    floor, similar, cover = thresholds(0.8, 112)
    assert (floor, similar, cover) == (78, 90, 99)  # 0.69, 0.8 and 0.88, less what is equal by chance


@pytest.mark.parametrize("memory_bytes", [0, 1 << 24])
def test_hubs_give_the_reference_s_pairs_within_limits_and_over_them(
    tmp_path: Path, memory_bytes: int
) -> None:
    met = 0
    for seed, (similarity, permutations, limits) in enumerate(
        [
            (0.95, 20, HubLimits(20)),
            (0.9, 20, HubLimits(6, leaders=8, pairs=3)),
            (0.85, 20, HubLimits(4, leaders=1 << 12, pairs=5)),
            (0.8, 20, HubLimits(8, leaders=12, pairs=99)),
            (0.94, 64, HubLimits(8)),  # here leaders are many that are not firm
        ]
    ):
        documents = clusters(seed, [50, 20], similarity, permutations=permutations, kinds=KINDS)
        population, ordered = write_parts(tmp_path / str(seed), documents, 2)
        found, bounded = search(population, limits, memory_bytes=memory_bytes)
        expected = reference_hub_pairs([one.reference() for one in ordered], 0.8, limits)
        assert (set(found), bounded) == expected
        assert len(expected[0]) > 20
        met += bounded
    assert met > 20


def test_equal_signatures_make_one_pair_a_document(tmp_path: Path) -> None:
    same = np.tile(np.arange(112, dtype=np.uint32), (200, 1))
    population, ordered = write_parts(tmp_path, made(same), 1)
    found, bounded = search(population, HubLimits(documents=10))
    first = min(range(200), key=lambda number: ordered[number].id)
    assert set(found) == {(min(first, at), max(first, at)) for at in range(200) if at != first}
    assert bounded == 0


@pytest.mark.parametrize(("similarity", "recall"), [(0.8, 0.98), (0.9, 0.99)])
def test_sub_bands_find_the_few_pairs_of_a_hub(tmp_path: Path, similarity: float, recall: float) -> None:
    # 600 documents share one band and nothing else, but that each odd one is near the one before it.
    rng = random.Random(1)
    band = [rng.getrandbits(32) for _ in range(8)]
    signatures = []
    for _ in range(300):
        base = [rng.getrandbits(32) for _ in range(112)]
        for one in (base, near_signature(rng, base, similarity)):
            signatures.append(band + list(one[8:]))
    population, ordered = write_parts(tmp_path, made(np.array(signatures, np.uint32)), 1)
    assert [one.signature[9] for one in ordered] == [row[9] for row in signatures]
    found = set(search(population, HubLimits(documents=64))[0])
    expected = {(at, at + 1) for at in range(0, 600, 2)}
    assert len(found & expected) >= recall * 300
    assert found <= expected


Sets = list[set[int]]


def family(rng: random.Random, similarity: float, count: int) -> Sets:
    """Sets whose Jaccard similarity is about this for any two: much of one center, the rest their own."""
    share = (2 * similarity / (1 + similarity)) ** 0.5
    return [
        {element if rng.random() < share else rng.getrandbits(60) for element in range(200)}
        for _ in range(count)
    ]


def tree(rng: random.Random, count: int) -> Sets:
    """Each set is an earlier one with 2 to 29 of 200 elements exchanged."""
    sets = [set(range(200))]
    while len(sets) < count:
        parent = sorted(rng.choice(sets))
        for at in rng.sample(range(200), rng.randrange(2, 30)):
            parent[at] = rng.getrandbits(60)
        sets.append(set(parent))
    rng.shuffle(sets)
    return sets


def minhash(sets: Sets, permutations: int) -> npt.NDArray[np.uint32]:
    """Signatures by random hash functions, one table each."""
    elements = {element: at for at, element in enumerate(sorted(set().union(*sets)))}
    hashes = np.random.default_rng(2).integers(0, 1 << 32, (len(elements), permutations), np.uint32)
    return np.stack([hashes[[elements[element] for element in one]].min(axis=0) for one in sets])


def kept(order: Sequence[int], edges: set[tuple[int, int]]) -> set[int]:
    """Each document in order that is near none kept before it."""
    stay: list[int] = []
    for one in order:
        if not any((min(one, other), max(one, other)) in edges for other in stay):
            stay.append(one)
    return set(stay)


@pytest.mark.parametrize("kind", cases(["0.9", "0.85", "tree"], ["tree"]))
def test_leaders_leave_hardly_a_document_that_all_pairs_would_remove(tmp_path: Path, kind: str) -> None:
    rng, count = random.Random(3), 400
    sets = tree(rng, count) if kind == "tree" else family(rng, float(kind), count)
    population, ordered = write_parts(tmp_path, made(minhash(sets, 112)), 1)
    near = {
        (a, b)
        for b in range(count)
        for a in range(b)
        if 5 * len(sets[a] & sets[b]) >= 4 * len(sets[a] | sets[b])
    }
    order = sorted(range(count), key=lambda number: ordered[number].id)
    found = set(search(population, HubLimits(documents=8))[0])
    exact, here = kept(order, near), kept(order, near & found)
    missed = [
        one
        for at, one in enumerate(order)
        if one in here
        and any(other in here and (min(one, other), max(one, other)) in near for other in order[:at])
    ]
    assert count - len(exact) > 100
    assert len(missed) <= 0.01 * (count - len(exact)) + 1
    if kind != "tree":
        assert len(found) < 0.65 * count * (count - 1) / 2
