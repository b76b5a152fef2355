from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import BuildError
from shardkit.writers.dedup.config import MinHashConfig
from shardkit.writers.dedup.population import DOCUMENTS_FILE, INDEXED
from shardkit.writers.dedup.shingle_store import (
    SET,
    distinct_sets,
    read_sets,
    set_rows,
    text_rows,
)
from shardkit.writers.dedup.shingle_store import TEXTS as TEXTS_RUN
from shardkit.writers.dedup.sketches import SketchWriter, read_sketches
from shardkit.writers.dedup.tables import Rows, RowsWriter
from shardkit.writers.exchange.exchange import RunWriter
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.kernels.shingles import shingle_batch
from support.task_folders import slice_of

hashes = st.one_of(st.integers(0, 20), st.integers(0, (1 << 64) - 1))


def contents(sets: Any) -> list[tuple[int, list[int], int, int]]:
    """[(number, hashes, distinct, total)]."""
    return [
        (int(row["number"]), sets.hashes[begin:end].tolist(), int(row["distinct"]), int(row["total"]))
        for row, begin, end in zip(sets.rows, sets.offsets[:-1], sets.offsets[1:], strict=True)
    ]


def write_sketches(folder: Path, documents: list[list[int]], smallest: int | None) -> npt.NDArray[np.void]:
    """Write a part of an index with the n-grams of some documents; return its rows."""
    offsets = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    flat = np.array([value for document in documents for value in document], np.uint64)
    sets = distinct_sets(np.arange(len(documents), dtype=np.uint64), flat, offsets, smallest)
    rows = np.zeros(len(documents), INDEXED)
    rows["distinct"], rows["total"] = sets.rows["distinct"], sets.rows["total"]
    rows["stored"] = np.diff(sets.offsets)
    with SketchWriter(folder) as writer:
        for at in range(len(rows)):  # one by one: places go on from the former call
            own = sets.hashes[sets.offsets[at] : sets.offsets[at + 1]]
            edges = np.array([0, len(own)])
            [start], [size] = writer.write(own, edges, rows["distinct"][[at]].astype(np.int64))
            rows["start"][at], rows["size"][at] = start, size
    with RowsWriter(folder / DOCUMENTS_FILE, INDEXED) as table:
        table.write(rows)
    return rows


def upper(value: int, stored: int, distinct: int) -> int:
    """The bits of a hash that an index keeps, said here again."""
    extra = min(16, max(8, 5120 // stored - 2))
    bits = (distinct - 1).bit_length() + extra
    return value >> 64 - bits << 64 - bits


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(hashes, min_size=1, max_size=30) | st.integers(300, 900), min_size=1, max_size=12),
    st.sampled_from([None, 2, 5, 600]),
    st.data(),
)
def test_sketches_are_the_upper_bits_of_the_smallest_n_grams(
    tmp_path_factory: pytest.TempPathFactory,
    given_documents: list[list[int] | int],
    smallest: int | None,
    data: st.DataObject,
) -> None:
    folder, rng = tmp_path_factory.mktemp("sketches"), random.Random(4)
    documents = [
        [rng.getrandbits(64) for _ in range(one)] if isinstance(one, int) else one for one in given_documents
    ]
    write_sketches(folder, documents, smallest)
    wanted = sorted(data.draw(st.sets(st.sampled_from(range(len(documents))))))
    found: list[list[int]] = []
    for rows, hashes in read_sketches(Artifact(folder), np.array(wanted, np.int64)):
        edges = np.cumsum([0, *rows["stored"]])
        found += [hashes[begin:end].tolist() for begin, end in pairwise(edges)]
    sets = {number: sorted(set(documents[number])) for number in wanted}
    stored = {number: own[:smallest] for number, own in sets.items()}
    assert found == [
        [upper(value, len(stored[number]), len(sets[number])) for value in stored[number]]
        for number in wanted
    ]


def test_random_n_grams_take_the_stated_bits(tmp_path: Path) -> None:
    rng = random.Random(1)
    documents = [[rng.getrandbits(64) for _ in range(size)] for size in [50] * 40 + [400] * 10 + [5000] * 4]
    rows = write_sketches(tmp_path, documents, 1024)
    for size, stored, bits in ((50, 50, 18.5), (400, 400, 12.5), (5000, 1024, 9.5)):
        own = rows[rows["distinct"] == size]
        assert (own["stored"] == stored).all()
        assert abs(8 * own["size"].mean() / stored - bits) < 1


def test_rows_and_codes_that_are_not_ours_are_refused(tmp_path: Path) -> None:
    rng = random.Random(2)
    documents = [[rng.getrandbits(64) for _ in range(40)] for _ in range(5)]
    rows = write_sketches(tmp_path, documents, None)

    def read() -> None:
        for _ in read_sketches(Artifact(tmp_path), np.arange(5)):
            pass

    for name, value in (("start", -1), ("start", 1 << 40), ("size", 1 << 30), ("stored", 41), ("stored", 0)):
        changed = rows.copy()
        changed[name][3] = value
        with RowsWriter(tmp_path / DOCUMENTS_FILE, INDEXED) as table:
            table.write(changed)
        with pytest.raises(BuildError, match=r"are outside sketches\.bin; make the index again"):
            read()
    for name, value in (("distinct", 1 << 30), ("size", int(rows["size"][4]) - 1)):
        changed = rows.copy()
        changed[name][4] = changed["total"][4] = value
        changed["total"] = np.maximum(changed["total"], changed["distinct"])
        with RowsWriter(tmp_path / DOCUMENTS_FILE, INDEXED) as table:
            table.write(changed)
        if name == "size":
            with pytest.raises(BuildError, match=r"sketches\.bin: is not coded as its sizes say"):
                read()
    with RowsWriter(tmp_path / DOCUMENTS_FILE, INDEXED) as table:
        table.write(rows)
    codes = (tmp_path / "sketches.bin").read_bytes()
    (tmp_path / "sketches.bin").write_bytes(bytes(len(codes)))
    with pytest.raises(BuildError, match="is not coded as its sizes say"):
        read()


def test_rows_are_read_in_slices_and_a_cut_or_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.npy"
    rows = np.zeros(1000, SET)
    rows["number"] = np.arange(1000)
    with RowsWriter(path, SET) as writer:
        writer.write(rows[:999])
        writer.write(rows[:0])
        writer.write(rows[999:])
    assert np.array_equal(np.load(path), rows)
    table = Rows(Artifact(path), SET)
    assert len(table) == 1000
    assert np.array_equal(table.read(10, 20), rows[10:20])
    assert np.array_equal(table.sample(3, 1000, 100), rows[3::100])
    assert len(table.read(5, 5)) == 0
    with pytest.raises(BuildError, match="expected"):
        Rows(Artifact(path), np.dtype("<u8"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BuildError, match="is shorter than its header says"):
        table.read()
    path.write_bytes(b"no table")
    with pytest.raises(BuildError, match="is not a valid"):
        Rows(Artifact(path), SET)


WORDS = st.sampled_from(["one", "Two", "drei", "né", "\u4e2d\u6587", "...", "\n", "a" * 300])
TEXTS = st.lists(st.lists(WORDS, max_size=60).map(" ".join), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)  # kernels may be compiled first
@given(
    TEXTS,
    st.lists(st.sampled_from(["stored", "text", "compressed"]), min_size=30, max_size=30),
    st.integers(1, 1 << 20),
    st.booleans(),
)
def test_texts_and_stored_sets_come_back_as_the_sets_of_the_texts(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[str],
    kinds: list[str],
    memory_bytes: int,
    characters: bool,
) -> None:
    config = MinHashConfig(unit="characters" if characters else "words", ngram=3)
    run = tmp_path_factory.mktemp("run") / TEXTS_RUN.file
    expected = []
    with RunWriter(run, TEXTS_RUN, memory_bytes=1 << 20) as writer:
        for number, text in enumerate(texts):
            array = pa.array([text], pa.large_string())
            sets = distinct_sets(np.array([number], np.uint64), *shingle_batch(array, config))
            expected += contents(sets)
            kind = kinds[number]
            if kind == "stored":
                rows, payload = set_rows(sets)
            else:
                rows, payload = text_rows(array, compress=kind == "compressed")
            rows["key"] = rows["number"] = number
            writer.write(rows, payload)
    found = [
        entry
        for sets in read_sets(slice_of(run, TEXTS_RUN), config, memory_bytes)
        for entry in contents(sets)
    ]
    assert sorted(found) == expected
    texts_alone = [entry for entry in found if kinds[entry[0]] != "stored"]
    assert texts_alone == sorted(texts_alone)
