"""`StreamingLoader`: batches of a dataset in a computed order, starting at any position.

The batches depend on dataset, seed, shuffle, lanes, window, tail, position, batch size, rank and world size,
and on nothing else. The position moves when a batch is handed over, not when it is read: a state taken while
holding batch t continues with batch t + 1, no matter what had been prefetched. The loader never writes to a
batch again after it has delivered it.

The path of a batch: `order.batches` computes which samples it holds, `gather` (or `sources`) reads their rows
from the open shards of `streams`, `batch` turns them into tensors and labels, `producer` does this for many
batches ahead of the loop, and `_deliver` hands them over, counts and logs them.

One `for` loop is one epoch. After leaving it early, the next `for` continues with the next batch of the same
epoch, as a state saved there would. Leaving it after the epoch's last batch is the same as completing it.
With `restart=True` each `for` starts at the first sample instead. Only one iterator is valid at a time:
starting another, loading a state or moving to another position makes the earlier one stale.
"""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Literal, Never, Self, SupportsIndex, Unpack

from shardkit.datasets.dataset import Dataset
from shardkit.errors import PeerError, warn_user
from shardkit.hints import answers_keywords
from shardkit.loaders.agreement import RankAgreement
from shardkit.loaders.batch import Batch
from shardkit.loaders.config import (
    DataSource,
    FurtherOptions,
    Layout,
    LoaderConfig,
    LoaderOptions,
    Order,
    Run,
    Stream,
    TokenDtype,
    Transform,
    Weights,
)
from shardkit.loaders.defaults import batch_maker, open_work_balance
from shardkit.loaders.document_values import source_labels
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
from shardkit.loaders.shard_uses import ShardUses
from shardkit.loaders.sources import open_source
from shardkit.loaders.streams import named_weights, open_streams
from shardkit.loaders.usage_log import open_usage_log
from shardkit.order.arrangement import Arrangement
from shardkit.order.batches import BatchPlan, Cursor, StepSizes
from shardkit.order.order import MAX_POSITION, Shuffle
from shardkit.order.run_settings import RunSettings, Tail
from shardkit.order.state import LoaderState, OnMismatch, resume
from shardkit.units import parse_bytes

_LAYOUT, _ORDER, _RUN = Layout(), Order(), Run()  # immutable, so they can be defaults of arguments


class StreamingLoader:
    """Iterates over a dataset's batches: {"tokens": int64[batch_size, length], …}, one epoch per `for`.

    `dataset`: a path or URL (MDS, tars, row or token files: `shardkit.open`), an open `Dataset` or a list
    of `Stream`, which are mixed by weight. `batch_size`: sequences per rank and step. `shuffle`, by `seed`:
    "window" (in a bounded window of each lane), "global" or "none". `tail`: what happens at an epoch's end:
    "carry" fills the last batch from the next epoch, "drop" leaves it out, "pad" fills it with padding rows.
    `rank` and `world_size` are data-parallel. They default to the values of `mesh` or `group`, else of
    torch.distributed, else of torchrun, else rank 0 of 1 (`shardkit.loaders.placement`). `dtype`: type of the
    delivered tokens; None keeps the stored type. `return_ids` adds `sample_id`, the row number in the
    dataset, and in a mixture `stream_id`, the number of each sample's stream.

    `labels`: True adds labels equal to the tokens, for models that shift them; "shifted" the next tokens.
    `columns`: deliver these columns only. `sequence_length`: tokens per row of flat token files, and of texts
    with `tokenizer`. `decode`: how images and members of tars are decoded, as in `shardkit.open`.
    `transform`: function of a sample, a dict, that returns the sample to deliver. `endless`: continue with
    the next epoch instead of ending the `for`. `cache_dir`: folder that caches shards of remote datasets for
    all processes of the machine; None: memory. `cache_bytes`: maximum size of the cache, such as "200GB".
    Groups of options: `layout`, the form of a batch; `order`, the order of samples; `run`, how batches are
    fetched and waited for. `shardkit.loaders.config.LoaderConfig` describes all and the rest: eos_id, bos_id,
    pad_id, collate_fn, restart, storage, tokenizer, pack, token_dtype, per_file, usage_log, mesh and group.

    Columns besides the tokens become tensors if they hold numbers or arrays of constant shape, else lists.
    With tail="pad" every batch has `is_padding`; padding has the sample id -1 and the label -100.
    """

    @answers_keywords({})  # config answers those
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
        labels: bool | Literal["shifted"] = False,
        columns: Sequence[str] | None = None,
        sequence_length: int | None = None,
        decode: bool | str = True,
        transform: Transform | None = None,
        endless: bool = False,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int | str | None = None,
        layout: Layout = _LAYOUT,
        order: Order = _ORDER,
        run: Run = _RUN,
        **options: Unpack[FurtherOptions],
    ) -> None:
        self.config = LoaderConfig.of(
            LoaderOptions(
                labels=labels,
                columns=columns,
                sequence_length=sequence_length,
                decode=decode,
                transform=transform,
                endless=endless,
                cache_dir=cache_dir,
                cache_bytes=cache_bytes,
                layout=layout,
                order=order,
                run=run,
                **options,
            )
        )
        self._place = find_place(rank, world_size, mesh=self.config.mesh, group=self.config.group)
        self.machine_ranks: tuple[int, ...] | None = None
        """The data-parallel ranks that share this machine; None until `learn_machine_ranks` is called."""
        self._running: Prefetcher | None = None
        self._iteration: object = None
        self._stop_together = StopTogether(
            self, on_peer_error=StreamingLoader._interrupt, grace_seconds=self.config.stop_grace_seconds
        )
        self._watch_peers()
        self._open(dataset, batch_size, tail, dtype)
        self._cursor = (0, 0)
        self._step_sizes: StepSizes | None = None
        if (sizes := self.config.global_batch) is not None:
            if tail != "carry":
                raise ValueError(f"global_batch needs tail='carry', not {tail!r}: steps may span two epochs")
            self._adopt_step_sizes(StepSizes.of(sizes))
        self._arrange(self._opened.settings(self.config, seed=seed, shuffle=shuffle, tail=tail))
        self.shard_uses().warn_of_small_caches(is_starting=False)
        self._begin_delivery(return_ids=return_ids, mark_padding=tail == "pad")

    def _open(self, dataset: DataSource, batch_size: int, tail: Tail, dtype: TokenDtype) -> None:
        """Open the streams, the source that reads their rows, and what compares and balances ranks."""
        config, processes = self.config, local_processes(self._place)
        self._opened = open_streams(dataset, config, processes, place=self._place)
        streams, samples = self._opened.streams, self._opened.epoch_samples(config)
        self._plan = BatchPlan(samples, batch_size, self._place.rank, self._place.world_size, tail)
        self.sources = source_labels(streams)
        """The labels that `Layout(document_values=["source"])` numbers: those of all inputs, each once."""
        self.output = OutputMemory()
        """Reusable memory that rows are written to."""
        self._source = open_source(
            streams,
            config.columns,
            dtype,
            self.output,
            mixed_lengths=config.mixed_lengths,
            keep_stored=config.reads_tokens,
            changes=config.changes_samples,
        )
        self._agreement = RankAgreement(
            self._place, self._stop_together, timeout_seconds=config.timeout_seconds
        )
        self._balance = open_work_balance(streams, config, self.world_size, processes=processes)

    def _begin_delivery(self, *, return_ids: bool, mark_padding: bool) -> None:
        """Make what turns rows into batches, and what counts and logs them."""
        streams = self._opened.streams
        self._maker = batch_maker(
            streams,
            self._source,
            self.config,
            self.output,
            batch_size=self.batch_size,
            return_ids=return_ids,
            mark_padding=mark_padding,
            mask=self._opened.token_mask,
        )
        self._telemetry = Telemetry(self.batch_size, shards=streams.remote, ranks=self.world_size)
        self.usage = open_usage_log(self.config.usage_log, streams, self._place, batch_size=self.batch_size)
        if self.usage is not None:
            self.usage.begin(self._settings, 0)

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
            "a StreamingLoader cannot be indexed: it delivers whole batches in its own order. Iterate over "
            "it directly instead of giving it to a DataLoader (it prefetches by itself), or give the "
            "DataLoader a shardkit.loaders.pytorch.StreamingDataset and batch_size=None"
        )

    def __reduce__(self) -> Never:
        raise TypeError(
            "a StreamingLoader cannot be pickled or copied, because it has threads and open shards: make "
            "another with the same arguments and load this one's state_dict(). For DataLoader workers use a "
            "shardkit.loaders.pytorch.StreamingDataset"
        )

    def iterate(self) -> Iterator[Batch]:
        """Return an iterator like `iter(loader)` that starts at the current cursor even with `restart`."""
        running = self._begin()
        return self._deliver(running, self._iteration)

    def groups(self, portion: Portion) -> Iterator[Group]:
        """Yield groups of one DataLoader worker's batches, `portion`; the state follows only this worker."""
        running = self._begin(portion)
        while (group := running.get()) is not None:
            self._cursor = group.cursors[-1]
            self._opened.streams.run.at(given=self.position)
            yield group

    def _begin(self, portion: Portion = WHOLE) -> Prefetcher:
        self._stop()
        check_place(self._place)  # the process group may have been created after this loader
        self._watch_peers()
        self._agree(self._cursor)
        self._announce_limit()
        self._iteration = object()
        self._telemetry.begin()
        return self._start(portion)

    def steps(self) -> Iterator[list[Batch]]:
        """Yield one list per optimizer step, endlessly: this rank's batches of the step.

        A step has as many sequences over all ranks as `global_batch` sets for its position, so the number of
        batches in the list may change from step to step. The samples of a step are the same for any batch
        size and number of ranks. After loading a state taken inside a step, the first list holds the rest of
        that step. A state taken while holding a step continues with the next one. Needs `global_batch` and
        `endless=True`.
        """
        if self._step_sizes is None:
            raise ValueError(
                "steps() needs order=Order(global_batch=…), the number of sequences per step over all ranks"
            )
        if not self.config.endless:
            raise ValueError("steps() needs endless=True, because an epoch may end in the middle of a step")
        self._step_sizes.check_whole(self.position, self._plan.global_batch)
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
                if self._cursor != begin:  # the caller did not receive the batches read so far
                    self._move(begin)
                raise
            yield step

    def _announce_limit(self) -> None:
        """Warn if a stream's `repeat` or `choose` limit will end this run."""
        limit = self._arrangement.limit
        epoch_end = (self.epoch + 1) * self._plan.samples
        if limit is not None and (self.config.endless or limit.position < epoch_end):
            warn_user(limit.message(self._plan.global_batch))

    def _start(self, portion: Portion = WHOLE) -> Prefetcher:
        """Start producing batches from the current cursor, and start fetching their shards."""
        config, most_bytes = self.config, parse_bytes(self.config.prefetch_bytes)
        maker = GroupMaker(
            self._opened.streams,
            self._arrangement,
            self._plan,
            self._source,
            self._maker,
            most_bytes=most_bytes,
            balance=self._balance,
            makes_batches=portion.makes_batches,
        )
        self._fetch_ahead()
        cursor = (self.position, self._plan.delivered(self._cursor))
        self._running = Prefetcher(
            maker.groups(cursor, endless=config.endless, first=portion.first, every=portion.every),
            maker.describe,
            most_batches=config.prefetch_batches if portion.reads_ahead and not maker.needs_loop else 0,
            most_bytes=most_bytes,
            timeout_seconds=config.timeout_seconds,
        )
        return self._running

    def _fetch_ahead(self) -> None:
        """Start fetching the shards of remote datasets in the order in which the batches need them."""
        streams = self._opened.streams
        if not streams.remote:
            return
        uses = self.shard_uses()
        uses.warn_of_small_caches(is_starting=True)
        requests, ranks = uses.requests(), self.machine_ranks
        replicas = 1 if ranks is None else replicas_on_machine(self._place, ranks)
        others = self._balance is not None
        streams.run.start(requests, self.position, replicas=replicas, reads_other_lanes=others)

    def shard_uses(self) -> ShardUses:
        """Return which shards of remote datasets this machine's ranks use, and when, in the present order."""
        streams, is_balanced = self._opened.streams, self._balance is not None
        ranks = self.learn_machine_ranks
        return ShardUses(streams, self._settings, self._arrangement, self._plan, is_balanced, ranks)

    def learn_machine_ranks(self) -> tuple[int, ...]:
        """Return the data-parallel ranks that share this machine's cache folder; find them on first call."""
        if self.machine_ranks is None:
            self.machine_ranks = ranks_of_machine(self._place)
        return self.machine_ranks

    def _agree(self, cursor: Cursor) -> None:
        """Check before an iteration from `cursor` that all ranks have equal settings, data and position."""
        if self.config.restart and self._agreement.has_met:
            return  # every iteration starts at the first sample, so ranks that agreed once still agree
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
        """Compare ranks and find this machine's ranks before workers, which cannot, start at `cursor`."""
        check_place(self._place)
        self._agree(cursor)
        remote = self._opened.streams.remote
        if any(shards.cache.is_shared for shards in remote):
            self.learn_machine_ranks()

    def _deliver(self, running: Prefetcher, iteration: object) -> Iterator[Batch]:
        check, at = self._stop_together.check, self._opened.streams.run.at
        try:
            self._check_live(iteration)
            while True:
                began = time.perf_counter()
                if (group := running.get()) is None:
                    break
                self._telemetry.step(time.perf_counter() - began, running.ready_batches)
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
                        running = self._check_live(iteration)  # set_weights replaced the prefetcher
                        if not cursor[1] and not self.config.endless:
                            return  # the delivered batch was the epoch's last
                        break
            self._telemetry.end()
        except Exception as error:
            self._stop_together.report(error, self.position // self._plan.global_batch)
            raise
        finally:
            running.close()

    def _check_live(self, iteration: object) -> Prefetcher:
        """Return the prefetcher of an iteration; raise RuntimeError if the iteration is stale."""
        if self._iteration is not iteration or self._running is None:
            raise RuntimeError(
                "stale iterator: the loader was closed, re-iterated, moved to another position, or had a "
                "state loaded"
            )
        return self._running

    def _stop(self) -> None:
        self._iteration = None
        if self._running is not None:
            self._running.close()
            self._running = None

    def state_dict(self) -> dict[str, object]:
        """Return the loop's position and settings as plain data, equal on every rank."""
        return self.state_at(self._cursor)

    def state_at(self, cursor: Cursor) -> dict[str, object]:
        """Return the state from which this run would continue at `cursor`."""
        return LoaderState(*cursor, self._settings, self._step_sizes).to_dict()

    def load_state_dict(self, state: Mapping[str, object], *, on_mismatch: OnMismatch = "error") -> None:
        """Continue where `state` was taken; batch size and world size may differ.

        Raises StateError, which lists the differences, if anything else differs. on_mismatch="fork" instead
        continues at the same position with this loader's own dataset and settings, in a new order.
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
        """Continue at this position, with the samples that an uninterrupted run would deliver there.

        Positions count samples over all ranks and epochs, as Megatron's `consumed_train_samples` does.
        Raises ValueError for a loader with `restart=True`, which starts every `for` at the first sample.
        """
        position = operator.index(consumed_samples)
        if not 0 <= position < MAX_POSITION:
            raise ValueError(f"consumed_samples must be from 0 to 2**62 - 1, not {position:,}")
        if self.config.restart:
            raise ValueError("seek() needs restart=False: restart=True starts every for at the first sample")
        self._move(self._plan.cursor_at(position))

    def set_epoch(self, epoch: int) -> None:
        """Continue with the first batch of `epoch`; do nothing if the next batch is already in that epoch.

        For training loops that call this before each epoch. With tail="carry", the first batch of an epoch
        is the first one that starts in it in a run from position 0. Does nothing with `endless`, which has
        no epochs, nor with `restart`, whose epochs are all the same.
        """
        if epoch < 0:
            raise ValueError(f"epoch must be at least 0, not {epoch}")
        if epoch != self.epoch and not (self.config.restart or self.config.endless):
            self.seek(self._plan.first_batch(operator.index(epoch)))

    def start_of(self, cursor: Cursor) -> Cursor:
        """Return the cursor at which a `for` starts if the loader is at `cursor`: (0, 0) with `restart`."""
        return (0, 0) if self.config.restart else cursor

    def _move(self, cursor: Cursor) -> None:
        """Stop the iteration and continue with the batch at `cursor`."""
        self._stop()
        self._cursor = cursor
        if self.usage is not None:
            self.usage.begin(self._settings, self.position)

    def set_weights(self, weights: Weights, *, at_position: SupportsIndex) -> None:
        """Mix with `weights` from `at_position`, a position that has not been delivered yet.

        Positions count samples over all ranks: step times global batch. The change becomes part of the state.
        All ranks must make it while they hold the same batch; a running `for` continues.
        """
        if (schedule := self._settings.schedule) is None:
            raise ValueError("set_weights() needs a mixture; this loader has only one stream")
        start = self._undelivered(at_position, "weights")
        changed = schedule.changed(start, named_weights(self._opened.streams.names, weights))
        self._arrange(replace(self._settings, schedule=changed))
        if self.usage is not None:
            self.usage.begin(self._settings, self.position)
        self._replan()

    def _replan(self) -> None:
        """Discard prefetched batches and plan again from the current position; a running `for` continues."""
        running, iteration = self._running, self._iteration
        self._stop()
        if running is not None:
            self._iteration = iteration
            self._start()

    def set_global_batch(self, sequences: SupportsIndex, *, at_position: SupportsIndex) -> None:
        """Set the size of optimizer steps, over all ranks, from the first step at or after `at_position`.

        `at_position` must not have been delivered yet. The change becomes part of the state. All ranks must
        make it while they hold the same step; a running `steps()` iterator continues.
        """
        if self._step_sizes is None:
            raise ValueError("set_global_batch() needs a loader made with order=Order(global_batch=…)")
        changed = self._step_sizes.changed(self._undelivered(at_position, "global_batch"), sequences)
        changed.check_whole(self.position, self._plan.global_batch)
        self._adopt_step_sizes(changed)
        if self._balance is not None:
            self._replan()  # batches planned ahead are balanced over steps of the old size

    def _adopt_step_sizes(self, sizes: StepSizes | None) -> None:
        if self._balance is not None:
            self._balance = self._balance.with_step_sizes(sizes)
        self._step_sizes = sizes

    def _undelivered(self, at_position: SupportsIndex, what: str) -> int:
        """Return `at_position` as an int; raise ValueError if its sample has been delivered."""
        if (position := operator.index(at_position)) < self.position:
            raise ValueError(
                f"at_position {position:,} has been delivered: {what} can change from {self.position:,} on"
            )
        return position

    def _arrange(self, settings: RunSettings) -> None:
        """Adopt the order that `settings` define; change nothing if they are invalid."""
        self._arrangement = Arrangement(settings, self._opened.sizes)
        self._plan = replace(self._plan, samples=settings.epoch_samples)
        self._settings = settings

    def close(self) -> None:
        """Stop prefetching and close the shards; delivered batches stay valid."""
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
        # GeneratorExit only means that a generator with this `with` block was dropped; it is not an error.
        if error is not None and not isinstance(error, (SystemExit, GeneratorExit)):
            self._stop_together.report(error, self.position // self._plan.global_batch)
        self.close()

    def _interrupt(self, error: PeerError) -> None:
        """End every wait for a batch or shard, because another rank failed. Safe in any thread."""
        if (running := self._running) is not None:
            running.fail(error)
        for shards in self._opened.streams.remote:
            shards.close()

    def _watch_peers(self) -> None:
        """Listen for errors of other ranks, except in a DataLoader worker, whose parent process listens."""
        if self.config.stop_together and not dataloader_workers():
            self._stop_together.watch()

    def __len__(self) -> int:
        """Return the number of batches in the next batch's epoch, with delivered ones; equal on all ranks."""
        return self.epoch_batches(self.start_of(self._cursor))

    def epoch_batches(self, cursor: Cursor) -> int:
        """Return the number of batches in the epoch that contains `cursor`."""
        if self.config.endless:
            raise TypeError("an endless loader has no length")
        return self._plan.delivered(cursor) + self._plan.batches_left(cursor[0])

    @property
    def dataset(self) -> Dataset:
        """The open dataset; in a mixture, the dataset of the first stream."""
        return self.datasets[0]

    @property
    def datasets(self) -> tuple[Dataset, ...]:
        """The open datasets of all streams, in stream order."""
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
        """Approximate size of a batch in bytes; None if columns vary in size."""
        if (columns := self._source.delivered_bytes) is None:
            return None
        return self.batch_size * self._maker.row_bytes(columns, self.dataset.sequence_length or 0)

    @property
    def cursor(self) -> Cursor:
        """The part of the state that changes with each batch: (position, batches delivered in the epoch)."""
        return self._cursor

    @property
    def plan(self) -> BatchPlan:
        """The plan that divides epochs into batches and batches among ranks."""
        return self._plan

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._plan.epoch(self.position)

    def stream_samples(self) -> dict[str, int]:
        """Return how many samples each stream has delivered so far, over all ranks and epochs."""
        counts = self._arrangement.positions(self.position)
        return dict(zip(self._opened.streams.names, counts, strict=True))

    def exhausted_at(self) -> int | None:
        """Return the position at which a stream reaches its limit; None if no stream has a limit."""
        limit = self._arrangement.limit
        return None if limit is None else limit.position

    def stats(self) -> LoaderStats:
        """Return this rank's waits since its first batch, counters of cache and store, and a verdict."""
        return self._telemetry.stats(self._maker.delivered_length(self.dataset.sequence_length))

    def __repr__(self) -> str:
        plan, order = self._plan, self._settings.order
        data = [dataset.location for dataset in self._opened.streams.once.datasets]
        return (
            f"StreamingLoader({data[0] if len(data) == 1 else data!r}, batch_size={plan.batch_size}, "
            f"seed={order.seed}, shuffle={order.shuffle!r}, tail={plan.tail!r}, rank={plan.rank}, "
            f"world_size={plan.world_size}, "
            f"lanes={order.lanes}, window={order.window}, position={self.position})"
        )
