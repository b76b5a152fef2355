"""Histograms with bins of powers of two: counts and sums are exact, and those of parts add up.

Bin b holds the values of b bits: bin 0 the value 0, bin 1 the value 1, bin 2 the values 2 and 3, bin b those
from 2^(b-1) to 2^b - 1. So no range has to be known before, and 64 bins hold anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Bin", "Histogram"]


@dataclass(frozen=True, slots=True)
class Bin:
    """How many values lie from `low` to `high`, both included, and what they add up to."""

    low: int
    high: int
    count: int
    sum: int

    @property
    def label(self) -> str:
        """ "0", "1", "2-3", "1,024-2,047"."""
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,}-{self.high:,}"


@dataclass(slots=True)
class Histogram:
    """`counts[b]` values of b bits each, which add up to `sums[b]`; neither ends in a bin without values."""

    counts: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, values: npt.NDArray[np.integer[Any]]) -> Histogram:
        """The histogram of integers [n] from 0; their sum is below 2^53."""
        bits = np.frexp(values.astype(np.float64))[1]  # the exponent of a whole number is its bits; 0 has 0
        sums = np.bincount(bits, values).astype(np.int64)
        return cls(np.bincount(bits).tolist(), sums.tolist())

    def add(self, other: Histogram) -> None:
        """Add what another part counted."""
        self.counts = [a + b for a, b in zip_longest(self.counts, other.counts, fillvalue=0)]
        self.sums = [a + b for a, b in zip_longest(self.sums, other.sums, fillvalue=0)]

    @property
    def count(self) -> int:
        """How many values there are."""
        return sum(self.counts)

    @property
    def sum(self) -> int:
        """What all values add up to."""
        return sum(self.sums)

    def bins(self) -> list[Bin]:
        """From the first to the last bin that holds a value."""
        first = next((number for number, count in enumerate(self.counts) if count), 0)
        pairs = list(enumerate(zip(self.counts, self.sums, strict=True)))[first:]
        return [Bin(1 << b - 1 if b else 0, (1 << b) - 1, count, total) for b, (count, total) in pairs]

    def to_dict(self) -> dict[str, list[int]]:
        """Plain data."""
        return {"counts": self.counts, "sums": self.sums}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Histogram:
        """The inverse of `to_dict`."""
        return cls(list(data["counts"]), list(data["sums"]))

    @classmethod
    def total(cls, parts: Iterable[Mapping[str, Any]]) -> Histogram:
        """The sum of histograms that are plain data."""
        total = cls()
        for part in parts:
            total.add(cls.from_dict(part))
        return total
