"""Megatron-Bridge: a dataset provider that resumes exactly, also at another data-parallel size.

    from shardkit.loaders.integrations.megatron_bridge import ShardkitProvider

    config.dataset = ShardkitProvider(
        train="s3://bucket/data",
        seq_length=4096,
        micro_batch_size=config.train.micro_batch_size,
        global_batch_size=config.train.global_batch_size,
        options={"cache_dir": "/nvme/cache"},
    )

Megatron-Bridge saves `save_state()` of the training data in one file per data-parallel rank, and each rank
loads its own file. All files hold the same state, so a run can resume at a smaller data-parallel size without
changes. At a larger size, some ranks have no file, and Megatron-Bridge raises an error before it loads any.
In that case use `consumed_train_samples` of its train state, which is the same position, in place of files:

    config.dataset.dataloader_load = ""
    pretrain(config, forward_step, callbacks=[SeekToConsumedSamples(config.dataset)])

`shardkit.loaders.integrations.megatron` describes the micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch.distributed as dist

from shardkit.errors import naming_extras
from shardkit.loaders.config import RunOptions, Stream
from shardkit.loaders.integrations.megatron import MegatronDataIterator

with naming_extras(__name__):
    from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider
    from megatron.bridge.training.callbacks import Callback, CallbackContext


Iterators = tuple[MegatronDataIterator | None, MegatronDataIterator | None, MegatronDataIterator | None]


@dataclass(kw_only=True)
class ShardkitProvider(DatasetProvider):
    """A dataset provider of external data for Megatron-Bridge."""

    train: str | Sequence[Stream]
    """Path or URL of the training data, or the streams of a mixture."""
    valid: str | Sequence[Stream] | None = None
    test: str | Sequence[Stream] | None = None
    seq_length: int
    micro_batch_size: int
    """Must equal `config.train.micro_batch_size`."""
    global_batch_size: int
    """Must equal `config.train.global_batch_size`; the order depends on it."""
    options: RunOptions = field(default_factory=RunOptions)
    """Further arguments of `StreamingLoader`."""
    dataloader_type: Literal["single", "cyclic", "batch", "external"] | None = "external"

    def __post_init__(self) -> None:
        self.train_iterator: MegatronDataIterator | None = None  # not a field: YAML saves all fields

    def build_datasets(self, context: DatasetBuildContext) -> Iterators:
        """Make the endless train, valid and test iterators for this process's data-parallel rank."""
        assert context.pg_collection is not None
        group = context.pg_collection.dp

        def iterator(data: str | Sequence[Stream] | None) -> MegatronDataIterator | None:
            if data is None:
                return None
            return MegatronDataIterator(
                data,
                seq_length=self.seq_length,
                micro_batch_size=self.micro_batch_size,
                global_batch_size=self.global_batch_size,
                data_parallel_rank=dist.get_rank(group),
                data_parallel_size=dist.get_world_size(group),
                **self.options,
            )

        self.train_iterator = iterator(self.train)
        return self.train_iterator, iterator(self.valid), iterator(self.test)


class SeekToConsumedSamples(Callback):
    """Moves a provider's training iterator to position `consumed_train_samples` before the first step."""

    def __init__(self, provider: ShardkitProvider) -> None:
        self.provider = provider

    def on_train_start(self, context: CallbackContext) -> None:
        assert self.provider.train_iterator is not None
        self.provider.train_iterator.seek(context.state.train_state.consumed_train_samples)
