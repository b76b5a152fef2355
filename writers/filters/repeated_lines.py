"""Cut lines or paragraphs that occurred earlier in the same document; the first copy stays.

Units are found and compared as for line deduplication (`kernels/line_units.py`): lines end at LF, white space
at both ends is ignored, and blank units are never cut. Units are compared by 128-bit hashes: in a document of
n units, two different ones count as equal with probability n^2 / 2^129. Memory: 28 bytes per unit of a batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from shardkit.settings import Ratio
from shardkit.writers.filters.base import Edit, FilterSettings, above, ratio

if TYPE_CHECKING:
    from shardkit.writers.filters.batch import TextBatch
    from shardkit.writers.kernels.line_units import Units


class RepeatedLinesEditor(FilterSettings):
    """Cuts repeated lines or paragraphs of a document; the first copy stays."""

    reasons: ClassVar = ("repeated",)
    edits: ClassVar = ("repeated",)

    unit: Literal["line", "paragraph"] = Field(
        default="line", description="What is compared and cut: lines, or paragraphs between blank lines."
    )
    min_characters: int = Field(default=1, ge=1, description="Minimum characters in a unit that is cut.")
    max_cut_fraction: Ratio | None = Field(
        default=None, description="Drop documents that lose a greater fraction of their bytes; null: no rule."
    )

    def edit(self, batch: TextBatch) -> Edit:
        """See Editor.edit."""
        from shardkit.kernels.text_arrays import text_offsets
        from shardkit.writers.kernels.line_units import cut_units, find_units

        units = find_units(batch.texts, batch.wanted, self)
        again = _repeated(units)
        texts, _ = cut_units(batch.texts, units.document[again], units.unit[again], self.unit)
        cut = batch.sizes - np.diff(text_offsets(texts))
        lines = np.bincount(units.document[again], minlength=len(batch))
        rule = above("repeated", ratio(cut, batch.sizes), self.max_cut_fraction)
        return Edit(texts, [rule], {"repeated": cut}, {"repeated": lines})


def _repeated(units: Units) -> npt.NDArray[np.bool_]:
    """Return bool[units]: whether an equal unit comes earlier in the same document."""
    order = np.lexsort((units.unit, units.low, units.high, units.document))
    keys = (units.document[order], units.high[order], units.low[order])
    same = np.ones(max(len(order) - 1, 0), np.bool_)
    for key in keys:
        same &= key[1:] == key[:-1]
    again = np.zeros(len(order), np.bool_)
    again[order[1:]] = same
    return again
