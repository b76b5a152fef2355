from __future__ import annotations

import random
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shardkit.writers.dedup.exact import LOSER_DTYPE
from shardkit.writers.dedup.population import DOCUMENTS_FILE
from shardkit.writers.dedup.removals import OUTCOMES
from shardkit.writers.dedup.resolve import (
    LOSERS_FILE,
    NEAR_LOSER,
    PLANTED_FILE,
    WINNERS_FILE,
    merge_edges,
    resolve,
)
from shardkit.writers.dedup.tables import RowsWriter
from shardkit.writers.dedup.verify import EDGE
from shardkit.writers.execution.artifacts import Artifact
from support.near_population import Document, World, make_documents, priorities_of, write_world
from support.task_folders import read_run

IdPair = tuple[bytes, bytes]


def ranked(a: Document, b: Document) -> tuple[Document, Document]:
    return (a, b) if a.priority < b.priority else (b, a)


def random_edges(rng: random.Random, documents: list[Document], share: float) -> set[IdPair]:
    """Pairs of ids, the winner's first, of any kinds that may be compared."""
    found = set()
    for a, b in combinations(documents, 2):
        if "input" in (a.kind, b.kind) and rng.random() < share:
            hi, lo = ranked(a, b)
            found.add((hi.id, lo.id))
    return found


def write_edges(
    folder: Path, world: World, edges: set[IdPair], rng: random.Random, files: int
) -> list[Artifact]:
    """Edges in random files, each sorted as verify_block does."""
    number_of = {document.id: number for number, document in enumerate(world.documents)}
    numbers = np.arange(len(world.documents), dtype=np.uint64)
    priorities = priorities_of(world, numbers)
    members: list[list[Any]] = [[] for _ in range(files)]
    for hi, lo in sorted(edges):
        at = number_of[hi]
        rng.choice(members).append((tuple(priorities[at].tolist()), at, number_of[lo], 0.9, 0.9))
    paths = []
    folder.mkdir()
    for place, own in enumerate(members):
        own.sort(key=lambda edge: (edge[0], edge[2]))
        paths.append(folder / f"{place}.npy")
        with RowsWriter(paths[-1], EDGE) as writer:
            writer.write(np.array(own, EDGE))
    return [Artifact(path) for path in paths]


def write_equal(folder: Path, world: World, equal: dict[bytes, bytes], rng: random.Random) -> list[Artifact]:
    """{loser: winner} in two files of LOSER_DTYPE rows, as `exact.find_losers` gives them."""
    number_of = {document.id: number for number, document in enumerate(world.documents)}
    halves: list[list[Any]] = [[], []]
    for loser, winner in equal.items():
        numbers = np.array([number_of[loser], number_of[winner]], np.uint64)
        parts, rows = (column.tolist() for column in world.population.locate(numbers))
        size = world.documents[number_of[loser]].text_bytes
        rng.choice(halves).append((parts[0], rows[0], size, parts[1], rows[1]))
    paths = []
    folder.mkdir()
    for place, own in enumerate(halves):
        paths.append(folder / f"{place}.npy")
        with RowsWriter(paths[-1], LOSER_DTYPE) as writer:
            writer.write(np.array(sorted(own), LOSER_DTYPE))
    return [Artifact(path) for path in paths]


def brute_force(
    documents: list[Document], edges: set[IdPair], equal: dict[bytes, bytes]
) -> dict[bytes, bytes]:
    """{removed: kept}: every document in order of priority is asked whether one that stays beats it."""
    order = [
        document.id for document in sorted(documents, key=lambda d: d.priority) if document.id not in equal
    ]
    kept: list[bytes] = []
    removed = {}
    for document in order:
        winner = next((other for other in kept if (other, document) in edges), None)
        if winner is None:
            kept.append(document)
        else:
            removed[document] = winner
    return removed | {loser: removed.get(winner, winner) for loser, winner in equal.items()}


def read_losers(world: World, path: Path) -> dict[bytes, bytes]:
    """{removed: kept} by ids; checks every other column."""
    rows: npt.NDArray[np.void] = np.load(path)
    assert rows.dtype == NEAR_LOSER
    places = [(int(row["split"]), int(row["row"])) for row in rows]
    assert places == sorted(set(places))
    found = {}
    for place, row in zip(places, rows, strict=True):
        document = place_of(world, *place)
        assert (document.text_bytes, document.copies) == (row["bytes"], row["copies"])
        found[document.id] = world.documents[int(row["kept"])].id
    return found


def place_of(world: World, split: int, row: int) -> Document:
    """The document at this row of its split's documents.arrow."""
    rows: list[int] = np.load((world.population.parts[split].folder / DOCUMENTS_FILE).path)["row"].tolist()
    return world.documents[int(world.population.starts[split]) + rows.index(row)]


def check(
    folder: Path, world: World, edges: set[IdPair], equal: dict[bytes, bytes], out: Path
) -> dict[str, Any]:
    """What was written is what the brute force says; returns it in ids."""
    kinds = {document.id: document.kind for document in world.documents}
    expected = brute_force(world.documents, edges, equal)
    removed = read_losers(world, out / LOSERS_FILE)
    planted = read_losers(world, out / PLANTED_FILE)
    assert removed == {lo: hi for lo, hi in expected.items() if kinds[lo] == "input"}
    assert planted == {lo: hi for lo, hi in expected.items() if kinds[lo] == "planted"}
    copies = Counter(
        {document.id: document.copies for document in world.documents if document.kind == "input"}
    )
    for lo, hi in removed.items():
        copies[hi] += copies.pop(lo)
    winners, losers = np.load(out / WINNERS_FILE), np.load(out / LOSERS_FILE)
    outcomes = [(split << 32 | row, size, 0) for split, row, size, *_ in losers.tolist()]
    outcomes += [(split << 32 | row, 0, copies) for split, row, copies in winners.tolist()]
    assert read_run(out / OUTCOMES.file, OUTCOMES).tolist() == sorted(outcomes)
    assert winners.tolist() == sorted(winners.tolist())
    found = {place_of(world, int(row["split"]), int(row["row"])).id: int(row["copies"]) for row in winners}
    assert found == {id: count for id, count in copies.items() if count > 1 and kinds[id] == "input"}
    return {"removed": removed, "planted": planted, "copies": found}


@pytest.mark.parametrize("seed", range(8))
def test_who_goes_is_the_brute_force_answer_however_edges_and_memory_are_cut(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    documents = make_documents(rng, rng.choice([1, 30, 150]), families=1, size=1)
    edges = random_edges(rng, documents, rng.choice([0.01, 0.05, 0.5]))
    inputs = [document for document in documents if document.kind == "input"]
    equal: dict[bytes, bytes] = {}
    for lo in rng.sample(inputs, len(inputs) // 6):
        hi = rng.choice([document for document in documents if document.kind != "planted"])
        if hi.priority < lo.priority and hi.id not in equal and lo.id not in equal.values():
            equal[lo.id] = hi.id
    edges = {(hi, lo) for hi, lo in edges if hi not in equal and lo not in equal}
    results = []
    for memory_bytes, splits, files in ((1 << 20, 1, 1), (2000, 4, 7)):
        folder = tmp_path / str(memory_bytes)
        world = write_world(folder, documents, rng, splits=splits)
        out = folder / "out"
        out.mkdir()
        edge_files = write_edges(folder / "edges", world, edges, rng, files)
        equal_files = write_equal(folder / "equal", world, equal, rng)
        counts = resolve(out, world.population, edge_files, equal_files, memory_bytes)
        results.append((check(folder, world, edges, equal, out), counts))
        assert {path.name for path in out.iterdir()} == {
            LOSERS_FILE,
            WINNERS_FILE,
            PLANTED_FILE,
            OUTCOMES.file,
        }
    assert results[0] == results[1]


def test_counts_say_what_was_removed_from_where(tmp_path: Path) -> None:
    def document(kind: Any, source: int, size: int, copies: int = 1) -> Document:
        return Document(kind, source, bytes([len(documents)]) * 16, size, (1,), copies)

    documents: list[Document] = []
    documents.append(document("input", 0, 50, copies=2))
    documents.append(document("input", 0, 40))
    documents.append(document("input", 1, 90, copies=7))
    documents.append(document("input", 1, 80))
    documents.append(document("input", 1, 70))
    documents.append(document("planted", 0, 99))
    documents.append(document("index", 5, 10))
    zero, one, two, three, four, planted, index = (document.id for document in documents)
    edges = {(zero, one), (one, two), (zero, two), (index, three), (zero, planted)}
    rng = random.Random(0)
    world = write_world(tmp_path, documents, rng, splits=2)
    edge_files = write_edges(tmp_path / "edges", world, edges, rng, 2)
    equal_files = write_equal(tmp_path / "equal", world, {four: one}, rng)
    counts = resolve(tmp_path, world.population, edge_files, equal_files, 1 << 20)
    assert counts.to_dict() == {
        "edges": 5,
        "equal": 1,
        "losers": 4,
        "bytes": 40 + 90 + 80 + 70,
        "copies": 1 + 7 + 1 + 1,
        "kept_by_index": 1,
        "planted": 1,
        "largest_group": 2 + 1 + 7 + 1,
        "groups": [0, 0, 0, 1, 0, 0],
        "sources": {
            "0": {"documents": 2, "losers": 1, "bytes": 40},
            "1": {"documents": 3, "losers": 3, "bytes": 240},
        },
    }


@pytest.mark.parametrize("max_files", [2, 3, 100])
def test_files_merge_in_order_in_passes_too(tmp_path: Path, max_files: int) -> None:
    rng = np.random.default_rng(max_files)
    files = []
    every = []
    for number, size in enumerate([0, 1, 500, 40, 3, 0, 200]):
        edges = np.zeros(size, EDGE)
        edges["hi_priority"] = rng.integers(0, 4, (size, 3))
        edges["hi_priority"][: size // 2, 0] += 1 << 63  # the order is that of unsigned numbers
        edges["lo"] = rng.integers(0, 1 << 60, size)
        edges = edges[np.lexsort(edges["hi_priority"].T[::-1])]
        files.append(tmp_path / f"{number}.npy")
        with RowsWriter(files[-1], EDGE) as writer:
            writer.write(edges)
        every.append(edges)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    merged = list(merge_edges([Artifact(path) for path in files], 20_000, temporary, max_files=max_files))
    assert max(len(some) for some in merged) < 250
    result = np.concatenate(merged)
    keys = [tuple(key) for key in result["hi_priority"].tolist()]
    assert keys == sorted(keys)
    assert sorted(result["lo"].tolist()) == sorted(lo for edges in every for lo in edges["lo"].tolist())
    assert not list(temporary.iterdir())
    assert all(file.exists() for file in files)
