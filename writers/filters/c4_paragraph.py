"""mC4's rule about paragraphs: datatrove's C4ParagraphFilter, decision for decision.

Source: Xue et al. 2021, as implemented in `c4_filters.py`, where a "paragraph" is what lies between newlines,
blank or not. (datatrove names the reason "< 3 paragraphs".)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numba
import numpy as np

from shardkit.writers.filters.c4_paragraph_settings import C4ParagraphConfig
from shardkit.writers.filters.rules import Rule
from shardkit.writers.filters.text_batch import TextBatch
from shardkit.writers.kernels.utf8 import count_characters

__all__ = ["C4ParagraphFilter"]


class C4ParagraphFilter:
    """Drops documents without enough long lines."""

    reasons = ("too_few_paragraphs",)

    def __init__(self, config: C4ParagraphConfig, folder: Path | None = None) -> None:
        self._config = config

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge."""
        counts = np.zeros(len(batch), np.int64)
        _count_long_lines(batch.data, batch.offsets, batch.wanted, self._config.min_paragraph_len, counts)
        return [Rule(self.reasons[0], counts < self._config.min_paragraphs, counts)]


@numba.njit(nogil=True, cache=True)
def _count_long_lines(data, offsets, wanted, least, counts):  # type: ignore[no-untyped-def]
    for document in range(len(wanted)):
        if not wanted[document]:
            continue
        start, end = offsets[document], offsets[document + 1]
        for at in range(start, end + 1):
            if at == end or data[at] == 10:
                counts[document] += count_characters(data, start, at) >= least
                start = at + 1
