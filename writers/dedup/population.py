"""The documents that near-duplicate removal compares, numbered through: what the stages agree on.

A *part* is a folder of files with one row a document, in the same order: a split of the inputs, or an index
of another corpus. Documents are numbered through all parts (`number`); a number is a
handle and never decides who wins. Priority does: documents of an index come before all others, then the
lowest source, the longest text, the lowest content rank (writers/documents.py).

    documents.npy    DOCUMENT, as many rows as the part has documents
    signatures.npy   uint32[n, permutations]
    keys.run         KEYS (shardkit.writers.dedup.exact): the hash of the normalized words
    groups.npy       uint64[n], with a scope of language or field: documents are compared where it is the same
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from shardkit.writers.dedup.tables import Rows
from shardkit.writers.execution.artifacts import Artifact

__all__ = [
    "DOCUMENT",
    "DOCUMENTS_FILE",
    "GROUPS_FILE",
    "LANGUAGE_CODE",
    "PAIR",
    "PARTS_FILE",
    "SIGNATURES_FILE",
    "Kind",
    "LanguageLabels",
    "Part",
    "Population",
    "PopulationFile",
    "SplitDocuments",
    "priority",
    "write_parts",
]

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


LANGUAGE_CODE = np.uint16  # models have up to some thousands of labels


@dataclass(frozen=True, slots=True)
class LanguageLabels:
    """Where the languages of a split's documents lie (writers/languages.py).

    `labels` are what `codes` stand for; `rows` leads from documents left after line dedup to their codes.
    """

    codes: Artifact
    labels: tuple[str, ...]
    rows: Artifact | None = None

    def read(self) -> npt.NDArray[np.uint16]:
        """The codes, two bytes a document."""
        codes: npt.NDArray[np.uint16] = Rows(self.codes, LANGUAGE_CODE).read()
        return codes if self.rows is None else codes[Rows(self.rows, np.int64).read()]


@dataclass(frozen=True, slots=True)
class SplitDocuments:
    """The documents of one split: the name of its tasks, the Arrow file, and the digest of what is read."""

    name: str
    documents: Artifact
    digest: str
    bytes: int
    languages: LanguageLabels | None = None  # where documents are compared by language


Kind = Literal["input", "index"]


@dataclass(frozen=True, slots=True)
class Part:
    """One folder of documents. `digest` names its files: what a task that reads them depends on."""

    folder: Artifact
    documents: int
    kind: Kind = "input"
    digest: str = ""


@dataclass(frozen=True)
class Population:
    """All parts in order: inputs (one a split, in the order of splits), then indexes."""

    parts: Sequence[Part]

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """int64[parts + 1]: the number of each part's first document; the last is the number of documents."""
        stored = self.parts.documents if isinstance(self.parts, _StoredParts) else None
        documents = [part.documents for part in self.parts] if stored is None else stored
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(documents, dtype=np.int64)])

    @cached_property
    def _inputs(self) -> int:
        """The number of parts that are of inputs."""
        others = self.parts.others if isinstance(self.parts, _StoredParts) else self.parts
        kinds: list[Kind] = [part.kind for part in others]
        assert kinds == sorted(kinds, key=("input", "index").index), kinds
        return len(self.parts) - kinds.count("index")

    def numbers(self, kind: Kind) -> range:
        """The numbers of the documents of a kind."""
        parts = self.parts_of(kind)
        return range(int(self.starts[parts.start]), int(self.starts[parts.stop]))

    def count(self, kind: Kind) -> int:
        """Documents of a kind."""
        return len(self.numbers(kind))

    def parts_of(self, kind: Kind) -> range:
        """The parts of a kind."""
        return range(self._inputs) if kind == "input" else range(self._inputs, len(self.parts))

    @property
    def indexed(self) -> range:
        """The numbers of the documents of indexes."""
        return self.numbers("index")

    def locate(self, numbers: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(part, row in the part) of each number."""
        numbers = numbers.astype(np.int64)
        parts = np.searchsorted(self.starts, numbers, side="right") - 1
        return parts, numbers - self.starts[parts]


PARTS_FILE = "parts.npy"


def write_parts(folder: Path, parts: Sequence[tuple[str, int, str]]) -> dict[str, int]:
    """Write (name of the folder, documents, name of the texts) of the splits' parts, for `PopulationFile`."""
    folders = [folder.encode() for folder, _, _ in parts]
    texts = [text.encode() for _, _, text in parts]
    widths = [max([1, *map(len, names)]) for names in (folders, texts)]
    table = np.empty(
        len(parts), [("folder", f"S{widths[0]}"), ("texts", f"S{widths[1]}"), ("documents", "<i8")]
    )
    table["folder"], table["texts"] = folders, texts
    table["documents"] = [documents for _, documents, _ in parts]
    np.save(folder / PARTS_FILE, table)
    return {}


class _StoredParts(Sequence[Part]):
    """Parts of splits in a mapped table, of which the processes of a machine hold one copy, and others."""

    def __init__(self, table: npt.NDArray[np.void], folder: Artifact, others: tuple[Part, ...]) -> None:
        self._table, self._folder, self.others = table, folder, others

    @property
    def documents(self) -> npt.NDArray[np.int64]:
        """int64[parts]."""
        return np.concatenate([self._table["documents"], np.array([p.documents for p in self.others], "<i8")])

    def __len__(self) -> int:
        return len(self._table) + len(self.others)

    @overload
    def __getitem__(self, number: int) -> Part: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Part]: ...
    def __getitem__(self, number: int | slice) -> Part | Sequence[Part]:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        if number >= len(self._table):
            return self.others[number - len(self._table)]
        row = self._table[number]
        return Part(self._folder / row["folder"].decode(), int(row["documents"]))


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
            _loaded = key, Population(_StoredParts(self._table(), self.inputs, self.others))
        return _loaded[1]

    def documents(self, splits: npt.NDArray[np.integer[Any]]) -> dict[int, Artifact]:
        """The Arrow files of these splits."""
        table = self._table()
        return {split: self.texts / table["texts"][split].decode() for split in np.unique(splits).tolist()}

    def _table(self) -> npt.NDArray[np.void]:
        table: npt.NDArray[np.void] = np.load((self.parts / PARTS_FILE).local(), mmap_mode="r")
        return table


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
