"""The default settings find copies of known similarity as often as the S-curve says, and no others."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from shardkit.writers.dedup.bands import probability
from shardkit.writers.dedup.config import NearDedupConfig
from shardkit.writers.dedup.near import find_near_duplicates
from texts import synthetic_sources, write_documents


@pytest.mark.extended
def test_copies_are_found_as_often_as_the_s_curve_says(tmp_path: Path) -> None:
    file = tmp_path / "documents.arrow"
    sources = synthetic_sources(np.random.default_rng(0))
    pairs = write_documents(file, 2400, seed=1, sources=sources, mean_words=200, copies=0.4)
    found = find_near_duplicates([file], NearDedupConfig(), folder=tmp_path / "work")
    gone = np.zeros(2400, np.bool_)
    gone[found.losers["row"]] = True
    removed = gone[pairs["original"]] | gone[pairs["copy"]]
    close = pairs["similarity"] >= 0.8
    expected = np.array([probability(float(one), 14, 8) for one in pairs["similarity"][close]])
    assert close.sum() > 300
    deviation = float(np.sqrt((expected * (1 - expected)).sum()))
    assert removed[close].sum() >= expected.sum() - 4 * deviation - 1
    needed = np.zeros(2400, np.bool_)
    for name in ("original", "copy"):
        needed[pairs[name][close]] = True
    assert (gone & ~needed).sum() <= 5, "cuts of repetitive texts may be alike by nature"
