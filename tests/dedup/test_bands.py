from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import BuildError
from shardkit.writers.dedup.bands import (
    BandWriter,
    argsort_keys,
    find_slices,
    key_range,
    partitions_for,
    read_slices,
)
from shardkit.writers.dedup.population import BAND, BAND_RUNS_FILE, BANDS_FILE
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.stages.tokenize import partition_of

Keys = npt.NDArray[np.uint64]


def write(folder: Path, keys: Keys, cuts: list[int], run_documents: int | None = None) -> Path:
    """The keys, handed over in pieces that end at `cuts`."""
    with BandWriter(folder, run_documents=run_documents) as writer:
        for start, stop in pairwise([0, *cuts, len(keys)]):
            writer.write(keys[start:stop], start)
    return folder


def entries(folder: Path, partition: int, partitions: int) -> list[tuple[int, int]]:
    slices = find_slices(Artifact(folder), *key_range(partition, partitions))
    return [entry for rows in read_slices(Artifact(folder), slices) for entry in rows.tolist()]


@st.composite
def key_tables(draw: st.DrawFn) -> Keys:
    """Keys of which many are equal, some lie at the edges of partitions, and others are anywhere."""
    documents, bands = draw(st.integers(0, 40)), draw(st.integers(1, 5))
    edges = st.sampled_from([0, 1, (1 << 32) - 1, 1 << 32, 1 << 63, (1 << 63) - 1, (1 << 64) - 1])
    some = draw(st.lists(st.one_of(edges, st.integers(0, (1 << 64) - 1)), min_size=1, max_size=12))
    picks = draw(st.lists(st.sampled_from(some), min_size=documents * bands, max_size=documents * bands))
    return np.array(picks, np.uint64).reshape(documents, bands)


@settings(max_examples=60, deadline=None)
@given(keys=key_tables(), run=st.integers(1, 50), partitions=st.integers(1, 9), data=st.data())
def test_partitions_hold_every_entry_once_however_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, keys: Keys, run: int, partitions: int, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(keys)), max_size=4)))
    folder = write(tmp_path_factory.mktemp("bands"), keys, cuts, run)
    expected = sorted((key, row) for row, some in enumerate(keys.tolist()) for key in some)
    parts = [entries(folder, partition, partitions) for partition in range(partitions)]
    assert sorted(entry for part in parts for entry in part) == expected
    for partition, part in enumerate(parts):
        mine = np.array([key for key, _ in part], np.uint64)
        assert (partition_of(mine, partitions) == partition).all()


def test_runs_are_sorted_and_cut_by_documents_alone(tmp_path: Path) -> None:
    keys = np.random.default_rng(1).integers(0, 50, (1000, 3), np.uint64)
    folders = [tmp_path / "whole", tmp_path / "pieces"]
    for folder, cuts in zip(folders, ([], [1, 7, 299, 300, 301, 999]), strict=True):
        folder.mkdir()
        write(folder, keys, cuts, 300)
    assert (folders[0] / BANDS_FILE).read_bytes() == (folders[1] / BANDS_FILE).read_bytes()
    edges = np.load(folders[0] / BAND_RUNS_FILE)
    assert edges.tolist() == [0, 900, 1800, 2700, 3000]
    rows = np.fromfile(folders[0] / BANDS_FILE, BAND)
    for start, stop in pairwise(edges.tolist()):
        assert rows[start:stop].tolist() == sorted(rows[start:stop].tolist())


@pytest.mark.parametrize("spread", [1, 300, 1 << 64])
def test_keys_are_sorted_as_numpy_sorts_them(spread: int) -> None:
    keys = np.random.default_rng(2).integers(0, spread, 5000, np.uint64, endpoint=False)
    before = keys.copy()
    found, order = argsort_keys(keys)
    assert np.array_equal(order, np.argsort(keys, kind="stable"))
    assert np.array_equal(found, np.sort(keys))
    assert np.array_equal(keys, before)


def test_partitions_are_few_enough_to_count_and_small_enough_for_the_memory() -> None:
    assert partitions_for(0, 1 << 30) == 1
    assert partitions_for(70_000_000, 256 << 20) == 26
    assert partitions_for(1 << 60, 1) == 1 << 16
    assert key_range(0, 1) == (0, 1 << 64)
    with pytest.raises(ValueError, match="at most"):
        key_range(0, (1 << 16) + 1)


def test_an_unfinished_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path, np.arange(10, dtype=np.uint64).reshape(5, 2), [])
    data = (tmp_path / BANDS_FILE).read_bytes()
    (tmp_path / BANDS_FILE).write_bytes(data[:-1])
    with pytest.raises(BuildError, match="10 entries expected; remove the work folder"):
        find_slices(Artifact(tmp_path), 0, 1 << 64)
