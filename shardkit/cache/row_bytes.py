"""Where a single row lies in its shard, and what proves it before it is given to anyone.

Rows are read by range where the index alone says where they are (`row_layout`): in raw MDS shards whose
columns all have a fixed size, ranges of flat token files, and tars as shardkit writes them.

Checksums of blocks are published with the dataset. Parts of its blocks.bin are fetched when rows need them. A
file of up to 512 KiB (64 shards of 64 MiB) is fetched whole. Of larger ones, parts that lie near each other
come in one request, at most one for each shard of which rows are read; these requests go out together with
those for rows. Each part is proved by its seal (formats/block_checksums.py); wrong ones are fetched again.

A shard that was seen whole, and for which the cache has no room, is read by rows from then on. Checksums of
its rows are kept instead, so each row takes one request for its own bytes, whoever made the dataset.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np
import xxhash

from shardkit.arrays import Bytes
from shardkit.errors import ShardError
from shardkit.formats.block_checksums import BlockFile, Checksums, are_right, block_range
from shardkit.formats.tar.members import BLOCK
from shardkit.formats.tar.values import make_npy_header
from shardkit.formats.tar.writer import RECORD_BYTES, member_bytes
from shardkit.manifest import FileInfo, Manifest, ShardInfo
from shardkit.storage.store import ObjectNotFoundError, Store
from shardkit.storage.threads import Workers

MAX_ROW_BYTES = 4 << 20  # longer ones are not worth a request of their own
_NAME_BYTES = 100  # of a member, at the start of its header

Range = tuple[int, int]
_GAP_BYTES = 1 << 19  # unneeded bytes that cost less than another request
_KEPT_BYTES = 16 << 20  # of 2,000 shards of 64 MiB, or of two million rows; above, all are forgotten
_READS = 3  # of a part, before blocks.bin itself is called damaged


@dataclass(frozen=True, slots=True)
class ColumnPlace:
    """Values are the `size` bytes from `at` on in a row: of all columns together, or of a member of a tar.

    Before those of a member come the .npy header `head`, and the block with its name, which has `suffix`.
    """

    at: int
    size: int
    head: bytes = b""
    suffix: bytes = b""

    def is_in(self, row: bytes) -> bool:
        """Whether what comes before the values is in a row."""
        start = self.at - len(self.head)
        name = row[max(0, start - BLOCK) : start][:_NAME_BYTES].rstrip(b"\0")
        return row.startswith(self.head, start) and name.endswith(self.suffix)


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Row r is the bytes [first + r * stride, + size) of a shard, with values of `columns` in their order."""

    first: int
    stride: int
    size: int
    columns: tuple[ColumnPlace, ...]

    def values(self, row: Bytes | bytes) -> bytes:
        """Return the columns' bytes in a row, one after the other."""
        return b"".join(bytes(row[column.at : column.at + column.size]) for column in self.columns)


def row_layout(kind: str, info: ShardInfo) -> RowLayout | None:
    """Return where rows are in a shard of that format, if the index says so."""
    sizes = [column.size for column in info.columns]
    total = sum(size or 0 for size in sizes)
    if info.samples < 1 or not total or None in sizes or info.compression or total > MAX_ROW_BYTES:
        return None
    if kind == "tokens":
        return RowLayout(0, total, total, (ColumnPlace(0, total),))
    if kind == "mds":
        first = info.raw.bytes - info.samples * total  # samples fill the file's end
        return RowLayout(first, total, total, (ColumnPlace(0, total),)) if first > 0 else None
    names = [column.name for column in info.columns]
    if kind != "tar" or names != sorted(names):  # as members are written; lists of others have any order
        return None
    places, size = [], 0
    for column in info.columns:
        parts = column.encoding.split(":")
        if len(parts) != 3 or not parts[2].isdigit():
            return None
        dtype, length = np.dtype(parts[1]), int(parts[2])
        head = make_npy_header(dtype, length)
        at, name = size + BLOCK + len(head), f".{column.name}".encode()
        places.append(ColumnPlace(at, length * dtype.itemsize, head, name))
        size += member_bytes(length, dtype)
    end = -(-(info.samples * size + 2 * BLOCK) // RECORD_BYTES) * RECORD_BYTES
    return RowLayout(0, size, size, tuple(places)) if end == info.raw.bytes else None


class _Kept:
    """Checksums of the shards used last. It has no lock: each use is one step of a dict."""

    def __init__(self) -> None:
        self._of: dict[int, Checksums] = {}
        self._bytes = 0

    def get(self, number: int) -> Checksums | None:
        """Return the checksums of a shard, if they are kept."""
        return self._of.get(number)

    def put(self, found: Mapping[int, Checksums]) -> None:
        """Keep checksums of some shards; if that is too much, forget all others."""
        size = sum(checksums.nbytes for checksums in found.values())
        if self._bytes + size > _KEPT_BYTES:
            self._of, self._bytes = {}, 0
        self._of.update(found)
        self._bytes += size


class BlockChecksums:
    """The block checksums of a dataset, fetched as rows need them. Threads may share one."""

    def __init__(self, store: Store, manifest: Manifest, stated: FileInfo, workers: Workers) -> None:
        """`stated`: what the card says of blocks.bin; ShardError if it is not that of these shards."""
        self._store, self._workers = store, workers
        self._where = f"{store.url}/{stated.basename}"
        self._file = BlockFile(self._where, manifest, stated)
        self._kept = _Kept()

    def request(self, numbers: Iterable[int]) -> dict[int, Future[Mapping[int, Checksums]]]:
        """Fetch the parts of these shards; what each future gives has that of its shard."""
        requests: dict[int, Future[Mapping[int, Checksums]]] = {}
        groups: list[list[int]] = []
        for number in sorted(set(numbers)):
            if (known := self._kept.get(number)) is not None:
                requests[number] = Future()
                requests[number].set_result({number: known})
            elif groups and self._file.range(number)[0] - self._file.range(groups[-1][-1])[1] <= _GAP_BYTES:
                groups[-1].append(number)
            else:
                groups.append([number])
        for group in groups:
            fetched = group if self._file.size > _GAP_BYTES else range(self._file.shards)
            requests |= dict.fromkeys(group, self._workers.submit(partial(self._fetch, fetched)))
        return requests

    def _fetch(self, group: Sequence[int]) -> Mapping[int, Checksums]:
        start, stop = self._file.range(group[0])[0], self._file.range(group[-1])[1]
        for _ in range(_READS):
            try:
                data = self._store.get(self._file.name, start, stop)
            except ObjectNotFoundError as error:
                problem = "is missing, though the dataset states it; rows cannot be proved: upload it again"
                raise ShardError(self._where, problem) from error
            ranges = {number: self._file.range(number) for number in group}
            parts = {number: data[low - start : high - start] for number, (low, high) in ranges.items()}
            found = {number: self._file.checksums(number, part) for number, part in parts.items()}
            right = {number: checksums for number, checksums in found.items() if checksums is not None}
            if len(right) == len(group):
                self._kept.put(right)
                return right
        problem = f"holds no checksums of {len(group) - len(right):,} shards where the index says they are"
        raise ShardError(
            self._where, f"{problem}; it was fetched {_READS} times: run shardkit verify", offset=start
        )


@dataclass(frozen=True, slots=True)
class BlockProof:
    """Proves the row in the bytes [start, stop) of shard `number`, by the blocks in `read`."""

    number: int
    start: int
    stop: int
    read: Range
    checksums: Future[Mapping[int, Checksums]]
    """Has come before `row_in` is called."""

    @classmethod
    def of(
        cls, number: int, row: Range, file: FileInfo, checksums: Future[Mapping[int, Checksums]]
    ) -> BlockProof:
        return cls(number, *row, block_range(*row, file.bytes), checksums)

    def row_in(self, data: bytes) -> bytes | None:
        """Return the row, if `data` are the blocks of `read`."""
        first = self.read[0]
        is_right = are_right(self.checksums.result()[self.number], first, data)
        return data[self.start - first : self.stop - first] if is_right else None


@dataclass(frozen=True, slots=True)
class RowProof:
    """Proves the row in the bytes `read` of a shard, by a checksum of its own."""

    read: Range
    checksum: int

    def row_in(self, data: bytes) -> bytes | None:
        """Return the row, if `data` is it."""
        return data if xxhash.xxh3_64_intdigest(data) == self.checksum else None


Proof = BlockProof | RowProof


class RowChecksums:
    """Checksums of the rows of shards that were seen whole: 8 bytes a row, of the shards used last."""

    def __init__(self) -> None:
        self._kept = _Kept()

    def remember(self, number: int, raw: Bytes, first: int, stride: int, size: int, rows: int) -> None:
        """Keep checksums of a shard whose bytes are proved, and whose row r begins at first + r * stride."""
        if self._kept.get(number) is not None:
            return
        view, starts = raw.data, range(first, first + rows * stride, stride)
        found = [xxhash.xxh3_64_intdigest(view[start : start + size]) for start in starts]
        self._kept.put({number: np.array(found, np.uint64)})

    def proof(self, number: int, row: int, read: Range) -> RowProof | None:
        """Return the proof of one row, whose bytes are `read`; None if its shard was not seen lately."""
        kept = self._kept.get(number)
        return None if kept is None else RowProof(read, int(kept[row]))
