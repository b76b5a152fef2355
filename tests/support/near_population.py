"""Populations of made-up documents on disk, as the stages of near-duplicate removal find them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardkit.writers.dedup.blocks import PLACES
from shardkit.writers.dedup.pairs import PairWriter
from shardkit.writers.dedup.population import (
    DOCUMENT,
    DOCUMENTS_FILE,
    Kind,
    Part,
    Population,
    priority,
)
from shardkit.writers.dedup.shingle_store import SHINGLES, TextRuns, distinct_sets, set_rows
from shardkit.writers.dedup.tables import Rows, RowsWriter
from shardkit.writers.exchange.exchange import exchange
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.commit import Commit
from support.task_folders import TaskFolders, commit_folder

KINDS: tuple[Kind, ...] = ("input", "index")
Pair = tuple[int, int]


@dataclass(frozen=True)
class Document:
    """A document as the stages after the signatures see it."""

    kind: Kind
    source: int
    id: bytes
    text_bytes: int
    shingles: tuple[int, ...]  # with repetitions
    copies: int = 1

    @property
    def priority(self) -> tuple[int, int, bytes]:
        """Sorts the highest first; said here again, independently of population.priority."""
        first = -1 if self.kind == "index" else self.source
        return first, -self.text_bytes, self.id


@dataclass(frozen=True)
class World:
    """Documents in parts: `documents[n]` is the one numbered n."""

    population: Population
    documents: list[Document]
    smallest: int | None

    @property
    def inputs(self) -> list[Part]:
        """The parts with documents of inputs."""
        return list(self.population.parts[: self.population.inputs])


def make_documents(rng: random.Random, count: int, *, families: int, size: int = 30) -> list[Document]:
    """Documents of some families: those of one family share most n-grams; kinds and sources are mixed."""
    seeds = [[rng.getrandbits(64) for _ in range(size)] for _ in range(families)]
    documents = []
    for _ in range(count):
        own = list(rng.choice(seeds))
        for _ in range(rng.choice([0, 0, 1, 2, 3, 5, 10])):
            own[rng.randrange(size)] = rng.getrandbits(64)
        kind = rng.choices(KINDS, [11, 1])[0]
        # Few lengths, so that ids decide often.
        documents.append(
            Document(
                kind, rng.randrange(3), rng.randbytes(16), rng.randrange(3), tuple(own), rng.choice([1, 1, 4])
            )
        )
    return documents


def write_world(
    folder: Path,
    documents: Sequence[Document],
    rng: random.Random,
    *,
    splits: int,
    smallest: int | None = None,
) -> World:
    """Put documents into parts in a random way; index documents keep `smallest` hashes."""
    parts: list[Part] = []
    numbered: list[Document] = []
    for kind, count in zip(KINDS, (splits, 2), strict=True):
        members: list[list[Document]] = [[] for _ in range(count)]
        some = [document for document in documents if document.kind == kind]
        for document in rng.sample(some, len(some)):
            rng.choice(members).append(document)
        for own in members:
            place = folder / f"part{len(parts)}"
            place.mkdir(parents=True)
            _write_documents(place, own, rng)
            parts.append(Part(Artifact(place, content=str(place)), len(own), kind))
            numbered += own
    return World(Population.of(parts), numbered, smallest)


def _write_documents(folder: Path, documents: Sequence[Document], rng: random.Random) -> None:
    rows = np.zeros(len(documents), DOCUMENT)
    for at, document in enumerate(documents):
        rows[at]["id"] = np.frombuffer(document.id, np.uint8)
        rows[at]["bytes"], rows[at]["copies"], rows[at]["source"] = (
            document.text_bytes,
            document.copies,
            document.source,
        )
        rows[at]["row"] = 2 * at + rng.randrange(2)  # some rows were left out before
    with RowsWriter(folder / DOCUMENTS_FILE, DOCUMENT) as writer:
        writer.write(rows)


def allowed(world: World, a: int, b: int) -> bool:
    """Whether the two may be a pair: one of them is an input's document."""
    return "input" in (world.documents[a].kind, world.documents[b].kind)


def write_pairs(folder: Path, pairs: Iterable[Pair], rng: random.Random, *, tasks: int) -> list[Commit]:
    """Commits of candidates tasks: pairs are divided among them, and some go into several."""
    members: list[list[Pair]] = [[] for _ in range(tasks)]
    for pair in pairs:
        for own in rng.sample(members, rng.choice([1, 1, min(2, tasks)])):
            own.append(pair)
    commits = []
    for number, found in enumerate(members):
        rng.shuffle(found)
        place = folder / f"candidates{number}"
        place.mkdir(parents=True)
        entries = np.array(found, np.uint64).reshape(-1, 2)
        with PairWriter(place, 1 << 20, run_pairs=rng.choice([100, 5000])) as writer:
            writer.add(entries[:, 0], entries[:, 1])
        commits.append(commit_folder(place, "candidates", str(number)))
    return commits


def write_text_runs(
    folder: Path, world: World, blocks: Sequence[Commit], *, memory_bytes: int
) -> list[Commit]:
    """Commits of a shingles task a part, for the documents in the pairs of these blocks."""
    commits, count = [], len(world.documents)
    places = exchange(
        TaskFolders(folder), SHINGLES, PLACES, blocks, readers=len(world.population.parts), end=count
    )
    for at, part in enumerate(world.population.parts):
        start, stop = world.population.starts[at : at + 2].tolist()
        place = folder / f"shingles{at}"
        place.mkdir(parents=True)
        with TextRuns(place, places.slice(start, stop), memory_bytes=memory_bytes) as runs:
            described = Rows(part.folder / DOCUMENTS_FILE, DOCUMENT).read()
            for number in runs.numbers.tolist():
                hashes = np.array(world.documents[number].shingles, np.uint64)
                smallest = world.smallest if part.kind == "index" else None
                edges = np.array([0, len(hashes)])
                stored, payload = set_rows(
                    distinct_sets(np.array([number], np.uint64), hashes, edges, smallest)
                )
                stored["priority"] = priority(described[[number - start]], part.kind)
                runs.write(stored, payload)
        commits.append(commit_folder(place, "shingles", str(at)))
    return commits


def priorities_of(world: World, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """uint64[n, 3]: `population.priority` of these documents."""
    described = [
        priority(Rows(part.folder / DOCUMENTS_FILE, DOCUMENT).read(), part.kind)
        for part in world.population.parts
    ]
    found: npt.NDArray[np.uint64] = np.concatenate(described)[numbers.astype(np.int64)]
    return found
