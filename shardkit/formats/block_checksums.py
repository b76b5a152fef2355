"""Block checksums, which verify rows that are read without the rest of their shard.

A dataset that shardkit builds, converts or writes has a file blocks.bin in the folder of its index, if its
shards are not compressed. The file has one part per shard, in the order of the index:

    xxh3_64 of each 64 KiB of the shard's file, u64, little endian (the last block may be shorter)
    xxh3_128 of the file's size and hashes in the index, and of these checksums (16 bytes): the part's seal

The position of a part follows from the sizes in the index, so a reader fetches only the parts that it needs
by range: 8 KiB for a shard of 64 MiB, 1/8,192 of the dataset. The seal ties a part to the size and the hashes
of its shard: a range at a wrong offset, or from another dataset's file, is refused. The card lists blocks.bin
with its size and hash like all other files, so it is uploaded, downloaded and verified with them. The index
lists it as well, so that a store that once fails to find the card does not disable verification. If neither
the card nor the index lists it, a dataset has no block checksums, even if a file blocks.bin exists.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from shardkit.arrays import Bytes
from shardkit.errors import ShardError
from shardkit.files import map_path
from shardkit.hashing import new_hash
from shardkit.manifest import BLOCKS_NAME, FileInfo, Manifest, ShardInfo

# A row has a few KiB. Smaller blocks would make blocks.bin larger; larger blocks would make each row read
# more bytes.
BLOCK_BYTES = 1 << 16
_CHECKSUM_BYTES = 8
_SEAL_BYTES = 16
_FILE_HASH = "xxh3_128"

Checksums = npt.NDArray[np.uint64]
"""The block checksums of one shard, uint64[blocks]."""


def shard_part(file: FileInfo, data: Bytes) -> bytes:
    """Return the part of blocks.bin for one shard; `data` is its content, `file` its index entry."""
    checksums = np.array(_checksums(data.data), dtype="<u8").tobytes()
    return checksums + _seal(file, checksums)


def shard_parts(folder: Path, shards: Sequence[ShardInfo]) -> Iterator[bytes]:
    """Yield the parts of the shards in a folder; their concatenation is blocks.bin."""
    for shard in shards:
        file = folder / shard.stored.basename
        try:
            data = map_path(file)
        except OSError as error:
            raise ShardError(file, f"cannot be read: {error.strerror or error}") from error
        yield shard_part(shard.stored, data)


def write_blocks(folder: Path, shards: Sequence[ShardInfo]) -> FileInfo | None:
    """Write blocks.bin for the shards in `folder` and return its entry for the index and the card.

    Writes no file and returns None if any shard is compressed.
    """
    if any(shard.compression is not None for shard in shards):
        return None
    return write_parts(folder / BLOCKS_NAME, shard_parts(folder, shards))


def write_parts(file: Path, parts: Iterable[bytes]) -> FileInfo:
    """Write the parts of all shards, in their order, durably to `file`; return the entry of blocks.bin."""
    hasher, size = new_hash(_FILE_HASH), 0
    with file.open("wb") as opened:
        for part in parts:
            hasher.update(part)
            size += opened.write(part)
        opened.flush()
        os.fsync(opened.fileno())
    return FileInfo(BLOCKS_NAME, size, {_FILE_HASH: hasher.hexdigest()})


def block_range(start: int, stop: int, file_bytes: int) -> tuple[int, int]:
    """Return the smallest range of whole blocks of a file that includes the bytes [start, stop)."""
    return start - start % BLOCK_BYTES, min(file_bytes, -(-stop // BLOCK_BYTES) * BLOCK_BYTES)


def are_right(checksums: Checksums, start: int, data: bytes | memoryview) -> bool:
    """Return whether `data`, a file's bytes from block boundary `start` on, matches the file's checksums."""
    first, found = start // BLOCK_BYTES, _checksums(memoryview(data))
    expected: list[int] = checksums[first : first + len(found)].tolist()
    return found == expected


class BlockFile:
    """Locates the parts of a dataset's shards in its blocks.bin."""

    def __init__(self, where: str, manifest: Manifest, stated: FileInfo) -> None:
        """Compute the offsets of the parts. `stated` is the entry of blocks.bin in the card or index.

        Raises ShardError, naming `where`, if its size does not fit these shards.
        """
        self.name, self._shards = stated.basename, manifest.shards
        self._starts = np.zeros(len(manifest.shards) + 1, np.int64)
        blocks = -(-manifest.raw_bytes // BLOCK_BYTES)  # uncompressed shards: raw_bytes are the stored sizes
        np.cumsum(blocks * _CHECKSUM_BYTES + _SEAL_BYTES, out=self._starts[1:])
        if stated.bytes != self.size:
            problem = f"has {stated.bytes:,} bytes, but the checksums of its shards take {self.size:,}"
            raise ShardError(
                where, f"{problem}: the file belongs to a different dataset; upload this dataset again"
            )

    @property
    def size(self) -> int:
        """Total size of all parts in bytes."""
        return int(self._starts[-1])

    @property
    def shards(self) -> int:
        """Number of shards that have a part."""
        return len(self._shards)

    def range(self, number: int) -> tuple[int, int]:
        """Return the byte range [start, stop) of the part of shard `number`."""
        return int(self._starts[number]), int(self._starts[number + 1])

    def checksums(self, number: int, part: bytes) -> Checksums | None:
        """Return the checksums in the part of shard `number`; None if its size or seal is wrong."""
        start, stop = self.range(number)
        checksums, seal = part[:-_SEAL_BYTES], part[-_SEAL_BYTES:]
        if len(part) != stop - start or seal != _seal(self._shards[number].stored, checksums):
            return None
        return np.frombuffer(checksums, dtype="<u8")


def _checksums(data: memoryview) -> list[int]:
    return [xxhash.xxh3_64_intdigest(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]


def _seal(file: FileInfo, checksums: bytes) -> bytes:
    # The name is not sealed: parts are made before shards are numbered, and copies may have other names.
    stated = [str(file.bytes), *(f"{name}:{digest.lower()}" for name, digest in sorted(file.hashes.items()))]
    return xxhash.xxh3_128_digest("\0".join(stated).encode() + b"\n" + checksums)
