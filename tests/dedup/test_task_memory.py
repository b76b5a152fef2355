"""Tasks of duplicate removal hold what their memory allows, at one and at sixteen times the documents."""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from shardkit.writers.dedup.bands import BANDS
from shardkit.writers.dedup.config import LinesDedupConfig, MinHashConfig
from shardkit.writers.dedup.exact import KEYS
from shardkit.writers.dedup.hubs import HubLimits, HubSearch
from shardkit.writers.dedup.lines import LINE_KEYS, find_line_losers, write_line_keys
from shardkit.writers.dedup.near import find_equal
from shardkit.writers.dedup.outcomes import Removed, SplitRemovals
from shardkit.writers.dedup.population import (
    BANDS_FILE,
    DOCUMENT,
    DOCUMENTS_FILE,
    PARTS_FILE,
    PRINTS_FILE,
    STARTS_FILE,
    Kind,
    Part,
    Population,
    PopulationFile,
    write_parts,
)
from shardkit.writers.dedup.signatures import LOST, sign_documents, write_bands
from shardkit.writers.dedup.tables import RowsWriter
from shardkit.writers.exchange.exchange import RunWriter, Slice, Table
from shardkit.writers.exchange.exchange import _merge as merge
from shardkit.writers.exchange.sorted_runs import Limits
from shardkit.writers.execution.artifacts import Artifact, Files
from shardkit.writers.stages.exact import find_exact
from support.documents import write_documents

MEMORY = 4 << 20
LIMITS = Limits().divided(16)
LINES, SPANS = LinesDedupConfig(min_characters=20), LinesDedupConfig(unit="span", words=8)
MINHASH = MinHashConfig(permutations=32)
Work = Callable[[Path], object]
KINDS: tuple[Kind, ...] = ("input", "index")


def run_of(path: Path, table: Table, rows: npt.NDArray[np.void]) -> Slice:
    with RunWriter(path, table, memory_bytes=1 << 20, limits=LIMITS) as writer:
        writer.write(rows)
    return Slice.whole(table, [Artifact(path)], LIMITS)


def keys_of(path: Path, documents: int, copies: int) -> Slice:
    """A range of keys in which each occurs so many times, at most."""
    rows = np.zeros(documents, KEYS.dtype)
    rows["key"] = np.arange(documents, dtype=np.uint64) // np.uint64(copies) * np.uint64(0x9E3779B97F4A7C15)
    rows["row"] = rows["id"][:, 0] = np.arange(documents)
    return run_of(path, KEYS, rows)


def bands(folder: Path, documents: int) -> Work:
    with RowsWriter(folder / BANDS_FILE, "<u8", width=8) as keys:
        keys.write(np.random.default_rng(1).integers(0, 1 << 64, (documents, 8), dtype=np.uint64))
    lost = run_of(folder / LOST.file, LOST, np.arange(0, documents, 3, dtype=np.uint64).view(LOST.dtype))
    stored = Artifact(folder / BANDS_FILE)
    return lambda made: write_bands(made, stored, 0, lost.within(0, 1 << 32), MEMORY)


def signatures(folder: Path, documents: int) -> Work:
    texts = [f"word{at} a b c d e" for at in range(documents)]
    path = write_documents(folder / "documents.arrow", texts, batch_rows=256)
    removed = Removed({"exact_duplicate": np.arange(0, documents, 50)})
    source, banding = Artifact(path), (8, 4)
    return lambda made: sign_documents(source, removed, MINHASH, banding, "global", made, memory_bytes=MEMORY)


def equal(folder: Path, documents: int, copies: int) -> Work:
    keys = keys_of(folder / KEYS.file, documents, copies)
    write_parts(folder, [("part", documents)], [])
    return lambda made: find_equal(made, keys, Artifact(folder / STARTS_FILE), MEMORY)


def exact(folder: Path, documents: int, copies: int) -> Work:
    keys = keys_of(folder / KEYS.file, documents, copies)
    return lambda made: find_exact(made, keys, MEMORY)


def line_keys(folder: Path, documents: int, config: LinesDedupConfig) -> Work:
    texts = [f"first line of document {at}\na line that all of them have" for at in range(documents)]
    path = write_documents(folder / "documents.arrow", texts, batch_rows=4096)
    return lambda made: write_line_keys(made, Artifact(path), config, SplitRemovals(), MEMORY)


def lines(folder: Path, documents: int, copies: int) -> Work:
    rows = np.zeros(documents, LINE_KEYS.dtype)
    rows["key"] = np.arange(documents, dtype=np.uint64) // np.uint64(copies) * np.uint64(0x9E3779B97F4A7C15)
    rows["row"] = rows["id"][:, 0] = np.arange(documents)
    keys = run_of(folder / LINE_KEYS.file, LINE_KEYS, rows)
    return lambda made: find_line_losers(made, keys, LinesDedupConfig().keep, MEMORY)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "make",
    [
        bands,
        pytest.param(partial(line_keys, config=LINES), marks=pytest.mark.extended),
        pytest.param(partial(line_keys, config=SPANS), marks=pytest.mark.extended),
        pytest.param(signatures, marks=pytest.mark.extended),
        *(partial(make, copies=copies) for make in (equal, exact, lines) for copies in (2, 1 << 30)),
    ],
)
def test_tasks_hold_no_more_at_sixteen_times_the_documents(
    tmp_path: Path, make: Callable[[Path, int], Work]
) -> None:
    peaks = []
    for documents in (10, 8000, 128_000):  # the first time, kernels are compiled
        (made := tmp_path / str(documents) / "made").mkdir(parents=True)
        work = make(made.parent, documents)
        if documents > 10:
            tracemalloc.start()
        try:
            work(made)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert max(peaks) < MEMORY, peaks  # of 6 to 16 MB


def hub_peak(folder: Path, parts: int, documents: int) -> int:
    """Bytes that the search of a hub holds at most, of so many documents in so many parts."""
    rng, found = np.random.default_rng(1), []
    for number in range(parts):
        part = Artifact(folder / str(number))
        part.path.mkdir(parents=True)
        with (
            RowsWriter(part.path / DOCUMENTS_FILE, DOCUMENT) as table,
            RowsWriter(part.path / PRINTS_FILE, np.uint8, width=32) as prints,
        ):
            rows = np.zeros(documents // parts, DOCUMENT)
            rows["id"] = rng.integers(0, 256, (len(rows), 16))
            table.write(rows)
            prints.write(rng.integers(0, 256, (len(rows), 32), dtype=np.uint8))
        found.append(Part(part, len(rows)))
    population, numbers = Population.of(found), np.arange(documents, dtype=np.uint64)
    tracemalloc.start()
    try:
        hubs = HubSearch(population, 0.8, folder / ".hub", limits=HubLimits(64), memory_bytes=MEMORY)
        assert not sum(len(a) for a, _ in hubs.pairs(numbers))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.extended
def test_a_hub_holds_no_more_if_its_documents_are_in_many_parts(tmp_path: Path) -> None:
    hub_peak(tmp_path / "first", 2, 200)  # kernels are compiled
    few, many = hub_peak(tmp_path / "few", 4, 4000), hub_peak(tmp_path / "many", 800, 4000)
    assert many < few + 500_000, (few, many)  # of files alone 2 MB, if each took what a RowFile does


def test_a_process_holds_a_few_bytes_of_each_part_of_a_population(tmp_path: Path) -> None:
    splits, rng = 20_000, np.random.default_rng(1)
    listed = [(f"part-é-{n:07d}", int(rng.integers(0, 9))) for n in range(splits)]
    write_parts(tmp_path, listed, [5, 7])
    inputs = Artifact(tmp_path / "signatures")
    others = (Part(Artifact(tmp_path / "one"), 5, "index"), Part(Artifact(tmp_path / "two"), 7, "index"))
    names, starts = Artifact(tmp_path / PARTS_FILE), Artifact(tmp_path / STARTS_FILE)
    prints = Files.of([inputs / name / PRINTS_FILE for name, _ in listed], "content")
    file = PopulationFile(names, starts, inputs, others, "content", prints, goes=True)
    assert len([*file.consumed[0].paths]) == splits
    assert len(pickle.dumps(file)) < 2000
    tracemalloc.start()
    try:
        loaded = file.load()
        assert file.load() is loaded
        ends = int(loaded.starts[-1]), loaded.indexed
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held < 50 * splits
    whole = Population.of([*(Part(inputs / name, count) for name, count in listed), *others])
    assert ends == (int(whole.starts[-1]), whole.indexed)
    assert np.array_equal(loaded.starts, whole.starts)
    assert [loaded.count(kind) for kind in KINDS] == [whole.count(kind) for kind in KINDS]
    chosen = [0, 7_777, splits - 1, splits, splits + 1]
    assert [loaded.parts[number] for number in chosen] == [whole.parts[number] for number in chosen]


def test_a_merge_of_files_of_this_machine_holds_no_more_where_the_recipe_allows_more(tmp_path: Path) -> None:
    limits = replace(Limits().within(1 << 40), local_memory_bytes=MEMORY, block_bytes=16 << 10)
    runs, table, random = [], BANDS, np.random.default_rng(1)
    for number in range(8):
        path = tmp_path / f"{number}.run"
        rows = np.zeros(100_000, table.dtype)
        rows["key"] = np.sort(random.integers(0, 1 << 64, len(rows), np.uint64))
        with RunWriter(path, table, memory_bytes=32 << 20, limits=limits) as writer:
            writer.write(rows)
        runs.append(Artifact(path))
    merge(tmp_path, Slice.whole(table, runs[:2], limits))  # kernels are compiled
    tracemalloc.start()
    try:
        merge(tmp_path, Slice.whole(table, runs, limits))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    [merged] = Slice.whole(table, [Artifact(tmp_path / table.file)]).stream(1 << 30)
    assert len(merged[0]) == 800_000
    assert peak < 2 * MEMORY, peak  # of 12.8 MB
