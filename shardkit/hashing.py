"""Hashes by the names that MDS indexes use, and digests of plain data.

Names are those of hashlib plus the xxHash family. A digest of plain data is the blake2b-128 of its
canonical JSON, so that equal recipes, inputs and states have equal digests on every machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import xxhash

from shardkit.errors import ShardError

__all__ = ["HASH_NAMES", "Hasher", "digest_of", "hash_bytes", "hash_file", "new_hash"]

_READ_BYTES = 1 << 20


class Hasher(Protocol):
    """The part of hashlib's interface that shardkit needs."""

    def update(self, data: bytes | memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


_XXHASHES: dict[str, Callable[[], Hasher]] = {
    "xxh32": xxhash.xxh32,
    "xxh64": xxhash.xxh64,
    "xxh128": xxhash.xxh128,
    "xxh3_64": xxhash.xxh3_64,
    "xxh3_128": xxhash.xxh3_128,
}
# shake_* need an output length, which an index has no room for.
HASH_NAMES = frozenset(_XXHASHES) | {n for n in hashlib.algorithms_guaranteed if not n.startswith("shake_")}


def new_hash(name: str) -> Hasher:
    """A fresh hasher; ValueError with the known names when `name` is not one."""
    if name in _XXHASHES:
        return _XXHASHES[name]()
    if name in HASH_NAMES:
        return hashlib.new(name, usedforsecurity=False)
    raise ValueError(f"unknown hash {name!r}; known: {', '.join(sorted(HASH_NAMES))}")


def hash_bytes(data: bytes | memoryview, names: Iterable[str]) -> dict[str, str]:
    """{name: hex digest} of `data`."""
    digests = {}
    for name in names:
        hasher = new_hash(name)
        hasher.update(data)
        digests[name] = hasher.hexdigest()
    return digests


def hash_file(path: Path, names: Iterable[str]) -> dict[str, str]:
    """{name: hex digest} of a file, read once in 1 MiB pieces."""
    hashers = {name: new_hash(name) for name in names}
    try:
        with path.open("rb") as file:
            while piece := file.read(_READ_BYTES):
                for hasher in hashers.values():
                    hasher.update(piece)
    except OSError as error:
        raise ShardError(path, f"cannot be read: {error.strerror or error}") from error
    return {name: hasher.hexdigest() for name, hasher in hashers.items()}


def digest_of(data: object) -> str:
    """Hex blake2b-128 of the canonical JSON (sorted keys, no spaces) of plain data."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
