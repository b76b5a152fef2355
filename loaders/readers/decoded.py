"""Columns of any kind, decoded sample by sample.

Numbers and arrays of constant shape become one array; everything else (text, images, arrays of any length)
becomes a list with one entry per sample. Which columns are stacked is decided once, from their encoding in
the index, so a key never changes its type from one batch to the next.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from shardkit.errors import ShardError
from shardkit.formats.mds.encodings import encoding_of
from shardkit.loaders.readers.streams import Columns, ReadRows, Streams
from shardkit.manifest import Column

__all__ = ["DecodedSamples", "constant_layout"]


def constant_layout(column: Column) -> tuple[np.dtype[np.generic], tuple[int, ...]] | None:
    """(type, shape) of every value of a column of equal numbers or arrays; None for any other column."""
    try:
        encoding = encoding_of(column.encoding)
    except ValueError:
        return None  # an extension that only tars know
    return None if encoding.dtype is None else (encoding.dtype, encoding.shape)


class DecodedSamples:
    """Reads the wanted columns of any dataset."""

    def __init__(
        self, streams: Streams, names: Mapping[str, str], delivered: Mapping[str, np.dtype[np.generic]]
    ) -> None:
        """`streams`: a single one; `names`: dataset's column name by the batch's.

        `delivered`: types of columns that are converted.
        """
        (dataset,) = streams.datasets
        self._streams = streams
        self._names = dict(names)
        self._wanted = frozenset(names.values())
        self._delivered = dict(delivered)
        by_name = {column.name: column for column in dataset.columns}
        layouts = {
            name: constant_layout(by_name[column]) for name, column in names.items() if column in by_name
        }
        self._stacked = {name: layout[0] for name, layout in layouts.items() if layout is not None}

    def open_rows(self, shard: npt.NDArray[np.int32], row: npt.NDArray[np.int64]) -> tuple[ReadRows, bool]:
        """As `Source.open_rows`."""
        is_late = bool(self._streams.use(0, np.unique(shard).tolist()))
        if (reader := self._streams.readers[0]) is not None:
            reader.follow()  # whole shards are needed from the first sample on

        def read(low: int, high: int) -> Columns:
            places = list(zip(shard[low:high].tolist(), row[low:high].tolist(), strict=True))
            # Shard by shard: a decompressed one must not be forgotten and opened again within a batch.
            by_shard = np.argsort(shard[low:high], kind="stable").tolist()
            found = {
                i: self._streams.shard(places[i][0]).sample(places[i][1], self._wanted) for i in by_shard
            }
            samples = [found[i] for i in range(len(places))]
            return {name: self._column(name, samples, places) for name in self._names}

        return read, is_late

    def _column(
        self, name: str, samples: list[dict[str, object]], places: list[tuple[int, int]]
    ) -> npt.NDArray[np.generic] | list[object]:
        column = self._names[name]
        for sample, place in zip(samples, places, strict=True):
            if column not in sample:
                problem = f"has no column {column!r}; name those that all samples have with columns=[...]"
                raise self._error(place, problem)
        values = [sample[column] for sample in samples]
        if name not in self._stacked:
            return values
        dtype = self._delivered.get(name, self._stacked[name])
        arrays = [np.asarray(value) for value in values]
        for array, place in zip(arrays, places, strict=True):
            if array.shape != arrays[0].shape:
                found = f"has shape {array.shape} in column {column!r}, others {arrays[0].shape}"
                raise self._error(place, found)
        return np.stack(arrays).astype(dtype) if arrays else np.empty(0, dtype)

    def _error(self, place: tuple[int, int], problem: str) -> ShardError:
        return ShardError(self._streams.where(place[0]), f"sample {place[1]} {problem}")
