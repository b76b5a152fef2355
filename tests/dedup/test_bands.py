from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from shardkit.errors import RecipeError
from shardkit.writers.dedup.bands import BANDS, partitions_for
from shardkit.writers.dedup.config import MinHashConfig, Scope
from shardkit.writers.dedup.outcomes import Removed
from shardkit.writers.dedup.population import BANDS_FILE
from shardkit.writers.dedup.signatures import LOST, band_keys, sign_batch, sign_documents, write_bands
from shardkit.writers.exchange.exchange import Exchanged, RunWriter
from shardkit.writers.exchange.sorted_runs import DEFAULT_LIMITS
from shardkit.writers.execution.artifacts import Artifact
from support.documents import write_documents
from support.task_folders import read_run, slice_of

MINHASH = MinHashConfig(permutations=12)


@pytest.mark.parametrize("scope", ["global", "source"])
def test_a_part_has_the_keys_of_its_documents_groups(tmp_path: Path, scope: Scope) -> None:
    texts, sources = [f"w{n} a b c d e f" for n in range(20)] * 2, [0] * 20 + [1] * 20
    documents = Artifact(write_documents(tmp_path / "texts.arrow", texts, source=sources))
    sign_documents(documents, Removed(), MINHASH, (3, 4), scope, tmp_path)
    signed = sign_batch(pa.array(texts, pa.large_string()), MINHASH).values
    groups = np.array(sources) if scope == "source" else None
    keys = np.load(tmp_path / BANDS_FILE)
    assert keys.tolist() == band_keys(signed, 3, 4, groups).tolist()
    assert (keys[:20] == keys[20:]).all() == (scope == "global")


def make_part(folder: Path, count: int) -> tuple[Artifact, npt.NDArray[np.uint64]]:
    rng = np.random.default_rng(count)
    keys = band_keys(rng.integers(0, 3, (count, 12)).astype(np.uint32), 3, 4)
    np.save(folder / BANDS_FILE, keys)
    return Artifact(folder / BANDS_FILE), keys


@pytest.mark.parametrize("memory_bytes", [3000, 1 << 20])
def test_entries_are_those_of_documents_that_did_not_lose_to_equal_words(
    tmp_path: Path, memory_bytes: int
) -> None:
    part, keys = make_part(tmp_path, 500)
    gone, other = {0, 7, 250, 499}, {3, 8}
    with RunWriter(tmp_path / LOST.file, LOST, memory_bytes=1 << 20) as run:
        lost = [4 << 32 | row for row in gone] + [5 << 32 | row for row in other]
        run.write(np.array([(key,) for key in lost], LOST.dtype))
    [exchanged] = [Exchanged(LOST, slice_of(tmp_path / LOST.file, LOST).runs, DEFAULT_LIMITS)]
    first = 1 << 33
    lost_of_part = exchanged.slice(4 << 32, 5 << 32)
    write_bands(tmp_path, part, first, lost_of_part, memory_bytes)
    expected = sorted((key, first + row) for row in set(range(500)) - gone for key in keys[row].tolist())
    assert read_run(tmp_path / BANDS.file, BANDS).tolist() == expected
    assert len(expected) == 3 * 496


def test_partitions_are_few_enough_to_count_and_small_enough_for_the_memory() -> None:
    assert partitions_for(0, 1 << 30) == 1
    assert partitions_for(70_000_000, 256 << 20) == 26
    with pytest.raises(RecipeError, match=r"at most 1,048,576 are possible: set `memory` to 4\.6 GB or more"):
        partitions_for(10**13, 256 << 20)
    assert partitions_for(10**13, 4_600_000_000 // 5) == 1_043_479
