"""Opens the datasets of a loader as its `Stream`s say: exclusions, limits, names, weights, cache options."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardkit.cache.contract import CacheOptions
from shardkit.datasets.dataset import Dataset, open_dataset
from shardkit.loaders.config import ExcludedRows, LoaderConfig, Stream, Weights
from shardkit.loaders.readers.streams import Streams
from shardkit.order.exclusions import Exclusions
from shardkit.order.mixture import Schedule
from shardkit.order.order import OrderSpec
from shardkit.order.run_settings import MixtureSettings, RunSettings, StreamSettings, Tail
from shardkit.storage import StorageOptions
from shardkit.units import parse_bytes

__all__ = ["Opened", "named_weights", "open_streams"]


@dataclass(frozen=True, slots=True)
class Opened:
    """Open streams and what was asked for with them."""

    streams: Streams
    specs: tuple[Stream, ...]
    exclusions: tuple[Exclusions | None, ...]

    @property
    def kept(self) -> list[int]:
        """Samples of each stream that are not excluded."""
        return [
            len(dataset) - (excluded.count if excluded is not None else 0)
            for dataset, excluded in zip(self.streams.datasets, self.exclusions, strict=True)
        ]

    @property
    def limits(self) -> list[int | None]:
        """Samples that each stream may deliver in all."""
        return [spec.limit(kept) for spec, kept in zip(self.specs, self.kept, strict=True)]

    def settings(self, config: LoaderConfig, order: OrderSpec, tail: Tail) -> RunSettings:
        """The settings of a run over these streams. ValueError says what cannot be."""
        streams = tuple(
            StreamSettings(
                dataset.fingerprint, kept, spec.name or "", excluded.digest if excluded is not None else ""
            )
            for dataset, kept, spec, excluded in zip(
                self.streams.datasets, self.kept, self.specs, self.exclusions, strict=True
            )
        )
        return RunSettings(order, tail, streams, self.mixture(config))

    def mixture(self, config: LoaderConfig) -> MixtureSettings | None:
        """How the streams are mixed as configured; None for a single one. ValueError says what cannot be."""
        if len(self.streams) == 1:
            if config.schedule is not None or config.epoch_samples is not None:
                raise ValueError("schedule and epoch_samples belong to mixtures: give several streams")
            if not self.specs[0].weight:
                raise ValueError("the only stream has weight 0")
            return None
        names, kept = self.streams.names, self.kept
        entries = config.schedule or [(0, [spec.weight for spec in self.specs])]
        schedule = Schedule.of(named_weights(names, entries[0][1]))
        if entries[0][0] != 0:
            raise ValueError(f"a schedule begins at position 0, not {entries[0][0]}")
        for start, weights in entries[1:]:
            schedule = schedule.changed(start, named_weights(names, weights))
        for name, samples, weights in zip(
            names, kept, zip(*(s[1] for s in schedule.segments), strict=True), strict=True
        ):
            if any(weights) and not samples:
                raise ValueError(f"stream {name!r} has no samples, or all are excluded: leave it out")
        return MixtureSettings(schedule, config.epoch_samples or sum(kept))


def open_streams(
    dataset: str | os.PathLike[str] | Dataset | Sequence[Stream], config: LoaderConfig, processes: int
) -> Opened:
    """Open what a loader was given; `processes` of this machine divide its memory."""
    if isinstance(dataset, (str, os.PathLike, Dataset)):
        specs: tuple[Stream, ...] = (Stream(dataset),)
    else:
        specs = tuple(dataset)
        if not specs or not all(isinstance(spec, Stream) for spec in specs):
            raise TypeError(f"expected a path, a Dataset or a list of Stream, not {dataset!r:.200}")
    paths = [spec.path if isinstance(spec.path, Dataset) else os.fspath(spec.path) for spec in specs]
    to_open = dict.fromkeys(path for path in paths if not isinstance(path, Dataset))
    cache = _cache_options(config, processes, max(1, len(to_open)))
    storage = config.storage or StorageOptions()
    # A store must not fail before the loader does: it retries for as long as a batch is waited for.
    storage = replace(storage, retry_seconds=max(storage.retry_seconds, config.timeout_seconds))
    opened = {path: open_dataset(path, storage=storage, cache=cache) for path in to_open}
    datasets = [path if isinstance(path, Dataset) else opened[path] for path in paths]
    exclusions = [_exclusions(spec.exclude, found) for spec, found in zip(specs, datasets, strict=True)]
    streams = Streams(datasets, _names(specs, datasets), timeout_seconds=config.timeout_seconds)
    return Opened(streams, specs, tuple(exclusions))


def named_weights(names: Sequence[str], weights: Weights) -> list[float]:
    """Weights in the order of `names`; ValueError for an unknown name or a wrong number of them."""
    if isinstance(weights, Mapping):
        if unknown := [name for name in weights if name not in names]:
            raise ValueError(f"no stream is called {unknown[0]!r}; there are {', '.join(names)}")
        return [weights.get(name, 0) for name in names]
    if len(weights) != len(names):
        raise ValueError(f"{len(weights)} weights for {len(names)} streams ({', '.join(names)})")
    return list(weights)


def _cache_options(config: LoaderConfig, processes: int, streams: int) -> CacheOptions:
    """Of one stream: in memory each has a part of its own, a folder is shared by all."""
    capacity = None if config.cache_bytes is None else parse_bytes(config.cache_bytes)
    if config.cache_dir is None:
        processes *= streams
        capacity = None if capacity is None else capacity // streams
    return CacheOptions(
        folder=config.cache_dir,
        capacity=capacity,
        connections=-(-config.connections // streams),
        processes=processes,
    )


def _exclusions(excluded: ExcludedRows, dataset: Dataset) -> Exclusions | None:
    if excluded is None:
        return None
    if isinstance(excluded, (str, os.PathLike)):
        excluded = Exclusions.read(Path(excluded))
    elif not isinstance(excluded, Exclusions):
        excluded = Exclusions.of(excluded)
    if excluded.fingerprint not in (None, dataset.fingerprint):
        raise ValueError(
            f"the exclusion list names rows of the dataset with fingerprint {excluded.fingerprint}, and "
            f"{dataset.location} is {dataset.fingerprint}: its rows have other numbers"
        )
    excluded.kept_of_shards(dataset.manifest.shard_samples)  # ValueError for rows that are not there
    return excluded if excluded.count else None


def _names(specs: Sequence[Stream], datasets: Sequence[Dataset]) -> list[str]:
    """What the streams are called: as given, else the last part of their path, numbered where ambiguous."""
    found = [
        spec.name or dataset.location.rstrip("/").rpartition("/")[2] or str(number)
        for number, (spec, dataset) in enumerate(zip(specs, datasets, strict=True))
    ]
    given = Counter(spec.name for spec in specs if spec.name is not None)
    if twice := [name for name, count in given.items() if count > 1]:
        raise ValueError(f"two streams are called {twice[0]!r}: give each a name of its own")
    counts = Counter(found)
    return [
        name if counts[name] == 1 or spec.name is not None else f"{name}#{number}"
        for number, (name, spec) in enumerate(zip(found, specs, strict=True))
    ]
