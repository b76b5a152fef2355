"""The documents that near-duplicate removal compares, numbered through: what the stages agree on.

A *part* is a folder of files with one row a document, in the same order: a split of the inputs, planted
copies, or an index of another corpus. Documents are numbered through all parts (`number`); a number is a
handle and never decides who wins. Priority does: documents of an index come before all others, then the
lowest source, the longest text, the lowest content rank (writers/documents.py); planted copies come last.

    documents.npy    DOCUMENT, as many rows as the part has documents
    signatures.npy   uint32[n, permutations]
    keys.run         KEYS (shardkit.writers.dedup.exact): the hash of the normalized words
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import orjson

from shardkit.writers.execution.artifacts import Artifact

__all__ = [
    "DOCUMENT",
    "DOCUMENTS_FILE",
    "PAIR",
    "PARTS_FILE",
    "SIGNATURES_FILE",
    "Part",
    "Population",
    "PopulationFile",
    "SplitDocuments",
    "priority",
    "write_parts",
]

DOCUMENTS_FILE = "documents.npy"
SIGNATURES_FILE = "signatures.npy"

DOCUMENT = np.dtype(
    [
        ("id", "u1", (16,)),  # the content rank; the document id in indexes that older versions made
        ("row", "<i8"),  # in the split's documents.arrow
        ("bytes", "<i8"),  # of UTF-8 text
        ("copies", "<i4"),  # documents with the very same text, this one included
        ("source", "<i4"),
    ]
)
PAIR = np.dtype([("a", "<u8"), ("b", "<u8")])  # two numbers, a < b


@dataclass(frozen=True, slots=True)
class SplitDocuments:
    """The documents of one split: the name of its tasks, the Arrow file, and the digest of that."""

    name: str
    documents: Artifact
    digest: str
    bytes: int


Kind = Literal["input", "planted", "index"]


@dataclass(frozen=True, slots=True)
class Part:
    """One folder of documents. `digest` names its files: what a task that reads them depends on."""

    folder: Artifact
    documents: int
    kind: Kind = "input"
    digest: str = ""


@dataclass(frozen=True)
class Population:
    """All parts in order: inputs (one a split, in the order of splits), then planted copies, then indexes."""

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        kinds = [part.kind for part in self.parts]
        assert kinds == sorted(kinds, key=("input", "planted", "index").index), kinds

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """int64[parts + 1]: the number of each part's first document; the last is the number of documents."""
        return np.cumsum([0, *(part.documents for part in self.parts)], dtype=np.int64)

    def count(self, *kinds: Kind) -> int:
        """Documents of these kinds."""
        return sum(part.documents for part in self.parts if part.kind in kinds)

    @property
    def planted(self) -> range:
        """The numbers of planted copies."""
        first = self.count("input")
        return range(first, first + self.count("planted"))

    @property
    def indexed(self) -> range:
        """The numbers of the documents of indexes."""
        first = self.count("input", "planted")
        return range(first, first + self.count("index"))

    def locate(self, numbers: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(part, row in the part) of each number."""
        numbers = numbers.astype(np.int64)
        parts = np.searchsorted(self.starts, numbers, side="right") - 1
        return parts, numbers - self.starts[parts]


PARTS_FILE = "parts.json"


def write_parts(folder: Path, parts: Sequence[tuple[str, int, str]]) -> dict[str, int]:
    """Write (name of the folder, documents, name of the texts) of the splits' parts, for `PopulationFile`."""
    (folder / PARTS_FILE).write_bytes(orjson.dumps(parts))
    return {}


@dataclass(frozen=True, slots=True)
class PopulationFile:
    """A population as an argument of tasks, of a size that does not grow with the number of splits.

    `parts` is what `write_parts` wrote; `inputs` is the folder of those folders, `texts` that of the splits'
    documents; `others` are the parts that follow the splits'.
    """

    parts: Artifact
    inputs: Artifact
    texts: Artifact
    others: tuple[Part, ...] = ()

    def load(self) -> Population:
        """The population; a process keeps the one that it read last."""
        global _loaded
        key = str(self.parts), self.others
        if _loaded is None or _loaded[0] != key:
            inputs = [Part(self.inputs / name, documents) for name, documents, _ in self._read()]
            _loaded = key, Population((*inputs, *self.others))
        return _loaded[1]

    def documents(self, splits: npt.NDArray[np.integer[Any]]) -> dict[int, Artifact]:
        """The Arrow files of these splits."""
        names = self._read()
        return {split: self.texts / names[split][2] for split in np.unique(splits).tolist()}

    def _read(self) -> list[tuple[str, int, str]]:
        read: list[tuple[str, int, str]] = orjson.loads((self.parts / PARTS_FILE).read_bytes())
        return read


_loaded: tuple[tuple[str, tuple[Part, ...]], Population] | None = None


def priority(documents: npt.NDArray[np.void], kind: Kind) -> npt.NDArray[np.uint64]:
    """uint64[n, 3]: rows of DOCUMENT as keys that sort the highest priority first.

    (source and inverse length, first half of the content rank, second half). No two of the documents that are
    compared have equal ones: their words differ, so their texts do.
    """
    first = {"input": 1, "planted": 1 << 20, "index": 0}[kind]
    keys = np.empty((len(documents), 3), np.uint64)
    sources = np.full(len(documents), first) if kind != "input" else documents["source"].astype(np.int64) + 1
    lengths = (1 << 40) - 1 - np.clip(documents["bytes"], 0, (1 << 40) - 1)  # never into the source's bits
    keys[:, 0] = sources.astype(np.uint64) << np.uint64(40) | lengths.astype(np.uint64)
    keys[:, 1:] = np.ascontiguousarray(documents["id"]).view(">u8").reshape(-1, 2)
    return keys
