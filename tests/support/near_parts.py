"""Made documents with signatures and band keys, as the parts of a population on disk and as plain data."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from reference.near import ReferenceDocument
from shardkit.hashing import digest_of
from shardkit.writers.dedup.bands import BANDS
from shardkit.writers.dedup.population import (
    DOCUMENT,
    DOCUMENTS_FILE,
    Kind,
    Part,
    Population,
    priority,
)
from shardkit.writers.dedup.signatures import print_bytes
from shardkit.writers.exchange.exchange import RunWriter
from shardkit.writers.execution.artifacts import Artifact


@dataclass(frozen=True)
class Made:
    """One document that has a signature instead of a text."""

    id: bytes
    signature: tuple[int, ...]
    bytes: int = 100
    source: int = 0
    kind: Kind = "input"
    band_rows: int = field(default=5, repr=False)

    @property
    def keys(self) -> list[int]:
        """One 64-bit key for each band of `band_rows` values."""
        values, rows = self.signature, self.band_rows
        return [
            int(digest_of([first, values[first : first + rows]])[:16], 16)
            for first in range(0, len(values) - rows + 1, rows)
        ]

    def row(self) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        made = np.zeros(1, DOCUMENT)
        made["id"], made["bytes"], made["source"] = np.frombuffer(self.id, np.uint8), self.bytes, self.source
        return made

    def reference(self) -> ReferenceDocument:
        key = tuple(priority(self.row(), self.kind)[0].tolist())
        return ReferenceDocument(self.signature, key, self.kind, self.keys)


def near_signature(rng: random.Random, base: Sequence[int], similarity: float) -> tuple[int, ...]:
    """Each value is that of `base` with this probability, else any other."""
    return tuple(value if rng.random() < similarity else rng.getrandbits(32) for value in base)


def clusters(
    seed: int,
    sizes: Sequence[int],
    similarity: float,
    *,
    permutations: int,
    kinds: Sequence[Kind] = ("input",),
) -> list[Made]:
    """Documents around random centers; values agree with the center's with probability `similarity`."""
    rng = random.Random(seed)
    made = []
    for size in sizes:
        base = tuple(rng.getrandbits(32) for _ in range(permutations))
        for _ in range(size):
            signature = near_signature(rng, base, similarity)
            kind = rng.choice(kinds)
            made.append(Made(rng.randbytes(16), signature, rng.randrange(1, 4), rng.randrange(2), kind))
    rng.shuffle(made)
    return made


def write_parts(folder: Path, documents: Sequence[Made], cuts: int) -> tuple[Population, list[Made]]:
    """The documents cut into parts of one kind each, up to `cuts` a kind; and the documents by number."""
    kinds: tuple[Kind, ...] = ("input", "index")
    parts: list[Part] = []
    ordered: list[Made] = []
    for kind in kinds:
        mine = [one for one in documents if one.kind == kind]
        for cut in range(cuts):
            some = mine[cut::cuts]
            place = folder / f"{kind}-{cut}"
            place.mkdir(parents=True)
            part = Part(Artifact(place), len(some), kind)
            write_part(part, some, len(documents[0].signature), len(ordered))
            parts.append(part)
            ordered += some
    return Population.of(parts), ordered


def write_part(part: Part, documents: Sequence[Made], permutations: int, first: int) -> None:
    """Write a part, and its run of BANDS; `first` is the number of its first document."""
    folder = part.folder.path
    rows = [one.row() for one in documents]
    np.save(folder / DOCUMENTS_FILE, np.concatenate([np.zeros(0, DOCUMENT), *rows]))
    table = np.array([one.signature for one in documents], np.uint32).reshape(-1, permutations)
    np.save(part.prints.path, print_bytes(table))
    with RunWriter(folder / BANDS.file, BANDS, memory_bytes=1 << 20) as run:
        for number, one in enumerate(documents, first):
            run.write(np.array([(key, number) for key in one.keys], BANDS.dtype))
