"""Real pages in many versions, with the exact similarity of all pairs, through the whole of near removal."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from shardkit.writers.dedup.compare import PairRule, compare_pairs
from shardkit.writers.dedup.config import NearDedupConfig
from shardkit.writers.dedup.near import find_near_duplicates
from shardkit.writers.dedup.population import DOCUMENTS_FILE
from shardkit.writers.dedup.shingle_store import distinct_sets
from shardkit.writers.kernels.shingles import shingle_batch
from support.documents import write_documents

pytestmark = pytest.mark.data

Pairs = dict[tuple[int, int], float]  # exact Jaccard similarity of word 5-grams, where it is 0.3 or more


@pytest.fixture(scope="module")
def pages() -> tuple[list[str], Pairs]:
    """Texts, and the similarity of pairs of them."""
    if "SHARDKIT_TEST_DATA" not in os.environ:
        pytest.skip("SHARDKIT_TEST_DATA is not set")
    data = Path(os.environ["SHARDKIT_TEST_DATA"])
    rows = [
        json.loads(line)
        for name in ("versioned-00.jsonl.gz", "versioned-01.jsonl.gz")
        for line in gzip.decompress((data / "corpus" / name).read_bytes()).split(b"\n")
        if line
    ]
    places = {row["id"]: place for place, row in enumerate(rows)}
    pairs = {}
    with gzip.open(data / "neardup" / "dev_pairs_w5_jaccard.jsonl.gz") as lines:
        for line in lines:
            pair = json.loads(line)
            if pair["a"] in places and pair["b"] in places:
                a, b = sorted((places[pair["a"]], places[pair["b"]]))
                pairs[a, b] = float(pair["jaccard"])
    return [row["text"] for row in rows], pairs


def test_pairs_have_exactly_the_similarity_that_was_found_elsewhere(pages: tuple[list[str], Pairs]) -> None:
    texts, pairs = pages
    shingles = shingle_batch(pa.array(texts, pa.large_string()), NearDedupConfig().minhash)
    sets = distinct_sets(np.arange(len(texts), dtype=np.uint64), *shingles)
    a, b = np.array(list(pairs), np.int64).T
    exact = np.array(list(pairs.values()))
    any_similarity = NearDedupConfig(similarity=0.01, small_similarity=0.01)
    assert np.abs(compare_pairs(sets, sets, a, b, PairRule.of(any_similarity)).jaccard - exact).max() < 1e-6
    alike = compare_pairs(
        sets, sets, a, b, PairRule.of(NearDedupConfig(small_shingles=0, small_repetition=1e9))
    )
    assert np.array_equal(alike.verified, exact >= 0.8)


def test_what_is_removed_is_like_what_stays_and_what_stays_is_not_alike(
    tmp_path: Path, pages: tuple[list[str], Pairs]
) -> None:
    texts, pairs = pages
    write_documents(tmp_path / "pages.arrow", texts, batch_rows=1000)
    config = NearDedupConfig()
    found = find_near_duplicates([tmp_path / "pages.arrow"], config, folder=tmp_path / "work")
    [part] = (tmp_path / "work" / "signatures").glob("00000.*")
    rows = np.load(part / DOCUMENTS_FILE)["row"]
    booked = {int(loser["row"]): int(rows[loser["kept"]]) for loser in found.losers}

    assert all(pairs[min(pair), max(pair)] >= 0.8 for pair in booked.items())
    assert len(booked) > len(texts) / 10
    for least, most, recall in ((0.8, 0.9, 0.9), (0.9, 1.01, 0.99)):
        alike = [pair for pair, similarity in pairs.items() if least <= similarity < most]
        both_stay = sum(a not in booked and b not in booked for a, b in alike)
        assert both_stay <= (1 - recall) * len(alike), f"{both_stay} of {len(alike)}"
