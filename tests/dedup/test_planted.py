"""Planted copies: their similarity is exact and spread over all bands, and only documents decide which."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from reference.near import reference_shingles
from shardkit.writers.dedup.config import MinHashConfig, NearDedupConfig
from shardkit.writers.dedup.measure import (
    NAMESPACE,
    PLANTED,
    PLANTED_FILE,
    PROPOSED,
    lowest_end,
    ngrams,
    plant,
    read_rows,
)
from shardkit.writers.dedup.measure import TEXTS_FILE as DOCUMENTS_FILE
from shardkit.writers.dedup.removals import Removed
from shardkit.writers.dedup.signatures import sign_documents
from shardkit.writers.documents import DOCUMENT_SCHEMA, document_ids
from shardkit.writers.execution.artifacts import Artifact
from support.documents import write_documents
from support.task_folders import read_run

WORDS = MinHashConfig()
CHARACTERS = MinHashConfig(unit="characters", ngram=9)


def write_split(path: Path, documents: Sequence[tuple[int, str]], batch_rows: int = 7) -> Path:
    """A split of (record, text), of three sources."""
    records = [record for record, _ in documents]
    sources = [record % 3 for record in records]
    texts = [text for _, text in documents]
    return write_documents(path, texts, batch_rows=batch_rows, records=records, source=sources)


def corpus(count: int, seed: int = 0) -> list[tuple[int, str]]:
    """Documents of 20 to 400 words, with what normalization has to see through."""
    chance = random.Random(seed)
    vocabulary = [f"w{number}" for number in range(3000)] + ["Ünïcode", "e\u0301te\u0301", "ΟΔΟΣ", "İ"]
    return [
        (record, ", ".join(chance.choices(vocabulary, k=chance.randrange(20, 400))).capitalize() + ".")
        for record in range(count)
    ]


def propose(
    folder: Path,
    paths: Sequence[Path],
    config: MinHashConfig = WORDS,
    *,
    removed: Sequence[int] = (),
    count: int = 2000,
) -> npt.NDArray[np.void]:
    """What the splits propose, by hash, as the exchange gives it."""
    near, found = NearDedupConfig(minhash=config), []
    gone = Removed({"exact_duplicate": np.array(sorted(removed), np.int64)})
    for split, path in enumerate(paths):
        part = folder / f"part-{split}-{len(list(folder.glob('part-*')))}"
        part.mkdir()
        signed = sign_documents(Artifact(path), gone, near, part, proposed=count)
        rows = read_run(part / PROPOSED.file, PROPOSED)
        assert len(rows) == min(count, signed.eligible)
        rows["split"] = split
        found.append(rows)
    rows = np.concatenate([np.empty(0, PROPOSED.dtype), *found])
    return rows[np.argsort(rows["key"])]


def plant_in(
    folder: Path, paths: Sequence[Path], config: MinHashConfig, *, count: int, removed: Sequence[int] = ()
) -> None:
    """Plant copies of the lowest proposals."""
    lowest = propose(folder, paths, config, removed=removed)[:count]
    plant(lowest, {split: Artifact(path) for split, path in enumerate(paths)}, config, folder)


def planted_in(folder: Path) -> tuple[npt.NDArray[np.void], pa.Table]:
    planted = np.load(folder / PLANTED_FILE)
    assert planted.dtype == PLANTED
    with pa.OSFile(str(folder / DOCUMENTS_FILE)) as file:
        return planted, pa.ipc.open_file(file).read_all()


@pytest.mark.parametrize(
    "config", [WORDS, CHARACTERS, MinHashConfig(ngram=1), MinHashConfig(ngram=40)], ids=str
)
def test_the_similarity_of_a_copy_is_counted_from_both_texts_and_all_bands_are_met(
    tmp_path: Path, config: MinHashConfig
) -> None:
    documents = corpus(120)
    path = write_split(tmp_path / "d.arrow", documents)
    plant_in(tmp_path, [path], config, count=70)
    planted, copies = planted_in(tmp_path)
    assert len(planted) == len(copies) == 70
    assert copies.schema == DOCUMENT_SCHEMA
    for row, copy in zip(planted, copies.to_pylist(), strict=True):
        record, original = documents[int(row["row"])]
        known, found = reference_shingles(original, config), reference_shingles(copy["text"], config)
        assert (row["shared"], row["union"]) == (len(known & found), len(known | found))
        assert len(ngrams(original, config)) >= 50
        assert (copy["file"], copy["source"]) == (NAMESPACE, record % 3)
        assert copy["document_id"] == document_ids(NAMESPACE, [copy["record"]])[0]
    similarity = planted["shared"] / planted["union"]
    bands, _ = np.histogram(similarity, [0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0])
    assert bands.sum() == 70
    assert bands.min() >= 7
    assert sorted(copies["record"].to_pylist()) == list(range(70))


def described(
    folder: Path, splits: Sequence[Sequence[tuple[int, str]]]
) -> set[tuple[int, int, str, int, int]]:
    planted, copies = planted_in(folder)
    return {
        (
            splits[row["split"]][row["row"]][0],
            c["record"],
            c["text"],
            row["shared"],
            row["union"],
        )
        for row, c in zip(planted, copies.to_pylist(), strict=True)
    }


def test_neither_splits_nor_their_order_nor_batches_change_what_is_planted(tmp_path: Path) -> None:
    documents = corpus(90)
    ways = [[documents], [documents[60:], [], documents[:25], documents[25:60]]]
    results = []
    for number, splits in enumerate(ways):
        folder = tmp_path / str(number)
        folder.mkdir()
        paths = [write_split(folder / f"{at}.arrow", split, 4 + at) for at, split in enumerate(splits)]
        plant_in(folder, paths, WORDS, count=30)
        results.append(described(folder, splits))
    assert results[0] == results[1]
    assert len(results[0]) == 30


def test_what_is_removed_or_short_is_never_chosen(tmp_path: Path) -> None:
    documents = corpus(60)
    path = write_split(tmp_path / "d.arrow", documents)
    plant_in(tmp_path, [path], WORDS, count=20)
    gone = set(planted_in(tmp_path)[0]["row"].tolist())
    plant_in(tmp_path, [path], WORDS, count=1000, removed=sorted(gone))
    planted = planted_in(tmp_path)[0]
    long = {row for row, (_, text) in enumerate(documents) if len(ngrams(text, WORDS)) >= 50}
    assert set(planted["row"].tolist()) == long - gone
    assert len(long) < 60
    left = [row for row in range(60) if row not in gone]
    assert [left[at] for at in planted["at"]] == planted["row"].tolist()


def test_each_split_proposes_its_lowest_hashes_and_their_end_holds_the_lowest_of_all(tmp_path: Path) -> None:
    documents = corpus(300)
    paths = [write_split(tmp_path / f"{at}.arrow", documents[at::4], 9) for at in range(4)]
    everything = propose(tmp_path, paths)
    few = propose(tmp_path, paths, count=30)
    assert len(few) == 4 * 30 < len(everything)
    assert few[:30]["key"].tolist() == everything[:30]["key"].tolist()
    end = lowest_end(30, len(everything))
    assert 30 <= np.count_nonzero(everything["key"] < np.uint64(end)) < len(everything)
    assert lowest_end(30, 80) == lowest_end(30, 0) == 1 << 64


@pytest.mark.parametrize(
    ("splits", "count"), [([], 5), ([[]], 5), ([[(0, "too short")]], 5), ([corpus(9)], 0)]
)
def test_nothing_to_plant_leaves_empty_files(
    tmp_path: Path, splits: list[list[tuple[int, str]]], count: int
) -> None:
    paths = [write_split(tmp_path / f"{at}.arrow", split) for at, split in enumerate(splits)]
    plant_in(tmp_path, paths, WORDS, count=count)
    planted, copies = planted_in(tmp_path)
    assert len(planted) == len(copies) == 0


def test_a_text_of_one_word_over_and_over_can_be_an_original(tmp_path: Path) -> None:
    path = write_split(tmp_path / "d.arrow", [(0, "again " * 500)])
    plant_in(tmp_path, [path], WORDS, count=1)
    [row] = planted_in(tmp_path)[0]
    assert row["shared"] == 1
    assert row["union"] > 1


def test_rows_are_read_one_by_one_across_batches(tmp_path: Path) -> None:
    path = write_split(tmp_path / "d.arrow", [(record, f"text {record}") for record in range(50)])
    wanted = [0, 6, 7, 8, 49]
    rows = {row: batch.column("text").to_pylist() for row, batch in read_rows(Artifact(path), wanted)}
    assert rows == {row: [f"text {row}"] for row in wanted}
    with pytest.raises(AssertionError, match="has 50 rows, not row 50"):
        list(read_rows(Artifact(path), [50]))
