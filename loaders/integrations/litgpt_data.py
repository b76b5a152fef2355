"""litgpt: a `DataModule` for `litgpt pretrain`, selected on its command line without other code.

    litgpt pretrain pythia-160m \\
        --data shardkit.loaders.integrations.litgpt_data.ShardkitData \\
        --data.data_path s3://bucket/data --data.val_data_path s3://bucket/val --data.cache_dir /nvme \\
        --train.max_seq_length 2048 --resume auto

litgpt slices rows of `max_seq_length + 1` tokens into inputs and targets, so rows are stored with one token
more than the model takes. Batches are plain tensors, int64[micro_batch_size, max_seq_length + 1]. The state
is part of litgpt's checkpoint (`train_dataloader`), and a run may continue on another number of devices.
Every validation reads the same samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardkit.errors import naming_extras

with naming_extras("shardkit.loaders.integrations.litgpt_data"):
    from litgpt.data import DataModule

from shardkit.loaders.batch import Batch
from shardkit.loaders.config import RunOptions, Stream
from shardkit.loaders.pytorch import StreamingDataLoader, StreamingDataset

if TYPE_CHECKING:
    from litgpt.tokenizer import Tokenizer
    from torch import Tensor


@dataclass
class ShardkitData(DataModule):
    """Streams datasets made by `shardkit build`, or any other MDS or WebDataset of token rows."""

    data_path: str | Path | dict[str, float]
    """The training data: a folder or a URL (s3://…), or several with their weights, {path: weight}."""
    val_data_path: str | Path
    """The dataset for validation."""
    seed: int = 17
    """The seed of the sample order."""
    num_workers: int = 0
    """Number of DataLoader processes; with 0 a thread prefetches, which is faster."""
    cache_dir: str | Path | None = None
    """Folder for cached remote shards, shared by all processes of a machine."""
    cache_bytes: str | None = None
    """Maximum size of the cache, such as 500GB; default: the free disk minus a reserve."""
    usage_log: str | Path | None = None
    """Folder for logs of the samples trained on, for `shardkit audit --logs`; needs num_workers=0."""

    batch_size: int = field(init=False, repr=False, default=1)
    seq_length: int | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        super().__init__()

    def connect(
        self, tokenizer: Tokenizer | None = None, batch_size: int = 1, max_seq_length: int | None = None
    ) -> None:
        """Set `batch_size`, in sequences per device and iteration, and `max_seq_length`, in tokens."""
        self.batch_size = batch_size
        self.seq_length = None if max_seq_length is None else max_seq_length + 1

    def train_dataloader(self) -> StreamingDataLoader:
        return self._dataloader(self.data_path, {"usage_log": self.usage_log})

    def val_dataloader(self) -> StreamingDataLoader:
        """Return a loader that starts each iteration at the first sample and drops a partial last batch."""
        return self._dataloader(self.val_data_path, {"shuffle": "none", "tail": "drop", "restart": True})

    def _dataloader(self, path: str | Path | Mapping[str, float], options: RunOptions) -> StreamingDataLoader:
        streams = [Stream(*item) for item in path.items()] if isinstance(path, Mapping) else path
        common: RunOptions = {
            "seed": self.seed,
            "cache_dir": self.cache_dir,
            "cache_bytes": self.cache_bytes,
        }
        dataset = StreamingDataset(streams, batch_size=self.batch_size, **(common | options))
        return StreamingDataLoader(
            dataset, num_workers=self.num_workers, convert_fn=partial(_tokens, self.seq_length)
        )


def _tokens(length: int | None, batch: Batch) -> Tensor:
    """Return the rows of a batch; raises ValueError if they are not `length` tokens long."""
    tokens: Tensor = batch["tokens"]
    if length is not None and tokens.shape[1] != length:
        raise ValueError(
            f"litgpt needs rows of max_seq_length + 1 = {length} tokens, the dataset has rows of "
            f"{tokens.shape[1]}: pass --train.max_seq_length {tokens.shape[1] - 1}, or cut the dataset "
            f"again with `shardkit convert --sequence-length {length}`"
        )
    return tokens
