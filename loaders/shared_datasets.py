"""Streams that are parts of one dataset, such as its classes, read through it together.

A stream's shards have numbers of their own, so that its samples say whose they are. Below this, a dataset is
one, however many streams draw on it: each shard is opened once, cached once and fetched by one plan, and a
batch is gathered from all of its streams at once.

What follows a dataset of one stream counts that stream's samples; what follows a shared one counts positions
of the whole mixture (`shardkit.mixed_uses` says which shards are needed when, by those).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from shardkit.loaders.rows import Reader
from shardkit.loaders.sources import Source
from shardkit.loaders.streams import Streams

__all__ = ["SharedDatasets"]


class SharedDatasets:
    """Reads `streams` through `source`, which reads each of their datasets once (`Streams.once`)."""

    def __init__(self, streams: Streams, source: Source) -> None:
        self._streams, self._source = streams, source
        self.waited = False

    def restart(self, follow: Callable[[int], None]) -> None:
        """A run begins, perhaps elsewhere; `follow` is given the number of a dataset in `Streams.once`."""
        self._source.restart(follow)

    def advance(self, positions: Sequence[int]) -> None:
        """Everything before these positions, one for each stream, has been read."""
        whole = sum(positions)
        shared = self._streams.sharing
        self._source.advance([positions[who[0]] if len(who) == 1 else whole for who in shared])

    def progress(self) -> str:
        """What is being waited for, as the end of a sentence; "" if nothing is."""
        return self._source.progress()

    def reader(self, shard: npt.NDArray[np.int32], row: npt.NDArray[np.int64]) -> Reader:
        """A reader of samples (shard[i], row[i])."""
        reader = self._source.reader(self._streams.in_datasets(shard), row)
        self.waited = self._source.waited
        return reader
