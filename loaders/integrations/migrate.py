"""Loaders from the arguments of `mosaicml-streaming` and `litdata`, and what became of each argument.

    loader, report = from_streaming(remote="s3://bucket/mds", local="/nvme/cache", shuffle=True, batch_size=8)
    print(report)  # one line for each argument, and the call of StreamingLoader that replaces this one

`from_streaming` takes the arguments of `streaming.StreamingDataset` and `StreamingDataLoader` 0.13 together,
`from_litdata` those of `litdata.StreamingDataset` and `StreamingDataLoader` 0.2.76. Neither needs to be
installed. An argument is taken over, replaced by something of ours, or not needed. One that would change
which samples are delivered, or what they hold, and has no counterpart, is refused: a ValueError says so.

An epoch has as many samples of every stream as theirs would have. Its order is ours, so a state of theirs
cannot be continued. `docs/guides/migrate.md` has the rules below as tables; a test compares them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, Unpack

from shardkit.cache import CacheOptions
from shardkit.datasets.dataset import Dataset, open_dataset
from shardkit.loaders.config import RunOptions, Stream
from shardkit.loaders.foreign_names import (
    LITDATA,
    STREAM,
    STREAM_OR_DATASET,
    STREAMING,
    Outcome,
    Rule,
)
from shardkit.loaders.loader import StreamingLoader
from shardkit.loaders.placement import find_place
from shardkit.order.mixture import Schedule
from shardkit.storage.url import is_remote

__all__ = [
    "LITDATA",
    "STREAM",
    "STREAMING",
    "Became",
    "LitdataArguments",
    "Migrated",
    "Report",
    "Rule",
    "StreamingArguments",
    "from_litdata",
    "from_streaming",
]


@dataclass(frozen=True, slots=True)
class Became:
    """What became of one argument that was given."""

    argument: str
    value: object
    outcome: Outcome
    text: str

    def __str__(self) -> str:
        return f"{self.argument}={_short(self.value)}: {self.outcome}: {self.text}"


@dataclass(frozen=True, slots=True)
class Report:
    """What became of all arguments, and the call that makes the same loader."""

    arguments: tuple[Became, ...]
    call: str

    def __str__(self) -> str:
        return "\n".join([*map(str, self.arguments), "", self.call])


class Migrated(NamedTuple):
    """A loader, and what became of the arguments that it was made from."""

    loader: StreamingLoader
    report: Report


class _DataLoaderArguments(TypedDict, total=False):
    batch_size: int | None
    drop_last: bool | None
    timeout: float
    num_workers: int
    prefetch_factor: int | None
    persistent_workers: bool
    multiprocessing_context: object
    worker_init_fn: object
    in_order: bool
    generator: object
    pin_memory: bool
    pin_memory_device: str
    sampler: object
    batch_sampler: object
    collate_fn: object
    shuffle: bool | None


class StreamingArguments(_DataLoaderArguments, total=False):
    """Of `streaming.StreamingDataset` and `StreamingDataLoader`. `streams`: theirs, or dicts of arguments."""

    remote: str | None
    local: str | None
    split: str | None
    download_retry: int
    download_timeout: float
    validate_hash: str | None
    keep_zip: bool
    streams: Sequence[object] | None
    stream_config: Mapping[str, object] | None
    stream_name: str
    shuffle_seed: int
    shuffle_algo: str
    shuffle_block_size: int | None
    num_canonical_nodes: int | None
    partition_algo: str
    cache_limit: int | str | None
    predownload: int | None
    epoch_size: int | str | None
    sampling_method: str
    sampling_granularity: int
    batching_method: str
    allow_unsafe_types: bool
    replication: int | None


class LitdataArguments(_DataLoaderArguments, total=False):
    """Of `litdata.StreamingDataset` and `StreamingDataLoader`."""

    input_dir: object
    index_path: str | None
    item_loader: object
    serializers: object
    cache_dir: object
    max_cache_size: int | float | str | None
    item_shuffle_window: int | str | None
    num_canonical_nodes: int | None
    seed: int
    subsample: float
    encryption: object
    storage_options: object
    session_options: object
    transform: object
    force_override_state_dict: bool
    max_pre_download: int
    batch_decode: int | str | bool
    window_direct_io: bool
    profile_batches: bool | int
    profile_skip_batches: int
    profile_dir: str | None
    profile_cprofile: bool


def from_streaming(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    options: RunOptions | None = None,
    **arguments: Unpack[StreamingArguments],
) -> Migrated:
    """A loader of what `streaming.StreamingDataset` and `StreamingDataLoader` with these arguments deliver.

    `rank`, `world_size` and `options` are further arguments of `StreamingLoader`. ValueError names all that
    is refused, TypeError an argument that is not theirs, ShardError a dataset that is not there.
    """
    given: dict[str, Any] = dict(arguments)
    became = _became("from_streaming", given, STREAMING)
    settings = _common_settings(given, rank, world_size)
    specs = _stream_arguments(given, became)
    paths = [_path(spec) for spec in specs]
    placed = list(zip(specs, paths, strict=True))
    if folders := [spec["local"] for spec, path in placed if is_remote(path) and "local" in spec]:
        settings["cache_dir"] = folders[0]
    if given.get("cache_limit") is not None:
        settings["cache_bytes"] = _scaled(given["cache_limit"], "kmgtp", 1024)
    if any(spec.get("validate_hash") and not is_remote(path) for spec, path in placed):
        settings["verify"] = True
    if given.get("shuffle_algo") == "naive" and settings["shuffle"] != "none":
        settings["shuffle"] = "global"
    if "shuffle_seed" in given:
        settings["seed"] = given["shuffle_seed"]
    if copies := given.get("replication"):
        place = find_place(rank, world_size)
        if place.world_size % copies:
            raise ValueError(f"replication={copies} does not divide the world size, {place.world_size}")
        settings |= {"rank": place.rank // copies, "world_size": place.world_size // copies}
    mixture = _mixture(specs, paths, given.get("epoch_size"), options)
    if mixture.epoch_samples is not None:
        settings["epoch_samples"] = mixture.epoch_samples
    if given.get("sampling_method") == "fixed" and not mixture.takes_parts:
        _decide(became, "sampling_method", "not needed")
    if given.get("batching_method") == "stratified":
        place = find_place(settings.get("rank"), settings.get("world_size"))
        block = sum(Schedule.of(mixture.weights).weights_at(0))
        if settings["batch_size"] * place.world_size % block == 0:
            _decide(became, "batching_method", "replaced")
    return _migrated(
        paths, mixture.weights, settings, became, options, allow_pickle=bool(given.get("allow_unsafe_types"))
    )


def from_litdata(
    path: str | os.PathLike[str],
    *,
    rank: int | None = None,
    world_size: int | None = None,
    options: RunOptions | None = None,
    **arguments: Unpack[LitdataArguments],
) -> Migrated:
    """A loader of what `litdata.StreamingDataset` and `StreamingDataLoader` with these arguments deliver.

    `path`: what `shardkit convert` made of `input_dir`. The rest is as of `from_streaming`.
    """
    given: dict[str, Any] = dict(arguments)
    became = _became("from_litdata", given, LITDATA)
    _refuse_chunks(path)
    settings = _common_settings(given, rank, world_size)
    if (folder := given.get("cache_dir")) is not None and is_remote(path):
        settings["cache_dir"] = getattr(folder, "path", folder)
    limit = given.get("max_cache_size")
    if limit is not None and not (isinstance(limit, float) and limit <= 1):
        settings["cache_bytes"] = _scaled(limit, "kmgtp", 1000)
    if "seed" in given:
        settings["seed"] = given["seed"]
    migrated = _migrated([os.fspath(path)], [1], settings, became, options)
    block = getattr(given.get("item_loader"), "_block_size", None)
    if block not in (None, length := migrated.loader.dataset.sequence_length):
        migrated.loader.close()
        raise ValueError(
            f"item_loader has blocks of {block} tokens, {path} has rows of {length}: convert the chunks with "
            f"`shardkit convert IN OUT --sequence-length {block} --per-file --drop-tail`"
        )
    return migrated


def _became(
    function: str, given: Mapping[str, object], rules: Mapping[str, Rule], prefix: str = ""
) -> list[Became]:
    """What becomes of each argument by its rule. TypeError for one that has none."""
    if unknown := [name for name in given if name not in rules]:
        raise TypeError(f"{function}() got an unexpected keyword argument {prefix + unknown[0]!r}")
    found = []
    for name, value in given.items():
        rule = rules[name]
        is_default = value is None or value == rule.default
        outcome = "not needed" if rule.outcome == "refused" and is_default else rule.outcome
        found.append(Became(prefix + name, value, outcome, rule.text))
    return found


def _decide(became: list[Became], argument: str, outcome: Outcome) -> None:
    """Change what became of an argument, as its value and the others make it."""
    number = next(i for i, one in enumerate(became) if one.argument == argument)
    became[number] = replace(became[number], outcome=outcome)


def _common_settings(given: Mapping[str, Any], rank: int | None, world_size: int | None) -> dict[str, Any]:
    """Arguments of the loader that both libraries have alike."""
    if given.get("batch_size", 1) is None:
        raise ValueError("batch_size=None delivers samples, not batches: iterate over open_dataset(path)")
    settings = {
        "batch_size": given.get("batch_size", 1),
        "shuffle": "window" if given.get("shuffle") else "none",
    }
    if given.get("drop_last"):
        settings["tail"] = "drop"
    if given.get("timeout"):
        settings["timeout_seconds"] = given["timeout"]
    if rank is not None or world_size is not None:
        settings |= {"rank": rank, "world_size": world_size}
    return settings


def _stream_arguments(given: Mapping[str, Any], became: list[Became]) -> list[dict[str, Any]]:
    """The arguments of each stream, with the dataset's where it has none; notes them in the report."""
    common = {name: given[name] for name in STREAM_OR_DATASET if given.get(name) is not None}
    streams = given.get("streams")
    if not streams:
        config = {n: value for n, value in (given.get("stream_config") or {}).items() if value is not None}
        became += _became("Stream", config, STREAM, "stream_config.")
        return [config | common]
    if "remote" in common or "local" in common:
        raise ValueError("give streams, or remote and local, not both")
    specs = []
    for number, stream in enumerate(streams):
        if isinstance(stream, Mapping):
            own = dict(stream)
        else:  # of theirs, which keep what was given under these names
            own = {name: getattr(stream, f"_{name}", getattr(stream, name, None)) for name in STREAM}
        own = {name: value for name, value in own.items() if value not in (None, "")}
        became += _became("Stream", own, STREAM, f"streams[{number}].")
        specs.append(common | own)
    return specs


def _path(spec: Mapping[str, Any]) -> str:
    """Where a stream's dataset is."""
    if (folder := spec.get("remote") or spec.get("local")) is None:
        raise ValueError("a stream needs remote or local")
    return "/".join(part.rstrip("/") for part in (os.fspath(folder), spec.get("split") or "") if part)


class _Mixture(NamedTuple):
    weights: Sequence[float]
    epoch_samples: int | None
    takes_parts: bool  # whether an epoch ends within a pass over some stream


def _mixture(
    specs: Sequence[Mapping[str, Any]],
    paths: Sequence[str],
    epoch_size: int | str | None,
    options: RunOptions | None,
) -> _Mixture:
    """How many samples of each stream an epoch has. ValueError for what they would refuse, too."""
    epoch = _scaled(epoch_size, "kmbt", 1000) if epoch_size else None
    is_relative = [spec.get("proportion") is not None for spec in specs]
    is_absolute = any(spec.get(name) is not None for spec in specs for name in ("repeat", "choose"))
    if any(is_relative) and (is_absolute or not all(is_relative)):
        raise ValueError("give all streams a proportion, or none of them")
    if is_absolute and epoch is not None:
        raise ValueError("repeat and choose already state the samples of an epoch: leave epoch_size out")
    if any(is_relative) and len(specs) > 1:
        return _Mixture([float(spec["proportion"]) for spec in specs], epoch, takes_parts=True)
    if len(specs) == 1 and not is_absolute and epoch is None:
        return _Mixture([1], None, takes_parts=False)
    storage = None if options is None else options.get("storage")
    sizes = [len(open_dataset(path, storage=storage)) for path in paths]
    counts = [
        floor(spec["repeat"] * size) if spec.get("repeat") is not None else int(spec.get("choose", size))
        for spec, size in zip(specs, sizes, strict=True)
    ]
    total = epoch or sum(counts)
    takes_parts = any(total * count % (sum(counts) * size) for count, size in zip(counts, sizes, strict=True))
    weights = counts if len(specs) > 1 else [1]
    return _Mixture(weights, None if total == sum(sizes) else total, takes_parts)


def _migrated(
    paths: Sequence[str],
    weights: Sequence[float],
    settings: Mapping[str, Any],
    became: Sequence[Became],
    options: RunOptions | None,
    *,
    allow_pickle: bool = False,
) -> Migrated:
    """Make the loader; ValueError if an argument is refused."""
    if refused := [one for one in became if one.outcome == "refused"]:
        raise ValueError("; ".join(map(str, refused)))
    settings = {**settings, **(options or {})}
    cache = CacheOptions(folder=settings.get("cache_dir"), capacity=settings.get("cache_bytes"))
    storage = settings.get("storage")
    sources: list[str | Dataset] = [
        open_dataset(path, allow_pickle=True, cache=cache, storage=storage) if allow_pickle else path
        for path in paths
    ]
    texts = [
        f"open_dataset({path!r}, allow_pickle=True, cache={cache!r})" if allow_pickle else repr(path)
        for path in paths
    ]
    if len(paths) == 1:
        call, loader = texts[0], StreamingLoader(sources[0], **settings)
    else:
        pairs = list(zip(texts, weights, strict=True))
        call = f"[{', '.join(f'Stream({text}, weight={weight!r})' for text, weight in pairs)}]"
        loader = StreamingLoader(
            [Stream(source, weight) for source, weight in zip(sources, weights, strict=True)], **settings
        )
    words = [call, *(f"{name}={value!r}" for name, value in settings.items())]
    return Migrated(loader, Report(tuple(became), f"StreamingLoader({', '.join(words)})"))


def _refuse_chunks(path: str | os.PathLike[str]) -> None:
    index = Path(path) / "index.json"
    if not is_remote(path) and index.is_file() and '"chunks"' in index.read_text(errors="replace")[:1000]:
        raise ValueError(
            f"{os.fspath(path)} holds litdata's chunks: run `shardkit convert` and give what it wrote"
        )


def _scaled(value: int | float | str, suffixes: str, base: int) -> int:
    """A whole number written with a suffix: "100gb" with suffixes "kmgtp", "64M" with "kmbt"."""
    if not isinstance(value, str):
        return int(value)
    text = value.strip().lower()
    if "b" not in suffixes:
        text = text.removesuffix("b")
    power = suffixes.find(text[-1:]) + 1
    return int(float(text[:-1]) * base**power) if power else int(text)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
