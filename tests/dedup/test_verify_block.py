from __future__ import annotations

import random
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from reference.near import reference_compare
from shardkit.errors import BuildError
from shardkit.writers.dedup.candidates import PAIRS_BY_FIRST, PAIRS_BY_SECOND
from shardkit.writers.dedup.compare import PairRule
from shardkit.writers.dedup.config import NearDedupConfig
from shardkit.writers.dedup.shingle_store import GUESTS, OWN, SHINGLES
from shardkit.writers.dedup.verify import EDGES, VERIFY, WAITING, block_bits, verify_block
from shardkit.writers.exchange.exchange import exchange
from shardkit.writers.execution.commit import Commit
from support.near_population import (
    Document,
    Pair,
    World,
    allowed,
    make_documents,
    priorities_of,
    write_pairs,
    write_set_runs,
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


def verified(
    folder: Path, world: World, candidates: list[Commit], config: NearDedupConfig, memory_bytes: int
) -> tuple[set[Edge], int, int]:
    """(edges by ids, pairs compared, blocks): each block's file is checked for its order."""
    run, count = TaskFolders(folder), len(world.documents)
    bits = block_bits(count, count * 240, memory_bytes)
    blocks = range(0, count, 1 << bits)
    firsts, seconds = (
        exchange(run, SHINGLES, table, candidates, readers=99, end=count)
        for table in (PAIRS_BY_FIRST, PAIRS_BY_SECOND)
    )
    sets = write_set_runs(folder / "sets", world, firsts, seconds, block_bits=bits, memory_bytes=memory_bytes)
    own, guests = (
        exchange(run, VERIFY, table, sets, readers=len(blocks), end=count) for table in (OWN, GUESTS)
    )
    found: set[Edge] = set()
    compared = 0
    for start in blocks:
        out = folder / f"verify{start}"
        out.mkdir(parents=True)
        a, b, c = (table.slice(start, start + (1 << bits)) for table in (firsts, own, guests))
        counts = verify_block(out, a, b, c, PairRule.of(config), memory_bytes)
        edges = read_run(out / EDGES.file, EDGES)
        assert set(read_run(out / WAITING.file, WAITING)["key"]) == set(edges["lo"])
        assert counts.verified == len(edges)
        compared += counts.pairs
        assert edges["priority"].tolist() == priorities_of(world, edges["key"]).tolist()
        for edge in edges:
            winner, loser = (world.documents[int(edge[side])].id for side in ("key", "lo"))
            found.add((winner, loser, float(edge["jaccard"])))
    return found, compared, len(blocks)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(2))
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
        candidates = write_pairs(folder, pairs, rng, tasks=tasks)
        edges, compared, blocks = verified(folder, world, candidates, config, memory_bytes)
        assert compared == len(pairs)
        assert edges == brute_force(world, pairs, config, smallest)
        assert edges
        assert blocks > 3 or memory_bytes > 12_000
        results.append(edges)
    assert results[1:] == results[:-1]


def test_blocks_larger_than_memory_are_verified_in_turns(tmp_path: Path) -> None:
    """Also those of one document with more pairs than a turn holds."""
    rng = random.Random(1)
    world = write_world(tmp_path, make_documents(rng, 300, families=1), rng, splits=2)
    pairs = {(a, b) for a in range(40) for b in range(a + 1, 250) if allowed(world, a, b)}
    candidates = write_pairs(tmp_path, pairs, rng, tasks=2)
    config = NearDedupConfig()
    run = TaskFolders(tmp_path)
    firsts, seconds = (
        exchange(run, SHINGLES, table, candidates, readers=1) for table in (PAIRS_BY_FIRST, PAIRS_BY_SECOND)
    )
    sets = write_set_runs(tmp_path / "sets", world, firsts, seconds, block_bits=9, memory_bytes=1 << 20)
    own, guests = (exchange(run, VERIFY, table, sets, readers=1) for table in (OWN, GUESTS))
    found = []
    for memory_bytes in (1 << 24, 16_000):
        out = tmp_path / str(memory_bytes)
        out.mkdir()
        a, b, c = (table.slice(0, 1 << 9) for table in (firsts, own, guests))
        counts = verify_block(out, a, b, c, PairRule.of(config), memory_bytes)
        assert counts.pairs == len(pairs)
        edges = read_run(out / EDGES.file, EDGES)
        found.append(sorted(zip(edges["key"].tolist(), edges["lo"].tolist(), strict=True)))
    assert found[0] == found[1]
    assert len(found[0]) > 100


def test_a_pair_without_a_set_is_an_error(tmp_path: Path) -> None:
    rng = random.Random(1)
    world = write_world(tmp_path, make_documents(rng, 30, families=1), rng, splits=1)
    run = TaskFolders(tmp_path)
    both = [
        write_pairs(tmp_path / str(at), pairs, rng, tasks=1) for at, pairs in enumerate([{(0, 1)}, {(0, 2)}])
    ]
    (firsts, seconds), (others, _) = (
        [exchange(run, SHINGLES, table, some, readers=1) for table in (PAIRS_BY_FIRST, PAIRS_BY_SECOND)]
        for some in both
    )
    sets = write_set_runs(tmp_path / "sets", world, firsts, seconds, block_bits=5, memory_bytes=1 << 20)
    own, guests = (exchange(run, VERIFY, table, sets, readers=1).slice(0, 32) for table in (OWN, GUESTS))
    with pytest.raises(BuildError, match="without a set"):
        verify_block(tmp_path, others.slice(0, 32), own, guests, PairRule.of(NearDedupConfig()), 1 << 20)
