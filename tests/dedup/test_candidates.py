from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.near import reference_candidates
from shardkit.writers.dedup import pairs as pairs_module
from shardkit.writers.dedup.bands import BANDS
from shardkit.writers.dedup.candidates import (
    CANDIDATES,
    find_candidates,
)
from shardkit.writers.dedup.exact import partition_bounds
from shardkit.writers.dedup.hubs import HubLimits
from shardkit.writers.dedup.pairs import PAIRS, PairWriter, Partners
from shardkit.writers.dedup.population import Part, Population
from shardkit.writers.exchange.exchange import Exchanged, RunWriter, exchange
from shardkit.writers.execution.artifacts import Artifact
from support.near_parts import Made, clusters, write_parts
from support.task_folders import TaskFolders, commit_folder, slice_of

Pair = frozenset[bytes]  # two document ids


def read_pairs(folder: Path) -> list[tuple[int, int]]:
    """The pairs of a folder, whose files are held to what they promise."""
    rows, payload = slice_of(folder / PAIRS.file, PAIRS).read()
    decoded = Partners.decoded(np.ascontiguousarray(rows["key"]), np.ascontiguousarray(rows["size"]), payload)
    assert (decoded.numbers[1:] >= decoded.numbers[:-1]).all()
    assert (decoded.firsts < decoded.seconds).all()
    return list(zip(decoded.firsts.tolist(), decoded.seconds.tolist(), strict=True))


def exchanged(folder: Path, parts: Sequence[Part]) -> Exchanged:
    """The band keys of all parts."""
    commits = [commit_folder(part.folder.path, "bands", str(number)) for number, part in enumerate(parts)]
    return exchange(TaskFolders(folder), CANDIDATES, BANDS, commits, readers=1)


def find(
    folder: Path,
    population: Population,
    documents: Sequence[Made],
    partitions: int,
    limits: HubLimits,
    *,
    memory_bytes: int = 1 << 20,
) -> tuple[set[Pair], int]:
    """(the pairs of all partitions, bounded)."""
    pairs: set[Pair] = set()
    bounded = 0
    entries = exchanged(folder, population.parts)
    for partition in range(partitions):
        place = folder / f"{partition}-{partitions}-{memory_bytes}"
        place.mkdir(parents=True)
        counts = find_candidates(
            entries.slice(*partition_bounds(partition, partitions)),
            population,
            place,
            similarity=0.8,
            limits=limits,
            memory_bytes=memory_bytes,
        )
        found = read_pairs(place)
        assert counts.pairs == len(found)
        bounded += counts.bounded
        pairs |= {frozenset((documents[a].id, documents[b].id)) for a, b in found}
    return pairs, bounded


def expected(documents: Sequence[Made], limits: HubLimits) -> tuple[set[Pair], int]:
    pairs, bounded = reference_candidates([one.reference() for one in documents], 0.8, limits)
    return {frozenset((documents[a].id, documents[b].id)) for a, b in pairs}, bounded


@pytest.mark.extended
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    similarity=st.sampled_from([0.6, 0.8, 0.95, 1.0]),
    kinds=st.sampled_from([("input",), ("input", "input", "index"), ("input", "index"), ("index",)]),
    limits=st.sampled_from(
        [HubLimits(), HubLimits(5), HubLimits(3, leaders=6), HubLimits(4, leaders=9, pairs=3)]
    ),
    partitions=st.integers(1, 4),
    cuts=st.integers(1, 3),
    memory_bytes=st.sampled_from([1000, 10_000, 1 << 24]),
)
def test_pairs_are_the_reference_s_for_any_partitions_parts_and_memory(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    sizes: list[int],
    similarity: float,
    kinds: tuple[str, ...],
    limits: HubLimits,
    partitions: int,
    cuts: int,
    memory_bytes: int,
) -> None:
    folder = tmp_path_factory.mktemp("pairs")
    made = clusters(seed, sizes, similarity, permutations=20, kinds=kinds)  # type: ignore[arg-type]
    population, ordered = write_parts(folder / "parts", made, cuts)
    found = find(folder, population, ordered, partitions, limits, memory_bytes=memory_bytes)
    assert found == expected(made, limits)


def test_a_document_with_one_key_in_two_bands_is_no_pair_of_itself(tmp_path: Path) -> None:
    entries = [(5, 0), (5, 0), (7, 1), (5, 1), (9, 2), (9, 2)]
    with RunWriter(tmp_path / BANDS.file, BANDS, memory_bytes=1 << 20) as run:
        run.write(np.array(entries, BANDS.dtype))
    (tmp_path / "pairs").mkdir()
    population = Population.of([Part(Artifact(tmp_path), 3)])
    every = slice_of(tmp_path / BANDS.file, BANDS)
    find_candidates(every, population, tmp_path / "pairs", similarity=0.8)
    assert read_pairs(tmp_path / "pairs") == [(0, 1)]


def test_counts_say_what_was_read_and_made(tmp_path: Path) -> None:
    same = clusters(5, [1], 1.0, permutations=20)[0]
    made = [Made(bytes([row]) * 16, same.signature) for row in range(6)]
    population, _ = write_parts(tmp_path / "parts", made, 1)
    counts = {}
    every = exchanged(tmp_path, population.parts).slice(0, 1 << 64)
    for limit in (6, 5):
        (tmp_path / str(limit)).mkdir()
        found = find_candidates(
            every, population, tmp_path / str(limit), similarity=0.8, limits=HubLimits(limit)
        )
        counts[limit] = asdict(found)
    assert counts[6] == {
        "entries": 24, "buckets": 4, "hubs": 0, "largest_bucket": 6, "bounded": 0, "pairs": 15,
    }  # fmt: skip
    # A hub of equal signatures: each document is paired with the first alone.
    assert counts[5] == counts[6] | {"hubs": 4, "pairs": 5}


@pytest.mark.parametrize("word_documents", [1 << 32, 1])
def test_full_buffers_are_written_and_keep_every_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word_documents: int
) -> None:
    monkeypatch.setattr(pairs_module, "WORD_DOCUMENTS", word_documents)
    rng = np.random.default_rng(6)
    a = rng.integers(0, 40, 5000, np.uint64)
    b = rng.integers(40, 64, 5000, np.uint64)
    with PairWriter(tmp_path, 64, run_pairs=300) as writer:
        for start in range(0, 5000, 777):
            writer.add(a[start : start + 777], b[start : start + 777])
    assert writer.pairs <= 5000
    assert set(read_pairs(tmp_path)) == set(zip(a.tolist(), b.tolist(), strict=True))
