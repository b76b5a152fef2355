"""A run of all ranks by the loader's own plan, without reading a sample: what `shardkit audit` walks.

The order is the `Arrangement` that a loader makes of its state, the batches are those of `BatchPlan`, a
restart passes through the state's JSON and `resume`, and workers take turns as `StreamingDataset`'s do.
Only index and card of the datasets are read. A rank's plan costs what it costs in training: about 5 ns for
every position of the global batch and 100 ns for each of its own samples.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from shardkit.loaders.config import LoaderConfig
from shardkit.loaders.plan import Arrangement, BatchPlan, Cursor
from shardkit.loaders.state import LoaderState, Tail, resume
from shardkit.loaders.streams import Opened
from shardkit.order.order import OrderSpec, Shuffle
from shardkit.order.run_settings import RunSettings, StreamSettings

__all__ = ["PlannedRun", "first_state", "settings_of"]

_Ints = npt.NDArray[np.int64]


def settings_of(state: LoaderState, names: tuple[str, ...] = ()) -> RunSettings:
    """What a state says of the order, for an audit; `names` of the streams, where the state has none."""
    named = names or ("",) * len(state.streams)
    return RunSettings(
        order=state.order,
        tail=state.tail,
        streams=tuple(
            StreamSettings(stream.name or name, stream.fingerprint, stream.samples, stream.excluded)
            for stream, name in zip(state.streams, named, strict=True)
        ),
        epoch_samples=state.epoch_samples,
        schedule=None if state.mixture is None else state.mixture.schedule,
    )


def first_state(
    opened: Opened,
    config: LoaderConfig,
    plan: BatchPlan,
    *,
    seed: int = 17,
    shuffle: Shuffle = "window",
) -> LoaderState:
    """The state in which a loader of these options begins; lanes and window by default as the loader's."""
    lanes, window = config.lanes or 1, config.window or 1
    if shuffle == "window" and (config.lanes is None or config.window is None):
        from shardkit.loaders.defaults import stream_sizes
        from shardkit.loaders.readers.sources import open_source

        source = open_source(opened.streams, None, None, mixed_lengths=config.mixed_lengths)
        lanes, window = stream_sizes(opened.streams, plan, config, 1, source.stored_bytes)
    return LoaderState(
        position=0,
        epoch_batches=0,
        order=OrderSpec(seed, lanes, window, shuffle),
        tail=plan.tail,
        streams=opened.states(),
        mixture=opened.mixture(config),
    )


class PlannedRun:
    """All ranks of a run from its first step on; `workers` of a DataLoader in each rank (0: none)."""

    def __init__(
        self, opened: Opened, state: LoaderState, *, batch_size: int, world_size: int, workers: int = 0
    ) -> None:
        self._opened, self._first, self._workers = opened, state, workers
        self._cursor: Cursor = (state.position, state.epoch_batches)
        self._arrange(state)
        self._begin(batch_size, world_size, state.tail)

    @property
    def position(self) -> int:
        """Where the next step begins, as the loader says."""
        return self._cursor[0]

    def steps(self, most: int) -> _Ints:
        """The next 1 to `most` steps, all of one epoch: int64[steps, ranks, batch], -1 for padding."""
        plan = self._plans[0]
        left = plan.batches_left(self.position)
        count = min(most, left)
        ids = np.stack([self._of_rank(each, count) for each in self._plans], axis=1)
        self._cursor = plan.advance(self._cursor, count)
        return ids

    def restart(self, batch_size: int, world_size: int) -> None:
        """Go on from the state, as it comes out of a checkpoint, in a run of other ranks."""
        position, epoch_batches = self._cursor
        saved = replace(self._state, position=position, epoch_batches=epoch_batches)
        loaded = LoaderState.from_dict(json.loads(json.dumps(saved.to_dict())))
        self._arrange(resume(loaded, self._first, fixed=frozenset(), on_mismatch="error"))
        self._begin(batch_size, world_size, loaded.tail)

    def _arrange(self, state: LoaderState) -> None:
        opened = self._opened
        self._state = state
        self._cursor = (state.position, state.epoch_batches)
        self._arrangement = Arrangement(opened.streams, state, opened.exclusions, opened.limits)

    def _begin(self, batch_size: int, world_size: int, tail: Tail) -> None:
        samples = self._state.epoch_samples
        self._plans = [BatchPlan(samples, batch_size, rank, world_size, tail) for rank in range(world_size)]

    def _of_rank(self, plan: BatchPlan, count: int) -> _Ints:
        """int64[count, batch]: what a rank makes, itself or by its workers in turn."""
        if self._workers < 2:
            return self._planned(plan, self._cursor, count, 1)
        ids = np.empty((count, plan.batch_size), dtype=np.int64)
        for worker in range(min(self._workers, count)):
            cursor = plan.advance(self._cursor, worker)
            share = -(-(count - worker) // self._workers)
            ids[worker :: self._workers] = self._planned(plan, cursor, share, self._workers)
        return ids

    def _planned(self, plan: BatchPlan, cursor: Cursor, count: int, every: int) -> _Ints:
        steps = plan.steps(self._arrangement.order, cursor[0], count, every=every)
        return steps.sample_id.reshape(count, plan.batch_size)
