"""The order of a run's samples, made from its settings, for one dataset or several in a mixture.

The order depends on the sizes of datasets only. The code that opens datasets makes a `StreamSizes` for each
stream, which has all that the order, the settings and the look-ahead of a run need. Positions count samples
over all ranks and streams. A stream also has positions of its own, which count its samples over all its
epochs: limits and fetching ahead use these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shardkit.arrays import Ints
from shardkit.order.exclusions import Exclusions
from shardkit.order.mixture import Mixture, Schedule
from shardkit.order.order import Order, OrderSpec, Shuffle, default_lanes, default_window
from shardkit.order.residency import JoinedUses, MixedUses
from shardkit.order.run_settings import RunSettings, StreamSettings, Tail
from shardkit.order.streams import MixedOrder, StreamOrder

_DECODED_BYTES = 1 << 30  # half of what a dataset keeps decoded (`shardkit.datasets.opened`)


@dataclass(frozen=True, slots=True, eq=False)
class StreamSizes:
    """The properties of a stream that a run's order depends on: the sizes of its dataset, and its exclusions.

    `shard_samples`: int64[shards], including excluded rows. `raw_bytes`: uncompressed size of all shards.
    `limit`: the maximum number of samples that the stream delivers in the run. `name` is for messages.
    `decoded_bytes`: memory that all shards take, if they are read only after they were decoded; else 0.
    `is_shuffled`: whether samples were shuffled over all shards when they were written, as builds do.
    """

    name: str
    fingerprint: str
    shard_samples: Ints
    raw_bytes: int
    is_compressed: bool
    excluded: Exclusions | None = None
    limit: int | None = None
    decoded_bytes: int = 0
    is_shuffled: bool = True

    @property
    def kept(self) -> int:
        """The number of samples that are not excluded."""
        return int(self.shard_samples.sum()) - (0 if self.excluded is None else self.excluded.count)

    def shuffle_sizes(self, lanes: int | None, window: int | None) -> tuple[int, int]:
        """Return (lanes, window): the given values, or defaults from the number of shards and samples.

        Defaults do not depend on batch, ranks, machines or cache, so a seed and a dataset define one order.
        """
        shards = int(np.count_nonzero(self.shard_samples))
        lanes = lanes or default_lanes(shards, compressed=self.is_compressed)
        samples = int(self.shard_samples.sum())
        if window is None:
            # Compressed shards are held in memory: their windows are the small ones of shuffled data.
            is_shuffled = self.is_shuffled or self.is_compressed
            window = default_window(samples, shards, lanes, is_shuffled=is_shuffled)
            if self.decoded_bytes:  # the shards of all windows must fit in memory, at least two per lane
                spanned = max(2 * lanes, _DECODED_BYTES * shards // self.decoded_bytes)
                window = max(1, min(window, -(-samples * spanned // (max(1, shards) * lanes))))
        return lanes, window


def first_settings(
    streams: Sequence[StreamSizes],
    *,
    seed: int = 17,
    shuffle: Shuffle = "window",
    tail: Tail = "carry",
    lanes: int | None = None,
    window: int | None = None,
    schedule: Schedule | None = None,
    epoch_samples: int | None = None,
) -> RunSettings:
    """Return the settings of a new run over these streams. Raises ValueError for invalid arguments.

    Streams in the result have no names yet. `schedule`: the weights of a mixture. `epoch_samples`: by
    default, the kept samples of all streams.
    """
    sizes = [stream.shuffle_sizes(lanes, window) for stream in streams]
    order = OrderSpec(seed, *sizes[0], shuffle)
    found = []
    for stream, (own_lanes, own_window) in zip(streams, sizes, strict=True):
        own = OrderSpec(seed, own_lanes, own_window, shuffle)
        digest = "" if stream.excluded is None else stream.excluded.digest
        settings = StreamSettings(stream.fingerprint, stream.kept, excluded=digest)
        if (own.lanes, own.window) != (order.lanes, order.window):
            settings = replace(settings, lanes=own.lanes, window=own.window)
        found.append(settings)
    samples = epoch_samples or sum(stream.kept for stream in streams)
    return RunSettings(order, tail, tuple(found), schedule, samples)


@dataclass(frozen=True, slots=True)
class Limit:
    """The first position that cannot be delivered, because `stream` then reaches its limit, `samples`."""

    position: int
    stream: str
    samples: int

    def message(self, global_batch: int) -> str:
        step = self.position // global_batch
        return (
            f"stream {self.stream!r} is exhausted at step {step:,} (position {self.position:,}): its repeat "
            f"or choose option allows {self.samples:,} samples; set its weight to 0 before that step, or "
            "raise repeat or choose"
        )


class Arrangement:
    """The sample order of a run, made from its settings and the sizes of its streams."""

    def __init__(self, settings: RunSettings, streams: Sequence[StreamSizes]) -> None:
        self._settings, self._sizes = settings, tuple(streams)
        schedule = settings.schedule
        parts = []
        for number, stream in enumerate(streams):
            sizes, excluded = stream.shard_samples, stream.excluded
            kept = sizes if excluded is None else excluded.kept_of_shards(sizes)
            parts.append(StreamOrder(Order(kept, settings.order_of(number)), excluded, sizes))
        self.streams = tuple(parts)
        """The order of each stream's own samples."""
        self.mixture = (
            None if schedule is None else Mixture(settings.order.seed, schedule, settings.order.version)
        )
        self.order: Order | StreamOrder | MixedOrder
        """The order of all streams, by positions of the run."""
        if self.mixture is not None:
            self.order = MixedOrder(parts, self.mixture, settings.epoch_samples)
        else:
            self.order = parts[0].order if parts[0].exclusions is None else parts[0]

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self._settings.order.seed

    def positions(self, position: int) -> list[int]:
        """Return the number of samples of each stream before `position`."""
        if self.mixture is None:
            return [position]
        counts: list[int] = self.mixture.counts(position).tolist()
        return counts

    def uses(
        self, datasets: Mapping[tuple[int, ...], Sequence[int] | None], capacity: int
    ) -> tuple[Order | JoinedUses, Sequence[int] | None]:
        """Return the order in which the run needs shards, and the lanes to prefetch for (None: all lanes).

        The order is for the shards of all datasets that share a cache. `datasets` maps the stream numbers of
        each dataset to the lanes that this process reads from it (None: all). `capacity` is the cache size in
        bytes. Shards are numbered consecutively across the datasets; the time of a use is a position in the
        run.
        """
        if self.mixture is None:
            [lanes] = datasets.values()
            return self.streams[0].order, lanes
        ahead = self._foreseen(datasets, capacity)
        parts = [
            (MixedUses({stream: self.streams[stream].order for stream in who}, self.mixture, ahead), lanes)
            for who, lanes in datasets.items()
        ]
        return JoinedUses(parts), None

    def _foreseen(self, datasets: Iterable[tuple[int, ...]], capacity: int) -> int:
        """Return the number of positions to look ahead at a time, at most an epoch.

        It is small enough that no stream of a relevant size starts over more than a few times in it: all
        shards of such a stream would count as in use throughout.
        """
        ahead = self.order.samples
        streams = [stream for who in datasets for stream in who]
        segments = (
            [weights for _, weights in self._settings.schedule.segments] if self._settings.schedule else []
        )
        for stream in streams:
            share = max(weights[stream] / sum(weights) for weights in segments)
            if share and 2 * len(streams) * self._sizes[stream].raw_bytes >= capacity:
                ahead = min(ahead, max(1, int(2 * self.streams[stream].samples / share)))
        return ahead

    @cached_property
    def limit(self) -> Limit | None:
        """The first limit of a stream that the run reaches; None if it never reaches one."""
        found = []
        for number, stream in enumerate(self._sizes):
            if (most := stream.limit) is None:
                continue
            position = most if self.mixture is None else self.mixture.position_of(number, most)
            if position is not None:
                found.append(Limit(position, stream.name, most))
        return min(found, key=lambda limit: limit.position, default=None)
