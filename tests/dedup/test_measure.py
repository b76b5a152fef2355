"""Recall and precision are counted, not estimated: every pair by its words, every share with its interval."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dedup.test_planted import corpus, nothing, write_split
from shardkit.card import PrecisionFacts
from shardkit.writers.dedup import measure
from shardkit.writers.dedup.bands import probability
from shardkit.writers.dedup.config import NearDedupConfig
from shardkit.writers.dedup.measure import (
    PLANTED,
    PLANTED_FILE,
    binomial_interval,
    measure_precision,
    measure_recall,
    plant,
)
from shardkit.writers.dedup.population import DOCUMENT, DOCUMENTS_FILE, PAIR, Kind, Part, Population, priority
from shardkit.writers.dedup.removals import document_keys
from shardkit.writers.dedup.resolve import NEAR_LOSER
from shardkit.writers.dedup.signatures import LOST
from shardkit.writers.dedup.verify import PLANTED_EDGES_FILE
from shardkit.writers.documents import document_ids
from shardkit.writers.exchange import RunWriter
from shardkit.writers.execution.artifacts import Artifact
from support.task_folders import slice_of

Pairs = Sequence[tuple[int, int]]


def make_part(folder: Path, rows: Sequence[int], kind: Kind = "input", name: str = "a.jsonl") -> Part:
    """A part of these rows of a documents.arrow, whose records are its rows."""
    folder.mkdir(parents=True)
    documents = np.zeros(len(rows), DOCUMENT)
    for document, row, id_ in zip(documents, rows, document_ids(name, rows), strict=True):
        document["id"], document["row"] = np.frombuffer(id_, np.uint8), row
        document["bytes"], document["copies"], document["source"] = 1000 + row % 7, 1, row % 3
    np.save(folder / DOCUMENTS_FILE, documents)
    return Part(Artifact(folder), len(rows), kind)


def priorities(population: Population) -> npt.NDArray[np.uint64]:
    return np.concatenate(
        [priority(np.load((part.folder / DOCUMENTS_FILE).path), part.kind) for part in population.parts]
    )


def write_pairs(folder: Path, runs: Sequence[Pairs]) -> Path:
    folder.mkdir()
    ordered = [sorted(set(run)) for run in runs]
    np.array([pair for run in ordered for pair in run], PAIR).tofile(folder / "pairs.bin")
    np.save(folder / "pairs.npy", np.cumsum([0, *map(len, ordered)], dtype=np.int64))
    return folder


def write_edges(folder: Path, pairs: list[tuple[int, int]]) -> Path:
    folder.mkdir()
    np.save(folder / PLANTED_EDGES_FILE, np.sort(np.array(pairs, PAIR)))
    return folder


def make_population(folder: Path, copies: int) -> Population:
    inputs = [
        make_part(folder / "0", range(40)),
        make_part(folder / "1", [], name="b"),
        make_part(folder / "2", range(3, 90, 3), name="c"),
    ]
    planted = make_part(folder / "planted", range(copies), "planted", "planted")
    return Population((*inputs, planted, make_part(folder / "index", range(20), "index", "index")))


@pytest.mark.parametrize("piece", [1, 5, 1 << 20])
def test_recall_by_band_is_that_of_a_set_of_pairs(
    tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "PIECE_ROWS", piece)
    chance = random.Random(piece)
    population = make_population(tmp_path, 60)
    planted = np.zeros(60, PLANTED)
    numbers = []
    for copy, row in enumerate(planted):
        split, at = chance.choice([(0, chance.randrange(40)), (2, chance.randrange(29))])
        row["original_split"], row["original_row"] = split, at if split == 0 else 3 + 3 * at
        row["shared"], row["union"] = 45 + copy % 56, 100
        numbers.append(int(population.starts[split]) + at)
    first = population.planted.start
    true = [(number, first + copy) for copy, number in enumerate(numbers)]
    noise = [(a, b) for a in range(first) for b in chance.sample(range(first, first + 60), 3)]
    noise = [pair for pair in noise if pair not in true]
    candidates, verified = chance.sample(true, 40), chance.sample(true, 25)
    removed = set(chance.sample(numbers, 5))
    pairs = [*noise, *candidates]
    runs = [chance.sample(pairs, 60), [], candidates[:20], candidates[10:]]
    folders = [
        write_pairs(tmp_path / "p0", runs),
        write_pairs(tmp_path / "p1", [noise]),
        write_pairs(tmp_path / "p2", []),
    ]
    edges = [
        write_edges(tmp_path / "e0", [*verified[:10], *noise[:30]]),
        write_edges(tmp_path / "e1", verified[10:]),
        write_edges(tmp_path / "e2", []),
    ]
    with RunWriter(tmp_path / LOST.file, LOST, memory_bytes=1 << 20) as run:
        run.write(document_keys(*population.locate(np.array(list(removed), np.uint64))).view(LOST.dtype))
    result = measure_recall(
        planted,
        population,
        [Artifact(path) for path in folders],
        [Artifact(path) for path in edges],
        (14, 8),
        lost=slice_of(tmp_path / LOST.file, LOST),
    )
    left = [copy for copy, number in enumerate(numbers) if number not in removed]
    assert result.left_out == 60 - len(left) > 0
    expected = []
    for low, high in [(0, 50), (50, 60), (60, 70), (70, 80), (80, 85), (85, 90), (90, 95), (95, 101)]:
        inside = [copy for copy in left if low <= int(planted[copy]["shared"]) < high]
        if inside:
            hits = sum(true[copy] in candidates for copy in inside)
            expected.append(
                {
                    "low": low / 100,
                    "high": min(high, 100) / 100,
                    "pairs": len(inside),
                    "candidates": hits,
                    "verified": sum(true[copy] in verified for copy in inside),
                    "expected": pytest.approx(
                        sum(probability(planted[copy]["shared"] / 100, 14, 8) for copy in inside), abs=1e-3
                    ),
                    "interval": pytest.approx(binomial_interval(hits, len(inside)), abs=1e-6),
                }
            )
    assert [asdict(band) for band in result.bands] == expected
    assert sum(true[copy] in candidates for copy in left) > 20


def test_copies_of_documents_that_are_not_compared_are_left_out(tmp_path: Path) -> None:
    population = make_population(tmp_path, 2)
    planted = np.array([(2, 4, 9, 10), (2, 6, 9, 10)], PLANTED)  # part 2 has the rows 3, 6, 9, ...
    result = measure_recall(planted, population, [], [], (14, 8))
    assert result.left_out == 1
    assert [(band.low, band.pairs, band.candidates) for band in result.bands] == [(0.9, 1, 0)]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=40), st.data())
@settings(max_examples=40, deadline=None)
def test_bisection_finds_what_is_there(have: list[tuple[int, int]], data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=20))
    entries = np.array(sorted(set(have)), PAIR)
    columns = tuple(np.array([pair[side] for pair in wanted], np.uint64) for side in (0, 1))
    found = measure._contained(columns, entries, measure._pair_columns)
    assert found.tolist() == [pair in have for pair in wanted]


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    # 81 of 263: Newcombe (1998), Two-sided confidence intervals for the single proportion, method 3
    [(0, 0, 0.0, 1.0), (0, 10, 0.0, 0.2775328), (10, 10, 0.7224672, 1.0), (81, 263, 0.2553, 0.3662)],
)
def test_intervals_are_wilsons(successes: int, trials: int, low: float, high: float) -> None:
    assert binomial_interval(successes, trials) == pytest.approx((low, high), abs=1e-4)


def save_losers(path: Path, rows: Sequence[tuple[int, int, int]]) -> Path:
    losers = np.zeros(len(rows), NEAR_LOSER)
    for loser, (split, row, kept) in zip(losers, sorted(rows), strict=True):
        loser["split"], loser["row"], loser["kept"], loser["bytes"] = split, row, kept, 1000
    np.save(path, losers)
    return path


WHOLE = " ".join(f"word{number}" for number in range(104))  # 100 n-grams of five words
TEXTS = {
    "whole": WHOLE,
    "same words": WHOLE.replace(" ", ", ").upper() + "!",
    "at 0.8": " ".join(WHOLE.split()[: 80 + 4]),  # 80 of 100 n-grams
    "below 0.8": " ".join(WHOLE.split()[: 79 + 4]),
    "small": "one two three four five six",
    "small, alike": "one two three four five six seven",  # 2 of 3
    "again": "over and over and " * 50,
    "again, alike": "over and over and " * 50 + "over and done with it",
}


def check(tmp_path: Path, pairs: Sequence[tuple[str, str]], **config: Any) -> PrecisionFacts:
    """The measure of (removed, kept) texts, each removed one in the second split."""
    names = list(TEXTS)
    first = write_split(tmp_path / "0.arrow", list(enumerate(TEXTS.values())), batch_rows=3)
    second = write_split(tmp_path / "1.arrow", [(n, TEXTS[lost]) for n, (lost, _) in enumerate(pairs)])
    parts = (make_part(tmp_path / "0", range(len(names))), make_part(tmp_path / "1", range(len(pairs))))
    population = Population((*parts, make_part(tmp_path / "index", range(3), "index")))
    rows = [(1, number, names.index(kept)) for number, (_, kept) in enumerate(pairs)]
    losers = save_losers(tmp_path / "losers.npy", rows)
    settings = NearDedupConfig(**config)
    return measure_precision(
        [Artifact(losers)], population, [Artifact(first), Artifact(second)], settings, count=100, seed=0
    )


@pytest.mark.parametrize(
    ("removed", "kept", "verdict", "least"),
    [
        ("same words", "whole", "similar", 1.0),
        ("at 0.8", "whole", "similar", 0.8),
        ("below 0.8", "whole", "wrong", None),
        ("small, alike", "small", "wrong", None),
        ("small", "small", "similar", 1.0),
        ("again, alike", "again", "wrong", None),
    ],
)
def test_a_removed_document_is_measured_by_its_words(
    tmp_path: Path, removed: str, kept: str, verdict: str, least: float | None
) -> None:
    result = check(tmp_path, [(removed, kept)])
    assert {name for name in ("similar", "contained", "wrong") if getattr(result, name)} == {verdict}
    assert (result.checked, result.left_out, result.least) == (1, 0, least)
    [excerpt] = result.excerpts
    assert (excerpt.removed, excerpt.kept) == (TEXTS[removed][:120], TEXTS[kept][:120])


def test_containment_counts_only_where_the_recipe_says_so_and_never_for_small_ones(tmp_path: Path) -> None:
    pairs = [("below 0.8", "whole"), ("small", "small, alike")]
    result = check(tmp_path, pairs, containment=0.9)
    assert (result.similar, result.contained, result.wrong) == (0, 1, 1)


def test_excerpts_are_of_pairs_that_differ_while_there_are_any(tmp_path: Path) -> None:
    result = check(tmp_path, [("whole", "whole"), ("at 0.8", "whole"), ("same words", "whole")])
    assert [excerpt.similarity for excerpt in result.excerpts] == [0.8]


def test_a_sample_depends_on_ids_and_leaves_out_what_lost_to_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "TEXT_BYTES", 3000)
    monkeypatch.setattr(measure, "PIECE_ROWS", 7)
    documents = write_split(tmp_path / "d.arrow", [(n, f"{WHOLE} end{n}") for n in range(60)])
    part = make_part(tmp_path / "0", range(60))
    population = Population((part, make_part(tmp_path / "index", range(10), "index")))
    losers = save_losers(
        tmp_path / "losers.npy", [(0, row, 60 + row if row < 10 else 0) for row in range(1, 60)]
    )
    results = [
        measure_precision(
            [Artifact(losers)], population, [Artifact(documents)], NearDedupConfig(), count=count, seed=seed
        )
        for count, seed in [(59, 0), (1000, 5), (20, 1), (20, 2), (0, 1)]
    ]
    assert results[0] == results[1]
    assert (results[0].checked, results[0].left_out, results[0].similar) == (50, 9, 50)
    assert results[2] != results[3]
    assert results[2].checked + results[2].left_out == 20
    assert results[4].checked == results[4].left_out == len(results[4].excerpts) == 0
    assert len(results[0].excerpts) == 10
    assert results[0].least == round(100 / 102, 6)


def test_planted_copies_of_real_documents_are_measured_from_their_own_table(tmp_path: Path) -> None:
    path = write_split(tmp_path / "d.arrow", corpus(60))
    plant([Artifact(path)], nothing, NearDedupConfig().minhash, count=28, seed=1, folder=tmp_path)
    planted = np.load(tmp_path / PLANTED_FILE)
    parts = make_part(tmp_path / "0", range(60)), make_part(tmp_path / "p", range(28), "planted", "p")
    pairs = [(int(row["original_row"]), 60 + copy) for copy, row in enumerate(planted)]
    folders = [write_pairs(tmp_path / "pairs", [pairs])]
    result = measure_recall(planted, Population(parts), [Artifact(path) for path in folders], [], (14, 8))
    assert result.left_out == 0
    assert sum(band.pairs for band in result.bands) == 28
    assert all((band.candidates, band.verified) == (band.pairs, 0) for band in result.bands)
    assert all(0 < band.expected <= band.pairs for band in result.bands)
