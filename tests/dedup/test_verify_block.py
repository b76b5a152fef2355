from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from reference.near import reference_compare
from shardkit.errors import BuildError
from shardkit.writers.dedup.blocks import PAIRS_OF_BLOCK, put_into_blocks
from shardkit.writers.dedup.compare import PairRule
from shardkit.writers.dedup.config import NearDedupConfig
from shardkit.writers.dedup.shingle_store import TEXTS
from shardkit.writers.dedup.verify import EDGES, VERIFY, WAITING, verify_block
from shardkit.writers.exchange.exchange import Exchanged, exchange
from shardkit.writers.exchange.sorted_runs import DEFAULT_LIMITS
from shardkit.writers.execution.commit import Commit
from support.near_population import (
    Document,
    Pair,
    World,
    allowed,
    make_documents,
    priorities_of,
    write_pairs,
    write_text_runs,
    write_world,
)
from support.task_folders import TaskFolders, read_run

Edge = tuple[bytes, bytes, float]  # winner, loser, similarity  # ids of who wins and who loses


def brute_force(world: World, pairs: set[Pair], config: NearDedupConfig, smallest: int | None) -> set[Edge]:
    def stored(document: Document) -> tuple[list[int], int, int]:
        hashes = sorted(set(document.shingles))
        return hashes[: smallest if document.kind == "index" else None], len(hashes), len(document.shingles)

    edges = set()
    for pair in pairs:
        documents = sorted((world.documents[number] for number in pair), key=lambda d: d.priority)
        found = reference_compare(stored(documents[0]), stored(documents[1]), config)
        if found:
            edges.add((documents[0].id, documents[1].id, float(np.float32(float(found[0])))))
    return edges


def exchanged(
    folder: Path, world: World, candidates: list[Commit], bits: int, memory_bytes: int
) -> tuple[Exchanged, Exchanged]:
    """The pairs and the texts of all blocks."""
    count, readers = len(world.documents), 1 << bits
    limits = replace(DEFAULT_LIMITS, partition_bytes=8000)  # several ranges of documents
    blocks = put_into_blocks(TaskFolders(folder), candidates, count, bits, memory_bytes, limits)
    texts = write_text_runs(folder, world, blocks, memory_bytes=memory_bytes)
    run = TaskFolders(folder)
    pairs = exchange(run, VERIFY, PAIRS_OF_BLOCK, blocks, readers=readers, end=readers)
    return pairs, exchange(run, VERIFY, TEXTS, texts, readers=readers, end=readers)


def verified(
    folder: Path, world: World, candidates: list[Commit], rule: PairRule, memory_bytes: int, bits: int
) -> tuple[set[Edge], int]:
    """(edges by ids, pairs compared): each block's file is checked for its order."""
    pairs, texts = exchanged(folder, world, candidates, bits, memory_bytes)
    found: set[Edge] = set()
    compared = 0
    for block in range(1 << bits):
        out = folder / f"verify{block}"
        out.mkdir(parents=True)
        own, theirs = (table.slice(block, block + 1) for table in (pairs, texts))
        counts = verify_block(out, own, theirs, rule, memory_bytes)
        edges = read_run(out / EDGES.file, EDGES)
        assert set(read_run(out / WAITING.file, WAITING)["key"]) == set(edges["lo"])
        assert counts.verified == len(edges)
        compared += counts.pairs
        assert edges["priority"].tolist() == priorities_of(world, edges["key"]).tolist()
        for edge in edges:
            winner, loser = (world.documents[int(edge[side])].id for side in ("key", "lo"))
            found.add((winner, loser, float(edge["jaccard"])))
    return found, compared


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(2))
def test_edges_are_the_pairs_that_verify_however_tasks_are_cut(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    documents = make_documents(rng, 80, families=3)
    config = NearDedupConfig(containment=rng.choice([None, 0.9]), similarity=rng.choice([0.7, 0.8]))
    smallest = rng.choice([None, 12])
    results = []
    for memory_bytes, splits, tasks, bits in ((1 << 24, 1, 1, 0), (12_000, 3, 4, 3), (100_000, 5, 2, 2)):
        folder = tmp_path / str(memory_bytes)
        world = write_world(folder, documents, rng, splits=splits, smallest=smallest)
        pairs = {pair for pair in combinations(range(len(documents)), 2) if allowed(world, *pair)}
        candidates = write_pairs(folder, pairs, rng, tasks=tasks)
        edges, compared = verified(folder, world, candidates, PairRule.of(config), memory_bytes, bits)
        assert compared == len(pairs)
        assert edges == brute_force(world, pairs, config, smallest)
        assert edges
        results.append(edges)
    assert results[1:] == results[:-1]


def test_blocks_larger_than_memory_are_verified_in_turns(tmp_path: Path) -> None:
    """Also those of one document with more pairs than a turn holds."""
    rng = random.Random(1)
    world = write_world(tmp_path, make_documents(rng, 300, families=1), rng, splits=2)
    pairs = {(a, b) for a in range(40) for b in range(a + 1, 250) if allowed(world, a, b)}
    candidates = write_pairs(tmp_path, pairs, rng, tasks=2)
    config = NearDedupConfig()
    pairs_of, texts = (
        table.slice(0, 1) for table in exchanged(tmp_path, world, candidates, bits=0, memory_bytes=1 << 20)
    )
    found = []
    for memory_bytes in (1 << 24, 16_000):
        out = tmp_path / str(memory_bytes)
        out.mkdir()
        counts = verify_block(out, pairs_of, texts, PairRule.of(config), memory_bytes)
        assert counts.pairs == len(pairs)
        edges = read_run(out / EDGES.file, EDGES)
        found.append(sorted(zip(edges["key"].tolist(), edges["lo"].tolist(), strict=True)))
    assert found[0] == found[1]
    assert len(found[0]) > 100


def test_a_pair_without_a_set_is_an_error(tmp_path: Path) -> None:
    rng = random.Random(1)
    world = write_world(tmp_path, make_documents(rng, 30, families=1), rng, splits=1)
    (pairs, _), (_, texts) = (
        exchanged(folder, world, write_pairs(folder, some, rng, tasks=1), bits=0, memory_bytes=1 << 20)
        for folder, some in ((tmp_path / "0", {(0, 1)}), (tmp_path / "1", {(0, 2)}))
    )
    with pytest.raises(BuildError, match="without a set"):
        verify_block(tmp_path, pairs.slice(0, 1), texts.slice(0, 1), PairRule.of(NearDedupConfig()), 1 << 20)
