"""The loader inside PyTorch's DataLoader, torchdata's StatefulDataLoader and samplers.

    StreamingDataset     for DataLoader(dataset, batch_size=None, num_workers=k): whole batches
    StreamingDataLoader  a DataLoader over it whose state is exact with any number of workers
    state_of             the plain state in one of torchdata's StatefulDataLoader
    MapDataset           single samples by number, for samplers and the Hugging Face Trainer

All give what `StreamingLoader` gives, batch for batch. A DataLoader takes its batch t from worker t % k, so
worker w of k makes the batches w, w + k, … of this rank and plans no others; each has a loader of its own.

A StreamingLoader alone prefetches with a thread and is faster than any of these: a DataLoader copies each
batch between processes. They are for code that wants a DataLoader, and for columns that are slow to decode.

**Leaving a `for` early.** Without workers the next `for` goes on with the next batch. With workers, only
`StreamingDataLoader` knows what the loop has received, and goes on exactly as well. Under a plain DataLoader
workers know what they made: the next `for` starts the epoch again, or the next one if all of its batches
were made (a loop left within the last prefetch_factor * num_workers ones); give the dataset
`load_state_dict(dataset.state_dict(batches))` to go on exactly.

Remote datasets: give `cache_dir`, which workers share. In memory, each worker would have a cache of its own.
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from shardkit.errors import naming_extras

with naming_extras("shardkit.loaders.pytorch"):
    import torch
    from torch.utils.data import DataLoader

from shardkit.loaders.batch import Batch
from shardkit.loaders.map_dataset import MapDataset
from shardkit.loaders.state import OnMismatch
from shardkit.loaders.stop_together import StopTogether
from shardkit.loaders.streaming_dataset import State, StreamingDataset, state_of

__all__ = ["MapDataset", "StreamingDataLoader", "StreamingDataset", "state_of", "unchanged"]


def unchanged(batch: Batch) -> Batch:
    """For `collate_fn`: torch's own would make tensors of the arrays in lists."""
    return batch


class StreamingDataLoader(DataLoader[Batch]):
    """A DataLoader whose state is exact: it counts what the loop has received.

    The state is that of `StreamingLoader`: either may load what the other saved, with another number of
    workers, batch size or world size. Leaving a `for` early and starting another goes on with the next batch.
    At any time one iterator is live. Arguments: as of DataLoader, the dataset makes the batches.
    """

    def __init__(
        self,
        dataset: StreamingDataset,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        collate_fn: Callable[[Batch], Any] = unchanged,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(
            dataset,
            batch_size=None,
            num_workers=num_workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            collate_fn=cast(Any, collate_fn),
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            generator=generator,
        )
        self._batches = dataset
        dataset.loop_logs = True
        self._cursor, self._loads = dataset.next, dataset.loads
        self._delivery: weakref.ref[_Delivery] | None = None
        self._stop_together = StopTogether(self, grace_seconds=dataset.loader.config.stop_grace_seconds)

    def __iter__(self) -> Any:
        self._end_delivery()
        self._follow_dataset()
        loader = self._batches.loader
        if self.num_workers:
            self._stop_together.watch(loader.rank, loader.world_size)
        self._batches.start_at(self._cursor)
        delivery = _Delivery(self, super().__iter__())
        self._delivery = weakref.ref(delivery)
        return delivery

    def __len__(self) -> int:
        """Batches of the epoch of the next batch, those already delivered included; equal on all ranks."""
        self._follow_dataset()
        return self._batches.epoch_batches(self._cursor)

    def state_dict(self) -> State:
        """Where the loop is, as plain data, the same on every rank."""
        self._follow_dataset()
        return self._batches.state_at(self._cursor)

    def load_state_dict(self, state: Mapping[str, object], *, on_mismatch: OnMismatch = "error") -> None:
        """Continue where `state` was taken, as `StreamingLoader.load_state_dict`. Ends the live iterator."""
        self._end_delivery()
        self._batches.load_state_dict(state, on_mismatch=on_mismatch)
        self._follow_dataset()
        self._iterator = None  # workers that persist: the state may have changed more than the position

    def close(self) -> None:
        """End the workers and prefetching."""
        self._end_delivery()
        self._iterator = None
        self._stop_together.close()
        self._batches.close()

    def _follow_dataset(self) -> None:
        """A state may have been loaded into the dataset itself."""
        if self._loads != self._batches.loads:
            self._cursor, self._loads = self._batches.next, self._batches.loads

    def _end_delivery(self) -> None:
        delivery = self._delivery() if self._delivery is not None else None
        if delivery is not None:
            delivery.source = None  # which ends the workers, unless they persist
        self._delivery = None


class _Delivery:
    """An iteration of a `StreamingDataLoader`. Workers end with it, as with torch's own."""

    def __init__(self, owner: StreamingDataLoader, source: Iterator[Batch]) -> None:
        self.source: Iterator[Batch] | None = source
        self._owner = owner

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self.source is None:
            raise RuntimeError(
                "this iterator has ended: it failed, or its loader was closed, iterated anew or given a state"
            )
        owner = self._owner
        plan = owner._batches.loader.plan
        owner._stop_together.check()
        try:
            batch = next(self.source)
        except StopIteration:
            raise
        except Exception as error:
            self.source = None  # torch's iterator would go on behind the batch that is missing
            if owner.num_workers:
                # Else the traceback keeps it, and its workers, until garbage is collected, by force.
                traceback.clear_frames(error.__traceback__)
                owner._stop_together.report(error, owner._cursor[0] // plan.global_batch)
            raise
        before, owner._cursor = owner._cursor, plan.advance(owner._cursor, 1)
        if owner.num_workers:
            owner._batches.log_received(batch, before, owner._cursor)
        return batch
