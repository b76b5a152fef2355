"""Count the rows that texts make, in one pass over a dataset, and keep the lengths that it measures.

    FOLDER/KEY/lengths-00017     documents and their numbers of tokens, of consecutive shards (a block)
               lengths-00017.lock     flocked by the process that measures the block
               rows-2048-best_fit    rows of every shard, for one length of row and one way to pack

`KEY` is a digest of the texts and the tokenizer. Another length of row, or way to pack, needs only another
`rows` file: the lengths do not depend on it. All processes of a node, and all nodes that see the folder,
measure together: each takes blocks that no other has locked, with several threads. A block appears by rename,
so a pass that is interrupted continues. Damaged files are measured again. Above `MAX_BYTES`, the indexes that
were not used for longest are removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import zstandard

from shardkit.arrays import Ints
from shardkit.files import publish_hashed, read_hashed
from shardkit.locks import FileLock
from shardkit.progress import reading

BLOCK_BYTES = 64 << 20  # stored size of the shards that are measured, locked and kept together
MAX_BYTES = 16 << 30  # of all indexes in a folder; a document takes about two bytes
_MAX_BLOCK_BYTES = 1 << 30
_DIGEST_BYTES = 16

Lengths = np.ndarray[tuple[int], np.dtype[np.uint32]]
Measure = Callable[[int], Lengths]
"""Returns what `Documents.measured` has for each row of a shard's file, as uint32[n]; 0 is a null."""


@dataclass(frozen=True, slots=True)
class TextIndex:
    """The index of one dataset's texts and one tokenizer, in `folder`; None keeps nothing."""

    folder: Path | None
    sizes: Sequence[int]
    """The stored size of each shard in bytes."""
    wait_seconds: float = 600.0
    """Longest wait for another process that measures a block, before this one measures it as well."""
    threads: int = 1
    block_bytes: int = BLOCK_BYTES

    def rows(self, name: str, measure: Measure, count: Callable[[Lengths], int]) -> tuple[Ints, str, int]:
        """Return the number of rows of each shard, int64[shards], a digest of all lengths, and the nulls.

        `name` names what `count`, which makes rows of documents, depends on.
        """
        file = None if self.folder is None else self.folder / f"rows-{name}"
        if file is not None and (known := read_hashed(file)) is not None:
            found = np.frombuffer(known, "<i8", offset=_DIGEST_BYTES).astype(np.int64)
            if len(found) == len(self.sizes) + 1:
                return found[1:], known[:_DIGEST_BYTES].hex(), int(found[0])
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
        rows, digests = np.zeros(len(self.sizes), np.int64), hashlib.blake2b(digest_size=_DIGEST_BYTES)
        nulls = 0
        blocks = self._blocks()
        kept = self._measure_all(blocks, measure)
        for number, block in enumerate(blocks):
            measured = kept.pop(number, None) or self._stored(number, block)
            if measured is None:  # it was damaged or removed since
                measured = [measure(shard) for shard in block]
            for shard, lengths in zip(block, measured, strict=True):
                digests.update(len(lengths).to_bytes(8, "little") + lengths.tobytes())
                rows[shard] = count(lengths)
                nulls += int((lengths == 0).sum())
        if file is not None:
            with contextlib.suppress(OSError):  # a full disk: the next start counts again
                publish_hashed(file, digests.digest() + np.append(nulls, rows).astype("<i8").tobytes())
            _trim(file.parent.parent, MAX_BYTES)
        return rows, digests.hexdigest(), nulls

    def lengths(self, shard: int) -> Lengths | None:
        """Return what was measured of a shard; None if it is not kept."""
        number, block = next((n, block) for n, block in enumerate(self._blocks()) if shard in block)
        measured = self._stored(number, block)
        return None if measured is None else measured[shard - block.start]

    def _blocks(self) -> list[range]:
        edges, size = [0], 0
        for number, more in enumerate(self.sizes):
            if size + more > self.block_bytes and number > edges[-1]:
                edges.append(number)
                size = 0
            size += more
        edges.append(len(self.sizes))
        return [range(first, stop) for first, stop in pairwise(edges)]

    def _measure_all(self, blocks: Sequence[range], measure: Measure) -> dict[int, list[Lengths]]:
        """Measure the blocks that are not stored yet; return those that cannot be stored."""
        missing = [number for number, block in enumerate(blocks) if self._stored(number, block) is None]
        kept: dict[int, list[Lengths]] = {}
        if not missing:
            return kept
        sizes = {number: sum(self.sizes[shard] for shard in blocks[number]) for number in missing}
        with reading("measure texts", sizes) as advance:
            for patience in (0.0, self.wait_seconds):  # first the blocks that nobody else measures

                def one(number: int, patience: float = patience) -> bool:
                    if (found := self._measure(number, blocks[number], measure, patience)) is None:
                        return False
                    if found:
                        kept[number] = found
                    advance(number)
                    return True

                missing = self._each(one, missing)
        return kept

    def _each(self, one: Callable[[int], bool], numbers: Sequence[int]) -> list[int]:
        """Call `one` for each number, in threads; return those for which it returns False."""
        if not numbers:
            return []
        first = os.getpid() % len(numbers)  # processes that start together begin in different places
        turned = [*numbers[first:], *numbers[:first]]
        with ThreadPoolExecutor(self.threads, thread_name_prefix="shardkit-text") as pool:
            jobs = {pool.submit(one, number): number for number in turned}
            try:
                return sorted(jobs[job] for job in as_completed(jobs) if not job.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _measure(self, number: int, block: range, measure: Measure, patience: float) -> list[Lengths] | None:
        """Measure and store a block. Return [] if it is stored, its lengths if that failed.

        Return None if another process has locked it, and did not finish within `patience` seconds.
        """
        if self.folder is None:
            return [measure(shard) for shard in block]
        lock = FileLock(self.folder / f"{_name(number)}.lock")
        is_locked = lock.acquire(patience)
        if not is_locked and not patience:
            return None
        try:
            if self._stored(number, block) is not None:  # another process was faster
                return []
            lengths = [measure(shard) for shard in block]
            try:
                publish_hashed(self.folder / _name(number), _packed(lengths))
            except OSError:  # a full disk: the next start measures the block again
                return lengths
            return []
        finally:
            if is_locked:
                lock.release()

    def _stored(self, number: int, block: range) -> list[Lengths] | None:
        if self.folder is None or (data := read_hashed(self.folder / _name(number))) is None:
            return None
        try:
            values = np.frombuffer(zstandard.decompress(data, _MAX_BLOCK_BYTES), "<u4").astype(np.uint32)
        except zstandard.ZstdError:
            return None
        counts = values[: len(block)].astype(np.int64)
        if len(counts) != len(block) or len(values) != len(block) + int(counts.sum()):
            return None
        return np.split(values[len(block) :], np.cumsum(counts)[:-1])


def _name(number: int) -> str:
    return f"lengths-{number:05d}"


def _packed(lengths: Sequence[Lengths]) -> bytes:
    counts = np.array([len(one) for one in lengths], "<u4")
    return zstandard.compress(np.concatenate([counts, *lengths]).astype("<u4").tobytes())


def _trim(folder: Path, max_bytes: int) -> None:
    """Remove the least recently used indexes in a folder until the rest fit `max_bytes`."""
    found = []
    with contextlib.suppress(OSError):
        for one in folder.iterdir():
            with contextlib.suppress(OSError):
                files = [file.stat() for file in one.iterdir()]
                used = max((status.st_mtime_ns for status in files), default=0)
                found.append((used, sum(status.st_size for status in files), one))
    excess = sum(size for _, size, _ in found) - max_bytes
    for _, size, one in sorted(found)[:-1]:
        if excess <= 0:
            return
        shutil.rmtree(one, ignore_errors=True)
        excess -= size
