"""A batch of documents as filters read it: one UTF-8 buffer, the other columns, and cached word counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from shardkit.kernels.text_arrays import text_bytes, text_offsets
from shardkit.settings import WHITE_SPACE
from shardkit.writers.kernels.lines import LineStatistics, line_statistics
from shardkit.writers.kernels.word_statistics import WordStatistics, word_statistics
from shardkit.writers.rows.documents import metadata_values, numbers_of, with_metadata

if TYPE_CHECKING:
    from shardkit.writers.filters.spacy_words import SpacyWords

_PLAIN = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


def load_splitter(words: str) -> SpacyWords:
    """Load the spaCy splitter for a `words` setting such as `spacy:en`; not for `whitespace`."""
    from shardkit.writers.filters.spacy_words import spacy_words

    return spacy_words(words.partition(":")[2])


class TextBatch:
    """A batch of n documents with the columns of DOCUMENT_SCHEMA; editors replace their texts.

    `wanted`, bool[n], selects the documents to process. Statistics are computed for these only; documents may
    later be removed from `wanted`, but not added. `stop_words` is the list that `words` counts by default.
    `scores` maps names to float64[n], scores that the `scores` filter joined for use by later filters.
    `languages` is object[n], the labels that a language filter found, or None before one has run.
    """

    def __init__(self, documents: pa.RecordBatch, *, stop_words: tuple[str, ...] = ()) -> None:
        self._documents = documents
        self.wanted = np.ones(len(documents), np.bool_)
        self.languages: npt.NDArray[np.object_] | None = None
        self._stop_words = stop_words
        self.scores: dict[str, npt.NDArray[np.float64]] = {}
        self.set_texts(documents.column("text"))

    def __len__(self) -> int:
        return len(self.wanted)

    def set_texts(self, texts: pa.LargeStringArray) -> None:
        """Replace the texts and discard the statistics of the old ones."""
        if texts.type != pa.large_string() or texts.null_count:
            raise ValueError(
                f"texts must be large_string without nulls; got {texts.type} with {texts.null_count} nulls"
            )
        self.texts = texts
        self.offsets = text_offsets(texts)
        self.data = text_bytes(texts)
        self._words: dict[tuple[str, tuple[str, ...]], WordStatistics] = {}
        self._split: dict[str, tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]] = {}
        self._parts: dict[bytes, TextBatch] = {}

    @property
    def documents(self) -> pa.RecordBatch:
        """The documents with their texts as edited so far."""
        number = self._documents.schema.get_field_index("text")
        return self._documents.set_column(number, self._documents.schema.field(number), self.texts)

    def add_fields(self, fields: Mapping[str, Sequence[Any]]) -> None:
        """Add fields to the metadata of the wanted documents; `fields` has one value per document by name.

        Raises TypeError if a value is not plain data (JSON, NumPy scalars).
        """
        names = list(fields)
        added = [
            orjson.dumps(dict(zip(names, values, strict=True)), option=_PLAIN).decode() if wanted else None
            for wanted, *values in zip(self.wanted.tolist(), *fields.values(), strict=True)
        ]
        self._documents = with_metadata(self._documents, names, added)

    def numbers(self, name: str) -> npt.NDArray[np.float64]:
        """Return float64[n], the scores or the values of a metadata field called `name`; NaN: no number."""
        if name in self.scores:
            return self.scores[name]
        return numbers_of(metadata_values(self._documents.column("metadata"), name))

    def part(self, rows: npt.NDArray[np.int64]) -> TextBatch:
        """Return the documents at these row numbers as a batch of their own, cached until texts change."""
        key = rows.tobytes()
        if key not in self._parts:
            taken = self.documents.take(pa.array(rows))
            self._parts[key] = TextBatch(taken, stop_words=self._stop_words)
        self._parts[key].wanted = self.wanted[rows]
        return self._parts[key]

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """int64[n], the size of each text in UTF-8 bytes."""
        return np.diff(self.offsets)

    def wanted_texts(self) -> tuple[npt.NDArray[np.int64], pa.LargeStringArray]:
        """Return the row numbers and the texts of the wanted documents."""
        rows = np.flatnonzero(self.wanted)
        return rows, self.texts if len(rows) == len(self) else self.texts.take(pa.array(rows))

    def column(self, name: str) -> list[Any]:
        """Return a column of the documents, such as url or metadata, as Python values."""
        values: list[Any] = self._documents.column(name).to_pylist()
        return values

    def words(self, stop_words: tuple[str, ...] | None = None, splitter: str = WHITE_SPACE) -> WordStatistics:
        """Return cached statistics of the words of `splitter`; `stop_words` replaces the batch's list."""
        key = splitter, self._stop_words if stop_words is None else stop_words
        if key not in self._words:
            found = word_statistics(*self.split(splitter), self.wanted, key[1])
            if splitter != WHITE_SPACE:  # take only the counts of words; other counts need the original text
                of_text = self.words(key[1])
                names = ("words", "plain_words", "plain_word_characters", "letter_words", "stop_words")
                found = replace(of_text, **{name: getattr(found, name) for name in names})
            self._words[key] = found
        return self._words[key]

    def split(self, splitter: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """Return UTF-8 data and offsets of the texts, with white space between the words of `splitter`."""
        if splitter == WHITE_SPACE:
            return self.data, self.offsets
        if splitter not in self._split:
            self._split[splitter] = load_splitter(splitter).split(self.data, self.offsets, self.wanted)
        return self._split[splitter]

    def lines(self, short_line_length: int) -> LineStatistics:
        """Return line statistics; lines of at most `short_line_length` characters count as short."""
        return line_statistics(self.data, self.offsets, self.wanted, short_line_length=short_line_length)
