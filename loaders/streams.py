"""The datasets of a loader, seen as one: shards numbered through, stream after stream.

So one reader gathers the rows of all streams at once, and one plan names them. Samples are numbered through
in the same way (`split_ids` gives them back to their streams).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from shardkit.dataset import Dataset, ShardReader
from shardkit.index import ShardInfo

__all__ = ["Streams"]


class Streams:
    """One or more open datasets."""

    def __init__(self, datasets: Sequence[Dataset], names: Sequence[str]) -> None:
        assert datasets
        self.datasets = tuple(datasets)
        self.names = tuple(names)
        shards = [dataset.manifest.shards for dataset in datasets]
        self._first_shards = [0, *accumulate(map(len, shards))]
        self._first_samples = np.array([0, *accumulate(map(len, datasets))], dtype=np.int64)
        self.infos: Sequence[ShardInfo] = shards[0] if len(shards) == 1 else [i for s in shards for i in s]
        self.shard_samples: npt.NDArray[np.int64] = np.concatenate(
            [dataset.manifest.shard_samples for dataset in datasets]
        )

    def __len__(self) -> int:
        return len(self.datasets)

    def stream_of(self, shard: int) -> int:
        """The stream that a shard belongs to."""
        return bisect_right(self._first_shards, shard) - 1

    def shard(self, number: int) -> ShardReader:
        """A shard, open."""
        stream = self.stream_of(number)
        return self.datasets[stream].shard(number - self._first_shards[stream])

    def where(self, number: int) -> str:
        """A shard's path or URL."""
        stream = self.stream_of(number)
        return self.datasets[stream].where(number - self._first_shards[stream])

    def split(self, shards: npt.NDArray[np.int32]) -> Iterator[tuple[int, slice, npt.NDArray[np.int32]]]:
        """(stream, where in `shards`, its own numbers of them) of sorted shard numbers, for each stream."""
        edges = np.searchsorted(shards, self._first_shards).tolist()
        for stream, (low, high) in enumerate(pairwise(edges)):
            yield stream, slice(low, high), shards[low:high] - np.int32(self._first_shards[stream])

    def first_shard(self, stream: int) -> int:
        """The number of a stream's first shard."""
        return self._first_shards[stream]

    def split_ids(
        self, sample_ids: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(stream, row number in its dataset's order) of samples; -1, which is padding, stays -1 in both."""
        stream = np.searchsorted(self._first_samples, sample_ids, side="right") - 1
        return stream, np.where(stream < 0, -1, sample_ids - self._first_samples[stream])

    def close(self) -> None:
        for dataset in self.datasets:
            dataset.close()
