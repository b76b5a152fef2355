"""The population: all documents that near-duplicate removal compares, with numbers that all stages use.

A *part* is a folder of files with one row per document, in the same order. It has the documents of a split of
the inputs, or of a part of another corpus's index. Documents are numbered consecutively over all parts
(`number`), inputs first. A number identifies a document; it never decides which of two documents is kept.
Priority decides: documents of an index come before all others, then the lowest source, the longest text, the
lowest content rank (rows/documents.py).

    documents.npy    DOCUMENT, one row per document of the part
    prints.once.npy  uint8[n, permutations]: a byte of each value of the signature, for hubs (hubs.py)
    bands.once.npy   uint64[n, bands]: the keys of the signature's bands, which differ between groups (scope)
    equal_keys.run   EQUAL_KEYS (signatures.py): the hash of the normalized words

The last three go with their last reader, unless an index is made of the part.

A part of an index has documents.npy with rows of INDEXED, prints.npy and sketches.bin (index.py). Only the
rows of documents in candidate pairs are read of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, overload

import numpy as np
import numpy.typing as npt

from shardkit.writers.dedup.tables import Rows
from shardkit.writers.execution.artifacts import Artifact, Files
from shardkit.writers.execution.stage import Stage

DOCUMENTS_FILE = "documents.npy"
PRINTS_FILE = "prints.once.npy"
INDEX_PRINTS = "prints.npy"
BANDS_FILE = "bands.once.npy"

DOCUMENT = np.dtype(
    [
        ("id", "u1", (16,)),  # the content rank
        ("row", "<i8"),  # row in the split's documents.arrow
        ("bytes", "<i8"),  # size of the UTF-8 text
        ("copies", "<i4"),  # number of documents with exactly this text, this one included
        ("source", "<i4"),
    ]
)
INDEXED = np.dtype(
    [
        ("id", "u1", (16,)),  # as in DOCUMENT
        ("start", "<i8"),  # place of the coded n-grams in sketches.bin
        ("size", "<u4"),  # bytes of the coded n-grams
        ("bytes", "<u4"),  # size of the UTF-8 text; at most 2^32 - 1
        ("stored", "<u4"),  # number of coded n-grams; a sketch has fewer than the document
        ("distinct", "<u4"),  # distinct n-grams in the whole document
        ("total", "<u4"),  # n-grams with repetitions; at most 2^32 - 1
    ]
)
PAIR = np.dtype([("a", "<u8"), ("b", "<u8")])  # two document numbers, a < b


_Value = TypeVar("_Value", bound=np.generic)
LANGUAGE_CODE = np.uint16  # wide enough for models with several thousand language labels


RowFiles = tuple[Artifact, ...]
"""The rows.npy of each step that rewrote the documents, in order: int64[n], each document's former row."""


def in_rows(values: npt.NDArray[_Value], rows: RowFiles) -> npt.NDArray[_Value]:
    """Return the values of the remaining documents; `values` has those before the steps that wrote `rows`."""
    for file in rows:
        values = values[Rows(file, np.int64).read()]
    return values


@dataclass(frozen=True, slots=True)
class LanguageLabels:
    """The languages of a split's documents, stored as a file of codes (writers/stages/languages.py).

    `labels[code]` is the language label of a code; `rows` map the remaining documents to rows of `codes`.
    """

    codes: Artifact
    labels: tuple[str, ...]
    rows: RowFiles = ()

    def read(self) -> npt.NDArray[np.uint16]:
        """Return the language code of each remaining document, uint16[n]."""
        codes: npt.NDArray[np.uint16] = Rows(self.codes, LANGUAGE_CODE).read()
        return in_rows(codes, self.rows)


@dataclass(frozen=True, slots=True)
class SplitDocuments:
    """The documents of one split: the name of its tasks, the Arrow file, and its size."""

    name: str
    documents: Artifact
    bytes: int
    languages: LanguageLabels | None = None  # None unless documents are compared within their language


Kind = Literal["input", "index"]


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the population: a folder with the tables of `documents` documents."""

    folder: Artifact
    documents: int
    kind: Kind = "input"

    @property
    def prints(self) -> Artifact:
        """The file with the prints of the documents."""
        return self.folder / (PRINTS_FILE if self.kind == "input" else INDEX_PRINTS)


@dataclass(frozen=True)
class Population:
    """All parts in order: first the parts of the splits, `inputs` in number, then the parts of indexes.

    `starts`, int64[parts + 1], has the number of each part's first document; its last element is the total
    number of documents.
    """

    parts: Sequence[Part]
    starts: npt.NDArray[np.int64]
    inputs: int

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Self:
        """Make the population of these parts, with their documents numbered consecutively."""
        kinds: list[Kind] = [part.kind for part in parts]
        assert kinds == sorted(kinds, key=("input", "index").index), kinds
        documents = [0, *(part.documents for part in parts)]
        return cls(parts, np.cumsum(documents, dtype=np.int64), kinds.count("input"))

    @property
    def indexed(self) -> range:
        """The range of document numbers that belong to indexes."""
        return range(int(self.starts[self.inputs]), int(self.starts[-1]))

    def count(self, kind: Kind) -> int:
        """Return the number of documents of this kind (input or index)."""
        return self.indexed.start if kind == "input" else len(self.indexed)

    def locate(self, numbers: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return (part, row in that part) of each document number."""
        numbers = numbers.astype(np.int64)
        parts = np.searchsorted(self.starts, numbers, side="right") - 1
        return parts, numbers - self.starts[parts]


PARTS_FILE = "parts.npy"
STARTS_FILE = "starts.npy"


def write_parts(folder: Path, parts: Sequence[tuple[str, int]], indexed: Sequence[int]) -> None:
    """Write the folder names of the splits' parts, and the number of the first document of every part.

    `parts` has (folder name, number of documents) per split, `indexed` the documents in each index part.
    """
    names = [name.encode() for name, _ in parts]
    np.save(folder / PARTS_FILE, np.array(names, f"S{max([1, *map(len, names)])}"))
    starts = np.cumsum([0, *(documents for _, documents in parts), *indexed], dtype=np.int64)
    np.save(folder / STARTS_FILE, starts)


PARTS = Stage("parts", "near-duplicates", write_parts, cost=0.1)


class _StoredParts(Sequence[Part]):
    """The parts of the splits, read from memory-mapped tables that processes share, and then `others`."""

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


@dataclass(frozen=True)
class PopulationFile:
    """A population as a task argument whose size does not grow with the number of splits.

    `names` and `starts` are the files from `write_parts`; `folder` contains the folders of the splits' parts,
    and `others` are the parts of indexes. `content` is a digest of the contents of all parts. `prints` are
    the files with the prints of the splits' parts, for the driver; with `goes`, no later task reads them.
    """

    names: Artifact
    starts: Artifact
    folder: Artifact
    others: tuple[Part, ...]
    content: str
    prints: Files | None = None
    goes: bool = field(default=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"prints": None}

    @property
    def consumed(self) -> tuple[Files, ...]:
        """The files that go with the last task that this is an argument of."""
        return (self.prints,) if self.goes and self.prints is not None else ()

    def load(self) -> Population:
        """Return the population, with memory-mapped tables; a process caches the one that it loaded last."""
        global _loaded
        key = str(self.names), self.others
        if _loaded is None or _loaded[0] != key:
            names, starts = (np.load(file.local(), mmap_mode="r") for file in (self.names, self.starts))
            parts = _StoredParts(names, starts, self.folder, self.others)
            _loaded = key, Population(parts, starts, len(names))
        return _loaded[1]


_loaded: tuple[tuple[str, tuple[Part, ...]], Population] | None = None


def priority(documents: npt.NDArray[np.void], kind: Kind) -> npt.NDArray[np.uint64]:
    """Return the priorities of rows of DOCUMENT or INDEXED as sort keys, uint64[n, 3]; the lowest key wins.

    The columns are: the source (0 for an index) with the inverted text length, and the two halves of the
    content rank. Documents that are compared differ in their words, so their texts and keys differ, too.
    """
    keys = np.empty((len(documents), 3), np.uint64)
    sources = documents["source"].astype(np.int64) + 1 if kind == "input" else np.zeros(len(documents), "<i8")
    size = documents["bytes"].astype(np.int64)
    lengths = (1 << 40) - 1 - np.clip(size, 0, (1 << 40) - 1)  # never 2^40: bits of `source`
    keys[:, 0] = sources.astype(np.uint64) << np.uint64(40) | lengths.astype(np.uint64)
    keys[:, 1:] = np.ascontiguousarray(documents["id"]).view(">u8").reshape(-1, 2)
    return keys
