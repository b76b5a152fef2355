"""What an audit says: each walk that was checked, what was found wrong, how often shards were used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shardkit.tools.audit.checker import Checker
from shardkit.tools.audit.findings import FALSE_ACCEPTANCE, KINDS, Findings, ShardCounts

__all__ = ["AuditReport", "Walk"]

MAX_SHARDS_LISTED = 1000


@dataclass(frozen=True, slots=True)
class Walk:
    """One sequence of steps from the first to the last, checked; `runs` says by whom they were made."""

    name: str
    runs: int
    steps: int
    samples: int
    start: int
    end: int
    epochs_proved: int
    epochs_wrong: int
    partial: tuple[tuple[str, int, int], ...]
    padding: int
    dropped: int
    digest: str
    seconds: float
    superseded: int = 0

    @classmethod
    def of(cls, name: str, checker: Checker, *, runs: int, seconds: float, superseded: int = 0) -> Walk:
        """What a finished checker has seen."""
        return cls(
            name=name,
            runs=runs,
            steps=checker.steps,
            samples=checker.samples,
            start=checker.origin,
            end=checker.position,
            epochs_proved=checker.epochs_proved,
            epochs_wrong=checker.epochs_wrong,
            partial=tuple(checker.partial),
            padding=checker.padding,
            dropped=checker.dropped,
            digest=checker.digest,
            seconds=seconds,
            superseded=superseded,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        found = {name: getattr(self, name) for name in self.__slots__}
        names = ("stream", "epoch", "samples")
        return found | {"partial": [dict(zip(names, part, strict=True)) for part in self.partial]}


@dataclass(slots=True)
class AuditReport:
    """`shards`: (file, delivered, dropped, least expected, most expected) of the last walk."""

    audit: str
    dataset: str
    settings: dict[str, object]
    findings: Findings
    walks: list[Walk] = field(default_factory=list)
    runs: list[dict[str, object]] = field(default_factory=list)
    """Of an audit of logs: each run, its first position, ranks, steps that count and that were replayed."""
    shards: list[tuple[str, int, int, int, int]] = field(default_factory=list)
    shard_count: int = 0

    @property
    def ok(self) -> bool:
        return self.findings.ok

    def add_shards(self, counts: ShardCounts, checker: Checker) -> None:
        """List shards: those that are wrong first."""
        self.shard_count = len(counts.delivered)
        wrong = counts.wrong.tolist()
        others = [number for number in range(min(self.shard_count, MAX_SHARDS_LISTED)) if number not in wrong]
        self.shards = [
            (
                checker.expected.shard_name(number),
                int(counts.delivered[number]),
                int(counts.dropped[number]),
                int(counts.least[number]),
                int(counts.most[number]),
            )
            for number in (wrong + others)[:MAX_SHARDS_LISTED]
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        names = ("shard", "delivered", "dropped", "least", "most")
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
            "shards": [dict(zip(names, shard, strict=True)) for shard in self.shards],
        }
