"""Defaults that follow from the datasets: the shuffle's lanes and window, the id that ends documents."""

from __future__ import annotations

from shardkit.datasets.dataset import MAX_RESIDENT_BYTES, Dataset
from shardkit.errors import warn_user
from shardkit.loaders.config import LoaderConfig
from shardkit.loaders.plan import BatchPlan
from shardkit.loaders.streams import Streams
from shardkit.order.order import default_lanes, default_window
from shardkit.order.residency import lanes_of_part
from shardkit.units import format_bytes, parse_bytes

__all__ = ["find_eos_id", "may_be_padded", "shuffle_sizes", "stream_sizes"]

DEFAULT_WINDOWS_BYTES = 4 << 30  # of two windows of all lanes: what they span stays open together

MEMORY_WINDOWS_BYTES = 1 << 30  # the same where shards are kept in memory and no `cache_bytes` is given


def stream_sizes(
    streams: Streams, plan: BatchPlan, config: LoaderConfig, nodes: int, row_bytes: int
) -> tuple[int, int]:
    """(lanes, window) for all streams: as configured, else what suits each of them and all together."""
    found = [shuffle_sizes(dataset, plan, config, nodes, row_bytes) for dataset in streams.once.datasets]
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


def shuffle_sizes(
    dataset: Dataset, plan: BatchPlan, config: LoaderConfig, nodes: int, row_bytes: int
) -> tuple[int, int]:
    """(lanes, window): as configured, else from the batch over all ranks and what fits in memory."""
    lanes = config.lanes or default_lanes(plan.global_batch, nodes)
    budget = DEFAULT_WINDOWS_BYTES
    if dataset.shards is not None:
        caches = nodes if dataset.shards.cache.is_shared else plan.world_size
        budget = _cache_budget(dataset, config, lanes, _lanes_served(plan, lanes, caches))
    if dataset.shards is None and any(kind.compression for kind in dataset.manifest.kinds):
        # A lane keeps about three decompressed shards in memory, where a map would cost nothing.
        budget = MAX_RESIDENT_BYTES
        most = max(1, budget // (4 * max(1, int(dataset.manifest.raw_bytes.max()))))
        if config.lanes is None and lanes > most:
            lanes = default_lanes(_largest_divisor(plan.global_batch, most))
    window = config.window or default_window(lanes, row_bytes, budget)
    return lanes, window


def _lanes_served(plan: BatchPlan, lanes: int, caches: int) -> int:
    """Lanes that the ranks of one of `caches` caches read, at most."""
    batch = plan.global_batch
    parts = [slice(batch * cache // caches, batch * (cache + 1) // caches) for cache in range(caches)]
    return max(len(lanes_of_part(batch, lanes, part)) for part in parts)


def _cache_budget(dataset: Dataset, config: LoaderConfig, lanes: int, served: int) -> int:
    """Bytes for two windows of all lanes, such that a cache holds its own and the shards at their edges.

    A capacity counts only if it was given: what is free differs from one machine and moment to the next, and
    all ranks, and a run started again, must shuffle alike.
    """
    assert dataset.shards is not None
    cache, given = dataset.shards.cache, config.cache_bytes
    sizes = dataset.manifest.raw_bytes.clip(0)
    total, largest = int(sizes.sum()), int(sizes.max(initial=0))
    needed = 2 * served * largest  # a window begins and ends inside of shards
    if given is None:
        budget = DEFAULT_WINDOWS_BYTES if cache.is_shared else MEMORY_WINDOWS_BYTES
        if config.window is None:
            needed += budget * served // lanes
    elif (capacity := parse_bytes(given)) < total:
        budget = min(DEFAULT_WINDOWS_BYTES, max((capacity - needed) * lanes // served, largest * lanes))
    else:
        budget = DEFAULT_WINDOWS_BYTES
    needed = min(needed, total)
    if cache.capacity < needed:
        warn_user(
            f"cache_bytes of {format_bytes(cache.capacity)} is below {format_bytes(needed)}, what {served} "
            "lanes have in use at a time: rows will be read one by one; give more, a smaller window, "
            "fewer lanes, or smaller shards"
        )
    return budget


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
            f"{streams.datasets[0].location} gives none among {columns}"
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
