"""Read and write the index of an MDS dataset: index.json, plus index.bin for a large dataset.

index.json is checked completely when it is read, and written as MosaicML writes it:

    {"version": 2, "shards": [{column_encodings, column_names, column_sizes, compression, format: "mds",
      hashes, raw_data: {basename, bytes, hashes}, zip_data: {…} | null, samples, size_limit, version: 2}]}

A dataset with block checksums (formats/block_checksums.py) has one more key, which MosaicML does not read:
`"blocks": {"bytes", "xxh3_128"}`. It is in the index, not in another file, because a missing file would
silently disable the checksums.

The config in a shard's header repeats all keys of its entry but samples, raw_data, zip_data. Files have the
bytes that MDSWriter writes. Reading takes about 10 microseconds per shard, half of it Python's JSON: 450,000
shards take four to five seconds.

index.bin holds the same content in arrays that load in a fraction of a second. It is an uncompressed .npz:
`header` (JSON: version, size and xxh3_128 of its index.json, the dataset's fingerprint, one index entry for
each kind of shard), `kind`, `samples`, and the names, sizes and digests of the raw and the stored files. It
only saves time: if it is missing, damaged, or belongs to another index.json, index.json is read instead. To
detect the latter, a local index.json is hashed; a store has its hash as metadata.
"""

from __future__ import annotations

import io
import json
import math
import re
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn, cast
from zipfile import ZIP_STORED, ZipFile

import numpy as np

from shardkit.errors import ShardError
from shardkit.files import load_json, map_path, publish_bytes
from shardkit.formats.compression import parse_compression
from shardkit.formats.mds.encodings import encoding_of
from shardkit.hashing import HASH_NAMES, hash_bytes, hash_file
from shardkit.lazy import collector_paused
from shardkit.manifest import (
    BLOCKS_NAME,
    Column,
    FileInfo,
    Files,
    Manifest,
    ShardInfo,
    ShardTable,
    checked_basename,
    stated_file,
    table_of,
)

INDEX_NAME = "index.json"
TABLE_NAME = "index.bin"
TABLE_SHARDS = 10_000  # a dataset of fewer has no index.bin: reading its JSON takes a tenth of a second
LARGE_INDEX_BYTES = TABLE_SHARDS * 256  # a smaller index.json has no index.bin: entries exceed 256 bytes
VERSION = 2
MAX_INDEX_BYTES = 1 << 31  # index of about four million shards; a larger dataset needs larger shards
MAX_SHARD_BYTES = (1 << 32) - 1  # offsets in a shard are u32
MAX_COLUMNS = 4096

_BLOCKS_KEY = "blocks"
_TABLE_VERSION = 1
_MAX_HEADER_BYTES = 1 << 24  # limit in index.bin: a kind of shard takes 300 bytes, and 30 times more to parse
_NPY_HEADER_BYTES = 4096  # maximum size of an array's header; NumPy writes far less
_INDEX_HASH = "xxh3_128"
_CONFIG_KEYS = {"column_encodings", "column_names", "column_sizes", "compression", "format", "hashes"}
_KEYS = _CONFIG_KEYS | {"raw_data", "samples", "size_limit", "version", "zip_data"}
# Matches names that `checked_basename` accepts, ten times faster; other names are passed to that function.
_PLAIN_NAME = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}/){0,8}[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")
# A size in MosaicML's notation, where kb is 1,024.
_SIZE_TEXT = re.compile(r"\s*(\d{1,18})(?:\.\d{1,9})?\s*([kmgt]?)b?\s*", re.IGNORECASE)


def read_index(path: Path) -> Manifest:
    """Read the manifest from an index.json or its folder. Raises ShardError if any check fails."""
    path = Path(path)
    file = path / INDEX_NAME if path.is_dir() else path
    try:
        if not file.is_file():
            raise ShardError(file, "no such index; an MDS dataset has one in its folder")
        if (size := file.stat().st_size) > MAX_INDEX_BYTES:
            raise ShardError(file, f"has {size:,} bytes; an index has at most {MAX_INDEX_BYTES:,}")
        if file.name == INDEX_NAME and (table := read_table(file)) is not None:
            return Manifest("mds", table, blocks=table.blocks)
        text = file.read_bytes()
    except OSError as error:
        raise ShardError(file, f"cannot be read: {error.strerror or error}") from error
    return parse_index(file, text)


def parse_index(file: str | PathLike[str], text: bytes) -> Manifest:
    """Parse the bytes of an index.json. Raises ShardError, naming `file`, if any check fails."""
    with collector_paused():
        return _parse_index(file, text)


def write_index(folder: Path, shards: Sequence[ShardInfo], blocks: FileInfo | None = None) -> None:
    """Publish index.json for `shards` in `folder` atomically, with the bytes that MDSWriter would write.

    `blocks`, the entry of their block checksum file, is added to the index if given. A large dataset also
    gets index.bin, which has the same content and opens faster.
    """
    files = index_files(shards, blocks)
    if TABLE_NAME not in files:
        (Path(folder) / TABLE_NAME).unlink(missing_ok=True)
    for name, data in files.items():
        publish_bytes(Path(folder) / name, data)


def index_files(shards: Sequence[ShardInfo], blocks: FileInfo | None = None) -> dict[str, bytes]:
    """Return {name: bytes} of the index files of `shards`: index.bin if they are many, then index.json."""
    index = index_bytes(shards, blocks)
    table = table_bytes(shards, index, blocks)
    return ({} if table is None else {TABLE_NAME: table}) | {INDEX_NAME: index}


def table_bytes(shards: Sequence[ShardInfo], index: bytes, blocks: FileInfo | None = None) -> bytes | None:
    """Return the bytes of index.bin for `shards`, or None if they are few; `index` is their index.json."""
    if len(shards) < TABLE_SHARDS:
        return None
    table = table_of(shards, Manifest("mds", shards).fingerprint, blocks)
    return None if table is None else _table_bytes(table, index)


def index_bytes(shards: Sequence[ShardInfo], blocks: FileInfo | None = None) -> bytes:
    """Return the bytes of index.json for `shards`; without `blocks`, they equal MDSWriter's."""
    with collector_paused():
        data: dict[str, Any] = {"shards": [_entry(shard) for shard in shards], "version": VERSION}
        return json.dumps(data | _blocks_entry(blocks), sort_keys=True).encode()


def make_columns(columns: Mapping[str, str]) -> tuple[Column, ...]:
    """Return the columns of {name: encoding}, sorted by name. Raises ValueError for a bad encoding."""
    if not 1 <= len(columns) <= MAX_COLUMNS:
        raise ValueError(f"a dataset has 1 to {MAX_COLUMNS:,} columns, not {len(columns):,}")
    made = []
    for name in sorted(columns):
        try:
            made.append(Column(name, columns[name], encoding_of(columns[name]).size))
        except ValueError as error:
            raise ValueError(f"column {name!r}: {error}") from error
    return tuple(made)


def config_bytes(
    columns: Sequence[Column], compression: str | None, hashes: Iterable[str], size_limit: int | None
) -> bytes:
    """Return the config: the JSON text between the offsets and the samples of a shard."""
    return json.dumps(_config(columns, compression, hashes, size_limit), sort_keys=True).encode()


def parse_columns(file: str | PathLike[str], entry: Mapping[str, Any]) -> tuple[Column, ...]:
    """Parse the columns of an index entry or of a shard's config. Raises ShardError if they are malformed."""
    names, encodings, sizes = (entry.get(f"column_{key}") for key in ("names", "encodings", "sizes"))
    if not (isinstance(names, list) and isinstance(encodings, list) and isinstance(sizes, list)):
        raise ShardError(file, "column_names, column_encodings and column_sizes must be lists")
    if not (1 <= len(names) == len(encodings) == len(sizes) <= MAX_COLUMNS):
        raise ShardError(
            file, f"has {len(names)} names, {len(encodings)} encodings and {len(sizes)} sizes of columns"
        )
    columns = []
    for name, encoding, size in zip(names, encodings, sizes, strict=True):
        if not isinstance(name, str) or not isinstance(encoding, str):
            raise ShardError(
                file, f"a column's name and encoding must be strings, not {_shown(name)}, {_shown(encoding)}"
            )
        try:
            expected = encoding_of(encoding).size
        except ValueError as error:
            raise ShardError(file, f"column {name!r}: {error}") from error
        if size != expected or isinstance(size, (bool, float)):
            raise ShardError(file, f"column {name!r} states size {_shown(size)}; {encoding} has {expected}")
        columns.append(Column(name, encoding, expected))
    if len(set(names)) != len(names):
        raise ShardError(file, "two columns have the same name")
    return tuple(columns)


def _config(
    columns: Sequence[Column], compression: str | None, hashes: Iterable[str], size_limit: int | None
) -> dict[str, Any]:
    return {
        "column_encodings": [column.encoding for column in columns],
        "column_names": [column.name for column in columns],
        "column_sizes": [column.size for column in columns],
        "compression": compression,
        "format": "mds",
        "hashes": sorted(hashes),
        "size_limit": None if size_limit is None else int(size_limit),
        "version": VERSION,
    }


def _entry(shard: ShardInfo) -> dict[str, Any]:
    entry = _config(shard.columns, shard.compression, shard.stored.hashes, shard.size_limit)
    entry["raw_data"] = _file_entry(shard.raw)
    entry["zip_data"] = None if shard.zip is None else _file_entry(shard.zip)
    entry["samples"] = int(shard.samples)
    return entry


def _blocks_entry(blocks: FileInfo | None) -> dict[str, Any]:
    return {} if blocks is None else {_BLOCKS_KEY: {"bytes": blocks.bytes, **blocks.hashes}}


def _file_entry(info: FileInfo) -> dict[str, Any]:
    return {"basename": info.basename, "bytes": int(info.bytes), "hashes": dict(info.hashes)}


def _parse_index(file: str | PathLike[str], text: bytes) -> Manifest:
    try:
        data = load_json(text)
    except (ValueError, RecursionError) as error:
        offset = error.pos if isinstance(error, json.JSONDecodeError) else None
        raise ShardError(file, f"is not JSON: {error}; fetch it again", offset=offset) from error
    if not isinstance(data, dict) or not isinstance(data.get("shards"), list):
        raise ShardError(file, 'is not an index: expected an object with a list "shards"')
    if data.get("version") != VERSION:
        raise ShardError(
            file, f"has version {_shown(data.get('version'))}; only version {VERSION} is supported"
        )
    parser = _EntryParser(file)
    shards = [parser.parse(number, entry) for number, entry in enumerate(data["shards"])]
    stated = data.get(_BLOCKS_KEY)
    blocks = None if stated is None else stated_file(BLOCKS_NAME, stated, file)
    manifest = Manifest("mds", shards, blocks=blocks)
    if len(shards) >= TABLE_SHARDS and (table := table_of(shards, manifest.fingerprint, blocks)) is not None:
        return Manifest("mds", table, blocks=blocks)  # takes a fraction of the list's memory
    return manifest


class _EntryParser:
    """Parses and checks the shard entries of an index; repeated columns and compressions only once."""

    def __init__(self, file: str | PathLike[str]) -> None:
        self._file = file
        self._columns: dict[tuple[object, ...], tuple[Column, ...]] = {}
        self._basenames: set[str] = set()
        self._compressions: set[str] = set()
        self._number = 0

    def parse(self, number: int, entry: object) -> ShardInfo:
        self._number = number
        if not isinstance(entry, dict):
            self._refuse("is not an object")
        if not entry.keys() >= _KEYS:
            self._refuse(f"lacks {', '.join(sorted(_KEYS - entry.keys()))}")
        if entry["format"] != "mds" or entry["version"] != VERSION:
            version = entry["version"]
            self._refuse(
                f"has format {_shown(entry['format'])}, version {_shown(version)}; only mds, 2 is supported"
            )
        names = entry["hashes"]
        if type(names) is not list or not all(type(n) is str and n in HASH_NAMES for n in names):
            self._refuse(f"needs hashes to be a list of known names, not {_shown(names)}")
        raw = self._file_info("raw_data", entry["raw_data"])
        if raw.bytes > MAX_SHARD_BYTES:
            self._refuse(f"has raw_data.bytes of {raw.bytes:,}; an MDS shard is smaller than 4 GiB")
        packed = None if entry["zip_data"] is None else self._file_info("zip_data", entry["zip_data"])
        compression = entry["compression"]
        if compression is not None or packed is not None:
            self._check_compression(compression)
        samples = entry["samples"]
        if type(samples) is not int or not 0 <= samples <= raw.bytes // 4:
            self._refuse(f"needs samples to fit in its {raw.bytes:,} bytes, not {_shown(samples)}")
        limit = self._size_limit(entry["size_limit"])
        return ShardInfo(raw, samples, self._known_columns(entry), packed, compression, limit)

    def _refuse(self, problem: str) -> NoReturn:
        raise ShardError(self._file, f"shard {self._number:,} {problem}")

    def _file_info(self, key: str, entry: object) -> FileInfo:
        if type(entry) is not dict:
            self._refuse(f"needs {key} to be an object, not {_shown(entry)}")
        name, size, hashes = entry.get("basename"), entry.get("bytes"), entry.get("hashes")
        if type(size) is not int or size < 0:
            self._refuse(f"needs {key}.bytes to be an integer of 0 or more, not {_shown(size)}")
        if type(hashes) is not dict:
            self._refuse(f"needs {key}.hashes to be an object, not {_shown(hashes)}")
        for hash_name, digest in hashes.items():
            if hash_name not in HASH_NAMES or type(digest) is not str or not digest.isascii():
                self._refuse(
                    f"has an unknown or malformed hash in {key}: {_shown(hash_name)}: {_shown(digest)}"
                )
        if type(name) is not str or not _PLAIN_NAME.fullmatch(name):
            name = checked_basename(name, self._file)
        if name in self._basenames:
            self._refuse(f"repeats the name {name!r}; merge datasets with one sub-folder for each")
        self._basenames.add(name)
        return FileInfo(name, size, hashes)

    def _check_compression(self, name: object) -> None:
        if type(name) is not str:
            self._refuse(f"has zip_data but compression {_shown(name)}")
        if name not in self._compressions:
            try:
                parse_compression(name)
            except ValueError as error:
                self._refuse(str(error))
            self._compressions.add(name)

    def _known_columns(self, entry: dict[str, Any]) -> tuple[Column, ...]:
        lists = [entry["column_names"], entry["column_encodings"], entry["column_sizes"]]
        try:
            key = tuple([tuple(column) if type(column) is list else None for column in lists])
            known = self._columns.get(key)
        except TypeError:  # a list in a list is not hashable; parse_columns raises the error
            return parse_columns(self._file, entry)
        if known is None:
            known = self._columns[key] = parse_columns(self._file, entry)
        return known

    def _size_limit(self, limit: object) -> int | None:
        if limit is None or (type(limit) is int and limit >= 0):
            return limit
        match = _SIZE_TEXT.fullmatch(limit) if type(limit) is str else None
        if match is None:
            self._refuse(f"needs size_limit to be a size or null, not {_shown(limit)}")
        return int(match[1]) << (10 * " kmgt".index(match[2].lower() or " "))


def _shown(value: object) -> str:
    """Return up to 60 characters of a plain value's repr, or only the type of a nested value."""
    plain = value is None or isinstance(value, (str, int, float))
    return repr(value)[:60] if plain else f"a {type(value).__name__}"


def _table_bytes(table: ShardTable, index: bytes) -> bytes:
    """Return the bytes of index.bin for `table`; `index` is the index.json of the same shards, in bytes."""
    files = {"raw": table.raw} | ({"zip": table.packed} if table.packed is not None else {})
    header = {
        "version": _TABLE_VERSION,
        "index_bytes": len(index),
        "index_xxh3_128": hash_bytes(index, [_INDEX_HASH])[_INDEX_HASH],
        "fingerprint": table.fingerprint,
        "kinds": [_entry(kind) for kind in table.kinds],
        "hashes": {key: list(each.hash_names) for key, each in files.items()},
    } | _blocks_entry(table.blocks)
    arrays: dict[str, Any] = {
        "header": np.frombuffer(json.dumps(header, sort_keys=True).encode(), dtype=np.uint8),
        "kind": table.kind,
        "samples": table.samples,
    }
    for key, each in files.items():
        arrays |= {f"{key}_names": each.names, f"{key}_sizes": each.sizes}
        arrays |= {
            f"{key}_{name}": digests for name, digests in zip(each.hash_names, each.digests, strict=True)
        }
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def read_table(index_file: Path, *, is_proved: bool = False) -> ShardTable | None:
    """Load the index.bin in the folder of `index_file`, like `load_table`; None if missing or not its own."""
    file = index_file.with_name(TABLE_NAME)
    try:
        if not file.is_file():
            return None
        size, digest = index_file.stat().st_size, hash_file(index_file, [_INDEX_HASH])[_INDEX_HASH]
    except (OSError, ShardError):
        return None
    return load_table(file, (size, digest), is_proved=is_proved)


def load_table(
    source: Path | bytes, index: tuple[int, str] | None = None, *, is_proved: bool = False
) -> ShardTable | None:
    """Load the table in index.bin, given as a path or as bytes.

    Returns None if it is damaged, or not made for the index.json whose (size, xxh3_128) is `index`. The table
    of a path is a memory map, so processes share its memory. With `is_proved`, only checksums are compared,
    because a process on this machine has already validated this file completely.
    """
    file = source if isinstance(source, Path) else Path(TABLE_NAME)
    try:
        arrays = _arrays(source)
        if arrays["header"].nbytes > _MAX_HEADER_BYTES:
            return None
        header = load_json(arrays["header"].tobytes())
        found = header["index_bytes"], header["index_xxh3_128"]
        if header["version"] != _TABLE_VERSION or index not in (None, found):
            return None
        return _table(header, arrays, _EntryParser(file), is_proved=is_proved)
    except Exception:  # zipfile, tokenize and NumPy raise many types of errors; index.json is read instead
        return None


def _arrays(source: Path | bytes) -> dict[str, Any]:
    """Return the arrays of an uncompressed .npz as views on its bytes, after comparing their checksums.

    Raises ValueError, or an error of zipfile, if it is damaged or not an .npz. Arrays need not be aligned.
    """
    data = map_path(source) if isinstance(source, Path) else np.frombuffer(source, dtype=np.uint8)
    found, npy = {}, cast(Any, np.lib.format)
    with ZipFile(source if isinstance(source, Path) else io.BytesIO(source)) as members:
        for member in members.infolist():
            # A member's header has the sizes of its name and extra field at byte 26; they follow at byte 30.
            name_size, extra_size = struct.unpack_from("<HH", data.data, member.header_offset + 26)
            begin = member.header_offset + 30 + name_size + extra_size
            raw = data[begin : begin + member.file_size]
            if member.compress_type != ZIP_STORED or zlib.crc32(raw.data) != member.CRC:
                raise ValueError(f"{member.filename} is compressed or damaged")
            text = io.BytesIO(raw[:_NPY_HEADER_BYTES].tobytes())
            if npy.read_magic(text) != (1, 0):
                raise ValueError(f"{member.filename} has an unknown .npy version")
            shape, is_transposed, dtype = npy.read_array_header_1_0(text)
            if dtype.hasobject or (is_transposed and len(shape) > 1):
                raise ValueError(f"{member.filename} holds objects or is in Fortran order")
            values = np.frombuffer(raw, dtype, math.prod(shape), text.tell())
            found[member.filename.removesuffix(".npy")] = values.reshape(shape)
    return found


def _table(
    header: Mapping[str, Any], arrays: Mapping[str, Any], parser: _EntryParser, *, is_proved: bool
) -> ShardTable | None:
    kinds = [parser.parse(number, entry) for number, entry in enumerate(header["kinds"])]
    kind, samples = arrays["kind"], arrays["samples"]
    raw = _files(header, arrays, "raw")
    packed = _files(header, arrays, "zip") if "zip" in header["hashes"] else None
    count = len(samples)
    sound = is_proved or (
        _is_ints(kind, np.int32)
        and _is_ints(samples, np.int64)
        and len(kind) == count == len(raw)
        and raw.are_sound()
        and 0 <= int(kind.min()) <= int(kind.max()) < len(kinds)
        and bool((samples >= 0).all())
        and bool((samples <= raw.sizes // 4).all())
        and int(raw.sizes.max()) < 1 << 32
        and all((each.zip is not None) == (packed is not None) for each in kinds)
        and (packed is None or (len(packed) == count and packed.are_sound()))
        and isinstance(header["fingerprint"], str)
    )
    stated = header.get(_BLOCKS_KEY)
    blocks = None if stated is None else stated_file(BLOCKS_NAME, stated, TABLE_NAME)
    return ShardTable(kinds, kind, samples, raw, packed, header["fingerprint"], blocks) if sound else None


def _files(header: Mapping[str, Any], arrays: Mapping[str, Any], key: str) -> Files:
    names: Sequence[str] = header["hashes"][key]
    if not set(names) <= set(HASH_NAMES):
        raise ValueError("a hash name is unknown")
    digests = tuple(arrays[f"{key}_{name}"] for name in names)
    files = Files(arrays[f"{key}_names"], arrays[f"{key}_sizes"], tuple(names), digests)
    plain = [files.names, *digests]
    if any(array.dtype != np.uint8 for array in plain) or files.names.ndim != 1:
        raise ValueError("names or digests are not uint8 arrays")
    if not _is_ints(files.sizes, np.int64) or any(array.ndim != 2 for array in digests):
        raise ValueError("sizes or digests have a wrong shape")
    return files


def _is_ints(array: Any, dtype: type[np.signedinteger[Any]]) -> bool:
    return bool(array.ndim == 1 and array.dtype == dtype)
