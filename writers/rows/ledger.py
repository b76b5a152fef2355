"""Accounts for every record: a ledger of counts, and the quarantine of records that could not be read.

Records read = kept + dropped (by rule) + quarantined (by error), in documents and in bytes of UTF-8 text (raw
record bytes where a record could not be decoded). `Ledger.check` checks this at every commit.

Each entry of the quarantine is a JSON line with file, record number, byte offset in the decompressed file,
reason and error. With `max_bad_fraction` 0 the first entry stops the build. A split whose task failed is one
entry with the reason FAILED_SPLIT and the stored size of the split; `max_failed_splits` limits their number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shardkit.card import Count
from shardkit.errors import BuildError, ConservationError

__all__ = [
    "FAILED_SPLIT",
    "BadRecord",
    "Count",
    "Ledger",
    "Quarantine",
    "by_loss",
    "check_bad_fraction",
    "dropped_by_filters",
    "first_of",
    "snippet_of",
]

FAILED_SPLIT = "failed_split"

_SNIPPET_BYTES = 160  # bytes of a record in errors: enough to recognize it, too little to leak a corpus


@dataclass(slots=True)
class Ledger:
    """Counts of the documents that one task, or several, read, kept, dropped (by rule) and quarantined."""

    read: Count = field(default_factory=Count)
    kept: Count = field(default_factory=Count)
    dropped: dict[str, Count] = field(default_factory=dict)
    quarantined: dict[str, Count] = field(default_factory=dict)

    def drop(self, reason: str, documents: int, bytes: int) -> None:
        """Add documents that a rule dropped to the counts; `reason` is the rule."""
        self.dropped[reason] = self.dropped.get(reason, Count()) + Count(documents, bytes)

    def quarantine(self, reason: str, documents: int, bytes: int) -> None:
        """Add records that could not be read to the counts; `reason` is the kind of error."""
        self.quarantined[reason] = self.quarantined.get(reason, Count()) + Count(documents, bytes)

    def merge(self, other: Ledger) -> None:
        """Add the counts of another ledger to this one."""
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
                f"{where}: read {self.read.documents:,} documents ({self.read.bytes:,} bytes), but accounted "
                f"for {out.documents:,} ({out.bytes:,} bytes); this is a bug in shardkit, please report it"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data with sorted reasons, for commit records and the dataset card."""

        return {
            "read": asdict(self.read),
            "kept": asdict(self.kept),
            "dropped": {reason: asdict(count) for reason, count in sorted(self.dropped.items())},
            "quarantined": {reason: asdict(count) for reason, count in sorted(self.quarantined.items())},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Ledger:
        """Create a ledger from the result of `to_dict`."""
        return cls(
            read=Count(**data["read"]),
            kept=Count(**data["kept"]),
            dropped={reason: Count(**count) for reason, count in data["dropped"].items()},
            quarantined={reason: Count(**count) for reason, count in data["quarantined"].items()},
        )


@dataclass(frozen=True, slots=True)
class BadRecord:
    """One unreadable record, a whole file ("no_column"), or the rest of a file ("damaged_file")."""

    file: str
    record: int  # 0-based line or row number
    byte_offset: int | None  # offset in the decompressed file; None for Parquet
    reason: str
    error: str
    snippet: str

    def __str__(self) -> str:
        where = "" if self.byte_offset is None else f" (byte {self.byte_offset:,})"
        return f"{self.file}: record {self.record:,}{where}: {self.reason}: {self.error}"


def by_loss(reasons: Mapping[str, Count]) -> str:
    """Format counts by reason, most documents first, such as "12 by length/too_few_words"."""
    ordered = sorted(reasons.items(), key=lambda item: (-item[1].documents, item[0]))
    return ", ".join(f"{count.documents:,} by {reason}" for reason, count in ordered)


def dropped_by_filters(ledger: Ledger) -> int:
    """Return how many documents filters dropped: reasons of filters have a slash, others do not."""
    return sum(count.documents for reason, count in ledger.dropped.items() if "/" in reason)


def first_of(entries: bytes) -> BadRecord | None:
    """Return the first entry of a quarantine file, or None if it is empty."""
    return BadRecord(**json.loads(entries.partition(b"\n")[0])) if entries else None


def snippet_of(data: bytes) -> str:
    """Return the start of a record as printable text."""
    return data[:_SNIPPET_BYTES].decode("utf-8", "backslashreplace")


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


class Quarantine:
    """Writes unreadable records to a JSON-lines file, if `path` is given; the first may stop the build."""

    def __init__(self, path: Path | None = None, *, max_bad_fraction: float = 0.0) -> None:
        self.first: BadRecord | None = None
        self._max_bad_fraction = max_bad_fraction
        self._file = path.open("w", encoding="utf-8") if path is not None else None

    @property
    def allows_none(self) -> bool:
        """Whether no record may be unreadable, so that the first entry stops the build."""
        return self._max_bad_fraction == 0

    def add(self, bad: BadRecord) -> None:
        """Write an entry. Raises BuildError if `max_bad_fraction` is 0: no record may be unreadable."""
        # Names of fields and members may contain bytes that are not UTF-8, and lone surrogates.
        bad = replace(bad, error=_printable(bad.error), snippet=_printable(bad.snippet))
        self.first = self.first or bad
        if self._file is not None:
            self._file.write(json.dumps(asdict(bad), ensure_ascii=False) + "\n")
        if self.allows_none:
            raise BuildError(f"{bad}{_repair(bad.reason)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


def _repair(reason: str) -> str:
    """Return what to do about an unreadable record that stops a build, as the end of a sentence."""
    if reason == "no_column":
        return ""
    other = " set `on_bad_text: replace`, or for text files their `encoding`;" if reason == "bad_utf8" else ""
    return f";{other} repair or remove it, or set max_bad_fraction to quarantine such records and continue"


def check_bad_fraction(
    where: str, ledger: Ledger, max_bad_fraction: float, first: BadRecord | str | None = None
) -> None:
    """Raise BuildError if more than `max_bad_fraction` of the records, or of the bytes, were unreadable.

    Bytes are checked too, because a damaged compressed file loses any number of bytes but is a single entry.
    Splits whose tasks failed do not count. `where` names the file; `first` is its first bad record.
    """
    reasons = {name: lost for name, lost in ledger.quarantined.items() if name != FAILED_SPLIT}
    bad = sum(reasons.values(), Count())
    shares = {"records": (bad.documents, ledger.read.documents), "bytes": (bad.bytes, ledger.read.bytes)}
    for unit, (lost, total) in shares.items():
        if lost > max_bad_fraction * total:
            listed = ", ".join(f"{name} {reasons[name].documents:,}" for name in sorted(reasons))
            raise BuildError(
                f"{where}: {lost:,} of {total:,} {unit} are unreadable ({listed}), more than "
                f"max_bad_fraction {max_bad_fraction:g} allows" + (f"; first: {first}" if first else "")
            )
