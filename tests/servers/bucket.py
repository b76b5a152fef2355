"""A bucket of a test's own, and boto3 itself to look at it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import boto3
from botocore.config import Config

__all__ = ["RgwBucket", "s3_client"]


@dataclass(frozen=True, slots=True)
class RgwBucket:
    """An empty bucket of its own; the environment has the credentials, but not the endpoint."""

    name: str
    endpoint_url: str

    @property
    def url(self) -> str:
        return f"s3://{self.name}"


def s3_client(endpoint_url: str) -> Any:
    """boto3 with the environment's credentials: one attempt, path style, no optional checksums."""
    config = Config(
        retries={"total_max_attempts": 1},
        s3={"addressing_style": "path"},
        connect_timeout=5,
        read_timeout=20,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    # A session of its own: the default one remembers the credentials of the first test.
    return boto3.Session().client("s3", endpoint_url=endpoint_url, config=config)
