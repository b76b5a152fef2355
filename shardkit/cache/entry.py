"""What a cache holds: the raw bytes of one shard and, behind them, a seal that proves them.

    raw bytes | magic (8) | their size, u64 | xxh3_128 of the name (16) | xxh3_128 of the raw bytes (16)

An entry's name says what its content is: the size and the strongest hash that the index states. So datasets,
jobs and copies in several buckets share what they have in common, and a shard appended to a dataset costs
nothing for the others. Shards without any hash are named after the object they came from and its version.
The seal is checked when a process first uses an entry: a file that was cut, overwritten, renamed or swapped
does not pass, whatever hashes the index has. But anyone can write a seal, so an entry whose name states the
hash of its raw bytes must have that hash as well. If it has at least 128 bits, it is computed in place of the
seal's, otherwise in addition. A gigabyte takes 0.3 s with xxh3_128 (as with the seal alone), 0.6 to 0.8 s
with xxh64 and the like, 1.4 s with sha1, 1.7 s with sha256 and 3 to 4 s with md5 and sha512. Entries named by
a hash of the compressed object, or by its version, are proved by their seal and size only.
"""

from __future__ import annotations

import hashlib
import re
import struct

import numpy as np
import numpy.typing as npt
import xxhash

from shardkit.hashing import HASH_NAMES, hash_bytes
from shardkit.index import ShardInfo

__all__ = ["SEAL_BYTES", "entry_name", "is_sealed", "make_seal", "seal", "sealed_size"]

Bytes = npt.NDArray[np.uint8]

_MAGIC = b"shardkt1"
_SEAL = struct.Struct("<8sQ16s16s")
SEAL_BYTES = _SEAL.size
_STRONG_DIGEST_CHARS = 32  # 128 bits, as the seal's
_MAX_DIGEST_CHARS = 128  # sha512 in hex; file names have 255

_RAW_HASH = re.compile(
    r"-?[0-9a-f]+-(?P<algorithm>[0-9a-z_]+)-(?P<digest>[0-9a-z]+)"
)  # as `entry_name` writes


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
    """Whether `entry` is whole and is the one that `name` says; reads all of it, once or twice."""
    if len(entry) < SEAL_BYTES:
        return False
    raw = entry[:-SEAL_BYTES]
    magic, size, name_digest, digest = _SEAL.unpack(entry[-SEAL_BYTES:].tobytes())
    if magic != _MAGIC or size != len(raw) or name_digest != _digest(name.encode()):
        return False
    named = _RAW_HASH.fullmatch(name)
    if named is None or named["algorithm"] not in HASH_NAMES:
        return bool(digest == _digest(raw.data))
    algorithm, expected = named["algorithm"], named["digest"]
    if len(expected) < _STRONG_DIGEST_CHARS and digest != _digest(raw.data):
        return False
    return hash_bytes(raw.data, [algorithm])[algorithm] == expected


def _digest(data: bytes | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(data)
