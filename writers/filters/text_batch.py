"""The documents of a batch as filters see them: one UTF-8 buffer, other columns, and shared counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.writers.documents import text_offsets
from shardkit.writers.kernels.lines import LineStatistics, line_statistics
from shardkit.writers.kernels.word_statistics import WordStatistics, word_statistics

__all__ = ["TextBatch"]


class TextBatch:
    """Texts of a large_string array without nulls, and the columns of the documents they are from.

    `wanted` tells which documents are to be looked at; counts are made for those only and stay good while
    documents only leave. `stop_words` are those counted unless a filter asks for others.
    """

    def __init__(
        self,
        texts: pa.LargeStringArray,
        *,
        columns: pa.RecordBatch | None = None,
        stop_words: tuple[str, ...] = (),
    ) -> None:
        self.columns = columns
        self.wanted = np.ones(len(texts), np.bool_)
        self._stop_words = stop_words
        self.set_texts(texts)

    def __len__(self) -> int:
        return len(self.wanted)

    def set_texts(self, texts: pa.LargeStringArray) -> None:
        """Put other texts in the place of those that were; what was counted is forgotten."""
        if texts.type != pa.large_string() or texts.null_count:
            raise ValueError(f"texts must be large_string without nulls, these are {texts.type}")
        data = texts.buffers()[2]
        self.texts = texts
        self.offsets = text_offsets(texts)
        self.data: npt.NDArray[np.uint8] = (
            np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(1, np.uint8)
        )
        self._words: dict[tuple[str, ...], WordStatistics] = {}

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """int64[n]: bytes of each text."""
        return np.diff(self.offsets)

    def column(self, name: str) -> list[Any]:
        """A column of the documents (url, metadata, …) as Python values; Nones if there is none."""
        if self.columns is None:
            return [None] * len(self)
        values: list[Any] = self.columns.column(name).to_pylist()
        return values

    def words(self, stop_words: tuple[str, ...] | None = None) -> WordStatistics:
        """Counts of words; with these distinct stop words, if any are given."""
        key = self._stop_words if stop_words is None else stop_words
        if key not in self._words:
            self._words[key] = word_statistics(self.data, self.offsets, self.wanted, key)
        return self._words[key]

    def lines(self, short_line_length: int) -> LineStatistics:
        """Counts of lines."""
        return line_statistics(self.data, self.offsets, self.wanted, short_line_length=short_line_length)
