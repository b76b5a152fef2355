"""What the filters of a build did, beside the ledger: each rule in order and alone, cuts, counts, excerpts.

One for each cleaned split, in its commit; the sum of all is in the dataset's card. It does not depend on how
documents are divided among splits or workers: sums are, and excerpts are those of the lowest hashes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shardkit.writers.filters.chain import EXCERPTS, SAMPLE, Excerpt, FilterChain, Filtered
from shardkit.writers.ledger import Count

__all__ = ["FilterCounts", "filters_card"]


@dataclass
class FilterCounts:
    """`reasons` and `edits` are all names in their order; the other keys are those of `Filtered`."""

    reasons: tuple[str, ...] = ()
    edits: tuple[str, ...] = ()
    dropped: dict[str, Count] = field(default_factory=dict)
    cut: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    alone: Counter[str] = field(default_factory=Counter)
    sampled: int = 0
    excerpts: dict[str, list[Excerpt]] = field(default_factory=dict)

    @classmethod
    def of_chain(cls, chain: FilterChain) -> FilterCounts:
        """Nothing counted yet."""
        return cls(_distinct(chain.reasons), _distinct(chain.edits))

    def add(self, other: FilterCounts | Filtered) -> None:
        """Add what a batch, or another split, came to."""
        for reason, count in other.dropped.items():
            self.dropped[reason] = self.dropped.get(reason, Count()) + count
        for ours, theirs in ((self.cut, other.cut), (self.counts, other.counts), (self.alone, other.alone)):
            ours.update(theirs)  # adds, and keeps negative sums: texts may grow
        self.sampled += other.sampled
        for reason, shown in other.excerpts.items():
            self.excerpts[reason] = sorted([*self.excerpts.get(reason, ()), *shown])[:EXCERPTS]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a commit."""
        excerpts = {reason: [asdict(one) for one in shown] for reason, shown in self.excerpts.items()}
        return {
            "reasons": list(self.reasons),
            "edits": list(self.edits),
            "dropped": {reason: asdict(count) for reason, count in self.dropped.items()},
            "cut": dict(self.cut),
            "counts": dict(self.counts),
            "alone": dict(self.alone),
            "sampled": self.sampled,
            "excerpts": excerpts,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> FilterCounts:
        """The inverse of `to_dict`."""
        return cls(
            tuple(data["reasons"]),
            tuple(data["edits"]),
            {reason: Count(**count) for reason, count in data["dropped"].items()},
            Counter(data["cut"]),
            Counter(data["counts"]),
            Counter(data["alone"]),
            data["sampled"],
            {reason: [Excerpt(**one) for one in shown] for reason, shown in data["excerpts"].items()},
        )


def filters_card(splits: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What the card says of all splits (each as `to_dict` gives it); None for a recipe without filters.

    report/filters.py describes it.
    """
    total = FilterCounts()
    for split in splits:
        counts = FilterCounts.from_dict(split)
        total.reasons, total.edits = counts.reasons, counts.edits  # of one recipe: all alike
        total.add(counts)
    if not total.reasons and not total.edits:
        return None
    rules = []
    for reason in total.reasons:
        dropped = asdict(total.dropped.get(reason, Count()))
        shown = [{"file": x.file, "record": x.record, "text": x.text} for x in total.excerpts.get(reason, ())]
        rules.append({"rule": reason, **dropped, "alone": total.alone[reason], "excerpts": shown})
    return {
        "sampled": total.sampled,
        "one_in": SAMPLE,
        "rules": rules,
        "cut": [{"edit": edit, "bytes": total.cut[edit]} for edit in total.edits],
        "counts": [{"name": name, "count": total.counts[name]} for name in sorted(total.counts)],
    }


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    """A filter that a recipe names twice is counted once."""
    return tuple(dict.fromkeys(names))
