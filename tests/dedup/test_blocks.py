from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.writers.dedup.shingle_store import SET
from shardkit.writers.dedup.verify import (
    MAX_BLOCK_DOCUMENTS,
    BlockBudget,
    PairRuns,
    pair_cuts,
    plan_blocks,
    set_cuts,
)
from shardkit.writers.execution.artifacts import Artifact
from support.near_population import allowed, make_documents, write_pairs, write_world

_DOCUMENT_BYTES = 128


def inside(cuts: Sequence[int], numbers: list[int]) -> list[list[int]]:
    """The positions of ascending `numbers` that each block between cuts holds."""
    assert list(cuts) == sorted(set(cuts))
    edges = np.searchsorted(numbers, list(cuts)).tolist()
    return [list(range(begin, end)) for begin, end in pairwise([0, *edges, len(numbers)])]


@given(st.lists(st.integers(0, 60), max_size=60), st.integers(1, 20), st.integers(0, 3000))
def test_sets_of_a_block_fit_or_are_one_documents(sizes: list[int], at_once: int, limit: int) -> None:
    rows = np.zeros(len(sizes), SET)
    rows["number"], rows["stored"] = np.arange(len(sizes)) * 3, sizes
    tables = [rows[at : at + at_once] for at in range(0, len(sizes), at_once)]
    cuts = set_cuts(tables, limit)
    blocks = inside(cuts, rows["number"].tolist())
    used = [sum(8 * sizes[at] + _DOCUMENT_BYTES for at in block) for block in blocks]
    assert all(bytes_ <= limit or len(block) == 1 for bytes_, block in zip(used, blocks, strict=True))
    # Greedy: the next document would not have fitted.
    for (own, block), after in zip(pairwise(used), blocks[1:], strict=True) if cuts else ():
        assert own + 8 * sizes[after[0]] + _DOCUMENT_BYTES > limit, block


@given(st.lists(st.integers(0, 25), max_size=80), st.integers(1, 3), st.integers(0, 30))
def test_pairs_of_a_block_fit_or_are_one_documents(numbers: list[int], step: int, limit: int) -> None:
    samples = np.sort(np.array(numbers, np.uint64))
    blocks = inside(pair_cuts(samples, step, limit), samples.tolist())
    for block in blocks:
        own = {int(samples[at]) for at in block}
        assert len(block) * step <= max(limit, step) or len(own) == 1, own


@pytest.mark.parametrize("memory_bytes", [10_000, 100_000, 1 << 30])
def test_blocks_hold_every_pair_once_and_within_the_budget(tmp_path: Path, memory_bytes: int) -> None:
    rng = random.Random(memory_bytes)
    world = write_world(tmp_path, make_documents(rng, 100, families=5), rng, splits=3)
    pairs = [pair for pair in combinations(range(100), 2) if allowed(world, *pair)]
    folders = write_pairs(tmp_path, pairs, rng, tasks=2, run_pairs=900)
    blocks = plan_blocks(
        [Artifact(path) for path in world.shingle_folders], [Artifact(path) for path in folders], memory_bytes
    )
    assert blocks[0][0] == 0
    assert all(before[1] == after[0] for before, after in pairwise(blocks))
    assert all(0 < upper - lower <= MAX_BLOCK_DOCUMENTS for lower, upper in blocks)
    assert blocks[-1][1] == max(a for a, _ in pairs) + 1
    budget = BlockBudget.of(memory_bytes)
    tasks = [PairRuns(Artifact(folder)) for folder in folders]
    for lower, upper in blocks:
        gathered = sum(
            task.first_from(run, upper) - task.first_from(run, lower) for task in tasks for run in task.runs
        )
        assert gathered <= budget.pairs or upper - lower == 1
        used = sum(len(world.documents[number].shingles) * 8 + 128 for number in range(lower, upper))
        assert used <= budget.sets_bytes or upper - lower == 1
    assert len(blocks) == 1 if memory_bytes == 1 << 30 else len(blocks) > 3


def test_without_pairs_there_is_nothing_to_do(tmp_path: Path) -> None:
    rng = random.Random(0)
    world = write_world(tmp_path, [], rng, splits=1)
    assert (
        plan_blocks(
            [Artifact(path) for path in world.shingle_folders],
            [Artifact(path) for path in write_pairs(tmp_path, [], rng, tasks=2, run_pairs=5)],
            1000,
        )
        == []
    )
    assert plan_blocks([Artifact(path) for path in world.shingle_folders], [], 1000) == []
