"""Rows of one fixed column into shards, from arrays of any length, through one buffer of a shard.

What is appended is one run of values; rows are cut from it by arithmetic, so no Python runs for a row. A
full shard goes to disk in one go by the writers that a build uses, in the background while the next fills
(whoever publishes it syncs it). Memory is two shards.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit import mds, tar
from shardkit.convert.options import OutputOptions
from shardkit.errors import ShardError
from shardkit.hashing import Hasher, new_hash
from shardkit.index import Manifest, ShardInfo
from shardkit.mds.index import config_bytes, make_columns
from shardkit.tar.headers import BLOCK, padded
from shardkit.tar.npy import WRITTEN_HEADER_BYTES
from shardkit.tar.writer import RECORD_BYTES

__all__ = ["CONTENT_HASH", "RowWriter", "content_hasher", "rows_per_shard"]

CONTENT_HASH = "xxh3_128"
_OFFSET_BYTES = 4  # of each sample in an MDS shard


def content_hasher() -> Hasher:
    """For the values of all rows in order, the same whatever the format and the shards."""
    return new_hash(CONTENT_HASH)


def rows_per_shard(output: OutputOptions, column: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """How many rows fit into a shard; one at least, as MosaicML has it."""
    size = prod(shape) * dtype.itemsize
    if output.format == "wds":
        return max(1, (output.limit - RECORD_BYTES) // (BLOCK + padded(WRITTEN_HEADER_BYTES + size)))
    encoding = f"ndarray:{dtype.name}:{','.join(map(str, shape))}"
    config = config_bytes(
        make_columns({column: encoding}), output.compression, sorted(set(output.hashes)), output.limit
    )
    return max(1, (output.limit - 2 * _OFFSET_BYTES - len(config)) // (size + _OFFSET_BYTES))


class RowWriter:
    """Writes a dataset of one fixed column into an empty folder, with one thread of `background`.

    Whoever owns `background` waits for it before the folder goes away.
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
        """Tars take rows (length,) of uint16 or uint32 only."""
        assert output.format == "mds" or len(shape) == 1
        self._folder, self._output, self._column = folder, output, column
        self._shape, self.row_values = shape, prod(shape)
        self.dtype = dtype.newbyteorder("<")
        rows = rows_per_shard(output, column, self.dtype, shape)
        self._buffer: npt.NDArray[Any] = np.empty(rows * self.row_values, self.dtype)
        self._spare = np.empty_like(self._buffer)  # touched, and so in memory, only from the second shard on
        self._background = background
        self._writing: Future[None] | None = None
        self._filled = 0
        self._digest = content_hasher()
        self._shards: list[ShardInfo] = []
        self.rows = 0

    @property
    def partial(self) -> int:
        """Values that fill no row yet."""
        return self._filled % self.row_values

    def append(self, values: npt.NDArray[Any]) -> None:
        """Values (any number, one axis) that fit the type: the caller has looked."""
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
        """Fill the last row; returns how many values that took."""
        count = -self._filled % self.row_values
        self.append(np.full(count, value, self.dtype))
        return count

    def drop(self) -> int:
        """Forget the values that fill no row; returns how many they were."""
        count = self.partial
        self._filled -= count
        return count

    def finish(self) -> tuple[Manifest, str]:
        """Write what is left, then the index; the manifest and the digest of all rows."""
        assert self.partial == 0
        if self._filled:
            self._flush()
        self._wait()
        if self._output.format == "mds":
            mds.write_index(self._folder, self._shards)
            return Manifest("mds", self._shards), self._digest.hexdigest()
        tar.write_shard_list(self._folder, self._shards)
        return Manifest("tar", self._shards), self._digest.hexdigest()

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
