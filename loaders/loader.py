"""`StreamingLoader`: batches of a dataset, in an order that is arithmetic, from any position on.

What the loop is given depends on dataset, seed, shuffle, lanes, window, tail, position, batch size, rank and
world size, and on nothing else. The position moves when a batch is handed over, not when it is read: a state
taken while holding batch t continues with batch t + 1, whatever had been prefetched. A batch belongs to
whoever received it and is never written to again.

One `for` is one epoch. Leaving it early and starting another goes on with the next batch of the same epoch,
as a state saved there would; leaving it after the epoch's last batch is the same as its end. At any time one
iterator is live: starting another, or loading a state, ends the former.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self, Unpack

import torch

from shardkit.dataset import Dataset
from shardkit.loaders.batch import Batch, BatchMaker
from shardkit.loaders.config import LoaderConfig, LoaderOptions, Stream, TokenDtype
from shardkit.loaders.distributed import find_place
from shardkit.loaders.groups import Group, GroupMaker
from shardkit.loaders.plan import BatchPlan
from shardkit.loaders.prefetch import Limits, Prefetcher
from shardkit.loaders.prometheus import MetricsFile
from shardkit.loaders.setup import find_eos_id, open_streams, shuffle_sizes, telemetry_sources
from shardkit.loaders.sources import open_source
from shardkit.loaders.state import LoaderState, OnMismatch, StreamState, Tail, resume
from shardkit.loaders.stats import LoaderStats
from shardkit.loaders.stop_together import PeerError, StopTogether
from shardkit.loaders.telemetry import Telemetry
from shardkit.order import Order, OrderSpec, Shuffle
from shardkit.units import parse_bytes
from shardkit.uses import lanes_of_part

__all__ = ["StreamingLoader"]


class StreamingLoader:
    """Iterates over a dataset's batches: {"tokens": int64[batch_size, length], …}, one epoch per `for`.

    `dataset`: a path, an open `Dataset` or a list of one `Stream`. `batch_size`: sequences per rank and step.
    `shuffle`: "window" (in bounded runs of every lane), "global" or "none". `tail`: what happens at an
    epoch's edge: "carry" the batch on into the next epoch, "drop" it, or "pad" it with flagged rows. `rank`
    and `world_size` default to torch.distributed's, then torchrun's, then 0 of 1. `dtype`: of the tokens;
    None means as stored. `return_ids` adds `sample_id`, row numbers in dataset order. Further options:
    see `LoaderConfig`.

    Datasets of other columns give numbers and arrays of constant shape as tensors and all else as lists.
    With tail="pad" every batch has `is_padding`; padding has the sample id -1, the label -100.
    """

    def __init__(
        self,
        dataset: str | os.PathLike[str] | Dataset | Sequence[Stream],
        *,
        batch_size: int,
        seed: int = 17,
        shuffle: Shuffle = "window",
        tail: Tail = "carry",
        rank: int | None = None,
        world_size: int | None = None,
        dtype: TokenDtype = torch.int64,
        return_ids: bool = False,
        **options: Unpack[LoaderOptions],
    ) -> None:
        self.config = LoaderConfig.of(options)
        place = self._place = find_place(rank, world_size)
        self._running: Prefetcher[Group] | None = None
        self._stop_together = StopTogether(grace_seconds=self.config.stop_grace_seconds)
        self._stop_together.on_peer_error(self._interrupt)
        self._stop_together.watch(place.rank, place.world_size)
        self.dataset = open_streams(dataset, self.config, place.local_world_size)
        self._plan = BatchPlan(len(self.dataset), batch_size, place.rank, place.world_size, tail)
        self._source = open_source(self.dataset, self.config.columns, dtype)
        lanes, window = shuffle_sizes(
            self.dataset, self._plan, self.config, place.nodes, self._source.stored_bytes
        )
        self._state = LoaderState(
            position=0,
            epoch_batches=0,
            order=OrderSpec(seed, lanes, window, shuffle),
            tail=tail,
            streams=(StreamState(self.dataset.fingerprint, len(self.dataset)),),
        )
        self._order = Order(self.dataset.manifest.shard_samples, self._state.order)
        self._cursor = (0, 0)
        self._maker = BatchMaker(
            batch_size=batch_size,
            config=self.config,
            token_key=self._source.token_key,
            eos_id=find_eos_id(self.dataset, self.config, self._source.token_key),
            return_ids=return_ids,
            mark_padding=tail == "pad",
        )
        self._telemetry = Telemetry(batch_size, sources=telemetry_sources(self.dataset))
        self._metrics: MetricsFile | None = None
        if (file := self.config.metrics_file) is not None:
            self._metrics = MetricsFile(file, self._telemetry, labels={"rank": place.rank})

    @property
    def rank(self) -> int:
        return self._plan.rank

    @property
    def world_size(self) -> int:
        return self._plan.world_size

    @property
    def batch_size(self) -> int:
        """Sequences per rank and step."""
        return self._plan.batch_size

    @property
    def position(self) -> int:
        """Samples delivered so far, over all ranks and epochs."""
        return self._cursor[0]

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._plan.epoch(self.position)

    def __len__(self) -> int:
        """Batches of the epoch of the next batch, those already delivered included; equal on all ranks."""
        if self.config.endless:
            raise TypeError("an endless loader has no length")
        return self._delivered() + self._plan.batches_left(self.position)

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise RuntimeError(
                f"a StreamingLoader in {worker.num_workers} DataLoader workers would deliver every batch "
                f"{worker.num_workers} times: iterate over it directly (it prefetches by itself)"
            )
        self._stop()
        self._stop_together.watch(self.rank, self.world_size)  # the process group may have come since
        config = self.config
        maker = GroupMaker(
            self._order,
            self._plan,
            self._source,
            self._maker,
            shard_names=[info.stored.basename for info in self.dataset.manifest.shards],
        )
        if self.dataset.shards is not None:
            self.dataset.shards.timeout_seconds = config.timeout_seconds
            self._source.source.restart(self._follow)
        limits = Limits(config.prefetch_batches, parse_bytes(config.prefetch_bytes), config.timeout_seconds)
        cursor = (self.position, self._delivered())
        self._running = Prefetcher(maker.groups(cursor, endless=config.endless), limits, maker.describe)
        return self._deliver(self._running)

    def _deliver(self, running: Prefetcher[Group]) -> Iterator[Batch]:
        try:
            while (group := self._next_group(running)) is not None:
                for number, (batch, cursor) in enumerate(zip(group.batches, group.cursors, strict=True)):
                    self._stop_together.check()
                    if number:
                        self._telemetry.more()
                    self._cursor = cursor
                    yield batch
                    if self._running is not running:
                        raise RuntimeError(
                            "this iterator has ended: its loader was closed, iterated anew or given a state"
                        )
        except Exception as error:
            self._stop_together.report(error, self.position // self._plan.global_batch)
            raise
        finally:
            running.close()

    def _next_group(self, running: Prefetcher[Group]) -> Group | None:
        began = time.perf_counter()
        group = running.get()
        if group is not None:
            self._telemetry.step(time.perf_counter() - began, running.ready_batches)
            if self._metrics is not None:
                self._metrics.step()
        return group

    def stats(self) -> LoaderStats:
        """What this rank waited for since its first batch, what cache and store did, and a verdict."""
        return self._telemetry.stats()

    def state_dict(self) -> dict[str, object]:
        """Where the loop is, as plain data, the same on every rank; `load_state_dict` continues there."""
        position, epoch_batches = self._cursor
        state = self._state
        return LoaderState(position, epoch_batches, state.order, state.tail, state.streams).to_dict()

    def load_state_dict(self, state: Mapping[str, object], *, on_mismatch: OnMismatch = "error") -> None:
        """Continue where `state` was taken; batch size and world size may differ from that run's.

        StateError lists what else differs. "fork" goes on from the position all the same, with this loader's
        own dataset and settings: a new order, on purpose.
        """
        names = ("lanes", "window")
        fixed = frozenset(name for name in names if getattr(self.config, name) is not None)
        resumed = resume(LoaderState.from_dict(state), self._state, fixed=fixed, on_mismatch=on_mismatch)
        self._stop()
        if resumed.order != self._order.spec:
            self._order = Order(self.dataset.manifest.shard_samples, resumed.order)
        self._state = resumed
        self._cursor = (resumed.position, resumed.epoch_batches)

    def close(self) -> None:
        """End prefetching and forget the open shards; batches already handed out stay valid."""
        self._stop()
        if self._metrics is not None:
            self._metrics.close()
        self._stop_together.close()
        self.dataset.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, SystemExit):
            self._stop_together.report(error, self.position // self._plan.global_batch)
        self.close()

    def __repr__(self) -> str:
        plan, order = self._plan, self._order.spec
        return (
            f"StreamingLoader({self.dataset.location!r}, batch_size={plan.batch_size}, seed={order.seed}, "
            f"shuffle={order.shuffle!r}, tail={plan.tail!r}, rank={plan.rank}, world_size={plan.world_size}, "
            f"lanes={order.lanes}, window={order.window}, position={self.position})"
        )

    def _interrupt(self, error: PeerError) -> None:
        """A peer has failed: whoever waits for a batch here hears of it at once. From any thread."""
        if (running := self._running) is not None:
            running.fail(error)
        if self.dataset.shards is not None:
            self.dataset.shards.close()

    def _delivered(self) -> int:
        """Batches delivered in the epoch of the next batch."""
        position, delivered = self._cursor
        return delivered if self._plan.start(position) == position else 0

    def _follow(self) -> None:
        """Let a remote dataset's shards be fetched ahead of this run."""
        shards = self.dataset.shards
        assert shards is not None
        shards.follow(self._order, self.position, self._lanes_of_node(shards.cache.is_shared))

    def _lanes_of_node(self, is_shared: bool) -> range:
        """Lanes that this process, or all that share its cache, may read."""
        place, batch = self._place, self._plan.global_batch
        first, count = (place.rank, 1)
        if is_shared:
            first, count = (
                place.rank // place.local_world_size * place.local_world_size,
                place.local_world_size,
            )
        part = batch // place.world_size
        return lanes_of_part(batch, self._order.spec.lanes, slice(first * part, (first + count) * part))

    def _stop(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None
