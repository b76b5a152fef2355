"""What an undisturbed run delivers: streams, their kept samples and their order, from settings and indexes.

Made from a run's settings and the sizes of the shards alone, apart from the loader. Sample ids and shards
count through all streams' datasets, as they do in the loader. Each stream has an index of its own, which
counts its samples through all its epochs: of a single stream it is the position.

Where steps begin and how many samples they hold, by the tail's rule alone.

Written apart from the loader's own plan (`shardkit.loaders.plan`), which it is there to check. N samples an
epoch, G samples a step over all ranks; a step at position p has left = N - p % N samples of the epoch
before it:

    carry  p .. p + G
    drop   if left < G the epoch's rest is skipped: the step is at p + left .. p + left + G
    pad    p .. p + min(G, left), and padding fills the step up
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shardkit.datasets.dataset import Dataset
from shardkit.errors import StateError
from shardkit.order.exclusions import Exclusions
from shardkit.order.mixture import Mixture
from shardkit.order.order import Order
from shardkit.order.run_settings import RunSettings
from shardkit.order.streams import MixedOrder, StreamOrder, stream_seed

__all__ = ["Expectation", "Steps", "StreamData", "Tiling"]


@dataclass(frozen=True, slots=True)
class Steps:
    """`count` steps of `size` samples each, of consecutive positions from `start` on."""

    start: int
    size: int
    count: int

    @property
    def end(self) -> int:
        """The position behind the last one."""
        return self.start + self.size * self.count


@dataclass(frozen=True, slots=True)
class Tiling:
    """How positions are cut into steps: `samples` an epoch, and what happens at its edge."""

    samples: int
    tail: str

    def settle(self, position: int, global_batch: int) -> int:
        """Where the step begins of a run that stands at `position`: behind what is dropped."""
        left = self.samples - position % self.samples
        return position + left if self.tail == "drop" and left < global_batch else position

    def steps(self, position: int, global_batch: int, most: int) -> Steps:
        """The next steps that are alike and follow without a break: 1 to `most` of them."""
        start = self.settle(position, global_batch)
        left = self.samples - start % self.samples
        if self.tail == "carry":
            return Steps(start, global_batch, most)
        if left < global_batch:
            return Steps(start, left, 1)
        return Steps(start, global_batch, min(most, left // global_batch))


_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StreamData:
    """A dataset, by its index, and the rows of it that are left out."""

    dataset: Dataset
    exclusions: Exclusions | None = None


class Expectation:
    """The order of a run; StateError where `settings` and `data` do not belong together."""

    def __init__(self, settings: RunSettings, data: Sequence[StreamData]) -> None:
        _check(settings, data)
        self.settings, self.data = settings, tuple(data)
        self.tiling = Tiling(settings.epoch_samples, settings.tail)
        self.streams: list[StreamOrder] = []
        for number, one in enumerate(data):
            sizes = one.dataset.manifest.shard_samples
            seed = settings.order.seed
            if settings.mixture is not None:
                seed = stream_seed(seed, number)
            kept = sizes if one.exclusions is None else one.exclusions.kept_of_shards(sizes)
            order = Order(kept, replace(settings.order, seed=seed))
            self.streams.append(StreamOrder(order, one.exclusions, sizes))
        self.mixture: Mixture | None = None
        self.order: StreamOrder | MixedOrder = self.streams[0]
        if settings.mixture is not None:
            self.mixture = Mixture(settings.order.seed, settings.mixture.schedule)
            self.order = MixedOrder(self.streams, self.mixture, settings.epoch_samples)
        sizes_of_all = [one.dataset.manifest.shard_samples for one in data]
        self.shard_starts = _starts(np.concatenate(sizes_of_all))
        self.first_samples = _starts(np.array([len(one.dataset) for one in data]))
        self.first_shards = _starts(np.array([len(sizes) for sizes in sizes_of_all]))
        self.names = [
            stream.name or one.dataset.location.rstrip("/").rpartition("/")[2]
            for stream, one in zip(settings.streams, data, strict=True)
        ]

    @property
    def samples(self) -> int:
        """Samples of all streams, those that are left out too: ids are below this."""
        return int(self.first_samples[-1])

    def kept_of_shards(self, stream: int) -> _Ints:
        """int64[K]: samples of each of the stream's shards that are kept."""
        sizes, exclusions = self.data[stream].dataset.manifest.shard_samples, self.data[stream].exclusions
        return sizes if exclusions is None else exclusions.kept_of_shards(sizes)

    def indices_at(self, position: int) -> list[int]:
        """How many samples each stream has delivered before a position."""
        if self.mixture is None:
            return [position]
        counts: list[int] = self.mixture.counts(position).tolist()
        return counts

    def edges(self, steps: Steps) -> list[_Ints]:
        """For each stream int64[count + 1]: its index where each step begins, and behind the last."""
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
        """Where the run delivers a stream's sample number `index`."""
        return index if self.mixture is None else self.mixture.position_of(stream, index)

    def samples_at(self, stream: int, indices: _Ints) -> _Ints:
        """The ids of a stream's samples number `indices`."""
        ids: _Ints = self.streams[stream].locate(indices).sample_id + self.first_samples[stream]
        return ids

    def is_excluded(self, stream: int, rows: _Ints) -> npt.NDArray[np.bool_]:
        """Whether rows of a stream's dataset are left out."""
        exclusions = self.data[stream].exclusions
        return np.zeros(len(rows), dtype=np.bool_) if exclusions is None else exclusions.contains(rows)

    def shards_of(self, ids: _Ints) -> npt.NDArray[np.intp]:
        """The shard of each sample, counted through all streams."""
        return np.searchsorted(self.shard_starts, ids, side="right") - 1

    def shard_name(self, shard: int) -> str:
        """What a shard's file is called; in a mixture, with its stream."""
        stream = int(np.searchsorted(self.first_shards, shard, side="right")) - 1
        own = shard - int(self.first_shards[stream])
        name = self.data[stream].dataset.manifest.shards[own].stored.basename
        return name if self.mixture is None else f"{self.names[stream]}/{name}"

    def stream_of(self, sample: int) -> int:
        """The stream that a sample belongs to."""
        return int(np.searchsorted(self.first_samples, sample, side="right")) - 1

    def place(self, sample: int) -> dict[str, int | str]:
        """Where a sample lies, for a finding; in a mixture with its stream, numbered within it."""
        shard = int(self.shards_of(np.array([sample]))[0])
        stream = self.stream_of(sample)
        found: dict[str, int | str] = {
            "shard": self.shard_name(shard),
            "row": sample - int(self.shard_starts[shard]),
            "sample": sample - int(self.first_samples[stream]),
        }
        if self.mixture is not None:
            found["stream"] = self.names[stream]
        return found


def _check(settings: RunSettings, data: Sequence[StreamData]) -> None:
    if len(data) != len(settings.streams):
        raise StateError(
            f"the run has {len(settings.streams)} datasets, {len(data)} were given: give all, in the order "
            f"of the loader's streams ({', '.join(s.name or s.fingerprint for s in settings.streams)})"
        )
    for number, (stream, one) in enumerate(zip(settings.streams, data, strict=True)):
        if stream.fingerprint != one.dataset.fingerprint:
            raise StateError(
                f"{one.dataset.location} has the fingerprint {one.dataset.fingerprint}, the run's stream "
                f"{number} {stream.fingerprint}: give the dataset that the run read"
            )
        excluded = "" if one.exclusions is None else one.exclusions.digest
        if stream.excluded != excluded:
            raise StateError(
                f"{one.dataset.location}: the run left out rows of digest {stream.excluded or 'none'}, here "
                f"it is {excluded or 'none'}: give --exclude as the run had it"
            )


def _starts(sizes: _Ints) -> _Ints:
    return np.concatenate([[0], np.cumsum(sizes)])
