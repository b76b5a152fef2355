"""What readers read from and what they give: the datasets of a loader seen as one, and the reader protocol.

`Streams` numbers the shards of all streams consecutively, so one plan names rows of any of them and one
reader gathers them. Samples are numbered the same way; `split_ids` maps them back to their streams. Several
streams may draw on one dataset: its shards then have one number per stream, and `once` lists each dataset
only once.

A remote dataset has one `CacheReader` per `Streams`, because other loaders may read the same open dataset at
other positions.

A `Source` reads planned samples. Its leaves are `fixed` (one gather for columns of constant size), `decoded`
(any column, sample by sample) and `mixed` (streams that need different leaves); `sources` chooses.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Protocol, overload

import numpy as np
import numpy.typing as npt

from shardkit.cache.reader import CacheReader
from shardkit.datasets.dataset import Dataset, ShardReader
from shardkit.manifest import ShardInfo

__all__ = ["Columns", "ReadRows", "Source", "Streams"]

Columns = dict[str, npt.NDArray[np.generic] | list[object]]

ReadRows = Callable[[int, int], Columns]
"""ReadRows(low, high): the columns of the planned samples low to high. It holds their shards open."""


class Source(Protocol):
    """Opens the shards of planned samples."""

    def open_rows(self, shard: npt.NDArray[np.int32], row: npt.NDArray[np.int64]) -> tuple[ReadRows, bool]:
        """Return (a reader of samples (shard[i], row[i]), whether shards had to be fetched first).

        Shards are numbered as in `Streams.once`.
        """


class _Joined(Sequence[ShardInfo]):
    """Sequences as one, without a copy: a thousand classes of ten thousand shards would be large."""

    def __init__(self, parts: Sequence[Sequence[ShardInfo]]) -> None:
        self._parts = parts
        self._starts = [0, *accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, number: int) -> ShardInfo: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[ShardInfo]: ...
    def __getitem__(self, number: int | slice) -> ShardInfo | Sequence[ShardInfo]:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        number = range(len(self))[number]
        part = bisect_right(self._starts, number) - 1
        return self._parts[part][number - self._starts[part]]


class Streams:
    """One or more open datasets, of which some may be the same."""

    def __init__(
        self,
        datasets: Sequence[Dataset],
        names: Sequence[str],
        *,
        timeout_seconds: float | None = None,
        readers: Sequence[CacheReader | None] | None = None,
    ) -> None:
        """`timeout_seconds`: longest wait for a remote shard; `readers`: those that exist already."""
        assert datasets
        if readers is None:
            remote = {id(dataset): dataset.shards for dataset in datasets if dataset.shards is not None}
            made = {number: CacheReader(shards, timeout_seconds) for number, shards in remote.items()}
            readers = [made.get(id(dataset)) for dataset in datasets]
        self.readers = tuple(readers)
        """Of each stream; None for a local dataset."""
        self.datasets = tuple(datasets)
        self.names = tuple(names)
        shards = [dataset.manifest.shards for dataset in datasets]
        self._first_shards = [0, *accumulate(map(len, shards))]
        self.infos: Sequence[ShardInfo] = shards[0] if len(shards) == 1 else _Joined(shards)
        self._first_samples = np.array([0, *accumulate(map(len, datasets))], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.datasets)

    @cached_property
    def shard_samples(self) -> npt.NDArray[np.int64]:
        """int64[shards]: samples of each shard."""
        return np.concatenate([dataset.manifest.shard_samples for dataset in self.datasets])

    @cached_property
    def sharing(self) -> tuple[tuple[int, ...], ...]:
        """The streams that draw on each dataset of `once`."""
        found: dict[int, list[int]] = {}
        for number, dataset in enumerate(self.datasets):
            found.setdefault(id(dataset), []).append(number)
        return tuple(map(tuple, found.values()))

    @cached_property
    def once(self) -> Streams:
        """Each dataset once, in the order of the first streams that draw on them; this if none is shared."""
        if len(self.sharing) == len(self):
            return self
        names = [
            self.names[who[0]] if len(who) == 1 else self.datasets[who[0]].location for who in self.sharing
        ]
        first = [who[0] for who in self.sharing]
        return Streams([self.datasets[i] for i in first], names, readers=[self.readers[i] for i in first])

    def in_datasets(self, shards: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The numbers in `once` of shards."""
        if self.once is self:
            return shards
        stream = np.searchsorted(np.array(self._first_shards), shards, side="right") - 1
        numbers: npt.NDArray[np.int32] = shards + self._shifts[stream]
        return numbers

    def stream_of(self, shard: int) -> int:
        """The stream that a shard belongs to."""
        return bisect_right(self._first_shards, shard) - 1

    def shard(self, number: int) -> ShardReader:
        """A shard, open."""
        stream = self.stream_of(number)
        return self.datasets[stream].shard(number - self._first_shards[stream], self.readers[stream])

    def use(self, stream: int, numbers: Sequence[int]) -> list[int]:
        """Keep only these shards of a stream open; returns those that have to be fetched."""
        reader = self.readers[stream]
        if reader is None:
            return []
        reader.using = frozenset(numbers)
        self.datasets[stream].keep_only(reader.using)
        return reader.missing(numbers)

    def advance(self, positions: Sequence[int]) -> None:
        """Tell the caches that everything before these positions, one for each stream, has been read.

        What follows a dataset of one stream counts that stream's samples; what follows a shared one counts
        positions of the whole mixture (`shardkit.order.residency` says which shards are needed when, by
        those).
        """
        for who in self.sharing:
            reader = self.readers[who[0]]
            if reader is not None:
                reader.advance(positions[who[0]] if len(who) == 1 else sum(positions))

    def progress(self) -> str:
        """What is being waited for, as the end of a sentence; "" if nothing is."""
        return next(filter(None, (reader.progress() for reader in self.readers if reader is not None)), "")

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
        """Close the readers, and the datasets that no other loader is reading."""
        for dataset, reader in zip(self.once.datasets, self.once.readers, strict=True):
            if reader is not None:
                reader.close()
            if dataset.shards is None or not any(other.is_open for other in dataset.shards.readers):
                dataset.close()

    @cached_property
    def _shifts(self) -> npt.NDArray[np.int32]:
        """int32[streams]: from a stream's shards' numbers to those of `once`."""
        shifts = np.zeros(len(self), dtype=np.int32)
        for number, who in enumerate(self.sharing):
            for stream in who:
                shifts[stream] = self.once.first_shard(number) - self._first_shards[stream]
        return shifts
