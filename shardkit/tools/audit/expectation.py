"""Computes what an undisturbed run delivers: streams, their kept samples, their order, and their steps.

It uses only a run's settings and the sizes of the shards, not the loader. Sample ids and shards are numbered
consecutively over the datasets of all streams, as in the loader. The index of a stream counts the samples
that the stream has delivered, over all its epochs; for a single stream, the index is the position.

Steps follow from the rule of the tail. `Tiling` implements it independently of the loader's plan
(`shardkit.order.batches`), which the audit checks. With N samples per epoch and G samples per step over all
ranks, left = N - p % N samples of the epoch remain at position p. A step that starts there covers:

    carry  p .. p + G
    drop   p .. p + G; if left < G, the rest of the epoch is skipped: p + left .. p + left + G
    pad    p .. p + min(G, left), and padding fills up the step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from shardkit.arrays import Ints
from shardkit.datasets.dataset import Dataset
from shardkit.errors import StateError
from shardkit.order.arrangement import Arrangement
from shardkit.order.exclusions import Exclusions
from shardkit.order.run_settings import RunSettings


class Place(TypedDict, total=False):
    """The location of a sample, as fields of a finding."""

    shard: str
    row: int
    sample: int
    stream: str


@dataclass(frozen=True, slots=True)
class Steps:
    """`count` steps of `size` samples each, with consecutive positions from `start`."""

    start: int
    size: int
    count: int

    @property
    def end(self) -> int:
        """The position after the last step."""
        return self.start + self.size * self.count


@dataclass(frozen=True, slots=True)
class Tiling:
    """Cuts positions into steps; an epoch has `samples` positions, and its last step follows from `tail`."""

    samples: int
    tail: str

    def settle(self, position: int, global_batch: int) -> int:
        """Return where the next step begins: `position`, or the next epoch if the tail drops the rest."""
        left = self.samples - position % self.samples
        return position + left if self.tail == "drop" and left < global_batch else position

    def steps(self, position: int, global_batch: int, most: int) -> Steps:
        """Return the next 1 to `most` steps of equal size that follow each other without a gap."""
        start = self.settle(position, global_batch)
        left = self.samples - start % self.samples
        if self.tail == "carry":
            return Steps(start, global_batch, most)
        if left < global_batch:
            return Steps(start, left, 1)
        return Steps(start, global_batch, min(most, left // global_batch))


class Expectation:
    """The expected order of a run with `settings` over `datasets`, without the rows in `exclusions`.

    Raises StateError if the settings belong to other datasets or exclusions.
    """

    def __init__(
        self, settings: RunSettings, datasets: Sequence[Dataset], exclusions: Sequence[Exclusions | None]
    ) -> None:
        _check(settings, datasets, exclusions)
        self.settings, self._datasets = settings, tuple(datasets)
        self.tiling = Tiling(settings.epoch_samples, settings.tail)
        named = zip(settings.streams, datasets, strict=True)
        self.names = [
            stream.name or dataset.location.rstrip("/").rpartition("/")[2] for stream, dataset in named
        ]
        excluded = zip(datasets, self.names, exclusions, strict=True)
        arranged = Arrangement(settings, [dataset.stream_sizes(name, own) for dataset, name, own in excluded])
        self.order, self.streams, self.mixture = arranged.order, arranged.streams, arranged.mixture
        self.indices_at = arranged.positions
        """Function that returns how many samples each stream has delivered before a position."""
        self.first_samples = _starts([len(dataset) for dataset in datasets])
        self._first_shards = _starts([stream.shards for stream in self.streams])
        self._shard_starts = _starts(np.concatenate([each.manifest.shard_samples for each in datasets]))

    @property
    def samples(self) -> int:
        """The number of samples of all streams, including excluded ones; ids are below this number."""
        return int(self.first_samples[-1])

    @property
    def shards(self) -> int:
        """The number of shards of all streams."""
        return int(self._first_shards[-1])

    def edges(self, steps: Steps) -> list[Ints]:
        """Return per stream int64[count + 1]: the stream's index at the start of each step and at the end."""
        if self.mixture is None:
            return [steps.start + np.arange(steps.count + 1, dtype=np.int64) * steps.size]
        streams = len(self.streams)
        stream, _ = self.mixture.locate(steps.start, steps.size * steps.count)
        of_step = np.repeat(np.arange(steps.count), steps.size) * streams + stream
        counts = np.bincount(of_step, minlength=steps.count * streams).reshape(steps.count, streams)
        edges = np.zeros((steps.count + 1, streams), dtype=np.int64)
        np.cumsum(counts, axis=0, out=edges[1:])
        edges += self.mixture.counts(steps.start)
        return [edges[:, number] for number in range(streams)]

    def position_of(self, stream: int, index: int) -> int | None:
        """Return the position at which the run delivers `index` of a stream; None if it never does."""
        return index if self.mixture is None else self.mixture.position_of(stream, index)

    def samples_at(self, stream: int, indices: Ints) -> Ints:
        """Return the ids of the samples at `indices` of a stream."""
        ids: Ints = self.streams[stream].locate(indices).sample_id + self.first_samples[stream]
        return ids

    def shards_of(self, ids: Ints) -> npt.NDArray[np.intp]:
        """Return the number of each sample's shard, counted through all streams."""
        return np.searchsorted(self._shard_starts, ids, side="right") - 1

    def shard_name(self, shard: int) -> str:
        """Return the name of a shard's file; in a mixture, with its stream."""
        stream = int(np.searchsorted(self._first_shards, shard, side="right")) - 1
        return self._named(stream, self._datasets[stream].name_of(shard - int(self._first_shards[stream])))

    def place(self, sample: int) -> Place:
        """Return the location of a sample; in a mixture, with its stream and its number in that stream."""
        shard = int(self.shards_of(np.array([sample]))[0])
        stream = int(np.searchsorted(self.first_samples, sample, side="right")) - 1
        row = sample - int(self._shard_starts[shard])
        name, row = self._datasets[stream].place_of(shard - int(self._first_shards[stream]), row)
        found = Place(
            shard=self._named(stream, name),
            row=row,
            sample=sample - int(self.first_samples[stream]),
        )
        if self.mixture is not None:
            found["stream"] = self.names[stream]
        return found

    def _named(self, stream: int, name: str) -> str:
        return name if self.mixture is None else f"{self.names[stream]}/{name}"


def _check(
    settings: RunSettings, datasets: Sequence[Dataset], exclusions: Sequence[Exclusions | None]
) -> None:
    if len(datasets) != len(settings.streams):
        raise StateError(
            f"the run has {len(settings.streams)} datasets, but {len(datasets)} were given: give all, in the "
            f"order of the loader's streams ({', '.join(s.name or s.fingerprint for s in settings.streams)})"
        )
    for number, (stream, dataset) in enumerate(zip(settings.streams, datasets, strict=True)):
        if stream.fingerprint != dataset.fingerprint:
            raise StateError(
                f"{dataset.location} has the fingerprint {dataset.fingerprint}, but the run's stream "
                f"{number} has {stream.fingerprint}: give the dataset that the run read"
            )
        excluded = exclusions[number]
        digest = "" if excluded is None else excluded.digest
        if stream.excluded != digest:
            raise StateError(
                f"{dataset.location}: the rows excluded in the run have digest {stream.excluded or 'none'}, "
                f"but the given ones have {digest or 'none'}: give --exclude as in the run"
            )


def _starts(sizes: npt.ArrayLike) -> Ints:
    return np.concatenate([[0], np.cumsum(np.asarray(sizes, dtype=np.int64))])
