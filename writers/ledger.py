"""The ledger of a task: what came in is what was kept, dropped (by rule) or quarantined (by error).

Counted in documents and in bytes of UTF-8 text (raw record bytes where a record could not be decoded).
`check` holds the conservation law and is called at every commit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardkit.errors import ConservationError

__all__ = ["Count", "Ledger"]


@dataclass(frozen=True, slots=True)
class Count:
    """So many documents with so many bytes."""

    documents: int = 0
    bytes: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.documents + other.documents, self.bytes + other.bytes)


@dataclass(slots=True)
class Ledger:
    """Counts of one task, or of many merged."""

    read: Count = Count()
    kept: Count = Count()
    dropped: dict[str, Count] = field(default_factory=dict)
    quarantined: dict[str, Count] = field(default_factory=dict)

    def drop(self, reason: str, documents: int, bytes: int) -> None:
        """Book documents that a rule removed."""
        self.dropped[reason] = self.dropped.get(reason, Count()) + Count(documents, bytes)

    def quarantine(self, reason: str, documents: int, bytes: int) -> None:
        """Book records that could not be read."""
        self.quarantined[reason] = self.quarantined.get(reason, Count()) + Count(documents, bytes)

    def merge(self, other: Ledger) -> None:
        """Add another task's counts to these."""
        self.read += other.read
        self.kept += other.kept
        for reason, count in other.dropped.items():
            self.drop(reason, count.documents, count.bytes)
        for reason, count in other.quarantined.items():
            self.quarantine(reason, count.documents, count.bytes)

    def check(self, where: str) -> None:
        """Raise ConservationError unless read = kept + dropped + quarantined, in documents and bytes."""
        out = sum([*self.dropped.values(), *self.quarantined.values()], self.kept)
        if out != self.read:
            raise ConservationError(
                f"{where}: read {self.read.documents:,} documents ({self.read.bytes:,} bytes), accounted for "
                f"{out.documents:,} ({out.bytes:,} bytes); this is a bug in shardkit, please report it"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain data with sorted reasons, for commit records and the dataset card."""

        def plain(count: Count) -> dict[str, int]:
            return {"documents": count.documents, "bytes": count.bytes}

        return {
            "read": plain(self.read),
            "kept": plain(self.kept),
            "dropped": {reason: plain(self.dropped[reason]) for reason in sorted(self.dropped)},
            "quarantined": {reason: plain(self.quarantined[reason]) for reason in sorted(self.quarantined)},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Ledger:
        """The inverse of `to_dict`."""
        return cls(
            read=Count(**data["read"]),
            kept=Count(**data["kept"]),
            dropped={reason: Count(**count) for reason, count in data["dropped"].items()},
            quarantined={reason: Count(**count) for reason, count in data["quarantined"].items()},
        )
