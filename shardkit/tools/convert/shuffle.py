"""Writers that shuffle all rows of a conversion, in bounded memory.

Row n gets the hash mix64(key + G * (n + 1)), key being a hash of the seed, and rows are written in the order
of their hashes: a uniform shuffle that depends on the seed and the number of rows alone. While rows arrive,
they are spooled to files in the staging folder, a file for each range of hashes. At the end, the files are
read one by one, in the order of their ranges, sorted, and given to the writer of shards.

A file holds about 64 MiB (with 4,096 files, 1 / 4096 of the data if that is more), and is the most that is in
memory besides what the writers of shards hold. The spool takes the disk space of the uncompressed rows.
"""

from __future__ import annotations

import hashlib
import pickle
import shutil
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.errors import ShardError
from shardkit.manifest import Manifest
from shardkit.order.permutation import GOLDEN, ONE, mix64
from shardkit.tools.convert.source import OutputOptions, Sample
from shardkit.tools.convert.write import RowWriter, SampleWriter

SPOOL_NAME = "spool"
_FILE_BYTES = 64 << 20
_MOST_FILES = 4096
_HIGH = np.uint64(52)  # the highest 12 bits of a hash choose one of 4,096 ranges


class _Spool:
    """Byte strings in files by ranges of their hashes; in a file, in the order in which they were added."""

    def __init__(self, work: Path, seed: int, source_bytes: int) -> None:
        self._folder, self._files = work / SPOOL_NAME, min(_MOST_FILES, 1 + source_bytes // _FILE_BYTES)
        self._folder.mkdir()
        digest = hashlib.blake2b(
            f"{seed}:convert".encode(), digest_size=8, person=b"shardkit.order.1"
        ).digest()
        self._key = np.uint64(int.from_bytes(digest, "little"))

    def hashes(self, first: int, count: int) -> npt.NDArray[np.uint64]:
        """Return the hashes of rows `first` up to `first + count`."""
        return mix64(self._key + GOLDEN * (np.arange(first, first + count, dtype=np.uint64) + ONE))

    def files_of(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Return the number of the file of each hash; files ascend with the hashes."""
        return (hashes >> _HIGH).astype(np.int64) * self._files // _MOST_FILES

    def add(self, file: int, data: bytes) -> None:
        """Append bytes to a file."""
        try:
            with (self._folder / f"{file}").open("ab") as stream:
                stream.write(data)
        except OSError as error:
            raise ShardError(self._folder, f"cannot be written: {error.strerror or error}") from error

    def drain(self) -> Iterator[Path]:
        """Yield the files in the order of their hashes; remove each afterwards."""
        for number in range(self._files):
            file = self._folder / f"{number}"
            if file.exists():
                yield file
                file.unlink()
        shutil.rmtree(self._folder)


class ShuffledRowWriter(RowWriter):
    """A `RowWriter` that writes the rows in the order of their hashes, when it finishes."""

    def __init__(
        self,
        folder: Path,
        output: OutputOptions,
        background: Executor,
        *,
        column: str,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        seed: int,
        source_bytes: int,
    ) -> None:
        super().__init__(folder, output, background, column=column, dtype=dtype, shape=shape)
        self._spool = _Spool(folder, seed, source_bytes)

    def finish(self) -> tuple[Manifest, str]:
        """Write all shards and the index; return the manifest and the digest of all rows, as written."""
        assert self.partial == 0
        if self._filled:
            self._flush()
        self._wait()
        target = RowWriter(
            self._folder,
            self._output,
            self._background,
            column=self._column,
            dtype=self.dtype,
            shape=self._shape,
        )
        kind = np.dtype([("hash", "<u8"), ("row", self.dtype, (self.row_values,))])
        for file in self._spool.drain():
            entries = np.fromfile(file, dtype=kind)
            target.append(entries["row"][np.argsort(entries["hash"])].reshape(-1))
        return target.finish()

    def _write(self, rows: npt.NDArray[Any], first: int) -> None:
        entries = np.empty(
            len(rows), dtype=np.dtype([("hash", "<u8"), ("row", self.dtype, (self.row_values,))])
        )
        entries["hash"], entries["row"] = self._spool.hashes(first, len(rows)), rows.reshape(len(rows), -1)
        files = self._spool.files_of(entries["hash"])
        by_file = np.argsort(files, kind="stable")
        numbers, starts = np.unique(files[by_file], return_index=True)
        for number, some in zip(numbers.tolist(), np.split(by_file, starts[1:]), strict=True):
            self._spool.add(number, entries[some].tobytes())


class ShuffledSampleWriter:
    """Gives samples to another writer in the order of their hashes, when it finishes."""

    def __init__(self, target: SampleWriter, work: Path, seed: int, source_bytes: int) -> None:
        self._target, self._spool = target, _Spool(work, seed, source_bytes)
        self._samples = self._held_bytes = 0
        self._held: dict[int, list[bytes]] = {}

    def write(self, sample: Sample) -> None:
        """Spool a sample."""
        hashes = self._spool.hashes(self._samples, 1)
        payloads = {name: bytes(data) for name, data in sample.payloads.items()}
        data = pickle.dumps((int(hashes[0]), payloads, sample.key, sample.where), protocol=5)
        self._held.setdefault(int(self._spool.files_of(hashes)[0]), []).append(data)
        self._samples += 1
        self._held_bytes += len(data)
        if self._held_bytes >= _FILE_BYTES:
            self._flush()

    def finish(self) -> tuple[Manifest, str]:
        """Write all samples and the index; return the manifest and the digest of all values, as written."""
        self._flush()
        for file in self._spool.drain():
            entries = []
            with file.open("rb") as stream:
                size = file.stat().st_size
                while stream.tell() < size:
                    entries.append(pickle.load(stream))
            for _, payloads, key, where in sorted(entries, key=lambda entry: entry[0]):
                self._target.write(Sample(payloads, key, where, 0))
        return self._target.finish()

    def _flush(self) -> None:
        for number, parts in self._held.items():
            self._spool.add(number, b"".join(parts))
        self._held, self._held_bytes = {}, 0
