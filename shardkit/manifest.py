"""The manifest: which shards a dataset has, in which order, and what each must contain.

All formats are described by one immutable `Manifest`; `shardkit.formats.mds` and `shardkit.formats.tar` read
and write the files (`index.json`, `shards.json`) that carry it, and `shardkit.datasets.token_rows` makes that
of flat token files. Basenames are checked where they are read, so that no reader can be led out of the
dataset's folder.

Memory is O(#shards). A `ShardTable` has what 450,000 `ShardInfo` say in 25 MB instead of a gigabyte: shards
of one dataset differ in name, size, samples and hashes, which it keeps in arrays; columns, compression and
limits repeat and are kept once. It makes a `ShardInfo` when asked for one. Only lists whose shards are alike
in kind fit: the same hash names everywhere, plain file names. `table_of` returns None for others, which
stay lists.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import eq
from pathlib import PurePosixPath
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from shardkit.arrays import Bytes, Ints
from shardkit.errors import ShardError

Format = Literal["mds", "tar", "tokens", "parquet", "jsonl"]

BLOCKS_NAME = "blocks.bin"
"""The file of block checksums (`shardkit.formats.block_checksums`)."""

TOKENS = "tokens"
"""The column of tokens, in tars the members `tokens.npy`."""

LOSS_MASK = "loss_mask"
"""A column beside the tokens, in tars `loss_mask.npy`: 1 where a token is trained on, 0 elsewhere."""

UNKNOWN = -1  # the size or sample count of a tar that nothing describes

MAX_BASENAME_CHARS = 1024  # PATH_MAX is 4,096 on Linux; an honest shard name is far below

_NEWLINE, _SLASH, _DOT = b"\n/."
_IS_PLAIN = np.zeros(256, dtype=np.bool_)  # characters that names in a table may have
_IS_PLAIN[list(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-./\n")] = True


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


def token_layout(column: Column) -> tuple[np.dtype[np.generic], int] | None:
    """Return (type, length) of a column of 1-D integer rows of constant size; None of another one."""
    parts = column.encoding.split(":")
    if column.size is None or len(parts) != 3 or parts[0] != "ndarray" or not parts[2].isdigit():
        return None
    try:
        dtype = np.dtype(parts[1])
    except TypeError:
        return None
    return (dtype, int(parts[2])) if dtype.kind in "ui" and int(parts[2]) > 0 else None


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

    @property
    def has_hashes(self) -> bool:
        """Whether the index states a hash of the shard, so that it can be proved."""
        return bool(self.raw.hashes or self.stored.hashes)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ShardInfo:
        """The inverse of `dataclasses.asdict`."""
        zipped = None if data["zip"] is None else FileInfo(**data["zip"])
        columns = tuple(Column(**column) for column in data["columns"])
        rest = {name: data[name] for name in ("samples", "compression", "size_limit")}
        return cls(FileInfo(**data["raw"]), columns=columns, zip=zipped, **rest)


@dataclass(frozen=True)
class Manifest:
    """The ordered shards of a dataset."""

    format: Format
    shards: Sequence[ShardInfo]
    seen: str = ""
    """A digest of what was seen of the content where nothing states hashes: part of the fingerprint."""
    blocks: FileInfo | None = None
    """blocks.bin, if the index states it. No part of the fingerprint."""

    @cached_property
    def shard_samples(self) -> Ints:
        """int64[K]: samples of each shard, in manifest order."""
        if isinstance(self.shards, ShardTable):
            return self.shards.samples
        return np.fromiter((s.samples for s in self.shards), dtype=np.int64, count=len(self.shards))

    @cached_property
    def raw_bytes(self) -> Ints:
        """int64[K]: size of each shard as readers see it; `UNKNOWN` where the index does not say."""
        if isinstance(self.shards, ShardTable):
            return self.shards.raw_bytes
        return np.fromiter((s.raw.bytes for s in self.shards), dtype=np.int64, count=len(self.shards))

    @cached_property
    def kinds(self) -> Sequence[ShardInfo]:
        """A shard of each kind: for any shard, one here has the same columns, compression and limit."""
        if isinstance(self.shards, ShardTable):
            return self.shards.kinds
        return list({(s.columns, s.compression, s.size_limit): s for s in self.shards}.values())

    @cached_property
    def shard_starts(self) -> Ints:
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
        if isinstance(self.shards, ShardTable):
            return self.shards.fingerprint
        state = hashlib.blake2b(digest_size=16, person=b"shardkit-fp-v1")
        for shard in self.shards:
            hashes = shard.raw.hashes or shard.stored.hashes
            digest = "{}:{}".format(*min(hashes.items())) if hashes else ""
            state.update(f"{shard.raw.basename}\0{shard.raw.bytes}\0{shard.samples}\0{digest}\n".encode())
        state.update(self.seen.encode())
        return state.hexdigest()


def stated_file(name: object, stated: object, where: str | os.PathLike[str]) -> FileInfo:
    """Return what an index or a card states of a file beside the shards; ShardError if it is not sound."""
    basename = checked_basename(name, where)
    entry: Mapping[str, Any] = stated if isinstance(stated, Mapping) else {}
    hashes = {kind: value for kind, value in entry.items() if kind != "bytes"}
    size = entry.get("bytes")
    if type(size) is not int or size < 0:
        raise ShardError(where, f"{basename}: a size in bytes and hashes are expected")
    if not all(isinstance(value, str) for value in hashes.values()):
        raise ShardError(where, f"{basename}: hashes must be strings")
    return FileInfo(basename, size, hashes)


def checked_basename(name: object, index_file: str | os.PathLike[str]) -> str:
    """`name` if it is a relative path that stays in the folder; ShardError otherwise.

    Sub-folders are allowed (merged datasets use them); absolute paths, `..`, back-slashes, drive letters,
    control characters and halves of surrogate pairs are not.
    """
    if not isinstance(name, str) or not name or len(name) > MAX_BASENAME_CHARS:
        raise ShardError(index_file, f"a shard's basename must be a non-empty string, not {str(name)[:80]!r}")
    parts = PurePosixPath(name).parts
    drive = bool(parts) and ":" in parts[0]
    unsafe = name.startswith("/") or "\\" in name or drive or any(ord(c) < 32 for c in name)
    if unsafe or not parts or any(p in ("..", ".") for p in name.split("/")):
        raise ShardError(index_file, f"basename {name!r} leaves the dataset's folder; refuse this dataset")
    if any(0xD800 <= ord(c) <= 0xDFFF for c in name):
        raise ShardError(index_file, f"basename {name!r} is not Unicode text; refuse this dataset")
    return name


@dataclass(frozen=True)
class Files:
    """Files of all shards: names, each with a newline behind it, sizes, digests of the same hashes."""

    names: Bytes
    sizes: Ints
    hash_names: tuple[str, ...]
    digests: tuple[Bytes, ...]  # uint8[shards, bytes of the digest], for each hash

    @cached_property
    def _ends(self) -> Ints | range:
        """The places of the newlines behind names, as a range if all names are equally long."""
        ends = np.flatnonzero(self.names == _NEWLINE)
        width = int(ends[0]) + 1 if len(ends) else 1
        alike = range(width - 1, len(ends) * width, width)
        return alike if np.array_equal(ends, np.arange(alike.start, alike.stop, width)) else ends

    def __len__(self) -> int:
        return len(self.sizes)

    def file(self, number: int) -> FileInfo:
        start = int(self._ends[number - 1]) + 1 if number else 0
        name = self.names[start : int(self._ends[number])].tobytes().decode("ascii")
        hashes = {
            key: digests[number].tobytes().hex()
            for key, digests in zip(self.hash_names, self.digests, strict=True)
        }
        return FileInfo(name, int(self.sizes[number]), hashes)

    def are_sound(self) -> bool:
        """Whether all names stay in their folder and differ, and nothing is missing."""
        names, count = self.names, len(self.sizes)
        ends = np.flatnonzero(names == _NEWLINE)
        if not count or len(ends) != count or int(ends[-1]) != len(names) - 1:
            return False
        if not _IS_PLAIN[names].all() or any(len(digests) != count for digests in self.digests):
            return False
        lengths = np.diff(ends, prepend=-1) - 1
        if int(lengths.max()) > MAX_BASENAME_CHARS or int(self.sizes.min()) < 0:
            return False
        # No name or part of a path is empty or begins with a dot: each begins a name or follows a slash.
        begins = np.concatenate([[0], ends[:-1] + 1, np.flatnonzero(names == _SLASH) + 1])
        if np.isin(names[begins], (_SLASH, _DOT, _NEWLINE)).any():
            return False
        if int(lengths.min()) == int(lengths.max()):  # as a rule; sorted in place of a million objects
            ordered = np.sort(names.view(f"S{int(lengths[0]) + 1}"))
            return not bool((ordered[1:] == ordered[:-1]).any())
        return len(set(names.tobytes().split(b"\n"))) == count + 1


class ShardTable(Sequence[ShardInfo]):
    """The shards of a large dataset, in order."""

    def __init__(
        self,
        kinds: Sequence[ShardInfo],
        kind: npt.NDArray[np.int32],
        samples: Ints,
        raw: Files,
        packed: Files | None,
        fingerprint: str,
        blocks: FileInfo | None = None,
    ) -> None:
        """`kinds`: shards as they differ in all but files and samples; `kind`: which of them each is."""
        self.kinds, self.kind = tuple(kinds), kind
        self.samples, self.raw, self.packed = samples, raw, packed
        self.fingerprint, self.blocks = fingerprint, blocks

    @property
    def raw_bytes(self) -> Ints:
        """int64[shards]: sizes as readers see them."""
        return self.raw.sizes

    def __len__(self) -> int:
        return len(self.samples)

    @overload
    def __getitem__(self, number: int) -> ShardInfo: ...
    @overload
    def __getitem__(self, number: slice) -> list[ShardInfo]: ...
    def __getitem__(self, number: int | slice) -> ShardInfo | list[ShardInfo]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        number = range(len(self))[number]  # negative ones, and IndexError
        kind = self.kinds[int(self.kind[number])]
        return ShardInfo(
            self.raw.file(number),
            int(self.samples[number]),
            kind.columns,
            None if self.packed is None else self.packed.file(number),
            kind.compression,
            kind.size_limit,
        )

    def __iter__(self) -> Iterator[ShardInfo]:
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]


def table_of(
    shards: Sequence[ShardInfo], fingerprint: str, blocks: FileInfo | None = None
) -> ShardTable | None:
    """Return the table of `shards`, which have that fingerprint; None if they do not fit into one."""
    packed = [shard.zip for shard in shards if shard.zip is not None]
    if not shards or len(packed) not in (0, len(shards)):
        return None
    raw_files, packed_files = _files([shard.raw for shard in shards]), _files(packed) if packed else None
    if raw_files is None or (packed and packed_files is None):
        return None
    kinds: dict[tuple[object, ...], int] = {}
    keys = ((shard.columns, shard.compression, shard.size_limit) for shard in shards)
    kind = np.fromiter((kinds.setdefault(key, len(kinds)) for key in keys), np.int32, len(shards))
    examples = [shards[int(number)] for number in np.unique(kind, return_index=True)[1]]
    samples = np.fromiter((shard.samples for shard in shards), np.int64, len(shards))
    return ShardTable(examples, kind, samples, raw_files, packed_files, fingerprint, blocks)


def _files(infos: Sequence[FileInfo]) -> Files | None:
    hash_names = tuple(sorted(infos[0].hashes))
    if any(tuple(sorted(info.hashes)) != hash_names for info in infos):
        return None
    digests = []
    for name in hash_names:
        text = "".join(info.hashes[name] for info in infos)
        width = len(infos[0].hashes[name])
        same_width = all(len(info.hashes[name]) == width for info in infos)
        if not same_width or width % 2 or not set(text) <= set("0123456789abcdef"):
            return None  # a digest must come back as it was written
        digests.append(np.frombuffer(bytes.fromhex(text), dtype=np.uint8).reshape(len(infos), -1))
    try:
        names = "".join(f"{info.basename}\n" for info in infos).encode("ascii")
    except UnicodeEncodeError:
        return None
    sizes = np.fromiter((info.bytes for info in infos), np.int64, len(infos))
    files = Files(np.frombuffer(names, dtype=np.uint8), sizes, hash_names, tuple(digests))
    return files if files.are_sound() else None
