"""Keep documents in the order of the inputs, packed in units of consecutive documents (`pack.order: source`).

A unit of a Parquet file is what a loader that tokenizes the file itself takes as a shard
(`shardkit.datasets.text_rows`), so the rows of both are equal. Of other files, a unit is a range that one
task reads (a split). Units are numbered in the order of inputs, files and records. Documents that are removed
leave the units of the others as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from shardkit.datasets.row_files import find_rows
from shardkit.errors import ShardError
from shardkit.kernels.numba_support import UInt64s
from shardkit.writers.inputs.scan import Split
from shardkit.writers.recipe.recipe import Recipe

_THREADS = 8


@dataclass(frozen=True, slots=True)
class FileUnits:
    """The units of one file: number `first` and following, unit i from record `starts[i]` on."""

    first: int
    starts: tuple[int, ...]

    def also(self, start: int) -> FileUnits:
        """Return a copy with one more unit, from record `start` on."""
        return FileUnits(self.first, (*self.starts, start))


@dataclass(frozen=True, slots=True)
class Units:
    """The units of all inputs: how many there are, and for each split those of its files, by name."""

    count: int
    of_splits: Sequence[Mapping[str, FileUnits]]

    @classmethod
    def of(cls, recipe: Recipe, splits: Sequence[Split]) -> Units:
        """Find the units of these splits; reads the footers of Parquet files."""
        files = {
            part.file: (part, recipe.inputs[part.source].text)
            for split in splits
            for part in split.parts
            if part.format == "parquet" and recipe.inputs[part.source].text is not None
        }
        with ThreadPoolExecutor(_THREADS) as pool:
            starts = dict(zip(files, pool.map(lambda one: _starts(*one), files.values()), strict=True))
        count, numbered, found = 0, dict[str, FileUnits](), []
        for split in splits:
            own: dict[str, FileUnits] = {}
            for part in split.parts:
                known = starts.get(part.file)
                if known is None:
                    before = own.get(part.file)  # another part of the same file, in joined splits
                    made = FileUnits(count, (0,)) if before is None else before.also(part.first_record)
                    own[part.file] = made
                    count += 1
                    continue
                if part.file not in numbered:
                    numbered[part.file] = FileUnits(count, known)
                    count += len(known)
                own[part.file] = numbered[part.file]
            found.append(own)
        return cls(max(1, count), found)


def _starts(split: Split, column: str) -> tuple[int, ...] | None:
    """Return the first row of each unit of a Parquet file; None if its text is not a column of its own."""
    try:
        rows = find_rows(split.path, split.input.storage, columns=[column])
    except (ShardError, ValueError):  # reading the file tells what is wrong with it
        return None
    return tuple(rows.manifest.shard_starts[:-1].tolist())


def source_keys(documents: pa.RecordBatch, units: Mapping[str, FileUnits], count: int) -> UInt64s:
    """Return the key of each document, uint64[n], which orders documents by unit and record.

    The upper 32 bits of a key lead to its unit, as `range_of` scales them to `count` partitions.
    """
    files = documents.column("file").dictionary_encode()
    records = documents.column("record").to_numpy()
    keys = np.zeros(documents.num_rows, np.uint64)
    for number, file in enumerate(files.dictionary.to_pylist()):
        mine = files.indices.to_numpy() == number
        found = units[file]
        starts = np.array(found.starts, np.int64)
        unit = np.searchsorted(starts, records[mine], side="right") - 1
        upper = -(-((found.first + unit) << 32) // count)  # the first that is scaled to it; below 2**53
        within = (records[mine] - starts[unit]) & 0xFFFFFFFF
        keys[mine] = (upper.astype(np.uint64) << np.uint64(32)) | within.astype(np.uint64)
    return keys
