"""The documents that near-duplicate removal compares, numbered through: what the stages agree on.

A *part* is a folder of files with one row a document, in the same order: a split of the inputs, or an index
of another corpus. Documents are numbered through all parts (`number`); a number is a
handle and never decides who wins. Priority does: documents of an index come before all others, then the
lowest source, the longest text, the lowest content rank (rows/documents.py).

    documents.npy    DOCUMENT, as many rows as the part has documents
    signatures.npy   uint32[n, permutations]
    keys.run         KEYS (shardkit.writers.dedup.exact): the hash of the normalized words
    groups.npy       uint64[n], with a scope of language or field: documents are compared where it is the same
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, TypeVar, overload

import numpy as np
import numpy.typing as npt

from shardkit.writers.dedup.tables import Rows
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.stage import Stage

DOCUMENTS_FILE = "documents.npy"
SIGNATURES_FILE = "signatures.npy"
GROUPS_FILE = "groups.npy"

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


_Value = TypeVar("_Value", bound=np.generic)
LANGUAGE_CODE = np.uint16  # models have up to some thousands of labels


RowFiles = tuple[Artifact, ...]
"""Files of steps that wrote documents anew, in their order: int64[n], the former row of each document."""


def in_rows(values: npt.NDArray[_Value], rows: RowFiles) -> npt.NDArray[_Value]:
    """Return the values of the documents that are left; `values` are those of the documents before `rows`."""
    for file in rows:
        values = values[Rows(file, np.int64).read()]
    return values


@dataclass(frozen=True, slots=True)
class LanguageLabels:
    """Where the languages of a split's documents lie (writers/stages/languages.py).

    `labels` are what `codes` stand for; `rows` lead from the documents that are left to their codes.
    """

    codes: Artifact
    labels: tuple[str, ...]
    rows: RowFiles = ()

    def read(self) -> npt.NDArray[np.uint16]:
        """The codes, two bytes a document."""
        codes: npt.NDArray[np.uint16] = Rows(self.codes, LANGUAGE_CODE).read()
        return in_rows(codes, self.rows)


@dataclass(frozen=True, slots=True)
class SplitDocuments:
    """The documents of one split: the name of its tasks, the Arrow file, and its size."""

    name: str
    documents: Artifact
    bytes: int
    languages: LanguageLabels | None = None  # where documents are compared by language


Kind = Literal["input", "index"]


@dataclass(frozen=True, slots=True)
class Part:
    """One folder of documents."""

    folder: Artifact
    documents: int
    kind: Kind = "input"


@dataclass(frozen=True)
class Population:
    """All parts in order: first `inputs`, one a split, in the order of splits; then those of indexes.

    `starts`, int64[parts + 1], are the number of each part's first document; the last is the number of
    documents.
    """

    parts: Sequence[Part]
    starts: npt.NDArray[np.int64]
    inputs: int

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Self:
        """Number the documents of these parts."""
        kinds: list[Kind] = [part.kind for part in parts]
        assert kinds == sorted(kinds, key=("input", "index").index), kinds
        documents = [0, *(part.documents for part in parts)]
        return cls(parts, np.cumsum(documents, dtype=np.int64), kinds.count("input"))

    @property
    def indexed(self) -> range:
        """The numbers of the documents of indexes."""
        return range(int(self.starts[self.inputs]), int(self.starts[-1]))

    def count(self, kind: Kind) -> int:
        """Count the documents of a kind."""
        return self.indexed.start if kind == "input" else len(self.indexed)

    def locate(self, numbers: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return (part, row in the part) of each number."""
        numbers = numbers.astype(np.int64)
        parts = np.searchsorted(self.starts, numbers, side="right") - 1
        return parts, numbers - self.starts[parts]


PARTS_FILE = "parts.npy"
STARTS_FILE = "starts.npy"


def write_parts(folder: Path, parts: Sequence[tuple[str, int]], indexed: Sequence[int]) -> None:
    """Write the names of the folders of the splits' parts, and where the numbers of all parts start.

    `parts` has (name, documents) of each, `indexed` the documents of each part of an index.
    """
    names = [name.encode() for name, _ in parts]
    np.save(folder / PARTS_FILE, np.array(names, f"S{max([1, *map(len, names)])}"))
    starts = np.cumsum([0, *(documents for _, documents in parts), *indexed], dtype=np.int64)
    np.save(folder / STARTS_FILE, starts)


PARTS = Stage("parts", "near-duplicates", write_parts, cost=0.1)


class _StoredParts(Sequence[Part]):
    """Parts of splits in mapped tables, of which the processes of a machine hold one copy, and others."""

    def __init__(
        self,
        names: npt.NDArray[np.bytes_],
        starts: npt.NDArray[np.int64],
        folder: Artifact,
        others: Sequence[Part],
    ) -> None:
        self._names, self._starts, self._folder, self._others = names, starts, folder, others

    def __len__(self) -> int:
        return len(self._names) + len(self._others)

    @overload
    def __getitem__(self, number: int) -> Part: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Part]: ...
    def __getitem__(self, number: int | slice) -> Part | Sequence[Part]:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        if number >= len(self._names):
            return self._others[number - len(self._names)]
        documents = int(self._starts[number + 1] - self._starts[number])
        return Part(self._folder / self._names[number].decode(), documents)


@dataclass(frozen=True, slots=True)
class PopulationFile:
    """A population as an argument of tasks, of a size that does not grow with the number of splits.

    `names` and `starts` are what `write_parts` wrote; `folder` is the folder of the splits' parts, `others`
    are the parts that follow these. `content` names all of their files.
    """

    names: Artifact
    starts: Artifact
    folder: Artifact
    others: tuple[Part, ...]
    content: str

    def load(self) -> Population:
        """Map the population; a process keeps the one that it read last."""
        global _loaded
        key = str(self.names), self.others
        if _loaded is None or _loaded[0] != key:
            names, starts = (np.load(file.local(), mmap_mode="r") for file in (self.names, self.starts))
            parts = _StoredParts(names, starts, self.folder, self.others)
            _loaded = key, Population(parts, starts, len(names))
        return _loaded[1]


_loaded: tuple[tuple[str, tuple[Part, ...]], Population] | None = None


def priority(documents: npt.NDArray[np.void], kind: Kind) -> npt.NDArray[np.uint64]:
    """uint64[n, 3]: rows of DOCUMENT as keys that sort the highest priority first.

    (source and inverse length, first half of the content rank, second half). No two of the documents that are
    compared have equal ones: their words differ, so their texts do.
    """
    keys = np.empty((len(documents), 3), np.uint64)
    sources = documents["source"].astype(np.int64) + 1 if kind == "input" else np.zeros(len(documents), "<i8")
    lengths = (1 << 40) - 1 - np.clip(documents["bytes"], 0, (1 << 40) - 1)  # never into the source's bits
    keys[:, 0] = sources.astype(np.uint64) << np.uint64(40) | lengths.astype(np.uint64)
    keys[:, 1:] = np.ascontiguousarray(documents["id"]).view(">u8").reshape(-1, 2)
    return keys
