"""The loader inside PyTorch's DataLoader, torchdata's StatefulDataLoader and samplers.

    StreamingDataset     for DataLoader(dataset, batch_size=None, num_workers=k): whole batches
    StreamingDataLoader  a DataLoader over it whose state is exact with any number of workers
    state_of             extracts the plain state from a state of torchdata's StatefulDataLoader
    checkpoint_state     reads the plain state from a torch.distributed.checkpoint
    MapDataset           single samples by number, for samplers and the Hugging Face Trainer

The first two deliver the same batches as `StreamingLoader`. A DataLoader takes its batch t from worker t % k,
so worker w of k makes the batches w, w + k, ... of this rank and plans no others; each has its own loader.

A StreamingLoader alone prefetches with a thread and is faster than any of these. They are for code that needs
a DataLoader, and for columns that are slow to decode. A plain DataLoader copies each batch between processes;
the workers of a StreamingDataLoader send blocks of batches in shared memory (`worker_blocks`).

**Leaving a `for` early.** Without workers the next `for` continues with the next batch. With workers only
`StreamingDataLoader` knows what the loop has received, and it continues with the next batch, too. Under a
plain DataLoader the workers know only what they made: the next `for` starts the epoch again, or starts the
next epoch if all batches were made (when a loop is left within the last prefetch_factor * num_workers
batches). To continue exactly, call `dataset.load_state_dict(dataset.state_dict(batches))`.

For remote datasets give `cache_dir`, which workers share. A cache in memory is separate for each worker.
`MapDataset` reads any dataset, local or remote, in stored order: shuffling and resuming are left to the
sampler. A DataLoader requests one batch at a time (`__getitems__`), which one gather reads. Random samples
touch about as many shards as there are samples, so a remote dataset needs a cache with room for all of it.
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

from shardkit.hints import refuse_unknown
from shardkit.loaders.batch import Batch, BatchMaker, tensor_maker
from shardkit.loaders.config import LoaderConfig, LoaderOptions, TokenDtype, flattened
from shardkit.loaders.defaults import batch_maker
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
from shardkit.synonyms import FOREIGN
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

_teams = itertools.count(-1, -1)  # numbers of worker teams: below 0, so they differ from DataLoader seeds

_OPTIONS = {
    *("labels", "keep_length", "mask_document_starts", "position_ids", "document_ids", "seq_lengths"),
    *("rename", "tensors", "eos_id", "bos_id", "columns"),
}

_REMOTE_OPTIONS = {"cache_dir", "cache_bytes", "connections", "storage"}


class MapDataset(TorchDataset[Sample]):
    """Single samples by index: {"tokens": int64[length], …}; numbers and constant shapes become tensors.

    `dtype`: type of the delivered tokens; None keeps the stored type. `return_ids` adds `sample_id`. Accepts
    these options of `StreamingLoader`: labels, eos_id, bos_id, columns; of `Layout`: keep_length,
    mask_document_starts, position_ids, document_ids, seq_lengths, rename and tensors; for remote datasets
    cache_dir, cache_bytes, storage, and connections of `Run`. Can be pickled, and works in forked processes.
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
                f"MapDataset() has no option {unknown[0]!r}; its options are {', '.join(sorted(known))}"
            )
        self._dtype = dtype
        streams = open_streams(dataset, self._config, processes=1).streams
        self._dataset = streams.datasets[0]
        self._return_ids = return_ids
        self._process: int | None = os.getpid()
        self._parts: tuple[SourceInfo, BatchMaker] | None = self._open(streams)

    @property
    def dataset(self) -> Dataset:
        """The open dataset."""
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
        """Return sample `index`, or a list of the samples of a slice, list or array.

        Negative numbers count from the end.
        """
        if isinstance(index, slice):
            return self.__getitems__(range(*index.indices(len(self))))
        if isinstance(index, np.ndarray) and index.dtype.kind not in "iu":
            raise TypeError(f"samples are indexed by integers, not by an array of {index.dtype}")
        if isinstance(index, (Sequence, np.ndarray)):
            return self.__getitems__(index)
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[SupportsIndex] | npt.NDArray[np.integer[Any]]) -> list[Sample]:
        """Return the samples with these indices, in this order; torch's DataLoader calls this."""
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
            raise IndexError(f"{self._dataset.location}: there is no sample {number} of {len(self)}")
        return number % len(self)

    def _own_parts(self) -> tuple[SourceInfo, BatchMaker]:
        """Return reader and batch maker; make new ones in a child, which needs its own locks and threads."""
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
        # With a batch size of 1, each sample gets its own memory.
        maker = batch_maker(streams, source, self._config, output, batch_size=1, return_ids=self._return_ids)
        return source, maker

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_parts": None, "_process": None}


def unchanged(batch: Batch) -> Batch:
    """Return `batch`: a `collate_fn` that does not convert arrays in lists to tensors, as torch's does."""
    return batch


def checkpoint_state(checkpoint: str | os.PathLike[str], name: str = "loader") -> State:
    """Read the state of a loader that torch.distributed.checkpoint saved as {name: loader}; nothing else.

    The result is for `load_state_dict` of any loader, also with on_mismatch="fork". This function also reads
    states before version 4, for which `load({name: loader})` fails with "Missing key". Raises StateError if
    the checkpoint has no such state.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # takes a second to import
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(checkpoint)
    keys = [key for key in reader.read_metadata().state_dict_metadata if key.startswith(f"{name}.")]
    if not keys:
        raise StateError(f"{os.fspath(checkpoint)}: this checkpoint has no entry {name!r}; give another name")
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
    if "0" in streams:  # a state before version 3 has a dict of streams by number instead of a list
        state["streams"] = [streams[str(number)] for number in range(len(streams))]
    return LoaderState.from_dict(state).to_dict()


class WorkerOptions(TypedDict, total=False):
    """Arguments that `StreamingDataLoader` passes on to torch's DataLoader."""

    persistent_workers: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any
    generator: torch.Generator | None


class StreamingDataLoader(DataLoader[Batch]):
    """A DataLoader whose state is exact: it counts the batches that the loop has received.

    Accelerate's `prepare` returns it unchanged, because each rank's loader delivers that rank's batches, on
    the CPU; `accelerator.save_state` saves its state and `load_state` restores it.

    States are interchangeable with `StreamingLoader`: each loads the other's, also with another number of
    workers, batch size or world size. After leaving a `for` early, the next one continues with the next
    batch. Only one iterator is valid at a time. Takes arguments of DataLoader; the dataset makes the batches.
    """

    # Attributes that Accelerate checks. Without them it would send rank 0's batches to all ranks.
    _is_accelerate_prepared = True
    use_stateful_dataloader = True

    def __init__(
        self,
        dataset: StreamingDataset,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        convert_fn: Callable[[Batch], Any] = unchanged,
        block_bytes: int | str = BLOCK_BYTES,
        **options: Unpack[WorkerOptions],
    ) -> None:
        """`block_bytes`: a worker sends batches in blocks of up to this size; 0: each batch separately.

        Batches of columns that vary in size, or are transformed, are always sent separately, and those of a
        `convert_fn` (what torch calls `collate_fn` for whole batches: it gets a batch, in the worker) or of
        the dataset's `collate_fn` by torch's queue. `prefetch_factor` counts batches; a worker makes whole
        blocks of them.
        """
        if not isinstance(dataset, StreamingDataset):
            raise TypeError(
                f"StreamingDataLoader() takes a StreamingDataset(path, batch_size=…), not {dataset!r:.80}"
            )
        if "collate_fn" in options:
            raise TypeError(
                "StreamingDataLoader() takes no collate_fn: give it to the StreamingDataset, where it gets "
                "the list of samples; for a function of whole batches use convert_fn"
            )
        known = [*WorkerOptions.__annotations__, "in_order", "pin_memory_device"]
        refuse_unknown("StreamingDataLoader()", options, known, FOREIGN)
        limit, size = parse_bytes(block_bytes), dataset.loader.batch_bytes
        self._block_batches = 1 if size is None else max(1, min(MAX_BLOCK_BATCHES, limit // size))
        makes_fields = convert_fn is unchanged and dataset.loader.config.collate_fn is None
        self._hands_over_blocks = num_workers > 0 and makes_fields
        self._timeout_seconds = options.pop("timeout", 0) or dataset.loader.config.timeout_seconds
        if num_workers:
            options["timeout"] = LOOK_SECONDS  # interval at which torch checks for dead workers
        if self._hands_over_blocks and prefetch_factor is not None and prefetch_factor > 2:
            prefetch_factor = max(2, -(-prefetch_factor // self._block_batches))
        super().__init__(
            dataset,
            batch_size=None,
            num_workers=num_workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            collate_fn=cast(Any, convert_fn),
            **options,
        )
        self._memory: BlockMemory | None = None
        self._team, self._round = 0, 0  # number of the worker team, and number of its iterations
        self._batches = dataset
        dataset.loop_logs = True
        self._cursor = dataset.next
        self._own_iterations: tuple[int, ...] = (dataset.iteration,)
        self._follows_other = False  # whether another DataLoader iterated last
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
        self._follows_other = False
        self._own_iterations = (number, number + 1)  # the number grows when the iterator or workers begin
        self._round += 1
        source: Any = self._begin_workers() if self.num_workers else super().__iter__()
        if self._hands_over_blocks:
            source = deal(source, self.num_workers)
        delivery = _Delivery(self, source)
        dataset.received = self._cursor
        self._delivery = weakref.ref(delivery)
        return delivery

    def _begin_workers(self) -> Iterator[Any]:
        """Start the workers, or restart persistent ones, with a limit on the wait for each of them."""
        if self._iterator is not None:
            self._iterator._timeout = self._timeout_seconds  # longest wait until all workers have begun
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
        """Return torch's iterator and start its workers."""
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
        """Return the number of batches in the next batch's epoch, with delivered ones; equal on all ranks."""
        self._follow_dataset()
        loader = self._batches.loader
        return loader.epoch_batches(loader.start_of(self._cursor))

    def state_dict(self) -> State:
        """Return the loop's position and settings as plain data, equal on every rank."""
        self._follow_dataset()
        return self._batches.loader.state_at(self._cursor)

    def load_state_dict(self, state: Mapping[str, object], *, on_mismatch: OnMismatch = "error") -> None:
        """Continue where `state` was taken, as `StreamingLoader.load_state_dict` does; end the iterator."""
        self._end_delivery()
        self._batches.load_state_dict(state, on_mismatch=on_mismatch)
        self._follow_dataset()
        self._iterator = None  # ends persistent workers, too: settings may have changed with the position

    def seek(self, consumed_samples: SupportsIndex) -> None:
        """Continue at this position, as `StreamingLoader.seek` does; end the live iterator."""
        self._end_delivery()
        self._batches.seek(consumed_samples)
        self._follow_dataset()

    def set_epoch(self, epoch: int) -> None:
        """Move to an epoch as `StreamingDataset.set_epoch` does; end the iterator if the position moves.

        Raises ValueError if another DataLoader ended an epoch, and a trainer now leaves out the next one.
        """
        self._follow_dataset()
        if self._follows_other:
            self._batches.refuse_gap(self._cursor, epoch)
        self._batches.move_to_epoch(self._cursor, epoch)
        self._follow_dataset()

    def close(self) -> None:
        """Stop the workers and prefetching."""
        self._end_delivery()
        self._iterator = None
        self._stop_together.close()
        self._batches.close()

    def _follow_dataset(self) -> None:
        """Adopt the dataset's position if the dataset was moved, or another DataLoader has iterated over it.

        Accelerate's `skip_first_batches` creates such a DataLoader for the rest of an epoch.
        """
        number = self._batches.iteration
        if number not in self._own_iterations:
            self._end_delivery()
            self._cursor, self._own_iterations = self._batches.next, (number,)
            self._follows_other = True

    def _end_delivery(self) -> None:
        delivery = self._delivery() if self._delivery is not None else None
        if delivery is not None:
            delivery.source = None  # ends the workers, unless they are persistent
        self._delivery = None


class _Delivery:
    """An iteration of a `StreamingDataLoader`. Dropping it ends its workers, as with torch's iterator."""

    def __init__(self, owner: StreamingDataLoader, source: Iterator[Batch]) -> None:
        self.source: Iterator[Batch] | None = source
        self._owner, self._loader = owner, owner._batches.loader

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self.source is None:
            raise RuntimeError(
                "stale iterator: it failed, or its loader was closed, re-iterated, or had a state loaded: "
                "call iter(loader) again"
            )
        owner = self._owner
        plan = self._loader.plan
        owner._stop_together.check()
        try:
            batch = next(self.source)
        except StopIteration:
            raise
        except Exception as error:
            self.source = None  # prevents further use: torch's iterator would skip the missing batch
            if owner.num_workers:
                # Otherwise the traceback keeps torch's iterator and its workers alive until it is garbage.
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
