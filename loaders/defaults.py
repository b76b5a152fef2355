"""Values derived from datasets and options: the id that ends documents, row costs, the maker of batches."""

from __future__ import annotations

from shardkit.cache import CacheOptions
from shardkit.cache.shards import SharedCache
from shardkit.datasets import segments
from shardkit.datasets.row_costs import open_row_costs
from shardkit.loaders.batch import BatchMaker, TokenColumn
from shardkit.loaders.config import LoaderConfig
from shardkit.loaders.document_values import document_values
from shardkit.loaders.gather import OutputMemory
from shardkit.loaders.sources import SourceInfo
from shardkit.loaders.streams import Streams
from shardkit.order.balance import DocumentIds, WorkBalance, cost_model
from shardkit.order.token_mask import TokenMask


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


def batch_maker(
    streams: Streams,
    source: SourceInfo,
    config: LoaderConfig,
    output: OutputMemory,
    *,
    batch_size: int,
    return_ids: bool,
    mark_padding: bool = False,
    mask: TokenMask | None = None,
) -> BatchMaker:
    """Return what makes batches of the columns of `source`; arguments are as in `BatchMaker`."""
    key = source.token_key
    return BatchMaker(
        batch_size=batch_size,
        config=config,
        columns=source.columns,
        tokens=TokenColumn(
            key,
            find_eos_id(streams.once, config, key),
            source.token_dtype,
            may_be_padded(streams.once, config),
            mask,
            source.may_overflow,
        ),
        output=output,
        return_ids=return_ids,
        mark_padding=mark_padding,
        split_ids=streams.split_ids if len(streams) > 1 else None,
        values=document_values(streams, config.document_values),
    )
