"""`StreamingDataset`: delivers batches to a DataLoader; each worker makes its share of them.

Each worker has its own loader, because threads, locks and connections do not survive a fork. Worker w of k
makes the batches w, w + k, ..., counted from the start of the iteration. Workers must agree only on that
start; `SharedCursor` holds it in shared memory.
"""

from __future__ import annotations

import copy
import errno
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, SupportsIndex, Unpack, cast, overload

import numpy as np

from shardkit.errors import StateError, naming_extras

with naming_extras("shardkit.loaders.streaming_dataset"):
    from torch.utils.data import IterableDataset, get_worker_info
    from torch.utils.data._utils.fetch import _BaseDatasetFetcher

from shardkit.datasets.dataset import Dataset
from shardkit.loaders.batch import Batch
from shardkit.loaders.config import RunOptions, Stream
from shardkit.loaders.loader import StreamingLoader
from shardkit.loaders.producer import Group, Portion
from shardkit.loaders.shared_cursor import SharedCursor, Worker
from shardkit.loaders.worker_blocks import Block, BlockMemory, forking_workers
from shardkit.loaders.worker_signals import leave_to_trainer, signals_held_back
from shardkit.order.batches import BatchPlan, Cursor
from shardkit.order.state import LoaderState, OnMismatch

State = dict[str, object]

_CALLERS = 16  # number of stack frames searched for a DataLoader or Accelerate, which is about five away

_REGROUPING = ("DataLoaderDispatcher", "IterableDatasetShard")  # classes of Accelerate that regroup batches

_WORKER = "worker"  # key in a worker's state, in addition to the keys of a loader's state


class StreamingDataset(IterableDataset[Batch]):
    """Batches for `DataLoader(dataset, batch_size=None, num_workers=…)`; arguments as in `StreamingLoader`.

    Give the DataLoader `batch_size=None`; otherwise it would make batches of batches. Pickled copies are
    independent.
    """

    __signature__ = inspect.signature(StreamingLoader)  # so that help() and notebooks show every argument

    def __init__(
        self,
        dataset: str | os.PathLike[str] | Dataset | Sequence[Stream],
        *,
        batch_size: int,
        rank: int | None = None,
        world_size: int | None = None,
        **options: Unpack[RunOptions],
    ) -> None:
        self._arguments: dict[str, Any] = {"batch_size": batch_size, **options}
        loader = StreamingLoader(dataset, rank=rank, world_size=world_size, **self._arguments)
        self._arguments |= {"rank": loader.rank, "world_size": loader.world_size}
        for name in ("mesh", "group"):  # these objects are valid in this process only, not in workers
            self._arguments.pop(name, None)
        self._loader: StreamingLoader | _Closed = loader
        self._inherited: object = None
        self._process: int | None = os.getpid()
        self._shared = SharedCursor((0, 0), self._settings())
        self._began: Cursor = (0, 0)  # start of the last iteration without workers
        self._share: _Share | None = None  # in a worker: its share of the iteration
        self._saved: _Share | None = None  # in a worker: the loaded share that it will continue
        self._round = 0
        self._was_placed = False  # whether a state or position was set after the last batch was requested
        self.received: Cursor | None = None
        """Cursor after the last batch that a StreamingDataLoader's loop received; None for other loops."""
        self.loop_logs = False
        """Whether the loop that receives the batches calls `log_received`."""
        self._team = 0  # number of the worker team of a StreamingDataLoader, below 0; 0: none
        self._blocks: tuple[BlockMemory, int] | None = None  # memory of blocks, maximum batches per block

    @property
    def loader(self) -> StreamingLoader:
        """The loader of this process; another process needs its own threads, locks and connections."""
        if self._process != os.getpid():
            state, arguments = self._loader.state_dict(), dict(self._arguments)
            if get_worker_info() is not None and arguments.get("usage_log") is not None:
                arguments |= self._usage_arguments()
            loader = StreamingLoader(_own_copies(self._loader.streams), **arguments)
            loader.load_state_dict(state)
            loader.machine_ranks = self._loader.machine_ranks
            # Kept, because destroying an inherited loader in a forked child could wait for parent threads.
            self._inherited, self._loader, self._process = self._loader, loader, os.getpid()
        assert isinstance(self._loader, StreamingLoader)
        return self._loader

    def __len__(self) -> int:
        """Return the number of batches in the next batch's epoch, with delivered ones; equal on all ranks."""
        return self.loader.epoch_batches(self.next)

    def __iter__(self) -> Iterator[Batch]:
        self._refuse_regrouping()
        info = get_worker_info()
        if info is None:
            return self._iterate()
        leave_to_trainer()
        self._round += 1
        try:
            seed = self._team or info.seed - info.id
            return self._iterate_share(Worker(info.id, info.num_workers, seed, self._round))
        except Exception as error:
            # Raise it in next(): an error in iter() would end a persistent worker and not reach the loop.
            return map(_raise, (error,))

    @overload
    def state_dict(self, num_batches: int | None = None) -> State: ...
    @overload
    def state_dict(self, num_samples: int, from_beginning: bool, /) -> State: ...
    def state_dict(self, num_batches: int | None = None, from_beginning: bool | None = None) -> State:
        """Return the state after the loop has received `num_batches` batches of the current iteration.

        Default: all delivered batches. With workers the number is required (else ValueError), because only
        the loop knows it, unless the loop iterates over a StreamingDataLoader, which informs the dataset.
        Pass 0 only before an iteration, not after its start. In a worker, returns the worker's own state for
        torchdata's StatefulDataLoader; `state_of` reads it.

        With `from_beginning`, as Composer calls it, the first number counts samples over all ranks since the
        start of the epoch (True) or of this iteration (False). It is ignored if the loop iterates over a
        StreamingDataLoader.
        """
        if self._share is not None:
            return self._share.state(self.loader)
        if from_beginning is not None:
            return self._state_after_samples(num_batches or 0, from_beginning)
        plan, shared = self.loader.plan, self._shared.read()
        if num_batches is None:
            if not shared.by_workers:
                return self.loader.state_dict()
            if self.received is None:
                raise ValueError(
                    "the dataset does not know how many batches its workers delivered: give state_dict the "
                    "number of batches that the loop has received so far, or use StreamingDataLoader"
                )
            return self.loader.state_at(self.received)
        if not num_batches:
            return self.loader.state_at(self.next)
        start = shared.start if shared.by_workers else self._began
        if not self.loader.config.endless and num_batches > plan.batches_left(start[0]):
            raise ValueError(f"the iteration has {plan.batches_left(start[0])} batches, not {num_batches}")
        return self.loader.state_at(plan.advance(start, num_batches))

    def _state_after_samples(self, num_samples: int, from_beginning: bool) -> State:
        """Return the state after `num_samples` samples of the epoch or of this iteration."""
        if self.received is not None:
            return self.loader.state_at(self.received)
        plan, shared = self.loader.plan, self._shared.read()
        start = shared.start if shared.by_workers else self._began
        batches, rest = divmod(num_samples, plan.global_batch)
        before = plan.delivered(start) if from_beginning and batches else 0
        if rest or batches < before:
            raise ValueError(
                f"{num_samples} samples over all ranks cannot be what this iteration has delivered: it began "
                f"with batch {before} of its epoch, and a global batch has {plan.global_batch} samples"
            )
        return self.state_dict(batches - before)

    def load_state_dict(self, state: Mapping[str, object], *, on_mismatch: OnMismatch = "error") -> None:
        """Continue where `state` was taken, as `StreamingLoader.load_state_dict` does.

        If the DataLoader has persistent workers and the state changes lanes, window or weights, create a new
        DataLoader.
        """
        if get_worker_info() is not None:
            self._saved = self._saved_share(state)
            return
        if _WORKER in state:
            raise StateError("this is the state of one worker: load state_of(the whole state) instead")
        self.loader.load_state_dict(state, on_mismatch=on_mismatch)
        self.start_at(self.loader.cursor)
        self._was_placed = True

    def seek(self, consumed_samples: SupportsIndex) -> None:
        """Continue at a position in samples over all ranks and epochs, as `StreamingLoader.seek` does."""
        self.loader.seek(consumed_samples)
        self.start_at(self.loader.cursor)
        self._was_placed = True

    def set_epoch(self, epoch: int) -> None:
        """Continue with the first batch of `epoch`; do nothing if the next batch is already in that epoch.

        Trainers call this before each epoch, and after a restart with an epoch that they computed from steps.
        Raises ValueError if that epoch may differ from the data's epoch: after a state was loaded or a
        position was set that is in another epoch, and if epochs differ in length, because batches of
        tail="carry" span epochs. Does nothing with `endless`, which has no epochs.
        """
        self._refuse_regrouping()
        self.move_to_epoch(self.next, epoch)

    def refuse_gap(self, cursor: Cursor, epoch: int) -> None:
        """Raise ValueError if an epoch begins at `cursor` that `set_epoch(epoch)` would leave out.

        The Trainer of transformers 5 resumes so: it skips batches in the first epoch instead of its own.
        """
        plan, config = self.loader.plan, self.loader.config
        current = plan.epoch(cursor[0])
        begins = plan.start(cursor[0]) == current * plan.samples > 0
        if begins and epoch > current and not (config.restart or config.endless):
            raise ValueError(
                f"set_epoch({epoch}), but another DataLoader has just read the end of epoch {current - 1}: a "
                "resumed trainer skipped batches in the wrong epoch and trained on samples again. Resume by "
                "shardkit.loaders.integrations.hugging_face.StreamingTrainer, or with ignore_data_skip=True "
                "and the loader's own state"
            )

    def move_to_epoch(self, cursor: Cursor, epoch: int) -> None:
        """Do what `set_epoch` does, for a loop that is at `cursor`."""
        loader = self.loader
        plan, config = loader.plan, loader.config
        current = plan.epoch(cursor[0])
        if epoch == current or config.restart or config.endless:
            return
        if self._was_placed:
            raise ValueError(
                f"set_epoch({epoch}), but the loaded state or the position set by seek is in epoch {current}"
                ": let the trainer skip no batches and start at that epoch, or load no state"
            )
        if plan.tail == "carry" and plan.samples % plan.global_batch:
            raise ValueError(
                f"set_epoch({epoch}), but the next batch is in epoch {current}: with tail='carry', epochs of "
                f"{plan.samples:,} samples differ in their number of batches of {plan.global_batch:,}, and a "
                "trainer that computes its epoch from steps would continue with other samples. Use "
                "load_state_dict or seek(consumed samples) to continue, and let the trainer skip no batches "
                "(ignore_data_skip=True in the Hugging Face Trainer); or use tail='drop' or 'pad'; or use "
                "endless=True and max_steps"
            )
        loader.seek(plan.first_batch(epoch))
        self.start_at(loader.cursor)

    def start_at(self, cursor: Cursor, *, left: tuple[int, int] = (0, 0)) -> None:
        """Start the next iteration, with or without workers, at (position, batches delivered in its epoch).

        `left`: see `SharedCursor.begin`.
        """
        if cursor != self.loader.cursor:
            self.loader.load_state_dict(self.loader.state_at(cursor))
        self._began, self.received, self._was_placed = cursor, None, False
        self._shared.begin(cursor, self._settings(), left=left)

    def log_received(self, batch: Batch, start: Cursor, after: Cursor) -> None:
        """Record in the usage log, if there is one, a batch that a worker made and the loop received.

        Removes the batch's ids if the user did not request them with `return_ids`.
        """
        if (usage := self.loader.usage) is None:
            return
        rename = self.loader.config.rename or {}
        sample_id, stream_id = (rename.get(name, name) for name in ("sample_id", "stream_id"))
        if not isinstance(batch, dict) or sample_id not in batch:
            raise ValueError(f"usage_log with workers: batches must be dicts that keep {sample_id}")
        ids = np.asarray(batch[sample_id])
        if stream_id in batch:
            starts = np.cumsum([0, *map(len, self.loader.datasets)])
            ids = np.where(ids < 0, -1, ids + starts[np.asarray(batch[stream_id])])
        usage.step(self.loader.plan.start(start[0]), ids, after[0])
        if not self._arguments.get("return_ids", False):
            batch.pop(sample_id)
            batch.pop(stream_id, None)

    @contextmanager
    def starting_workers(
        self, team: int, blocks: tuple[BlockMemory, int] | None, start_method: str
    ) -> Iterator[None]:
        """Context manager for starting workers by `start_method`. They get the team number `team`, below 0.

        `blocks`: memory and maximum batches of the blocks that workers send; None: they send single batches.
        """
        self._team, self._blocks = team, blocks
        try:
            with forking_workers(), signals_held_back(start_method):
                yield
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            problem = "/dev/shm has no space for the locks of DataLoader workers (docker run --shm-size)"
            raise OSError(error.errno, problem) from error
        finally:
            self._team, self._blocks = 0, None

    def _refuse_regrouping(self) -> None:
        """Raise TypeError if the caller would rebatch the batches, or send one rank's batches to all ranks.

        A dataset does not know what iterates over it, so this checks the call stack.
        """
        frame: FrameType | None = sys._getframe(2)
        for _ in range(_CALLERS):
            if frame is None:
                return
            caller, frame = frame.f_locals.get("self"), frame.f_back
            name = type(caller).__name__
            if isinstance(caller, _BaseDatasetFetcher) and caller.auto_collation:
                raise TypeError(
                    "a StreamingDataset delivers whole batches, and DataLoader(dataset) would make batches "
                    "of them: use StreamingDataLoader(dataset), or DataLoader(dataset, batch_size=None, "
                    "collate_fn=unchanged); for a trainer that creates the DataLoader itself use a MapDataset"
                )
            if name in _REGROUPING and self.loader.world_size > 1:
                raise TypeError(
                    f"Accelerate's {name} would send one rank's batches to all ranks and never read the "
                    "others': give accelerator.prepare a StreamingDataLoader, which it does not change; for "
                    "a trainer that creates the DataLoader itself use a MapDataset"
                )

    def _usage_arguments(self) -> dict[str, Any]:
        """Return loader arguments for a worker, whose parent process logs the batches that it receives."""
        if not self.loop_logs:
            raise ValueError(
                "usage_log records the batches that the loop receives, which workers do not know: "
                "use StreamingDataLoader, or no workers"
            )
        return {"usage_log": None, "return_ids": True}

    def close(self) -> None:
        """Stop prefetching and close the shards."""
        self.loader.close()

    @property
    def next(self) -> Cursor:
        """The cursor where the next iteration starts: (position, batches delivered in its epoch)."""
        shared = self._shared.read()
        return self.loader.start_of(shared.next if shared.by_workers else self.loader.cursor)

    @property
    def iteration(self) -> int:
        """Number of the iteration, in this process or its workers, that began last; it only increases."""
        return self._shared.read().iteration

    def _settings(self) -> int:
        """Return a digest of the loader's settings, on which batches depend besides cursor and arguments."""
        text = json.dumps(self.loader.state_at((0, 0)), sort_keys=True)
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")

    def _iterate(self) -> Iterator[Batch]:
        self.start_at(self.next)
        return self._deliver(self.loader.iterate())

    def _deliver(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        loader, shared = self.loader, self._shared
        for batch in batches:
            shared.move(loader.cursor)
            yield batch

    def _iterate_share(self, worker: Worker) -> Iterator[Any]:
        loader, saved = self.loader, self._saved
        self._saved = None
        iteration, start = self._shared.enter(worker, self._settings(), saved.start if saved else None)
        self._share = share = _Share(worker, start, saved.made if saved else 0)
        loader.load_state_dict(loader.state_at(start))
        left = None if loader.config.endless else loader.plan.batches_left(start[0])
        most = None if left is None else max(0, -(-(left - worker.number) // worker.count))

        def count(made: int) -> None:
            share.made += made
            if left is not None and share.made >= cast(int, most):
                self._shared.mark_done(worker, iteration, loader.start_of(loader.plan.advance(start, left)))

        count(0)
        # Blocks of several batches are read ahead already; a thread would only compete for the GIL.
        reads_ahead = self._blocks is None or self._blocks[1] == 1
        first = worker.number + share.made * worker.count
        makes_batches = self._blocks is None
        groups = loader.groups(Portion(first, worker.count, reads_ahead, makes_batches))
        if self._blocks is not None:
            return self._share_in_blocks(groups, count, *self._blocks)
        return _share_in_batches(groups, count)

    def _share_in_blocks(
        self, groups: Iterator[Group], count: Callable[[int], None], memory: BlockMemory, most_batches: int
    ) -> Iterator[Block]:
        assert self._share is not None
        outbox = memory.outbox(self._share.worker.number, self.loader.output)
        for block in outbox.blocks(groups, most_batches):
            count(block.count)
            yield block

    def _saved_share(self, state: Mapping[str, object]) -> _Share:
        """Return, in a worker, the share of an iteration with which the loaded `state` continues."""
        info = get_worker_info()
        assert info is not None
        share = cast(dict[str, int], state.get(_WORKER, {}))
        self.loader.load_state_dict({name: value for name, value in state.items() if name != _WORKER})
        expected = {
            "number": info.id,
            "count": info.num_workers,
            "global_batch": self.loader.plan.global_batch,
        }
        if share and expected != {name: share.get(name) for name in expected}:
            raise StateError(
                f"the state belongs to worker {share}, but this is worker {expected}: to continue with "
                "another number of workers or batch size, load state_of(the whole state)"
            )
        return _Share(Worker(info.id, info.num_workers, 0, 0), self.loader.cursor, share.get("made", 0))

    def __getstate__(self) -> dict[str, Any]:
        loader = self._loader
        return self.__dict__ | {
            "_loader": _Closed(loader.streams, loader.state_dict(), loader.machine_ranks),
            "_inherited": None,
            "_process": None,
            "_share": None,
            "_saved": None,
            "_round": 0,
            "received": None,
        }


def state_of(state: Mapping[str, Any]) -> State:
    """Extract the plain state from a state of torchdata's StatefulDataLoader over a `StreamingDataset`.

    `StreamingLoader`, `StreamingDataLoader` and the dataset itself load the result, with any number of
    workers. Raises StateError if `state` contains no such state.
    """
    try:
        if "_snapshot" not in state:
            return dict(state["dataset_state"])
        snapshot = state["_snapshot"]
        saved = snapshot["_worker_snapshots"]["worker_0"]["dataset_state"]
        share = saved[_WORKER]
        batches = snapshot["_snapshot_step"] + state["_steps_since_snapshot"]
    except (KeyError, TypeError) as error:
        raise StateError(
            "not a state of a StatefulDataLoader (torchdata 0.11) over a StreamingDataset: "
            f"{type(error).__name__} {error}"
        ) from error
    plain = {name: value for name, value in saved.items() if name != _WORKER}
    loaded = LoaderState.from_dict(plain)
    settings = loaded.settings
    plan = BatchPlan(settings.epoch_samples, share["global_batch"], 0, 1, settings.tail)
    position, epoch_batches = plan.advance((loaded.position, loaded.epoch_batches), batches)
    return replace(loaded, position=position, epoch_batches=epoch_batches).to_dict()


@dataclass(slots=True)
class _Share:
    """A worker's share of an iteration; `made`: how many batches of the share it has made."""

    worker: Worker
    start: Cursor
    made: int

    def state(self, loader: StreamingLoader) -> State:
        share = {
            "number": self.worker.number,
            "count": self.worker.count,
            "made": self.made,
            "global_batch": loader.plan.global_batch,
        }
        return loader.state_at(self.start) | {_WORKER: share}


@dataclass(frozen=True, slots=True)
class _Closed:
    """The parts of a loader that a pickle of the dataset contains."""

    streams: list[Stream]
    state: State
    machine_ranks: tuple[int, ...] | None

    def state_dict(self) -> State:
        return self.state


def _share_in_batches(groups: Iterator[Group], count: Callable[[int], None]) -> Iterator[Batch]:
    for group in groups:
        for batch in group.batches:
            count(1)
            yield batch


def _own_copies(streams: Sequence[Stream]) -> list[Stream]:
    """Return the streams with copies of their datasets, each with its own locks, threads and connections.

    Streams that share a dataset share its copy.
    """
    copies = {id(stream.path): copy.copy(cast(Dataset, stream.path)) for stream in streams}
    return [replace(stream, path=copies[id(stream.path)]) for stream in streams]


def _raise(error: Exception) -> Batch:
    raise error
