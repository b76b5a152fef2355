"""The filters of a recipe in order: the first rule of the first filter that a document fails drops it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.writers.filters.config import (
    FilterConfig,
    FinewebQualityConfig,
    GopherQualityConfig,
    LengthConfig,
)
from shardkit.writers.filters.fineweb_quality import FinewebQualityFilter
from shardkit.writers.filters.gopher_quality import GopherQualityFilter
from shardkit.writers.filters.length import LengthFilter
from shardkit.writers.filters.rules import Filter
from shardkit.writers.filters.text_batch import TextBatch

__all__ = ["FilterChain"]


class FilterChain:
    """`reasons[code - 1]`, "<filter>/<rule>", is the ledger's reason for a document of that code."""

    def __init__(self, steps: Sequence[tuple[str, FilterConfig]]) -> None:
        self._filters = [_make(config) for _, config in steps]
        self.reasons = tuple(
            f"{name}/{reason}"
            for (name, _), step in zip(steps, self._filters, strict=True)
            for reason in step.reasons
        )
        gopher = [config for _, config in steps if isinstance(config, GopherQualityConfig)]
        self._stop_words = tuple(gopher[0].stop_words) if gopher else ()

    def codes(self, texts: pa.LargeStringArray) -> npt.NDArray[np.int64]:
        """int64[n]: 0 for documents that pass everything."""
        batch = TextBatch(texts, stop_words=self._stop_words)
        codes = np.zeros(len(batch), np.int64)
        first = 0
        for step in self._filters:
            found = step.codes(batch)
            dropped = batch.wanted & (found > 0)
            codes[dropped] = found[dropped] + first
            batch.wanted &= ~dropped
            first += len(step.reasons)
        return codes


def _make(config: FilterConfig) -> Filter:
    if isinstance(config, LengthConfig):
        return LengthFilter(config)
    if isinstance(config, GopherQualityConfig):
        return GopherQualityFilter(config)
    assert isinstance(config, FinewebQualityConfig)
    return FinewebQualityFilter(config)
