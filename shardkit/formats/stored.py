"""Load a shard's stored file, MDS or tar, and return its raw bytes.

An uncompressed file is memory-mapped, a compressed one is decompressed into memory. The size and, if
requested, the hashes are compared with the index. A file must not be truncated by others while it is mapped;
replace files by rename, as all code in shardkit does.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from shardkit.arrays import Bytes
from shardkit.errors import ShardError, ShardNotFoundError
from shardkit.files import map_path
from shardkit.formats.budget import raw_limit
from shardkit.formats.compression import decompress, decompress_streams
from shardkit.hashing import hash_bytes
from shardkit.manifest import UNKNOWN, FileInfo, Format, ShardInfo


def load_raw(kind: Format, folder: Path, info: ShardInfo, *, verify: bool = False) -> Bytes:
    """Return the uncompressed bytes of a local shard as uint8[n].

    Raises ShardNotFoundError if the file is missing and ShardError if it contradicts `info`. `verify` checks
    every hash in `info`.
    """
    file = folder / info.stored.basename
    try:
        stored = map_path(file)
    except FileNotFoundError as error:
        raise ShardNotFoundError(file, f"cannot be opened: {error.strerror}") from error
    except OSError as error:
        raise ShardError(file, f"cannot be opened: {error.strerror or error}") from error
    _check_size(file, info.stored, stored)
    if verify:
        _check_hashes(file, info.stored, stored)
    if info.zip is None:
        return stored
    raw = decompress_shard(kind, info, stored, file)
    if verify:
        _check_hashes(file, info.raw, raw)
    return raw


def decompress_shard(kind: Format, info: ShardInfo, stored: Bytes, where: str | PathLike[str]) -> Bytes:
    """Decompress a shard's file `stored`. Raises ShardError if it is damaged or not of the size in `info`."""
    assert info.compression
    if kind == "mds":
        raw = decompress(info.compression, stored.data, raw_bytes=info.raw.bytes, file=where)
    else:
        limit = raw_limit(len(stored), info.raw.bytes)
        raw = decompress_streams(info.compression, stored.data, limit=limit, file=where)
        _check_size(where, info.raw, raw)
    if raw.flags.writeable:
        raw.flags.writeable = False
    return raw


def _check_size(where: str | PathLike[str], expected: FileInfo, data: Bytes) -> None:
    if expected.bytes not in (UNKNOWN, len(data)):
        problem = f"has {len(data):,} bytes, the index states {expected.bytes:,}; fetch it again"
        raise ShardError(where, problem)


def _check_hashes(where: str | PathLike[str], expected: FileInfo, data: Bytes) -> None:
    try:
        found = hash_bytes(data.data, expected.hashes)
    except ValueError as error:
        raise ShardError(where, f"the index states a hash that cannot be checked: {error}") from error
    for name, digest in found.items():
        if digest != expected.hashes[name].lower():
            problem = f"{name} of {expected.basename} is {digest}, the index states {expected.hashes[name]}"
            raise ShardError(where, f"{problem}; fetch it again")
