from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reference.near import reference_resolve
from shardkit.writers.dedup.outcomes import OUTCOMES
from shardkit.writers.dedup.population import DOCUMENTS_FILE
from shardkit.writers.dedup.resolve import (
    BEATEN,
    EQUALS,
    LOSERS_FILE,
    NEAR_LOSER,
    WINNERS_FILE,
    Resolved,
    decide_all,
    decide_round,
    decided_edges,
    resolve,
)
from shardkit.writers.dedup.tables import CHUNK_ROWS
from shardkit.writers.dedup.verify import EDGES, WAITING
from shardkit.writers.exchange.exchange import RunWriter, Table
from shardkit.writers.execution.commit import Commit
from support.near_population import Document, World, make_documents, priorities_of, write_world
from support.task_folders import TaskFolders, commit_folder, read_run, slice_of

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


def write_rows(folder: Path, tables: dict[Table, npt.NDArray[np.void]], name: str) -> Commit:
    folder.mkdir(parents=True)
    for table, rows in tables.items():
        with RunWriter(folder / table.file, table, memory_bytes=1 << 20) as writer:
            writer.write(rows)
    return commit_folder(folder, "made", name)


Edge = tuple[int, int, tuple[int, ...], float]


def likeness(winner: bytes, loser: bytes) -> float:
    """A similarity that says which edge it is of."""
    return float(np.float32(crc32(winner + loser) / 2**32))


def halves(rank: bytes) -> tuple[int, int]:
    return int.from_bytes(rank[:8]), int.from_bytes(rank[8:])


def write_edges(folder: Path, rows: Sequence[Edge], rng: random.Random, tasks: int) -> list[Commit]:
    """Commits of verify tasks that hold (winner, loser, priority of the winner, similarity)."""
    members: list[list[Edge]] = [[] for _ in range(tasks)]
    for row in rows:
        rng.choice(members).append(row)
    commits = []
    for at, own in enumerate(members):
        edges = np.array(own, EDGES.dtype)
        tables = {EDGES: edges, WAITING: edges["lo"].copy().view(WAITING.dtype)}
        commits.append(write_rows(folder / str(at), tables, str(at)))
    return commits


def numbered_edges(world: World, edges: set[IdPair]) -> list[Edge]:
    number_of = {document.id: number for number, document in enumerate(world.documents)}
    priorities = priorities_of(world, np.arange(len(world.documents), dtype=np.uint64)).tolist()
    return [
        (number_of[hi], number_of[lo], tuple(priorities[number_of[hi]]), likeness(hi, lo))
        for hi, lo in sorted(edges)
    ]


def write_equal(folder: Path, world: World, equal: dict[bytes, bytes], rng: random.Random) -> list[Commit]:
    """{loser: winner} in commits of two tasks."""
    number_of = {document.id: number for number, document in enumerate(world.documents)}
    members: list[list[tuple[int, int, tuple[int, int]]]] = [[], []]
    for loser, winner in equal.items():
        rng.choice(members).append((number_of[winner], number_of[loser], halves(winner)))
    return [
        write_rows(folder / str(at), {EQUALS: np.array(own, EQUALS.dtype)}, str(at))
        for at, own in enumerate(members)
    ]


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


def read_losers(world: World, lost: Sequence[Commit]) -> dict[bytes, bytes]:
    """{removed: kept} by ids; checks every other column."""
    found = {}
    for number, (_, commit) in enumerate(zip(world.inputs, lost, strict=True)):
        rows: npt.NDArray[np.void] = np.load(commit.folder / LOSERS_FILE)
        assert rows.dtype == NEAR_LOSER
        assert set(rows["split"].tolist()) <= {number}
        assert rows["row"].tolist() == sorted(set(rows["row"].tolist()))
        for row in rows:
            document = place_of(world, number, int(row["row"]))
            assert (document.text_bytes, document.copies) == (row["bytes"], row["copies"])
            found[document.id] = world.documents[int(row["kept"])].id
    return found


def place_of(world: World, split: int, row: int) -> Document:
    """The document at this row of its split's documents.arrow."""
    rows: list[int] = np.load((world.population.parts[split].folder / DOCUMENTS_FILE).path)["row"].tolist()
    return world.documents[int(world.population.starts[split]) + rows.index(row)]


def check(
    world: World,
    edges: set[IdPair],
    equal: dict[bytes, bytes],
    lost: Sequence[Commit],
    kept: Sequence[Commit],
) -> dict[str, Any]:
    """What was written is what the brute force says; returns it in ids."""
    kinds = {document.id: document.kind for document in world.documents}
    expected = brute_force(world.documents, edges, equal)
    removed = read_losers(world, lost)
    assert removed == {lo: hi for lo, hi in expected.items() if kinds[lo] == "input"}
    copies = Counter({one.id: one.copies for one in world.documents if one.kind == "input"})
    for lo, hi in removed.items():
        copies[hi] += copies.pop(lo)
    number_of = {document.id: at for at, document in enumerate(world.documents)}
    winners = np.concatenate([np.load(commit.folder / WINNERS_FILE) for commit in kept])
    inputs = world.population.count("input")
    outcomes = [(split << 32 | row, 0, copies, 0, 0, 0.0) for split, row, copies in winners.tolist()]
    for number, _ in enumerate(world.inputs):
        for row in np.load(lost[number].folder / LOSERS_FILE):
            id, place = place_of(world, number, int(row["row"])).id, number << 32 | int(row["row"])
            winner, beaten = expected[id], equal.get(id, id)  # who equals a loser is beaten as that one is
            similarity = 1.0 if winner == beaten else likeness(winner, beaten)
            text, half = halves(winner)
            if kinds[winner] == "index":  # numbers over all indexes, which are no content ranks
                at = number_of[winner] - inputs
                text, half = at ^ (1 << 64) - 1, (at + 1) * 0x9E3779B97F4A7C15 % (1 << 64)
            outcomes.append((place, int(row["bytes"]), 0, text, half, similarity))
    written = [read_run(commit.folder / OUTCOMES.file, OUTCOMES).tolist() for commit in (*lost, *kept)]
    assert sorted(row for rows in written for row in rows) == sorted(outcomes)
    assert inputs == 0 or winners.tolist() == sorted(winners.tolist())
    found = {place_of(world, int(row["split"]), int(row["row"])).id: int(row["copies"]) for row in winners}
    assert found == {id: count for id, count in copies.items() if count > 1 and kinds[id] == "input"}
    return {"removed": removed, "copies": found}


def resolved(
    folder: Path,
    documents: list[Document],
    edges: set[IdPair],
    equal: dict[bytes, bytes],
    memory_bytes: int = 1 << 20,
    *,
    rng: random.Random | None = None,
    splits: int = 1,
    tasks: int = 1,
) -> tuple[dict[str, Any], Resolved, list[str]]:
    """Return what `check` returns of these, the totals, and the tasks that ran."""
    rng = rng or random.Random(0)
    world = write_world(folder, documents, rng, splits=splits)
    verified = write_edges(folder / "edges", numbered_edges(world, edges), rng, tasks)
    equals = write_equal(folder / "equal", world, equal, rng)
    run = TaskFolders(folder)
    decided, lost, kept = resolve(
        run,
        world.inputs,
        verified,
        equals,
        edges=len(edges),
        equals=len(equal),
        memory_bytes=memory_bytes,
        indexed=world.population.count("index"),
    )
    return check(world, edges, equal, lost, kept), decided, run.ran


@pytest.mark.parametrize("seed", range(5))
def test_who_goes_is_the_brute_force_answer_however_edges_and_memory_are_cut(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    documents = make_documents(rng, rng.choice([1, 30, 150]), families=1, size=1)
    edges = random_edges(rng, documents, rng.choice([0.01, 0.05, 0.5]))
    inputs = [document for document in documents if document.kind == "input"]
    equal: dict[bytes, bytes] = {}
    for lo in rng.sample(inputs, len(inputs) // 6):
        hi = rng.choice(inputs)
        if hi.priority < lo.priority and hi.id not in equal and lo.id not in equal.values():
            equal[lo.id] = hi.id
    edges = {(hi, lo) for hi, lo in edges if hi not in equal and lo not in equal}
    results = []
    for memory_bytes, splits, tasks in ((1 << 20, 1, 1), (2000, 4, 3)):
        folder = tmp_path / str(memory_bytes)
        results.append(
            resolved(folder, documents, edges, equal, memory_bytes, rng=rng, splits=splits, tasks=tasks)[:2]
        )
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((0, 5, 2, 2), (1, 9, 1, 1)),  # by source, whatever the rest
        ((0, 9, 2, 2), (0, 5, 1, 1)),  # then by length, the longer one
        ((0, 5, 1, 2), (0, 5, 2, 1)),  # then by the first half of the id
        ((0, 5, 1, 1), (0, 5, 1, 2)),  # then by the second
    ],
)
def test_a_removed_document_is_booked_on_the_first_by_priority_of_those_that_beat_it(
    tmp_path: Path, first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    both = [
        Document("input", source, bytes([high] * 8 + [low] * 8), size, (1,))
        for source, size, high, low in (first, second)
    ]
    losers = [Document("input", 2, bytes([number] * 16), 1, (1,)) for number in (8, 9)]
    edges = {(one.id, loser.id) for one in both for loser in losers}
    found, *_ = resolved(tmp_path, [*both, *losers], edges, {})
    assert found["removed"] == {loser.id: both[0].id for loser in losers}


def test_what_equals_a_loser_is_booked_with_the_rank_of_whom_that_one_is_booked_on(tmp_path: Path) -> None:
    first, beaten, equal = (
        Document("input", number, bytes([number] * 8 + [9 - number] * 8), 5, (1,)) for number in range(3)
    )
    documents, edges = [first, beaten, equal], {(first.id, beaten.id)}
    found, *_ = resolved(tmp_path, documents, edges, {equal.id: beaten.id})  # its check compares the outcomes
    assert found["removed"] == {beaten.id: first.id, equal.id: first.id}


def test_all_who_were_beaten_are_in_memory_by_ranges_however_few_equal_them(tmp_path: Path) -> None:
    documents = [Document("input", number, bytes([number] * 16), 5, (1,)) for number in range(62)]
    first, *beaten, equal = documents
    edges = {(first.id, one.id) for one in beaten}
    few, _, ran = resolved(tmp_path / "few", documents, edges, {equal.id: beaten[-1].id}, memory_bytes=4000)
    ranges = -(-len(beaten) * BEATEN.dtype.itemsize // 1000)
    assert sum(task.startswith("near_equal/") for task in ran) == ranges > 2
    assert few == resolved(tmp_path / "all", documents, edges, {equal.id: beaten[-1].id})[0]


def test_documents_of_an_index_represent_inputs_and_are_no_winners(tmp_path: Path) -> None:
    index = [Document("index", 0, bytes([number] * 16), 5, (1,)) for number in range(5)]
    inputs = [Document("input", 0, bytes([10 + number] * 16), 5, (1,), copies=2) for number in range(5)]
    edges = {(old.id, new.id) for old, new in zip(index, inputs, strict=True)}
    found, *_ = resolved(tmp_path, [*index, *inputs], edges, {})
    assert found["removed"] == {lo: hi for hi, lo in edges}
    assert found["copies"] == {}


def test_counts_say_what_was_removed_from_where(tmp_path: Path) -> None:
    def document(kind: Any, source: int, size: int, copies: int = 1) -> Document:
        return Document(kind, source, bytes([len(documents)]) * 16, size, (1,), copies)

    documents: list[Document] = []
    documents.append(document("input", 0, 50, copies=2))
    documents.append(document("input", 0, 40))
    documents.append(document("input", 1, 90, copies=7))
    documents.append(document("input", 1, 80))
    documents.append(document("input", 1, 70))
    documents.append(document("index", 5, 10))
    zero, one, two, three, four, index = (document.id for document in documents)
    edges = {(zero, one), (one, two), (zero, two), (index, three)}
    rng = random.Random(0)
    world = write_world(tmp_path, documents, rng, splits=2)
    verified = write_edges(tmp_path / "edges", numbered_edges(world, edges), rng, 2)
    equals = write_equal(tmp_path / "equal", world, {four: one}, rng)
    run = TaskFolders(tmp_path)
    decided, *_ = resolve(
        run, world.inputs, verified, equals, edges=4, equals=1, memory_bytes=1 << 20, indexed=1
    )
    assert asdict(decided) == {
        "edges": 4,
        "equal": 1,
        "losers": 4,
        "bytes": 40 + 90 + 80 + 70,
        "copies": 1 + 7 + 1 + 1,
        "kept_by_index": 1,
        "largest_group": 2 + 1 + 7 + 1,
        "groups": [0, 0, 0, 1, 0, 0],
        "sources": {
            "0": {"documents": 2, "losers": 1, "bytes": 40},
            "1": {"documents": 3, "losers": 3, "bytes": 240},
        },
    }


@pytest.mark.parametrize(
    ("documents", "edges", "tasks"),
    [
        (1000, 8, 10),
        (20, 60, 20),
        (200, 60, 27),
    ],  # ranges of a hundred numbers, of one, and of 100 bytes of rows
)
def test_tasks_of_a_round_hold_a_quarter_of_the_memory(
    tmp_path: Path, documents: int, edges: int, tasks: int
) -> None:
    rows: list[Edge] = [(0, number % (documents - 1) + 1, (0, 0, 0), 0.9) for number in range(edges)]
    run = TaskFolders(tmp_path)
    made = write_edges(tmp_path / "edges", rows, random.Random(0), 1)
    decided_edges(run, made, edges, documents, 400)
    assert sum(task.startswith("near-round-1/") for task in run.ran) == tasks


def test_edges_that_a_quarter_of_the_memory_holds_take_no_round(tmp_path: Path) -> None:
    rows: list[Edge] = [(0, number, (0, 0, 0), 0.9) for number in range(1, 30)]
    made = write_edges(tmp_path / "edges", rows, random.Random(0), 2)
    held = EDGES.dtype.itemsize * len(rows)
    for memory_bytes, rounds in ((4 * held, 0), (4 * held - 1, 1)):
        run = TaskFolders(tmp_path / str(memory_bytes))
        decided_edges(run, made, len(rows), 30, memory_bytes)
        assert len({task.split("/")[0] for task in run.ran if task.startswith("near-round-")}) == rounds


def test_more_edges_than_are_written_at_once_are_all_decided(tmp_path: Path) -> None:
    edges = np.zeros(CHUNK_ROWS + 3, EDGES.dtype)
    edges["lo"] = np.arange(1, len(edges) + 1)
    tables = {EDGES: edges, WAITING: edges["lo"].copy().view(WAITING.dtype)}
    made = write_rows(tmp_path / "made", tables, "made")
    [commit], count = decided_edges(TaskFolders(tmp_path), [made], len(edges), len(edges) + 1, 1 << 30)
    assert count == len(edges)
    beaten = read_run(commit.folder / BEATEN.file, BEATEN)
    assert np.array_equal(beaten["key"], edges["lo"])


@pytest.mark.parametrize("first", [0, 1])
def test_what_equals_a_document_that_stays_is_booked_on_it_whatever_its_number(
    tmp_path: Path, first: int
) -> None:
    both = [Document("input", 0, bytes([at] * 16), 5, (1,)) for at in range(2)]
    found, *_ = resolved(tmp_path, [both[first], both[1 - first]], set(), {both[1].id: both[0].id})
    assert found["removed"] == {both[1].id: both[0].id}


def test_who_was_beaten_in_the_last_round_beats_nobody_in_the_last_task(tmp_path: Path) -> None:
    edges = np.array([(1, 2, (0, 0, 0), 0.9), (3, 4, (0, 0, 0), 0.9)], EDGES.dtype)
    beaten = np.array([(1, 0, (0, 0, 0), 0.9)], BEATEN.dtype)
    made = write_rows(tmp_path / "made", {EDGES: edges, BEATEN: beaten}, "made")
    (tmp_path / "out").mkdir()
    slices = [slice_of(made.folder / table.file, table) for table in (EDGES, BEATEN)]
    decide_all(tmp_path / "out", slices[0], slices[1], 1 << 20)
    assert read_run(tmp_path / "out" / BEATEN.file, BEATEN)["key"].tolist() == [4]


def test_a_round_of_the_highest_numbers_takes_no_more_memory_than_of_the_lowest(tmp_path: Path) -> None:
    first = 1 << 50
    rows = np.array([(first + 1, first + 2, (0, 0, 0), 0.9)], EDGES.dtype)
    waiting = rows["lo"].copy().view(WAITING.dtype)
    tables = {EDGES: rows, WAITING: waiting, BEATEN: np.empty(0, BEATEN.dtype)}
    made = write_rows(tmp_path / "made", tables, "made")
    slices = [slice_of(made.folder / table.file, table).within(first, first + 4) for table in tables]
    (tmp_path / "out").mkdir()
    decide_round(tmp_path / "out", slices[0], slices[1], slices[2], 1 << 20)
    assert read_run(tmp_path / "out" / BEATEN.file, BEATEN)["key"].tolist() == [first + 2]


def test_without_documents_nobody_stands_for_any(tmp_path: Path) -> None:
    world = write_world(tmp_path, [], random.Random(0), splits=2)
    run, rng = TaskFolders(tmp_path), random.Random(0)
    verified = write_edges(tmp_path / "edges", [], rng, 1)
    equals = write_equal(tmp_path / "equal", world, {}, rng)
    decided, *_ = resolve(run, world.inputs, verified, equals, edges=0, equals=0, memory_bytes=1 << 20)
    assert (decided.largest_group, sum(decided.groups), decided.sources) == (0, 0, {})


@settings(max_examples=12, deadline=None)
@example(seed=1, documents=25, shape="chain", memory_bytes=500)
@given(
    seed=st.integers(0, 1 << 30),
    documents=st.integers(1, 25),
    shape=st.sampled_from(["random", "chain", "star", "clique", "dense"]),
    memory_bytes=st.sampled_from([500, 1 << 20]),
)
def test_rounds_decide_what_one_pass_by_priority_decides(
    tmp_path_factory: pytest.TempPathFactory, seed: int, documents: int, shape: str, memory_bytes: int
) -> None:
    rng = random.Random(seed)
    order = rng.sample(range(documents), documents)  # by priority; numbers say nothing about it
    every = list(combinations(order, 2))
    pairs = {
        "random": [pair for pair in every if rng.random() < 2 / documents],
        "chain": list(pairwise(order)),
        "star": [(order[0], other) for other in order[1:]],
        "clique": every,
        "dense": [pair for pair in every if rng.random() < 0.3],
    }[shape]
    priorities = {number: (0, at // 2, bytes([at])) for at, number in enumerate(order)}
    keys = {number: (0, at // 2, at) for at, number in enumerate(order)}
    folder = tmp_path_factory.mktemp("rounds")
    verified = write_edges(folder / "edges", [(hi, lo, keys[hi], 0.9) for hi, lo in pairs], rng, 3)
    run = TaskFolders(folder)
    commits, beaten = decided_edges(run, verified, len(pairs), documents, memory_bytes)
    rows = np.concatenate([read_run(commit.folder / BEATEN.file, BEATEN) for commit in commits])
    assert beaten == len(rows)
    best: dict[int, tuple[tuple[int, ...], int]] = {}
    for key, kept, priority, _ in rows.tolist():
        best[key] = min(best.get(key, ((9,), 0)), (tuple(priority), kept))
    assert {key: kept for key, (_, kept) in best.items()} == reference_resolve(priorities, pairs)
    rounds = {
        task.split("/")[0] for task in run.ran if task.startswith("near-round-") and "-merge-" not in task
    }
    assert len(rounds) <= documents + 1
    assert not rounds or memory_bytes == 500
    assert rounds or memory_bytes > 500 or len(pairs) < 4
