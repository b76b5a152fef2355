"""What a cache holds: the raw bytes of one shard and, behind them, a seal that proves them.

    raw bytes | magic (8) | their size, u64 | xxh3_128 of the name (16) | xxh3_128 of the raw bytes (16)

An entry's name says what its content is: the size and the strongest hash that the index states. So datasets,
jobs and copies in several buckets share what they have in common, and a shard appended to a dataset costs
nothing for the others. Shards without any hash are named after the object they came from and its version.
The seal is checked when an entry is first used: a file that was cut, overwritten, renamed or swapped does not
pass, whatever hashes the index has.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import numpy.typing as npt
import xxhash

from shardkit.hashing import HASH_NAMES
from shardkit.index import ShardInfo

__all__ = ["SEAL_BYTES", "entry_name", "is_sealed", "make_seal", "seal", "sealed_size"]

Bytes = npt.NDArray[np.uint8]

_MAGIC = b"shardkt1"
_SEAL = struct.Struct("<8sQ16s16s")
SEAL_BYTES = _SEAL.size
_MAX_DIGEST_CHARS = 128  # sha512 in hex; file names have 255


def entry_name(info: ShardInfo, url: str, version: str | None = None) -> str | None:
    """The name of a shard's entry; None if it has no hashes and the `version` of its object is not known.

    `url` is the dataset's; it and `version` matter only where the index states no hash.
    """
    if found := _strongest(info.raw.hashes):
        return f"{info.raw.bytes:x}-{found}"
    if found := _strongest(info.stored.hashes):
        return f"{info.stored.bytes:x}-{info.compression}-{found}"
    if version is None:
        return None
    origin = f"{url}/{info.stored.basename}\0{version}\0{info.stored.bytes}"
    # "surrogatepass": JSON can hold names that are no Unicode.
    digest = hashlib.blake2b(origin.encode(errors="surrogatepass"), digest_size=16).hexdigest()
    return f"{max(info.stored.bytes, 0):x}-object-{digest}"


def _strongest(hashes: object) -> str | None:
    """ "name-digest" of the longest digest, or None.

    They come from an index, which may say anything: only hashes that are checked when a shard has come may
    name it, and only digests that are plain.
    """
    assert isinstance(hashes, dict)
    known = [
        (len(digest), name, digest.lower())
        for name, digest in hashes.items()
        if name in HASH_NAMES and digest.isalnum() and digest.isascii() and len(digest) <= _MAX_DIGEST_CHARS
    ]
    return "{1}-{2}".format(*max(known)) if known else None


def sealed_size(raw_bytes: int) -> int:
    """Bytes that an entry takes."""
    return raw_bytes + SEAL_BYTES


def seal(entry: Bytes, name: str) -> None:
    """Write the seal behind the raw bytes that fill all but the end of `entry`."""
    entry[-SEAL_BYTES:] = np.frombuffer(make_seal(entry[:-SEAL_BYTES], name), dtype=np.uint8)


def make_seal(raw: Bytes, name: str) -> bytes:
    """The seal of raw bytes under a name."""
    return _SEAL.pack(_MAGIC, len(raw), _digest(name.encode()), _digest(raw.data))


def is_sealed(entry: Bytes, name: str) -> bool:
    """Whether `entry` is whole and is the one that `name` says; reads all of it."""
    if len(entry) < SEAL_BYTES:
        return False
    raw = entry[:-SEAL_BYTES]
    magic, size, name_digest, digest = _SEAL.unpack(entry[-SEAL_BYTES:].tobytes())
    if magic != _MAGIC or size != len(raw) or name_digest != _digest(name.encode()):
        return False
    return bool(digest == _digest(raw.data))


def _digest(data: bytes | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(data)
