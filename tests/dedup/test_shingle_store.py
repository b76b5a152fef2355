from __future__ import annotations

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
from shardkit.writers.dedup.shingle_store import (
    SET,
    ShingleReader,
    ShingleWriter,
    distinct_sets,
    read_sets,
    stored_rows,
    text_rows,
)
from shardkit.writers.dedup.shingle_store import TEXTS as TEXTS_RUN
from shardkit.writers.dedup.tables import Rows, RowsWriter
from shardkit.writers.exchange.exchange import RunWriter
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.kernels.shingles import shingle_batch
from support.task_folders import slice_of

Documents = dict[int, list[int]]  # number -> n-grams
hashes = st.one_of(st.integers(0, 20), st.integers(0, (1 << 64) - 1))
documents_strategy = st.dictionaries(st.integers(0, 10_000), st.lists(hashes, max_size=30), max_size=40)


def write(folder: Path, documents: Documents, *, batch: int = 7, smallest: int | None = None) -> Path:
    folder.mkdir()
    numbers = sorted(documents)
    with ShingleWriter(folder, smallest=smallest) as writer:
        for begin in range(0, len(numbers), batch):
            some = numbers[begin : begin + batch]
            flat = [
                0,
                *(value for number in some for value in documents[number]),
            ]  # offsets need not begin at 0
            offsets = np.cumsum([1, *(len(documents[number]) for number in some)], dtype=np.int64)
            writer.write(np.array(some, np.uint64), np.array(flat, np.uint64), offsets)
    return folder


def contents(sets: Any) -> list[tuple[int, list[int], int, int]]:
    """[(number, hashes, distinct, total)]."""
    return [
        (int(row["number"]), sets.hashes[begin:end].tolist(), int(row["distinct"]), int(row["total"]))
        for row, begin, end in zip(sets.rows, sets.offsets[:-1], sets.offsets[1:], strict=True)
    ]


def expected(
    documents: Documents, numbers: list[int], smallest: int | None = None
) -> list[tuple[int, list[int], int, int]]:
    return [
        (n, sorted(set(documents[n]))[:smallest], len(set(documents[n])), len(documents[n])) for n in numbers
    ]


def array(numbers: list[int]) -> npt.NDArray[np.uint64]:
    return np.array(numbers, np.uint64)


@settings(max_examples=30, deadline=None)
@given(documents_strategy, st.sampled_from([None, 2, 5]), st.integers(1, 500), st.data())
def test_what_is_read_are_the_sets_of_what_was_written(
    tmp_path_factory: pytest.TempPathFactory,
    documents: Documents,
    smallest: int | None,
    chunk_bytes: int,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("sets")
    cut = data.draw(st.integers(0, 10_000))
    parts = [
        {n: v for n, v in documents.items() if n < cut},
        {},
        {n: v for n, v in documents.items() if n >= cut},
    ]
    folders = [write(folder / str(at), part, smallest=smallest) for at, part in enumerate(parts)]
    wanted = sorted(
        data.draw(st.sets(st.sampled_from(sorted(documents) or [0])) if documents else st.just(set()))
    )
    reader = ShingleReader([Artifact(path) for path in folders])
    assert contents(reader.read(array(wanted))) == expected(documents, wanted, smallest)
    assert reader.find(array(wanted))["number"].tolist() == wanted
    pieces = list(reader.chunks(array(wanted), chunk_bytes))
    assert all(len(piece.rows) == 1 or piece.hashes.nbytes <= chunk_bytes for piece in pieces)
    assert [set_ for piece in pieces for set_ in contents(piece)] == expected(documents, wanted, smallest)
    tables = [row["number"] for table in reader.tables(3) for row in table]
    assert tables == sorted(documents)


def test_documents_far_apart_in_large_files_are_found(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    numbers = np.sort(rng.choice(100_000, 10_000, replace=False)).astype(np.uint64)
    sizes = rng.integers(0, 40, len(numbers))
    sizes[[17, 5000]] = 600_000, 9000  # more than one read, and a gap too wide to read over
    offsets = np.cumsum([0, *sizes], dtype=np.int64)
    values = rng.integers(0, 1 << 63, offsets[-1], dtype=np.uint64)
    with ShingleWriter(tmp_path) as writer:
        writer.write(numbers, values, offsets)
    reader = ShingleReader([Artifact(tmp_path)])
    for step in (1, 7, 4001):
        sets = reader.read(numbers[::step])
        for at, document in enumerate(range(0, len(numbers), step)):
            own = np.sort(values[offsets[document] : offsets[document + 1]])
            assert np.array_equal(sets.hashes[sets.offsets[at] : sets.offsets[at + 1]], own)


def test_a_document_without_a_set_is_not_taken_for_another(tmp_path: Path) -> None:
    reader = ShingleReader(
        [Artifact(write(tmp_path / "a", {3: [1], 9: [2]})), Artifact(write(tmp_path / "b", {12: [3]}))]
    )
    for number in (2, 4, 10, 13):
        with pytest.raises(BuildError, match="a document has no set"):
            reader.read(array([number]))


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
                rows, payload = stored_rows(sets)
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
