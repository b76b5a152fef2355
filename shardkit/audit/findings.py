"""What an audit has found wrong: all counted, the first of each kind kept with where it is."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["KINDS", "Finding", "Findings"]

KINDS = {
    # Causes first, what follows from them behind.
    "settings": "ranks or runs with other data or another order",
    "log": "damaged log files",
    "rank": "ranks without a log, or whose log ends early",
    "resume": "ranks that began elsewhere than their state said",
    "gap": "ranges of positions that no run delivered",
    "steps": "ranks at another step than is due",
    "part": "parts that went to the wrong rank or step, in the first faulty steps",
    "world": "walks whose steps depend on the world size",
    "lost": "samples never delivered in an epoch",
    "repeated": "samples delivered more than once in an epoch",
    "moved": "samples delivered at another step than the order says",
    "excluded": "excluded rows delivered",
    "foreign": "steps with ids that the dataset does not have",
    "padding": "steps with padding where samples belong, or the reverse",
    "epoch": "epochs whose sums differ from the index",
    "shard": "shards used more or less than they should be",
}
"""What an audit may find, and what its counts count."""

_MOST_KEPT = 100  # of a kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something wrong; numbers that are None are not known or do not apply."""

    kind: str
    problem: str
    epoch: int | None = None
    position: int | None = None
    step: int | None = None
    rank: int | None = None
    stream: str | None = None
    shard: str | None = None
    row: int | None = None
    sample: int | None = None

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without what is not known."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        facts = [
            f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}"
            for name, value in self.to_dict().items()
            if name not in ("kind", "problem")
        ]
        return f"{self.kind}: {self.problem}" + (f" [{', '.join(facts)}]" if facts else "")


@dataclass(slots=True)
class Findings:
    """All findings of an audit: how many of each kind, and the first ones."""

    counts: Counter[str] = field(default_factory=Counter)
    kept: list[Finding] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    """What is worth knowing and no fault."""

    def add(self, finding: Finding, count: int = 1) -> None:
        """Count `count` of its kind; keep it if it is among the first."""
        if self.counts[finding.kind] < _MOST_KEPT:
            self.kept.append(finding)
        self.counts[finding.kind] += count

    def wants(self, kind: str) -> bool:
        """Whether one more of the kind would be kept: else it need not be described."""
        return self.counts[kind] < _MOST_KEPT

    @property
    def ok(self) -> bool:
        return not self.counts
