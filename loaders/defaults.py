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

_SAMPLED_SHARDS, _SAMPLED_ROWS = 8, 16  # rows of each shard: where a given id should occur


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
    _check_ids(streams, config)
    # Shifted labels need no id: where none is stated, no padding is known, and nothing is masked.
    finds_padding = config.labels is True and config.pad_id is None
    needs_bounds = bool(config.document_options) or finds_padding or config.masks_document_starts
    needs_bounds |= config.balance is not None
    stated: set[int] = set()
    for dataset, tokenizer in zip(streams.datasets, tokenizers, strict=True):
        eos_id = config.eos_id if config.eos_id is not None else tokenizer and tokenizer.eos_id
        if type(eos_id) is int:
            stated.add(eos_id)
            if needs_bounds and config.eos_id is None and config.bos_id is None:
                _check_range(dataset, "the card's eos_id", eos_id)
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


def _check_ids(streams: Streams, config: LoaderConfig) -> None:
    """ValueError for a given id that no token can have; warn of a given one that no sampled row has."""
    for dataset in streams.datasets:
        for name in ("eos_id", "bos_id", "pad_id"):
            if (value := getattr(config, name)) is not None:
                _check_range(dataset, name, value)
        for name in ("eos_id", "bos_id"):  # rows need not be padded
            value = getattr(config, name)
            if value is not None and config.token_options and _never_occurs(dataset, value):
                warn_user(
                    f"{dataset.location}: none of {_SAMPLED_SHARDS * _SAMPLED_ROWS} rows or fewer that were "
                    f"looked at, all over the dataset, has {name}={value}: unless documents are far longer "
                    "than rows, it is another tokenizer's, and each row will pass for one document"
                )


def _check_range(dataset: Dataset, name: str, value: object) -> None:
    if type(value) is not int:
        raise ValueError(f"{name} must be a whole number, not {value!r:.80}")
    stored = dataset.token_dtype
    most = (1 << 63) - 1 if stored is None or stored.kind not in "iu" else int(np.iinfo(stored.name).max)
    if not 0 <= value <= most:
        kind = "a token's id" if stored is None else f"ids stored as {stored.name}"
        raise ValueError(
            f"{dataset.location}: {name}={value} cannot occur: {kind} are from 0 to {most:,}; give the id of "
            "the tokenizer that made this dataset"
        )


def _never_occurs(dataset: Dataset, value: int) -> bool:
    """Whether none of some rows, all over a local uncompressed dataset, has the id; False if not known."""
    column = dataset.token_column
    if dataset.shards is not None or dataset.verifies or column is None or not len(dataset):
        return False
    if any(kind.compression for kind in dataset.manifest.kinds):
        return False
    samples = dataset.manifest.shard_samples
    with_rows = np.flatnonzero(samples)
    chosen = np.unique(np.linspace(0, len(with_rows) - 1, _SAMPLED_SHARDS).astype(np.int64))
    for number in with_rows[chosen].tolist():
        rows = dataset.shard(number).fixed_rows(column)
        if rows is None:
            return False
        places = np.unique(np.linspace(0, len(rows) - 1, _SAMPLED_ROWS).astype(np.int64))
        if (rows[places] == value).any():
            return False
    return True


def may_be_padded(streams: Streams, config: LoaderConfig) -> bool:
    """Whether rows may hold padding: unless the cards of all streams say that there is none."""
    cards = [dataset.card for dataset in streams.datasets]
    return config.eos_id is not None or any(card is None or card.data.get("padding") != 0 for card in cards)
