"""Cut lines or paragraphs that stood before in the same document; the first copy stays.

Units and their equality are those of `dedup.lines` (`dedup/lines_units.py`): lines end at LF, white space at
both ends does not count, blank ones never go. Two different units of a document of n are taken for equal with
a probability of n^2 / 2^129. Costs 28 bytes a unit of the batch.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardkit.writers.dedup.config import LinesDedupConfig
from shardkit.writers.filters.repeated_lines_settings import RepeatedLinesConfig
from shardkit.writers.filters.rules import Edit, Rule, ratio
from shardkit.writers.filters.text_batch import TextBatch
from shardkit.writers.kernels.line_units import Units, cut_units, find_units

__all__ = ["RepeatedLinesEditor"]


class RepeatedLinesEditor:
    """Cuts repeated units, and drops documents that were mostly such."""

    reasons = ("repeated",)
    edits = ("repeated",)

    def __init__(self, config: RepeatedLinesConfig, folder: Path | None = None) -> None:
        self._units = LinesDedupConfig(unit=config.unit, min_characters=config.min_characters)
        self._most = config.max_cut_fraction

    def edit(self, batch: TextBatch) -> Edit:
        """See Editor.edit."""
        units = find_units(batch.texts, batch.wanted, self._units)
        again = _repeated(units)
        texts, _ = cut_units(batch.texts, units.document[again], units.unit[again], self._units)
        cut = batch.sizes - TextBatch(texts).sizes
        lines = np.bincount(units.document[again], minlength=len(batch))
        part = ratio(cut, batch.sizes)
        fails = None if self._most is None else part > self._most
        return Edit(texts, [Rule("repeated", fails, part)], {"repeated": cut}, {"repeated": lines})


def _repeated(units: Units) -> npt.NDArray[np.bool_]:
    """bool[units]: whether an equal unit of the same document stands before it."""
    order = np.lexsort((units.unit, units.low, units.high, units.document))
    keys = (units.document[order], units.high[order], units.low[order])
    same = np.ones(max(len(order) - 1, 0), np.bool_)
    for key in keys:
        same &= key[1:] == key[:-1]
    again = np.zeros(len(order), np.bool_)
    again[order[1:]] = same
    return again
