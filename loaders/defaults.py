"""Defaults that follow from the datasets: the shuffle's lanes and window, the id that ends documents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardkit.datasets.dataset import Dataset
from shardkit.errors import warn_user
from shardkit.loaders.config import LoaderConfig
from shardkit.order.order import OrderSpec, default_lanes, default_window
from shardkit.units import format_bytes

if TYPE_CHECKING:
    from shardkit.loaders.streams import Streams

__all__ = ["find_eos_id", "may_be_padded", "shuffle_sizes", "warn_of_small_cache"]


def shuffle_sizes(dataset: Dataset, config: LoaderConfig) -> tuple[int, int]:
    """(lanes, window): as configured, else what follows from the shards and samples of the dataset alone.

    Neither batch nor ranks, machines or cache take part, so that a seed and a dataset have one order.
    """
    manifest = dataset.manifest
    shards = int(np.count_nonzero(manifest.shard_samples))
    compressed = any(kind.compression for kind in manifest.kinds)
    lanes = config.lanes or default_lanes(shards, compressed=compressed)
    return lanes, config.window or default_window(len(dataset), shards, lanes)


def warn_of_small_cache(dataset: Dataset, order: OrderSpec, served: int) -> None:
    """Warn if a cache is too small for what `served` of the order's lanes, read through it, have in use."""
    assert dataset.shards is not None
    capacity = dataset.shards.cache.capacity
    sizes = dataset.manifest.raw_bytes.clip(0)
    total, largest = int(sizes.sum()), int(sizes.max(initial=0))
    # A window begins and ends inside of shards.
    window_bytes = (order.window or len(dataset)) * total // max(1, len(dataset))
    needed = min(served * (window_bytes + 2 * largest), total)
    if capacity < needed:
        warn_user(
            f"cache_bytes of {format_bytes(capacity)} is below {format_bytes(needed)}, what {served:,} "
            f"lanes have in use at a time: about {100 * (1 - capacity / needed):.0f}% of rows will be read "
            "one by one; give more, a smaller window, fewer lanes, or smaller shards"
        )


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
    finds_padding = config.labels is True and config.pad_id is None
    needs_bounds = bool(config.document_options) or finds_padding or config.masks_document_starts
    needs_bounds |= config.balance is not None
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
    if config.pad_id is not None and config.pad_id in stated:
        raise ValueError(
            "pad_id is the id that ends documents, whose padding is found without it: leave it out"
        )
    return next(iter(stated), None)


def may_be_padded(streams: Streams, config: LoaderConfig) -> bool:
    """Whether rows may hold padding: unless the cards of all streams say that there is none."""
    cards = [dataset.card for dataset in streams.datasets]
    return config.eos_id is not None or any(card is None or card.data.get("padding") != 0 for card in cards)
