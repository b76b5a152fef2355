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

from dedup.test_planted import corpus, plant_in, write_split
from shardkit.card import PrecisionFacts
from shardkit.writers.dedup import measure
from shardkit.writers.dedup.bands import probability
from shardkit.writers.dedup.candidates import PAIRS_BY_SECOND
from shardkit.writers.dedup.config import NearDedupConfig
from shardkit.writers.dedup.measure import (
    PLANTED,
    PLANTED_FILE,
    binomial_interval,
    checkable,
    measure_precision,
    measure_recall,
)
from shardkit.writers.dedup.population import DOCUMENT, DOCUMENTS_FILE, Kind, Part, Population, priority
from shardkit.writers.dedup.removals import document_keys
from shardkit.writers.dedup.resolve import NEAR_LOSER
from shardkit.writers.dedup.signatures import LOST
from shardkit.writers.dedup.verify import PLANTED_EDGES
from shardkit.writers.documents import document_ids
from shardkit.writers.exchange import Limits, RunWriter, Slice, Table
from shardkit.writers.execution.artifacts import Artifact
from support.task_folders import slice_of

Pairs = Sequence[tuple[int, int]]
SMALL = Limits(block_bytes=100, read_bytes=300)


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


def write_pairs(path: Path, table: Table, pairs: Pairs) -> Slice:
    """Pairs (document, copy), by copy."""
    rows = np.array([(copy, document) for document, copy in pairs], table.dtype)
    with RunWriter(path, table, memory_bytes=1 << 20, limits=SMALL) as run:
        run.write(rows)
    return slice_of(path, table, SMALL)


def write_lost(path: Path, population: Population, numbers: Sequence[int] = ()) -> Slice:
    keys = document_keys(*population.locate(np.array(numbers, np.uint64)))
    with RunWriter(path, LOST, memory_bytes=1 << 20, limits=SMALL) as run:
        run.write(keys.view(LOST.dtype))
    return slice_of(path, LOST, SMALL)


def make_population(folder: Path, copies: int) -> Population:
    inputs = [
        make_part(folder / "0", range(40)),
        make_part(folder / "1", [], name="b"),
        make_part(folder / "2", range(3, 90, 3), name="c"),
    ]
    planted = make_part(folder / "planted", range(copies), "planted", "planted")
    return Population((*inputs, planted, make_part(folder / "index", range(20), "index", "index")))


def test_recall_by_band_is_that_of_a_set_of_pairs(tmp_path: Path) -> None:
    chance = random.Random(1)
    population = make_population(tmp_path, 60)
    planted = np.zeros(60, PLANTED)
    numbers = []
    for copy, row in enumerate(planted):
        split, at = chance.choice([(0, chance.randrange(40)), (2, chance.randrange(29))])
        row["split"], row["at"] = split, at
        row["shared"], row["union"] = 45 + copy % 56, 100
        numbers.append(int(population.starts[split]) + at)
    first, stop = population.planted.start, population.planted.stop
    true = [(number, first + copy) for copy, number in enumerate(numbers)]
    noise = [(a, b) for a in range(first) for b in chance.sample(range(first, first + 60), 3)]
    noise = [pair for pair in noise if pair not in true]
    others = [(a, b) for a in range(20) for b in (30, stop, stop + 3)]  # not of copies
    candidates, verified = chance.sample(true, 40), chance.sample(true, 25)
    removed = sorted(chance.sample(sorted(set(numbers)), 5))
    result = measure_recall(
        planted,
        population,
        pairs=write_pairs(tmp_path / "p", PAIRS_BY_SECOND, [*noise, *candidates, *candidates[:9], *others]),
        edges=write_pairs(tmp_path / "e", PLANTED_EDGES, [*verified, *noise[:30]]),
        lost=write_lost(tmp_path / "l", population, removed),
        bands_and_rows=(14, 8),
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


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    # 81 of 263: Newcombe (1998), Two-sided confidence intervals for the single proportion, method 3
    [(0, 0, 0.0, 1.0), (0, 10, 0.0, 0.2775328), (10, 10, 0.7224672, 1.0), (81, 263, 0.2553, 0.3662)],
)
def test_intervals_are_wilsons(successes: int, trials: int, low: float, high: float) -> None:
    assert binomial_interval(successes, trials) == pytest.approx((low, high), abs=1e-4)


def sample_of(part: Part, rows: Sequence[tuple[int, int, int]], count: int) -> npt.NDArray[np.void]:
    """CHECKED of (split, row, kept), where rows are those of the part."""
    losers = np.zeros(len(rows), NEAR_LOSER)
    for loser, (split, row, kept) in zip(losers, sorted(rows), strict=True):
        loser["split"], loser["row"], loser["kept"], loser["bytes"] = split, row, kept, 1000
    documents = np.load((part.folder / DOCUMENTS_FILE).path)
    return checkable(documents["id"][losers["row"]], losers, count)


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
    documents = {0: Artifact(first), 1: Artifact(second)}
    return measure_precision(sample_of(parts[1], rows, 100), population, documents, NearDedupConfig(**config))


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
    documents = write_split(tmp_path / "d.arrow", [(n, f"{WHOLE} end{n}") for n in range(60)])
    part = make_part(tmp_path / "0", range(60))
    population = Population((part, make_part(tmp_path / "index", range(10), "index")))
    losers = [(0, row, 60 + row if row < 10 else 0) for row in range(1, 60)]
    results = [
        measure_precision(
            sample_of(part, some, count), population, {0: Artifact(documents)}, NearDedupConfig()
        )
        for some, count in [(losers, 59), (losers, 1000), (losers, 20), (losers[::-1], 20), (losers, 0)]
    ]
    assert results[0] == results[1]
    assert (results[0].checked, results[0].left_out, results[0].similar) == (50, 9, 50)
    assert results[2] == results[3]
    assert results[2].checked + results[2].left_out == 20
    assert results[4].checked == results[4].left_out == len(results[4].excerpts) == 0
    assert len(results[0].excerpts) == 10
    assert results[0].least == round(100 / 102, 6)


def test_planted_copies_of_real_documents_are_measured_from_their_own_table(tmp_path: Path) -> None:
    path = write_split(tmp_path / "d.arrow", corpus(60))
    plant_in(tmp_path, [path], NearDedupConfig().minhash, count=28)
    planted = np.load(tmp_path / PLANTED_FILE)
    population = Population(
        (make_part(tmp_path / "0", range(60)), make_part(tmp_path / "p", range(28), "planted", "p"))
    )
    pairs = [(int(row["at"]), 60 + copy) for copy, row in enumerate(planted)]
    result = measure_recall(
        planted,
        population,
        pairs=write_pairs(tmp_path / "pairs", PAIRS_BY_SECOND, pairs),
        edges=write_pairs(tmp_path / "edges", PLANTED_EDGES, []),
        lost=write_lost(tmp_path / "lost", population),
        bands_and_rows=(14, 8),
    )
    assert result.left_out == 0
    assert sum(band.pairs for band in result.bands) == 28
    assert all((band.candidates, band.verified) == (band.pairs, 0) for band in result.bands)
    assert all(0 < band.expected <= band.pairs for band in result.bands)
