"""Writes shards: rows of a single column of fixed dtype and shape, or samples with any columns.

`RowWriter` takes arrays of any length and cuts rows from them by arithmetic: no Python code runs per row.
A full shard is written with the writers that a build uses, in the background while the next one fills
(publication syncs it). `RowWriter` holds two shards in memory.

`MdsSampleWriter` and `TarSampleWriter` take samples one by one. Tars are plain ustar (PAX headers only for
names that need them) with fixed time, owner and mode, so the same samples give the same bytes.
`MdsSampleWriter` holds one shard in memory, `TarSampleWriter` one sample.
"""

from __future__ import annotations

import tarfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from shardkit.errors import ShardError
from shardkit.formats import mds, tar
from shardkit.formats.block_checksums import write_blocks
from shardkit.formats.mds.index import config_bytes, make_columns
from shardkit.formats.tar.members import BLOCK, padded, split_name
from shardkit.formats.tar.shard_list import describe_tar
from shardkit.formats.tar.values import WRITTEN_HEADER_BYTES
from shardkit.formats.tar.writer import KEY_DIGITS, RECORD_BYTES
from shardkit.hashing import Hasher, hash_file, new_hash
from shardkit.manifest import FileInfo, Manifest, ShardInfo
from shardkit.tools.convert.columns import KEY
from shardkit.tools.convert.source import OutputOptions, Sample

CONTENT_HASH = "xxh3_128"

_OFFSET_BYTES = 4  # size of the offset of each sample in an MDS shard


def content_hasher() -> Hasher:
    """Return a hasher for the digest of all values in order, equal for all formats and shard sizes."""
    return new_hash(CONTENT_HASH)


def rows_per_shard(output: OutputOptions, column: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """Return how many rows fit in a shard of `output.limit` bytes; at least 1, as in MosaicML's writer."""
    size = prod(shape) * dtype.itemsize
    if output.format == "wds":
        return max(1, (output.limit - RECORD_BYTES) // (BLOCK + padded(WRITTEN_HEADER_BYTES + size)))
    encoding = f"ndarray:{dtype.name}:{','.join(map(str, shape))}"
    config = config_bytes(
        make_columns({column: encoding}), output.compression, sorted(set(output.hashes)), output.limit
    )
    return max(1, (output.limit - 2 * _OFFSET_BYTES - len(config)) // (size + _OFFSET_BYTES))


class RowWriter:
    """Writes a dataset with one column of fixed dtype and shape to an empty folder.

    A thread of `background` writes the shards: shut `background` down before you remove the folder.
    """

    def __init__(
        self,
        folder: Path,
        output: OutputOptions,
        background: Executor,
        *,
        column: str,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
    ) -> None:
        """Create a writer for rows of `shape` and `dtype`; in tars, one axis of uint16 or uint32."""
        assert output.format == "mds" or len(shape) == 1
        self._folder, self._output, self._column = folder, output, column
        self._shape, self.row_values = shape, prod(shape)
        self.dtype = dtype.newbyteorder("<")
        rows = rows_per_shard(output, column, self.dtype, shape)
        self._buffer: npt.NDArray[Any] = np.empty(rows * self.row_values, self.dtype)
        self._spare = np.empty_like(self._buffer)  # takes no physical memory until the second shard fills it
        self._background = background
        self._writing: Future[None] | None = None
        self._filled = 0
        self._digest = content_hasher()
        self._shards: list[ShardInfo] = []
        self.rows = 0

    @property
    def partial(self) -> int:
        """The number of values in the last, incomplete row."""
        return self._filled % self.row_values

    def append(self, values: npt.NDArray[Any]) -> None:
        """Append values (one axis, any length); the caller must have checked that they fit the dtype."""
        start = 0
        while start < len(values):
            count = min(len(values) - start, len(self._buffer) - self._filled)
            target = self._buffer[self._filled : self._filled + count]
            np.copyto(target, values[start : start + count], casting="unsafe")
            start += count
            self._filled += count
            if self._filled == len(self._buffer):
                self._flush()

    def fill(self, value: int) -> int:
        """Complete the last row with `value`; return the number of values added."""
        count = -self._filled % self.row_values
        self.append(np.full(count, value, self.dtype))
        return count

    def drop(self) -> int:
        """Drop the values of the last row if it is incomplete; return their number."""
        count = self.partial
        self._filled -= count
        return count

    def finish(self) -> tuple[Manifest, str]:
        """Write the last shard and the index; return the manifest and the digest of all rows."""
        assert self.partial == 0
        if self._filled:
            self._flush()
        self._wait()
        blocks = write_blocks(self._folder, self._shards)
        if self._output.format == "mds":
            mds.write_index(self._folder, self._shards, blocks)
            return Manifest("mds", self._shards, blocks=blocks), self._digest.hexdigest()
        return _listed(self._folder, self._shards, blocks), self._digest.hexdigest()

    def _flush(self) -> None:
        self._wait()
        block = self._buffer[: self._filled]
        rows, number = block.reshape(-1, *self._shape), self.rows
        self._writing = self._background.submit(self._write, rows, number)
        self.rows += len(rows)
        self._buffer, self._spare, self._filled = self._spare, self._buffer, 0

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def _write(self, rows: npt.NDArray[Any], first: int) -> None:
        self._digest.update(rows.reshape(-1).view(np.uint8).data)
        output, number = self._output, len(self._shards)
        try:
            if output.format == "mds":
                shard = mds.write_rows_shard(
                    self._folder,
                    f"shard.{number:05d}.mds",
                    rows,
                    column=self._column,
                    compression=output.compression,
                    hashes=output.hashes,
                    size_limit=output.limit,
                )
            else:
                name = f"shard-{number:05d}.tar"
                shard = tar.write_rows_shard(
                    self._folder, name, rows, column=self._column, key_start=first, hashes=output.hashes
                )
        except OSError as error:
            raise ShardError(self._folder, f"cannot be written: {error.strerror or error}") from error
        self._shards.append(shard)


_MAX_MEMBER_BYTES = 1 << 32  # exclusive limit of a member's size in bytes, which must fit into a shard


class SampleDigest:
    """Computes the digest of all values of all samples in order, which is equal for all shard sizes."""

    def __init__(self) -> None:
        self._hasher: Hasher = content_hasher()

    def add(self, sample: Sample) -> None:
        """Add a sample to the digest; its key counts as a value."""
        payloads = dict(sample.payloads)
        if sample.key is not None:
            payloads[KEY] = sample.key.encode("utf-8", "surrogateescape")
        for name in sorted(payloads):
            data = payloads[name]
            self._hasher.update(f"{name}\0{len(data)}\0".encode())
            self._hasher.update(data)

    def hexdigest(self) -> str:
        """Return the digest of all samples added so far."""
        return self._hasher.hexdigest()


class SampleWriter(Protocol):
    """The interface of writers that take samples in order."""

    def write(self, sample: Sample) -> None: ...
    def finish(self) -> tuple[Manifest, str]:
        """Write the index; return the manifest and the digest of all values."""


class MdsSampleWriter:
    """Writes samples to MDS shards; `columns` is {name: encoding}."""

    def __init__(self, folder: Path, output: OutputOptions, columns: Mapping[str, str]) -> None:
        self._writer = mds.MdsWriter(
            folder,
            columns=columns,
            compression=output.compression,
            hashes=output.hashes,
            shard_bytes=output.limit,
        )
        self._digest = SampleDigest()

    def write(self, sample: Sample) -> None:
        """Append a sample; raises ShardError if it is too large for a shard."""
        payloads = dict(sample.payloads)
        try:
            if sample.key is not None:
                payloads[KEY] = sample.key.encode()
            self._digest.add(sample)
            self._writer.write_encoded(payloads)
        except ValueError as error:
            raise ShardError(sample.where, str(error)) from error

    def finish(self) -> tuple[Manifest, str]:
        """Write the index; return the manifest and the digest of all values."""
        return self._writer.finish(), self._digest.hexdigest()


class TarSampleWriter:
    """Writes samples with any members to tars."""

    def __init__(self, folder: Path, output: OutputOptions) -> None:
        self._folder, self._output = folder, output
        self._digest = SampleDigest()
        self._shards: list[ShardInfo] = []
        self._file: BinaryIO | None = None
        self._size = self._samples = self._written = 0
        self._last_key: str | None = None

    def write(self, sample: Sample) -> None:
        """Append a sample; raises ShardError if its key cannot be part of member names."""
        key = f"{self._written:0{KEY_DIGITS}d}" if sample.key is None else sample.key
        self._check_key(key, sample)
        members = [(f"{key}.{name}", sample.payloads[name]) for name in sorted(sample.payloads)]
        self._digest.add(sample)
        heads = [_header(name, len(data), sample.where) for name, data in members]
        size = sum(len(h) + padded(len(m[1])) for h, m in zip(heads, members, strict=True))
        if self._samples and self._size + size + RECORD_BYTES > self._output.limit:
            self._close()
        if self._file is None:
            self._file = (self._folder / self._name).open("wb")
            self._size = self._samples = 0
        for head, (_, data) in zip(heads, members, strict=True):
            self._file.writelines((head, data, bytes(-len(data) % BLOCK)))
        self._size += size
        self._samples += 1
        self._written += 1
        self._last_key = key

    def finish(self) -> tuple[Manifest, str]:
        """Write the list of shards; return the manifest and the digest of all values."""
        if self._file is not None:
            self._close()
        blocks = write_blocks(self._folder, self._shards)
        return _listed(self._folder, self._shards, blocks), self._digest.hexdigest()

    def _check_key(self, key: str, sample: Sample) -> None:
        if sample.key is None:
            return
        if key == self._last_key:
            raise ShardError(sample.where, f"has the same key as the previous sample, {key[:200]!r}")
        for name in sample.payloads:
            if split_name(f"{key}.{name}") != (key, name) or "\0" in key:
                raise ShardError(
                    sample.where,
                    f"its key {key[:200]!r} cannot begin a member's name: use no dot after the last '/', no "
                    "null character and no folder like __name__",
                )

    @property
    def _name(self) -> str:
        return f"shard-{len(self._shards):05d}.tar"

    def _close(self) -> None:
        assert self._file is not None
        end = -(-(self._size + 2 * BLOCK) // RECORD_BYTES) * RECORD_BYTES
        self._file.write(bytes(end - self._size))
        self._file.close()
        self._file, name = None, self._name
        raw = FileInfo(name, end, hash_file(self._folder / name, sorted(self._output.hashes)))
        # Opening the tar checks its structure and returns the columns that readers will find in it.
        shard = tar.open_shard(self._folder, describe_tar(name, stored_bytes=end, samples=self._samples))
        self._shards.append(replace(shard.info, raw=raw, columns=shard.columns))
        shard.close()


def _listed(folder: Path, shards: Sequence[ShardInfo], blocks: FileInfo | None) -> Manifest:
    tar.write_shard_list(folder, shards, blocks)
    return Manifest("tar", shards, blocks=blocks)


def _header(name: str, size: int, where: str) -> bytes:
    if size >= _MAX_MEMBER_BYTES:
        raise ShardError(where, f"has a member of {size:,} bytes; it must be below {_MAX_MEMBER_BYTES:,}")
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
