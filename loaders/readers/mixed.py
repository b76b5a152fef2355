"""Samples of streams that need different readers: each is read by its own, then joined in order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from shardkit.loaders.readers.streams import Columns, ReadRows, Source, Streams

__all__ = ["MixedShapesError", "MixedSource"]

_Ints = npt.NDArray[np.int64]


class MixedShapesError(ValueError):
    """A batch would hold sequences of different lengths."""


class MixedSource:
    """Reads streams of any kinds, whose columns have the same names."""

    def __init__(self, streams: Streams, sources: Sequence[Source]) -> None:
        self._streams = streams
        self._sources = list(sources)

    def open_rows(self, shard: npt.NDArray[np.int32], row: npt.NDArray[np.int64]) -> tuple[ReadRows, bool]:
        """As `Source.open_rows`."""
        by_shard = np.argsort(shard, kind="stable")
        parts: list[tuple[_Ints, ReadRows]] = []
        is_late = False
        for stream, piece, numbers in self._streams.split(shard[by_shard]):
            where = np.sort(by_shard[piece])  # in the order in which they are asked for
            if len(where):
                own = shard[where] - np.int32(self._streams.first_shard(stream))
                assert len(own) == len(numbers)
                read, waits = self._sources[stream].open_rows(own, row[where])
                parts.append((where, read))
                is_late |= waits
        return partial(_read, parts), is_late


def _read(parts: list[tuple[_Ints, ReadRows]], low: int, high: int) -> Columns:
    found = []
    for where, read in parts:
        first, last = np.searchsorted(where, (low, high)).tolist()
        if first < last:
            found.append((where[first:last] - low, read(first, last)))
    if len(found) == 1:
        return found[0][1]
    if not found:
        return parts[0][1](0, 0) if parts else {}
    return {name: _joined([(where, columns[name]) for where, columns in found]) for name in found[0][1]}


def _joined(
    parts: list[tuple[_Ints, npt.NDArray[np.generic] | list[object]]],
) -> npt.NDArray[np.generic] | list[object]:
    count = sum(len(where) for where, _ in parts)
    first = parts[0][1]
    if isinstance(first, list):
        values: list[object] = [None] * count
        for where, part in parts:
            for place, value in zip(where.tolist(), part, strict=True):
                values[place] = value
        return values
    shapes = {part.shape[1:] for _, part in parts if isinstance(part, np.ndarray)}
    if len(shapes) > 1:
        found = " and ".join(map(str, sorted(shapes)))
        raise MixedShapesError(
            f"samples of different shapes, {found}, would be in one batch: with mixed_lengths=True, let the "
            "weights change at a multiple of the batch over all ranks, from some streams to others"
        )
    whole = np.empty((count, *shapes.pop()), dtype=first.dtype)
    for where, part in parts:
        whole[where] = part
    return whole
