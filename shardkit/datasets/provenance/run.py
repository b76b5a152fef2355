"""Compute where a training run delivers a row and which rows a step has, without reading samples.

The sample order maps positions to rows, so it gives the rows of a step; its inverse gives the positions of a
row, one per epoch of the row's stream. The loader's `BatchPlan` gives the positions of a step, provided that
batch size and world size are constant from position 0 on. All results are exact for a run of any length;
nothing is replayed.

Steps are counted from 1. With gradient accumulation, a step is one optimizer step, which takes `accumulate`
batches per rank.

A run is described by the state of its loader (`read_state`, `Run.from_state`), which fixes all settings
except batch size, world size and `balance`, or by the options of its loader (`Run.from_options`). With
balance, the rank of a row depends on the work of all rows of its global batch, as in the loader.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from shardkit.arrays import Ints
from shardkit.datasets.opened import OpenDataset
from shardkit.datasets.row_costs import open_row_costs
from shardkit.datasets.segments import find_eos_id
from shardkit.errors import ShardkitError, StateError, naming_extras
from shardkit.files import load_json
from shardkit.order.arrangement import Arrangement, first_settings
from shardkit.order.balance import Balance, DocumentIds, RowCosts, WorkBalance, cost_model
from shardkit.order.batches import BatchPlan, StepSizes
from shardkit.order.exclusions import Exclusions
from shardkit.order.order import Shuffle
from shardkit.order.run_settings import RunSettings, Tail
from shardkit.order.state import LoaderState
from shardkit.order.streams import MixedOrder, StreamOrder

_STATE_KEYS = {"position", "order_version", "streams", "tail"}

_MAX_STATE_BYTES = 64 << 20

_TORCH_ENDINGS = (".pt", ".pth", ".ckpt", ".bin")

NO_IDS = DocumentIds()

Keys = tuple[Any, ...]
"""Keys and indexes that lead to a value in nested mappings and lists."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """One delivery of a row by a run; `epoch` is the epoch of the row's stream, from 0.

    `step`, `rank` and `index` (in the rank's batch) are None if batch size and world size are not known. They
    are also None if `is_dropped`: the run drops the incomplete batch at the end of an epoch (tail="drop").
    `is_delivered` is true before the state's position. `batch` numbers the batches of the step from 1.
    """

    epoch: int
    position: int
    step: int | None = None
    rank: int | None = None
    index: int | None = None
    is_dropped: bool = False
    is_delivered: bool | None = None
    batch: int | None = None


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A sample of a step: row `row` of stream number `stream`, and its place in the step.

    `index` is its index in the batch of `rank`, `epoch` the epoch of the stream, `dataset` the stream's name,
    and `batch` the number of the batch within the step, from 1.
    """

    rank: int
    index: int
    position: int
    epoch: int
    stream: int
    dataset: str
    row: int
    batch: int = 1


class Run:
    """A training run: the deliveries of a loader with given settings and datasets, one dataset per stream.

    Without `batch_size`, positions are known, but not steps. `accumulate` is the number of batches per step,
    `delivered` the number of samples that the run has delivered (a state's position), None if unknown. Raises
    ShardkitError if a loader would refuse the batch size.
    """

    def __init__(
        self,
        settings: RunSettings,
        datasets: Sequence[OpenDataset],
        exclusions: Sequence[Exclusions | None],
        *,
        batch_size: int | None = None,
        world_size: int = 1,
        accumulate: int = 1,
        delivered: int | None = None,
        balance: Balance = None,
        ids: DocumentIds = NO_IDS,
        step_sizes: StepSizes | None = None,
    ) -> None:
        self.settings, self.datasets, self.delivered = settings, tuple(datasets), delivered
        if accumulate < 1:
            raise ShardkitError(f"accumulate: must be at least one batch per step, not {accumulate}")
        self.accumulate = accumulate
        named = zip(settings.streams, datasets, strict=True)
        self.names = tuple(stream.name or dataset.location for stream, dataset in named)
        streams = zip(datasets, self.names, exclusions, strict=True)
        sizes = [dataset.stream_sizes(name, excluded) for dataset, name, excluded in streams]
        order = Arrangement(settings, sizes).order
        self._order = order
        self._mixed = order if isinstance(order, MixedOrder) else None
        self._orders = order.streams if isinstance(order, MixedOrder) else (order,)
        self.plan: BatchPlan | None = None
        self._balance: WorkBalance | None = None
        if batch_size is not None:
            try:
                self.plan = BatchPlan(settings.epoch_samples, batch_size, 0, world_size, settings.tail)
                if (model := cost_model(balance)) is not None and world_size > 1:
                    self._balance = WorkBalance(self._row_costs(ids), model, step_sizes)
            except ValueError as error:
                raise ShardkitError(str(error)) from error

    @classmethod
    def from_state(
        cls,
        state: LoaderState,
        datasets: Sequence[OpenDataset],
        exclusions: Sequence[Exclusions] = (),
        *,
        batch_size: int | None = None,
        world_size: int = 1,
        accumulate: int = 1,
        balance: Balance = None,
        ids: DocumentIds = NO_IDS,
    ) -> Self:
        """Make the run of a loader's state; `balance` and `ids` are the loader's options.

        `datasets` and `exclusions` may be in any order; they are matched with the state's streams by
        fingerprint and digest. Raises StateError if one is missing, or if the first dataset is not a stream.
        """
        settings, first = state.settings, datasets[0]
        by_fingerprint = {dataset.fingerprint: dataset for dataset in reversed(datasets)}
        by_digest = {each.digest: each for each in exclusions}
        for number, stream in enumerate(settings.streams):
            called = f"stream {stream.name or number!r} of the state" if settings.schedule else "the state"
            if stream.fingerprint not in by_fingerprint:
                hint = "give its path with --stream" if settings.schedule else "give that dataset's path"
                raise StateError(
                    f"{called} belongs to the dataset with fingerprint {stream.fingerprint}, but "
                    f"{first.location} has {first.fingerprint}: {hint}"
                )
            if stream.excluded and stream.excluded not in by_digest:
                raise StateError(
                    f"{called} excludes the rows of an exclusion list with digest {stream.excluded}: give "
                    "that list with --without"
                )
        if first.fingerprint not in {stream.fingerprint for stream in settings.streams}:
            raise StateError(f"the loader state has no stream that reads {first.location}")
        return cls(
            settings,
            [by_fingerprint[stream.fingerprint] for stream in settings.streams],
            [by_digest[stream.excluded] if stream.excluded else None for stream in settings.streams],
            batch_size=batch_size,
            world_size=world_size,
            accumulate=accumulate,
            delivered=state.position,
            balance=balance,
            ids=ids,
            step_sizes=state.step_sizes,
        )

    @classmethod
    def from_options(
        cls,
        dataset: OpenDataset,
        excluded: Exclusions | None = None,
        *,
        batch_size: int | None = None,
        world_size: int = 1,
        accumulate: int = 1,
        seed: int = 17,
        shuffle: Shuffle = "window",
        lanes: int | None = None,
        window: int | None = None,
        tail: Tail = "carry",
        balance: Balance = None,
        ids: DocumentIds = NO_IDS,
    ) -> Self:
        """Make the run of a loader with these options over one dataset; lanes and window default as in one.

        Raises ShardkitError if a loader would refuse the options.
        """
        try:
            if excluded is not None:
                shard_samples = dataset.manifest.shard_samples
                excluded = excluded.of_dataset(dataset.location, dataset.fingerprint, shard_samples)
            sizes = dataset.stream_sizes(dataset.location, excluded)
            settings = first_settings(
                [sizes], seed=seed, shuffle=shuffle, tail=tail, lanes=lanes, window=window
            )
        except ValueError as error:
            raise ShardkitError(str(error)) from error
        return cls(
            settings,
            [dataset],
            [excluded],
            batch_size=batch_size,
            world_size=world_size,
            accumulate=accumulate,
            balance=balance,
            ids=ids,
        )

    def _row_costs(self, ids: DocumentIds) -> list[RowCosts]:
        """Return the cost table of each stream. Raises the errors of `find_eos_id` and `open_row_costs`."""
        if ids.bos_id is None:
            once = dict(zip(self.datasets, self.names, strict=True))
            column, options = self.datasets[0].token_column, ["balance"]
            eos_id = find_eos_id([*once], [*once.values()], ids, column, options=options, needs_bounds=True)
            ids = replace(ids, eos_id=eos_id)
        return [open_row_costs(dataset, ids) for dataset in self.datasets]

    def streams_of(self, dataset: OpenDataset) -> list[int]:
        """Return the numbers of the streams that deliver a dataset."""
        streams = enumerate(self.settings.streams)
        return [number for number, each in streams if each.fingerprint == dataset.fingerprint]

    def to_dict(self) -> dict[str, int | str | None]:
        """Return settings, sizes and progress as plain data."""
        order, plan = self.settings.order, self.plan
        return {
            "seed": order.seed,
            "shuffle": order.shuffle,
            "lanes": order.lanes,
            "window": order.window,
            "tail": self.settings.tail,
            "batch_size": plan.batch_size if plan else None,
            "world_size": plan.world_size if plan else None,
            "accumulate": self.accumulate if plan else None,
            "position": self.delivered,
        }

    def epochs(self, stream: int) -> int:
        """Return the number of epochs of a stream that the run has begun; 1 if its progress is unknown."""
        if self.delivered is None:
            return 1
        delivered = self.delivered
        if self._mixed is not None:
            delivered = int(self._mixed.mixture.counts(delivered)[stream])
        return max(1, -(-delivered // max(1, self._orders[stream].samples)))

    def is_excluded(self, row: int, stream: int = 0) -> bool:
        """Return whether the run excludes this row of a stream."""
        excluded = self.exclusions_of(stream)
        return excluded is not None and bool(excluded.contains([row])[0])

    def exclusions_of(self, stream: int) -> Exclusions | None:
        """Return the rows that the run excludes of a stream; None if there are none."""
        order = self._orders[stream]
        return order.exclusions if isinstance(order, StreamOrder) else None

    def sightings(self, row: int, stream: int = 0, *, epochs: int) -> list[Sighting]:
        """List the deliveries of a row in its stream's first `epochs` epochs; empty for an excluded row."""
        if self.is_excluded(row, stream):
            return []
        found = []
        for epoch in range(epochs):
            position = self._position(row, stream, epoch)
            if position is None:
                break
            found.append(self._sighting(epoch, position))
        return found

    def batch(self, step: int) -> list[BatchRow]:
        """Return the rows of step `step`, counted from 1, of all ranks: batch by batch, rank by rank."""
        if step < 1:
            raise ShardkitError(f"there is no step {step}: steps are counted from 1")
        return self.batch_at(self._known_plan().start_of_step((step - 1) * self.accumulate + 1))

    def batch_at(self, position: int) -> list[BatchRow]:
        """Return the rows of the step whose first batch starts at this position."""
        rows: list[BatchRow] = []
        for number in range(1, self.accumulate + 1):
            start, count = self._known_plan().span_at(position)
            rows += self._global_batch(start, count, number)
            position = start + count
        return rows

    def _global_batch(self, start: int, count: int, number: int) -> list[BatchRow]:
        """Return the rows of batch `number` of a step, which has the `count` positions from `start` on."""
        plan = self._known_plan()
        located = self._order.locate(self._batch_in_places(start, count))
        rows = []
        columns = (located.position, located.epoch, located.sample_id)
        for index, (at, epoch, sample) in enumerate(zip(*(each.tolist() for each in columns), strict=True)):
            stream, row = 0, sample
            if self._mixed is not None:
                stream = int(np.searchsorted(self._mixed.first_samples, sample, side="right")) - 1
                row = sample - int(self._mixed.first_samples[stream])
            rank, place = plan.rank_of(index, count)
            rows.append(BatchRow(rank, place, at, epoch, stream, self.names[stream], row, number))
        return rows

    def _batch_in_places(self, start: int, count: int) -> Ints:
        """Return the positions of the global batch that starts at `start`, sorted by rank."""
        batch = self._order.global_batch(start, count)
        if self._balance is None:
            return batch
        placed: Ints = batch[self._balance.places(self._known_plan(), self._order, start)]
        return placed

    def _known_plan(self) -> BatchPlan:
        if self.plan is None:
            raise ShardkitError("the rows of a step depend on the batch size and the world size: give both")
        return self.plan

    def _position(self, row: int, stream: int, epoch: int) -> int | None:
        if self._mixed is not None:
            return self._mixed.position_of(row + int(self._mixed.first_samples[stream]), epoch)
        return int(self._orders[stream].positions_of([row], epoch)[0])

    def _sighting(self, epoch: int, position: int) -> Sighting:
        delivered = None if self.delivered is None else position < self.delivered
        if self.plan is None:
            return Sighting(epoch, position, is_delivered=delivered)
        step = self.plan.step_of(position)
        if step is None:
            return Sighting(epoch, position, is_dropped=True, is_delivered=False)
        start, count = self.plan.span_at(self.plan.start_of_step(step))
        batch = self._batch_in_places(start, count)
        rank, index = self.plan.rank_of(int(np.flatnonzero(batch == position)[0]), count)
        step, number = 1 + (step - 1) // self.accumulate, 1 + (step - 1) % self.accumulate
        return Sighting(epoch, position, step, rank, index, is_delivered=delivered, batch=number)


def read_state(path: Path) -> LoaderState:
    """Find the loader's state in a JSON file or a torch checkpoint, at any depth. Raises StateError."""
    return find_state(path)[0]


def find_state(path: Path) -> tuple[LoaderState, Keys]:
    """Find the loader's state as `read_state` does, and the keys that lead to it in the file."""
    states = find_states(path)
    if len(states) != 1:
        found = "no loader's state" if not states else f"{len(states)} different states of loaders"
        raise StateError(f"{path}: holds {found}: give the dict of StreamingLoader.state_dict() as JSON")
    return states[0]


def find_states(path: Path) -> list[tuple[LoaderState, Keys]]:
    """Find all different states in a file, with the keys that lead to each. Raises StateError."""
    try:
        if path.suffix in _TORCH_ENDINGS:
            data = _load_torch(path)
        else:
            if path.stat().st_size > _MAX_STATE_BYTES:
                raise StateError(f"{path}: is no loader's state: it exceeds {_MAX_STATE_BYTES:,} bytes")
            data = load_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StateError(f"{path}: cannot be read as JSON: {error}") from error
    states: dict[str, tuple[Mapping[str, Any], Keys]] = {}
    for state, keys in _states_in(data):
        states.setdefault(json.dumps(dict(state), sort_keys=True, default=str), (state, keys))
    return [(LoaderState.from_dict(state), keys) for state, keys in states.values()]


def _load_torch(path: Path) -> object:
    with naming_extras(f"reading {path.name}"):
        import torch
    try:
        return torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:  # pickle and torch raise errors of many types
        remedy = "give the state as JSON (`json.dump(loader.state_dict(), file)`)"
        if not zipfile.is_zipfile(path):
            problem = "is not a zip file, as torch writes since 1.6; older formats and bare pickles"
            raise StateError(f"{path}: {problem} cannot be read; {remedy}") from error
        if _is_torchscript(path):
            problem = "is a TorchScript program, which has no loader's state"
            raise StateError(f"{path}: {problem}; {remedy}") from error
        words = str(error).strip().partition("\n")[0][:200]  # without the advice that torch adds
        raise StateError(f"{path}: cannot be read as a checkpoint: {words}; {remedy}") from error


def _is_torchscript(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/constants.pkl") for name in archive.namelist())
    except (OSError, ValueError, zipfile.BadZipFile):
        return False


def _states_in(data: object, keys: Keys = ()) -> Iterator[tuple[Mapping[str, Any], Keys]]:
    """Yield all loader states in the nested mappings and lists of a checkpoint, with the keys to each."""
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(data, Mapping):
        if data.keys() >= _STATE_KEYS:
            yield data, keys
            return
        entries = data.items()
    elif isinstance(data, (list, tuple)):
        entries = enumerate(data)
    for key, value in entries:
        yield from _states_in(value, (*keys, key))
