"""Values derived from datasets and options: the id that ends documents, the table of row costs."""

from __future__ import annotations

from shardkit.cache import CacheOptions
from shardkit.cache.shards import SharedCache
from shardkit.datasets import segments
from shardkit.datasets.dataset import Dataset
from shardkit.datasets.row_costs import open_row_costs
from shardkit.errors import warn_user
from shardkit.loaders.config import LoaderConfig
from shardkit.loaders.streams import Streams
from shardkit.order.balance import DocumentIds, WorkBalance, cost_model
from shardkit.order.order import OrderSpec
from shardkit.units import format_bytes


def warn_of_small_cache(dataset: Dataset, order: OrderSpec, served: int) -> None:
    """Warn if the cache cannot hold the shards that `served` lanes of the order use at the same time."""
    assert dataset.shards is not None
    capacity = dataset.shards.cache.capacity
    sizes = dataset.manifest.raw_bytes.clip(0)
    total, largest = int(sizes.sum()), int(sizes.max(initial=0))
    # A window may begin and end inside a shard, so each lane may use two more shards.
    window = min(order.window or len(dataset), -(-len(dataset) // order.lanes))
    window_bytes = window * total // max(1, len(dataset))
    needed = min(served * (window_bytes + 2 * largest), total)
    if capacity < needed:
        warn_user(
            f"cache_bytes of {format_bytes(capacity)} is below {format_bytes(needed)}, which {served:,} "
            f"lanes use at a time: about {100 * (1 - capacity / needed):.0f}% of rows will be read one by "
            "one; raise cache_bytes, or use a smaller window, fewer lanes or smaller shards"
        )


def find_eos_id(streams: Streams, config: LoaderConfig, token_key: str | None) -> int | None:
    """Return the id that ends documents; raise errors as `shardkit.datasets.segments.find_eos_id` does."""
    # Shifted labels do not require an eos id: without one, no padding is found and no label is masked.
    finds_padding = config.labels is True and config.pad_id is None
    needs_bounds = bool(config.document_options) or finds_padding or config.masks_document_starts
    return segments.find_eos_id(
        streams.datasets,
        streams.names,
        config.ids,
        token_key,
        options=config.token_options,
        needs_bounds=needs_bounds or config.balance is not None,
    )


def open_work_balance(
    streams: Streams, config: LoaderConfig, world_size: int, *, processes: int = 1
) -> WorkBalance | None:
    """Return the row costs that ranks are balanced by, or None without `balance` or with only one rank.

    `processes`: number of processes that share this machine. Raises errors of `find_eos_id` and
    `open_row_costs`.
    """
    if (model := cost_model(config.balance)) is None or world_size == 1:
        return None
    key = streams.datasets[0].token_column
    eos_id = None if config.bos_id is not None else find_eos_id(streams.once, config, key)
    ids = DocumentIds(eos_id, config.bos_id, config.pad_id)
    indexes = SharedCache(CacheOptions(folder=config.cache_dir, processes=processes)).indexes(config.storage)
    return WorkBalance([open_row_costs(dataset, ids, indexes) for dataset in streams.datasets], model)


def may_be_padded(streams: Streams, config: LoaderConfig) -> bool:
    """Return False if the cards of all streams record zero padding and no eos_id is given, else True."""
    cards = [dataset.card for dataset in streams.datasets]
    return config.eos_id is not None or any(card is None or card.data.get("padding") != 0 for card in cards)
