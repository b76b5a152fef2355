"""Open flat files of token ids, in a folder or a store, as a dataset of rows of constant length.

`find_token_rows` reads headers (and the whole .idx of a Megatron pair) and makes a manifest whose shards are
byte ranges of these files. Nothing is copied or converted, and all code that reads shards works with them
(cache, prefetch, single rows, resume). Local ranges are mapped; remote ones are read by `RangeStore`, a store
in which every range is an object.

Rows. All files form one stream in the order of their names, which is cut every `sequence_length` tokens. The
rows equal those of `shardkit convert --sequence-length L --drop-tail`, byte for byte. A row that begins in
one file and ends in another is a separate shard. With `per_file`, each file is cut separately, as in
OLMo-core. An incomplete row at the end is omitted, and a warning gives its size.

Fingerprint. These files have no hashes, so the fingerprint is computed from names, sizes, the `RowCut`, and
the bytes at a few offsets of each file (`_PROBES` over all files, at least the first 4 KiB of each). It is
equal for copies of the files at any location. It differs for other data of the same sizes, unless only bytes
that were not sampled differ. Within a run, a file that is replaced after it was opened is an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardkit.arrays import Ints
from shardkit.datasets.range_store import (
    AnyStore,
    RangeRows,
    RangeStore,
    connect_ranges,
    has_that_name,
    list_matching,
    split_place,
)
from shardkit.errors import NOT_WHOLE, ShardError, ShardNotFoundError, warn_user
from shardkit.formats.tar.shard_list import is_pattern, matches
from shardkit.formats.tokens import (
    HEAD_BYTES,
    MegatronIndex,
    Piece,
    name_of,
    read_header,
    refuse_two_kinds,
)
from shardkit.manifest import Column, FileInfo, Manifest, ShardInfo
from shardkit.storage.object_file import open_object
from shardkit.storage.resilient import ResilientStore
from shardkit.storage.store import (
    ObjectInfo,
    ObjectNotFoundError,
    StorageOptions,
)
from shardkit.storage.url import is_remote, local_path
from shardkit.units import whole_number

__all__ = ["RangeStore", "RowCut", "find_token_rows", "is_token_file"]

SHARD_BYTES = 64 << 20  # maximum size of a shard, whose rows are fetched together
MAX_SHARDS = 1 << 15  # maximum number per dataset; above two terabytes, shards are larger instead
MAX_ROW_TOKENS = 1 << 28  # longer rows are refused as a mistake
_MOST_ID = 1 << 24  # higher ids cause a warning; far above any vocabulary
_MOST_INT = np.uint64((1 << 63) - 1)
_MOST_HALF = 7  # largest value of the upper 16 bits of an id below 2**19
_FEWEST_HALVES = 32  # minimum number of 16-bit halves of 32-bit ids by which a wrong dtype is recognized
_PROBES, _PROBES_OF_FILE = 128, 16
_THREADS = 32
_SUFFIXES = (".idx", ".bin", ".npy")


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCut:
    """Options that define how flat token files are cut into rows. Raises ValueError for impossible ones."""

    sequence_length: int
    """Number of tokens per row."""
    token_dtype: str | None = None
    """Dtype of the ids in files that do not record it: nanoGPT's .bin, OLMo's .npy."""
    per_file: bool = False
    """Begin a new row at the start of each file, and omit an incomplete row at its end."""

    def __post_init__(self) -> None:
        length = whole_number(self.sequence_length, "sequence_length")
        if not 1 <= length <= MAX_ROW_TOKENS:
            raise ValueError(f"sequence_length must be from 1 to {MAX_ROW_TOKENS:,}, not {length:,}")
        object.__setattr__(self, "sequence_length", length)
        known = ("uint16", "uint32", "int32", "int64")
        if self.token_dtype not in (None, *known):
            raise ValueError(f"token_dtype must be one of {', '.join(known)}, not {self.token_dtype!r}")


@dataclass(frozen=True, slots=True)
class _File:
    """A file whose ids begin at byte `start`; `probe` holds sampled bytes for the fingerprint."""

    info: ObjectInfo
    start: int
    dtype: np.dtype[Any]
    probe: bytes

    @property
    def count(self) -> int:
        return (self.info.bytes - self.start) // self.dtype.itemsize


def is_token_file(path: str) -> bool:
    """Return whether a path, URL or pattern names flat files of tokens."""
    return path.endswith(_SUFFIXES)


def find_token_rows(
    path: str,
    cut: RowCut | None,
    storage: StorageOptions | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
    names: Sequence[str] | None = None,
) -> RangeRows:
    """Find the rows in a file, a Megatron pair, a folder of files, or the files that a pattern matches.

    A shard has at most `shard_bytes`, unless there would be more than `MAX_SHARDS`. If `names` are given,
    only these files of the folder `path` are read, and no .idx. Raises ShardError if files are missing or
    malformed, and StoreError if a store fails.
    """
    if cut is None:
        raise ShardError(path, "has token ids without rows: give the length of a row, sequence_length=2048")
    base, name = split_place(path, is_token_file)
    store = connect_ranges(base, storage)
    objects = _find(path, store, name) if names is None else [(store.head(one), None) for one in names]
    probes = max(1, min(_PROBES_OF_FILE, _PROBES // len(objects)))
    places = [(info, at) for info, _ in objects for at in _places(info.bytes, probes)]
    with ThreadPoolExecutor(min(_THREADS, len(places)), thread_name_prefix="shardkit-open") as pool:
        seen: dict[str, list[bytes]] = {}
        for (info, _), data in zip(
            places, pool.map(lambda place: _probe(store, *place), places), strict=True
        ):
            seen.setdefault(info.key, []).append(data)
        files = list(pool.map(lambda named: _look(store, named, cut, seen[named[0].key]), objects))
    for file in files:
        if file.dtype != files[0].dtype:
            found = f"has {file.dtype.name}, {files[0].info.key} has {files[0].dtype.name}"
            raise ShardError(store.where(file.info.key), f"{found}: open them as two streams")
    manifest = _manifest(path, files, cut, shard_bytes)
    folder = None if is_remote(path) else local_path(base or ".")
    versions = {file.info.key: file.info.version for file in files}
    return RangeRows(folder, store if isinstance(store, ResilientStore) else None, manifest, versions)


def _find(path: str, store: AnyStore, name: str) -> list[_Named]:
    """Return the sorted files in a store that `name`, a file name or a pattern, selects; "" selects all."""
    if name and (not is_pattern(name) or has_that_name(path, store, name)):
        return [_pair(store, name) or (store.head(name), None)]
    listed = [info for info in list_matching(store, name) if matches(info.key, name or "*")]
    found = [info for info in listed if is_token_file(info.key)]
    indexes = [info.key for info in found if info.key.endswith(".idx")]
    if len(indexes) == 1:
        pair = _pair(store, indexes[0])
        assert pair is not None
        return [pair]
    if indexes:
        raise ShardError(path, f"has {len(indexes)} Megatron indexes ({', '.join(indexes[:5])}): name one")
    if not found:
        raise ShardNotFoundError(path, "holds no files of tokens: looked for .npy, .bin, and .idx with .bin")
    if len({info.key[-4:] for info in found}) > 1:
        raise ShardError(path, "has .bin and .npy files: name one kind, such as '*.npy'")
    refuse_two_kinds(path, [info.key for info in found])
    return [(info, None) for info in found]


def _pair(store: AnyStore, name: str) -> _Named | None:
    """Return the Megatron pair (.bin, .idx) of which `name` is a file or the common prefix, or None."""
    stem = name[:-4] if name.endswith((".bin", ".idx")) else name
    if name.endswith(".npy"):
        return None
    try:
        index = store.head(f"{stem}.idx")
    except ObjectNotFoundError:
        if name.endswith(".idx"):
            raise
        return None
    return store.head(f"{stem}.bin"), index


def _places(size: int, probes: int) -> list[int]:
    """Return `probes` byte offsets at which a file is sampled: at its start, near its end, and between."""
    edges = np.linspace(0, max(0, size - HEAD_BYTES), probes, dtype=np.int64)
    return sorted({int(edge) for edge in edges})


def _probe(store: AnyStore, info: ObjectInfo, at: int) -> bytes:
    return store.get(info.key, at, min(at + HEAD_BYTES, info.bytes), version=info.version)


def _look(store: AnyStore, named: _Named, cut: RowCut, parts: Sequence[bytes]) -> _File:
    """Read the header of a file and check its ids; `parts` are the bytes sampled at its `_places`."""
    info, index = named
    where = store.where(info.key)
    if index is not None:
        with open_object(store, index) as file:
            checked = MegatronIndex(file, store.where(index.key), index.bytes, where, info.bytes)
        start, dtype = 0, checked.dtype
    else:
        if not info.bytes:
            if cut.token_dtype is None:
                raise ShardError(where, f"is empty: {NOT_WHOLE}")
            warn_user(f"{where}: is empty and adds no rows: is that intended, or {NOT_WHOLE}?")
        start, stated = read_header(where, parts[0], info.bytes)
        dtype = _dtype(where, stated, cut.token_dtype)
    if (info.bytes - start) % dtype.itemsize:
        raise ShardError(where, f"has {info.bytes - start:,} bytes of tokens, not whole {dtype.name} ids")
    if index is None:
        _warn_of_odd_ids(where, dtype, start, parts, _places(info.bytes, len(parts)))
    return _File(info, start, dtype, b"".join(parts))


def _warn_of_odd_ids(
    where: str, dtype: np.dtype[Any], start: int, parts: Sequence[bytes], places: Sequence[int]
) -> None:
    """Warn if the sampled bytes decode to impossible ids, or to ids that suggest another dtype."""
    found = [_ids(part, at, start, dtype) for part, at in zip(parts, places, strict=True)]
    ids = np.concatenate(found)
    if not len(ids):
        return
    problem = None
    if ids.min() < 0:
        problem = f"ids as low as {int(ids.min()):,}"
    elif ids.max() > _MOST_ID:
        problem = f"ids as high as {int(ids.max()):,}"
    elif any(map(_is_of_halves, found)):
        problem = "small numbers at every other place, which look like the upper halves of larger ids"
    if problem is not None:
        other = np.dtype("<u2" if ids.max() > _MOST_ID and dtype.itemsize > 2 else "<u4")
        readings = (f"{kind.name} {_shown(parts[0], start, kind)}" for kind in (dtype, other))
        advice = "give token_dtype= as written" if start == 0 else "the file states this dtype"
        warn_user(f"{where}: has {problem}: {advice}; it begins with {', or as '.join(readings)}")


def _ids(part: bytes, at: int, start: int, dtype: np.dtype[Any]) -> Ints:
    """Decode the complete ids in `part`, a file's bytes from offset `at` on; its ids begin at `start`."""
    skip = start - at if at < start else -(at - start) % dtype.itemsize
    body = part[skip:]
    whole = np.frombuffer(body[: len(body) // dtype.itemsize * dtype.itemsize], dtype)
    return whole.clip(max=_MOST_INT).astype(np.int64) if dtype.kind == "u" else whole.astype(np.int64)


def _is_of_halves(ids: Ints) -> bool:
    """Return whether the ids look like halves of wider ids: every other one is small, the others vary."""
    for first in (0, 1):
        upper, lower = ids[first::2], ids[1 - first :: 2]
        if len(upper) < _FEWEST_HALVES or not upper.max() <= _MOST_HALF < lower.max():
            continue
        if len(np.unique(lower)) > _FEWEST_HALVES:
            return True
    return False


def _shown(part: bytes, start: int, dtype: np.dtype[Any]) -> str:
    return " ".join(f"{number}" for number in _ids(part, 0, start, dtype)[:6].tolist())


def _dtype(where: str, stated: np.dtype[Any] | None, given: str | None) -> np.dtype[Any]:
    if stated is None:
        if given is None:
            raise ShardError(
                where, "does not state the type of its ids: give token_dtype='uint16' or 'uint32', as written"
            )
        return np.dtype(given).newbyteorder("<")
    if given is not None and stated.name != given:
        raise ShardError(where, f"states {stated.name} ids, not {given}: omit token_dtype")
    return stated


def _manifest(path: str, files: Sequence[_File], cut: RowCut, shard_bytes: int) -> Manifest:
    length, dtype = cut.sequence_length, files[0].dtype
    column = Column("tokens", f"ndarray:{dtype.name}:{length}", length * dtype.itemsize)
    total = sum(file.count for file in files)
    shards = []
    for pieces in _shards(files, cut, shard_bytes):
        size = sum(piece.bytes for piece in pieces)
        rows = size // (length * dtype.itemsize)
        shards.append(ShardInfo(FileInfo(name_of(pieces), size), rows, (column,)))
    rows = sum(info.samples for info in shards)
    if not rows:
        raise ShardError(path, f"has {total:,} tokens, which fill no row of {length:,}")
    if tail := total - rows * length:
        whose = "at the ends of its files" if cut.per_file and len(files) > 1 else "at its end"
        warn_user(
            f"{path}: {tail:,} of {total:,} tokens, {whose}, fill no row of {length:,} and are left out; "
            "`shardkit convert` can pad them (--eos, --pad)"
        )
    digest = hashlib.blake2b(f"{column.encoding}:{cut.per_file}".encode(), digest_size=16)
    for file in files:
        digest.update(f"\0{file.info.bytes}\0".encode() + file.probe)
    return Manifest("tokens", shards, seen=digest.hexdigest())


def _shards(files: Sequence[_File], cut: RowCut, shard_bytes: int) -> Iterator[list[Piece]]:
    """Yield the pieces of each shard: whole rows of one file, or one row that spans several files."""
    row_bytes = cut.sequence_length * files[0].dtype.itemsize
    total = sum(file.info.bytes for file in files)
    shard_bytes = max(1, max(shard_bytes, total // MAX_SHARDS) // row_bytes) * row_bytes
    begun: list[Piece] = []  # pieces of a row that the next file continues
    for file in files:
        at, stop = file.start, file.info.bytes
        if begun:
            missing = row_bytes - sum(piece.bytes for piece in begun)
            end = min(at + missing, stop)
            if end > at:
                begun.append(Piece(file.info.key, at, end))
            if end - at < missing:
                continue
            yield begun
            at, begun = end, []
        whole = at + (stop - at) // row_bytes * row_bytes
        for start in range(at, whole, shard_bytes):
            yield [Piece(file.info.key, start, min(start + shard_bytes, whole))]
        if whole < stop and not cut.per_file:
            begun = [Piece(file.info.key, whole, stop)]


_Named = tuple[ObjectInfo, ObjectInfo | None]
"""A file of tokens, and its .idx if it is in Megatron's format."""
