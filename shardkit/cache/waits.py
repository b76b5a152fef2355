"""Waits that took too long, and how their errors say what had arrived until then."""

from __future__ import annotations

from shardkit.errors import ShardkitError
from shardkit.units import format_bytes

__all__ = ["FetchTimeoutError", "arrival"]


class FetchTimeoutError(ShardkitError, TimeoutError):
    """A shard, or rows of one, did not arrive in time; the message says how much had."""


def arrival(done: int, total: int, status: int | None, free_disk_bytes: int | None) -> str:
    """How far a fetch is, what the store last answered with an error, and how full the disk is."""
    disk = "no disk used" if free_disk_bytes is None else f"free disk {format_bytes(free_disk_bytes)}"
    return f"{done:,} of {total:,} bytes came; last status {'none' if status is None else status}; {disk}"
