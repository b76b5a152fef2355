"""`StreamingLoader`: batches of a dataset in a computed order, from any position on.

The batches depend on dataset, seed, shuffle, lanes, window, tail, position, batch size, rank and world size,
and on nothing else. The position moves when a batch is handed over, not when it is read: a state taken while
holding batch t continues with batch t + 1, whatever had been prefetched. A batch belongs to whoever received
it and is never written to again.

The path of a batch: `order.batches` computes which samples it holds, `gather` (or `sources`) reads their rows
from the open shards of `streams`, `batch` turns them into tensors and labels, `producer` does this for many
batches ahead of the loop, and `_deliver` hands them over, counts and logs them.

One `for` is one epoch. Leaving it early and starting another continues with the next batch of the same epoch,
as a state saved there would; leaving it after the epoch's last batch is the same as its end. With
`restart=True` each `for` starts at the first sample instead. Only one iterator is live: starting another,
loading a state or moving to another position makes the former stale.
"""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Never, Self, SupportsIndex, Unpack

from shardkit.cache.fetcher import Fetcher
from shardkit.cache.planner import Pace
from shardkit.cache.protocol import Cache
from shardkit.cache.run import PlanRequest
from shardkit.cache.shards import CachedShards
from shardkit.datasets.dataset import Dataset
from shardkit.errors import PeerError, warn_user
from shardkit.loaders.agreement import RankAgreement
from shardkit.loaders.batch import Batch, BatchMaker, TokenColumn
from shardkit.loaders.config import LoaderConfig, LoaderOptions, Stream, TokenDtype, Weights
from shardkit.loaders.defaults import find_eos_id, may_be_padded, open_work_balance, warn_of_small_cache
from shardkit.loaders.gather import OutputMemory
from shardkit.loaders.metrics import LoaderStats, Telemetry
from shardkit.loaders.peers import StopTogether
from shardkit.loaders.placement import (
    check_place,
    dataloader_workers,
    find_place,
    local_processes,
    ranks_of_machine,
    replicas_on_machine,
)
from shardkit.loaders.producer import WHOLE, Group, GroupMaker, Portion, Prefetcher
from shardkit.loaders.sources import open_source
from shardkit.loaders.streams import named_weights, open_streams
from shardkit.loaders.usage_log import open_usage_log
from shardkit.order.arrangement import Arrangement
from shardkit.order.batches import BatchPlan, Cursor, StepSizes
from shardkit.order.order import MAX_POSITION, Shuffle
from shardkit.order.residency import lanes_of_ranks
from shardkit.order.run_settings import RunSettings, Tail
from shardkit.order.state import LoaderState, OnMismatch, resume
from shardkit.units import parse_bytes


class StreamingLoader:
    """Iterates over a dataset's batches: {"tokens": int64[batch_size, length], …}, one epoch per `for`.

    `dataset`: a path, an open `Dataset` or a list of `Stream`, which are mixed by weight. `batch_size`:
    sequences per rank and step. `shuffle`: "window" (in bounded runs of every lane), "global" or "none".
    `tail`: what happens at the end of an epoch: "carry" the last batch on into the next epoch, "drop" it, or
    "pad" it with flagged rows. `rank` and `world_size` are data-parallel; they default to those of `mesh` or
    `group`, then torch.distributed's, then torchrun's, then 0 of 1 (`shardkit.loaders.placement`). `dtype`:
    of the tokens; None means as stored. `return_ids` adds `sample_id`, rows in dataset order, and in a
    mixture `stream_id`, the number of each sample's stream. Further options: `LoaderConfig`; those of its
    groups are given together, as `layout=Layout(…)`, `order=Order(…)` and `run=Run(…)`.

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
        self._place = find_place(rank, world_size, mesh=self.config.mesh, group=self.config.group)
        self.machine_ranks: tuple[int, ...] | None = None
        """The data-parallel ranks that share this machine; None until they are asked for."""
        self._prefetch_bytes = parse_bytes(self.config.prefetch_bytes)
        self._running: Prefetcher | None = None
        self._iteration: object = None
        self._stop_together = StopTogether(
            self, on_peer_error=StreamingLoader._interrupt, grace_seconds=self.config.stop_grace_seconds
        )
        self._watch_peers()
        self._opened = open_streams(dataset, self.config, local_processes(self._place), place=self._place)
        streams, samples = self._opened.streams, self._opened.epoch_samples(self.config)
        self._plan = BatchPlan(samples, batch_size, self._place.rank, self._place.world_size, tail)
        self.output = OutputMemory()
        """Where rows are written."""
        self._source = open_source(
            streams,
            self.config.columns,
            dtype,
            self.output,
            mixed_lengths=self.config.mixed_lengths,
            keep_stored=self.config.reads_tokens,
        )
        self._cursor = (0, 0)
        timeout_seconds = self.config.timeout_seconds
        self._agreement = RankAgreement(self._place, self._stop_together, timeout_seconds=timeout_seconds)
        self._balance = open_work_balance(
            streams, self.config, self.world_size, processes=local_processes(self._place)
        )
        self._step_sizes: StepSizes | None = None
        if (sizes := self.config.global_batch) is not None:
            if tail != "carry":
                raise ValueError(f"global_batch needs tail='carry', not {tail!r}: steps run on across epochs")
            self._adopt_step_sizes(StepSizes.of(sizes))
        self._arrange(self._opened.settings(self.config, seed=seed, shuffle=shuffle, tail=tail))
        self._warn_of_small_caches(is_starting=False)
        self._maker = self._batch_maker(return_ids=return_ids, mark_padding=tail == "pad")
        self._telemetry = Telemetry(self.batch_size, shards=streams.remote)
        self.usage = open_usage_log(self.config.usage_log, streams, self._place, batch_size=self.batch_size)
        if self.usage is not None:
            self.usage.begin(self._settings, 0)

    def _batch_maker(self, *, return_ids: bool, mark_padding: bool) -> BatchMaker:
        streams, key = self._opened.streams, self._source.token_key
        column = TokenColumn(
            key,
            find_eos_id(streams.once, self.config, key),
            self._source.token_dtype,
            may_be_padded(streams.once, self.config),
            self._opened.token_mask,
            self._source.may_overflow,
        )
        return BatchMaker(
            batch_size=self.batch_size,
            config=self.config,
            columns=self._source.columns,
            tokens=column,
            output=self.output,
            return_ids=return_ids,
            mark_padding=mark_padding,
            split_ids=streams.split_ids if len(streams) > 1 else None,
        )

    def __iter__(self) -> Iterator[Batch]:
        if (workers := dataloader_workers()) > 1:
            raise RuntimeError(
                f"a StreamingLoader in {workers} DataLoader workers would deliver every batch "
                f"{workers} times: iterate over it directly (it prefetches by itself), or give "
                "the DataLoader a shardkit.loaders.pytorch.StreamingDataset"
            )
        if (start := self.start_of(self._cursor)) != self._cursor:
            self._move(start)
        return self.iterate()

    def __getitem__(self, index: object) -> Never:
        raise TypeError(
            "a StreamingLoader is not indexed: it makes whole batches, in an order of its own. Iterate over "
            "it directly instead of giving it to a DataLoader (it prefetches by itself), or give the "
            "DataLoader a shardkit.loaders.pytorch.StreamingDataset and batch_size=None"
        )

    def __reduce__(self) -> Never:
        raise TypeError(
            "a StreamingLoader has threads and open shards and is neither pickled nor copied: make another "
            "with the same arguments and load this one's state_dict(); DataLoader workers take a "
            "shardkit.loaders.pytorch.StreamingDataset"
        )

    def iterate(self) -> Iterator[Batch]:
        """Iterate as a `for` does, but from the cursor on whatever `restart` says."""
        running = self._begin()
        return self._deliver(running, self._iteration)

    def groups(self, portion: Portion) -> Iterator[Group]:
        """Iterate over a DataLoader worker's share; the state is meaningless, as others deliver the rest."""
        running = self._begin(portion)
        while (group := running.get()) is not None:
            self._cursor = group.cursors[-1]
            self._opened.streams.run.at(given=self.position)
            yield group

    def _begin(self, portion: Portion = WHOLE) -> Prefetcher:
        self._stop()
        check_place(self._place)  # the process group may have been made since
        self._watch_peers()
        self._agree(self._cursor)
        self._announce_limit()
        self._iteration = object()
        return self._start(portion)

    def steps(self) -> Iterator[list[Batch]]:
        """Iterate over optimizer steps without end: each is the list of this rank's batches of the step.

        A step has the `global_batch` sequences of its position over all ranks, so their number in the list
        may change from step to step. The samples of a step are the same for any batch size and number of
        ranks. Behind a state that was taken inside of a step, the first list is the rest of it. The state
        while holding a step names the next one. Needs `global_batch` and `endless=True`.
        """
        if self._step_sizes is None:
            raise ValueError(
                "steps() needs order=Order(global_batch=…): the sequences of all ranks in a step"
            )
        if not self.config.endless:
            raise ValueError("steps() needs endless=True: the end of an epoch may lie inside of a step")
        self._check_steps(self._step_sizes)
        batches = iter(self)
        return self._deliver_steps(batches, self._iteration)

    def _deliver_steps(self, batches: Iterator[Batch], iteration: object) -> Iterator[list[Batch]]:
        while True:
            self._check_live(iteration)
            assert self._step_sizes is not None
            begin = self._cursor
            _, end = self._step_sizes.step_at(self.position)
            step: list[Batch] = []
            try:
                for _ in range((end - self.position) // self._plan.global_batch):
                    step.append(next(batches))
            except BaseException:
                if self._cursor != begin:  # what has come of the step was not handed over
                    self._move(begin)
                raise
            yield step

    def _check_steps(self, sizes: StepSizes) -> None:
        """ValueError if a step from the position on does not consist of whole batches."""
        batch = self._plan.global_batch
        if uneven := [size for size in sizes.sizes_from(self.position) if size % batch]:
            raise ValueError(
                f"a step of {uneven[0]:,} sequences does not divide into batches of batch_size * world_size "
                f"= {batch:,}: choose another batch_size"
            )

    def _announce_limit(self) -> None:
        """Warn if a stream's limit will end this run."""
        limit = self._arrangement.limit
        epoch_end = (self.epoch + 1) * self._plan.samples
        if limit is not None and (self.config.endless or limit.position < epoch_end):
            warn_user(limit.message(self._plan.global_batch))

    def _start(self, portion: Portion = WHOLE) -> Prefetcher:
        """Begin to produce batches from the next one on, and to fetch their shards."""
        config = self.config
        maker = GroupMaker(
            self._opened.streams,
            self._arrangement,
            self._plan,
            self._source,
            self._maker,
            most_bytes=self._prefetch_bytes,
            balance=self._balance,
            makes_batches=portion.makes_batches,
        )
        self._fetch_ahead()
        cursor = (self.position, self._plan.delivered(self._cursor))
        self._running = Prefetcher(
            maker.groups(cursor, endless=config.endless, first=portion.first, every=portion.every),
            maker.describe,
            most_batches=config.prefetch_batches if portion.reads_ahead else 0,
            most_bytes=self._prefetch_bytes,
            timeout_seconds=config.timeout_seconds,
        )
        return self._running

    def _fetch_ahead(self) -> None:
        """Start the cache readers of remote datasets: they fetch shards in the order that this run needs."""
        streams = self._opened.streams
        if not streams.remote:
            return
        self._warn_of_small_caches(is_starting=True)
        by_cache: dict[tuple[Cache, Fetcher], list[tuple[CachedShards, Sequence[int]]]] = {}
        for dataset, who in zip(streams.once.datasets, streams.sharing, strict=True):
            if (shards := dataset.shards) is not None:
                by_cache.setdefault((shards.cache, shards.fetcher), []).append((shards, who))
        requests = []
        for (cache, _), parts in by_cache.items():
            lanes = {tuple(who): self._lanes_read(who, cache.is_shared) for _, who in parts}
            uses = self._arrangement.uses(lanes, cache.capacity)
            sharers = len(self.learn_machine_ranks()) if cache.is_shared else 1
            pace = Pace.of_rank(self.rank, sharers=sharers)
            requests.append(PlanRequest([shards for shards, _ in parts], *uses, pace))
        ranks = self.machine_ranks
        replicas = 1 if ranks is None else replicas_on_machine(self._place, ranks)
        others = self._balance is not None
        streams.run.start(requests, self.position, replicas=replicas, reads_other_lanes=others)

    def learn_machine_ranks(self) -> tuple[int, ...]:
        """Learn, once, which data-parallel ranks share this machine and the cache folder on it."""
        if self.machine_ranks is None:
            self.machine_ranks = ranks_of_machine(self._place)
        return self.machine_ranks

    def _agree(self, cursor: Cursor) -> None:
        """Compare all that must be equal with the other ranks, before an iteration from `cursor` on."""
        if self.config.restart and self._agreement.has_met:
            return  # every iteration starts at the first sample
        settings: dict[str, object] = {
            **self.config.shared_by_ranks(order_only=self._agreement.may_have_replicas()),
            "batch_size": self.batch_size,
            "world_size": self.world_size,
            **self.state_at(cursor),
            "repeat or choose": self._opened.limits,
            "balance": None if self._balance is None else str(self._balance),
        }
        if "eos_id" in settings:
            settings |= {"eos_id": self._maker.tokens.eos_id, "dtype": str(self._maker.tokens.dtype)}
        self._agreement.check(settings, data=[dataset.fingerprint for dataset in self.datasets])

    def prepare_workers(self, cursor: Cursor) -> None:
        """Do what workers cannot, who start at `cursor`: meet the other ranks, learn who shares a cache."""
        check_place(self._place)
        self._agree(cursor)
        remote = self._opened.streams.remote
        if any(shards.cache.is_shared for shards in remote):
            self.learn_machine_ranks()

    def _warn_of_small_caches(self, *, is_starting: bool) -> None:
        """When the loader is made; where ranks share a cache, when it starts and knows which ranks do."""
        streams = self._opened.streams
        for dataset, who in zip(streams.once.datasets, streams.sharing, strict=True):
            if dataset.shards is not None and is_starting == (
                dataset.shards.cache.is_shared and self.world_size > 1
            ):
                order = self._settings.order_of(who[0])
                lanes = self._lanes_read(who, dataset.shards.cache.is_shared)
                warn_of_small_cache(dataset, order, order.lanes if lanes is None else len(lanes))

    def _lanes_read(self, streams: Sequence[int], is_shared: bool) -> list[int] | None:
        """The lanes of a dataset that this process, or all processes that share its cache, may read.

        None: all, because the `streams` that draw on the dataset have different lanes, or because balance
        brings rows of any lane here that cannot be fetched one by one.
        """
        shards = self._opened.streams.datasets[streams[0]].shards
        if self._balance is not None and shards is not None and not shards.reads_single_rows:
            return None
        ranks = self.learn_machine_ranks() if is_shared else (self.rank,)
        orders = [self._settings.order_of(stream) for stream in streams]
        if any(order.lanes != orders[0].lanes for order in orders):
            return None
        return lanes_of_ranks(orders[0], self._plan.global_batch, ranks, self._plan.world_size)

    def _deliver(self, running: Prefetcher, iteration: object) -> Iterator[Batch]:
        check, at = self._stop_together.check, self._opened.streams.run.at
        try:
            self._check_live(iteration)
            while (group := self._next_group(running)) is not None:
                for number, (batch, cursor) in enumerate(zip(group.batches, group.cursors, strict=True)):
                    check()
                    if number:
                        self._telemetry.more()
                    if self.usage is not None:
                        self.usage.step(self._plan.start(self.position), group.ids[number], cursor[0])
                    if group.work is not None:
                        self._telemetry.balanced(group.work[number], self.world_size)
                    self._cursor = cursor
                    at(given=cursor[0])
                    yield batch
                    if self._running is not running or self._iteration is not iteration:
                        running = self._check_live(iteration)  # set_weights has changed what follows
                        if not cursor[1] and not self.config.endless:
                            return  # it was the epoch's last batch
                        break
        except Exception as error:
            self._stop_together.report(error, self.position // self._plan.global_batch)
            raise
        finally:
            running.close()

    def _check_live(self, iteration: object) -> Prefetcher:
        """Return the prefetcher of an iteration. RuntimeError if another one has begun since."""
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
        return group

    def _stop(self) -> None:
        self._iteration = None
        if self._running is not None:
            self._running.close()
            self._running = None

    def state_dict(self) -> dict[str, object]:
        """Return where the loop is as plain data, equal on every rank. `load_state_dict` continues there."""
        return self.state_at(self._cursor)

    def state_at(self, cursor: Cursor) -> dict[str, object]:
        """The state at another cursor of this run."""
        return LoaderState(*cursor, self._settings, self._step_sizes).to_dict()

    def load_state_dict(self, state: Mapping[str, object], *, on_mismatch: OnMismatch = "error") -> None:
        """Continue where `state` was taken; batch size and world size may differ from that run's.

        StateError lists what else differs. "fork" continues from the position anyway, with this loader's
        own dataset and settings: a new order, on purpose.
        """
        names = ("lanes", "window", "schedule", "epoch_samples", "global_batch")
        resumed = resume(
            LoaderState.from_dict(state),
            self._settings,
            fixed=frozenset(name for name in names if getattr(self.config, name) is not None),
            on_mismatch=on_mismatch,
            step_sizes=self._step_sizes,
        )
        if resumed.settings != self._settings:
            self._arrange(resumed.settings)
        self._adopt_step_sizes(resumed.step_sizes)
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
        starts in the epoch, in a run from position 0 on. Where the epochs of a loop are not the data's,
        nothing happens: with `endless`, which has none, and with `restart`, where all are the same.
        """
        if epoch < 0:
            raise ValueError(f"an epoch is a whole number of at least 0, not {epoch}")
        if epoch != self.epoch and not (self.config.restart or self.config.endless):
            self.seek(self._plan.first_batch(operator.index(epoch)))

    def start_of(self, cursor: Cursor) -> Cursor:
        """Return the cursor at which a `for` begun at `cursor` starts: (0, 0) if the loader restarts."""
        return (0, 0) if self.config.restart else cursor

    def _move(self, cursor: Cursor) -> None:
        """Let the next batch be the one at `cursor`."""
        self._stop()
        self._cursor = cursor
        if self.usage is not None:
            self.usage.begin(self._settings, self.position)

    def set_weights(self, weights: Weights, *, at_position: SupportsIndex) -> None:
        """Mix with `weights` from `at_position` on, which must not have been delivered yet.

        Positions count samples over all ranks: step times global batch. The change becomes part of the state.
        All ranks must make it while they hold the same batch; a running `for` continues.
        """
        if (schedule := self._settings.schedule) is None:
            raise ValueError("this loader has only one stream: there are no weights to set")
        start = self._undelivered(at_position, "weights")
        changed = schedule.changed(start, named_weights(self._opened.streams.names, weights))
        self._arrange(replace(self._settings, schedule=changed))
        if self.usage is not None:
            self.usage.begin(self._settings, self.position)
        self._replan()

    def _replan(self) -> None:
        """Plan again from the position on; a running `for` continues."""
        running, iteration = self._running, self._iteration
        self._stop()
        if running is not None:
            self._iteration = iteration
            self._start()

    def set_global_batch(self, sequences: SupportsIndex, *, at_position: SupportsIndex) -> None:
        """Make optimizer steps of `sequences` over all ranks, from the first that starts at `at_position` on.

        Or behind it, if it is inside of a step. What is there must not have been delivered yet. The change
        becomes part of the state. All ranks must make it while they hold the same step; running `steps()`
        continue.
        """
        if self._step_sizes is None:
            raise ValueError("this loader knows no steps: give order=Order(global_batch=…) when making it")
        changed = self._step_sizes.changed(self._undelivered(at_position, "global_batch"), sequences)
        self._check_steps(changed)
        self._adopt_step_sizes(changed)
        if self._balance is not None:
            self._replan()  # what was planned ahead is level over other steps

    def _adopt_step_sizes(self, sizes: StepSizes | None) -> None:
        if self._balance is not None:
            self._balance = self._balance.with_step_sizes(sizes)
        self._step_sizes = sizes

    def _undelivered(self, at_position: SupportsIndex, what: str) -> int:
        """A position as an int; ValueError if it has been delivered."""
        if (position := operator.index(at_position)) < self.position:
            raise ValueError(
                f"position {position:,} has been delivered: {what} can change from {self.position:,} on"
            )
        return position

    def _arrange(self, settings: RunSettings) -> None:
        """Adopt the order that a run's settings define; if it is refused, nothing changes."""
        self._arrangement = Arrangement(settings, self._opened.sizes)
        self._plan = replace(self._plan, samples=settings.epoch_samples)
        self._settings = settings

    def close(self) -> None:
        """Stop prefetching and close the shards; batches already handed out stay valid."""
        self._stop()
        if self.usage is not None:
            self.usage.close()
        self._stop_together.close()
        self._opened.streams.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A generator that uses the loader in a `with` and is dropped raises GeneratorExit there: no error.
        if error is not None and not isinstance(error, (SystemExit, GeneratorExit)):
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
        if self.config.stop_together and not dataloader_workers():
            self._stop_together.watch()

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
    def batch_bytes(self) -> int | None:
        """About how large a batch is; None if columns vary in size."""
        if (columns := self._source.delivered_bytes) is None:
            return None
        return self.batch_size * self._maker.row_bytes(columns, self.dataset.sequence_length or 0)

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
        """Return what this rank waited for since its first batch, what cache and store did, and a verdict."""
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
