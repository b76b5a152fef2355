"""The manifest: which shards a dataset has, in which order, and what each must contain.

One immutable `Manifest` describes datasets of all formats; `shardkit.formats.mds` and `shardkit.formats.tar`
read and write the files (`index.json`, `shards.json`) that store it, `shardkit.datasets.token_rows` makes
the manifest of flat token files, `shardkit.datasets.row_files` that of row files,
`shardkit.datasets.text_rows` that of rows made from texts. Basenames are
checked when they are read, so that no index can direct a reader out of the dataset's folder.

Memory is O(#shards). A `ShardTable` holds the content of 450,000 `ShardInfo` objects in 25 MB instead of a
gigabyte: shards of one dataset differ in name, size, samples and hashes, which it keeps in arrays; columns,
compression and limits repeat and are kept once. It makes each `ShardInfo` on access. A list fits into a table
only if all shards have the same hash names and plain file names; `table_of` returns None for other lists.
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

Format = Literal[
    "mds",
    "tar",
    "tokens",
    "row_files",
    "image_files",
    "text",
    "parquet",
    "jsonl",
    "megatron",
    "olmo",
    "nanogpt",
    "llmc",
    "datatrove",
]

DESCRIPTIONS = ("index.json", "shards.json", "documents.json", "dataset.json")
"""The files that describe a dataset: indexes of MDS, tars and texts or documents, and the card."""

BLOCKS_NAME = "blocks.bin"
"""The file of block checksums (`shardkit.formats.block_checksums`)."""

TOKENS = "tokens"
"""Name of the column that holds tokens; in tars, of the members `tokens.npy`."""

LOSS_MASK = "loss_mask"
"""Name of an optional column: 1 where a token is trained on, else 0; in tars, `loss_mask.npy`."""

UNKNOWN = -1  # size or sample count of a tar that has no index

MAX_BASENAME_CHARS = 1024  # PATH_MAX is 4,096 on Linux; real shard names are far shorter

_NEWLINE, _SLASH, _DOT = b"\n/."
_IS_PLAIN = np.zeros(256, dtype=np.bool_)  # whether a byte may occur in the names of a `Files` table
_IS_PLAIN[list(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-./\n")] = True


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file: its name relative to the index's folder (with "/"), its size, and {hash name: hex digest}."""

    basename: str
    bytes: int
    hashes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Column:
    """One MDS column: encoding (`str`, `ndarray:uint16:2048`, …) and `size` in bytes (None if variable)."""

    name: str
    encoding: str
    size: int | None = None


def token_layout(column: Column) -> tuple[np.dtype[np.generic], int] | None:
    """Return (dtype, length) of a column of 1-D integer arrays of fixed length; None for any other column."""
    parts = column.encoding.split(":")
    if column.size is None or len(parts) != 3 or parts[0] != "ndarray" or not parts[2].isdigit():
        return None
    try:
        dtype = np.dtype(parts[1])
    except TypeError:
        return None
    return (dtype, int(parts[2])) if dtype.kind in "ui" and int(parts[2]) > 0 else None


def merge_columns(columns_of_shards: Iterable[Sequence[Column]]) -> tuple[Column, ...]:
    """Return all columns of shards that may differ, ordered by first appearance.

    If shards have different encodings for a column, the result names only its kind, such as `ndarray`.
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
    """One shard as the index describes it.

    `raw` is the uncompressed file that readers see. If `compression` is set, `zip` is the stored file, and
    `raw` what decompression must produce. `columns` may be empty for tars of other tools, which describe
    themselves.
    """

    raw: FileInfo
    samples: int
    columns: tuple[Column, ...] = ()
    zip: FileInfo | None = None
    compression: str | None = None
    size_limit: int | None = None

    @property
    def stored(self) -> FileInfo:
        """The file that is stored in the folder or bucket."""
        return self.raw if self.zip is None else self.zip

    @property
    def has_hashes(self) -> bool:
        """Whether the index has a hash of the shard, so that its bytes can be verified."""
        return bool(self.raw.hashes or self.stored.hashes)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ShardInfo:
        """Make a shard from the data that `dataclasses.asdict` returns."""
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
    """Digest of facts that were read from the files, if the index has no hashes; part of the fingerprint."""
    blocks: FileInfo | None = None
    """Size and hashes of blocks.bin, if the index has them; not part of the fingerprint."""

    @cached_property
    def shard_samples(self) -> Ints:
        """The number of samples of each shard in manifest order, int64[K]."""
        if isinstance(self.shards, ShardTable):
            return self.shards.samples
        return np.fromiter((s.samples for s in self.shards), dtype=np.int64, count=len(self.shards))

    @cached_property
    def raw_bytes(self) -> Ints:
        """The uncompressed size of each shard in bytes, int64[K]; `UNKNOWN` where the index has none."""
        if isinstance(self.shards, ShardTable):
            return self.shards.raw_bytes
        return np.fromiter((s.raw.bytes for s in self.shards), dtype=np.int64, count=len(self.shards))

    @cached_property
    def kinds(self) -> Sequence[ShardInfo]:
        """One shard of each kind; shards of one kind have the same columns, compression and size limit."""
        if isinstance(self.shards, ShardTable):
            return self.shards.kinds
        return list({(s.columns, s.compression, s.size_limit): s for s in self.shards}.values())

    @cached_property
    def shard_starts(self) -> Ints:
        """The sample id of each shard's first row, int64[K + 1]; the last entry is the number of samples."""
        starts = np.zeros(len(self.shards) + 1, dtype=np.int64)
        np.cumsum(self.shard_samples, out=starts[1:])
        return starts

    @property
    def samples(self) -> int:
        """The number of samples in the whole dataset."""
        return int(self.shard_starts[-1])

    @cached_property
    def fingerprint(self) -> str:
        """Hex blake2b-128 over the ordered (basename, bytes, samples, hash) of all raw shards.

        `hash` is the first of the raw file's hashes by name; the stored file's if the raw file has none.
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
    """Return the FileInfo of a file whose size and hashes are `stated`. Raises ShardError if not valid."""
    basename = checked_basename(name, where)
    entry: Mapping[str, Any] = stated if isinstance(stated, Mapping) else {}
    hashes = {kind: value for kind, value in entry.items() if kind != "bytes"}
    size = entry.get("bytes")
    if type(size) is not int or size < 0:
        raise ShardError(where, f"{basename}: must have a size in bytes and hashes")
    if not all(isinstance(value, str) for value in hashes.values()):
        raise ShardError(where, f"{basename}: hashes must be strings")
    return FileInfo(basename, size, hashes)


def checked_basename(name: object, index_file: str | os.PathLike[str]) -> str:
    """Return `name` if it is a relative path that stays in the dataset's folder. Raises ShardError otherwise.

    Subfolders are allowed (merged datasets use them); absolute paths, `..`, backslashes, drive letters,
    control characters and unpaired surrogates are not.
    """
    if not isinstance(name, str) or not name or len(name) > MAX_BASENAME_CHARS:
        raise ShardError(index_file, f"a shard's basename must be a non-empty string, not {str(name)[:80]!r}")
    parts = PurePosixPath(name).parts
    drive = bool(parts) and ":" in parts[0]
    unsafe = name.startswith("/") or "\\" in name or drive or any(ord(c) < 32 for c in name)
    if unsafe or not parts or any(p in ("..", ".") for p in name.split("/")):
        raise ShardError(index_file, f"basename {name!r} leaves the dataset's folder; do not trust it")
    if any(0xD800 <= ord(c) <= 0xDFFF for c in name):
        raise ShardError(index_file, f"basename {name!r} is not Unicode text; do not open the dataset")
    return name


@dataclass(frozen=True)
class Files:
    """One file per shard, in arrays: `names` (each ends with a newline), `sizes` in bytes, and `digests`."""

    names: Bytes
    sizes: Ints
    hash_names: tuple[str, ...]
    digests: tuple[Bytes, ...]  # one array per hash: uint8[shards, digest bytes]

    @cached_property
    def _ends(self) -> Ints | range:
        """The positions in `names` of the newlines that end them; a range if all names are equally long."""
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
        """Return whether all names are unique and stay in their folder, and all arrays are complete."""
        names, count = self.names, len(self.sizes)
        ends = np.flatnonzero(names == _NEWLINE)
        if not count or len(ends) != count or int(ends[-1]) != len(names) - 1:
            return False
        if not _IS_PLAIN[names].all() or any(len(digests) != count for digests in self.digests):
            return False
        lengths = np.diff(ends, prepend=-1) - 1
        if int(lengths.max()) > MAX_BASENAME_CHARS or int(self.sizes.min()) < 0:
            return False
        # No name or part of a path may be empty or begin with a dot: check the first byte of each.
        begins = np.concatenate([[0], ends[:-1] + 1, np.flatnonzero(names == _SLASH) + 1])
        if np.isin(names[begins], (_SLASH, _DOT, _NEWLINE)).any():
            return False
        if int(lengths.min()) == int(lengths.max()):  # the usual case; needs no Python object per name
            ordered = np.sort(names.view(f"S{int(lengths[0]) + 1}"))
            return not bool((ordered[1:] == ordered[:-1]).any())
        return len(set(names.tobytes().split(b"\n"))) == count + 1


class ShardTable(Sequence[ShardInfo]):
    """The shards of a large dataset in order, stored in arrays."""

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
        """`kinds`: a shard of each kind (columns, compression, limit); `kind`: each shard's index into it."""
        self.kinds, self.kind = tuple(kinds), kind
        self.samples, self.raw, self.packed = samples, raw, packed
        self.fingerprint, self.blocks = fingerprint, blocks

    @property
    def raw_bytes(self) -> Ints:
        """The uncompressed sizes of all shards in bytes, int64[shards]."""
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
        number = range(len(self))[number]  # resolves negative numbers and raises IndexError
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
    """Return a table of `shards`, whose fingerprint is given; None if they do not fit into a table."""
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
            return None  # the table stores digests as bytes: only even-length lower-case hex is preserved
        digests.append(np.frombuffer(bytes.fromhex(text), dtype=np.uint8).reshape(len(infos), -1))
    try:
        names = "".join(f"{info.basename}\n" for info in infos).encode("ascii")
    except UnicodeEncodeError:
        return None
    sizes = np.fromiter((info.bytes for info in infos), np.int64, len(infos))
    files = Files(np.frombuffer(names, dtype=np.uint8), sizes, hash_names, tuple(digests))
    return files if files.are_sound() else None
