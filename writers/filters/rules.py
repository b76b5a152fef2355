"""A filter is a list of rules in a fixed order; the first one that a document fails is the reason.

Rules are NumPy expressions over the counts of a batch, so one code per document comes out without Python
per document. Ratios without a denominator count as 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shardkit.writers.filters.text_batch import TextBatch

__all__ = ["Filter", "first_failing", "ratio"]


class Filter(Protocol):
    """One step of filtering."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Names of the rules in the order they are tried."""

    def codes(self, batch: TextBatch) -> npt.NDArray[np.int64]:
        """int64[n]: 0 where a document passes, else 1 + index of the first rule that it fails."""


def ratio(part: npt.NDArray[np.int64], whole: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """part / whole as Python divides integers; 0 where whole is 0."""
    return np.divide(part, whole, out=np.zeros(len(part)), where=whole != 0)


def first_failing(failures: Sequence[npt.NDArray[np.bool_] | None], count: int) -> npt.NDArray[np.int64]:
    """Codes of `count` documents from one array per rule (None: the rule is off)."""
    codes = np.zeros(count, np.int64)
    for number in range(len(failures), 0, -1):
        failed = failures[number - 1]
        if failed is not None:
            codes[failed] = number
    return codes
