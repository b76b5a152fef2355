"""The byte ranges of single rows in their shards, and the checksums that verify a row before it is returned.

Rows are read by range if the index alone gives their offsets (`row_layout`): in raw MDS shards whose columns
all have a fixed size, in ranges of flat token files, and in tars as shardkit writes them.

Checksums of blocks are published with the dataset, in blocks.bin. It has one part per shard, fetched
when rows of the shard are read. A file of up to 512 KiB (64 shards of 64 MiB) is fetched whole. In larger
files, parts that are close together are fetched in one request, so there is at most one request per shard
whose rows are read; it is sent together with the requests for rows. Each part is verified by its seal
(formats/block_checksums.py); damaged parts are fetched again.

A shard that was read whole, but for which the cache has no room, is read by rows from then on. Checksums of
its rows are kept in memory, so each row takes one request for its own bytes, for datasets of any tool.
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

MAX_ROW_BYTES = 4 << 20  # maximum size of a row that is read singly; larger rows come with their whole shard
_NAME_BYTES = 100  # length of the name field at the start of a tar member's header

Range = tuple[int, int]
_GAP_BYTES = 1 << 19  # up to this many unneeded bytes are read to save a request
_KEPT_BYTES = 16 << 20  # maximum size of kept checksums: of 2,000 shards of 64 MiB, or of 2 million rows
_READS = 3  # attempts to read checksums from blocks.bin before it is reported as damaged


@dataclass(frozen=True, slots=True)
class ColumnPlace:
    """The place of values in a row: `size` bytes from offset `at`, of all columns or of one tar member.

    In a tar, the .npy header `head` precedes the values. Before `head`, there is a tar block with the
    member's name, which ends with `suffix`.
    """

    at: int
    size: int
    head: bytes = b""
    suffix: bytes = b""

    def is_in(self, row: bytes) -> bool:
        """Return whether `row` has the expected header and member name before the values."""
        start = self.at - len(self.head)
        name = row[max(0, start - BLOCK) : start][:_NAME_BYTES].rstrip(b"\0")
        return row.startswith(self.head, start) and name.endswith(self.suffix)


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The layout of a shard: row r is `size` bytes from first + r * stride; `columns` locate its values."""

    first: int
    stride: int
    size: int
    columns: tuple[ColumnPlace, ...]

    def values(self, row: Bytes | bytes) -> bytes:
        """Return the bytes of all columns in a row, concatenated."""
        return b"".join(bytes(row[column.at : column.at + column.size]) for column in self.columns)


def row_layout(kind: str, info: ShardInfo) -> RowLayout | None:
    """Return the layout of the rows in a shard of format `kind`; None if the index does not define it."""
    sizes = [column.size for column in info.columns]
    total = sum(size or 0 for size in sizes)
    if info.samples < 1 or not total or None in sizes or info.compression or total > MAX_ROW_BYTES:
        return None
    if kind == "tokens":
        return RowLayout(0, total, total, (ColumnPlace(0, total),))
    if kind == "mds":
        first = info.raw.bytes - info.samples * total  # the samples are at the end of the file
        return RowLayout(first, total, total, (ColumnPlace(0, total),)) if first > 0 else None
    names = [column.name for column in info.columns]
    if kind != "tar" or names != sorted(names):  # shardkit sorts members; other tars may have any order
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
    """Checksums of recently used shards, by shard. Needs no lock: each access is one dict operation."""

    def __init__(self) -> None:
        self._of: dict[int, Checksums] = {}
        self._bytes = 0

    def get(self, number: int) -> Checksums | None:
        """Return the checksums of a shard; None if they are not kept."""
        return self._of.get(number)

    def put(self, found: Mapping[int, Checksums]) -> None:
        """Keep checksums of some shards; if the limit is exceeded, discard all others."""
        size = sum(checksums.nbytes for checksums in found.values())
        if self._bytes + size > _KEPT_BYTES:
            self._of, self._bytes = {}, 0
        self._of.update(found)
        self._bytes += size


class BlockChecksums:
    """The block checksums of a dataset, fetched on demand. Threads may share one."""

    def __init__(self, store: Store, manifest: Manifest, stated: FileInfo, workers: Workers) -> None:
        """Read the blocks.bin that the card lists as `stated`; raises ShardError if its size is wrong."""
        self._store, self._workers = store, workers
        self._where = f"{store.url}/{stated.basename}"
        self._file = BlockFile(self._where, manifest, stated)
        self._kept = _Kept()

    def request(self, numbers: Iterable[int]) -> dict[int, Future[Mapping[int, Checksums]]]:
        """Begin to fetch these shards' checksums; the future of a shard returns them, by shard number."""
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
                problem = "is missing, though the dataset lists it; rows cannot be verified: upload it again"
                raise ShardError(self._where, problem) from error
            ranges = {number: self._file.range(number) for number in group}
            parts = {number: data[low - start : high - start] for number, (low, high) in ranges.items()}
            found = {number: self._file.checksums(number, part) for number, part in parts.items()}
            right = {number: checksums for number, checksums in found.items() if checksums is not None}
            if len(right) == len(group):
                self._kept.put(right)
                return right
        problem = f"has no valid checksums of {len(group) - len(right):,} shards where the index places them"
        raise ShardError(
            self._where, f"{problem}; it was fetched {_READS} times: run shardkit verify", offset=start
        )


@dataclass(frozen=True, slots=True)
class BlockProof:
    """Verifies a row, bytes [start, stop) of shard `number`, by the checksums of the blocks around it."""

    number: int
    start: int
    stop: int
    read: Range
    checksums: Future[Mapping[int, Checksums]]
    """The future of the shard's checksums; it must be done before `row_in` is called."""

    @classmethod
    def of(
        cls, number: int, row: Range, file: FileInfo, checksums: Future[Mapping[int, Checksums]]
    ) -> BlockProof:
        return cls(number, *row, block_range(*row, file.bytes), checksums)

    def row_in(self, data: bytes) -> bytes | None:
        """Return the row in `data`, the bytes of the blocks (range `read`); None if a checksum is wrong."""
        first = self.read[0]
        is_right = are_right(self.checksums.result()[self.number], first, data)
        return data[self.start - first : self.stop - first] if is_right else None


@dataclass(frozen=True, slots=True)
class RowProof:
    """Verifies a row, the byte range `read` of a shard, by the row's own checksum."""

    read: Range
    checksum: int

    def row_in(self, data: bytes) -> bytes | None:
        """Return the row, which is `data`; None if its checksum is wrong."""
        return data if xxhash.xxh3_64_intdigest(data) == self.checksum else None


Proof = BlockProof | RowProof


class RowChecksums:
    """Checksums of the rows of recently used shards that were read whole: 8 bytes per row."""

    def __init__(self) -> None:
        self._kept = _Kept()

    def remember(self, number: int, raw: Bytes, first: int, stride: int, size: int, rows: int) -> None:
        """Keep the row checksums of a shard with verified bytes `raw`; row r is at first + r * stride."""
        if self._kept.get(number) is not None:
            return
        view, starts = raw.data, range(first, first + rows * stride, stride)
        found = [xxhash.xxh3_64_intdigest(view[start : start + size]) for start in starts]
        self._kept.put({number: np.array(found, np.uint64)})

    def proof(self, number: int, row: int, read: Range) -> RowProof | None:
        """Return a proof for a row with the byte range `read`; None if its row checksum is not kept."""
        kept = self._kept.get(number)
        return None if kept is None else RowProof(read, int(kept[row]))
