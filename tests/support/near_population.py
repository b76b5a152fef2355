"""Populations of made-up documents on disk, as the stages of near-duplicate removal find them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardkit.writers.dedup.candidates import PAIR_RUNS_FILE, PAIRS_FILE
from shardkit.writers.dedup.population import DOCUMENT, DOCUMENTS_FILE, PAIR, Kind, Part, Population
from shardkit.writers.dedup.shingle_store import ShingleWriter
from shardkit.writers.dedup.tables import RowsWriter
from shardkit.writers.execution.artifacts import Artifact

KINDS: tuple[Kind, ...] = ("input", "planted", "index")
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
        first = {"input": self.source, "planted": 1 << 30, "index": -1}[self.kind]
        return first, -self.text_bytes, self.id


@dataclass(frozen=True)
class World:
    """Documents in parts: `documents[n]` is the one numbered n."""

    population: Population
    documents: list[Document]
    shingle_folders: list[Path]


def make_documents(rng: random.Random, count: int, *, families: int, size: int = 30) -> list[Document]:
    """Documents of some families: those of one family share most n-grams; kinds and sources are mixed."""
    seeds = [[rng.getrandbits(64) for _ in range(size)] for _ in range(families)]
    documents = []
    for _ in range(count):
        own = list(rng.choice(seeds))
        for _ in range(rng.choice([0, 0, 1, 2, 3, 5, 10])):
            own[rng.randrange(size)] = rng.getrandbits(64)
        kind = rng.choices(KINDS, [10, 1, 1])[0]
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
    shingles: list[Path] = []
    for kind, count in zip(KINDS, (splits, 1, 2), strict=True):
        members: list[list[Document]] = [[] for _ in range(count)]
        some = [document for document in documents if document.kind == kind]
        for document in rng.sample(some, len(some)):
            rng.choice(members).append(document)
        for own in members:
            place = folder / f"part{len(parts)}"
            place.mkdir(parents=True)
            _write_documents(place, own, rng)
            with ShingleWriter(place, smallest=smallest if kind == "index" else None) as writer:
                for number, document in enumerate(own, len(numbered)):
                    hashes = np.array(document.shingles, np.uint64)
                    writer.write(np.array([number], np.uint64), hashes, np.array([0, len(hashes)]))
            parts.append(Part(Artifact(place), len(own), kind))
            numbered += own
            shingles.append(place)
    return World(Population(tuple(parts)), numbered, shingles)


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


def write_pairs(
    folder: Path, pairs: Iterable[Pair], rng: random.Random, *, tasks: int, run_pairs: int
) -> list[Path]:
    """Divide pairs among tasks, some into several of them, and each task's among sorted runs."""
    members: list[list[Pair]] = [[] for _ in range(tasks)]
    for pair in pairs:
        for own in rng.sample(members, rng.choice([1, 1, min(2, tasks)])):
            own.append(pair)
    folders = []
    for number, own in enumerate(members):
        rng.shuffle(own)
        place = folder / f"candidates{number}"
        place.mkdir(parents=True)
        runs = [sorted(own[at : at + run_pairs]) for at in range(0, len(own), run_pairs)]
        entries = np.array([pair for run in runs for pair in run], np.uint64).reshape(-1, 2)
        (place / PAIRS_FILE).write_bytes(entries.astype("<u8").tobytes())
        assert entries.itemsize * 2 == PAIR.itemsize
        with RowsWriter(place / PAIR_RUNS_FILE, "<i8") as writer:
            writer.write(np.cumsum([0, *(len(run) for run in runs)], dtype=np.int64))
        folders.append(place)
    return folders
