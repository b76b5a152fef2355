"""Whole objects read in pieces: into memory, or only through hashes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from shardkit.errors import ShardError
from shardkit.hashing import new_hash
from shardkit.storage.store import Store

__all__ = ["hash_object", "read_object"]

_READ_BYTES = 1 << 20


def hash_object(store: Store, key: str, names: Iterable[str]) -> dict[str, str]:
    """{name: hex digest} of an object, read once in pieces; ValueError for an unknown name."""
    hashers = {name: new_hash(name) for name in names}
    buffer = memoryview(bytearray(_READ_BYTES))
    with store.open(key) as body:
        while count := body.readinto(buffer):
            for hasher in hashers.values():
                hasher.update(buffer[:count])
    return {name: hasher.hexdigest() for name, hasher in hashers.items()}


def read_object(store: Store, key: str, expected_bytes: int = -1) -> npt.NDArray[np.uint8]:
    """uint8[size] of an object; ShardError if its size is not the expected one (-1: any)."""
    with store.open(key) as body:
        size = body.info.bytes
        if expected_bytes not in (-1, size):
            raise ShardError(f"{store.url}/{key}", f"{size:,} bytes, expected {expected_bytes:,}")
        data = np.empty(size, dtype=np.uint8)
        view, filled = data.data, 0
        while filled < size and (count := body.readinto(view[filled : filled + _READ_BYTES])):
            filled += count
    if filled < size:
        raise ShardError(f"{store.url}/{key}", f"ended after {filled:,} of {size:,} bytes")
    return data
