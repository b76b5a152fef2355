"""The manifest: which shards a dataset has, in which order, and what each must contain.

Both formats are described by one immutable `Manifest`; `shardkit.mds` and `shardkit.tar` read and write
the files (`index.json`, `shards.json`) that carry it. Basenames are checked here, once, so that no
reader can be led out of the dataset's folder. Memory is O(#shards).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from shardkit.errors import ShardError

__all__ = [
    "Column",
    "FileInfo",
    "Format",
    "Manifest",
    "ShardInfo",
    "Summed",
    "checked_basename",
    "merge_columns",
]

Format = Literal["mds", "tar"]
MAX_BASENAME_CHARS = 1024  # PATH_MAX is 4,096 on Linux; an honest shard name is far below


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file: name relative to the index's folder (POSIX separators), size, {hash name: hex digest}."""

    basename: str
    bytes: int
    hashes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Column:
    """One MDS column: its encoding (`str`, `ndarray:uint16:2048`, …), `size` in bytes or None if variable."""

    name: str
    encoding: str
    size: int | None = None


def merge_columns(columns_of_shards: Iterable[Sequence[Column]]) -> tuple[Column, ...]:
    """All columns of shards that may differ, by first appearance.

    Arrays of other types or lengths in another shard make theirs a column of any arrays.
    """
    merged: dict[str, Column] = {}
    last: Sequence[Column] = ()
    for columns in columns_of_shards:
        if columns == last:
            continue
        last = columns
        for column in columns:
            known = merged.setdefault(column.name, column)
            if known != column:
                kind = known.encoding.partition(":")[0]
                merged[column.name] = Column(column.name, kind)
    return tuple(merged.values())


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """What the index says of one shard.

    `raw` is the file that readers see; `zip` the stored one when `compression` is set (then `raw` is what
    decompression must produce). `columns` may be empty for tars of others, whose samples describe themselves.
    """

    raw: FileInfo
    samples: int
    columns: tuple[Column, ...] = ()
    zip: FileInfo | None = None
    compression: str | None = None
    size_limit: int | None = None

    @property
    def stored(self) -> FileInfo:
        """The file that lies in the folder or bucket."""
        return self.raw if self.zip is None else self.zip


@runtime_checkable
class Summed(Protocol):
    """Shards that know what would take long to work out one by one (`shardkit.shard_table`)."""

    @property
    def samples(self) -> npt.NDArray[np.int64]: ...
    @property
    def raw_bytes(self) -> npt.NDArray[np.int64]: ...
    @property
    def kinds(self) -> Sequence[ShardInfo]: ...
    @property
    def fingerprint(self) -> str: ...


@dataclass(frozen=True)
class Manifest:
    """The ordered shards of a dataset."""

    format: Format
    shards: Sequence[ShardInfo]

    @cached_property
    def shard_samples(self) -> npt.NDArray[np.int64]:
        """int64[K]: samples of each shard, in manifest order."""
        if isinstance(self.shards, Summed):
            return self.shards.samples
        return np.fromiter((s.samples for s in self.shards), dtype=np.int64, count=len(self.shards))

    @cached_property
    def raw_bytes(self) -> npt.NDArray[np.int64]:
        """int64[K]: size of each shard as readers see it; -1 where the index does not say."""
        if isinstance(self.shards, Summed):
            return self.shards.raw_bytes
        return np.fromiter((s.raw.bytes for s in self.shards), dtype=np.int64, count=len(self.shards))

    @cached_property
    def kinds(self) -> Sequence[ShardInfo]:
        """A shard of each kind: for any shard, one here has the same columns, compression and limit."""
        if isinstance(self.shards, Summed):
            return self.shards.kinds
        return list({(s.columns, s.compression, s.size_limit): s for s in self.shards}.values())

    @cached_property
    def shard_starts(self) -> npt.NDArray[np.int64]:
        """int64[K + 1]: sample id of each shard's first row; the last entry is the number of samples."""
        starts = np.zeros(len(self.shards) + 1, dtype=np.int64)
        np.cumsum(self.shard_samples, out=starts[1:])
        return starts

    @property
    def samples(self) -> int:
        """Samples in the whole dataset."""
        return int(self.shard_starts[-1])

    @cached_property
    def fingerprint(self) -> str:
        """Hex blake2b-128 over the ordered (basename, bytes, samples, hash) of all raw shards.

        `hash` is the first of the raw file's hashes by name (of the stored file's when the raw has none).
        """
        if isinstance(self.shards, Summed):
            return self.shards.fingerprint
        state = hashlib.blake2b(digest_size=16, person=b"shardkit-fp-v1")
        for shard in self.shards:
            hashes = shard.raw.hashes or shard.stored.hashes
            digest = "{}:{}".format(*min(hashes.items())) if hashes else ""
            state.update(f"{shard.raw.basename}\0{shard.raw.bytes}\0{shard.samples}\0{digest}\n".encode())
        return state.hexdigest()


def checked_basename(name: object, index_file: str | os.PathLike[str]) -> str:
    """`name` if it is a relative path that stays in the folder; ShardError otherwise.

    Sub-folders are allowed (merged datasets use them); absolute paths, `..`, back-slashes, drive letters
    and control characters are not.
    """
    if not isinstance(name, str) or not name or len(name) > MAX_BASENAME_CHARS:
        raise ShardError(index_file, f"a shard's basename must be a non-empty string, not {str(name)[:80]!r}")
    parts = PurePosixPath(name).parts
    drive = bool(parts) and ":" in parts[0]
    unsafe = name.startswith("/") or "\\" in name or drive or any(ord(c) < 32 for c in name)
    if unsafe or not parts or any(p in ("..", ".") for p in name.split("/")):
        raise ShardError(index_file, f"basename {name!r} leaves the dataset's folder; refuse this dataset")
    return name
