"""`LengthLoader`: each batch has rows of one length; shares or a schedule select the length of each step.

    loader = LengthLoader(["out-2k", "out-8k", "out-32k"], tokens_per_batch=65_536)        # buckets
    loader = LengthLoader(["out-2k", "out-32k"], tokens_per_batch=65_536,
                          length_schedule=[(0, "out-2k"), (10_000, "out-32k")])             # curriculum

Each stream is a dataset of rows of one length, and a step takes all its rows, on all ranks, from one stream:
`tokens_per_batch` / length rows per rank, so every step has the same number of tokens. Dataset decomposition
trains this way (Pouransari et al. 2024, arXiv:2405.13226: buckets of documents by powers of two), and so do
curricula that grow the length (GrowLength, arXiv:2310.00576; SkyLadder, arXiv:2503.15450).

How it works: `shardkit.order.mixture` selects the stream of step k as it does for position k, so shares are
exact in every block, and the number of steps that each stream supplies before step k is computed, not
counted. Each stream has its own endless `StreamingLoader`. So each row of a stream comes once before any is
repeated, all ranks take the same number of steps, and the state is one number, `step`, besides constants. A
resumed run may have another number of ranks if the tokens per step over all ranks stay the same; then each
step has the same rows, too.

Streams share one cache. Fetching of a stream begins up to 1,024 steps before its first batch.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, SupportsIndex, TypeAlias, Unpack, cast

import numpy as np

from shardkit.errors import StateError
from shardkit.loaders.agreement import RankAgreement
from shardkit.loaders.batch import Batch
from shardkit.loaders.config import (
    LoaderConfig,
    LoaderOptions,
    RunOptions,
    Stream,
    Weights,
    flattened,
    grouped,
)
from shardkit.loaders.defaults import find_eos_id
from shardkit.loaders.loader import StreamingLoader
from shardkit.loaders.metrics import LoaderStats
from shardkit.loaders.peers import StopTogether
from shardkit.loaders.placement import find_place, local_processes
from shardkit.loaders.streams import named_weights, open_streams
from shardkit.order.mixture import Mixture, Schedule
from shardkit.order.state import OnMismatch
from shardkit.units import parse_bytes, whole_number

STATE_VERSION = 1
MAX_STEP = 1 << 40  # limit of steps, so that positions (steps times rows per step) stay below 2**62
_AHEAD = 1024  # number of steps planned at a time
_KEYS = {"version", "step", "tokens_per_step", "names", "lengths", "schedule", "runs"}
_MOVING = ("position", "epoch_batches")  # keys of a stream's state that are computed from `step` instead
_REFUSED = ("schedule", "epoch_samples", "mixed_lengths", "global_batch", "restart")

LengthSchedule: TypeAlias = "Sequence[tuple[int, str | Weights]]"
"""[(first step, stream), …], where stream is the name of one stream or a dict {name: share of steps}."""


class LengthLoader:
    """Iterates over batches whose rows have one length per step: {"tokens": int64[rows, length], …}.

    `streams`: datasets of rows of constant length, as paths or `Stream`. `tokens_per_batch`: tokens per rank
    and step, a multiple of each length (with labels="shifted", of each length less one). By default a
    stream's share of the steps is its share of all tokens, times its `weight`: with weights of 1, all streams
    end together, after len(loader) steps. `length_schedule` sets shares by step instead: a stream's name, or
    {name: share}. Further options are those of `StreamingLoader`; `tail` must be "carry". `return_ids` also
    adds `stream_id`. `usage_log`: each stream logs to a sub-folder with its name, for `shardkit audit DATASET
    --logs`.
    """

    def __init__(
        self,
        streams: Sequence[str | os.PathLike[str] | Stream],
        *,
        tokens_per_batch: int,
        length_schedule: LengthSchedule | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        **options: Unpack[RunOptions],
    ) -> None:
        flat = flattened(options)
        _refuse_options(flat)
        if isinstance(streams, (str, os.PathLike)) or not streams:
            raise TypeError("streams must be a list of paths or Stream objects, one for each length")
        specs = [spec if isinstance(spec, Stream) else Stream(spec) for spec in streams]
        names = ("seed", "shuffle", "tail", "dtype", "return_ids")
        config = LoaderConfig.of(cast(LoaderOptions, {k: v for k, v in options.items() if k not in names}))
        flat |= {"endless": True, "prefetch_bytes": parse_bytes(config.prefetch_bytes) // len(streams)}
        place = find_place(rank, world_size, mesh=config.mesh, group=config.group)
        self._opened = opened = open_streams(specs, config, local_processes(place), place=place)
        # Called only to raise ValueError if the streams have different tokenizers or eos ids.
        find_eos_id(opened.streams.once, config, opened.streams.datasets[0].token_column)
        self.names = opened.streams.names
        """Names of the streams: as given, or the last part of their paths."""
        self._seed = operator.index(options.get("seed", 17))
        self._endless = config.endless
        rename = config.rename or {}
        self._ids = [rename.get(name, name) for name in ("sample_id", "stream_id")]
        lengths = []
        for name, dataset in zip(self.names, opened.streams.datasets, strict=True):
            length = dataset.sequence_length
            if length is None:
                raise ValueError(f"stream {name!r} does not have token rows of one length")
            length -= config.labels == "shifted" and not config.keep_length
            lengths.append(length)
        sizes = [_batch_size(tokens_per_batch, *each) for each in zip(self.names, lengths, strict=True)]
        self._loaders = [
            StreamingLoader(
                [replace(spec, path=dataset, name=name, weight=1)],
                batch_size=size,
                rank=rank,
                world_size=world_size,
                **grouped(flat | _own(config, name)),
            )
            for name, spec, dataset, size in zip(
                self.names, specs, opened.streams.datasets, sizes, strict=True
            )
        ]
        self.lengths = tuple(lengths)
        """Delivered tokens per row of each stream."""
        self.tokens_per_step = tokens_per_batch * place.world_size
        """Tokens per step over all ranks."""
        self._tokens = [n * length for n, length in zip(opened.kept, lengths, strict=True)]
        self._is_scheduled = length_schedule is not None
        self._adopt(self._schedule(length_schedule, [spec.weight for spec in specs]))
        self._step, self._iteration = 0, object()
        self._agreement = RankAgreement(place, StopTogether(self), timeout_seconds=config.timeout_seconds)
        self._running: dict[int, Iterator[Batch]] = {}

    def __iter__(self) -> Iterator[Batch]:
        # Ranks exchange data now for all streams; otherwise a stream would do it at its first step, mid-run.
        self._agreement.check(
            self.state_dict(), data=[dataset.fingerprint for dataset in self._opened.streams.datasets]
        )
        for loader in self._loaders:
            loader.prepare_workers(loader.cursor)
        for number, position in enumerate(self._positions(self._step)):
            if self._loaders[number].position != position:  # interrupted after reading, before counting
                self._running.pop(number, None)
                self._loaders[number].seek(position)
        self._iteration = object()
        return self._deliver(self._iteration)

    def _deliver(self, iteration: object) -> Iterator[Batch]:
        end = None if self._endless else (self._step // len(self) + 1) * len(self)
        planned: list[int] = []
        while end is None or self._step < end:
            if self._iteration is not iteration:
                raise RuntimeError(
                    "stale iterator: the loader was closed, re-iterated, or moved to another step"
                )
            if not planned:
                planned = self._plan()
            stream = planned.pop()
            try:
                batch = next(self._running[stream])
            except BaseException:
                self._running.pop(stream, None)
                raise
            self._step += 1
            sample_id, stream_id = self._ids
            if sample_id in batch:
                batch[stream_id] = batch[sample_id] * 0 + stream
            yield batch

    def _plan(self) -> list[int]:
        """Return the streams of the next steps in reverse order; start loaders that are not running yet."""
        streams, _ = self._mixture.locate(self._step, _AHEAD)
        for stream in np.unique(streams).tolist():
            if stream not in self._running:
                self._running[stream] = iter(self._loaders[stream])
        planned: list[int] = streams[::-1].tolist()
        return planned

    def __len__(self) -> int:
        """Return the number of steps in an epoch: all tokens divided by the tokens per step, at least 1."""
        return max(1, sum(self._tokens) // self.tokens_per_step)

    @property
    def step(self) -> int:
        """Steps delivered so far, over all epochs."""
        return self._step

    def stream_at(self, step: int) -> str:
        """Return the name of the stream that supplies the rows of a step."""
        return self.names[int(self._mixture.locate(step, 1)[0][0])]

    def stream_samples(self) -> dict[str, int]:
        """Return how many rows each stream has delivered so far, over all ranks and epochs."""
        return dict(zip(self.names, self._positions(self._step), strict=True))

    def seek(self, step: SupportsIndex) -> None:
        """Continue with this step, with the rows that an uninterrupted run would deliver there."""
        step = operator.index(step)
        if not 0 <= step < MAX_STEP:
            raise ValueError(f"step must be from 0 to 2**40 - 1, not {step:,}")
        for loader, position in zip(self._loaders, self._positions(step), strict=True):
            loader.seek(position)
        self._moved(step)

    def state_dict(self) -> dict[str, object]:
        """Return the loop's step and settings as plain data, equal on every rank."""
        runs = {}
        for number, loader in enumerate(self._loaders):
            state = loader.state_at((0, 0))
            runs[str(number)] = {name: value for name, value in state.items() if name not in _MOVING}
        return {
            "version": STATE_VERSION,
            "step": self._step,
            "tokens_per_step": self.tokens_per_step,
            "names": list(self.names),
            "lengths": list(self.lengths),
            "schedule": self._mixture.schedule.to_list(),
            "runs": runs,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, on_mismatch: OnMismatch = "error") -> None:
        """Continue where `state` was taken, also with another number of ranks.

        Raises StateError, which lists the differences, if anything else differs. A loader created with a
        `length_schedule` keeps it if it agrees with the saved one for all earlier steps. on_mismatch="fork"
        continues at the saved step even if data or seeds of streams differ, with this loader's own.
        """
        if not isinstance(state, Mapping) or set(state) != _KEYS or state["version"] != STATE_VERSION:
            raise StateError("not a state of a LengthLoader (version 1): load a state from its state_dict()")
        step, saved = state["step"], Schedule.from_list(state["schedule"])
        if type(step) is not int or not 0 <= step < MAX_STEP:
            raise StateError(f"the state's step must be a whole number below 2**40, not {step!r:.50}")
        for name, mine in (
            ("names", list(self.names)),
            ("lengths", list(self.lengths)),
            ("tokens_per_step", self.tokens_per_step),
        ):
            if state[name] != mine:
                advice = "; give tokens_per_batch that fits the ranks" if name == "tokens_per_step" else ""
                raise StateError(f"{name} is {state[name]!r:.200} in the state, {mine!r:.200} here{advice}")
        current = self._mixture.schedule
        schedule = current if self._is_scheduled else saved
        if not schedule.agrees_before(saved, step):
            raise StateError(
                f"length_schedule differs from the saved one before step {step:,}, where the run continues"
            )
        self._adopt(schedule)
        try:
            for number, (loader, position) in enumerate(
                zip(self._loaders, self._positions(step), strict=True)
            ):
                moving = dict(zip(_MOVING, loader.plan.cursor_at(position), strict=True))
                loader.load_state_dict({**state["runs"][str(number)], **moving}, on_mismatch=on_mismatch)
        except (StateError, KeyError, TypeError) as error:
            self._adopt(current)
            self.seek(self._step)
            raise StateError(f"stream {self.names[number]!r}: {error}") from error
        self._moved(step)

    def stats(self) -> dict[str, LoaderStats]:
        """Return this rank's waits and counters by stream name."""
        return {name: loader.stats() for name, loader in zip(self.names, self._loaders, strict=True)}

    def close(self) -> None:
        """Stop prefetching and close the shards; delivered batches stay valid."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._moved(self._step)
        self._loaders[0].__exit__(kind, error, trace)  # it is enough that one loader reports the error
        for loader in self._loaders[1:]:
            loader.close()
        self._opened.streams.close()

    def __repr__(self) -> str:
        lengths = ", ".join(f"{n}: {length:,}" for n, length in zip(self.names, self.lengths, strict=True))
        return f"LengthLoader({lengths}; {self.tokens_per_step:,} tokens per step, step {self._step:,})"

    def _adopt(self, schedule: Schedule) -> None:
        self._mixture = Mixture(self._seed, schedule, version=2)  # of states of STATE_VERSION 1

    def _positions(self, step: int) -> list[int]:
        """Return how many rows each stream delivers before `step`, over all ranks."""
        counts = self._mixture.counts(step).tolist()
        return [n * loader.plan.global_batch for n, loader in zip(counts, self._loaders, strict=True)]

    def _moved(self, step: int) -> None:
        self._step, self._iteration = step, object()
        self._running.clear()

    def _schedule(self, given: LengthSchedule | None, weights: Sequence[Any]) -> Schedule:
        """Return the schedule of each stream's share of the steps; raise ValueError if it is invalid."""
        if given is None:
            shares = [weight * tokens for weight, tokens in zip(weights, self._tokens, strict=True)]
            return Schedule.of(shares)
        entries = [(start, {what: 1} if isinstance(what, str) else what) for start, what in given]
        if not entries or entries[0][0] != 0:
            raise ValueError("the first entry of length_schedule must begin at step 0")
        schedule = Schedule.of(named_weights(self.names, entries[0][1]))
        for start, shares_by_name in entries[1:]:
            schedule = schedule.changed(operator.index(start), named_weights(self.names, shares_by_name))
        return schedule


def _refuse_options(options: Mapping[str, Any]) -> None:
    if options.get("tail", "carry") != "carry":
        raise ValueError("a LengthLoader needs tail='carry', because its streams continue across epochs")
    for name in _REFUSED:
        if options.get(name):
            raise ValueError(f"{name} is not an option of LengthLoader: leave it out")


def _batch_size(tokens_per_batch: int, name: str, length: int) -> int:
    tokens = whole_number(tokens_per_batch, "tokens_per_batch")
    if tokens < 1 or tokens % length:
        raise ValueError(
            f"tokens_per_batch of {tokens:,} is not a multiple of {length:,}, the length of stream {name!r}"
        )
    return tokens // length


def _own(config: LoaderConfig, name: str) -> dict[str, Any]:
    """Return the options whose values differ between streams."""
    return {} if config.usage_log is None else {"usage_log": Path(config.usage_log) / name}
