"""Entries of caches, with bytes that follow from their names."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shardkit.arrays import Bytes
from shardkit.cache.protocol import Cache, Contents, Lease, Slot

__all__ = ["RAW", "check", "content", "fill", "leased", "nobody", "oldest", "room", "used"]

RAW = 1000  # bytes of an entry, where nothing else is said


def content(name: str, size: int = RAW) -> Bytes:
    """The right bytes of an entry."""
    return np.random.default_rng(list(name.encode())).integers(0, 256, size, dtype=np.uint8)


def nobody(contents: Contents) -> list[str]:
    """Nothing is to be evicted."""
    return []


def oldest(contents: Contents) -> list[str]:
    """All entries, the least recently used first."""
    return sorted(contents, key=lambda name: -contents[name].used_seconds_ago)


def room(cache: Cache, name: str, size: int = RAW, victims: Callable[[Contents], list[str]] = nobody) -> Slot:
    """Room for an entry, which there must be."""
    slot = cache.reserve(name, size, victims)
    assert slot is not None
    return slot


def leased(cache: Cache, name: str) -> Lease:
    """The lease on an entry, which nobody else may hold."""
    lease = cache.lease(name)
    assert lease is not None
    return lease


def fill(cache: Cache, name: str, size: int = RAW) -> None:
    """Make an entry of the right bytes; evicts the oldest if need be."""
    slot = room(cache, name, size, oldest)
    slot.data[:] = content(name, size)
    slot.commit()


def check(cache: Cache, name: str, size: int = RAW) -> Bytes:
    """`name` is an entry of the right bytes, which are returned."""
    found = cache.find(name)
    assert found is not None
    np.testing.assert_array_equal(found, content(name, size))
    return found


def used(cache: Cache) -> int:
    """Bytes that entries take, and those that are being filled."""
    return sum(held.bytes for held in cache.contents().values())
