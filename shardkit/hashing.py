"""Hashes under the names that MDS indexes use, digests of plain data, and seeded hashes of document ids.

The names are those of hashlib plus the xxHash family. A digest of plain data is the blake2b-128 of its
canonical JSON, so that equal recipes, inputs and states have equal digests on every machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from shardkit.errors import ShardError

_READ_BYTES = 1 << 20


class Hasher(Protocol):
    """The part of the interface of hashlib's hash objects that shardkit uses."""

    def update(self, data: bytes | memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


_XXHASHES: dict[str, Callable[[], Hasher]] = {
    "xxh32": xxhash.xxh32,
    "xxh64": xxhash.xxh64,
    "xxh128": xxhash.xxh128,
    "xxh3_64": xxhash.xxh3_64,
    "xxh3_128": xxhash.xxh3_128,
}
# shake_* are left out: they need an output length, for which an index has no field.
HASH_NAMES = frozenset(_XXHASHES) | {n for n in hashlib.algorithms_guaranteed if not n.startswith("shake_")}


def new_hash(name: str) -> Hasher:
    """Create a hasher. Raises ValueError, which lists the known names, if `name` is unknown."""
    if name in _XXHASHES:
        return _XXHASHES[name]()
    if name in HASH_NAMES:
        return hashlib.new(name, usedforsecurity=False)
    raise ValueError(f"unknown hash {name!r}; known: {', '.join(sorted(HASH_NAMES))}")


def hash_bytes(data: bytes | memoryview, names: Iterable[str]) -> dict[str, str]:
    """Return {name: hex digest} of `data`."""
    digests = {}
    for name in names:
        hasher = new_hash(name)
        hasher.update(data)
        digests[name] = hasher.hexdigest()
    return digests


def hash_file(path: Path, names: Iterable[str]) -> dict[str, str]:
    """Return {name: hex digest} of a file, which is read once in 1 MiB pieces."""
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
    """Return the hex blake2b-128 of the canonical JSON (sorted keys, no spaces) of plain data."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def value_hash(text: str) -> int:
    """Return the hash that batches have in place of a document's text value: its xxh3_64, halved.

    It fits a signed integer of 64 bits and is never negative, so that -1 can stand for a missing value.
    """
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass")) >> 1


def keyed_hashes(document_ids: Iterable[bytes], seed: int, purpose: str) -> npt.NDArray[np.uint64]:
    """Return uint64[n], a hash of (seed, purpose, id) per document: its only source of random decisions."""
    number = _hash_seed(seed, purpose)
    return np.fromiter((xxhash.xxh3_64_intdigest(d, number) for d in document_ids), dtype=np.uint64)


def keyed_id_hashes(ids: npt.NDArray[np.uint8], seed: int, purpose: str) -> npt.NDArray[np.uint64]:
    """Return `keyed_hashes` of 16-byte ids uint8[n, 16], 20 times faster, by a vectorized form of XXH3."""
    number, words = _hash_seed(seed, purpose), np.ascontiguousarray(ids).view("<u8")
    low = words[:, 0] ^ np.uint64((_XXH3_FLIPS[0] + number) % (1 << 64))
    high = words[:, 1] ^ np.uint64((_XXH3_FLIPS[1] - number) % (1 << 64))
    value = np.uint64(16) + low.byteswap() + high + _multiplied(low, high)
    value ^= value >> np.uint64(37)
    value *= np.uint64(0x165667919E3779F9)
    hashes: npt.NDArray[np.uint64] = value ^ value >> np.uint64(32)
    return hashes


def _hash_seed(seed: int, purpose: str) -> int:
    key = hashlib.blake2b(f"{seed}\0{purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(key, "little")


# Pairs of 64-bit words of XXH3's secret (3 and 4, 5 and 6), combined by exclusive or.
_XXH3_FLIPS = 0x1F67B3B7A4A44072 ^ 0x78E5C0CC4EE679CB, 0x2172FFCC7DD05A82 ^ 0x8E2443F7744608B8


def _multiplied(a: npt.NDArray[np.uint64], b: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the upper and lower halves of the 128-bit products a * b, combined by exclusive or."""
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    a_low, a_high, b_low, b_high = a & mask, a >> half, b & mask, b >> half
    cross = (a_low * b_low >> half) + (a_high * b_low & mask) + a_low * b_high  # cannot overflow
    upper: npt.NDArray[np.uint64] = a_high * b_high + (a_high * b_low >> half) + (cross >> half)
    return upper ^ a * b
