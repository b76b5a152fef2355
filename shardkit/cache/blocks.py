"""The checksums of blocks of one remote dataset: parts of its blocks.bin, fetched when rows need them.

A file of up to 512 KiB (64 shards of 64 MiB) is fetched whole. Of larger ones, parts that lie near each other
come in one request, at most one for each shard of which rows are read; these requests go out together with
those for rows. Each part is proved by its seal (`shardkit.formats.blocks`); wrong ones are fetched again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from shardkit.errors import ShardError
from shardkit.formats.blocks import BlockFile, Checksums
from shardkit.manifest import FileInfo, Manifest
from shardkit.storage.store import Store
from shardkit.storage.threads import Workers

__all__ = ["BlockChecksums"]

_GAP_BYTES = 1 << 19  # unneeded bytes that cost less than another request
_KEPT_BYTES = 64 << 20  # of 8,000 shards of 64 MiB; above, all are forgotten
_READS = 3  # of a part, before blocks.bin itself is called damaged


class BlockChecksums:
    """Threads may share one."""

    def __init__(self, store: Store, manifest: Manifest, stated: FileInfo, workers: Workers) -> None:
        """`stated`: what the card says of blocks.bin; ShardError if it is not that of these shards."""
        self._store, self._workers = store, workers
        self._where = f"{store.url}/{stated.basename}"
        self._file = BlockFile(self._where, manifest, stated)
        # Without a lock: each use is one step of a dict, and valid after a fork.
        self._kept: dict[int, Checksums] = {}
        self._kept_bytes = 0

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
            data = self._store.get(self._file.name, start, stop)
            ranges = {number: self._file.range(number) for number in group}
            parts = {number: data[low - start : high - start] for number, (low, high) in ranges.items()}
            found = {number: self._file.checksums(number, part) for number, part in parts.items()}
            right = {number: checksums for number, checksums in found.items() if checksums is not None}
            if len(right) == len(group):
                self._keep(right)
                return right
        problem = f"holds no checksums of {len(group) - len(right):,} shards where the index says they are"
        raise ShardError(
            self._where, f"{problem}; it was fetched {_READS} times: run shardkit verify", offset=start
        )

    def _keep(self, found: Mapping[int, Checksums]) -> None:
        size = sum(checksums.nbytes for checksums in found.values())
        if self._kept_bytes + size > _KEPT_BYTES:
            self._kept, self._kept_bytes = {}, 0
        self._kept.update(found)
        self._kept_bytes += size
