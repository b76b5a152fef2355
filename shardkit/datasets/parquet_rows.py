"""Open Parquet files, in a folder or a store, as a dataset whose shards are row groups.

`find_parquet_rows` reads the footers and makes a manifest whose shards are the byte ranges of the wanted
columns in one or more consecutive row groups of a file. Nothing is copied or converted, and all code that
reads shards works with them (cache, prefetch, eviction, resume). Local ranges are mapped; remote ones are
read by `RangeStore`. Bytes of other columns are not read, except for gaps of up to `_GAP_BYTES` between two
ranges.

Rows are those of all files in the order of their names. Small row groups of a file are joined until a shard
would exceed `SHARD_BYTES`. A larger row group is one shard, because its columns can only be decoded as a
whole.

Footers. Each takes one request, two if it is longer than `TAIL_BYTES`. With a cache folder, one process of a
node reads them for all, and later starts read those of unchanged objects from the folder.

Fingerprint. It is computed from the names, sizes and footers of the files, and the wanted columns. Footers
have the offset, size, number of values and usually minimum and maximum of each column in each row group. It
is equal for copies of the files at any location. Within a run, a file that is replaced is an error.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import zstandard

from shardkit.datasets.range_store import (
    AnyStore,
    RangeRows,
    connect_ranges,
    has_that_name,
    list_matching,
    split_place,
)
from shardkit.errors import ShardError, ShardNotFoundError, warn_user
from shardkit.formats.mds.encodings import ARRAY_DTYPES
from shardkit.formats.parquet import (
    MAX_FOOTER_BYTES,
    NULL,
    NULLABLE,
    TAIL_BYTES,
    Chunk,
    ParquetFooter,
    ParquetPart,
    RowGroup,
    encodings_of,
    fixed_size,
    footer_bytes,
)
from shardkit.formats.tar.find import expand, is_there
from shardkit.formats.tar.shard_list import common_folder, is_pattern, matches
from shardkit.formats.tokens import Piece, name_of
from shardkit.manifest import TOKENS, Column, FileInfo, Manifest, ShardInfo, token_layout
from shardkit.storage.resilient import ResilientStore
from shardkit.storage.store import ObjectInfo, ObjectNotFoundError, StorageOptions
from shardkit.storage.url import is_remote, local_path
from shardkit.units import format_bytes

if TYPE_CHECKING:
    from shardkit.cache.indexes import NodeIndexes

SHARD_BYTES = 4 << 20  # row groups are joined up to this size of their wanted columns
LARGE_BYTES = 256 << 20  # larger shards cause a warning: they are fetched, decoded and held as a whole
MAX_DECODED_BYTES = 16 << 30  # larger shards are refused; 50 times what writers make by default
_GAP_BYTES = 64 << 10  # ranges that are closer are read as one: faster than a second request
_OFFSET_BYTES = 4  # memory of a value of varying size, at least
_THREADS = 32
_SUFFIXES = (".parquet", ".pq")
ChooseColumns = Callable[[Mapping[str, str]], Sequence[str]]
"""Returns the columns to read, of the names and encodings of a file's columns."""

_SPLITS = ({"train", "training"}, {"val", "valid", "validation", "dev", "eval"}, {"test", "testing"})


@dataclass(frozen=True, slots=True)
class ParquetRows(RangeRows):
    """The rows of Parquet files, and where each shard is in its file."""

    parts: Sequence[ParquetPart]
    decoded_bytes: int
    """Estimate of the memory that all shards take when they are decoded."""


@dataclass(frozen=True, slots=True)
class _File:
    """A file with its parsed and its stored footer."""

    info: ObjectInfo
    footer: ParquetFooter
    data: bytes
    where: str
    encodings: Mapping[str, str]


def is_parquet_name(path: str) -> bool:
    """Return whether a path, URL or pattern names Parquet files."""
    return path.endswith(_SUFFIXES)


def find_parquet_rows(
    path: str | Sequence[str],
    storage: StorageOptions | None = None,
    *,
    columns: Sequence[str] | ChooseColumns | None = None,
    sequence_length: int | None = None,
    indexes: NodeIndexes | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> ParquetRows:
    """Find the rows of a Parquet file, of a folder and its sub-folders, or of files that a pattern matches.

    The path may be a brace list ("part-{00..31}.parquet"), or several paths, whose rows come in their order.

    `columns`: the columns to read (None: all), or a function that returns them. `sequence_length`: the length
    of the lists in the column of tokens, which footers do not tell. `indexes` keeps the footers of remote
    files on this node. Raises ShardNotFoundError if there are no Parquet files, ShardError if one is
    malformed or has other columns than the first, and StoreError if a store fails.
    """
    names = expand([path] if isinstance(path, str) else path, lambda name: is_there(name, storage))
    path = names[0]
    base, store, found = _find_one(path, storage) if len(names) == 1 else _find_several(names, storage)
    data = _footers(store, found, indexes)
    files = [_look(store, info, one) for info, one in zip(found, data, strict=True)]
    described = _columns(path, files, columns, sequence_length)
    manifest, parts, decoded = _manifest(path, files, described, shard_bytes)
    folder = None if is_remote(path) else local_path(base or ".")
    versions = {info.key: info.version for info in found}
    remote = store if isinstance(store, ResilientStore) else None
    return ParquetRows(folder, remote, manifest, versions, parts, decoded)


def _find_one(path: str, storage: StorageOptions | None) -> tuple[str, AnyStore, list[ObjectInfo]]:
    """Return (folder, store of the folder, files) of a path or URL."""
    base, name = split_place(path, is_parquet_name)
    store = connect_ranges(base, storage)
    found = _find(path, store, name)
    if not found and is_remote(path) and is_parquet_name(name) and not is_pattern(name):
        base = path.rstrip("/")  # Spark writes folders of this name
        store = connect_ranges(base, storage)
        found = _find(path, store, "")
    if not found:
        raise ShardNotFoundError(path, "holds no Parquet files")
    return base, store, found


def _find_several(
    paths: Sequence[str], storage: StorageOptions | None
) -> tuple[str, AnyStore, list[ObjectInfo]]:
    """Return (deepest common folder, store of the folder, files in the order of their paths)."""
    if len({is_remote(path) for path in paths}) > 1:
        local = next(path for path in paths if not is_remote(path))
        raise ShardError(local, "is local but others are remote; open each as a separate stream")
    places = [
        split_place(path if is_remote(path) else str(local_path(path).absolute()), is_parquet_name)
        for path in paths
    ]
    base = common_folder([folder for folder, _ in places])
    if is_remote(paths[0]) and (base.count("/") < 2 or base.endswith("://")):
        raise ShardError(paths[0], f"and {paths[-1]} are in different stores; open each as its own stream")
    base = base or "/"
    store = connect_ranges(base, storage)
    found: dict[str, ObjectInfo] = {}
    for path, (folder, name) in zip(paths, places, strict=True):
        below = folder[len(base) :].strip("/")
        some = _find(path, store, "/".join(part for part in (below, name or "**/*") if part))
        if not some:
            raise ShardNotFoundError(path, "holds no Parquet files")
        if twice := [info.key for info in some if info.key in found]:
            raise ShardError(path, f"repeats {twice[0]}, which an earlier path names")
        found |= {info.key: info for info in some}
    return base, store, list(found.values())


def _find(path: str, store: AnyStore, name: str) -> list[ObjectInfo]:
    """Return the sorted files in a store that `name`, a file name or a pattern, selects; "" selects all."""
    if name and not is_pattern(name):
        try:
            return [store.head(name)]
        except ObjectNotFoundError:
            return []
    if name and has_that_name(path, store, name):
        return [store.head(name)]
    if not is_remote(store.url) and not Path(store.url).is_dir():
        return []
    pattern = name or "**/*"
    found = [info for info in list_matching(store, pattern) if matches(info.key, pattern)]
    found = [info for info in found if is_parquet_name(info.key) and not _is_hidden(info.key, pattern)]
    _refuse_splits(path, [info.key for info in found])
    return sorted(found, key=lambda info: info.key)


def _is_hidden(name: str, pattern: str) -> bool:
    """Return whether a name is one that writers give to files which are not data, such as `_metadata`."""
    asked = any(part.startswith("_") for part in pattern.split("/"))
    return not asked and any(part.startswith("_") for part in name.split("/"))


def _refuse_splits(path: str, names: Sequence[str]) -> None:
    """Raise ShardError if files are of several splits, which would become one stream."""
    words = [set(re.split("[^a-z]+", name.lower())) for name in names]
    splits = [split for split in _SPLITS if any(split & found for found in words)]
    if len(splits) > 1:
        kinds = " and ".join(min(split & set().union(*words)) for split in splits)
        raise ShardError(path, f"has files of several splits ({kinds}): name one, such as 'train-*.parquet'")


def _footers(store: AnyStore, found: Sequence[ObjectInfo], indexes: NodeIndexes | None) -> list[bytes]:
    """Return the footer of each file."""

    def read(numbers: Sequence[int]) -> list[bytes]:
        with ThreadPoolExecutor(min(_THREADS, len(numbers)), thread_name_prefix="shardkit-open") as pool:
            return list(pool.map(lambda number: _read_footer(store, found[number]), numbers))

    if indexes is None or not isinstance(store, ResilientStore):
        return read(range(len(found)))
    origins = [f"{store.url}/{info.key}\n{info.version}" for info in found]
    packed = indexes.footers(origins, lambda numbers: [*map(zstandard.compress, read(numbers))])
    return [zstandard.decompress(one, MAX_FOOTER_BYTES) for one in packed]


def _read_footer(store: AnyStore, info: ObjectInfo) -> bytes:
    where = store.where(info.key)
    start = max(0, info.bytes - TAIL_BYTES)
    tail = store.get(info.key, start, info.bytes, version=info.version) if info.bytes else b""
    size = footer_bytes(where, tail, info.bytes)
    begin = info.bytes - 8 - size
    if begin < start:
        tail = store.get(info.key, begin, start, version=info.version) + tail
        start = begin
    return tail[begin - start : -8]


def _look(store: AnyStore, info: ObjectInfo, data: bytes) -> _File:
    where = store.where(info.key)
    footer = ParquetFooter(where, data, info.bytes)
    try:
        return _File(info, footer, data, where, encodings_of(footer.schema))
    except ValueError as error:
        raise ShardError(where, f"{error}; write the file with different names") from error


def _columns(
    path: str,
    files: Sequence[_File],
    wanted: Sequence[str] | ChooseColumns | None,
    sequence_length: int | None,
) -> tuple[Column, ...]:
    """Return the wanted columns in the order of the first file. Raises ShardError if files differ in them."""
    names = list(files[0].encodings)
    if callable(wanted):
        wanted = wanted(files[0].encodings)
    if wanted is not None:
        if unknown := [name for name in wanted if name not in names]:
            raise ValueError(f"{path} has no column {unknown[0]!r}; it has {', '.join(names)}")
        names = [name for name in names if name in wanted]
    encodings: dict[str, tuple[str, _File]] = {}
    for file in files:
        if wanted is None and (more := [name for name in file.encodings if name not in names]):
            raise ShardError(
                file.where,
                f"has a column {more[0]!r}, which {files[0].where} lacks: select others with columns=[...]",
            )
        for name in names:
            _merge(encodings, name, file, files[0])
    nullable = {
        name for file in files for group in file.footer.groups for name in names if _nulls(group, name)
    }
    tokens = (
        None if sequence_length is None else _token_lists(path, {n: e for n, (e, _) in encodings.items()})
    )
    columns = []
    for name in names:
        encoding = encodings[name][0]
        if name == tokens:
            encoding = f"{encoding}:{sequence_length}"
        size = fixed_size(encoding)
        if name in nullable and size is not None:
            if name == tokens:
                raise ShardError(
                    path, f"column {name!r} has nulls: its rows are not all of {sequence_length:,} tokens"
                )
            encoding, size = encoding + NULLABLE, None
        columns.append(Column(name, encoding, size))
    return tuple(columns)


def _merge(encodings: dict[str, tuple[str, _File]], name: str, file: _File, first: _File) -> None:
    found = file.encodings.get(name)
    if found is None:
        raise ShardError(file.where, f"has no column {name!r}, which {first.where} has")
    known = encodings.setdefault(name, (found, file))
    if known[0] == NULL:
        encodings[name] = found, file
    elif found not in (known[0], NULL):
        problem = f"column {name!r} is {found}, but {known[0]} in {known[1].where}"
        raise ShardError(file.where, f"{problem}: write them alike, or open them as two streams")


def _nulls(group: RowGroup, name: str) -> bool:
    return any(chunk.nulls for chunk in group.chunks.get(name, ()))


def _token_lists(path: str, encodings: Mapping[str, str]) -> str | None:
    """Return the column of lists whose length `sequence_length` states; None if the files state it."""
    if any(token_layout(Column(name, e, fixed_size(e))) for name, e in encodings.items()):
        return None
    lists = [
        name for name, encoding in encodings.items() if encoding.startswith(("ndarray:int", "ndarray:uint"))
    ]
    preferred = [name for name in (TOKENS, "input_ids") if name in lists]
    if preferred or len(lists) == 1:
        return (preferred or lists)[0]
    if not lists:
        raise ShardError(path, "has no column of lists of integers, to which sequence_length could apply")
    raise ShardError(
        path, f"has several lists of integers ({', '.join(lists)}): select one with columns=[...]"
    )


def _manifest(
    path: str, files: Sequence[_File], columns: tuple[Column, ...], shard_bytes: int
) -> tuple[Manifest, list[ParquetPart], int]:
    sizes = {column.name: _value_bytes(column.encoding) for column in columns}
    digest = hashlib.blake2b(digest_size=16)
    for column in columns:
        digest.update(f"{column.name}\0{column.encoding}\n".encode())
    shards: list[ShardInfo] = []
    parts: list[ParquetPart] = []
    decoded = largest = 0
    for file in files:
        digest.update(f"\0{file.info.key}\0{file.info.bytes}\0".encode() + file.data)
        starts = [0]
        for group in file.footer.groups:
            starts.append(starts[-1] + group.rows)
        for first, stop, chunks in _shards(file, sizes, shard_bytes):
            pieces = _pieces(file.info.key, [chunk for chunk, _ in chunks])
            stored, rows = sum(piece.bytes for piece in pieces), starts[stop] - starts[first]
            memory = sum(max(chunk.decoded_bytes, size * chunk.values) for chunk, size in chunks)
            if memory > MAX_DECODED_BYTES:
                problem = f"row group {first} takes {format_bytes(memory)} of memory"
                raise ShardError(file.where, f"{problem}: select columns, or write smaller row groups")
            footer = zstandard.compress(file.footer.of_groups(first, stop))
            shards.append(ShardInfo(FileInfo(name_of(pieces), stored), rows, columns))
            parts.append(ParquetPart(file.info.key, file.info.bytes, first, stop, starts[first], footer))
            decoded, largest = decoded + memory, max(largest, memory)
    if not shards:
        raise ShardError(path, "has no rows")
    if largest > LARGE_BYTES:
        warn_user(
            f"{path}: has row groups of up to {format_bytes(largest)}, each read and held as a whole: "
            "loading is faster and takes less memory with row groups of 10 to 100 MB"
        )
    return Manifest("row_groups", shards, seen=digest.hexdigest()), parts, decoded


def _value_bytes(encoding: str) -> int:
    """Return the memory of a decoded value, which may take less than a bit in the file."""
    name = encoding.removesuffix(NULLABLE).removeprefix("ndarray:").partition(":")[0]
    return np.dtype(name).itemsize if name in ARRAY_DTYPES.values() else _OFFSET_BYTES


def _shards(
    file: _File, sizes: Mapping[str, int], shard_bytes: int
) -> Iterator[tuple[int, int, list[tuple[Chunk, int]]]]:
    """Yield (first row group, last + 1, [(chunk, memory of a value)]) of each shard that has rows.

    `sizes` are the wanted columns, with the memory of their values.
    """
    begun: list[tuple[Chunk, int]] = []
    first = size = 0
    for number, group in enumerate(file.footer.groups):
        if group.rows and (missing := [name for name in sizes if name not in group.chunks]):
            raise ShardError(file.where, f"row group {number} has no column {missing[0]!r}")
        chunks = [(chunk, size) for name, size in sizes.items() for chunk in group.chunks.get(name, ())]
        more = sum(chunk.stop - chunk.start for chunk, _ in chunks)
        if begun and (size + more > shard_bytes or not group.rows):
            yield first, number, begun
            begun = []
        if not begun:
            first, size = number, 0
        if group.rows:
            begun, size = begun + chunks, size + more
    if begun:
        yield first, len(file.footer.groups), begun


def other_columns(part: ParquetPart, names: Sequence[str], where: str) -> tuple[ShardInfo, dict[str, str]]:
    """Return the shard of columns in the row groups of `part`, and the encodings of all its columns.

    Leaves out `names` that the file does not have. Raises ShardError if the footer is malformed.
    """
    footer = ParquetFooter(where, zstandard.decompress(part.footer, MAX_FOOTER_BYTES), part.file_bytes)
    encodings = encodings_of(footer.schema)
    columns = [Column(name, encodings[name], None) for name in names if name in encodings]
    groups = footer.groups[: part.stop - part.first]
    chunks = [chunk for group in groups for one in columns for chunk in group.chunks.get(one.name, ())]
    pieces = _pieces(part.file, chunks)
    info = FileInfo(name_of(pieces), sum(piece.bytes for piece in pieces))
    return ShardInfo(info, sum(group.rows for group in groups), tuple(columns)), encodings


def _pieces(file: str, chunks: Sequence[Chunk]) -> list[Piece]:
    """Return the ranges of a file that hold these chunks, sorted; ranges that are close become one."""
    found: list[Piece] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.start):
        if found and chunk.start - found[-1].stop <= _GAP_BYTES:
            found[-1] = Piece(file, found[-1].start, max(found[-1].stop, chunk.stop))
        else:
            found.append(Piece(file, chunk.start, chunk.stop))
    return found
