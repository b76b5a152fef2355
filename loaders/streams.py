"""Opens the datasets of a loader's `Stream`s and numbers their shards and samples consecutively.

`open_streams` applies the options of each `Stream`: exclusions, limits, name, weight. `Streams` numbers the
shards of all streams consecutively, so one plan can name rows of all streams and one reader gathers them.
Samples are numbered the same way; `split_ids` maps them back to their streams. Several streams may share one
dataset: its shards then have one number per stream, and `once` lists each dataset only once.

A remote dataset has one `CacheReader` per loader, because other loaders may read the same open dataset at
other positions. They belong to the loader's `CacheRun`, which fetches ahead for all of them.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import overload

import numpy as np
import numpy.typing as npt

from shardkit.cache import CacheOptions
from shardkit.cache.fetcher import Fetcher, FetchLimits
from shardkit.cache.protocol import Cache
from shardkit.cache.run import CacheRun
from shardkit.cache.shards import CachedShards, CacheReader, SharedCache
from shardkit.datasets.dataset import Dataset, open_dataset
from shardkit.datasets.opened import ShardReader
from shardkit.errors import ShardError
from shardkit.formats.trainers import TRAINER_FORMATS
from shardkit.loaders.config import ExcludedRows, LoaderConfig, MaskedTokens, Stream, Weights
from shardkit.loaders.placement import Place, first_rows, node_count, start_delay
from shardkit.manifest import ShardInfo
from shardkit.order.arrangement import StreamSizes, first_settings
from shardkit.order.exclusions import Exclusions
from shardkit.order.mixture import Schedule
from shardkit.order.order import Shuffle
from shardkit.order.run_settings import RunSettings, Tail
from shardkit.order.token_mask import TokenMask
from shardkit.storage import StorageOptions, is_remote

_OPENED_AT_ONCE = 8  # number of datasets opened in parallel; each sends two parallel requests

Columns = dict[str, npt.NDArray[np.generic] | list[object]]

ReadRows = Callable[[int, int], Columns]
"""A function (low, high) -> columns of the planned samples low to high - 1; it holds their shards open."""


class Streams:
    """One or more open datasets; several streams may share a dataset."""

    def __init__(
        self,
        datasets: Sequence[Dataset],
        names: Sequence[str],
        *,
        timeout_seconds: float | None = None,
        readers: Sequence[CacheReader | None] | None = None,
        run: CacheRun | None = None,
    ) -> None:
        """`timeout_seconds`: longest wait for a remote shard. `readers`, `run`: made here unless given."""
        assert datasets
        if readers is None:
            remote = {id(dataset): dataset.shards for dataset in datasets if dataset.shards is not None}
            made = {number: CacheReader(shards, timeout_seconds) for number, shards in remote.items()}
            readers = [made.get(id(dataset)) for dataset in datasets]
        self.readers = tuple(readers)
        """The cache reader of each stream; None for a local dataset."""
        self.run = run or CacheRun(list(dict.fromkeys(reader for reader in readers if reader is not None)))
        """The `CacheRun` that fetches ahead for all remote datasets."""
        self.datasets = tuple(datasets)
        self.names = tuple(names)
        shards = [dataset.manifest.shards for dataset in datasets]
        self._first_shards = [0, *accumulate(map(len, shards))]
        self.infos: Sequence[ShardInfo] = shards[0] if len(shards) == 1 else _Joined(shards)
        self._first_samples = np.array([0, *accumulate(map(len, datasets))], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.datasets)

    @cached_property
    def shard_samples(self) -> npt.NDArray[np.int64]:
        """Number of samples per shard: int64[shards]."""
        return np.concatenate([dataset.manifest.shard_samples for dataset in self.datasets])

    @cached_property
    def sharing(self) -> tuple[tuple[int, ...], ...]:
        """For each dataset of `once`, the numbers of the streams that share it."""
        found: dict[int, list[int]] = {}
        for number, dataset in enumerate(self.datasets):
            found.setdefault(id(dataset), []).append(number)
        return tuple(map(tuple, found.values()))

    @property
    def once(self) -> Streams:
        """These streams without repeated datasets: the first stream of each; self if no dataset is shared."""
        return self._distinct or self

    @cached_property
    def _distinct(self) -> Streams | None:
        """The object `once`, or None if it is self: a cached reference to self would be a garbage cycle."""
        if len(self.sharing) == len(self):
            return None
        names = [
            self.names[who[0]] if len(who) == 1 else self.datasets[who[0]].location for who in self.sharing
        ]
        first = [who[0] for who in self.sharing]
        return Streams(
            [self.datasets[i] for i in first], names, readers=[self.readers[i] for i in first], run=self.run
        )

    @cached_property
    def remote(self) -> tuple[CachedShards, ...]:
        """The cached shards of each remote dataset."""
        return tuple(dataset.shards for dataset in self.once.datasets if dataset.shards is not None)

    def by_cache(self) -> list[list[tuple[CachedShards, tuple[int, ...]]]]:
        """Return the remote datasets by the cache that they share, each with the numbers of its streams."""
        found: dict[tuple[Cache, Fetcher], list[tuple[CachedShards, tuple[int, ...]]]] = {}
        for dataset, who in zip(self.once.datasets, self.sharing, strict=True):
            if (shards := dataset.shards) is not None:
                found.setdefault((shards.cache, shards.fetcher), []).append((shards, who))
        return list(found.values())

    def in_datasets(self, shards: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Convert shard numbers of these streams to the numbers of the same shards in `once`."""
        if self.once is self:
            return shards
        stream = np.searchsorted(np.array(self._first_shards), shards, side="right") - 1
        numbers: npt.NDArray[np.int32] = shards + self._shifts[stream]
        return numbers

    def stream_of(self, shard: int) -> int:
        """Return the number of the stream that a shard belongs to."""
        return bisect_right(self._first_shards, shard) - 1

    def shard(self, number: int) -> ShardReader:
        """Return shard `number`, opened."""
        stream = self.stream_of(number)
        return self.datasets[stream].shard(number - self._first_shards[stream], self.readers[stream])

    def use(self, stream: int, numbers: Sequence[int]) -> list[int]:
        """Keep only the shards `numbers` of a stream open; return those that still have to be fetched."""
        reader = self.readers[stream]
        if reader is None:
            return []
        reader.using = frozenset(numbers)
        self.datasets[stream].keep_only(reader.using)
        return reader.missing(numbers)

    def progress(self) -> str:
        """Return a phrase for messages about the shard that is being waited for; "" if there is no wait."""
        return next(filter(None, (reader.progress() for reader in self.readers if reader is not None)), "")

    def exclusion_advice(self, shard: int, row: int) -> str:
        """Return, for messages, how to leave out row `row` of shard number `shard`."""
        stream = self.stream_of(shard)
        starts = self.datasets[stream].manifest.shard_starts
        number = int(starts[shard - self._first_shards[stream]]) + row
        return (
            f"Stream(path, exclude=[{number}]) leaves this row out, on all ranks; to continue the run from "
            "its state, use load_state_dict(state, on_mismatch='fork')"
        )

    def where(self, number: int) -> str:
        """Return a shard's path or URL."""
        stream = self.stream_of(number)
        return self.datasets[stream].where(number - self._first_shards[stream])

    def split(self, shards: npt.NDArray[np.int32]) -> Iterator[tuple[int, slice, npt.NDArray[np.int32]]]:
        """Yield for each stream: its number, its slice of sorted `shards`, their numbers in its dataset."""
        edges = np.searchsorted(shards, self._first_shards).tolist()
        for stream, (low, high) in enumerate(pairwise(edges)):
            yield stream, slice(low, high), shards[low:high] - np.int32(self._first_shards[stream])

    def first_shard(self, stream: int) -> int:
        """Return the number of a stream's first shard."""
        return self._first_shards[stream]

    def first_sample(self, stream: int) -> int:
        """Return the number of a stream's first sample."""
        return int(self._first_samples[stream])

    def split_ids(
        self, sample_ids: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return each sample's stream number, and its row number in the stream's dataset; -1 for padding."""
        stream = np.searchsorted(self._first_samples, sample_ids, side="right") - 1
        return stream, np.where(stream < 0, -1, sample_ids - self._first_samples[stream])

    def close(self) -> None:
        """Close the cache run and all datasets that no other loader is reading."""
        self.run.close()
        for dataset in self.once.datasets:
            if dataset.shards is None or not any(other.is_open for other in dataset.shards.readers):
                dataset.close()

    @cached_property
    def _shifts(self) -> npt.NDArray[np.int32]:
        """int32[streams]: for each stream, what to add to its shard numbers to get those in `once`."""
        shifts = np.zeros(len(self), dtype=np.int32)
        for number, who in enumerate(self.sharing):
            for stream in who:
                shifts[stream] = self.once.first_shard(number) - self._first_shards[stream]
        return shifts


class _Joined(Sequence[ShardInfo]):
    """A concatenation of sequences without a copy, which is large for 1,000 classes of 10,000 shards."""

    def __init__(self, parts: Sequence[Sequence[ShardInfo]]) -> None:
        self._parts = parts
        self._starts = [0, *accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, number: int) -> ShardInfo: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[ShardInfo]: ...
    def __getitem__(self, number: int | slice) -> ShardInfo | Sequence[ShardInfo]:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        number = range(len(self))[number]
        part = bisect_right(self._starts, number) - 1
        return self._parts[part][number - self._starts[part]]


@dataclass(frozen=True)
class Opened:
    """Open streams with their `Stream` objects, exclusions and token masks."""

    streams: Streams
    specs: tuple[Stream, ...]
    exclusions: tuple[Exclusions | None, ...]
    masks: tuple[TokenMask | None, ...]

    @property
    def token_mask(self) -> TokenMask | None:
        """The masked tokens of all streams, with samples numbered consecutively over streams."""
        return TokenMask.joined(self.masks, [self.streams.first_sample(n) for n in range(len(self.streams))])

    @cached_property
    def sizes(self) -> list[StreamSizes]:
        """For each stream its shard sizes, exclusions and limit, which determine a run's order."""
        found = []
        named = zip(self.streams.names, self.streams.datasets, strict=True)
        for (name, dataset), spec, excluded in zip(named, self.specs, self.exclusions, strict=True):
            sizes = dataset.stream_sizes(name, excluded)
            found.append(replace(sizes, limit=spec.limit(sizes.kept)))
        return found

    @property
    def kept(self) -> list[int]:
        """Number of samples of each stream that are not excluded."""
        return [stream.kept for stream in self.sizes]

    @property
    def limits(self) -> list[int | None]:
        """Total number of samples that each stream may deliver; None: no limit."""
        return [stream.limit for stream in self.sizes]

    def settings(
        self, config: LoaderConfig, *, seed: int = 17, shuffle: Shuffle = "window", tail: Tail = "carry"
    ) -> RunSettings:
        """Return the initial settings of a run over these streams; raise ValueError for invalid options."""
        settings = first_settings(
            self.sizes,
            seed=seed,
            shuffle=shuffle,
            tail=tail,
            lanes=config.lanes,
            window=config.window,
            schedule=self.schedule(config),
            epoch_samples=config.epoch_samples,
        )
        return settings.named([spec.name or "" for spec in self.specs])

    def epoch_samples(self, config: LoaderConfig) -> int:
        """Return the number of samples in an epoch: as configured, else all samples that are not excluded."""
        return config.epoch_samples or sum(self.kept)

    def schedule(self, config: LoaderConfig) -> Schedule | None:
        """Return the schedule of weights (None for a single stream); raise ValueError for invalid weights."""
        if len(self.streams) == 1:
            if config.schedule is not None:
                raise ValueError("schedule needs a mixture: give several streams")
            if not self.specs[0].weight:
                raise ValueError("the only stream has weight 0")
            return None
        names, kept = self.streams.names, self.kept
        entries = config.schedule or [(0, [spec.weight for spec in self.specs])]
        schedule = Schedule.of(named_weights(names, entries[0][1]))
        if entries[0][0] != 0:
            raise ValueError(f"schedule must begin at position 0, not {entries[0][0]}")
        for start, weights in entries[1:]:
            schedule = schedule.changed(start, named_weights(names, weights))
        for name, samples, weights in zip(
            names, kept, zip(*(s[1] for s in schedule.segments), strict=True), strict=True
        ):
            if any(weights) and not samples:
                raise ValueError(f"stream {name!r} has no samples, or all are excluded: leave it out")
        return schedule


def open_streams(
    dataset: str | os.PathLike[str] | Dataset | Sequence[Stream],
    config: LoaderConfig,
    processes: int,
    *,
    place: Place | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Opened:
    """Open the datasets of a loader; `processes`: number of processes that share this machine's memory.

    `place`: the process's place in a job. If the job has many nodes, this function first waits, so that the
    nodes do not all send requests at the same time.
    """
    if isinstance(dataset, (str, os.PathLike, Dataset)):
        specs: tuple[Stream, ...] = (Stream(dataset),)
    else:
        specs = tuple(dataset)
        if not specs or not all(isinstance(spec, Stream) for spec in specs):
            raise TypeError(
                "dataset must be a path, a Dataset or a list of Stream, such as [Stream(path, weight=0.7), …]"
                f", not {dataset!r:.200}"
            )
    paths = [spec.path if isinstance(spec.path, Dataset) else os.fspath(spec.path) for spec in specs]
    to_open = dict.fromkeys(path for path in paths if not isinstance(path, Dataset))
    nodes = 1 if place is None else node_count(place)
    cache = SharedCache(
        CacheOptions(
            folder=config.cache_dir,
            capacity=config.cache_bytes,
            connections=config.connections,
            processes=processes,
        ),
        FetchLimits(single_rows=first_rows(processes, nodes)),
    )
    if remote := sum(map(is_remote, to_open)):
        sleep(0.0 if place is None else start_delay(place.machine, nodes, remote))
    storage = config.storage or StorageOptions()
    # Retry at least as long as the loader waits for a batch, so that the store never fails first.
    seconds = max(storage.retry_seconds, config.timeout_seconds)
    storage = replace(storage, retry_seconds=seconds, first_contact_seconds=seconds)
    open_one = partial(
        open_dataset,
        storage=storage,
        cache=cache,
        **config.opening,
    )
    with ThreadPoolExecutor(_OPENED_AT_ONCE, thread_name_prefix="shardkit-open") as pool:
        opened = dict(zip(to_open, pool.map(open_one, to_open), strict=True))
    datasets = [path if isinstance(path, Dataset) else opened[path] for path in paths]
    _check_decode(datasets, config)
    for opened_one in datasets:
        if (kind := TRAINER_FORMATS.get(opened_one.manifest.format)) is not None:
            problem = f"holds documents for {kind.trainer}, without rows: give the length of a row"
            raise ShardError(opened_one.location, f"{problem}, sequence_length=2048")
    if config.verify:
        _require_hashes(datasets)
    exclusions = [_exclusions(spec.exclude, found) for spec, found in zip(specs, datasets, strict=True)]
    streams = Streams(datasets, _names(specs, datasets), timeout_seconds=config.timeout_seconds)
    masks = [_token_mask(spec.mask, found, config) for spec, found in zip(specs, datasets, strict=True)]
    return Opened(streams, specs, tuple(exclusions), tuple(masks))


def _check_decode(datasets: Sequence[Dataset], config: LoaderConfig) -> None:
    """Raise ValueError for a dataset that was opened with another `decode` than is given."""
    for dataset in datasets:
        if config.decode is not True and dataset.decode != config.decode:
            raise ValueError(
                f"decode={config.decode!r}, but {dataset.location} was opened with decode="
                f"{dataset.decode!r}: give the path, or open it with the same decode"
            )


def _require_hashes(datasets: Sequence[Dataset]) -> None:
    """Raise ValueError for a local dataset that has no hashes or was opened without verify=True."""
    for dataset in datasets:
        if dataset.shards is not None:
            continue
        if not dataset.verifies:
            raise ValueError(
                f"Run(verify=True), but {dataset.location} was opened without it: open it with verify=True"
            )
        if not all(info.stored.hashes or info.raw.hashes for info in dataset.manifest.shards[:1]):
            raise ValueError(
                f"Run(verify=True), but the index of {dataset.location} has no hashes: write it with "
                "hashes=['xxh64'], or copy it with `shardkit convert`"
            )


def named_weights(names: Sequence[str], weights: Weights) -> list[float | Fraction]:
    """Return weights in the order of `names`; raise ValueError for an unknown name or a wrong count."""
    if isinstance(weights, Mapping):
        if unknown := [name for name in weights if name not in names]:
            raise ValueError(f"no stream is called {unknown[0]!r}; the streams are {', '.join(names)}")
        return [weights.get(name, 0) for name in names]
    if len(weights) != len(names):
        raise ValueError(
            f"got {len(weights)} weights for {len(names)} streams ({', '.join(names)}); give one per stream"
        )
    return list(weights)


def _exclusions(excluded: ExcludedRows, dataset: Dataset) -> Exclusions | None:
    if excluded is None:
        return None
    if isinstance(excluded, (str, os.PathLike)):
        excluded = Exclusions.read(excluded)
    elif not isinstance(excluded, Exclusions):
        excluded = Exclusions.of(excluded)
    return excluded.of_dataset(dataset.location, dataset.fingerprint, dataset.manifest.shard_samples)


def _token_mask(mask: MaskedTokens, dataset: Dataset, config: LoaderConfig) -> TokenMask | None:
    if mask is None:
        return None
    if not config.labels:
        raise ValueError("mask= sets labels to -100: give labels=True or labels='shifted', too")
    if isinstance(mask, (str, os.PathLike)):
        mask = TokenMask.read(mask)
    elif not isinstance(mask, TokenMask):
        mask = TokenMask(mask)
    if mask.fingerprint not in (None, dataset.fingerprint):
        raise ValueError(
            f"the mask was made for the dataset with fingerprint {mask.fingerprint}, but {dataset.location} "
            f"has fingerprint {dataset.fingerprint}, so row numbers do not match: make a mask for it"
        )
    if dataset.sequence_length is None:
        raise ValueError(f"{dataset.location}: mask= needs token rows of one length, which it does not have")
    mask.check(len(dataset), dataset.sequence_length)
    return mask


def _names(specs: Sequence[Stream], datasets: Sequence[Dataset]) -> list[str]:
    """Return each stream's name: as given, or the last part of its path, with a number if ambiguous."""
    found = [
        spec.name or dataset.location.rstrip("/").rpartition("/")[2] or str(number)
        for number, (spec, dataset) in enumerate(zip(specs, datasets, strict=True))
    ]
    given = Counter(spec.name for spec in specs if spec.name is not None)
    if twice := [name for name, count in given.items() if count > 1]:
        raise ValueError(f"two streams are called {twice[0]!r}: give each its own name")
    counts = Counter(found)
    return [
        name if counts[name] == 1 or spec.name is not None else f"{name}#{number}"
        for number, (name, spec) in enumerate(zip(found, specs, strict=True))
    ]
