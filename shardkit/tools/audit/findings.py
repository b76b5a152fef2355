"""What an audit reports: the walks that it checked, what it found wrong, and how often shards were used."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from shardkit.tools.audit.sums import FALSE_ACCEPTANCE

KINDS = {
    # Causes first, then their consequences.
    "settings": "ranks or runs with other data or another order",
    "log": "damaged log files",
    "replica": "replicas of a rank whose logs differ",
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
    """Something wrong; what is None is unknown or does not apply. `step` is counted from 1."""

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
        """Plain data, without what is unknown."""
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
    """All findings of an audit: how many of each kind, and the first of each."""

    counts: Counter[str] = field(default_factory=Counter)
    kept: list[Finding] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    """What is worth knowing but not wrong."""

    def add(self, finding: Finding, count: int = 1) -> None:
        """Count `count` of its kind; keep it if it is among the first."""
        if self.counts[finding.kind] < _MOST_KEPT:
            self.kept.append(finding)
        self.counts[finding.kind] += count

    def wants(self, kind: str) -> bool:
        """Whether one more of the kind would be kept; if not, it need not be described."""
        return self.counts[kind] < _MOST_KEPT

    @property
    def ok(self) -> bool:
        return not self.counts


@dataclass(slots=True)
class Walk:
    """One sequence of steps from its first position to its last, checked; `runs`: how many made it."""

    name: str
    runs: int
    steps: int = 0
    samples: int = 0
    start: int = 0
    end: int = 0
    epochs_proved: int = 0
    epochs_wrong: int = 0
    partial: list[tuple[str, int, int]] = field(default_factory=list)
    """(stream, epoch, samples) of epochs that were not delivered whole."""
    padding: int = 0
    dropped: int = 0
    digest: str = ""
    """Of the sets of all steps, in their order, under this audit's key: the same for any world size."""
    seconds: float = 0.0
    superseded: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        names = ("stream", "epoch", "samples")
        return asdict(self) | {"partial": [dict(zip(names, part, strict=True)) for part in self.partial]}


class ShardUse(NamedTuple):
    """Samples of a shard that were delivered and dropped; the least and the most expected of both."""

    shard: str
    delivered: int
    dropped: int
    least: int
    most: int


@dataclass(slots=True)
class AuditReport:
    """The result of an audit of kind "plan" or "logs"."""

    audit: str
    dataset: str
    settings: dict[str, object]
    findings: Findings
    walks: list[Walk] = field(default_factory=list)
    runs: list[dict[str, object]] = field(default_factory=list)
    """Of an audit of logs: each run, its first position, ranks, and steps counted and superseded."""
    shards: list[ShardUse] = field(default_factory=list)
    """Of the last walk: those used wrongly, then the first others."""
    shard_count: int = 0

    @property
    def ok(self) -> bool:
        return self.findings.ok

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "audit": self.audit,
            "ok": self.ok,
            "dataset": self.dataset,
            "settings": self.settings,
            "false_acceptance": FALSE_ACCEPTANCE,
            "walks": [walk.to_dict() for walk in self.walks],
            "runs": self.runs,
            "counts": {kind: self.findings.counts[kind] for kind in KINDS if self.findings.counts[kind]},
            "findings": [finding.to_dict() for finding in self.findings.kept],
            "notices": list(self.findings.notices),
            "shard_count": self.shard_count,
            "shards": [shard._asdict() for shard in self.shards],
        }
