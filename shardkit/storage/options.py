"""How a store is reached. What is left out comes from the usual AWS environment and configuration files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["Checksums", "StorageOptions"]

Checksums = Literal["when_supported", "when_required"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageOptions:
    """Plain data: may be pickled and compared."""

    endpoint_url: str | None = None
    """Of an S3-compatible server; default AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, then AWS itself."""
    region: str | None = None
    profile: str | None = None
    """A profile of the AWS configuration files; default AWS_PROFILE."""
    path_style: bool | None = None
    """Bucket in the path rather than in the host name; None: whenever an endpoint is set."""
    checksums: Checksums | None = None
    """S3's flexible checksums; None: as the AWS configuration says, "when_required" if an endpoint is set."""
    connect_timeout_seconds: float = 5.0
    read_timeout_seconds: float = 10.0
    """Longest silence on a connection."""
    retry_seconds: float = 600.0
    """How long a failing operation is retried: shorter outages cost only time."""
    connections: int = 32
    """Most connections of a process to a store."""

    def __post_init__(self) -> None:
        if self.checksums not in (None, *get_args(Checksums)):
            raise ValueError(f"checksums must be one of {', '.join(get_args(Checksums))}: {self.checksums!r}")
        timeouts = (self.connect_timeout_seconds, self.read_timeout_seconds, self.retry_seconds)
        if not (min(timeouts) > 0 and self.connections > 0):
            raise ValueError("timeouts, retry_seconds and connections must be above 0")
