"""Cache entries: their names, the proof of their bytes, and the shards of a run that they belong to.

Entries. The file is the raw bytes of one shard, followed by a seal that proves them:

    raw bytes | magic (8) | their size, u64 | xxh3_128 of the name (16) | xxh3_128 of the raw bytes (16)

An entry's name identifies its content: the size and the strongest hash in the index. Datasets, jobs and
copies in several buckets therefore share equal shards, and a shard appended to a dataset does not invalidate
the others. Shards without any hash are named after their object and its version.

Proof. A file that was cut, overwritten, renamed or swapped does not pass its seal, for any hashes in the
index. But anyone can write a seal, so an entry whose name contains the hash of its raw bytes must have that
hash as well. If that hash has at least 128 bits, the seal's hash is not computed; otherwise both are. A
gigabyte takes 0.3 s with xxh3_128 (as with the seal alone), 0.6 to 0.8 s with xxh64 and similar hashes, 1.4 s
with sha1, 1.7 s with sha256 and 3 to 4 s with md5 and sha512. Entries named by a hash of the compressed
object, or by its version, are verified by their seal and size only.

Shards of an entry. `EntryNames` finds them among a million shards without a string for each: names are
computed on demand, and looked up by the digest at their end among digests that are sorted once. Strings and a
dictionary of them would take 180 MB and 26 s in every process.
"""

from __future__ import annotations

import hashlib
import re
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from shardkit.arrays import Bytes, Ints
from shardkit.hashing import HASH_NAMES, hash_bytes
from shardkit.manifest import ShardInfo, ShardTable

_MAGIC = b"shardkt1"
_SEAL = struct.Struct("<8sQ16s16s")
SEAL_BYTES = _SEAL.size
_STRONG_DIGEST_CHARS = 32  # length in hex of 128 bits, the size of the digest in a seal
_MAX_DIGEST_CHARS = 128  # length of sha512 in hex; file names may have 255 characters
# Matches entry names that contain the hash of their raw bytes, as `entry_name` writes them.
_RAW_HASH = re.compile(r"-?[0-9a-f]+-(?P<algorithm>[0-9a-z_]+)-(?P<digest>[0-9a-z]+)")

Size = TypeVar("Size", int, Ints)

_MOST_FOUND = 1 << 17  # maximum number of look-ups kept in memory: more than a real cache has entries

EntryPart = tuple[int, Callable[[int], str], Bytes | None]
"""The names of a dataset's entries: (number of shards, function from shard to name or "", `name_digests`)."""


def entry_name(info: ShardInfo, url: str, version: str | None = None) -> str | None:
    """Return the name of a shard's entry; None if neither hashes nor the `version` of its object are known.

    `url`: the dataset's URL. `url` and `version` are used only if the index has no hash of the shard.
    """
    if found := _strongest(info.raw.hashes):
        return f"{info.raw.bytes:x}-{found}"
    if found := _strongest(info.stored.hashes):
        return f"{info.stored.bytes:x}-{info.compression}-{found}"
    if version is None:
        return None
    origin = f"{url}/{info.stored.basename}\0{version}\0{info.stored.bytes}"
    if info.compression is not None:  # rows made from texts differ by tokenizer and length
        origin += f"\0{info.compression}"
    # "surrogatepass": names from JSON may have lone surrogates, which are not valid Unicode.
    digest = hashlib.blake2b(origin.encode(errors="surrogatepass"), digest_size=16).hexdigest()
    return f"{max(info.stored.bytes, 0):x}-object-{digest}"


def _strongest(hashes: Mapping[str, str]) -> str | None:
    """Return "name-digest" of the longest digest, or None.

    An index is not trusted: only hashes that are checked when a shard arrives may name its entry, and only
    alphanumeric digests of limited length.
    """
    known = [
        (len(digest), name, digest.lower())
        for name, digest in hashes.items()
        if name in HASH_NAMES and digest.isalnum() and digest.isascii() and len(digest) <= _MAX_DIGEST_CHARS
    ]
    return "{1}-{2}".format(*max(known)) if known else None


def sealed_size(raw_bytes: Size) -> Size:
    """Return the size of an entry in bytes: the raw bytes and the seal."""
    return raw_bytes + SEAL_BYTES


def make_seal(raw: Bytes, name: str) -> bytes:
    """Return the seal of an entry with these raw bytes and this name."""
    return _SEAL.pack(_MAGIC, len(raw), _digest(name.encode()), _digest(raw.data))


def is_sealed(entry: Bytes, name: str) -> bool:
    """Return whether `entry` (raw bytes and seal) is the undamaged entry `name`; hashes it once or twice."""
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


def name_digests(shards: Sequence[ShardInfo]) -> Bytes | None:
    """Return the digest at the end of each entry's name, uint8[shards, bytes]; None if names have none."""
    if not isinstance(shards, ShardTable):
        return None
    for files in (shards.raw, shards.packed):
        hashes = [] if files is None else zip(files.hash_names, files.digests, strict=True)
        known = [(digests.shape[1], name, digests) for name, digests in hashes if name in HASH_NAMES]
        if known:
            return max(known, key=lambda each: each[:2])[2]
    return None


class EntryNames:
    """The entry names of several datasets, with shards numbered through all datasets."""

    def __init__(self, parts: Iterable[EntryPart]) -> None:
        self._firsts: list[int] = []
        self._name_of: list[Callable[[int], str]] = []
        self._late: dict[int, str] = {}  # names that became known later, by shard
        self._listed: dict[str, list[int]] = {}  # shard numbers by entry name, for names kept as strings
        self._sorted: list[tuple[int, _SortedDigests]] = []
        self._found: dict[str, Sequence[int]] = {}
        first = 0
        for count, name_of, digests in parts:
            self._firsts.append(first)
            self._name_of.append(name_of)
            if digests is not None:
                self._sorted.append((first, _SortedDigests(digests)))
            else:
                for number in range(count):
                    self._list(first + number, name_of(number))
            first += count

    @classmethod
    def of(cls, names: Sequence[str]) -> EntryNames:
        """Make entry names of one dataset from a list with the name of each shard's entry."""
        return cls([(len(names), names.__getitem__, None)])

    def name(self, number: int) -> str:
        """Return the name of a shard's entry; "" if it is not known yet."""
        part = bisect_right(self._firsts, number) - 1
        return self._late.get(number) or self._name_of[part](number - self._firsts[part])

    def numbers(self, name: str) -> Sequence[int]:
        """Return the shards whose entry has this name, ascending."""
        if not self._sorted:
            return self._listed.get(name, ())
        found = self._found.get(name)
        if found is None:
            if len(self._found) >= _MOST_FOUND:
                self._found = {}
            alike = [first + number for first, each in self._sorted for number in each.ending(name)]
            alike = [number for number in alike if self.name(number) == name]
            found = self._found[name] = sorted([*alike, *self._listed.get(name, ())])
        return found

    def set_name(self, number: int, name: str) -> None:
        """Set the name of a shard whose entry name was unknown."""
        self._late[number] = name
        self._list(number, name)

    def _list(self, number: int, name: str) -> None:
        if name and number not in (listed := self._listed.setdefault(name, [])):
            listed.append(number)
            self._found.pop(name, None)


class _SortedDigests:
    """Finds a dataset's shards by the first eight bytes of their digests."""

    def __init__(self, digests: Bytes) -> None:
        self._width = digests.shape[1]
        keys = np.zeros((len(digests), 8), dtype=np.uint8)
        keys[:, : self._width] = digests[:, :8]
        found = keys.view("<u8").ravel()
        self._order = np.argsort(found, kind="stable").astype(np.int32)
        self._keys: npt.NDArray[np.uint64] = found[self._order]

    def ending(self, name: str) -> list[int]:
        """Return the shards whose digests share their first eight bytes with the digest that ends `name`."""
        try:
            digest = bytes.fromhex(name.rpartition("-")[2])
        except ValueError:
            return []
        if len(digest) != self._width:
            return []
        key = np.uint64(int.from_bytes(digest[:8], "little"))
        low, high = (int(np.searchsorted(self._keys, key, side)) for side in ("left", "right"))
        found: list[int] = self._order[low:high].tolist()
        return found
