"""Open row files in place, in a folder or a store, as a dataset whose shards are groups of their rows.

`find_rows` reads what each file says about its groups (row groups of Parquet, record batches of Arrow, blocks
of JSON lines) and makes a manifest whose shards are the byte ranges of the wanted columns in one or more
consecutive groups of a file. Nothing is copied or converted, and all code that reads shards works with them
(cache, prefetch, eviction, resume). Local ranges are mapped; remote ones are read by `RangeStore`. Bytes of
other columns are not read where the format allows that, except for gaps of up to `_GAP_BYTES` between two
ranges.

Rows are those of all files in the order of their names. Small groups of a file are joined until a shard would
exceed `SHARD_BYTES`. A larger group is one shard, because it can only be decoded as a whole.

Indexes. What a file says about its groups is read once a node: with a cache folder, one process reads it for
all, and later starts read that of unchanged objects from the folder. A footer of Parquet takes one request,
two if it is long. JSON lines say nothing, so they are read once from end to end, and what was found is kept
for local files, too (in the cache folder of the user if no other is given).

Fingerprint. It is computed from the names and sizes of the files, what they say about their groups, and the
wanted columns. Footers have the offset, size, number of values and usually minimum and maximum of each column
in each group; of JSON lines it is a hash of all bytes. It is equal for copies of the files at any location.
Within a run, a file that is replaced is an error.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np

from shardkit.cache.indexes import NodeIndexes, kept_indexes
from shardkit.datasets.range_store import (
    AnyStore,
    RangeRows,
    connect_ranges,
    has_that_name,
    list_matching,
    split_place,
)
from shardkit.errors import ShardError, ShardNotFoundError, warn_user
from shardkit.files import user_cache_folder
from shardkit.formats.mds.encodings import ARRAY_DTYPES
from shardkit.formats.rows import NULL, NULLABLE, RowFile, RowFormat, RowGroup, RowPart, fixed_size, plural
from shardkit.formats.rows.arrow import ArrowFormat
from shardkit.formats.rows.json_lines import JsonLinesFormat
from shardkit.formats.rows.parquet import TAIL_BYTES, ParquetFormat
from shardkit.formats.tar.find import expand, is_there
from shardkit.formats.tar.shard_list import common_folder, is_pattern, matches
from shardkit.formats.tokens import Piece, name_of
from shardkit.limits import usable_cores
from shardkit.manifest import DESCRIPTIONS, TOKENS, Column, FileInfo, Manifest, ShardInfo, token_layout
from shardkit.storage.resilient import ResilientStore
from shardkit.storage.store import ObjectInfo, ObjectNotFoundError, StorageOptions
from shardkit.storage.url import is_remote, local_path
from shardkit.units import format_bytes

FORMATS: tuple[RowFormat, ...] = (ParquetFormat(), ArrowFormat(), JsonLinesFormat())
SHARD_BYTES = 4 << 20  # groups are joined up to this size of their wanted columns
LARGE_BYTES = 256 << 20  # larger shards cause a warning: they are fetched, decoded and held as a whole
MAX_DECODED_BYTES = 16 << 30  # larger shards are refused; 50 times what writers make by default
_GAP_BYTES = 64 << 10  # ranges that are closer are read as one: faster than a second request
_OFFSET_BYTES = 4  # memory of a value of varying size, at least
_THREADS = 32
ChooseColumns = Callable[[Mapping[str, str]], Sequence[str]]
"""Returns the columns to read, of the names and encodings of a file's columns."""

_ABOUT = {  # files in folders of Hugging Face's `datasets` and of shardkit, which hold no rows
    *("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json"),
    "metadata.jsonl",  # a list of images
    *DESCRIPTIONS,
}
_HIDDEN = ("_", "cache-")
_NO_FILES = "holds no Parquet, Arrow or JSON lines files"
_SPLITS = ({"train", "training"}, {"val", "valid", "validation", "dev", "eval"}, {"test", "testing"})


@dataclass(frozen=True, slots=True)
class FileRows(RangeRows):
    """The rows of row files, and where each shard is in its file."""

    parts: Sequence[RowPart]
    decoded_bytes: int
    """Estimate of the memory that all shards take when they are decoded."""

    def name_of(self, number: int) -> str:
        """Return the file of shard `number` and its rows there."""
        first, rows = self.parts[number].first_row, self.manifest.shards[number].samples
        return f"{self.parts[number].file} rows {first:,} to {first + rows - 1:,}"

    def place_of(self, number: int, row: int) -> tuple[str, int]:
        """Return (file, number of the row in it) of a row of shard `number`."""
        return self.parts[number].file, self.parts[number].first_row + row


@dataclass(frozen=True, slots=True)
class _File:
    """A file with what it says about its groups."""

    info: ObjectInfo
    rows: RowFile
    where: str


def format_of(path: str) -> RowFormat | None:
    """Return the format whose files a path, URL or pattern names; None if it names no row files."""
    return next((one for one in FORMATS if path.endswith(one.suffixes)), None)


def names_rows(path: str) -> bool:
    """Return whether a path, URL or pattern names row files."""
    return format_of(path) is not None


def find_rows(
    path: str | Sequence[str],
    storage: StorageOptions | None = None,
    *,
    columns: Sequence[str] | ChooseColumns | None = None,
    sequence_length: int | None = None,
    indexes: NodeIndexes | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> FileRows:
    """Find the rows of a row file, of a folder and its sub-folders, or of files that a pattern matches.

    The path may be a brace list ("part-{00..31}.parquet"), or several paths, whose rows come in their order.

    `columns`: the columns to read (None: all), or a function that returns them. `sequence_length`: the length
    of the lists in the column of tokens, which files do not tell. `indexes` keeps what files say about their
    groups on this node. Raises ShardNotFoundError if there are no row files, ShardError if one is malformed
    or has other columns than the first, and StoreError if a store fails.
    """
    names = expand([path] if isinstance(path, str) else path, lambda name: is_there(name, storage))
    path = names[0]
    base, store, found = _find_one(path, storage) if len(names) == 1 else _find_several(names, storage)
    kind = _one_format(path, [info.key for info in found])
    data = _read_all(kind, store, found, indexes)
    parsed = [
        kind.parse(store.where(info.key), one, info.bytes) for info, one in zip(found, data, strict=True)
    ]
    files = [
        _File(info, rows, store.where(info.key)) for info, rows in zip(found, kind.alike(parsed), strict=True)
    ]
    described = _columns(path, files, columns, sequence_length)
    manifest, parts, decoded = _manifest(path, kind, files, described, shard_bytes)
    folder = None if is_remote(path) else local_path(base or ".")
    versions = {info.key: info.version for info in found}
    remote = store if isinstance(store, ResilientStore) else None
    return FileRows(folder, remote, manifest, versions, parts, decoded)


def _find_one(path: str, storage: StorageOptions | None) -> tuple[str, AnyStore, list[ObjectInfo]]:
    """Return (folder, store of the folder, files) of a path or URL."""
    base, name = split_place(path, names_rows)
    store = connect_ranges(base, storage)
    found = _find(path, store, name)
    if not found and is_remote(path) and names_rows(name) and not is_pattern(name):
        base = path.rstrip("/")  # Spark writes folders of this name
        store = connect_ranges(base, storage)
        found = _find(path, store, "")
    if not found:
        raise ShardNotFoundError(path, _NO_FILES)
    return base, store, found


def _find_several(
    paths: Sequence[str], storage: StorageOptions | None
) -> tuple[str, AnyStore, list[ObjectInfo]]:
    """Return (deepest common folder, store of the folder, files in the order of their paths)."""
    if len({is_remote(path) for path in paths}) > 1:
        local = next(path for path in paths if not is_remote(path))
        raise ShardError(local, "is local but others are remote; open each as a separate stream")
    places = [
        split_place(path if is_remote(path) else str(local_path(path).absolute()), names_rows)
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
            raise ShardNotFoundError(path, _NO_FILES)
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
    found = [info for info in found if names_rows(info.key) and not _is_hidden(info.key, pattern)]
    found = [info for info in found if PurePosixPath(info.key).name not in _ABOUT]
    if not names_rows(pattern):  # files called .json may be about the others
        found = [info for info in found if not info.key.endswith(".json")] or found
    _refuse_splits(path, [info.key for info in found])
    return sorted(found, key=lambda info: info.key)


def _is_hidden(name: str, pattern: str) -> bool:
    """Return whether a name is one that writers give to files which are not data.

    Spark writes `_metadata`, Hugging Face's `datasets` cache-….arrow.
    """
    asked = any(part.startswith(_HIDDEN) for part in pattern.split("/"))
    return not asked and any(part.startswith(_HIDDEN) for part in name.split("/"))


def _refuse_splits(path: str, names: Sequence[str]) -> None:
    """Raise ShardError if files are of several splits, which would become one stream."""
    words = [set(re.split("[^a-z]+", name.lower())) for name in names]
    splits = [split for split in _SPLITS if any(split & found for found in words)]
    if len(splits) > 1:
        kinds = " and ".join(min(split & set().union(*words)) for split in splits)
        raise ShardError(path, f"has files of several splits ({kinds}): name one, such as 'train-*'")


def _one_format(path: str, names: Sequence[str]) -> RowFormat:
    """Return the format of all files. Raises ShardError if they have several."""
    kinds = [kind for kind in FORMATS if any(format_of(name) is kind for name in names)]
    if len(kinds) == 1:
        return kinds[0]
    if not kinds:
        raise ShardError(path, "is no row file by its name: *.parquet, *.arrow, *.feather, *.jsonl")
    both = " and ".join(kind.title for kind in kinds)
    raise ShardError(path, f"has {both} files: name one kind, such as '*{kinds[0].suffixes[0]}'")


def _read_all(
    kind: RowFormat, store: AnyStore, found: Sequence[ObjectInfo], indexes: NodeIndexes | None
) -> list[bytes]:
    """Return what each file says about its groups."""

    def read(number: int) -> bytes:
        info = found[number]
        get = partial(store.get, info.key, version=info.version)
        return kind.read(store.where(info.key), lambda start, stop: get(start, stop), info.bytes)

    origins = [f"{kind.title} {kind.version}\n{store.url}/{info.key}\n{info.version}" for info in found]
    folder, threads = None, _THREADS
    if kind.is_read_whole:
        threads = min(_THREADS, usable_cores())
        if indexes is None and (own := user_cache_folder()) is not None:
            folder = own / "rows"
            folder.mkdir(parents=True, exist_ok=True)
    if indexes is not None and (kind.is_read_whole or isinstance(store, ResilientStore)):
        kept = indexes.kept(origins, read, threads)
    else:
        kept = kept_indexes(folder, origins, read, threads)
    sizes = [info.bytes if kind.is_read_whole else min(info.bytes, TAIL_BYTES) for info in found]
    return kept.all(f"index {kind.title}", sizes)


def _columns(
    path: str,
    files: Sequence[_File],
    wanted: Sequence[str] | ChooseColumns | None,
    sequence_length: int | None,
) -> tuple[Column, ...]:
    """Return the wanted columns in the order of the first file. Raises ShardError if files differ in them."""
    given = files[0].rows.encodings
    names = list(given)
    if callable(wanted):
        wanted = wanted(given)
    if wanted is not None:
        if unknown := [name for name in wanted if name not in names]:
            raise ValueError(f"{path} has no column {unknown[0]!r}; it has {', '.join(names)}")
        names = [name for name in names if name in wanted]
    encodings: dict[str, tuple[str, _File]] = {}
    for file in files:
        if wanted is None and (more := [name for name in file.rows.encodings if name not in names]):
            raise ShardError(
                file.where,
                f"has a column {more[0]!r}, which {files[0].where} lacks: select others with columns=[...]",
            )
        for name in names:
            if (problem := file.rows.broken.get(name)) is not None:
                raise ShardError(file.where, f"{problem}; select other columns with columns=[...]")
            _merge(encodings, name, file, files[0])
    nullable = {name for file in files for group in file.rows.groups for name in names if _nulls(group, name)}
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
    found = file.rows.encodings.get(name)
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
    path: str, kind: RowFormat, files: Sequence[_File], columns: tuple[Column, ...], shard_bytes: int
) -> tuple[Manifest, list[RowPart], int]:
    sizes = {column.name: _value_bytes(column.encoding) for column in columns}
    digest = hashlib.blake2b(digest_size=16)
    for column in columns:
        digest.update(f"{column.name}\0{column.encoding}\n".encode())
    shards: list[ShardInfo] = []
    parts: list[RowPart] = []
    decoded = largest = 0
    for file in files:
        key = file.info.key
        digest.update(f"\0{key}\0{file.info.bytes}\0".encode() + file.rows.seen)
        starts = np.cumsum([0, *(group.rows for group in file.rows.groups)]).tolist()
        for groups, ranges, memory in _shards(kind, file, sizes, shard_bytes):
            pieces = _pieces(key, ranges)
            stored, rows = sum(piece.bytes for piece in pieces), starts[groups.stop] - starts[groups.start]
            if memory > MAX_DECODED_BYTES:
                problem = f"{kind.unit} {groups.start} takes {format_bytes(memory)} of memory"
                raise ShardError(file.where, f"{problem}: select columns, or write smaller ones")
            shards.append(ShardInfo(FileInfo(name_of(pieces), stored), rows, columns))
            parts.append(file.rows.part(key, groups, starts[groups.start], [*sizes]))
            decoded, largest = decoded + memory, max(largest, memory)
    if not shards:
        raise ShardError(path, "has no rows")
    if largest > LARGE_BYTES:
        warn_user(
            f"{path}: has {plural(kind.unit)} of up to {format_bytes(largest)}, each read and held as a "
            f"whole: loading is faster and takes less memory with {plural(kind.unit)} of 10 to 100 MB"
        )
    return Manifest("row_files", shards, seen=digest.hexdigest()), parts, decoded


def _value_bytes(encoding: str) -> int:
    """Return the memory of a decoded value, which may take less than a bit in the file."""
    name = encoding.removesuffix(NULLABLE).removeprefix("ndarray:").partition(":")[0]
    return np.dtype(name).itemsize if name in ARRAY_DTYPES.values() else _OFFSET_BYTES


def _shards(
    kind: RowFormat, file: _File, sizes: Mapping[str, int], shard_bytes: int
) -> Iterator[tuple[range, list[tuple[int, int]], int]]:
    """Yield (groups, ranges of the file, memory when decoded) of each shard that has rows.

    `sizes` are the wanted columns, with the memory of their values.
    """
    ranges: list[tuple[int, int]] = []
    first = stored = memory = 0
    for number, group in enumerate(file.rows.groups):
        if group.rows and (missing := [name for name in sizes if name not in group.chunks]):
            raise ShardError(file.where, f"{kind.unit} {number} has no column {missing[0]!r}")
        chunks = [(chunk, size) for name, size in sizes.items() for chunk in group.chunks.get(name, ())]
        own = [(chunk.start, chunk.stop) for chunk, _ in chunks]
        more = sum(stop - start for start, stop in [*own, *group.common])
        if ranges and (stored + more > shard_bytes or not group.rows):
            yield range(first, number), ranges, memory
            ranges = []
        if not ranges:
            first, stored, memory = number, 0, 0
        if group.rows:
            ranges, stored = [*ranges, *group.common, *own], stored + more
            memory += sum(max(chunk.decoded_bytes, size * chunk.values) for chunk, size in chunks)
    if ranges:
        yield range(first, len(file.rows.groups)), ranges, memory


def other_columns(
    rows: FileRows, number: int, names: Sequence[str], where: str
) -> tuple[RowPart, ShardInfo, Mapping[str, str]]:
    """Return shard `number` with other columns: its part, its facts, and the encodings of all columns.

    Leaves out `names` that the file does not have. Raises ShardError if the file is malformed.
    """
    kind = format_of(rows.parts[number].file)
    assert kind is not None
    found = kind.select(rows.parts[number], names, where)
    there = [name for name in names if name in found.encodings]
    pieces = _pieces(found.part.file, found.ranges if there else ())
    info = FileInfo(name_of(pieces), sum(piece.bytes for piece in pieces))
    columns = tuple(Column(name, found.encodings[name], None) for name in there)
    return found.part, ShardInfo(info, rows.manifest.shards[number].samples, columns), found.encodings


def _pieces(file: str, ranges: Sequence[tuple[int, int]]) -> list[Piece]:
    """Return pieces of a file that hold these ranges, sorted; ranges that are close become one."""
    found: list[Piece] = []
    for start, stop in sorted(ranges):
        if found and start - found[-1].stop <= _GAP_BYTES:
            found[-1] = Piece(file, found[-1].start, max(found[-1].stop, stop))
        else:
            found.append(Piece(file, start, stop))
    return found
