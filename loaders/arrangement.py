"""Which sample is at which position of a loader: the order of one dataset, or of several by a mixture.

Positions count samples over all ranks and streams. A stream has positions of its own, which count its samples
over all its epochs: fetching ahead and limits are reckoned in those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardkit.exclusions import Exclusions
from shardkit.loaders.state import LoaderState
from shardkit.loaders.streams import Streams
from shardkit.mixed_order import MixedOrder, StreamOrder, stream_seed
from shardkit.mixed_uses import MixedUses
from shardkit.mixture import Mixture
from shardkit.order import Order

__all__ = ["Arrangement", "Limit"]


@dataclass(frozen=True, slots=True)
class Limit:
    """The first position that cannot be delivered, and whose limit it is."""

    position: int
    stream: str
    samples: int

    def message(self, global_batch: int) -> str:
        step = self.position // global_batch
        return (
            f"stream {self.stream!r} is exhausted at step {step:,} (position {self.position:,}): its repeat "
            f"or choose allows {self.samples:,} samples; let a schedule give it weight 0 by then, or allow "
            f"more"
        )


class Arrangement:
    """The order that a state's constants make of streams."""

    def __init__(
        self,
        streams: Streams,
        state: LoaderState,
        exclusions: Sequence[Exclusions | None],
        limits: Sequence[int | None],
    ) -> None:
        """`exclusions`, `limits`: of each stream; a limit is the most samples that it may deliver in all."""
        self._names = streams.names
        self._limits = tuple(limits)
        mixed = state.mixture
        self.stream_orders: list[Order] = []
        parts = []
        for number, (dataset, excluded) in enumerate(zip(streams.datasets, exclusions, strict=True)):
            sizes = dataset.manifest.shard_samples
            seed = state.order.seed if mixed is None else stream_seed(state.order.seed, number)
            kept = sizes if excluded is None else excluded.kept_of_shards(sizes)
            order = Order(kept, replace(state.order, seed=seed))
            self.stream_orders.append(order)
            parts.append(StreamOrder(order, excluded, sizes))
        self._mixture = None if mixed is None else Mixture(state.order.seed, mixed.schedule)
        self.order: Order | StreamOrder | MixedOrder
        if mixed is None or self._mixture is None:
            self.order = self.stream_orders[0] if exclusions[0] is None else parts[0]
        else:
            self.order = MixedOrder(parts, self._mixture, mixed.epoch_samples)

    def positions(self, position: int) -> list[int]:
        """Samples of each stream before `position`."""
        if self._mixture is None:
            return [position]
        counts: list[int] = self._mixture.counts(position).tolist()
        return counts

    def uses(self, streams: Sequence[int]) -> Order | MixedUses:
        """When the shards of a dataset are needed that these streams draw on, and nobody else.

        Of one stream by its own positions, of several by the mixture's.
        """
        if len(streams) == 1 or self._mixture is None:
            return self.stream_orders[streams[0]]
        return MixedUses(
            {stream: self.stream_orders[stream] for stream in streams}, self._mixture, self.order.samples
        )

    @cached_property
    def limit(self) -> Limit | None:
        """Where the run ends because a stream may not deliver more; None: nowhere."""
        found = []
        for stream, most in enumerate(self._limits):
            if most is None:
                continue
            position = most if self._mixture is None else self._mixture.position_of(stream, most)
            if position is not None:
                found.append(Limit(position, self._names[stream], most))
        return min(found, key=lambda limit: limit.position, default=None)
