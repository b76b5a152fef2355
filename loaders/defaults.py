"""Defaults that follow from the datasets: the shuffle's lanes and window, the id that ends documents."""

from __future__ import annotations

from shardkit.datasets.dataset import MAX_RESIDENT_BYTES, Dataset
from shardkit.errors import warn_user
from shardkit.loaders.config import LoaderConfig
from shardkit.loaders.plan import BatchPlan
from shardkit.loaders.streams import Streams
from shardkit.order.order import default_lanes, default_window, rank_slice
from shardkit.order.residency import lanes_of_part
from shardkit.units import format_bytes, parse_bytes

__all__ = [
    "find_eos_id",
    "may_be_padded",
    "shuffle_sizes",
    "stream_sizes",
    "warn_of_small_cache",
    "windows_budget",
]

DEFAULT_WINDOWS_BYTES = 4 << 30  # of two windows of all lanes: what they span stays open together

MEMORY_WINDOWS_BYTES = 1 << 30  # the same where shards are kept in memory and no `cache_bytes` is given


def stream_sizes(streams: Streams, plan: BatchPlan, config: LoaderConfig, row_bytes: int) -> tuple[int, int]:
    """(lanes, window) for all streams: as configured, else what suits each of them and all together."""
    found = [shuffle_sizes(dataset, plan, config, row_bytes) for dataset in streams.once.datasets]
    lanes, window = (min(sizes) for sizes in zip(*found, strict=True))
    # Streams of one dataset visit its shards in different orders, so with many of them all shards are in use
    # whatever the window. It is divided among them only if the cache is smaller than the dataset.
    parts = sum(
        len(who) if _is_larger(dataset, config) else 1
        for dataset, who in zip(streams.once.datasets, streams.sharing, strict=True)
    )
    return lanes, config.window or max(1, window // parts)


def _is_larger(dataset: Dataset, config: LoaderConfig) -> bool:
    """Whether a dataset is larger than the cache that was given for it."""
    if dataset.shards is None or config.cache_bytes is None:
        return False
    return int(dataset.manifest.raw_bytes.clip(0).sum()) > parse_bytes(config.cache_bytes)


def shuffle_sizes(dataset: Dataset, plan: BatchPlan, config: LoaderConfig, row_bytes: int) -> tuple[int, int]:
    """(lanes, window): as configured, else from the batch over all ranks and what fits in memory.

    How ranks are spread over machines decides neither: one cache is assumed to serve all lanes.
    """
    lanes = config.lanes or default_lanes(plan.global_batch)
    budget = DEFAULT_WINDOWS_BYTES
    if dataset.shards is not None:
        budget = _cache_budget(dataset, config, lanes)
        if not dataset.shards.cache.is_shared or plan.world_size == 1:
            part = rank_slice(plan.global_batch, plan.rank, plan.world_size)
            warn_of_small_cache(dataset, config, lanes, len(lanes_of_part(plan.global_batch, lanes, part)))
    if dataset.shards is None and any(kind.compression for kind in dataset.manifest.kinds):
        # A lane keeps about three decompressed shards in memory, where a map would cost nothing.
        budget = MAX_RESIDENT_BYTES
        most = max(1, budget // (4 * max(1, int(dataset.manifest.raw_bytes.max()))))
        if config.lanes is None and lanes > most:
            lanes = default_lanes(_largest_divisor(plan.global_batch, most))
    window = config.window or default_window(lanes, row_bytes, budget)
    return lanes, window


def _cache_budget(dataset: Dataset, config: LoaderConfig, lanes: int) -> int:
    """Bytes for two windows of all lanes.

    A capacity counts only if it was given: what is free differs from one machine and moment to the next, and
    all ranks, and a run started again, must shuffle alike.
    """
    assert dataset.shards is not None
    if config.cache_bytes is None:
        return DEFAULT_WINDOWS_BYTES if dataset.shards.cache.is_shared else MEMORY_WINDOWS_BYTES
    sizes, capacity = dataset.manifest.raw_bytes.clip(0), parse_bytes(config.cache_bytes)
    if capacity >= int(sizes.sum()):
        return DEFAULT_WINDOWS_BYTES
    return windows_budget(capacity, lanes, int(sizes.max(initial=0)))


def windows_budget(capacity: int, lanes: int, shard_bytes: int) -> int:
    """Bytes for two windows of all lanes such that a cache of `capacity` bytes, less than the dataset has,
    holds them and the shards at their edges; half a shard for each window at least.
    """
    return min(DEFAULT_WINDOWS_BYTES, max(capacity - 2 * lanes * shard_bytes, lanes * shard_bytes))


def warn_of_small_cache(dataset: Dataset, config: LoaderConfig, lanes: int, served: int) -> None:
    """Warn if a cache is too small for what `served` of the lanes, which read through it, have in use."""
    assert dataset.shards is not None
    capacity = dataset.shards.cache.capacity
    sizes = dataset.manifest.raw_bytes.clip(0)
    needed = 2 * served * int(sizes.max(initial=0))  # a window begins and ends inside of shards
    if config.cache_bytes is None and config.window is None:
        needed += _cache_budget(dataset, config, lanes) * served // lanes
    needed = min(needed, int(sizes.sum()))
    if capacity < needed:
        warn_user(
            f"cache_bytes of {format_bytes(capacity)} is below {format_bytes(needed)}, what {served} "
            "lanes have in use at a time: rows will be read one by one; give more, a smaller window, "
            "fewer lanes, or smaller shards"
        )


def _largest_divisor(number: int, most: int) -> int:
    return next(divisor for divisor in range(min(number, most), 0, -1) if number % divisor == 0)


def find_eos_id(streams: Streams, config: LoaderConfig, token_key: str | None) -> int | None:
    """The id that ends documents; ValueError if something asked for needs it and nothing states it.

    Streams whose tokens mean different things are refused.
    """
    tokenizers = [None if dataset.card is None else dataset.card.tokenizer for dataset in streams.datasets]
    named = zip(tokenizers, streams.names, strict=True)
    known = {each.digest: name for each, name in named if each is not None and each.digest is not None}
    if len(known) > 1:
        raise ValueError(
            f"streams {' and '.join(map(repr, known.values()))} were made by different tokenizers: the same "
            "ids would mean different text"
        )
    if config.token_options and token_key is None:
        columns = ", ".join(column.name for column in streams.datasets[0].columns)
        raise ValueError(
            f"{' and '.join(config.token_options)} need a column of tokens of constant length: "
            f"{streams.datasets[0].location} gives none among {columns}; `shardkit convert SRC DST "
            "--sequence-length L --drop-tail` makes rows of one length of arrays that each state their own"
        )
    # Shifted labels need no id: where none is stated, no padding is known, and nothing is masked.
    needs_bounds = bool(config.document_options) or config.labels is True or config.masks_document_starts
    stated: set[int] = set()
    for dataset, tokenizer in zip(streams.datasets, tokenizers, strict=True):
        eos_id = config.eos_id if config.eos_id is not None else tokenizer and tokenizer.eos_id
        if type(eos_id) is int:
            stated.add(eos_id)
        elif needs_bounds and config.bos_id is None:
            raise ValueError(
                f"{' and '.join(config.token_options)} need the id that ends documents: {dataset.location} "
                "states none in dataset.json (tokenizer.eos_id); give eos_id=…, or bos_id=… where an id "
                "begins each document"
            )
    if len(stated) > 1:
        raise ValueError(f"streams end documents with different ids, {sorted(stated)}: give eos_id=…")
    return next(iter(stated), None)


def may_be_padded(streams: Streams, config: LoaderConfig) -> bool:
    """Whether rows may hold padding: unless the cards of all streams say that there is none."""
    cards = [dataset.card for dataset in streams.datasets]
    return config.eos_id is not None or any(card is None or card.data.get("padding") != 0 for card in cards)
