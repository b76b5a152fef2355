"""The loader inside PyTorch's DataLoader, torchdata's StatefulDataLoader and samplers.

    StreamingDataset     for DataLoader(dataset, batch_size=None, num_workers=k): whole batches
    StreamingDataLoader  a DataLoader over it whose state is exact with any number of workers
    state_of             extracts the plain state from one of torchdata's StatefulDataLoader
    checkpoint_state     reads the plain state from a torch.distributed.checkpoint
    MapDataset           single samples by number, for samplers and the Hugging Face Trainer

The first two give what `StreamingLoader` gives, batch for batch. A DataLoader takes its batch t from worker t
% k, so worker w of k makes the batches w, w + k, ... of this rank and plans no others; each has its own
loader.

A StreamingLoader alone prefetches with a thread and is faster than any of these. They are for code that wants
a DataLoader, and for columns that are slow to decode. A plain DataLoader copies each batch between processes;
the workers of a StreamingDataLoader hand over blocks of batches in memory that both see (`blocks`).

**Leaving a `for` early.** Without workers the next `for` continues with the next batch. With workers only
`StreamingDataLoader` knows what the loop has received, and continues as exactly. Under a plain DataLoader the
workers know only what they made: the next `for` starts the epoch again, or the next epoch if all batches were
made (when a loop is left within the last prefetch_factor * num_workers ones). To continue exactly, give the
dataset `load_state_dict(dataset.state_dict(batches))`.

Remote datasets: give `cache_dir`, which workers share. In memory, each worker has its own cache.

`MapDataset` reads any dataset, local or remote, in its own order: order and resuming are the sampler's
business. A DataLoader asks for a batch at a time (`__getitems__`), which one gather reads. Random samples
touch as many shards as there are samples, so a remote dataset needs a cache with room for all of it.
"""

from __future__ import annotations

import copy
import itertools
import operator
import os
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex, TypedDict, Unpack, cast, overload

import numpy as np
import numpy.typing as npt

from shardkit.datasets.dataset import Dataset
from shardkit.errors import StateError, naming_extras

with naming_extras("shardkit.loaders.pytorch"):
    import torch
    from torch.utils.data import DataLoader
    from torch.utils.data import Dataset as TorchDataset


from shardkit.loaders.batch import Batch, BatchMaker, TokenColumn, tensor_maker
from shardkit.loaders.config import LoaderConfig, LoaderOptions, TokenDtype, flattened, refuse_unknown
from shardkit.loaders.defaults import find_eos_id, may_be_padded
from shardkit.loaders.gather import OutputMemory
from shardkit.loaders.peers import StopTogether
from shardkit.loaders.producer import LoaderTimeoutError
from shardkit.loaders.sources import SourceInfo, open_source
from shardkit.loaders.streaming_dataset import State, StreamingDataset, state_of
from shardkit.loaders.streams import Streams, open_streams
from shardkit.loaders.worker_blocks import BLOCK_BYTES, MAX_BLOCK_BATCHES, BlockMemory, deal
from shardkit.loaders.worker_waits import (
    LOOK_SECONDS,
    PatientIterator,
    describe_wait,
    end_workers,
    is_torch_timeout,
    kill_when_dropped,
)
from shardkit.order.state import LoaderState, OnMismatch
from shardkit.units import parse_bytes

__all__ = [
    "MapDataset",
    "StreamingDataLoader",
    "StreamingDataset",
    "checkpoint_state",
    "state_of",
    "unchanged",
]

Sample = dict[str, Any]

_teams = itertools.count(-1, -1)  # of workers, each with a number that no DataLoader's seed has

_OPTIONS = {
    *("labels", "keep_length", "mask_document_starts", "position_ids", "document_ids", "seq_lengths"),
    *("rename", "tensors", "eos_id", "bos_id", "columns"),
}

_REMOTE_OPTIONS = {"cache_dir", "cache_bytes", "connections", "storage"}


class MapDataset(TorchDataset[Sample]):
    """Sample i as {"tokens": int64[length], …}; numbers and arrays of constant shape are tensors.

    `dtype`: of the tokens; None means as stored. `return_ids` adds `sample_id`. Options, as of
    `StreamingLoader`: labels, eos_id, bos_id, columns; keep_length, mask_document_starts, position_ids,
    document_ids, seq_lengths, rename and tensors of `Layout`; of remote datasets cache_dir, cache_bytes,
    storage, and connections of `Run`.
    Can be pickled, and works in forked processes.
    """

    def __init__(
        self,
        dataset: str | os.PathLike[str] | Dataset,
        *,
        dtype: TokenDtype = "int64",
        return_ids: bool = False,
        **options: Unpack[LoaderOptions],
    ) -> None:
        self._config = LoaderConfig.of(options)
        known = _OPTIONS | _REMOTE_OPTIONS
        if unknown := sorted(flattened(options).keys() - known):
            raise TypeError(
                f"MapDataset() takes no option {unknown[0]!r}; known options: {', '.join(sorted(known))}"
            )
        self._dtype = dtype
        streams = open_streams(dataset, self._config, processes=1).streams
        self._dataset = streams.datasets[0]
        self._return_ids = return_ids
        self._process: int | None = os.getpid()
        self._parts: tuple[SourceInfo, BatchMaker] | None = self._open(streams)

    @property
    def dataset(self) -> Dataset:
        """The dataset, open."""
        return self._dataset

    def __len__(self) -> int:
        return len(self._dataset)

    @overload  # an array of no dimensions is both, by its type
    def __getitem__(self, index: SupportsIndex) -> Sample: ...  # type: ignore[overload-overlap]
    @overload
    def __getitem__(
        self, index: slice | Sequence[SupportsIndex] | npt.NDArray[np.integer[Any]]
    ) -> list[Sample]: ...
    def __getitem__(
        self, index: SupportsIndex | slice | Sequence[SupportsIndex] | npt.NDArray[np.integer[Any]]
    ) -> Sample | list[Sample]:
        """Sample `index`, or a list of those in a slice, list or array; negative ones count from the end."""
        if isinstance(index, slice):
            return self.__getitems__(range(*index.indices(len(self))))
        if isinstance(index, np.ndarray) and index.dtype.kind not in "iu":
            raise TypeError(f"samples are numbered by integers, not {index.dtype}")
        if isinstance(index, (Sequence, np.ndarray)):
            return self.__getitems__(index)
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[SupportsIndex] | npt.NDArray[np.integer[Any]]) -> list[Sample]:
        """The samples of a batch, in the order asked for; torch's DataLoader calls this."""
        numbers = np.array([self._number(index) for index in indices], dtype=np.int64)
        if not len(numbers):
            return []
        starts = self._dataset.manifest.shard_starts
        shard = (np.searchsorted(starts, numbers, side="right") - 1).astype(np.int32)
        source, maker = self._own_parts()
        read, _ = source.source.open_rows(shard, numbers - starts[shard])
        batches, _ = maker.make(read(0, len(numbers)), numbers)
        return [{name: value[0] for name, value in batch.items()} for batch in batches]

    def _number(self, index: SupportsIndex) -> int:
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"{self._dataset.location}: sample {number} of {len(self)}")
        return number % len(self)

    def _own_parts(self) -> tuple[SourceInfo, BatchMaker]:
        """This process's: a child needs its own locks, threads, connections and memory."""
        if self._parts is None or self._process != os.getpid():
            self._dataset = copy.copy(self._dataset)
            self._parts = self._open(Streams([self._dataset], ["0"]))
            self._process = os.getpid()
        return self._parts

    def _open(self, streams: Streams) -> tuple[SourceInfo, BatchMaker]:
        output = OutputMemory()
        source = open_source(
            streams, self._config.columns, self._dtype, output, keep_stored=self._config.reads_tokens
        )
        maker = BatchMaker(
            batch_size=1,  # so that each sample has its own memory
            config=self._config,
            columns=source.columns,
            tokens=TokenColumn(
                source.token_key,
                find_eos_id(streams, self._config, source.token_key),
                source.token_dtype,
                may_be_padded(streams, self._config),
                may_overflow=source.may_overflow,
            ),
            output=output,
            return_ids=self._return_ids,
        )
        return source, maker

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_parts": None, "_process": None}


def unchanged(batch: Batch) -> Batch:
    """For `collate_fn`: torch's own would make tensors of the arrays in lists."""
    return batch


def checkpoint_state(checkpoint: str | os.PathLike[str], name: str = "loader") -> State:
    """Read the state of a loader that torch.distributed.checkpoint saved as {name: loader}, on its own.

    Also of states before version 4, whose keys `load({name: loader})` misses ("Missing key"). For
    `load_state_dict` of any loader, with on_mismatch="fork" too. StateError if there is none.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # takes a second to import
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(checkpoint)
    keys = [key for key in reader.read_metadata().state_dict_metadata if key.startswith(f"{name}.")]
    if not keys:
        raise StateError(f"{os.fspath(checkpoint)}: nothing was saved as {name!r} in this checkpoint")
    values: dict[str, Any] = dict.fromkeys(keys)
    load(values, storage_reader=reader, no_dist=True)
    state: dict[str, Any] = {}
    for key, value in values.items():
        *parents, last = key.removeprefix(f"{name}.").split(".")
        inner = state
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    streams = state.get("streams", {})
    if "0" in streams:  # before version 3: a dict for each stream
        state["streams"] = [streams[str(number)] for number in range(len(streams))]
    return LoaderState.from_dict(state).to_dict()


class WorkerOptions(TypedDict, total=False):
    """Arguments of torch's DataLoader that `StreamingDataLoader` hands on to it."""

    persistent_workers: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any
    generator: torch.Generator | None


class StreamingDataLoader(DataLoader[Batch]):
    """A DataLoader whose state is exact: it counts what the loop has received.

    Accelerate's `prepare` returns it as it is, because each rank's loader gives that rank's batches, on the
    CPU; `accelerator.save_state` saves its state and `load_state` restores it.

    The state is that of `StreamingLoader`: either may load what the other saved, with another number of
    workers, batch size or world size. Leaving a `for` early and starting another continues with the next
    batch. Only one iterator is live. Arguments: those of DataLoader; the dataset makes the batches.
    """

    # What Accelerate asks of a loader that it gets; it would have rank 0's feed all ranks.
    _is_accelerate_prepared = True
    use_stateful_dataloader = True

    def __init__(
        self,
        dataset: StreamingDataset,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        collate_fn: Callable[[Batch], Any] = unchanged,
        block_bytes: int | str = BLOCK_BYTES,
        **options: Unpack[WorkerOptions],
    ) -> None:
        """`block_bytes`: batches travel from a worker together up to this size; 0: each alone.

        Batches of columns that vary in size, which may be slow to decode, and those of a `collate_fn` always
        travel alone. `prefetch_factor` counts batches, of which a worker makes whole blocks.
        """
        known = [*WorkerOptions.__annotations__, "in_order", "pin_memory_device"]
        refuse_unknown("StreamingDataLoader()", options, known)
        limit, size = parse_bytes(block_bytes), dataset.loader.batch_bytes
        self._block_batches = 1 if size is None else max(1, min(MAX_BLOCK_BATCHES, limit // size))
        self._hands_over_blocks = num_workers > 0 and collate_fn is unchanged
        self._timeout_seconds = options.pop("timeout", 0) or dataset.loader.config.timeout_seconds
        if num_workers:
            options["timeout"] = LOOK_SECONDS  # torch looks after dead workers so often
        if self._hands_over_blocks and prefetch_factor is not None and prefetch_factor > 2:
            prefetch_factor = max(2, -(-prefetch_factor // self._block_batches))
        super().__init__(
            dataset,
            batch_size=None,
            num_workers=num_workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            collate_fn=cast(Any, collate_fn),
            **options,
        )
        self._memory: BlockMemory | None = None
        self._team, self._round = 0, 0  # which workers there are, and how often they have been iterated
        self._batches = dataset
        dataset.loop_logs = True
        self._cursor = dataset.next
        self._own_iterations: tuple[int, ...] = (dataset.iteration,)
        self._delivery: weakref.ref[_Delivery] | None = None
        self._stop_together = StopTogether(self, grace_seconds=dataset.loader.config.stop_grace_seconds)

    def __iter__(self) -> Any:
        self._end_delivery()
        self._follow_dataset()
        dataset, loader = self._batches, self._batches.loader
        self._cursor = loader.start_of(self._cursor)
        if self.num_workers:
            if loader.config.stop_together:
                self._stop_together.watch()
            loader.prepare_workers(self._cursor)
        dataset.start_at(self._cursor, left=(self._team, self._round))
        number = dataset.iteration
        self._own_iterations = (number, number + 1)  # as soon as torch's iterator or its workers have begun
        self._round += 1
        source: Any = self._begin_workers() if self.num_workers else super().__iter__()
        if self._hands_over_blocks:
            source = deal(source, self.num_workers)
        delivery = _Delivery(self, source)
        dataset.received = self._cursor
        self._delivery = weakref.ref(delivery)
        return delivery

    def _begin_workers(self) -> Iterator[Any]:
        """Start the workers, or let persistent ones begin anew; a wait for one of them is bounded."""
        if self._iterator is not None:
            self._iterator._timeout = self._timeout_seconds  # for all to have begun
        try:
            found: Any = super().__iter__()
        except RuntimeError as error:
            if not is_torch_timeout(error):
                raise
            stuck, self._iterator = self._iterator, None
            problem = describe_wait(stuck, self._timeout_seconds)
            end_workers(stuck)
            raise LoaderTimeoutError(f"{self._where()}: {problem}") from error
        found._timeout = LOOK_SECONDS
        return PatientIterator(found, self._where, self._timeout_seconds)

    def _where(self) -> str:
        plan = self._batches.loader.plan
        position = self._cursor[0]
        step = position // plan.global_batch
        return f"rank {plan.rank} of {plan.world_size}, step {step:,} (position {position:,})"

    def _get_iterator(self) -> Any:
        """torch's, whose workers are started here."""
        blocks = None
        if self._hands_over_blocks:
            self._memory = BlockMemory(self.num_workers, tensor_maker(self._batches.loader.config))
            blocks = self._memory, self._block_batches
        self._team, self._round = next(_teams), 1
        context = self.multiprocessing_context or torch.multiprocessing
        with self._batches.starting_workers(self._team, blocks, context.get_start_method()):
            iterator = super()._get_iterator()
        if self.num_workers:
            kill_when_dropped(iterator)
        return iterator

    def __len__(self) -> int:
        """Batches of the next batch's epoch, including those already delivered; equal on all ranks."""
        self._follow_dataset()
        loader = self._batches.loader
        return loader.epoch_batches(loader.start_of(self._cursor))

    def state_dict(self) -> State:
        """Return where the loop is as plain data, the same on every rank."""
        self._follow_dataset()
        return self._batches.loader.state_at(self._cursor)

    def load_state_dict(self, state: Mapping[str, object], *, on_mismatch: OnMismatch = "error") -> None:
        """Continue where `state` was taken, as `StreamingLoader.load_state_dict`. Ends the live iterator."""
        self._end_delivery()
        self._batches.load_state_dict(state, on_mismatch=on_mismatch)
        self._follow_dataset()
        self._iterator = None  # also of persistent workers: more than the position may have changed

    def seek(self, consumed_samples: SupportsIndex) -> None:
        """Continue at this position, as `StreamingLoader.seek`. Ends the live iterator."""
        self._end_delivery()
        self._batches.seek(consumed_samples)
        self._follow_dataset()

    def set_epoch(self, epoch: int) -> None:
        """Move to an epoch as `StreamingDataset.set_epoch` does. Ends the live iterator if that moves."""
        self._follow_dataset()
        self._batches.move_to_epoch(self._cursor, epoch)
        self._follow_dataset()

    def close(self) -> None:
        """Stop the workers and prefetching."""
        self._end_delivery()
        self._iterator = None
        self._stop_together.close()
        self._batches.close()

    def _follow_dataset(self) -> None:
        """Take over where the dataset was moved to, or iterated by another DataLoader, since.

        Accelerate's `skip_first_batches` makes such a DataLoader, for the rest of an epoch.
        """
        number = self._batches.iteration
        if number not in self._own_iterations:
            self._end_delivery()
            self._cursor, self._own_iterations = self._batches.next, (number,)

    def _end_delivery(self) -> None:
        delivery = self._delivery() if self._delivery is not None else None
        if delivery is not None:
            delivery.source = None  # ends the workers, unless they are persistent
        self._delivery = None


class _Delivery:
    """An iteration of a `StreamingDataLoader`. Workers end with it, as with torch's own."""

    def __init__(self, owner: StreamingDataLoader, source: Iterator[Batch]) -> None:
        self.source: Iterator[Batch] | None = source
        self._owner, self._loader = owner, owner._batches.loader

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self.source is None:
            raise RuntimeError(
                "stale iterator: it failed, or its loader was closed, re-iterated, or had a state loaded"
            )
        owner = self._owner
        plan = self._loader.plan
        owner._stop_together.check()
        try:
            batch = next(self.source)
        except StopIteration:
            raise
        except Exception as error:
            self.source = None  # torch's iterator would skip the batch that is missing
            if owner.num_workers:
                # Otherwise the traceback keeps torch's iterator and its workers alive until it is collected.
                traceback.clear_frames(error.__traceback__)
                if error.__cause__ is not None:
                    traceback.clear_frames(error.__cause__.__traceback__)
                owner._stop_together.report(error, owner._cursor[0] // plan.global_batch)
            raise
        before, owner._cursor = owner._cursor, plan.advance(owner._cursor, 1)
        owner._batches.received = owner._cursor
        if owner.num_workers and self._loader.usage is not None:
            owner._batches.log_received(batch, before, owner._cursor)
        return batch
