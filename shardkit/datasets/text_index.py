"""Count the rows that texts make, in one pass over a dataset, and keep the lengths that it measures.

    FOLDER/KEY/lengths-00017     documents and their numbers of tokens, of consecutive shards (a block)
               rows-2048-best_fit    rows of every shard, for one length of row and one way to pack

`KEY` is a digest of the texts and the tokenizer. Another length of row, or way to pack, needs only another
`rows` file: the lengths do not depend on it. All processes that see the folder measure together, and a pass
that is interrupted continues (`shardkit.cache.kept_results`). Above `MAX_BYTES`, the indexes that were not
used for longest are removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import zstandard

from shardkit.arrays import Ints
from shardkit.cache.kept_results import WAIT_SECONDS, KeptResults
from shardkit.files import publish_hashed, read_hashed

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
    wait_seconds: float = WAIT_SECONDS
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
        results = self._results(blocks, measure)
        missing = [number for number in range(len(blocks)) if results.stored(number) is None]
        sizes = [sum(self.sizes[shard] for shard in block) for block in blocks]
        kept = results.make_all("measure texts", sizes, missing)
        for number, block in enumerate(blocks):
            measured = kept.pop(number, None) or results.stored(number)
            if measured is None:  # it was damaged or removed since
                measured = results.make(number)
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
        blocks = self._blocks()
        number, block = next((n, block) for n, block in enumerate(blocks) if shard in block)
        measured = self._results(blocks).stored(number)
        return None if measured is None else measured[shard - block.start]

    def _results(self, blocks: Sequence[range], measure: Measure | None = None) -> KeptResults[list[Lengths]]:
        """Return what was measured of blocks of shards; without `measure`, only what is kept."""

        def make(number: int) -> list[Lengths]:
            assert measure is not None
            return [measure(shard) for shard in blocks[number]]

        return KeptResults(
            self.folder,
            [f"lengths-{number:05d}" for number in range(len(blocks))],
            make,
            _packed,
            lambda number, data: _unpacked(data, len(blocks[number])),
            wait_seconds=self.wait_seconds,
            threads=self.threads,
        )

    def _blocks(self) -> list[range]:
        edges, size = [0], 0
        for number, more in enumerate(self.sizes):
            if size + more > self.block_bytes and number > edges[-1]:
                edges.append(number)
                size = 0
            size += more
        edges.append(len(self.sizes))
        return [range(first, stop) for first, stop in pairwise(edges)]


def _packed(lengths: Sequence[Lengths]) -> bytes:
    counts = np.array([len(one) for one in lengths], "<u4")
    return zstandard.compress(np.concatenate([counts, *lengths]).astype("<u4").tobytes())


def _unpacked(data: bytes, shards: int) -> list[Lengths] | None:
    try:
        values = np.frombuffer(zstandard.decompress(data, _MAX_BLOCK_BYTES), "<u4").astype(np.uint32)
    except zstandard.ZstdError:
        return None
    counts = values[:shards].astype(np.int64)
    if len(counts) != shards or len(values) != shards + int(counts.sum()):
        return None
    return np.split(values[shards:], np.cumsum(counts)[:-1])


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
