"""Pairs of documents that are alike meet in one block, whatever their numbers; texts travel about once."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.writers.dedup.blocks import PAIRS_OF_BLOCK, PLACES, block_bits, put_into_blocks
from shardkit.writers.dedup.config import MinHashConfig, NearDedupConfig
from shardkit.writers.dedup.near import find_near_duplicates
from shardkit.writers.dedup.pairs import PairWriter, Partners
from shardkit.writers.dedup.shingle_store import SHINGLES
from shardkit.writers.exchange.sorted_runs import DEFAULT_LIMITS, Limits
from shardkit.writers.execution.work import Work
from support.documents import write_documents
from support.near_population import Pair, write_pairs
from support.task_folders import TaskFolders, commit_folder, slice_of

BLOCK_BITS = 6


def shape(kind: str, members: Sequence[int]) -> set[Pair]:
    """The pairs of a family; members are in random order, so a star's center may have any number."""
    if kind == "star":
        found = [(members[0], other) for other in members[1:]]
    elif kind == "chain":
        found = list(pairwise(members))
    else:
        found = list(combinations(members, 2))
    return {(min(pair), max(pair)) for pair in found}


def in_blocks(
    folder: Path, pairs: set[Pair], documents: int, rng: random.Random, memory_bytes: int, limits: Limits
) -> dict[int, list[Pair]]:
    """The pairs of each block; the places are held to be those of their documents."""
    candidates = write_pairs(folder, pairs, rng, tasks=3)
    commits = put_into_blocks(TaskFolders(folder), candidates, documents, BLOCK_BITS, memory_bytes, limits)
    blocks, places = defaultdict[int, list[Pair]](list), set[Pair]()
    for commit in commits:
        rows, payload = slice_of(commit.folder / PAIRS_OF_BLOCK.file, PAIRS_OF_BLOCK).read()
        numbers, sizes = (np.ascontiguousarray(rows[name]) for name in ("number", "size"))
        found = Partners.decoded(numbers, sizes, payload)
        columns = np.repeat(rows["key"], np.diff(found.edges)), found.firsts, found.seconds
        for block, first, second in zip(*(column.tolist() for column in columns), strict=True):
            blocks[block].append((first, second))
        places |= set(slice_of(commit.folder / PLACES.file, PLACES).read()[0].tolist())
    assert places == {(number, block) for block, some in blocks.items() for pair in some for number in pair}
    return blocks


@settings(max_examples=40, deadline=None)  # kernels may be compiled first
@given(
    families=st.lists(
        st.tuples(st.sampled_from(["star", "chain", "clique"]), st.integers(2, 30)), min_size=1, max_size=12
    ),
    giant=st.integers(0, 400),
    seed=st.integers(0, 1 << 30),
    memory_bytes=st.sampled_from([4000, 1 << 22]),
    partition_bytes=st.sampled_from([200, 5000, 1 << 20]),
)
def test_each_pair_is_in_one_block_and_each_text_in_few(
    tmp_path_factory: pytest.TempPathFactory,
    families: list[tuple[str, int]],
    giant: int,
    seed: int,
    memory_bytes: int,
    partition_bytes: int,
) -> None:
    rng, folder = random.Random(seed), tmp_path_factory.mktemp("blocks")
    sizes = [*families, ("star", giant)] if giant > 1 else families
    documents = sum(size for _, size in sizes) + 10
    numbers = rng.sample(range(documents), documents)
    pairs, most = set[Pair](), 0
    for kind, size in sizes:
        members = [numbers.pop() for _ in range(size)]
        pairs |= shape(kind, members)
        most += size if kind != "chain" else 2 * size
    limits = replace(DEFAULT_LIMITS, partition_bytes=partition_bytes)
    blocks = in_blocks(folder, pairs, documents, rng, memory_bytes, limits)
    assert sorted(pair for some in blocks.values() for pair in some) == sorted(pairs)
    texts = sum(len({number for pair in some for number in pair}) for some in blocks.values())
    assert texts <= most  # stars and cliques are in one block


def test_a_document_with_very_many_partners_is_cut_and_its_pairs_stay(tmp_path: Path) -> None:
    count = 50_000  # more than a row holds
    firsts = np.arange(0, 3 * count, 3, dtype=np.uint64)
    (tmp_path / "candidates").mkdir()
    with PairWriter(tmp_path / "candidates", 1 << 20) as writer:
        writer.add(firsts, np.full(count, 3 * count, np.uint64))
    candidates = [commit_folder(tmp_path / "candidates", "candidates", "0")]
    run = TaskFolders(tmp_path)
    [commit] = put_into_blocks(run, candidates, 1 << 20, 2, 1 << 20, DEFAULT_LIMITS)
    rows, payload = slice_of(commit.folder / PAIRS_OF_BLOCK.file, PAIRS_OF_BLOCK).read()
    assert len(rows) == 4
    assert len(set(rows["key"].tolist())) == 1
    found = Partners.decoded(rows["number"].copy(), rows["size"].copy(), payload)
    assert found.firsts.tolist() == firsts.tolist()


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.integers(1, (1 << 64) - 1), st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=40)
    )
)
def test_coded_partners_come_back(numbers: dict[int, list[int]]) -> None:
    pairs = sorted({(b, a % b) for b, some in numbers.items() for a in some})
    columns = [np.array([pair[side] for pair in pairs], np.uint64) for side in (0, 1)]
    coded = list(Partners.of(*columns).encoded())
    found = [Partners.decoded(some, sizes, payload.copy()) for some, sizes, payload in coded]
    again = [list(zip(one.seconds.tolist(), one.firsts.tolist(), strict=True)) for one in found]
    assert [pair for some in again for pair in some] == pairs


def growing(rng: random.Random, documents: int) -> list[str]:
    """Texts of 80 words: a tenth are copies of one page, a tenth of many, all with one word replaced."""

    def words(count: int) -> list[str]:
        return [f"w{rng.getrandbits(20):x}" for _ in range(count)]

    bases = [words(80) for _ in range(1 + documents // 40)]
    texts = []
    for _ in range(documents):
        drawn = rng.random()
        text = list(bases[0] if drawn < 0.1 else rng.choice(bases)) if drawn < 0.2 else words(80)
        text[rng.randrange(80)] = words(1)[0]
        texts.append(" ".join(text))
    return texts


def sent(folder: Path, documents: int, memory_bytes: int) -> tuple[int, float, int]:
    """(bytes of texts sent to blocks, mean number of blocks of a text in pairs, number of blocks)."""
    folder.mkdir()
    texts = growing(random.Random(1), documents)
    files = [
        write_documents(folder / f"{at}.arrow", texts[at::4], batch_rows=500, file=f"{at}.jsonl")
        for at in range(4)
    ]
    config = NearDedupConfig(minhash=MinHashConfig(ngram=3))
    find_near_duplicates(files, config, folder=folder / "work", memory_bytes=memory_bytes)
    commits = [commit for _, commit in Work.at(folder / "work").commits() if commit.stage == SHINGLES.name]
    found = [SHINGLES.result(commit) for commit in commits]
    mean = sum(one.texts for one in found) / sum(one.documents for one in found)
    blocks = 1 << block_bits(sum(path.stat().st_size for path in files), memory_bytes)
    return sum(commit.bytes for commit in commits), mean, blocks


@pytest.mark.extended
def test_texts_travel_about_once_although_families_grow_with_the_corpus(tmp_path: Path) -> None:
    (small, _, few), (large, mean, many) = (
        sent(tmp_path / str(documents), documents, 600_000) for documents in (1500, 6000)
    )
    assert many >= 4 * few > 4
    assert math.log(large / small) / math.log(4) <= 1.05
    assert mean <= 1.05
