"""The texts of a batch as the filters see them: one UTF-8 buffer, offsets, and counts made once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.writers.documents import text_offsets
from shardkit.writers.filters.line_statistics import LineStatistics, line_statistics
from shardkit.writers.filters.word_statistics import WordStatistics, word_statistics

__all__ = ["TextBatch"]


class TextBatch:
    """Texts of a large_string array without nulls.

    `wanted` tells which documents are still alive; counts are made for those only and stay good while
    documents only die. `stop_words` are those counted unless a filter asks for others.
    """

    def __init__(self, texts: pa.LargeStringArray, *, stop_words: tuple[str, ...] = ()) -> None:
        if texts.type != pa.large_string() or texts.null_count:
            raise ValueError(f"texts must be large_string without nulls, these are {texts.type}")
        data = texts.buffers()[2]
        self.offsets = text_offsets(texts)
        self.data: npt.NDArray[np.uint8] = (
            np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(1, np.uint8)
        )
        self.wanted = np.ones(len(texts), np.bool_)
        self._stop_words = stop_words
        self._words: dict[tuple[str, ...], WordStatistics] = {}

    def __len__(self) -> int:
        return len(self.wanted)

    def words(self, stop_words: tuple[str, ...] | None = None) -> WordStatistics:
        """Counts of words; with these distinct stop words, if any are given."""
        key = self._stop_words if stop_words is None else stop_words
        if key not in self._words:
            self._words[key] = word_statistics(self.data, self.offsets, self.wanted, key)
        return self._words[key]

    def lines(self, short_line_length: int) -> LineStatistics:
        """Counts of lines."""
        return line_statistics(self.data, self.offsets, self.wanted, short_line_length=short_line_length)
