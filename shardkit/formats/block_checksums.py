"""Checksums of blocks, which prove rows that are read without the rest of their shard.

blocks.bin lies beside the index of a dataset that shardkit builds, converts or writes, if its shards are not
compressed. For each shard, in the order of the index, it has a part:

    xxh3_64 of each 64 KiB of the shard's file, u64, little endian (the last block may be shorter)
    xxh3_128 of what the index states of the file and of these checksums (16 bytes): the part's seal

Sizes in the index say where parts are, so a reader fetches by range the parts that it needs: 8 KiB for a
shard of 64 MiB, an 8,192nd of the dataset. The seal ties a part to the size and the hashes of its shard: a
range of the wrong place, or of another dataset's file, is refused. The card lists the file with its size and
hash like all others, so it is sent, fetched and verified as they are. So does the index: a card that a store
fails to find once does not take the proof away. A dataset neither of which states it has none, whatever lies
beside its index.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from shardkit.arrays import Bytes
from shardkit.errors import ShardError
from shardkit.files import map_path
from shardkit.hashing import new_hash
from shardkit.manifest import BLOCKS_NAME, FileInfo, Manifest, ShardInfo

BLOCK_BYTES = 1 << 16  # a row takes a few KiB: smaller blocks would double this file, larger ones each read
_CHECKSUM_BYTES = 8
_SEAL_BYTES = 16
_FILE_HASH = "xxh3_128"

Checksums = npt.NDArray[np.uint64]
"""uint64[blocks] of one shard."""


def shard_part(file: FileInfo, data: Bytes) -> bytes:
    """The part of a shard that is stored as `data`, and that the index describes as `file`."""
    checksums = np.array(_checksums(data.data), dtype="<u8").tobytes()
    return checksums + _seal(file, checksums)


def shard_parts(folder: Path, shards: Sequence[ShardInfo]) -> Iterator[bytes]:
    """The parts of shards that lie in a folder; their concatenation is blocks.bin."""
    for shard in shards:
        file = folder / shard.stored.basename
        try:
            data = map_path(file)
        except OSError as error:
            raise ShardError(file, f"cannot be read: {error.strerror or error}") from error
        yield shard_part(shard.stored, data)


def write_blocks(folder: Path, shards: Sequence[ShardInfo]) -> FileInfo | None:
    """Write blocks.bin of shards that lie in a folder beside them; None, and no file, if they have none.

    Returns what index and card state of the file.
    """
    if any(shard.compression is not None for shard in shards):
        return None
    file, hasher = folder / BLOCKS_NAME, new_hash(_FILE_HASH)
    with file.open("wb") as opened:
        for part in shard_parts(folder, shards):
            hasher.update(part)
            opened.write(part)
        opened.flush()
        os.fsync(opened.fileno())
    return FileInfo(BLOCKS_NAME, file.stat().st_size, {_FILE_HASH: hasher.hexdigest()})


def block_range(start: int, stop: int, file_bytes: int) -> tuple[int, int]:
    """The smallest range of whole blocks of a file that has the bytes [start, stop)."""
    return start - start % BLOCK_BYTES, min(file_bytes, -(-stop // BLOCK_BYTES) * BLOCK_BYTES)


def are_right(checksums: Checksums, start: int, data: bytes | memoryview) -> bool:
    """Whether `data` are the blocks of a file from byte `start` on, which begins one."""
    first, found = start // BLOCK_BYTES, _checksums(memoryview(data))
    expected: list[int] = checksums[first : first + len(found)].tolist()
    return found == expected


class BlockFile:
    """Where the parts of a dataset's shards are in its blocks.bin."""

    def __init__(self, where: str, manifest: Manifest, stated: FileInfo) -> None:
        """`stated`: what the card says of the file. ShardError if that cannot be of these shards."""
        self.name, self._shards = stated.basename, manifest.shards
        self._starts = np.zeros(len(manifest.shards) + 1, np.int64)
        blocks = -(-manifest.raw_bytes // BLOCK_BYTES)  # raw and stored bytes are the same
        np.cumsum(blocks * _CHECKSUM_BYTES + _SEAL_BYTES, out=self._starts[1:])
        if stated.bytes != self.size:
            problem = f"has {stated.bytes:,} bytes, the checksums of its shards have {self.size:,}"
            raise ShardError(where, f"{problem}: it belongs to another dataset; upload this one again")

    @property
    def size(self) -> int:
        """The size of all parts, in bytes."""
        return int(self._starts[-1])

    @property
    def shards(self) -> int:
        """How many have a part."""
        return len(self._shards)

    def range(self, number: int) -> tuple[int, int]:
        """Return where the part of shard `number` begins and ends, in bytes."""
        return int(self._starts[number]), int(self._starts[number + 1])

    def checksums(self, number: int, part: bytes) -> Checksums | None:
        """The checksums of shard `number` in its part; None if these bytes are not that part."""
        start, stop = self.range(number)
        checksums, seal = part[:-_SEAL_BYTES], part[-_SEAL_BYTES:]
        if len(part) != stop - start or seal != _seal(self._shards[number].stored, checksums):
            return None
        return np.frombuffer(checksums, dtype="<u8")


def _checksums(data: memoryview) -> list[int]:
    return [xxhash.xxh3_64_intdigest(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]


def _seal(file: FileInfo, checksums: bytes) -> bytes:
    # Not the name: parts are made before the dataset's shards are numbered, and copies may have other names.
    stated = [str(file.bytes), *(f"{name}:{digest.lower()}" for name, digest in sorted(file.hashes.items()))]
    return xxhash.xxh3_128_digest("\0".join(stated).encode() + b"\n" + checksums)
