"""Decides removals: a document goes if and only if a kept document of higher priority verifies against it.

An edge leads from the document of higher priority to the other one. The result is the lexicographically first
maximal independent set, which is unique, so documents can be decided in any order: a document is kept as soon
as none of its incoming edges is from a kept or an undecided document. There is no transitive closure.

    round         range of numbers: the edges from its documents, and what the previous round decided about
                  these. A kept document removes its neighbors, edges from removed documents are dropped, and
                  edges from undecided documents go to the next round, with a row that makes their targets
                  wait.
    near          the remaining edges fit one task, which decides each document after its predecessors
    near_equal    range of numbers: a document whose words equal another's (`equal`) is a duplicate of it, or
                  of the document that it is a duplicate of
    near_lost     part: removed documents, each with the kept document of highest priority that removes it
    near_kept     part: how many documents each kept one represents

Every edge from a kept document becomes a BEATEN row in some round, so these rows record both which documents
are removed and what they are duplicates of. A round decides all neighbors of the documents that it keeps:
versions of a page take two rounds, a chain of n documents takes n. Rounds end as soon as the edges fit one
task. A task holds one byte per number of its range, or the removed documents of its range or part, and
streams the rest.

    losers.npy     NEAR_LOSER by (split, row): removed documents of an input
    winners.npy    WINNER_DTYPE by (split, row): kept documents of an input that represent several
    outcomes.run   OUTCOMES: both for the tasks of their splits
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from shardkit.kernels.numba_support import Bools, Int64s, kernel
from shardkit.writers.dedup.outcomes import OUTCOMES, count_groups, document_keys, outcomes
from shardkit.writers.dedup.population import DOCUMENT, DOCUMENTS_FILE, Part
from shardkit.writers.dedup.tables import CHUNK_ROWS, Rows
from shardkit.writers.dedup.verify import EDGES, WAITING
from shardkit.writers.exchange.exchange import RunWriter, Slice, Table, Unread, exchange
from shardkit.writers.exchange.sorted_runs import DEFAULT_LIMITS, Limits
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.digests import DecidesNoByte, MemoryBytes
from shardkit.writers.execution.stage import RunTasks, Stage

LOSERS_FILE = "losers.npy"

WINNERS_FILE = "winners.npy"

NEAR_LOSER = np.dtype(
    [
        ("split", "<i4"),
        ("row", "<i8"),
        ("bytes", "<i8"),
        ("kept", "<u8"),  # number of the kept document that it duplicates
        ("copies", "<i4"),  # documents with exactly this text, this one included
    ]
)

WINNER_DTYPE = np.dtype([("split", "<i4"), ("row", "<i8"), ("copies", "<i4")])  # copies: itself included

# key: a removed document; kept: a kept document that verifies against it, with its priority; their similarity
BEATEN = Table(
    "beaten.run",
    np.dtype([("key", "<u8"), ("kept", "<u8"), ("priority", "<u8", (3,)), ("jaccard", "<f4")]),
)

# loser: a document removed for equal words; key: the document with the same words, with its content rank
EQUALS = Table("equals.run", np.dtype([("key", "<u8"), ("loser", "<u8"), ("rank", "<u8", (2,))]))

GAINED = Table("gained.run", np.dtype([("key", "<u8"), ("copies", "<i8")]), packed=0.25)

_WAITS, _BEATEN = 1, 2

_DECIDING = 4  # memory of edges in `decide_all`, as a multiple of their bytes in memory

_U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Decided:
    """Rows that a task wrote: `edges` from documents that are not decided yet, and `beaten` ones."""

    edges: int
    beaten: int


def decided_edges(
    run: RunTasks,
    verified: Sequence[Commit],
    written: int,
    documents: int,
    memory_bytes: int,
    limits: Limits = DEFAULT_LIMITS,
    stages: Resolving | None = None,
) -> tuple[list[Commit], int]:
    """Run the rounds and stage `near`, from the edges that tasks have `written` in all.

    Returns commits whose BEATEN rows are all edges from kept documents, and the number of these rows.
    """
    stages = NEAR_RESOLVING if stages is None else stages
    edges, found, last = list(verified), list[Commit](), list[Commit]()
    move = partial(exchange, run, end=documents, limits=limits)
    number, left, beaten_rows, total = 0, written, 0, 0
    while True:
        held = left * EDGES.dtype.itemsize + beaten_rows * BEATEN.dtype.itemsize
        if not left or held * _DECIDING <= memory_bytes:
            break
        number += 1
        stage, ranges = stages.round.step(str(number)), _ranges(held, documents, memory_bytes)
        moved = [
            move(stage, table, commits, readers=len(ranges), consumed=table is not BEATEN)
            for table, commits in ((EDGES, edges), (WAITING, edges), (BEATEN, last))
        ]
        tasks = []
        for start, stop in ranges:
            own, waiting, beaten = pieces = [rows.slice(start, stop) for rows in moved]
            weight = sum(piece.bytes for piece in pieces)
            tasks.append(stage.task(f"{start:012d}", weight, own, waiting, beaten, memory_bytes))
        [edges] = run(tasks)
        counts = [stage.result(commit) for commit in edges]
        left, beaten_rows = sum(one.edges for one in counts), sum(one.beaten for one in counts)
        last, total = edges, total + beaten_rows
        found += edges
    rest = move(stages.rest, EDGES, edges, readers=1).slice(0, documents)
    beaten = move(stages.rest, BEATEN, last, readers=1, consumed=False).slice(0, documents)
    made = stages.rest.task(stages.rest.name, 0, rest, beaten, memory_bytes, Unread.of(WAITING, edges))
    [[finished]] = run([made])
    return [*found, finished], total + stages.rest.result(finished).beaten


def range_count(rows_bytes: int, documents: int, memory_bytes: int) -> int:
    """Return the least number of ranges of document numbers such that the rows of a range, and one byte per
    number in it, fit a quarter of the memory."""
    return max(1, -(-max(rows_bytes, documents) // (memory_bytes // 4)))


def _ranges(rows_bytes: int, documents: int, memory_bytes: int) -> list[tuple[int, int]]:
    """Divide the document numbers into `range_count` ranges."""
    count = range_count(rows_bytes, documents, memory_bytes)
    edges = [documents * at // count for at in range(count + 1)]
    return [(start, stop) for start, stop in pairwise(edges) if start < stop]


def decide_round(
    folder: Path, edges: Slice, waiting: Slice, beaten: Slice, memory_bytes: MemoryBytes
) -> Decided:
    """Decide documents of one range; write the edges from undecided ones, and BEATEN rows for kept ones."""
    some, counts = memory_bytes // 8, Decided(0, 0)
    states = np.zeros(edges.stop - edges.start, np.uint8)
    for told, mark in ((waiting, _WAITS), (beaten, _BEATEN)):
        for rows, _ in told.stream(some):
            states[(rows["key"] - np.uint64(edges.start)).astype(np.int64)] = mark
    with (
        RunWriter(folder / EDGES.file, EDGES, memory_bytes=some) as left,
        RunWriter(folder / WAITING.file, WAITING, memory_bytes=some) as waits,
        RunWriter(folder / BEATEN.file, BEATEN, memory_bytes=some) as decided,
    ):
        for rows, _ in edges.stream(some):
            state = states[(rows["key"] - np.uint64(edges.start)).astype(np.int64)]
            open_ = rows[state == _WAITS]
            left.write(open_)
            waits.write(np.unique(open_["lo"]).view(WAITING.dtype))
            gone = _beaten(rows[state == 0])
            decided.write(gone)
            counts = Decided(counts.edges + len(open_), counts.beaten + len(gone))
    return counts


NEAR_ROUND = Stage("near-round", "near-duplicates", decide_round)


def _beaten(edges: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    rows = np.empty(len(edges), BEATEN.dtype)
    rows["key"], rows["kept"] = edges["lo"], edges["key"]
    rows["priority"], rows["jaccard"] = edges["priority"], edges["jaccard"]
    return rows


def decide_all(
    folder: Path,
    edges: Slice,
    beaten: Slice,
    memory_bytes: MemoryBytes,
    waiting: Annotated[Unread | None, DecidesNoByte("not read: all documents are decided here")] = None,
) -> Decided:
    """Decide all remaining documents in memory; write a BEATEN row for each edge from a kept document."""
    rows, _ = edges.read()
    numbers = np.union1d(rows["key"], rows["lo"])
    winners, losers = (np.searchsorted(numbers, rows[side]) for side in ("key", "lo"))
    removed = np.zeros(len(numbers), np.bool_)
    for told, _ in beaten.stream(memory_bytes // 8):
        removed[np.isin(numbers, told["key"])] = True
    starts = np.searchsorted(winners, np.arange(len(numbers) + 1))
    decided = _decide(starts, losers, np.bincount(losers, minlength=len(numbers)), removed)
    assert decided == len(numbers), "the edges contain a cycle"
    stays = rows[~removed[winners]]
    with RunWriter(folder / BEATEN.file, BEATEN, memory_bytes=memory_bytes // 8) as writer:
        for start in range(0, len(stays), CHUNK_ROWS):
            writer.write(_beaten(stays[start : start + CHUNK_ROWS]))
    return Decided(0, len(stays))


NEAR = Stage("near", "near-duplicates", decide_all, cost=1)


@kernel
def _decide(starts: Int64s, losers: Int64s, waits_for: Int64s, removed: Bools) -> int:
    """Mark removed documents; edges starts[i]:starts[i + 1] lead from document i.

    A document is decided when all documents with an edge to it are decided. Returns the number of decided
    documents.
    """
    ready = np.empty(len(removed), np.int64)
    count = 0
    for document in range(len(removed)):
        if waits_for[document] == 0:
            ready[count] = document
            count += 1
    done = 0
    while done < count:
        winner = ready[done]
        done += 1
        for edge in range(starts[winner], starts[winner + 1]):
            loser = losers[edge]
            if not removed[winner]:
                removed[loser] = True
            waits_for[loser] -= 1
            if waits_for[loser] == 0:
                ready[count] = loser
                count += 1
    return done


def _booked(beaten: Slice, memory_bytes: int) -> npt.NDArray[np.void]:
    """Return one BEATEN row per removed document: the row whose kept document has the highest priority."""
    found = [np.empty(0, BEATEN.dtype)]
    for rows, _ in beaten.stream(memory_bytes):
        found.append(_first(rows))
    return _first(np.concatenate(found))


def _first(rows: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    priority = rows["priority"]
    rows = rows[np.lexsort((priority[:, 2], priority[:, 1], priority[:, 0], rows["key"]))]
    new = np.ones(len(rows), np.bool_)
    new[1:] = rows["key"][1:] != rows["key"][:-1]
    first: npt.NDArray[np.void] = rows[new]
    return first


def follow_equal(folder: Path, equals: Slice, beaten: Slice, memory_bytes: MemoryBytes) -> None:
    """Write a BEATEN row for each document that was removed because another one has the same words.

    Its kept document is this other one or, if that was removed as well, the document kept for that.
    """
    booked = np.append(_booked(beaten, memory_bytes // 8), np.zeros(1, BEATEN.dtype))
    booked["key"][-1] = 0xFFFFFFFFFFFFFFFF
    with RunWriter(folder / BEATEN.file, BEATEN, memory_bytes=memory_bytes // 8) as writer:
        for rows, _ in equals.stream(memory_bytes // 8):
            found = booked[np.searchsorted(booked["key"], rows["key"])]
            is_kept = found["key"] != rows["key"]
            turned = np.zeros(len(rows), BEATEN.dtype)
            turned["key"] = rows["loser"]
            turned["kept"] = np.where(is_kept, rows["key"], found["kept"])
            turned["priority"][:, 1:] = np.where(is_kept[:, None], rows["rank"], found["priority"][:, 1:])
            turned["jaccard"] = np.where(is_kept, 1.0, found["jaccard"])
            writer.write(turned)


NEAR_EQUAL = Stage("near_equal", "near-duplicates", follow_equal, cost=0.2)


@dataclass(frozen=True, slots=True)
class Lost:
    """Removed documents of a part: their number, bytes and exact copies, and (documents, bytes) by source.

    `kept_by_index` counts those that duplicate a document of an index. Keys of `sources` are numbers as text.
    """

    losers: int
    bytes: int
    copies: int
    kept_by_index: int
    sources: Mapping[str, tuple[int, int]]


def kept_in_index(numbers: _U64) -> _U64:
    """Return what OUTCOMES has in place of the content rank of documents of indexes, uint64[n, 2].

    `numbers` are over all indexes. An index may contain the documents of these inputs, from an earlier build,
    so these are no content ranks, which lead to documents of inputs.
    """
    ranks = np.empty((len(numbers), 2), np.uint64)
    ranks[:, 0] = ~numbers
    ranks[:, 1] = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return ranks


def write_lost(
    folder: Path, part: Part, number: int, beaten: Slice, indexed: int, memory_bytes: MemoryBytes
) -> Lost:
    """Write the removed documents of a part; documents numbered `indexed` or higher belong to indexes."""
    booked = _booked(beaten, memory_bytes // 8)
    documents = Rows(part.folder / DOCUMENTS_FILE, DOCUMENT).read() if len(booked) else np.empty(0, DOCUMENT)
    documents = documents[(booked["key"] - np.uint64(beaten.start)).astype(np.int64)]
    rows = np.empty(len(booked), NEAR_LOSER)
    rows["split"], rows["kept"] = number, booked["kept"]
    for name in ("row", "bytes", "copies"):
        rows[name] = documents[name]
    np.save(folder / LOSERS_FILE, rows, allow_pickle=False)
    with (
        RunWriter(folder / OUTCOMES.file, OUTCOMES, memory_bytes=memory_bytes // 8) as decided,
        RunWriter(folder / GAINED.file, GAINED, memory_bytes=memory_bytes // 8) as gained,
    ):
        keys = document_keys(rows["split"], rows["row"])
        is_indexed = rows["kept"] >= indexed
        ranks = booked["priority"][:, 1:].copy()
        ranks[is_indexed] = kept_in_index(rows["kept"][is_indexed] - np.uint64(indexed))
        decided.write(outcomes(keys, bytes=rows["bytes"], kept=ranks, similarity=booked["jaccard"]))
        gains = np.empty(int((~is_indexed).sum()), GAINED.dtype)
        gains["key"], gains["copies"] = rows["kept"][~is_indexed], rows["copies"][~is_indexed]
        gained.write(gains)
    return Lost(
        losers=len(rows),
        bytes=int(rows["bytes"].sum()),
        copies=int(rows["copies"].sum(dtype=np.int64)),
        kept_by_index=int(is_indexed.sum()),
        sources={source: (len(own), int(own["bytes"].sum())) for source, own in _by_source(documents)},
    )


NEAR_LOST = Stage("near_lost", "near-duplicates", write_lost, cost=0.6)


def _by_source(documents: npt.NDArray[np.void]) -> Iterator[tuple[str, npt.NDArray[np.void]]]:
    for source in np.unique(documents["source"]).tolist():
        yield str(source), documents[documents["source"] == source]


@dataclass(frozen=True, slots=True)
class Kept:
    """Kept documents of a part. `groups` counts the kept documents of inputs by the classes of GROUP_SIZES.

    `largest_group` is the most documents that one represents; `sources` counts compared documents by source.
    """

    largest_group: int
    groups: Sequence[int]
    sources: Mapping[str, int]


def write_kept(
    folder: Path, part: Part, number: int, losers: Artifact, gained: Slice, memory_bytes: MemoryBytes
) -> Kept:
    """Write the kept documents of a part that represent several; its removed ones are in file `losers`."""
    documents = Rows(part.folder / DOCUMENTS_FILE, DOCUMENT).read()
    own = documents["copies"].astype(np.int64)
    for rows, _ in gained.stream(memory_bytes // 8):
        np.add.at(own, (rows["key"] - np.uint64(gained.start)).astype(np.int64), rows["copies"])
    kept = ~np.isin(documents["row"], Rows(losers, NEAR_LOSER).read()["row"], assume_unique=True)
    largest = int(own[kept].max(initial=0))
    several = np.flatnonzero(kept & (own > 1))
    assert largest <= np.iinfo(np.int32).max
    winners = np.empty(len(several), WINNER_DTYPE)
    winners["split"], winners["row"], winners["copies"] = number, documents["row"][several], own[several]
    np.save(folder / WINNERS_FILE, winners, allow_pickle=False)
    with RunWriter(folder / OUTCOMES.file, OUTCOMES, memory_bytes=memory_bytes // 8) as decided:
        keys = document_keys(winners["split"], winners["row"])
        decided.write(outcomes(keys, copies=winners["copies"]))
    sources = {source: len(rows) for source, rows in _by_source(documents)}
    return Kept(largest, count_groups(own[kept]), sources)


NEAR_KEPT = Stage("near_kept", "near-duplicates", write_kept, cost=0.6)


@dataclass(frozen=True)
class Resolving:
    """The stages that decide: the rounds, the `rest` in memory, and the documents `lost` and `kept`."""

    round: Stage[[Slice, Slice, Slice, int], Decided]
    rest: Stage[[Slice, Slice, int, Unread | None], Decided]
    lost: Stage[[Part, int, Slice, int, int], Lost]
    kept: Stage[[Part, int, Artifact, Slice, int], Kept]

    @classmethod
    def of(cls, name: str, title: str) -> Resolving:
        """Return the stages `<name>_decide`, `<name>_lost` and `<name>_kept` of another scheme."""
        return cls(
            Stage(f"{name}_decide-round", title, decide_round),
            Stage(f"{name}_decide", title, decide_all, cost=1),
            Stage(f"{name}_lost", title, write_lost, cost=0.6),
            Stage(f"{name}_kept", title, write_kept, cost=0.6),
        )

    @property
    def all(self) -> Sequence[Stage[..., Any]]:
        """The stages in order, without rounds, whose number depends on the data."""
        return self.rest, self.lost, self.kept


NEAR_RESOLVING = Resolving(NEAR_ROUND, NEAR, NEAR_LOST, NEAR_KEPT)


@dataclass(frozen=True)
class Resolved:
    """Totals of near-duplicate removal: the removed documents (`losers`), their `bytes` and exact `copies`.

    `equal` counts documents removed for equal words, `kept_by_index` losers that duplicate a document of an
    index. `groups` counts kept documents of inputs by the classes of GROUP_SIZES, `largest_group` is the most
    documents that one represents, exact copies and itself included. `sources` has the compared documents, the
    losers and their bytes by source number, which is a string as in JSON.
    """

    edges: int
    equal: int
    losers: int
    bytes: int
    copies: int
    kept_by_index: int
    largest_group: int
    groups: list[int]
    sources: Mapping[str, Mapping[str, int]]

    @classmethod
    def of(cls, lost: Sequence[Commit], kept: Sequence[Commit], *, edges: int, equal: int) -> Resolved:
        """Sum the results of the tasks of all parts."""
        removed = [NEAR_LOST.result(commit) for commit in lost]
        stay = [NEAR_KEPT.result(commit) for commit in kept]
        sources: dict[str, dict[str, int]] = {}
        for one in stay:
            for source, documents in one.sources.items():
                counts = sources.setdefault(source, {"documents": 0, "losers": 0, "bytes": 0})
                counts["documents"] += documents
        for each in removed:
            for source, (losers, size) in each.sources.items():
                sources[source]["losers"] += losers
                sources[source]["bytes"] += size
        return cls(
            edges=edges,
            equal=equal,
            losers=sum(part.losers for part in removed),
            bytes=sum(part.bytes for part in removed),
            copies=sum(part.copies for part in removed),
            kept_by_index=sum(part.kept_by_index for part in removed),
            largest_group=max((one.largest_group for one in stay), default=0),
            groups=[sum(counts) for counts in zip(*(one.groups for one in stay), strict=True)],
            sources={source: sources[source] for source in sorted(sources, key=int)},
        )


def resolve(
    run: RunTasks,
    parts: Sequence[Part],
    verified: Sequence[Commit],
    equal: Sequence[Commit],
    *,
    edges: int,
    equals: int,
    memory_bytes: int,
    indexed: int = 0,
    limits: Limits = DEFAULT_LIMITS,
    stages: Resolving = NEAR_RESOLVING,
) -> tuple[Resolved, list[Commit], list[Commit]]:
    """Decide which documents are removed, from `edges` rows in `verified` and `equals` rows in `equal`.

    `parts` are those of the inputs; `indexed` documents of indexes have the numbers after theirs. Without
    `equal`, stage `near_equal` does not run: no document was removed for equal words. Returns the totals, and
    one commit with removed documents and one with kept documents per part.
    """
    starts = np.cumsum([0, *(part.documents for part in parts)], dtype=np.int64).tolist()
    end = starts[-1]
    decided, rows = decided_edges(run, verified, edges, end + indexed, memory_bytes, limits, stages)
    move = partial(exchange, run, end=end, limits=limits)
    held = max(equals * EQUALS.dtype.itemsize, rows * BEATEN.dtype.itemsize)
    ranges = _ranges(held, end, memory_bytes) if equal else []
    same = move(NEAR_EQUAL, EQUALS, equal, readers=len(ranges))
    beaten = move(NEAR_EQUAL, BEATEN, decided if equal else (), readers=len(ranges), consumed=False)
    tasks = []
    for start, stop in ranges:
        pieces = same.slice(start, stop), beaten.slice(start, stop)
        tasks.append(NEAR_EQUAL.task(f"{start:012d}", 0, *pieces, memory_bytes))
    [followed] = run(tasks) if tasks else [[]]
    beaten = move(stages.lost, BEATEN, [*decided, *followed], readers=len(parts))
    tasks = []
    for number, part in enumerate(parts):
        own = beaten.slice(starts[number], starts[number + 1])
        args = part, number, own, end, memory_bytes
        tasks.append(stages.lost.task(f"{number:06d}", part.documents, *args))
    [lost] = run(tasks)
    gained = move(stages.kept, GAINED, lost, readers=len(parts))
    tasks = []
    for number, part in enumerate(parts):
        own = gained.slice(starts[number], starts[number + 1])
        losers = lost[number].file(LOSERS_FILE)
        tasks.append(
            stages.kept.task(f"{number:06d}", part.documents, part, number, losers, own, memory_bytes)
        )
    [kept] = run(tasks)
    return Resolved.of(lost, kept, edges=edges, equal=equals), lost, kept
