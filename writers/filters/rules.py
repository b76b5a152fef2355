"""What a step of filtering is: a filter judges documents by rules, an editor rewrites them.

Rules are tried in a fixed order and the first one that a document fails is the reason it is dropped. A rule
tells, for each document of a batch, whether it fails and the value that was judged, so that values can be
kept and thresholds moved later. Ratios without a denominator count as 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.writers.filters.text_batch import TextBatch

__all__ = ["Edit", "Editor", "Filter", "Rule", "Telling", "first_failing", "ratio"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule on a batch of n documents: `fails` bool[n] (None: it is off), `values` [n] what was judged.

    Both mean something where `batch.wanted` only. Values are numbers or, for labels, strings; None: none.
    """

    name: str
    fails: npt.NDArray[np.bool_] | None
    values: npt.NDArray[Any] | None = None


class Filter(Protocol):
    """One step of filtering that leaves texts as they are."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Names of the rules in the order they are tried; known before any batch."""

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """One rule for each of `reasons`, in that order."""


@dataclass(frozen=True, slots=True)
class Edit:
    """What an editor made of a batch of n documents: their texts, rules that drop some, and what went.

    `cut` are bytes of UTF-8 taken out of each document, int64[n] by name; negative where a text grew. Over
    all names they are the difference between the sizes before and after. `counts` are what else is worth
    telling, int64[n] by name, such as the number of addresses redacted.
    """

    texts: pa.LargeStringArray
    rules: Sequence[Rule] = ()
    cut: Mapping[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    counts: Mapping[str, npt.NDArray[np.int64]] = field(default_factory=dict)


@runtime_checkable
class Editor(Protocol):
    """One step that rewrites texts, and may drop documents afterwards."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Names of the rules that drop documents, in the order they are tried."""

    @property
    def edits(self) -> tuple[str, ...]:
        """Names under which cut bytes are booked."""

    def edit(self, batch: TextBatch) -> Edit:
        """The edited texts of the wanted documents; the others may stay as they are."""


@runtime_checkable
class Telling(Protocol):
    """A step that has more to tell than a value for each document."""

    @property
    def side_file(self) -> str:
        """Name of the JSON-lines file beside the dataset that it goes into."""

    def take_rows(self) -> list[dict[str, Any]]:
        """Plain data about the documents of the last batch, in their order; told once."""


def ratio(part: npt.NDArray[Any], whole: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """part / whole as Python divides integers; 0 where whole is 0."""
    return np.divide(part, whole, out=np.zeros(len(part)), where=whole != 0)


def first_failing(rules: Sequence[Rule], count: int) -> npt.NDArray[np.int64]:
    """int64[count]: 0 where a document passes, else 1 + index of the first rule that it fails."""
    codes = np.zeros(count, np.int64)
    for number in range(len(rules), 0, -1):
        failed = rules[number - 1].fails
        if failed is not None:
            codes[failed] = number
    return codes
