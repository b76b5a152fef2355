"""`StreamingLoader`: batches of a dataset in a computed order, from any position on.

The batches depend on dataset, seed, shuffle, lanes, window, tail, position, batch size, rank and world size,
and on nothing else. The position moves when a batch is handed over, not when it is read: a state taken while
holding batch t continues with batch t + 1, whatever had been prefetched. A batch belongs to whoever received
it and is never written to again.

The path of a batch: `plan` computes which samples it holds, `gather` (or `sources`) reads their rows from the
open shards of `streams`, `batch` turns them into tensors and labels, `producer` does this for many batches
ahead of the loop, and `_deliver` hands them over, counts and logs them.

One `for` is one epoch. Leaving it early and starting another continues with the next batch of the same epoch,
as a state saved there would; leaving it after the epoch's last batch is the same as its end. With
`restart=True` each `for` starts at the first sample instead. Only one iterator is live: starting another,
loading a state or moving to another position makes the former stale.
"""

from __future__ import annotations

import operator
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self, SupportsIndex, Unpack

from shardkit.datasets.dataset import Dataset
from shardkit.errors import PeerError, warn_user
from shardkit.loaders.batch import Batch, BatchMaker
from shardkit.loaders.config import LoaderConfig, LoaderOptions, Stream, Weights
from shardkit.loaders.defaults import find_eos_id, may_be_padded, stream_sizes
from shardkit.loaders.distributed import StopTogether, find_place
from shardkit.loaders.metrics import LoaderStats, Telemetry
from shardkit.loaders.plan import Arrangement, BatchPlan, Cursor
from shardkit.loaders.producer import Group, GroupMaker, Prefetcher
from shardkit.loaders.prometheus import MetricsFile
from shardkit.loaders.sources import TokenDtype, open_source
from shardkit.loaders.state import LoaderState, OnMismatch, resume
from shardkit.loaders.streams import named_weights, open_streams
from shardkit.loaders.usage_log import UsageLog
from shardkit.order.order import MAX_POSITION, OrderSpec, Shuffle
from shardkit.order.residency import lanes_of_part
from shardkit.order.run_settings import RunSettings, Tail
from shardkit.units import parse_bytes

__all__ = ["StreamingLoader"]


class StreamingLoader:
    """Iterates over a dataset's batches: {"tokens": int64[batch_size, length], …}, one epoch per `for`.

    `dataset`: a path, an open `Dataset` or a list of `Stream`, which are mixed by weight. `batch_size`:
    sequences per rank and step. `shuffle`: "window" (in bounded runs of every lane), "global" or "none".
    `tail`: what happens at the end of an epoch: "carry" the last batch on into the next epoch, "drop" it, or
    "pad" it with flagged rows. `rank` and `world_size` default to torch.distributed's, then torchrun's, then
    0 of 1. `dtype`: of the tokens; None means as stored. `return_ids` adds `sample_id`, rows in dataset
    order, and in a mixture `stream_id`, the number of each sample's stream. Further options: `LoaderConfig`.

    Datasets of other columns give numbers and arrays of constant shape as tensors, everything else as lists.
    With tail="pad" every batch has `is_padding`; padding has the sample id -1 and the label -100.
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
        dtype: TokenDtype = "int64",
        return_ids: bool = False,
        **options: Unpack[LoaderOptions],
    ) -> None:
        self.config = LoaderConfig.of(options)
        place = self._place = find_place(rank, world_size)
        self._prefetch_bytes = parse_bytes(self.config.prefetch_bytes)
        self._running: Prefetcher | None = None
        self._iteration: object = None
        self._stop_together = StopTogether(
            self, on_peer_error=StreamingLoader._interrupt, grace_seconds=self.config.stop_grace_seconds
        )
        self._watch_peers()
        self._opened = open_streams(dataset, self.config, place.local_world_size)
        streams, samples = self._opened.streams, self._opened.epoch_samples(self.config)
        self._plan = BatchPlan(samples, batch_size, place.rank, place.world_size, tail)
        self._source = open_source(
            streams, self.config.columns, dtype, mixed_lengths=self.config.mixed_lengths
        )
        lanes, window = stream_sizes(streams, self._plan, self.config, place.nodes, self._source.stored_bytes)
        self._cursor = (0, 0)
        self._arrange(self._opened.settings(self.config, OrderSpec(seed, lanes, window, shuffle), tail))
        self._maker = BatchMaker(
            batch_size=batch_size,
            config=self.config,
            columns=self._source.columns,
            token_key=self._source.token_key,
            eos_id=find_eos_id(streams.once, self.config, self._source.token_key),
            may_be_padded=may_be_padded(streams.once, self.config),
            return_ids=return_ids,
            mark_padding=tail == "pad",
            split_ids=streams.split_ids if len(streams) > 1 else None,
        )
        self._telemetry = Telemetry(batch_size, shards=streams.remote)
        self._metrics: MetricsFile | None = None
        if (file := self.config.metrics_file) is not None:
            self._metrics = MetricsFile(file, self._telemetry, labels={"rank": place.rank})
        self.usage: UsageLog | None = None
        if (folder := self.config.usage_log) is not None:
            self.usage = UsageLog(folder, streams, place.rank, place.world_size, batch_size)
            self.usage.begin(self._settings, 0)

    def __iter__(self) -> Iterator[Batch]:
        if (workers := _dataloader_workers()) > 1:
            raise RuntimeError(
                f"a StreamingLoader in {workers} DataLoader workers would deliver every batch "
                f"{workers} times: iterate over it directly (it prefetches by itself), or give "
                "the DataLoader a shardkit.loaders.pytorch.StreamingDataset"
            )
        if (start := self.start_of(self._cursor)) != self._cursor:
            self._move(start)
        return self.iterate()

    def iterate(self, *, first: int = 0, every: int = 1) -> Iterator[Batch]:
        """Iterate as a `for` does, or over only batch `first` and each `every`-th after it.

        With `every` above 1 the loader does not know what else is delivered, so its state is meaningless.
        """
        self._stop()
        self._watch_peers()  # the process group may have been made since
        self._announce_limit()
        self._iteration = object()
        return self._deliver(self._start(first, every), self._iteration)

    def _announce_limit(self) -> None:
        """Warn if a stream's limit will end this run."""
        limit = self._arrangement.limit
        epoch_end = (self.epoch + 1) * self._plan.samples
        if limit is not None and (self.config.endless or limit.position < epoch_end):
            warn_user(limit.message(self._plan.global_batch))

    def _start(self, first: int = 0, every: int = 1) -> Prefetcher:
        """Begin to produce batches from the next one on, and to fetch their shards."""
        config = self.config
        maker = GroupMaker(
            self._arrangement,
            self._plan,
            self._source,
            self._maker,
            most_bytes=self._prefetch_bytes,
        )
        self._fetch_ahead()
        cursor = (self.position, self._plan.delivered(self._cursor))
        self._running = Prefetcher(
            maker.groups(cursor, endless=config.endless, first=first, every=every),
            maker.describe,
            most_batches=config.prefetch_batches,
            most_bytes=self._prefetch_bytes,
            timeout_seconds=config.timeout_seconds,
        )
        return self._running

    def _fetch_ahead(self) -> None:
        """Start the cache readers of remote datasets: they fetch shards in the order that this run needs."""
        streams = self._opened.streams
        if not (remote := streams.remote):
            return
        positions, shares = self._arrangement.positions(self.position), self._arrangement.shares()
        for dataset, reader, who in zip(
            streams.once.datasets, streams.once.readers, streams.sharing, strict=True
        ):
            if reader is not None and dataset.shards is not None:
                is_shared = dataset.shards.cache.is_shared
                reader.start(
                    self._arrangement.uses(who),
                    positions[who[0]] if len(who) == 1 else self.position,
                    self._lanes_of_node(is_shared),
                    share=sum(shares[stream] for stream in who) if is_shared else 1.0,
                    siblings=[shards for shards in remote if shards is not dataset.shards],
                )

    def _lanes_of_node(self, is_shared: bool) -> range:
        """The lanes that this process, or all processes that share its cache, may read."""
        place, batch = self._place, self._plan.global_batch
        count = place.local_world_size if is_shared else 1
        first = place.rank // count * count
        part = batch // place.world_size
        return lanes_of_part(batch, self._settings.order.lanes, slice(first * part, (first + count) * part))

    def _deliver(self, running: Prefetcher, iteration: object) -> Iterator[Batch]:
        try:
            self._check_live(iteration)
            while (group := self._next_group(running)) is not None:
                for number, (batch, cursor) in enumerate(zip(group.batches, group.cursors, strict=True)):
                    self._stop_together.check()
                    if number:
                        self._telemetry.more()
                    if self.usage is not None:
                        self.usage.step(self._plan.start(self.position), group.ids[number], cursor[0])
                    self._cursor = cursor
                    yield batch
                    if (current := self._check_live(iteration)) is not running:
                        running = current  # set_weights has changed what follows
                        break
        except Exception as error:
            self._stop_together.report(error, self.position // self._plan.global_batch)
            raise
        finally:
            running.close()

    def _check_live(self, iteration: object) -> Prefetcher:
        """What produces the batches of an iteration; RuntimeError if another one has begun since."""
        if self._iteration is not iteration or self._running is None:
            raise RuntimeError(
                "stale iterator: the loader was closed, re-iterated, moved to another position, or had a "
                "state loaded"
            )
        return self._running

    def _next_group(self, running: Prefetcher) -> Group | None:
        began = time.perf_counter()
        group = running.get()
        if group is not None:
            self._telemetry.step(time.perf_counter() - began, running.ready_batches)
            if self._metrics is not None:
                self._metrics.step()
        return group

    def _stop(self) -> None:
        self._iteration = None
        if self._running is not None:
            self._running.close()
            self._running = None

    def state_dict(self) -> dict[str, object]:
        """Where the loop is, as plain data, the same on every rank; `load_state_dict` continues there."""
        return self.state_at(self._cursor)

    def state_at(self, cursor: Cursor) -> dict[str, object]:
        """The state at another cursor of this run."""
        return LoaderState(*cursor, self._settings).to_dict()

    def load_state_dict(self, state: Mapping[str, object], *, on_mismatch: OnMismatch = "error") -> None:
        """Continue where `state` was taken; batch size and world size may differ from that run's.

        StateError lists what else differs. "fork" continues from the position anyway, with this loader's
        own dataset and settings: a new order, on purpose.
        """
        names = ("lanes", "window", "schedule", "epoch_samples")
        fixed = frozenset(name for name in names if getattr(self.config, name) is not None)
        resumed = resume(LoaderState.from_dict(state), self._settings, fixed=fixed, on_mismatch=on_mismatch)
        if resumed.settings != self._settings:
            self._arrange(resumed.settings)
        self._move(self.start_of((resumed.position, resumed.epoch_batches)))

    def seek(self, consumed_samples: SupportsIndex) -> None:
        """Continue at this position, as the run that has come there: with the samples that it would deliver.

        Positions count samples over all ranks and epochs, as Megatron's `consumed_train_samples` does.
        ValueError for a loader that starts every `for` at the first sample.
        """
        position = operator.index(consumed_samples)
        if not 0 <= position < MAX_POSITION:
            raise ValueError(f"a position is a whole number from 0 to 2**62, not {position:,}")
        if self.config.restart:
            raise ValueError("restart=True starts every for at the first sample: leave it out to seek")
        self._move(self._plan.cursor_at(position))

    def set_epoch(self, epoch: int) -> None:
        """Continue with the first batch of `epoch`; does nothing if the next batch is of that epoch.

        For training loops that call this before each epoch. With tail="carry" that is the first batch that
        starts in the epoch, in a run from position 0 on. With `restart`, all epochs are the same.
        """
        if epoch < 0:
            raise ValueError(f"an epoch is a whole number of at least 0, not {epoch}")
        if epoch != self.epoch and not self.config.restart:
            self.seek(self._plan.first_batch(operator.index(epoch)))

    def start_of(self, cursor: Cursor) -> Cursor:
        """Where a `for` starts that is begun at a cursor of this run."""
        return (0, 0) if self.config.restart else cursor

    def _move(self, cursor: Cursor) -> None:
        """Let the next batch be the one at `cursor`."""
        self._stop()
        self._cursor = cursor
        if self.usage is not None:
            self.usage.begin(self._settings, self.position)

    def set_weights(self, weights: Weights, *, at_position: int) -> None:
        """Mix with `weights` from `at_position` on, which must not have been delivered yet.

        Positions count samples over all ranks: step times global batch. The change becomes part of the state.
        All ranks must make it while they hold the same batch; a running `for` continues.
        """
        mixture = self._settings.mixture
        if mixture is None:
            raise ValueError("this loader has only one stream: there are no weights to set")
        if at_position < self.position:
            raise ValueError(
                f"position {at_position:,} has been delivered: weights can change from {self.position:,} on"
            )
        changed = mixture.schedule.changed(at_position, named_weights(self._opened.streams.names, weights))
        self._arrange(replace(self._settings, mixture=replace(mixture, schedule=changed)))
        running, iteration = self._running, self._iteration
        self._stop()
        if self.usage is not None:
            self.usage.begin(self._settings, self.position)
        if running is not None:
            self._iteration = iteration
            self._start()

    def _arrange(self, settings: RunSettings) -> None:
        """Adopt the order that a run's settings define; if it is refused, nothing changes."""
        opened = self._opened
        self._arrangement = Arrangement(opened.streams, settings, opened.exclusions, opened.limits)
        self._plan = replace(self._plan, samples=settings.epoch_samples)
        self._settings = settings

    def close(self) -> None:
        """Stop prefetching and close the shards; batches already handed out stay valid."""
        self._stop()
        if self._metrics is not None:
            self._metrics.write()
        if self.usage is not None:
            self.usage.close()
        self._stop_together.close()
        self._opened.streams.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, SystemExit):
            self._stop_together.report(error, self.position // self._plan.global_batch)
        self.close()

    def _interrupt(self, error: PeerError) -> None:
        """Another rank has failed: end every wait for a batch or shard now. Called from any thread."""
        if (running := self._running) is not None:
            running.fail(error)
        for shards in self._opened.streams.remote:
            shards.close()

    def _watch_peers(self) -> None:
        """Listen for errors of other ranks; DataLoader workers leave that to the process that made them."""
        if not _dataloader_workers():
            self._stop_together.watch(self._place.rank, self._place.world_size)

    def __len__(self) -> int:
        """Batches of the next batch's epoch, including those already delivered; equal on all ranks."""
        return self.epoch_batches(self.start_of(self._cursor))

    def epoch_batches(self, cursor: Cursor) -> int:
        """`len` at another cursor of this run."""
        if self.config.endless:
            raise TypeError("an endless loader has no length")
        return self._plan.delivered(cursor) + self._plan.batches_left(cursor[0])

    @property
    def dataset(self) -> Dataset:
        """The dataset, open; the first one of a mixture."""
        return self.datasets[0]

    @property
    def datasets(self) -> tuple[Dataset, ...]:
        """The datasets of all streams, open."""
        return self._opened.streams.datasets

    @property
    def streams(self) -> list[Stream]:
        """The streams as given, with their datasets open: usable as another loader's first argument."""
        return [replace(s, path=d) for s, d in zip(self._opened.specs, self.datasets, strict=True)]

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
    def cursor(self) -> Cursor:
        """(`position`, batches delivered in the epoch): the moving part of a state."""
        return self._cursor

    @property
    def plan(self) -> BatchPlan:
        """How epochs are cut into batches."""
        return self._plan

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._plan.epoch(self.position)

    def stream_samples(self) -> dict[str, int]:
        """Samples that each stream has delivered so far, over all ranks and its epochs."""
        counts = self._arrangement.positions(self.position)
        return dict(zip(self._opened.streams.names, counts, strict=True))

    def exhausted_at(self) -> int | None:
        """The first position that the streams' limits do not allow; None if there is none."""
        limit = self._arrangement.limit
        return None if limit is None else limit.position

    def stats(self) -> LoaderStats:
        """What this rank has waited for since its first batch, what cache and store did, and a verdict."""
        return self._telemetry.stats()

    def __repr__(self) -> str:
        plan, order = self._plan, self._settings.order
        data = [dataset.location for dataset in self._opened.streams.once.datasets]
        return (
            f"StreamingLoader({data[0] if len(data) == 1 else data!r}, batch_size={plan.batch_size}, "
            f"seed={order.seed}, shuffle={order.shuffle!r}, tail={plan.tail!r}, rank={plan.rank}, "
            f"world_size={plan.world_size}, "
            f"lanes={order.lanes}, window={order.window}, position={self.position})"
        )


def _dataloader_workers() -> int:
    """How many workers the torch DataLoader has of which this process is one; 0 outside of workers."""
    data = sys.modules.get("torch.utils.data")
    worker = None if data is None else data.get_worker_info()
    return 0 if worker is None else int(worker.num_workers)
