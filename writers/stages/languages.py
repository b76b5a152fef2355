"""The language of each document, from the filter that found it to the counts of documents and tokens.

A recipe's language filter labels every document that passes it; the label describes the text at that point,
before later steps edit it. Cleaning a split stores the labels of its kept documents in LANGUAGES_FILE, codes
uint16[n] in the order of documents.arrow, and the label of each code in its commit. Tokenizing counts the
documents and tokens left after duplicate removal by language.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.writers.dedup.population import LANGUAGE_CODE, LanguageLabels
from shardkit.writers.dedup.tables import RowsWriter

LANGUAGES_FILE = "languages.npy"
_COLUMN = "language"


class LanguageFile:
    """Writes the languages of a split's documents as codes; `labels[c]` is the label of code c."""

    def __init__(self, path: Path) -> None:
        self._rows = RowsWriter(path, LANGUAGE_CODE)
        self._codes: dict[str, int] = {}

    def __enter__(self) -> LanguageFile:
        self._rows.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rows.__exit__(kind, error, trace)

    @property
    def labels(self) -> list[str]:
        """The labels, in the order in which they first occurred."""
        return list(self._codes)

    def write(self, labels: npt.NDArray[np.object_]) -> None:
        """Append the labels of a batch."""
        codes = [self._codes.setdefault(label, len(self._codes)) for label in labels.tolist()]
        self._rows.write(np.array(codes, LANGUAGE_CODE))


class LanguageCounts:
    """Counts the documents of a split, and their tokens, by language."""

    def __init__(self, languages: LanguageLabels) -> None:
        self._labels, self._codes = languages.labels, languages.read()
        self._documents = np.zeros(len(self._labels), np.int64)
        self._tokens = np.zeros(len(self._labels), np.int64)

    def beside(self, batch: pa.RecordBatch, start: int) -> pa.RecordBatch:
        """Return the batch, whose first row is `start`, with its language codes as a further column."""
        return batch.append_column(_COLUMN, pa.array(self._codes[start : start + batch.num_rows]))

    def labels_of(self, batch: pa.RecordBatch) -> list[str]:
        """Return the language label of each document in a batch that has the column from `beside`."""
        return [self._labels[code] for code in batch.column(_COLUMN).to_pylist()]

    def count(self, batch: pa.RecordBatch, lengths: npt.NDArray[np.int64], *, repeated: bool = False) -> None:
        """Count a batch of remaining documents with `lengths` tokens; it has the column from `beside`.

        Of `repeated` documents, which were counted before, only the tokens count.
        """
        codes = batch.column(_COLUMN).to_numpy()
        if not repeated:
            self._documents += np.bincount(codes, minlength=len(self._labels))
        self._tokens += np.bincount(codes, lengths, len(self._labels)).astype(np.int64)

    def to_dict(self) -> dict[str, dict[str, int]]:
        """Return counts of documents and tokens by label, without labels that have no documents left."""
        counts = zip(self._labels, self._documents.tolist(), self._tokens.tolist(), strict=True)
        return {label: {"documents": n, "tokens": tokens} for label, n, tokens in counts if n}


def add_languages(parts: Iterable[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    """Add up results of `LanguageCounts.to_dict`; the language with the most tokens comes first."""
    documents: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for part in parts:
        documents.update({label: counts["documents"] for label, counts in part.items()})
        tokens.update({label: counts["tokens"] for label, counts in part.items()})
    order = sorted(tokens, key=lambda label: (-tokens[label], label))
    return {label: {"documents": documents[label], "tokens": tokens[label]} for label in order}
