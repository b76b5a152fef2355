from __future__ import annotations

import random
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from reference.near import reference_compare
from shardkit.writers.dedup.config import NearDedupConfig
from shardkit.writers.dedup.verify import (
    EDGE,
    EDGES_FILE,
    BlockBudget,
    plan_blocks,
    priorities_of,
    read_documents,
    verify_block,
)
from shardkit.writers.execution.artifacts import Artifact
from support.near_population import Document, Pair, World, allowed, make_documents, write_pairs, write_world

Edge = tuple[bytes, bytes, float, float]  # ids of who wins and who loses, similarity, containment


def brute_force(world: World, pairs: set[Pair], config: NearDedupConfig, smallest: int | None) -> set[Edge]:
    def stored(document: Document) -> tuple[list[int], int, int]:
        hashes = sorted(set(document.shingles))
        return hashes[: smallest if document.kind == "index" else None], len(hashes), len(document.shingles)

    edges = set()
    for pair in pairs:
        documents = sorted((world.documents[number] for number in pair), key=lambda d: d.priority)
        found = reference_compare(stored(documents[0]), stored(documents[1]), config)
        if found:
            edges.add((documents[0].id, documents[1].id, single(found[0]), single(found[1])))
    return edges


def single(value: Fraction) -> float:
    return float(np.float32(float(value)))


def verified(
    folder: Path, world: World, pair_folders: list[Path], config: NearDedupConfig, memory_bytes: int
) -> tuple[set[Edge], int, int]:
    """(edges by ids, pairs compared, blocks): each block's file is checked for its order."""
    found: set[Edge] = set()
    sets, pairs = ([Artifact(path) for path in paths] for paths in (world.shingle_folders, pair_folders))
    blocks = plan_blocks(sets, pairs, memory_bytes)
    compared = 0
    for number, block in enumerate(blocks):
        out = folder / f"verify{number}"
        out.mkdir(parents=True)
        counts = verify_block(out, world.population, block, pairs, sets, config, memory_bytes)
        edges = np.load(out / EDGES_FILE)
        assert edges.dtype == EDGE
        assert counts.verified == len(edges) == sum(counts.by_similarity)
        compared += counts.pairs
        keys = [(*edge["hi_priority"].tolist(), int(edge["lo"])) for edge in edges]
        assert keys == sorted(keys)
        for edge in edges:
            hi, lo = world.documents[int(edge["hi"])], world.documents[int(edge["lo"])]
            found.add((hi.id, lo.id, float(edge["jaccard"]), float(edge["containment"])))
    return found, compared, len(blocks)


@pytest.mark.parametrize("seed", range(3))
def test_edges_are_the_pairs_that_verify_however_tasks_are_cut(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    documents = make_documents(rng, 80, families=3)
    config = NearDedupConfig(containment=rng.choice([None, 0.9]), similarity=rng.choice([0.7, 0.8]))
    smallest = rng.choice([None, 12])
    results = []
    for memory_bytes, splits, tasks in ((1 << 24, 1, 1), (12_000, 3, 4), (100_000, 5, 2)):
        folder = tmp_path / str(memory_bytes)
        world = write_world(folder, documents, rng, splits=splits, smallest=smallest)
        pairs = {pair for pair in combinations(range(len(documents)), 2) if allowed(world, *pair)}
        pair_folders = write_pairs(folder, pairs, rng, tasks=tasks, run_pairs=rng.choice([100, 5000]))
        edges, compared, blocks = verified(folder, world, pair_folders, config, memory_bytes)
        assert compared == len(pairs)
        assert edges == brute_force(world, pairs, config, smallest)
        assert edges
        assert blocks > 5 or memory_bytes > 12_000
        results.append(edges)
    assert results[1:] == results[:-1]


def test_one_document_with_more_pairs_than_memory_holds_is_verified_all_the_same(tmp_path: Path) -> None:
    rng = random.Random(1)
    documents = make_documents(rng, 300, families=1)
    world = write_world(tmp_path, documents, rng, splits=2)
    pairs = {(0, b) for b in range(1, 250) if allowed(world, 0, b)} | {(3, 5)}
    folders = write_pairs(tmp_path, pairs, rng, tasks=2, run_pairs=60)
    memory_bytes = 8000
    assert BlockBudget.of(memory_bytes).pairs < len(pairs) / 4
    edges, compared, _ = verified(tmp_path, world, folders, NearDedupConfig(), memory_bytes)
    assert compared == len(pairs)
    assert edges == brute_force(world, pairs, NearDedupConfig(), None)


def test_documents_are_read_wherever_they_are(tmp_path: Path) -> None:
    rng = random.Random(2)
    world = write_world(tmp_path, make_documents(rng, 9000, families=3, size=1), rng, splits=2)
    numbers = np.array(sorted(rng.sample(range(9000), 3000)), np.uint64)
    ids: list[bytes] = []
    for _, begin, rows in read_documents(world.population, numbers):
        assert begin == len(ids)
        ids += [bytes(row["id"]) for row in rows]
    assert ids == [world.documents[int(number)].id for number in numbers]
    keys = priorities_of(world.population, numbers)
    order = np.lexsort(keys.T[::-1])
    wanted = sorted(range(len(numbers)), key=lambda at: world.documents[int(numbers[at])].priority)
    assert order.tolist() == wanted
