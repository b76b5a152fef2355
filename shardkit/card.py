"""A card's funnel as steps in the order in which a build takes them, for whoever draws it.

    read -> quarantined -> lost while reading -> each filter -> duplicates by kind -> empty -> kept

Rules of one filter are one step: which of them took how much is in the card's `filters`.

Histograms with bins of powers of two: counts and sums are exact, and those of parts add up.

Bin b holds the values of b bits: bin 0 the value 0, bin 1 the value 1, bin 2 the values 2 and 3, bin b those
from 2^(b-1) to 2^b - 1. So no range has to be known before, and 64 bins hold anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Bin", "FunnelStep", "Histogram", "funnel_steps"]

_DUPLICATES = ("exact_duplicate", "duplicate_lines", "near_duplicate")


@dataclass(frozen=True, slots=True)
class FunnelStep:
    """What a step lost, and what it left: documents and bytes of text.

    `kind` is "read", "quarantined", "dropped" or "kept". Editors lose bytes of documents that stay, and may
    add some: then `lost_bytes` is negative.
    """

    kind: str
    label: str
    lost_documents: int
    lost_bytes: int
    documents: int
    bytes: int


def funnel_steps(card: Mapping[str, Any]) -> list[FunnelStep]:
    """The steps of a card's `funnel`; those that lost nothing are left out. KeyError if it is not ours."""
    funnel = card["funnel"]
    documents, size = funnel["read"]["documents"], funnel["read"]["bytes"]
    steps = [FunnelStep("read", "read", 0, 0, documents, size)]
    losses = [
        ("quarantined", reason, [lost]) for reason, lost in sorted(funnel["quarantined"].items())
    ] + _dropped(card)
    for kind, label, lost in losses:
        lost_documents = sum(one["documents"] for one in lost)
        lost_bytes = sum(one["bytes"] for one in lost)
        documents, size = documents - lost_documents, size - lost_bytes
        if lost_documents or lost_bytes:
            steps.append(FunnelStep(kind, label, lost_documents, lost_bytes, documents, size))
    kept = funnel["kept"]
    return [*steps, FunnelStep("kept", "kept", 0, 0, kept["documents"], kept["bytes"])]


def _dropped(card: Mapping[str, Any]) -> list[tuple[str, str, list[Mapping[str, int]]]]:
    """(kind, label, losses) of each filter or other step that drops."""
    groups: dict[str, list[Mapping[str, int]]] = {}
    for reason, lost in card["funnel"]["dropped"].items():
        groups.setdefault(reason.partition("/")[0], []).append(lost)
    ranks = {name: (1, number) for number, name in enumerate(_filters(card))}
    ranks |= {name: (2, number) for number, name in enumerate((*_DUPLICATES, "empty"))}
    names = sorted(groups, key=lambda name: (*ranks.get(name, (0, 0)), name))
    return [("dropped", name, groups[name]) for name in names]


def _filters(card: Mapping[str, Any]) -> Sequence[str]:
    """Names of the recipe's filters in their order, each once."""
    entries = (card.get("recipe") or {}).get("filters") or ()
    return list(dict.fromkeys(name for entry in entries for name in entry))


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
