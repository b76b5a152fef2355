"""Write MDS shards: from whole arrays in a build, and from samples with any columns in `MdsWriter`.

Shards have the bytes that MosaicML's MDSWriter writes for the same samples and settings, and end at the same
samples; `MdsWriter` adds block checksums, which its index lists. (Compressed shards only decompress to the
same bytes: zstd builds and gzip's time stamp differ.) A shard gets its name only when it is complete. Hashes
are computed while the pieces go to the file, so an array is read once and never copied. The same input gives
the same bytes on every run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from shardkit.errors import ShardError
from shardkit.files import local_path, replaced
from shardkit.formats.block_checksums import write_blocks
from shardkit.formats.compression import new_compressor, parse_compression
from shardkit.formats.mds.encodings import encode_shape, encode_value, encoding_of
from shardkit.formats.mds.index import INDEX_NAME, MAX_SHARD_BYTES, config_bytes, make_columns, write_index
from shardkit.hashing import Hasher, new_hash
from shardkit.hints import answers_keywords
from shardkit.manifest import Column, FileInfo, Manifest, ShardInfo
from shardkit.synonyms import WRITER
from shardkit.units import parse_bytes

DEFAULT_SHARD_BYTES = 1 << 26

_PIECE_BYTES = 1 << 20  # a piece stays in the CPU's cache between hashing and writing

_OFFSET_BYTES = 4  # size of a sample's offset in the header


def write_rows_shard(
    folder: Path,
    basename: str,
    rows: npt.NDArray[Any],
    *,
    column: str = "tokens",
    compression: str | None = None,
    hashes: Sequence[str] = (),
    size_limit: int | None = DEFAULT_SHARD_BYTES,
) -> ShardInfo:
    """Write `rows` (n, *shape) as a shard with one column `ndarray:dtype:shape` and return its index entry.

    `size_limit` is only recorded in the index: the caller splits rows into shards. Raises ValueError if the
    rows exceed 4 GiB. The file is not synced to disk; the caller that publishes the dataset does that.
    """
    shape = ",".join(map(str, rows.shape[1:]))
    if rows.ndim < 2:
        raise ValueError(f"rows must be a matrix or higher, one sample per row, not of shape {rows.shape}")
    columns = make_columns({column: f"ndarray:{rows.dtype.name}:{shape}"})
    shard = _ShardFile(Path(folder), columns, compression, hashes, size_limit)
    sizes = np.full(len(rows), columns[0].size, dtype=np.int64)
    return shard.write(basename, sizes, [_as_bytes(rows)], sync=False)


def write_columns_shard(
    folder: Path,
    basename: str,
    columns: Mapping[str, npt.NDArray[Any]],
    *,
    compression: str | None = None,
    hashes: Sequence[str] = (),
    size_limit: int | None = DEFAULT_SHARD_BYTES,
) -> ShardInfo:
    """Write several matrices (n, length) as one shard with one column `ndarray:dtype:length` for each."""
    encodings = {name: f"ndarray:{rows.dtype.name}:{rows.shape[1]}" for name, rows in columns.items()}
    described = make_columns(encodings)
    shard = _ShardFile(Path(folder), described, compression, hashes, size_limit)
    parts = [np.ascontiguousarray(columns[one.name]).view(np.uint8) for one in described]
    samples = np.concatenate(parts, axis=1)
    sizes = np.full(len(samples), samples.shape[1], dtype=np.int64)
    return shard.write(basename, sizes, [_as_bytes(samples)], sync=False)


def write_arrays_shard(
    folder: Path,
    basename: str,
    columns: Mapping[str, Sequence[npt.NDArray[Any]]],
    *,
    compression: str | None = None,
    hashes: Sequence[str] = (),
    size_limit: int | None = DEFAULT_SHARD_BYTES,
) -> ShardInfo:
    """Write samples of 1-D, non-empty arrays as a shard with columns `ndarray:dtype`; return its index entry.

    A column has one array per sample, all of one dtype; the arrays of one sample have the same length in all
    columns. `array_bytes` returns the size of a sample. Otherwise this is like `write_rows_shard`.
    """
    described = make_columns({name: f"ndarray:{arrays[0].dtype.name}" for name, arrays in columns.items()})
    sorted_columns = [columns[column.name] for column in described]
    shard = _ShardFile(Path(folder), described, compression, hashes, size_limit)
    lengths = np.fromiter(map(len, sorted_columns[0]), np.int64, len(sorted_columns[0]))
    sizes = array_bytes(lengths, *(arrays[0].dtype for arrays in sorted_columns)) - _OFFSET_BYTES
    return shard.write(basename, sizes, _sample_pieces(sorted_columns), sync=False)


def array_bytes(lengths: npt.NDArray[np.int64], *dtypes: np.dtype[Any]) -> npt.NDArray[np.int64]:
    """Return int64[n], the size in bytes that each of n samples takes in a shard, including its offset.

    Sample i has one array of `lengths[i]` values for each of `dtypes`.
    """
    head = 4 + 1 + np.where(lengths <= 0xFF, 1, np.where(lengths <= 0xFFFF, 2, 4))
    return _OFFSET_BYTES + len(dtypes) * head + lengths * sum(dtype.itemsize for dtype in dtypes)


def _sample_pieces(columns: Sequence[Sequence[npt.NDArray[Any]]]) -> Iterator[memoryview]:
    for arrays in zip(*columns, strict=True):
        heads = [encode_shape(array.shape) for array in arrays]
        sizes = [len(head) + array.nbytes for head, array in zip(heads, arrays, strict=True)]
        yield memoryview(np.array(sizes, "<u4").tobytes() + heads[0])
        yield _as_bytes(arrays[0])
        for head, array in zip(heads[1:], arrays[1:], strict=True):
            yield memoryview(head)
            yield _as_bytes(array)


class MdsWriter:
    """Writes a dataset with any columns. `write` adds a sample, `write_rows` an array of rows if possible.

    Use it in a `with` block, or call `finish` at the end. The index is written last, and not at all if an
    exception leaves the block. Holds one shard in memory.

    A finished dataset is not changed. To append, write a sub-folder of it, a part, and merge:
    `MdsWriter("data/part-1", columns=…)`, then `shardkit.merge("data")`. Processes that write at the same
    time write a part each.
    """

    @answers_keywords(WRITER)
    def __init__(
        self,
        folder: str | Path,
        *,
        columns: Mapping[str, str],
        compression: str | None = None,
        hashes: Sequence[str] = ("xxh64",),
        shard_bytes: int | str | None = DEFAULT_SHARD_BYTES,
    ) -> None:
        """Prepare `folder` for a dataset with `columns`, a mapping {name: encoding}.

        A new shard starts before `shard_bytes` would be exceeded; with None, before 4 GiB. Without `hashes`,
        datasets of equal sizes have equal fingerprints: a loader takes the state of one for another's.
        Raises ValueError for bad settings and ShardError if `folder` exists and is not empty.
        """
        if not isinstance(columns, Mapping):
            raise TypeError(
                f'columns must be a mapping such as {{"tokens": "ndarray:uint16"}}, not {columns!r:.80}'
            )
        limit = None if shard_bytes is None else parse_bytes(shard_bytes)
        if limit is not None and not 0 < limit <= MAX_SHARD_BYTES:
            raise ValueError(f"shard_bytes must be above 0 and below 4 GiB, not {shard_bytes!r}")
        self._folder = local_path(folder)
        self._columns = make_columns(columns)
        self._encodings = [encoding_of(column.encoding) for column in self._columns]
        self._file = _ShardFile(self._folder, self._columns, compression, hashes, limit)
        self._limit = limit or MAX_SHARD_BYTES
        self._folder.mkdir(parents=True, exist_ok=True)
        if any(self._folder.iterdir()):
            part = self._folder / "part-1"
            raise ShardError(
                self._folder,
                f"is not empty; write the dataset into a new folder, or append to it: write {part}, then "
                f"call shardkit.merge({str(self._folder)!r})",
            )
        self._shards: list[ShardInfo] = []
        self._manifest: Manifest | None = None
        self._start_shard()

    def write(self, sample: Mapping[str, object]) -> None:
        """Append a sample {column: value}. Raises ValueError or TypeError, naming the bad value's column."""
        if sample.keys() != {column.name for column in self._columns}:
            names = ", ".join(column.name for column in self._columns)
            raise ValueError(f"a sample needs exactly the columns {names}; it has {', '.join(sample)}")
        encoded: dict[str, bytes] = {}
        for column, encoding in zip(self._columns, self._encodings, strict=True):
            try:
                encoded[column.name] = encode_value(encoding, sample[column.name])
            except (TypeError, ValueError) as error:
                kind = TypeError if isinstance(error, TypeError) else ValueError
                raise kind(f"column {column.name!r} ({column.encoding}): {error}") from error
        self.write_encoded(encoded)

    def write_encoded(self, sample: Mapping[str, bytes | memoryview]) -> None:
        """Append a sample {column: encoded value}; only sizes are checked, the caller checks the values."""
        words, values = [], []
        for column, encoding in zip(self._columns, self._encodings, strict=True):
            value = sample[column.name]
            if encoding.size is None:
                words.append(len(value))
            elif encoding.size != len(value):
                raise ValueError(
                    f"column {column.name!r}: {len(value):,} bytes; {encoding.name} takes {encoding.size:,}"
                )
            values.append(value)
        data = b"".join([np.array(words, "<u8").astype("<u4").tobytes(), *values])
        self._make_room(len(data))
        self._append(memoryview(data), np.array([len(data)], np.int64))

    def write_rows(self, rows: npt.NDArray[Any]) -> None:
        """Append rows (n, *shape), or numbers (n,), to a dataset with a single column of fixed size.

        The files equal those of calling `write` for each row. Complete shards are written without a copy.
        """
        encoding = self._encodings[0]
        if len(self._encodings) != 1 or encoding.size is None or encoding.dtype is None:
            raise ValueError("write_rows takes datasets of one fixed-size column; use write")
        if rows.dtype.name != encoding.dtype.name or rows.shape[1:] != encoding.shape:
            given = f"{rows.dtype.name} of shape {rows.shape}"
            raise ValueError(f"rows of column {self._columns[0].name!r} ({encoding.name}) given as {given}")
        data, size, start = _as_bytes(rows), encoding.size, 0
        if len(rows):
            self._make_room(size)
        while start < len(rows):
            room = self._limit - self._shard_bytes
            count = min(len(rows) - start, max(1, room // (size + _OFFSET_BYTES)))
            piece = data[start * size : (start + count) * size]
            start += count
            last = start == len(rows)
            # Pending rows are copied, because the caller may change the array. Full shards are written now.
            self._append(memoryview(bytes(piece)) if last else piece, np.full(count, size, np.int64))
            if not last:
                self._flush()

    def finish(self) -> Manifest:
        """Write the pending samples, the block checksums of uncompressed shards, and last the index.

        Returns the manifest; further calls return the same.
        """
        if self._manifest is None:
            if self._pending:
                self._flush()
            blocks = write_blocks(self._folder, self._shards)
            write_index(self._folder, self._shards, blocks)
            self._manifest = Manifest("mds", self._shards, blocks=blocks)
        return self._manifest

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()

    def _start_shard(self) -> None:
        self._pending: list[memoryview] = []
        self._sizes: list[npt.NDArray[np.int64]] = []
        # As in MosaicML, the size of a shard counts the u32 n, n + 1 offsets and the config.
        self._shard_bytes = 2 * _OFFSET_BYTES + len(self._file.config)

    def _make_room(self, size: int) -> None:
        """End the shard, even an empty one, if a sample of `size` bytes would exceed the limit.

        MosaicML's writer does the same.
        """
        if self._manifest is not None:
            raise ValueError(
                f"{self._folder / INDEX_NAME} is written; no samples can be added to a finished dataset"
            )
        after = self._shard_bytes + size + _OFFSET_BYTES
        if after > self._limit:
            self._flush()

    def _append(self, data: memoryview, sizes: npt.NDArray[np.int64]) -> None:
        self._pending.append(data)
        self._sizes.append(sizes)
        self._shard_bytes += len(data) + _OFFSET_BYTES * len(sizes)

    def _flush(self) -> None:
        sizes = np.concatenate([*self._sizes, np.zeros(0, np.int64)])
        basename = f"shard.{len(self._shards):05}.mds"
        self._shards.append(self._file.write(basename, sizes, self._pending, sync=True))
        self._start_shard()


class _ShardFile:
    """Writes complete shard files that share columns and settings."""

    def __init__(
        self,
        folder: Path,
        columns: tuple[Column, ...],
        compression: str | None,
        hashes: Sequence[str],
        size_limit: int | None,
    ) -> None:
        self._folder, self._columns, self._size_limit = folder, columns, size_limit
        self._compression = compression or None
        self._suffix = parse_compression(compression)[0] if compression else ""
        self._hashes = sorted(set(hashes))
        for name in self._hashes:
            new_hash(name)  # an unknown name raises an error now, not after the first shard
        self.config = config_bytes(columns, self._compression, self._hashes, size_limit)

    def write(
        self, basename: str, sizes: npt.NDArray[np.int64], samples: Iterable[memoryview], *, sync: bool
    ) -> ShardInfo:
        """Write a shard atomically and return its index entry.

        `sizes` int64[n] holds each sample's size in bytes; `samples` yields their bytes, in any pieces.
        """
        header = self._header(sizes)
        raw_bytes = len(header) + int(sizes.sum())
        stored_name = f"{basename}.{self._suffix}" if self._compression else basename
        final = self._folder / stored_name
        raw, stored = _Digests(self._hashes), _Digests(self._hashes)
        compressor = new_compressor(self._compression, raw_bytes) if self._compression else None
        with replaced(final) as temporary, temporary.open("wb") as file:
            for piece in _pieces([header, *samples]):
                raw.update(piece)
                file.write(piece if compressor is None else stored.update(compressor.compress(piece)))
            if compressor is not None:
                file.write(stored.update(compressor.flush()))
            if sync:
                file.flush()
                os.fsync(file.fileno())
        assert raw.bytes == raw_bytes
        return ShardInfo(
            raw=raw.info(basename),
            samples=len(sizes),
            columns=self._columns,
            zip=stored.info(stored_name) if self._compression else None,
            compression=self._compression,
            size_limit=self._size_limit,
        )

    def _header(self, sizes: npt.NDArray[np.int64]) -> memoryview:
        offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
        np.cumsum(sizes, out=offsets[1:])
        offsets += _OFFSET_BYTES * (len(sizes) + 2) + len(self.config)
        if offsets[-1] > MAX_SHARD_BYTES:
            size = f"{len(sizes):,} samples of {int(sizes.sum()):,} bytes"
            raise ValueError(f"{size} exceed the 4 GiB limit of an MDS shard; write smaller shards")
        count = np.array([len(sizes)], "<u4")
        return memoryview(count.tobytes() + offsets.astype("<u4").tobytes() + self.config)


class _Digests:
    """Counts and hashes the bytes of a file while it is written."""

    def __init__(self, names: Sequence[str]) -> None:
        self.bytes = 0
        self._hashers: dict[str, Hasher] = {name: new_hash(name) for name in names}

    def update(self, piece: bytes | memoryview) -> bytes | memoryview:
        """Add the next piece, and return it unchanged."""
        self.bytes += len(piece)
        for hasher in self._hashers.values():
            hasher.update(piece)
        return piece

    def info(self, basename: str) -> FileInfo:
        return FileInfo(basename, self.bytes, {name: h.hexdigest() for name, h in self._hashers.items()})


def _pieces(parts: Iterable[memoryview]) -> Iterable[memoryview]:
    for part in parts:
        for start in range(0, len(part), _PIECE_BYTES):
            yield part[start : start + _PIECE_BYTES]


def _as_bytes(rows: npt.NDArray[Any]) -> memoryview:
    """Return an array's bytes, little-endian in C order, without a copy if it has that layout."""
    array = np.ascontiguousarray(rows, dtype=rows.dtype.newbyteorder("<"))
    return array.reshape(-1).view(np.uint8).data
