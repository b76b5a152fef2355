"""Read and index datasets of documents in files of any reader's format, with a list of the files.

    documents.json      {"version": 1, "format": "parquet" | "jsonl", "columns": {name: type}, "files":
                         [{"name": "text-00000.parquet", "documents": 8192, "bytes": 1234,
                           "hashes": {"xxh64": …}, "raw_bytes": 5678}, …]}
    text-00000.parquet  one row per document; or text-00000.jsonl[.zst | .gz], one line per document
    tokens-00000.bin    or ids for another trainer (`shardkit.formats.trainers`): the format is
                        such as "megatron", and each file has "tokens" in place of "documents"
    dataset.json        the card; the other files are the same as in any dataset that shardkit builds

The list is published last: its presence means that the dataset is complete. `raw_bytes` is the uncompressed
size of compressed JSON lines. Any reader of Parquet or JSON lines reads the files; in shardkit they are
shards like all others: `open_dataset`, `verify`, `upload` and the explorer accept them. One row group, or one
line, is decoded at a time.
"""

from __future__ import annotations

import json
from collections.abc import Container
from functools import cached_property
from os import PathLike
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from shardkit.arrays import Bytes
from shardkit.errors import ShardError, naming_extras
from shardkit.files import load_json
from shardkit.formats.trainers import TRAINER_FORMATS, count_tokens, dtype_of_stream, stream_info
from shardkit.manifest import Column, FileInfo, Format, Manifest, ShardInfo, checked_basename

TEXT_INDEX_NAME = "documents.json"
TEXT_FORMATS = ("parquet", "jsonl")

_COMPRESSIONS = {".zst": "zstd", ".gz": "gz"}  # compression of JSON lines by the file's suffix
_MAX_COUNT = 1 << 53  # every JSON reader represents integers below this exactly
_LINE_END = 10


def text_index_bytes(manifest: Manifest) -> bytes:
    """Return the bytes of documents.json for a dataset of text or of files for another trainer."""
    columns = {column.name: column.encoding for kind in manifest.kinds for column in kind.columns}
    files = []
    for shard in manifest.shards:
        stored = shard.stored
        counted: dict[str, object] = {"documents": shard.samples}
        if manifest.format in TRAINER_FORMATS:
            dtype = dtype_of_stream(shard)
            counted = {"tokens": count_tokens(manifest.format, dtype, stored.basename, stored.bytes)}
        entry: dict[str, object] = {
            "name": stored.basename,
            **counted,
            "bytes": stored.bytes,
            "hashes": dict(sorted(stored.hashes.items())),
        }
        files.append(entry if shard.zip is None else entry | {"raw_bytes": shard.raw.bytes})
    facts = {"version": 1, "format": manifest.format, "columns": columns, "files": files}
    return json.dumps(facts, indent=1, ensure_ascii=False).encode() + b"\n"


def parse_text_index(file: str | PathLike[str], text: bytes) -> Manifest:
    """Parse the bytes of documents.json. Raises ShardError, naming `file`, if they are malformed."""
    try:
        facts = load_json(text)
    except (ValueError, RecursionError) as error:
        raise ShardError(file, f"is not JSON: {error}") from error
    if not isinstance(facts, dict) or not isinstance(facts.get("files"), list):
        raise ShardError(file, 'is not a list of files: expected an object with "files"')
    kind, columns = facts.get("format"), facts.get("columns")
    if facts.get("version") != 1 or kind not in (*TEXT_FORMATS, *TRAINER_FORMATS):
        raise ShardError(
            file, f"has version {facts.get('version')!r} and format {kind!r}, which are not supported"
        )
    if not isinstance(columns, dict) or not all(isinstance(value, str) for value in columns.values()):
        raise ShardError(file, "`columns` must map names to types")
    described = tuple(Column(name, encoding) for name, encoding in columns.items())
    shards = tuple(_shard(entry, kind, described, file) for entry in facts["files"])
    return Manifest(cast(Format, kind), shards)


def _shard(entry: Any, kind: str, columns: tuple[Column, ...], file: str | PathLike[str]) -> ShardInfo:
    if not isinstance(entry, dict):
        raise ShardError(file, f"has an entry that is not an object: {str(entry)[:80]!r}")
    name = checked_basename(entry.get("name"), file)
    hashes = entry.get("hashes", {})
    if not isinstance(hashes, dict) or not all(isinstance(value, str) for value in hashes.values()):
        raise ShardError(file, f"{name}: hashes must map names to strings")
    stored = FileInfo(name, _count(entry, "bytes", name, file), hashes)
    if kind in TRAINER_FORMATS:
        return _stream(entry, kind, columns, stored, file)
    documents = _count(entry, "documents", name, file)
    ending = next((end for end in _COMPRESSIONS if name.endswith(end)), None)
    if ending is None or kind == "parquet":
        return ShardInfo(stored, documents, columns)
    raw = FileInfo(name.removesuffix(ending), _count(entry, "raw_bytes", name, file))
    return ShardInfo(raw, documents, columns, zip=stored, compression=_COMPRESSIONS[ending])


def _stream(
    entry: dict[str, Any], kind: str, columns: tuple[Column, ...], stored: FileInfo, file: str | PathLike[str]
) -> ShardInfo:
    name, tokens = stored.basename, _count(entry, "tokens", stored.basename, file)
    known = {f"ndarray:{dtype}": np.dtype(dtype) for dtype in ("uint8", "uint16", "uint32", "int32")}
    if len(columns) != 1 or columns[0].encoding not in known:
        raise ShardError(file, f'`columns` of {kind} must be {{"tokens": …}}, one of {", ".join(known)}')
    dtype = known[columns[0].encoding]
    if (held := count_tokens(kind, dtype, f"{file}: {name}", stored.bytes)) != tokens:
        raise ShardError(file, f"{name}: states {tokens:,} tokens, but its size means {held:,}")
    return stream_info(kind, dtype, stored)


def _count(entry: dict[str, Any], key: str, name: str, file: str | PathLike[str]) -> int:
    value = entry.get(key)
    if type(value) is not int or not 0 <= value < _MAX_COUNT:
        raise ShardError(file, f"{name}: {key} must be an integer of 0 or more, not {str(value)[:40]!r}")
    return value


class TextShard:
    """An open file of a text dataset, read by row. Raises ShardError if it contradicts the list."""

    def __init__(self, info: ShardInfo, raw: Bytes, kind: str, *, file: str | PathLike[str]) -> None:
        self.info = info
        self._file = file
        self._rows: _ParquetRows | _Lines = (
            _ParquetRows(raw, file) if kind == "parquet" else _Lines(raw, file)
        )
        if len(self._rows) != info.samples:
            raise ShardError(file, f"has {len(self._rows):,} documents; the list states {info.samples:,}")

    def __len__(self) -> int:
        return self.info.samples

    def sample(self, row: int, columns: Container[str] | None = None) -> dict[str, object]:
        """Return document `row` as {column: value}, with only `columns` if given; null values are None."""
        if not 0 <= row < len(self):
            raise IndexError(f"{self._file}: no document {row}; the file has {len(self)}")
        found = self._rows.row(row)
        return {name: value for name, value in found.items() if columns is None or name in columns}

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns, as recorded in the list."""
        return self.info.columns

    def fixed_rows(self, column: str) -> npt.NDArray[np.generic] | None:
        """Return None: no column of a text dataset has values of a constant size."""
        return None

    def close(self) -> None:
        """Drop the decoded rows."""
        self._rows.forget()


class _ParquetRows:
    """The rows of a Parquet file whose bytes are in memory; caches the last decoded row group."""

    def __init__(self, raw: Bytes, file: str | PathLike[str]) -> None:
        with naming_extras("a text dataset in Parquet", pyarrow="parquet"):
            import pyarrow as pa
            import pyarrow.parquet as pq
        self._where, self._number = file, -1
        self._held: Any = None
        try:
            self._parquet = pq.ParquetFile(pa.BufferReader(pa.py_buffer(raw)))
            metadata = self._parquet.metadata
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise ShardError(file, f"is not Parquet: {error}") from error
        rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        if any(not 0 <= count < _MAX_COUNT for count in rows):
            raise ShardError(file, f"states impossible row groups, of {min(rows):,} to {max(rows):,} rows")
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(rows, dtype=np.int64)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def row(self, number: int) -> dict[str, object]:
        import pyarrow as pa

        group = int(np.searchsorted(self._starts, number, side="right")) - 1
        if group != self._number or self._held is None:
            try:
                self._held, self._number = self._parquet.read_row_group(group), group
            except (pa.ArrowException, OSError) as error:
                raise ShardError(self._where, f"row group {group} cannot be read: {error}") from error
        try:
            [found] = self._held.slice(number - int(self._starts[group]), 1).to_pylist()
        except ValueError as error:  # a string is not UTF-8, or the group has fewer rows than recorded
            raise ShardError(self._where, f"document {number:,} cannot be read: {error}") from error
        return cast(dict[str, object], found)

    def forget(self) -> None:
        self._held = None


class _Lines:
    """The rows of a JSON lines file whose bytes are in memory."""

    def __init__(self, raw: Bytes, file: str | PathLike[str]) -> None:
        self._raw, self._where = raw, file

    @cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        return np.flatnonzero(self._raw == _LINE_END)

    def __len__(self) -> int:
        if len(self._raw) and self._raw[-1] != _LINE_END:
            raise ShardError(self._where, "ends in the middle of a line")
        return len(self._ends)

    def row(self, number: int) -> dict[str, object]:
        start = int(self._ends[number - 1]) + 1 if number else 0
        line = self._raw[start : int(self._ends[number])].tobytes()
        try:
            found = load_json(line)
        except (ValueError, RecursionError) as error:
            raise ShardError(self._where, f"line {number}: {error}", offset=start) from error
        if not isinstance(found, dict):
            raise ShardError(self._where, f"line {number} is not a JSON object", offset=start)
        return found

    def forget(self) -> None:
        self.__dict__.pop("_ends", None)
