"""What an upload or a download did, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from shardkit.upload.contents import Contents, Listing
from shardkit.upload.publication import Outcome, Settings

__all__ = ["TransferReport", "make_report"]


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What was done; with `dry_run`, what would be.

    `sent` files were written to the target, `skipped` ones were there. `deleted` names what an earlier
    dataset had left. `left` are files at the source that its dataset does not name, at most 1,000 of
    `left_count`; `foreign` counts such objects at the target.
    """

    source: str
    target: str
    fingerprint: str
    files: int
    bytes: int
    sent: tuple[str, ...]
    sent_bytes: int
    skipped: int
    skipped_bytes: int
    deleted: tuple[str, ...]
    left: tuple[str, ...]
    left_count: int
    foreign: int
    verified: bool
    dry_run: bool
    seconds: float

    @property
    def up_to_date(self) -> bool:
        """Whether there was nothing to do."""
        return not self.sent and not self.deleted

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self) | {"up_to_date": self.up_to_date, "seconds": round(self.seconds, 3)}


def make_report(
    contents: Contents, listing: Listing, outcome: Outcome, settings: Settings, *, target: str, seconds: float
) -> TransferReport:
    """The report of a publication; `listing` is of the source."""
    return TransferReport(
        source=contents.where,
        target=target,
        fingerprint=contents.manifest.fingerprint,
        files=len(contents.files),
        bytes=contents.bytes,
        sent=tuple(sorted(outcome.sent)),
        sent_bytes=sum(outcome.sent.values()),
        skipped=len(outcome.skipped),
        skipped_bytes=sum(outcome.skipped.values()),
        deleted=outcome.deleted,
        left=listing.others,
        left_count=listing.other_count,
        foreign=outcome.foreign,
        verified=settings.verify and not settings.dry_run,
        dry_run=settings.dry_run,
        seconds=seconds,
    )
