"""Defines the report of an audit: the walks that it checked, its findings, and the use of each shard."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from shardkit.tools.audit.sums import FALSE_ACCEPTANCE

KINDS = {
    # The order of a report: causes come before their consequences.
    "settings": "ranks or runs with different data or a different order",
    "log": "damaged log files",
    "replica": "replicas of a rank whose logs differ",
    "rank": "ranks without a log, or whose log ends early",
    "resume": "ranks that started at another position than their loaded state",
    "gap": "ranges of positions that no run delivered",
    "steps": "ranks whose next step is not at the expected position",
    "part": "parts that went to the wrong rank or step, in the first faulty steps",
    "world": "walks whose steps depend on the world size",
    "lost": "samples never delivered in an epoch",
    "repeated": "samples delivered more than once in an epoch",
    "moved": "samples delivered at another step than the order defines",
    "excluded": "excluded rows delivered",
    "foreign": "steps with ids that the dataset does not have",
    "padding": "steps with padding in place of samples, or samples in place of padding",
    "epoch": "epochs whose sums differ from the index",
    "shard": "shards with more or fewer samples delivered than expected",
}
"""The kinds of findings of an audit, each with a description of what its count means."""

_MOST_KEPT = 100  # maximum number of findings that are kept per kind; later ones are only counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An error that an audit found; a None field is unknown or does not apply. `step` is counted from 1."""

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
        """Return the finding as plain data for JSON, without None fields."""
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
    """All findings of an audit: the number of each kind, and the first findings of each kind."""

    counts: Counter[str] = field(default_factory=Counter)
    kept: list[Finding] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    """Messages for the user about facts that are not errors."""

    def add(self, finding: Finding, count: int = 1) -> None:
        """Add `count` to the number of its kind; keep the finding if it is among the first of its kind."""
        if self.counts[finding.kind] < _MOST_KEPT:
            self.kept.append(finding)
        self.counts[finding.kind] += count

    def wants(self, kind: str) -> bool:
        """Return whether another finding of the kind would be kept; if not, callers can omit its details."""
        return self.counts[kind] < _MOST_KEPT

    @property
    def ok(self) -> bool:
        return not self.counts


@dataclass(slots=True)
class Walk:
    """The results for one sequence of steps, which `runs` runs delivered one after another."""

    name: str
    runs: int
    steps: int = 0
    samples: int = 0
    start: int = 0
    end: int = 0
    epochs_proved: int = 0
    epochs_wrong: int = 0
    partial: list[tuple[str, int, int]] = field(default_factory=list)
    """(stream, epoch, samples delivered) of incomplete epochs."""
    padding: int = 0
    dropped: int = 0
    digest: str = ""
    """Digest of the set of samples in each step, with this audit's key; independent of the world size."""
    seconds: float = 0.0
    superseded: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the walk as plain data for JSON."""
        names = ("stream", "epoch", "samples")
        return asdict(self) | {"partial": [dict(zip(names, part, strict=True)) for part in self.partial]}


class ShardUse(NamedTuple):
    """Delivered and dropped samples of a shard, and the expected minimum and maximum of their sum."""

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
    """For an audit of logs: each run with its first position, ranks, and counted and superseded steps."""
    shards: list[ShardUse] = field(default_factory=list)
    """Use of shards in the last walk: first the shards with wrong use, then the first of the others."""
    shard_count: int = 0

    @property
    def ok(self) -> bool:
        return self.findings.ok

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data for JSON."""
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
